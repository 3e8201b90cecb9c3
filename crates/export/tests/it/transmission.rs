//! What the protocol promises, seen from a raw socket.

use std::sync::Arc;

use crate::common::{Client, SIZE_BYTES, Server, compact, pattern};
use vellum_nbd::proto;

#[test]
fn the_greeting_and_export_name_come_with_and_without_zeroes() {
    let server = Server::start();
    for (flags, reserved) in [(1u32, 124), (3, 0)] {
        let mut client = server.connect();
        client.receive(18);
        client.send(&flags.to_be_bytes());
        client.option(proto::OPT_EXPORT_NAME, b"");
        let answer = client.receive(10 + reserved);
        assert_eq!(answer[..8], (SIZE_BYTES as u64).to_be_bytes());
        client.assert_usable();
    }
    let mut client = server.connect();
    client.greet();
    client.option(proto::OPT_EXPORT_NAME, b"nope");
    assert!(client.is_closed());
}

#[test]
fn a_listing_tells_everything() {
    let server = Server::with(
        |export| {
            export.name = "disk".into();
            export.description = Some("a disk".into());
            export.multi_conn = true;
            export.allocation_depth = true;
        },
        |_| {},
    );
    let listing = server.list();
    let [export] = &listing.exports[..] else {
        panic!("{listing:?}")
    };
    assert_eq!(export.name, "disk");
    assert_eq!(export.description.as_deref(), Some("a disk"));
    assert_eq!(export.size_bytes, SIZE_BYTES as u64);
    assert_eq!(export.flags, 0x1ded);
    assert_eq!(export.block_sizes, Some([1, 4096, 32 << 20]));
    assert_eq!(
        export.contexts,
        [proto::CONTEXT_ALLOCATION, proto::CONTEXT_DEPTH]
    );
}

#[test]
fn many_requests_in_one_packet_are_all_answered() {
    let server = Server::start();
    let mut client = server.connect().simple();
    let requests: Vec<u8> = (0..500)
        .flat_map(|n| compact(0, proto::CMD_READ, n, n * 512, 512))
        .collect();
    let mut sender = Client {
        stream: client.stream.try_clone().expect("clone"),
    };
    let thread = std::thread::spawn(move || sender.send(&requests));
    let expected = pattern();
    let mut seen = vec![false; 500];
    for _ in 0..500 {
        let (error, cookie) = client.simple_reply();
        assert_eq!(error, 0);
        let at = cookie as usize * 512;
        assert_eq!(client.receive(512), expected[at..at + 512]);
        assert!(!std::mem::replace(&mut seen[cookie as usize], true));
    }
    thread.join().expect("send");
}

#[test]
fn writes_of_every_size_land_where_they_belong() {
    let server = Server::start();
    let mut client = server.connect().simple();
    let mut expected = pattern();
    let sizes = [
        1_usize,
        511,
        512,
        4096,
        65_535,
        65_536,
        65_537,
        1 << 20,
        3_000_001,
    ];
    let mut at = 0;
    for (cookie, len) in (1..).zip(sizes) {
        at = (at * 7 + 13) % (SIZE_BYTES - len);
        let data: Vec<u8> = (0..len).map(|n| (n * 31 + len) as u8).collect();
        let fua = if cookie % 2 == 0 {
            proto::CMD_FLAG_FUA
        } else {
            0
        };
        let mut message = compact(fua, proto::CMD_WRITE, cookie, at as u64, len as u32);
        message.extend(&data);
        client.send(&message);
        assert_eq!(client.simple_reply(), (0, cookie));
        expected[at..at + len].copy_from_slice(&data);
    }
    client.request(0, proto::CMD_WRITE_ZEROES, 50, 8192, 4096);
    assert_eq!(client.simple_reply(), (0, 50));
    expected[8192..12288].fill(0);
    client.request(proto::CMD_FLAG_FUA, proto::CMD_TRIM, 51, 16384, 4096);
    assert_eq!(client.simple_reply(), (0, 51));
    expected[16384..20480].fill(0);
    for (command, cookie) in [(proto::CMD_FLUSH, 52), (proto::CMD_CACHE, 53)] {
        client.request(0, command, cookie, 0, 0);
        assert_eq!(client.simple_reply(), (0, cookie));
    }
    client.request(0, proto::CMD_DISC, 0, 0, 0);
    assert!(client.is_closed());
    assert_eq!(server.stop().snapshot(), expected);
}

#[test]
fn structured_reads_cover_their_range() {
    let server = Server::start();
    let mut client = server.connect().structured();
    let expected = pattern();
    for (flags, len) in [(0, 512), (0, 1 << 20), (proto::CMD_FLAG_DF, 1 << 20)] {
        client.request(flags, proto::CMD_READ, 9, 4096, len);
        let mut got = vec![0; len as usize];
        let mut chunks = 0;
        loop {
            let chunk = client.chunk();
            assert_eq!(
                (chunk.kind, chunk.cookie),
                (proto::REPLY_TYPE_OFFSET_DATA, 9)
            );
            let at = u64::from_be_bytes(chunk.payload[..8].try_into().expect("eight")) as usize;
            let data = &chunk.payload[8..];
            got[at - 4096..at - 4096 + data.len()].copy_from_slice(data);
            chunks += 1;
            if chunk.is_last() {
                break;
            }
        }
        assert_eq!(got, expected[4096..4096 + len as usize]);
        assert!(flags == 0 || chunks == 1);
    }
    client.request(0, proto::CMD_READ, 10, 0, 0);
    let chunk = client.chunk();
    assert!(chunk.is_last() && chunk.kind == proto::REPLY_TYPE_NONE);
    client.request(0, proto::CMD_READ, 11, SIZE_BYTES as u64, 1);
    assert_eq!(client.chunk().error(), proto::EINVAL);
}

#[test]
fn block_status_reports_extents() {
    let server = Server::start();
    let mut client = server.connect().structured();
    client.request(0, proto::CMD_BLOCK_STATUS, 3, 4096, 1 << 20);
    let chunk = client.chunk();
    assert!(chunk.is_last());
    assert_eq!(chunk.kind, proto::REPLY_TYPE_BLOCK_STATUS);
    let mut expected = 0u32.to_be_bytes().to_vec();
    expected.extend((1u32 << 20).to_be_bytes());
    expected.extend(0u32.to_be_bytes());
    assert_eq!(chunk.payload, expected);
    client.request(0, proto::CMD_BLOCK_STATUS, 4, 4096, 0);
    assert_eq!(client.chunk().error(), proto::EINVAL);
}

#[test]
fn extended_headers_work_end_to_end() {
    let server = Server::start();
    let mut client = server.connect();
    client.greet();
    assert_eq!(
        client.ask(proto::OPT_EXTENDED_HEADERS, &[]).0,
        proto::REP_ACK
    );
    let refused = client.ask(proto::OPT_STRUCTURED_REPLY, &[]).0;
    assert_eq!(refused, proto::REP_ERR_EXT_HEADER_REQD);
    client.set_contexts(&[proto::CONTEXT_ALLOCATION]);
    client.go();
    let request = |flags: u16, command: u16, offset: u64, len: u64| {
        let mut bytes = proto::EXTENDED_REQUEST_MAGIC.to_be_bytes().to_vec();
        bytes.extend([flags.to_be_bytes(), command.to_be_bytes()].concat());
        bytes.extend([8, offset, len].map(u64::to_be_bytes).concat());
        bytes
    };
    // QEMU's client leaves out the flag that a payload follows.
    for (flags, data) in [(0, b"DATA"), (proto::CMD_FLAG_PAYLOAD_LEN, b"data")] {
        let mut write = request(flags, proto::CMD_WRITE, 512, 4);
        write.extend(data);
        client.send(&write);
        let done = (proto::REPLY_TYPE_NONE, vec![]);
        assert_eq!(extended_chunk(&mut client), done);
    }
    client.send(&request(0, proto::CMD_READ, 512, 4));
    let (kind, payload) = extended_chunk(&mut client);
    assert_eq!(
        (kind, &payload[8..]),
        (proto::REPLY_TYPE_OFFSET_DATA, &b"data"[..])
    );
    client.send(&request(0, proto::CMD_BLOCK_STATUS, 0, SIZE_BYTES as u64));
    let (kind, payload) = extended_chunk(&mut client);
    assert_eq!(
        (kind, payload.len()),
        (proto::REPLY_TYPE_BLOCK_STATUS_EXT, 8 + 16)
    );
    let mut selected = request(proto::CMD_FLAG_PAYLOAD_LEN, proto::CMD_BLOCK_STATUS, 0, 12);
    selected.extend(4096u64.to_be_bytes());
    selected.extend(0u32.to_be_bytes());
    client.send(&selected);
    let (kind, payload) = extended_chunk(&mut client);
    assert_eq!(kind, proto::REPLY_TYPE_BLOCK_STATUS_EXT);
    assert_eq!(payload[8..16], 4096u64.to_be_bytes());
    // A payload where none belongs is skipped.
    let mut odd = request(proto::CMD_FLAG_PAYLOAD_LEN, proto::CMD_READ, 0, 7);
    odd.extend([0; 7]);
    client.send(&odd);
    assert_eq!(extended_chunk(&mut client).0, proto::REPLY_TYPE_ERROR);
}

fn extended_chunk(client: &mut Client) -> (u16, Vec<u8>) {
    let header = client.receive(32);
    assert_eq!(header[..4], proto::EXTENDED_REPLY_MAGIC.to_be_bytes());
    assert_eq!(header[5], 1, "every reply here has one chunk");
    let len = u64::from_be_bytes(header[24..].try_into().expect("eight bytes"));
    (
        u16::from_be_bytes([header[6], header[7]]),
        client.receive(len as usize),
    )
}

#[test]
fn a_read_only_export_refuses_changes() {
    let server = Server::with(|export| export.read_only = true, |_| {});
    let mut client = server.connect().simple();
    let mut write = compact(0, proto::CMD_WRITE, 1, 0, 4);
    write.extend([1; 4]);
    client.send(&write);
    assert_eq!(client.simple_reply(), (proto::EPERM, 1));
    client.request(0, proto::CMD_WRITE_ZEROES, 2, 0, 4);
    assert_eq!(client.simple_reply(), (proto::EPERM, 2));
    client.assert_usable();
    assert_eq!(server.stop().snapshot(), pattern());
}

#[test]
fn the_server_ends_with_its_last_client_unless_it_is_persistent() {
    let mut server = Server::with(|_| {}, |options| options.persistent = false);
    // A client that only looks around does not count.
    server.list();
    let mut first = server.connect().simple();
    let second = server.connect().simple();
    drop(second);
    first.assert_usable();
    drop(first);
    server.join();
    assert!(!server.socket.exists(), "the socket is gone");
}

#[test]
fn a_stop_lets_running_requests_finish() {
    let server = Server::start();
    let mut client = server.connect().simple();
    client.assert_usable();
    let idle = server.connect().simple();
    let storage: Arc<_> = server.stop();
    assert!(client.is_closed());
    drop(idle);
    assert_eq!(storage.snapshot(), pattern());
}

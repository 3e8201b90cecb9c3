//! Clients that mean harm: each is answered or dropped, and nobody else notices.

use std::io;
use std::net::Shutdown;
use std::time::{Duration, Instant};

use crate::common::{Client, SIZE_BYTES, Server, compact, pattern};
use vellum_nbd::proto;

#[test]
fn requests_beyond_the_end_are_refused_and_the_connection_stays() {
    let server = Server::start();
    let mut client = server.connect().simple();
    let size = SIZE_BYTES as u64;
    for (command, error) in [
        (proto::CMD_READ, proto::EINVAL),
        (proto::CMD_TRIM, proto::EINVAL),
        (proto::CMD_WRITE_ZEROES, proto::ENOSPC),
        (proto::CMD_CACHE, proto::EINVAL),
    ] {
        for offset in [size, size - 511, u64::MAX - 100] {
            client.request(0, command, 5, offset, 512);
            assert_eq!(
                client.simple_reply(),
                (error, 5),
                "command {command} at {offset}"
            );
        }
    }
    client.request(0, proto::CMD_WRITE, 6, size - 511, 512);
    client.send(&[9; 512]);
    assert_eq!(client.simple_reply(), (proto::ENOSPC, 6));
    client.assert_usable();
    assert_eq!(server.stop().snapshot(), pattern(), "nothing was written");
}

#[test]
fn reads_and_writes_over_the_limit_are_refused_and_the_connection_stays() {
    let server = Server::start();
    let mut client = server.connect().simple();
    let long = (proto::MAX_PAYLOAD_BYTES + 1) as u32;
    client.request(0, proto::CMD_READ, 1, 0, long);
    assert_eq!(client.simple_reply(), (proto::EINVAL, 1));
    client.request(0, proto::CMD_WRITE, 2, 0, long);
    client.send(&vec![1; long as usize]);
    assert_eq!(client.simple_reply(), (proto::EINVAL, 2));
    client.assert_usable();
}

#[test]
fn an_absurdly_long_write_ends_the_connection() {
    let server = Server::start();
    let mut client = server.connect().simple();
    client.request(0, proto::CMD_WRITE, 1, 0, u32::MAX);
    assert!(client.is_closed());
    server.connect().simple().assert_usable();
}

#[test]
fn unknown_commands_and_flags_are_refused_and_the_connection_stays() {
    let server = Server::start();
    let mut client = server.connect().simple();
    client.request(0, 99, 1, 0, 0);
    assert_eq!(client.simple_reply(), (proto::EINVAL, 1));
    client.request(0x8000, proto::CMD_READ, 2, 0, 512);
    assert_eq!(client.simple_reply(), (proto::EINVAL, 2));
    client.request(proto::CMD_FLAG_DF, proto::CMD_READ, 3, 0, 512);
    assert_eq!(client.simple_reply(), (proto::EINVAL, 3));
    client.request(0, proto::CMD_BLOCK_STATUS, 4, 0, 512);
    assert_eq!(client.simple_reply(), (proto::EINVAL, 4));
    client.assert_usable();
}

#[test]
fn a_wrong_magic_ends_only_that_connection() {
    let server = Server::start();
    let mut other = server.connect().simple();
    let mut client = server.connect().simple();
    client.send(&[0xaa; 28]);
    assert!(client.is_closed());
    let mut client = server.connect();
    client.greet();
    client.send(&[0x55; 16]);
    assert!(client.is_closed());
    let mut client = server.connect();
    client.receive(18);
    client.send(&u32::MAX.to_be_bytes());
    assert!(client.is_closed());
    other.assert_usable();
}

#[test]
fn long_options_are_refused_and_absurd_ones_end_the_connection() {
    let server = Server::start();
    let mut client = server.connect();
    client.greet();
    assert_eq!(
        client.ask(proto::OPT_GO, &vec![0; 1 << 20]).0,
        proto::REP_ERR_TOO_BIG
    );
    assert_eq!(
        client.ask(proto::OPT_GO, &[0xff; 9]).0,
        proto::REP_ERR_INVALID
    );
    assert_eq!(client.ask(0xdead, b"data").0, proto::REP_ERR_UNSUP);
    assert_eq!(
        client.ask(proto::OPT_STARTTLS, &[]).0,
        proto::REP_ERR_POLICY
    );
    assert_eq!(client.ask(proto::OPT_LIST, &[1]).0, proto::REP_ERR_INVALID);
    client.go();
    client.assert_usable();

    let mut client = server.connect();
    client.greet();
    let mut header = proto::OPTION_MAGIC.to_be_bytes().to_vec();
    header.extend([0, 0, 0, 7, 0xff, 0xff, 0xff, 0xff]);
    client.send(&header);
    assert!(client.is_closed());
}

#[test]
fn a_client_that_vanishes_in_the_middle_of_a_write_writes_nothing() {
    let server = Server::start();
    for sent in [0, 1, 511, 4095, 100_000] {
        let mut client = server.connect().simple();
        client.request(0, proto::CMD_WRITE, 1, 0, 128 << 10);
        client.send(&vec![0xee; sent]);
        drop(client);
    }
    let mut client = server.connect().simple();
    client.send(&compact(0, proto::CMD_READ, 1, 0, 4096)[..20]);
    drop(client);
    server.connect().simple().assert_usable();
    assert_eq!(server.stop().snapshot(), pattern());
}

#[test]
fn a_client_that_hangs_up_still_gets_its_replies() {
    let server = Server::start();
    let mut client = server.connect().simple();
    for cookie in 0..20 {
        client.request(0, proto::CMD_READ, cookie, 0, 512);
    }
    client.stream.shutdown(Shutdown::Write).expect("shut down");
    for _ in 0..20 {
        assert_eq!(client.simple_reply().0, 0);
        client.receive(512);
    }
    assert!(client.is_closed());
}

/// The next one has its place when it was given up: otherwise it would wait for ever.
#[test]
fn a_client_that_hangs_up_and_takes_nothing_is_given_up() {
    let server = Server::with(|_| {}, |options| options.max_connections = 1);
    let mut client = server.connect().simple();
    // No more than the server reads on for, and more than sockets hold.
    for cookie in 0..2 {
        client.request(0, proto::CMD_READ, cookie, 0, SIZE_BYTES as u32);
    }
    client.stream.shutdown(Shutdown::Write).expect("shut down");
    server.connect().simple().assert_usable();
    drop(client);
}

/// Nor is it waited for where it has asked for more than the server reads on for, so that its last word is
/// not read.
#[test]
fn one_that_has_asked_for_too_much_is_given_up_too() {
    let server = Server::with(|_| {}, |options| options.max_connections = 1);
    let mut client = server.connect().simple();
    for cookie in 0..200 {
        client.request(0, proto::CMD_READ, cookie, 0, SIZE_BYTES as u32);
    }
    client.stream.shutdown(Shutdown::Write).expect("shut down");
    server.connect().simple().assert_usable();
    drop(client);
}

#[test]
fn a_client_that_does_not_read_is_not_read_from_either() {
    let server = Server::start();
    let mut greedy = server.connect().simple();
    greedy
        .stream
        .set_write_timeout(Some(Duration::from_secs(1)))
        .expect("set a timeout");
    let request = compact(0, proto::CMD_READ, 1, 0, 4 << 20);
    let mut asked = 0;
    // Far more than the window plus all socket buffers hold.
    while asked < 100_000 && std::io::Write::write_all(&mut greedy.stream, &request).is_ok() {
        asked += 1;
    }
    assert!(asked < 100_000, "the server must stop reading");
    server.connect().simple().assert_usable();
}

#[test]
fn a_slow_handshake_is_cut_off() {
    let limit = Duration::from_millis(300);
    let server = Server::with(|_| {}, |options| options.handshake_limit = Some(limit));
    let start = Instant::now();
    let mut client = server.connect();
    client.greet();
    // Drips bytes, never a whole option.
    for byte in proto::OPTION_MAGIC.to_be_bytes() {
        if std::io::Write::write_all(&mut client.stream, &[byte]).is_err() {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(client.is_closed());
    assert!(start.elapsed() >= limit);
    // Once the handshake is over there is no limit.
    let mut client = server.connect().simple();
    std::thread::sleep(2 * limit);
    client.assert_usable();
}

/// Asks for lists and takes no answer, until the server takes no more either; what ended it.
fn ask_without_listening(client: &mut Client) -> std::io::Error {
    client.greet();
    let mut option = proto::OPTION_MAGIC.to_be_bytes().to_vec();
    option.extend(proto::OPT_LIST.to_be_bytes());
    option.extend(0_u32.to_be_bytes());
    let options = option.repeat(1000);
    loop {
        if let Err(error) = std::io::Write::write_all(&mut client.stream, &options) {
            return error;
        }
    }
}

#[test]
fn a_client_that_negotiates_and_does_not_read_is_cut_off() {
    let limit = Duration::from_millis(300);
    let server = Server::with(|_| {}, |options| options.handshake_limit = Some(limit));
    let mut client = server.connect();
    let patience = Some(Duration::from_secs(10));
    client.stream.set_write_timeout(patience).expect("set");
    let error = ask_without_listening(&mut client);
    // And not that the patience is over.
    let ended = [io::ErrorKind::BrokenPipe, io::ErrorKind::ConnectionReset];
    assert!(ended.contains(&error.kind()), "{error}");
}

#[test]
fn the_end_does_not_wait_for_clients_that_negotiate() {
    let server = Server::with(|_| {}, |options| options.handshake_limit = None);
    let mut silent = server.connect();
    silent.greet();
    let mut deaf = server.connect();
    let patience = Some(Duration::from_millis(300));
    deaf.stream.set_write_timeout(patience).expect("set");
    ask_without_listening(&mut deaf);
    let start = Instant::now();
    server.stop();
    let taken = start.elapsed();
    assert!(taken < Duration::from_secs(3), "{taken:?}");
}

#[test]
fn clients_over_the_limit_wait_for_a_place() {
    let server = Server::with(|_| {}, |options| options.max_connections = 2);
    let first = server.connect().simple();
    let mut second = server.connect().simple();
    let mut third = server.connect();
    third
        .stream
        .set_read_timeout(Some(Duration::from_millis(200)))
        .expect("set a timeout");
    let greeted = std::io::Read::read(&mut third.stream, &mut [0; 18]);
    assert!(greeted.is_err(), "no place yet");
    drop(first);
    third
        .stream
        .set_read_timeout(Some(Duration::from_secs(20)))
        .expect("set a timeout");
    third.simple().assert_usable();
    second.assert_usable();
}

#[test]
fn a_flood_of_connections_harms_nobody() {
    let server = Server::with(|_| {}, |options| options.max_connections = 4);
    let mut steady = server.connect().simple();
    for round in 0..300 {
        let mut client = server.connect();
        match round % 3 {
            0 => drop(client),
            1 => client.greet(),
            _ => client.send(&[round as u8; 40]),
        }
    }
    steady.assert_usable();
    server.connect().simple().assert_usable();
}

#[test]
fn noise_in_any_phase_never_stops_the_server() {
    let server = Server::start();
    let mut random = fastrand::Rng::with_seed(0x9e37_79b9_7f4a_7c15);
    for round in 0..200 {
        let noise: Vec<u8> = (0..round * 3).map(|_| random.u8(..)).collect();
        let mut client = match round % 2 {
            0 => Client::connect(&server.socket),
            _ => server.connect().structured(),
        };
        // The server may hang up before all of it is sent.
        let _ = std::io::Write::write_all(&mut client.stream, &noise);
    }
    server.connect().simple().assert_usable();
    assert_eq!(server.stop().snapshot(), pattern());
}

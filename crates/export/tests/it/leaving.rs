//! What is done for a client ends soon after the client leaves, its export is removed or the
//! server stops: what was begun ends, and nothing else begins.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::common::{Client, Server};
use vellum::{BlockDevice, Buffer, DeviceInfo, Extent, ExtentKind, Io, RequestFlags, ZeroRequest};
use vellum_export::nbd::{Export, ServerOptions};
use vellum_io::lane;
use vellum_nbd::proto;
use vellum_storage::MemStorage;

const SIZE_BYTES: u64 = 1 << 40;
const MIB: u64 = 1 << 20;
/// What one call of block status tells of, in bytes.
const EXTENT_BYTES: u64 = 64 << 10;
/// No client has to be waited for longer, on a machine that is busy with other things too.
const SOON: Duration = Duration::from_secs(3);

/// A device that takes its time, and notes what was begun: lengths in bytes.
#[derive(Debug, Default)]
struct Slow {
    begun: Arc<Mutex<Vec<u64>>>,
    /// It works all the time that it takes, and nobody ever waits for it.
    busy: bool,
}

impl Slow {
    fn later<T: 'static>(&self, len_bytes: u64, time: Duration, value: T) -> Io<T> {
        self.begun.lock().expect("no panic").push(len_bytes);
        if self.busy {
            std::thread::sleep(time);
            return Io::ready(Ok(value));
        }
        Io::boxed(async move {
            lane::sleep(time).await;
            Ok(value)
        })
    }

    /// A GiB a second.
    fn changing(&self, len_bytes: u64) -> Io<()> {
        self.later(len_bytes, Duration::from_millis(len_bytes / MIB), ())
    }
}

impl BlockDevice for Slow {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            format: "raw",
            name: "slow".to_owned(),
            read_only: false,
            cluster_size_bytes: None,
            request_alignment_bytes: 1,
            discard_alignment_bytes: 1,
            has_zero_init: false,
            growable: false,
        }
    }
    fn size_bytes(&self) -> u64 {
        SIZE_BYTES
    }
    fn read(&self, _: u64, buffer: Buffer) -> Io<Buffer> {
        self.later(buffer.len() as u64, Duration::from_millis(2), buffer)
    }
    fn write(&self, _: u64, buffer: Buffer, _: RequestFlags) -> Io<Buffer> {
        self.later(buffer.len() as u64, Duration::from_millis(2), buffer)
    }
    fn write_zeroes(&self, _: u64, len_bytes: u64, _: ZeroRequest) -> Io<()> {
        self.changing(len_bytes)
    }
    fn discard(&self, _: u64, len_bytes: u64) -> Io<()> {
        self.changing(len_bytes)
    }
    fn flush(&self) -> Io<()> {
        self.later(0, Duration::from_millis(2), ())
    }
    fn block_status(&self, _: u64, len_bytes: u64, _: u32) -> Io<Extent> {
        let extent = Extent::new(len_bytes.min(EXTENT_BYTES), ExtentKind::Data);
        self.later(extent.len_bytes, Duration::from_millis(2), extent)
    }
    fn truncate(&self, _: u64) -> Io<()> {
        Io::ready(Ok(()))
    }
    fn close(&self) -> Io<()> {
        Io::ready(Ok(()))
    }
}

/// A server of a slow device, a client in the middle of something, and what was begun.
struct Scene {
    server: Server,
    client: Client,
    begun: Arc<Mutex<Vec<u64>>>,
}

/// Commands that would take seconds or minutes: their lengths in bytes.
const COMMANDS: &[(u16, u32)] = &[
    (proto::CMD_CACHE, 2048 << 20),
    (proto::CMD_BLOCK_STATUS, 128 << 20),
    (proto::CMD_READ, 32 << 20),
    (proto::CMD_TRIM, u32::MAX),
    (proto::CMD_WRITE_ZEROES, u32::MAX),
];

fn slow_server() -> (Server, Arc<Mutex<Vec<u64>>>) {
    let device = Slow::default();
    let begun = device.begun.clone();
    let storage = Arc::new(MemStorage::new());
    let server = Server::serving(
        storage,
        Arc::new(device),
        |_| {},
        |options| options.handshake_limit = None,
    );
    (server, begun)
}

impl Scene {
    /// Asks, and waits until some of it was begun.
    fn new(command: u16, len: u32) -> Self {
        let (server, begun) = slow_server();
        let mut client = server.connect().structured();
        client.request(0, command, 1, 0, len);
        let deadline = Instant::now() + Duration::from_secs(20);
        while begun.lock().expect("no panic").is_empty() {
            assert!(Instant::now() < deadline, "nothing begins");
            std::thread::sleep(Duration::from_millis(1));
        }
        Scene {
            server,
            client,
            begun,
        }
    }

    fn count(&self) -> usize {
        self.begun.lock().expect("no panic").len()
    }

    /// Expects that hardly anything was begun since there were `before` pieces.
    fn expect_end(&self, before: usize, command: u16, took: Duration) {
        let begun = self.begun.lock().expect("no panic").clone();
        // One may begin before the word is out, and one has begun as it comes.
        let since = begun.len().saturating_sub(before);
        assert!(
            since <= 2,
            "command {command}: {since} pieces begin afterwards"
        );
        let longest = begun.iter().max().copied().unwrap_or_default();
        assert!(
            longest <= 128 * MIB,
            "command {command}: {longest} bytes at once"
        );
        assert!(took < SOON, "command {command}: {took:?}");
    }
}

fn export_of(server: &Server) -> Arc<Export> {
    server.exports.find("").expect("an export")
}

#[test]
fn a_server_that_stops_begins_no_more_pieces() {
    for &(command, len) in COMMANDS {
        let mut scene = Scene::new(command, len);
        let (before, begun) = (scene.count(), Instant::now());
        scene.server.request_stop();
        scene.server.join();
        scene.expect_end(before, command, begun.elapsed());
    }
}

#[test]
fn an_export_that_goes_begins_no_more_pieces_and_waits_for_those_that_run() {
    for &(command, len) in COMMANDS {
        let scene = Scene::new(command, len);
        let export = export_of(&scene.server);
        let (before, begun) = (scene.count(), Instant::now());
        lane::block_on(scene.server.exports.remove(&export));
        scene.expect_end(before, command, begun.elapsed());
        assert_eq!(export.connections(), 0);
        // Nobody uses the device any more but this test.
        let after = scene.count();
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(scene.count(), after, "command {command}");
    }
}

#[test]
fn what_a_client_that_is_gone_asked_for_ends() {
    for &(command, len) in COMMANDS {
        let Scene {
            server,
            client,
            begun,
        } = Scene::new(command, len);
        let gone = Instant::now();
        drop(client);
        let export = export_of(&server);
        while export.connections() > 0 {
            assert!(gone.elapsed() < SOON, "command {command}");
            std::thread::sleep(Duration::from_millis(2));
        }
        let bytes: u64 = begun.lock().expect("no panic").iter().sum();
        assert!(bytes < u64::from(len), "command {command}: all of it");
    }
}

#[test]
fn what_a_client_that_is_gone_wanted_to_know_is_not_looked_up() {
    const READS: u64 = 64;
    let (server, begun) = slow_server();
    let mut client = server.connect().simple();
    for cookie in 0..READS {
        client.request(0, proto::CMD_READ, cookie, 0, 32 << 20);
    }
    // The server has received all of them when it hangs up.
    while begun.lock().expect("no panic").is_empty() {
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_millis(100));
    drop(client);
    let (export, gone) = (export_of(&server), Instant::now());
    while export.connections() > 0 {
        assert!(gone.elapsed() < SOON, "it works for nobody");
        std::thread::sleep(Duration::from_millis(2));
    }
    let bytes: u64 = begun.lock().expect("no panic").iter().sum();
    assert!(bytes < READS / 2 * (32 << 20), "{} MiB", bytes / MIB);
}

#[test]
fn requests_that_never_wait_leave_their_lane_to_others() {
    for &(command, len) in COMMANDS {
        let device = Slow {
            busy: true,
            ..Slow::default()
        };
        let begun = device.begun.clone();
        let one_lane = |options: &mut ServerOptions| options.max_lanes = 1;
        let storage = Arc::new(MemStorage::new());
        let mut server = Server::serving(storage, Arc::new(device), |_| {}, one_lane);
        let mut client = server.connect().structured();
        for cookie in 0..3 {
            client.request(0, command, cookie, 0, len);
        }
        let deadline = Instant::now() + Duration::from_secs(20);
        while begun.lock().expect("no panic").is_empty() {
            assert!(Instant::now() < deadline, "nothing begins");
            std::thread::sleep(Duration::from_millis(1));
        }
        let asked = Instant::now();
        server.request_stop();
        server.join();
        let took = asked.elapsed();
        assert!(took < SOON, "command {command}: {took:?}");
    }
}

#[test]
fn block_status_of_a_slow_disk_answers_with_what_it_has() {
    let (server, _) = slow_server();
    let mut client = server.connect().structured();
    client.request(0, proto::CMD_BLOCK_STATUS, 1, 0, 1 << 31);
    let begun = Instant::now();
    let chunk = client.chunk();
    assert!(begun.elapsed() < SOON);
    let len = u32::from_be_bytes(chunk.payload[4..8].try_into().expect("four bytes"));
    assert!(chunk.is_last() && len > 0 && len < 1 << 31, "{chunk:?}");
}

#[test]
fn clients_that_receive_nothing_hold_nobody_up() {
    let (server, _) = slow_server();
    let mut client = server.connect().simple();
    for cookie in 0..40 {
        client.request(0, proto::CMD_READ, cookie, 0, 1 << 20);
    }
    std::thread::sleep(Duration::from_millis(100));
    let export = export_of(&server);
    let begun = Instant::now();
    lane::block_on(server.exports.remove(&export));
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
}

#[test]
fn handshakes_that_stall_hold_no_end_up() {
    let (mut server, _) = slow_server();
    // One that says nothing, one in the middle of an option, one that takes no answers.
    let silent = server.connect();
    let mut halfway = server.connect();
    halfway.greet();
    halfway.send(&proto::OPTION_MAGIC.to_be_bytes());
    for number in 0..3000 {
        let name = format!("{number:0>1000}");
        server
            .exports
            .add(Export::new(name, Arc::new(Slow::default())));
    }
    let mut deaf = server.connect();
    deaf.greet();
    for _ in 0..4 {
        deaf.option(proto::OPT_LIST, &[]);
    }
    std::thread::sleep(Duration::from_millis(100));
    let begun = Instant::now();
    server.request_stop();
    server.join();
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
    drop((silent, halfway, deaf));
}

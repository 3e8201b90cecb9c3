//! How fast: over 20 ms and 1 Gbit/s, beside the real qemu-img with its curl driver.

use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use vellum_testing::Said;

use super::Place;
use super::secure::secure_nginx;
use super::server::Nginx;

/// One way.
const DELAY: Duration = Duration::from_millis(10);
const BYTES_PER_SECOND: f64 = 125e6;
const CHUNK_BYTES: usize = 16 << 10;
/// What is on its way at most, of one connection: a window of 4 MiB.
const ON_THE_WAY: usize = (4 << 20) / CHUNK_BYTES;

/// A link that all connections share: when the next byte may be sent.
struct Link(Mutex<Instant>);

impl Link {
    fn pass(&self, len: usize) {
        let time = {
            let mut free = self.0.lock().expect("nobody panics with it");
            let start = (*free).max(Instant::now());
            *free = start + Duration::from_secs_f64(len as f64 / BYTES_PER_SECOND);
            *free
        };
        thread::sleep(time.saturating_duration_since(Instant::now()));
    }
}

/// Leads bytes on after the delay; those from the server share the link.
fn pump(mut from: TcpStream, mut to: TcpStream, link: Option<Arc<Link>>) {
    let (send, receive) = sync_channel::<(Instant, Vec<u8>)>(ON_THE_WAY);
    thread::spawn(move || {
        for (time, bytes) in receive {
            thread::sleep(time.saturating_duration_since(Instant::now()));
            if to.write_all(&bytes).is_err() {
                return;
            }
        }
        // The other side may be gone.
        let _ = to.shutdown(Shutdown::Write);
    });
    let mut bytes = vec![0; CHUNK_BYTES];
    while let Ok(len @ 1..) = from.read(&mut bytes) {
        if let Some(link) = &link {
            link.pass(len);
        }
        if send
            .send((Instant::now() + DELAY, bytes[..len].to_vec()))
            .is_err()
        {
            return;
        }
    }
}

/// A port whose connections lead to another one, far away.
fn far_away(port: u16) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let own = listener.local_addr().expect("an address").port();
    let link = Arc::new(Link(Mutex::new(Instant::now())));
    thread::spawn(move || {
        for here in listener.incoming().flatten() {
            let Ok(there) = TcpStream::connect(("127.0.0.1", port)) else {
                continue;
            };
            for stream in [&here, &there] {
                stream.set_nodelay(true).expect("a connection");
            }
            let clone = |stream: &TcpStream| stream.try_clone().expect("a connection");
            let (to, from) = (clone(&there), clone(&here));
            thread::spawn(move || pump(from, to, None));
            let link = link.clone();
            thread::spawn(move || pump(there, here, Some(link)));
        }
    });
    own
}

/// The best of `rounds` in seconds.
fn seconds(rounds: usize, mut run: impl FnMut()) -> f64 {
    let times = (0..rounds).map(|_| {
        let begun = Instant::now();
        run();
        begun.elapsed().as_secs_f64()
    });
    times.fold(f64::INFINITY, f64::min)
}

fn convert(program: &Path, words: &[&str]) {
    let mut command = Command::new(program);
    command.arg("convert");
    if program == Path::new("qemu-img") {
        // With several requests at once it waits for ever (QEMU 10.0.2).
        command.args(["-m", "1"]);
    }
    let done = Said::of(command.args(words));
    assert!((done.code == Some(0)), "{}", done.err);
}

/// The image that is converted, by its name where a server has it, and on this host.
struct Source<'a> {
    format: &'a str,
    url: String,
    path: String,
}

impl Source<'_> {
    /// The words that name it on the server.
    fn far(&self) -> [String; 2] {
        let (protocol, _) = self.url.split_once(':').expect("a URL");
        let options = format!(
            "driver={},file.driver={protocol},file.url={}",
            self.format, self.url
        );
        let more = match protocol {
            "https" => ",file.sslverify=off",
            _ => "",
        };
        ["--image-opts".to_owned(), options + more]
    }

    /// How long it takes from there with a program, in seconds.
    fn seconds_from_far(&self, rounds: usize, program: &Path, to: &str, target: &str) -> f64 {
        let far = self.far();
        let words = [&far[0], "-O", to, &far[1], target];
        seconds(rounds, || convert(program, &words))
    }

    /// How long it takes from this host.
    fn seconds_from_here(&self, rounds: usize, program: &Path, to: &str, target: &str) -> f64 {
        let words = ["-f", self.format, "-O", to, &self.path, target];
        seconds(rounds, || convert(program, &words))
    }
}

/// `VELLUM_BIN`: an optimised program. `VELLUM_ALONE`: without qemu-img. `VELLUM_HTTPS`: by TLS.
/// `VELLUM_MIB`: how long the disk is.
#[test]
#[ignore = "measures; run it alone"]
fn conversions_from_far_away() {
    let place = Place::with_www();
    let mut random = fastrand::Rng::with_seed(1);
    let mib = std::env::var("VELLUM_MIB").ok();
    let mib: usize = mib.map_or(256, |text| text.parse().expect("a number"));
    let mut bytes = vec![0; mib << 20];
    for piece in bytes.chunks_mut(1 << 20) {
        // Half of it can be packed.
        random.fill(&mut piece[..512 << 10]);
    }
    place.write("www/disk.raw", &bytes);
    let file = |name: &str| place.path(name).display().to_string();
    let (raw, qcow2, packed) = (
        file("www/disk.raw"),
        file("www/disk.qcow2"),
        file("www/packed.qcow2"),
    );
    let theirs = Path::new("qemu-img");
    convert(theirs, &["-f", "raw", "-O", "qcow2", &raw, &qcow2]);
    convert(theirs, &["-c", "-f", "raw", "-O", "qcow2", &raw, &packed]);
    let program = std::env::var("VELLUM_BIN");
    let program = program.unwrap_or_else(|_| env!("CARGO_BIN_EXE_vellum").to_owned());
    let ours = place.path("qemu-img");
    std::os::unix::fs::symlink(program, &ours).expect("a link");
    let is_secure = std::env::var_os("VELLUM_HTTPS").is_some();
    let (protocol, nginx) = match is_secure {
        true => ("https", secure_nginx(&place, "")),
        false => ("http", Nginx::start(&place, "")),
    };
    let port = far_away(nginx.port);
    let target = file("target");
    println!("| from | to | file | ours | of the link | local | qemu-img |");
    for (format, name) in [
        ("raw", "disk.raw"),
        ("qcow2", "disk.qcow2"),
        ("qcow2", "packed.qcow2"),
    ] {
        let len = fs::metadata(place.path("www").join(name))
            .expect(name)
            .len() as f64;
        let source = Source {
            format,
            url: format!("{protocol}://127.0.0.1:{port}/{name}"),
            path: file(&format!("www/{name}")),
        };
        for to in ["raw", "qcow2"] {
            let far = source.seconds_from_far(3, &ours, to, &target);
            let local = source.seconds_from_here(3, &ours, to, &target);
            // It takes most of the time.
            let real = match std::env::var_os("VELLUM_ALONE") {
                Some(_) => f64::NAN,
                None => source.seconds_from_far(1, theirs, to, &target),
            };
            let link = len / BYTES_PER_SECOND;
            println!(
                "| {name} | {to} | {:.0} MiB | {far:.2} s | {link:.2} s | {local:.2} s | {real:.2} s |",
                len / f64::from(1 << 20)
            );
        }
    }
}

//! The corpora of the fuzz targets `nbd_server` and `nbd_client` without a fuzzer: every
//! session, the same cut short and with bytes changed, and sessions of random bytes that are
//! the same every time. `SESSIONS` sets how many of these (for long runs).

#[path = "../../../../fuzz/src/nbd_client.rs"]
mod nbd_client;
#[path = "../../../../fuzz/src/nbd_server.rs"]
mod nbd_server;

use std::fs;
use std::path::Path;

/// Random sessions where nothing else is said: few enough for seconds.
const DEFAULT_SESSIONS: u64 = 150;
/// Most bytes of a random session.
const MOST_BYTES: u64 = 120;

fn corpus(name: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus");
    let entries = fs::read_dir(folder.join(name)).expect("read the corpus");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let mut paths: Vec<_> = paths.collect();
    paths.sort();
    assert!(!paths.is_empty(), "the corpus is empty");
    let read = |path| fs::read(path).expect("read an input");
    paths.into_iter().map(read).collect()
}

fn replay(name: &str, check: fn(&[u8])) {
    let inputs = corpus(name);
    let sessions = match std::env::var("SESSIONS") {
        Ok(text) => text.parse().expect("a number of sessions"),
        Err(_) => DEFAULT_SESSIONS,
    };
    inputs.iter().for_each(|input| check(input));
    let mut random = fastrand::Rng::with_seed(2026);
    for number in 0..sessions {
        let base = &inputs[random.usize(..inputs.len())];
        let mut session = base.clone();
        match number % 3 {
            0 => session.truncate(random.usize(..=base.len())),
            1 => {
                for _ in 0..random.u32(1..=4) {
                    let at = random.usize(..base.len().max(1));
                    if let Some(byte) = session.get_mut(at) {
                        *byte = random.u8(..);
                    }
                }
            }
            _ => {
                let len = random.u64(..MOST_BYTES);
                session.extend((0..len).map(|_| random.u8(..)));
            }
        }
        check(&session);
    }
}

#[test]
fn a_server_outlives_every_session() {
    replay("nbd_server", nbd_server::check_nbd_server);
}

#[test]
fn a_client_outlives_every_session() {
    replay("nbd_client", nbd_client::check_nbd_client);
}

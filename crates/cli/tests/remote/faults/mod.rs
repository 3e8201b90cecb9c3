//! An object store that breaks off, is busy, slow or silent, lies, and takes keys back, before and after
//! it has done what it was asked: reads, uploads of parts, and what repositories put there.

mod proxy;
mod pushes;
mod reads;
mod uploads;

use std::collections::HashMap;
use std::fs;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread;

use vellum_testing::Said;

use super::gateway::Gateway;
use super::place::Place;
use proxy::{Asked, Fault, Proxy};

/// A store behind a proxy, with `images/disk.raw` in it, which is `www/disk.raw`.
struct Faulty {
    place: Arc<Place>,
    proxy: Proxy,
    gateway: Arc<Gateway>,
}

/// What makes a request fail that may succeed if it is made again.
const PASSING: [Fault; 6] = [
    Fault::Reset,
    Fault::LostAnswer,
    Fault::Refused(503, "SlowDown"),
    Fault::Refused(500, "InternalError"),
    Fault::Silence,
    Fault::Slow,
];

/// Keys that are not good any more, as stores say it, and what the user is told to look at.
const EXPIRED: [(u16, &str, &str); 4] = [
    (
        400,
        "ExpiredToken",
        "check the keys, and that they have not expired",
    ),
    (
        403,
        "ExpiredToken",
        "check the keys, and that they have not expired",
    ),
    (
        403,
        "InvalidAccessKeyId",
        "check the keys, and that they have not expired",
    ),
    (403, "RequestTimeTooSkewed", "set this machine's clock"),
];

impl Faulty {
    fn new() -> Self {
        let place = Place::with_disk();
        let gateway = Gateway::start(&place);
        let raw = [
            "convert",
            "-O",
            "raw",
            "www/disk.qcow2",
            "s3://images/disk.raw",
        ];
        place.fine(&gateway, &raw);
        let proxy = Proxy::start(&gateway);
        Faulty {
            place: Arc::new(place),
            proxy,
            gateway: Arc::new(gateway),
        }
    }

    /// What waits for servers most of its time, at once: each case has a proxy of its own before the same
    /// store, and a number.
    fn side_by_side<T: Sync>(&self, cases: &[T], test: impl Fn(&Faulty, usize, &T) + Sync) {
        let test = &test;
        thread::scope(|scope| {
            for (number, case) in cases.iter().enumerate() {
                let faulty = Faulty {
                    place: self.place.clone(),
                    proxy: Proxy::start(&self.gateway),
                    gateway: self.gateway.clone(),
                };
                scope.spawn(move || test(&faulty, number, case));
            }
        });
    }

    /// The node of an object; a server is given up soon.
    fn object(&self, key: &str) -> String {
        self.object_within(key, 2)
    }

    /// The same, of a store that may be silent for so many seconds.
    fn object_within(&self, key: &str, seconds: u32) -> String {
        let endpoint = self.proxy.endpoint();
        format!(
            r#"json:{{"driver":"s3","url":"s3://images/{key}","endpoint":"{endpoint}","timeout":{seconds}}}"#
        )
    }

    /// The image that an object is.
    fn raw(&self, key: &str) -> String {
        let object = self.object(key);
        let object = object.strip_prefix("json:").expect("a node");
        format!(r#"json:{{"driver":"raw","file":{object}}}"#)
    }

    fn run(&self, words: &[&str]) -> Said {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vellum"));
        command.args(words).envs(self.proxy.environment());
        Said::of(command.current_dir(self.place.root()))
    }

    fn good(&self, words: &[&str], about: impl std::fmt::Debug) -> String {
        let said = self.run(words);
        assert_eq!(said.code, Some(0), "{about:?}: {words:?}: {}", said.err);
        said.out
    }

    /// Refused with these words, and little beside them.
    fn refused(&self, words: &[&str], message: &str, about: impl std::fmt::Debug) {
        let said = self.run(words);
        assert_eq!(said.code, Some(1), "{about:?}: {words:?}: {}", said.out);
        assert!(said.err.contains(message), "{about:?}: {}", said.err);
        assert!(said.err.lines().count() <= 3, "{about:?}: {}", said.err);
    }

    /// Whether the store has exactly the bytes of a file as an object.
    fn has(&self, key: &str, file: &str) -> bool {
        let read = |name: &str| fs::read(self.place.path(name)).expect(name);
        read(&format!("store/images/{key}")) == read(file)
    }

    /// How many requests of a kind there were.
    fn count(&self, kind: impl Fn(&Asked) -> bool) -> usize {
        self.proxy
            .asked()
            .iter()
            .filter(|asked| kind(asked))
            .count()
    }
}

/// This fault for the first try of each request of a kind, so many times at most.
fn first_tries(
    fault: Fault,
    kind: impl Fn(&Asked) -> bool + Send + Sync + 'static,
    most: usize,
) -> impl Fn(&Asked) -> Fault + Send + Sync + 'static {
    let seen: Mutex<HashMap<String, usize>> = Mutex::default();
    move |asked| {
        let mut seen = seen.lock().expect("a list");
        let is_first = seen.len() < most && !seen.contains_key(&asked.path);
        match kind(asked) && is_first {
            true => {
                seen.insert(asked.path.clone(), asked.number);
                fault
            }
            false => Fault::Nothing,
        }
    }
}

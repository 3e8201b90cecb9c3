//! Repositories in a store that fails: what is put there on a condition above all.

use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::Value;

use super::proxy::{Asked, Fault};
use super::{EXPIRED, Faulty, PASSING, first_tries};

impl Faulty {
    /// A repository of its own, and a tag in it.
    fn disk(&self, repository: &str) -> String {
        self.disk_within(repository, 2)
    }

    /// The same, of a store that may be silent for so many seconds.
    fn disk_within(&self, repository: &str, seconds: u32) -> String {
        let endpoint = self.proxy.endpoint();
        format!(
            r#"json:{{"driver":"repository","url":"s3://images/{repository}","tag":"vm","endpoint":"{endpoint}","timeout":{seconds}}}"#
        )
    }

    fn json(&self, words: &[&str], about: impl std::fmt::Debug) -> Value {
        let out = self.good(&[words, &["--output", "json"]].concat(), about);
        serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out}"))
    }

    /// The store is well again: the disk is there, once, and all of it.
    fn expect_whole(&self, repository: &str, number: u64) {
        self.proxy.decide(|_| Fault::Nothing);
        // It may have much else to do.
        let disk = self.disk_within(repository, 20);
        let place = disk.replace(r#""tag":"vm","#, "");
        let listed = self.json(&["repo", "list", &place], repository);
        let numbers: Vec<_> = listed.as_array().expect("a list").iter().collect();
        assert_eq!(numbers.len() as u64, number, "{listed}");
        let found = self.json(&["repo", "verify", "--read-data", &place], repository);
        assert_eq!(found["problems"], Value::Array(Vec::new()), "{found}");
        let node = disk.strip_prefix("json:").expect("a node");
        let image = format!(r#"json:{{"driver":"raw","file":{node}}}"#);
        let compare = ["compare", "-F", "raw", &image, "www/disk.raw"];
        self.good(&compare, repository);
    }
}

/// A disk's name is put on the condition that it is new.
fn names_a_disk(asked: &Asked) -> bool {
    asked.is_new && asked.path.contains("/tags/")
}

/// Whether a request is of some kind.
type IsOfKind = fn(&Asked) -> bool;

#[test]
fn a_push_goes_on_after_faults_of_any_request() {
    let kinds: [(&str, IsOfKind); 5] = [
        ("names", names_a_disk),
        ("new", |asked| asked.is_new),
        ("puts", |asked| asked.method == "PUT" && !asked.is_new),
        ("lists", |asked| {
            asked.method == "GET" && asked.path.contains("list-type")
        }),
        ("reads", Asked::is_read),
    ];
    Faulty::new().side_by_side(&kinds, |faulty, _, &(kind, is_kind)| {
        for (number, fault) in PASSING.into_iter().enumerate() {
            // Nothing but a read takes long to come.
            if fault == Fault::Slow && kind != "reads" {
                continue;
            }
            let repository = format!("{kind}{number}");
            // The others are served, too.
            let disk = faulty.disk_within(&repository, 3);
            faulty.proxy.decide(first_tries(fault, is_kind, 3));
            let pushed = faulty.json(&["push", "www/disk.raw", &disk], (kind, fault));
            assert_eq!(pushed["number"], 1, "{kind}: {fault:?}");
            assert!(faulty.count(is_kind) > 0, "{kind}: {fault:?}");
            faulty.expect_whole(&repository, 1);
        }
    });
}

/// Amazon says so of a key that somebody else is just putting or removing: it is no answer to the condition.
#[test]
fn a_conflict_is_asked_again() {
    let faulty = Faulty::new();
    let disk = faulty.disk("conflict");
    let conflict = Fault::Refused(409, "ConditionalRequestConflict");
    faulty
        .proxy
        .decide(first_tries(conflict, |asked| asked.is_new, 9));
    let pushed = faulty.json(&["push", "www/disk.raw", &disk], "conflict");
    assert_eq!(pushed["number"], 1);
    faulty.expect_whole("conflict", 1);
    faulty.proxy.decide(move |asked| match names_a_disk(asked) {
        true => conflict,
        false => Fault::Nothing,
    });
    faulty.refused(
        &["push", "www/disk.raw", &disk],
        "ConditionalRequestConflict",
        "for good",
    );
    faulty.expect_whole("conflict", 1);
}

#[test]
fn a_push_that_fails_leaves_no_disk() {
    let faulty = Faulty::new();
    let disk = faulty.disk("r");
    let push = ["push", "www/disk.raw", &disk];
    faulty.good(&push, "the first one");
    for (fault, message) in [
        (
            Fault::Refused(503, "SlowDown"),
            "the store is busy (503); try again later",
        ),
        (
            Fault::Refused(412, "PreconditionFailed"),
            "another push to 'vm' has come first",
        ),
    ] {
        faulty.proxy.decide(move |asked| match names_a_disk(asked) {
            true => fault,
            false => Fault::Nothing,
        });
        faulty.refused(&push, message, fault);
        faulty.expect_whole("r", 1);
    }
    for (status, code, message) in EXPIRED {
        // In the middle, wherever that is.
        for fine in [0, 3, 7] {
            faulty.proxy.decide(move |asked| match asked.number < fine {
                true => Fault::Nothing,
                false => Fault::Refused(status, code),
            });
            faulty.refused(&push, message, (code, fine));
            faulty.expect_whole("r", 1);
        }
    }
    // Once the keys are good again, so is the push.
    let pushed = faulty.json(&push, "the last one");
    assert_eq!(pushed["number"], 2);
    faulty.expect_whole("r", 2);
}

/// Pushes and pulls of a store in which any request may fail in any way: each of them does what it is
/// to do, or says that it has not; once the store is well again, all is.
fn play(faulty: &Faulty, seed: u64) {
    let repository = format!("random{seed}");
    let back = format!("back{seed}");
    let disk = faulty.disk(&repository);
    let per_cent = fastrand::Rng::with_seed(seed).u32(3..25);
    let total = std::sync::Arc::new(AtomicUsize::new(0));
    let (mut pushed, mut failed) = (0, 0);
    for round in 0..4 {
        let number = total.clone();
        faulty.proxy.decide(move |asked| {
            let number = number.fetch_add(1, Ordering::SeqCst) as u64;
            let mut random = fastrand::Rng::with_seed(seed << 32 | number);
            if random.u32(0..100) >= per_cent {
                return Fault::Nothing;
            }
            match random.u8(0..8) {
                0 => Fault::Reset,
                1 | 2 => Fault::LostAnswer,
                3 => Fault::Refused(503, "SlowDown"),
                4 => Fault::Refused(500, "InternalError"),
                5 if asked.is_read() => Fault::Short(random.usize(0..100_000)),
                6 if asked.is_new => Fault::Refused(409, "ConditionalRequestConflict"),
                7 if random.bool() => Fault::Silence,
                _ => Fault::Nothing,
            }
        });
        let said = faulty.run(&["push", "www/disk.raw", &disk]);
        match said.code {
            Some(0) => pushed += 1,
            _ => failed += 1,
        }
        if faulty.run(&["pull", "-O", "raw", &disk, &back]).code == Some(0) {
            assert!(pushed > 0, "seed {seed}, round {round}");
            faulty.place.assert_equal(&back, "www/disk.raw");
        }
        let _ = std::fs::remove_file(faulty.place.path(&back));
    }
    faulty.proxy.decide(|_| Fault::Nothing);
    let disk = faulty.disk_within(&repository, 20);
    let last = faulty.json(&["push", "www/disk.raw", &disk], seed);
    let last = last["number"].as_u64().expect("a number");
    // One that was told to have failed may be there, or its number is not used again.
    assert!(
        (pushed + 1..=pushed + failed + 1).contains(&last),
        "seed {seed}: {last}"
    );
    let place = disk.replace(r#""tag":"vm","#, "");
    let found = faulty.json(&["repo", "verify", "--read-data", &place], seed);
    assert_eq!(
        found["problems"],
        Value::Array(Vec::new()),
        "seed {seed}: {found}"
    );
    faulty.good(&["pull", "-O", "raw", &disk, &back], seed);
    faulty.place.assert_equal(&back, "www/disk.raw");
    let _ = std::fs::remove_file(faulty.place.path(&back));
}

#[test]
fn random_faults_lose_no_disk() {
    Faulty::new().side_by_side(&[0, 1, 2], |faulty, _, &seed| play(faulty, seed));
}

/// As many as `VELLUM_SEEDS` says.
#[test]
#[ignore = "takes as long as it is told"]
fn many_random_faults_lose_no_disk() {
    let seeds = std::env::var("VELLUM_SEEDS").ok();
    let seeds = seeds.map_or(100, |text| text.parse().expect("a number"));
    let faulty = Faulty::new();
    for seed in 0..seeds {
        play(&faulty, 1000 + seed);
    }
}

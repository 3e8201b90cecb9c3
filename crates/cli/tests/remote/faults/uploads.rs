//! Whole images that are put into a store that fails: of several parts, and of one request.

use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::proxy::{Asked, Fault};
use super::{EXPIRED, Faulty, PASSING, first_tries};

/// Which request of an upload of parts fails.
type Step = (&'static str, fn(&Asked) -> bool);

const STEPS: [Step; 3] = [
    ("begin", Asked::is_begin),
    ("part", Asked::is_part),
    ("end", Asked::is_end),
];

/// Random bytes, so that nothing of one is like another one's.
fn write_random(faulty: &Faulty, name: &str, seed: u64, len: usize) {
    let mut bytes = vec![0; len];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    fs::write(faulty.place.path(name), bytes).expect("a file");
}

/// Puts a file there.
fn put<'a>(file: &'a str, target: &'a str) -> [&'a str; 8] {
    ["convert", "-q", "-f", "raw", "-O", "raw", file, target]
}

#[test]
fn what_fails_for_a_while_is_tried_again() {
    Faulty::new().side_by_side(&STEPS, |faulty, number, &(step, kind)| {
        let file = format!("new{number}");
        let key = format!("{file}.raw");
        let target = faulty.object(&key);
        let inside = [
            Fault::ErrorInside("InternalError"),
            Fault::ErrorInside("SlowDown"),
        ];
        let inside = inside.into_iter().filter(|_| step == "end");
        for (more, fault) in (0..).zip(PASSING.into_iter().chain(inside)) {
            write_random(faulty, &file, 100 * number as u64 + more, 20 << 20);
            faulty.proxy.decide(first_tries(fault, kind, 2));
            faulty.good(&put(&file, &target), (step, fault));
            assert!(faulty.has(&key, &file), "{step}: {fault:?}");
            assert!(faulty.count(kind) > 1, "{step}: {fault:?}");
        }
    });
}

#[test]
fn a_put_that_fails_for_a_while_is_tried_again() {
    let faulty = Faulty::new();
    let target = faulty.object("new.raw");
    let is_put = |asked: &Asked| asked.method == "PUT";
    for (seed, fault) in (50..).zip(PASSING) {
        // Its answer has nothing in it that could be slow.
        if fault == Fault::Slow {
            continue;
        }
        write_random(&faulty, "new", seed, 1 << 20);
        faulty.proxy.decide(first_tries(fault, is_put, 1));
        faulty.good(&put("new", &target), fault);
        assert!(faulty.has("new.raw", "new"), "{fault:?}");
        assert_eq!(faulty.count(is_put), 2, "{fault:?}");
    }
}

/// A line that is slower than that is no silence.
#[test]
fn parts_may_take_longer_to_be_sent_than_a_server_may_be_silent() {
    let faulty = Faulty::new();
    let target = faulty.object("new.raw");
    for len in [20 << 20, 6 << 20] {
        write_random(&faulty, "new", len as u64, len);
        let is_put = |asked: &Asked| asked.method == "PUT";
        faulty.proxy.decide(move |asked| match is_put(asked) {
            true => Fault::SlowTake,
            false => Fault::Nothing,
        });
        faulty.good(&put("new", &target), len);
        assert!(faulty.has("new.raw", "new"), "{len}");
        assert_eq!(
            faulty.count(is_put),
            len.div_ceil(8 << 20),
            "each went once"
        );
    }
}

#[test]
fn what_fails_for_good_changes_nothing() {
    let faulty = Faulty::new();
    write_random(&faulty, "new", 1, 20 << 20);
    let faults = [
        (
            Fault::Refused(503, "SlowDown"),
            "the store is busy (503); try again later",
        ),
        (Fault::Reset, "the connection broke"),
    ];
    let cases = STEPS.map(|step| faults.map(|fault| (step, fault)));
    let cases = cases.as_flattened();
    faulty.side_by_side(cases, |faulty, _, &((step, kind), (fault, message))| {
        faulty.proxy.decide(move |asked| match kind(asked) {
            true => fault,
            false => Fault::Nothing,
        });
        let target = faulty.object("disk.raw");
        faulty.refused(&put("new", &target), message, (step, fault));
        assert!(faulty.has("disk.raw", "www/disk.raw"), "{step}: {fault:?}");
        // What was sent takes no room any more.
        let given_up = faulty.count(Asked::is_abort);
        assert_eq!(given_up, usize::from(step != "begin"), "{step}: {fault:?}");
        let asked = faulty.count(kind);
        assert!((2..100).contains(&asked), "{step}: {fault:?}: {asked}");
    });
}

#[test]
fn keys_that_are_taken_back_are_told() {
    let faulty = Faulty::new();
    let target = faulty.object("disk.raw");
    write_random(&faulty, "new", 1, 20 << 20);
    for (step, kind) in STEPS {
        for (status, code, message) in EXPIRED {
            faulty.proxy.decide(move |asked| match kind(asked) {
                true => Fault::Refused(status, code),
                false => Fault::Nothing,
            });
            faulty.refused(&put("new", &target), message, (step, code));
            assert!(faulty.has("disk.raw", "www/disk.raw"), "{step}: {code}");
            // Three parts at most, each once.
            assert!(faulty.count(kind) <= 3, "{step}: {code}");
        }
    }
}

/// The store has made the object, and its answer was lost; whoever asks again is told that there is no
/// such upload. That it has ended well is seen by the object.
#[test]
fn an_upload_whose_last_answer_is_lost_has_succeeded() {
    let faulty = Faulty::new();
    let target = faulty.object_within("disk.raw", 20);
    // In the place of another one, of the same length too, and where there is none.
    for (seed, key, len) in [
        (1, "disk.raw", 64 << 20),
        (2, "disk.raw", 20 << 20),
        (3, "x", 9 << 20),
    ] {
        write_random(&faulty, "new", seed, len);
        let target = target.replace("disk.raw", key);
        faulty
            .proxy
            .decide(first_tries(Fault::LostAnswer, Asked::is_end, 1));
        faulty.good(&put("new", &target), key);
        assert!(faulty.has(key, "new"), "{key}");
    }
    // An upload that somebody else has given up has not.
    write_random(&faulty, "new", 4, 20 << 20);
    fs::rename(faulty.place.path("store/images/x"), faulty.place.path("x")).expect("an object");
    let target = target.replace("disk.raw", "x");
    let ends = AtomicUsize::new(0);
    faulty.proxy.decide(move |asked| match asked.is_end() {
        true if ends.fetch_add(1, Ordering::SeqCst) == 0 => Fault::Reset,
        true => Fault::Refused(404, "NoSuchUpload"),
        false => Fault::Nothing,
    });
    faulty.refused(&put("new", &target), "NoSuchUpload", "given up");
}

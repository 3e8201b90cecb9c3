//! Reads of an object in a store that fails.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::proxy::{Asked, Fault};
use super::{EXPIRED, Faulty, PASSING};

/// This fault for so many of the reads behind the first one.
fn reads(fault: Fault, most: usize) -> impl Fn(&Asked) -> Fault + Send + Sync + 'static {
    let reads = AtomicUsize::new(0);
    move |asked| match asked.is_read() {
        true if (1..=most).contains(&reads.fetch_add(1, Ordering::SeqCst)) => fault,
        _ => Fault::Nothing,
    }
}

#[test]
fn what_fails_for_a_while_is_asked_for_again() {
    let faulty = Faulty::new();
    let raw = faulty.raw("disk.raw");
    let wrong = [
        Fault::Short(0),
        Fault::Short(5_000),
        Fault::Fewer,
        Fault::WrongRange,
    ];
    for fault in PASSING.into_iter().chain(wrong) {
        faulty.proxy.decide(reads(fault, 3));
        faulty.good(&["convert", "-O", "raw", &raw, "copy"], fault);
        faulty.place.assert_equal("copy", "www/disk.raw");
        assert!(faulty.count(Asked::is_read) > 3, "{fault:?}");
    }
    // Also where the object is looked for.
    for fault in PASSING {
        if matches!(fault, Fault::Slow | Fault::Silence) {
            continue;
        }
        faulty.proxy.decide(move |asked| match asked.number {
            0 => fault,
            _ => Fault::Nothing,
        });
        faulty.good(&["info", &raw], fault);
    }
}

#[test]
fn what_fails_for_good_is_told() {
    let cases = [
        (Fault::Reset, "the connection broke"),
        (
            Fault::Refused(503, "SlowDown"),
            "the store is busy (503); try again later",
        ),
        (
            Fault::Refused(500, "InternalError"),
            "the store has a failure (500)",
        ),
        (Fault::Silence, "(option 'timeout')"),
        (Fault::Slow, "(option 'timeout')"),
        (Fault::Short(5_000), "the connection broke"),
        // What its last try has brought by the end of patience is not said.
        (Fault::Fewer, "'s3://images/disk.raw'"),
        (
            Fault::WrongRange,
            "the store sends other bytes than it was asked for",
        ),
        (Fault::NoRange, "the store knows no ranges"),
    ];
    Faulty::new().side_by_side(&cases, |faulty, number, &(fault, message)| {
        faulty.proxy.decide(reads(fault, usize::MAX));
        let (raw, copy) = (faulty.raw("disk.raw"), format!("copy{number}"));
        faulty.refused(&["convert", "-O", "raw", &raw, &copy], message, fault);
        // With pauses between them: 16 readers, in 12 seconds.
        let asked = faulty.count(Asked::is_read);
        assert!(asked < 800, "{fault:?}: {asked}");
    });
}

#[test]
fn who_cannot_look_for_an_object_is_told() {
    let cases = [
        (Fault::Refused(503, "SlowDown"), "the store is busy (503)"),
        (Fault::Silence, "(option 'timeout')"),
        (Fault::Reset, "the connection broke"),
    ];
    Faulty::new().side_by_side(&cases, |faulty, _, &(fault, message)| {
        faulty.proxy.decide(move |_| fault);
        faulty.refused(&["info", &faulty.raw("disk.raw")], message, fault);
    });
}

#[test]
fn an_object_with_another_tag_is_not_read_on() {
    let faulty = Faulty::new();
    let raw = faulty.raw("disk.raw");
    for reads_before in [0, 1, 5] {
        let reads = AtomicUsize::new(0);
        // Also of a store that compares no tags.
        faulty.proxy.decide(move |asked| {
            let is_later = reads.fetch_add(usize::from(asked.is_read()), Ordering::SeqCst);
            match asked.is_read() && is_later >= reads_before {
                true => Fault::OtherTag,
                false => Fault::Nothing,
            }
        });
        let message = "the file has changed on the server since it was opened";
        let words = ["convert", "-O", "raw", &raw, "copy"];
        faulty.refused(&words, message, reads_before);
        assert!(!faulty.place.has("copy"));
    }
}

#[test]
fn keys_that_are_taken_back_are_told() {
    let faulty = Faulty::new();
    let raw = faulty.raw("disk.raw");
    for (status, code, message) in EXPIRED {
        let refused = Fault::Refused(status, code);
        // From the first request on, and in the middle.
        for fine in [0, 4] {
            faulty.proxy.decide(move |asked| match asked.number < fine {
                true => Fault::Nothing,
                false => refused,
            });
            let words = ["convert", "-O", "raw", &raw, "copy"];
            faulty.refused(&words, message, (code, fine));
            let said = faulty.run(&words);
            assert!(said.err.contains(code), "{}", said.err);
            // Nobody insists: all who read at once ask once.
            let asked = faulty.count(|_| true);
            assert!(asked < 60, "{code}: {asked}");
        }
    }
}

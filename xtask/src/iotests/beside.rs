//! Tests that need a machine, and so fail with the storage daemon in its place: what they print with our
//! programs must be what they print with QEMU's.

use anyhow::Result;

use super::supervised::{self, Outcome, Verdict};
use super::{Campaign, Tools};

/// What comes right before a number that is another one in each run.
const MARKS: [&str; 5] = ["fd=", "pid ", "pid=", "process ", "line "];

/// What comes right behind a time.
const TIMES: [&str; 3] = ["s\n", " sec", " ops/sec"];

/// And behind a rate, which may be another one too.
const RATES: [&str; 4] = [" bytes/sec", " KiB/sec", " MiB/sec", " GiB/sec"];

/// Hexadecimal digits of an address at least.
const ADDRESS_DIGITS: usize = 6;

/// Runs a test with QEMU's own programs, then with ours: it passes if both do alike. What differs is kept
/// as `NAME.qemu` and `NAME.vellum`.
pub(super) fn run(campaign: &Campaign<'_>, real: &Tools, name: &str) -> Result<Outcome> {
    let first = run_both(campaign, real, name)?;
    if first.verdict != Verdict::Failed {
        return Ok(first);
    }
    // How far a test gets that talks to a program which has ended is a matter of time.
    let mut second = run_both(campaign, real, name)?;
    second.took += first.took;
    Ok(second)
}

fn run_both(campaign: &Campaign<'_>, real: &Tools, name: &str) -> Result<Outcome> {
    // Tests print the paths of programs, cut into lines.
    campaign.tools.swap(real)?;
    let theirs = supervised::run(campaign, name);
    campaign.tools.swap(real)?;
    let theirs = theirs?;
    let ours = supervised::run(campaign, name)?;
    let took = theirs.took + ours.took;
    let told = [&theirs, &ours].map(|one| masked(one.printed.as_deref().unwrap_or_default()));
    let (verdict, why) = match ours.verdict {
        verdict if verdict != theirs.verdict => (
            Verdict::Failed,
            format!("{verdict}, where QEMU's {}", theirs.verdict),
        ),
        Verdict::Failed if theirs.printed.is_none() || ours.printed.is_none() => {
            (Verdict::Failed, format!("nothing to compare: {}", ours.why))
        }
        _ if told[0] != told[1] => {
            let lines = |text: &str| text.lines().count();
            let [theirs, ours] = [lines(&told[0]), lines(&told[1])];
            (
                Verdict::Failed,
                format!("{ours} lines differ from QEMU's {theirs}"),
            )
        }
        Verdict::Skipped => (Verdict::Skipped, ours.why),
        _ => (Verdict::Passed, String::new()),
    };
    if verdict == Verdict::Failed {
        for (whose, text) in ["qemu", "vellum"].iter().zip(&told) {
            std::fs::write(campaign.results.join(format!("{name}.{whose}")), text)?;
        }
    }
    Ok(Outcome {
        verdict,
        why,
        took,
        printed: None,
    })
}

/// A text without numbers of processes, descriptors and lines, addresses, times and rates.
fn masked(text: &str) -> String {
    let mut left = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find(|c: char| c.is_ascii_digit()) {
        let (before, from) = rest.split_at(start);
        left.push_str(before);
        let is_part = |c: char| c.is_ascii_alphanumeric() || c == '.';
        let (token, behind) = from.split_at(from.find(|c| !is_part(c)).unwrap_or(from.len()));
        let digits = token.len() - token.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let is_number = digits == token.len();
        let is_marked = MARKS.iter().any(|mark| left.ends_with(mark))
            || names_machine(&left)
            || (is_number && left.ends_with('/') && behind.starts_with('-'));
        let is_address = token.strip_prefix("0x").is_some_and(|hex| {
            hex.len() >= ADDRESS_DIGITS && hex.bytes().all(|c| c.is_ascii_hexdigit())
        });
        let after = from[digits..].trim_start_matches(fraction);
        let is_time = TIMES.iter().any(|unit| after.starts_with(unit));
        let rate = RATES.iter().find_map(|unit| after.strip_prefix(unit));
        rest = rate.unwrap_or(behind);
        match is_marked || is_address || is_time || rate.is_some() {
            true => left.push('N'),
            false => left.push_str(token),
        }
    }
    left + rest
}

/// Whether a text ends with the name that a machine has beside its process: `qemu-`, `qemudest-`.
fn names_machine(text: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '-';
    let name = text
        .rsplit(|c: char| !is_part(c))
        .next()
        .unwrap_or_default();
    name.starts_with("qemu") && name.ends_with('-')
}

fn fraction(c: char) -> bool {
    c == '.' || c.is_ascii_digit()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_from_run_to_run_is_no_difference() {
        for (one, other) in [
            ("qemu-29520: EOFError", "qemu-504: EOFError"),
            ("client.qemudest-1733:", "client.qemudest-29:"),
            ("socket,id=mon,fd=9 -mon", "socket,id=mon,fd=14 -mon"),
            ("/t/4711-disk.img", "/t/815-disk.img"),
            (
                "file \"a.py\", line 12, in f",
                "file \"a.py\", line 9, in f",
            ),
            ("<Daemon at 0x7f00aa10>", "<Daemon at 0x7f11bb20>"),
            (
                "1 ops; 00.01 sec (5.2 MiB/sec",
                "1 ops; 00.00 sec (812 KiB/sec",
            ),
            ("Ran 3 tests in 1.205s\n", "Ran 3 tests in 0.9s\n"),
        ] {
            assert_eq!(masked(one), masked(other));
        }
    }

    #[test]
    fn what_a_test_is_about_is_a_difference() {
        for (one, other) in [
            ("offset 65536", "offset 131072"),
            ("0x10000 bytes", "0x20000 bytes"),
            ("failures=3", "failures=2"),
            ("Ran 3 tests in 1s\n", "Ran 4 tests in 1s\n"),
            ("job0-12", "job0-13"),
        ] {
            assert_ne!(masked(one), masked(other));
        }
    }
}

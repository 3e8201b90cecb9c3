//! A table of command lines as people, documents and other projects type them, each run
//! by the real tools and by Vellum in twin folders: both outputs, the exit code and every
//! file that changed must be the same.
//!
//! The `*.txt` files of this folder are the table. A line of them begins with
//!
//! | mark | what follows |
//! | --- | --- |
//! | `#` | a comment |
//! | `[` | the name of a section, which has folders of its own |
//! | `%` | a command line that prepares both folders with the real tools |
//! | `@` | arguments of a real `qemu-io` that is kept open until the section ends |
//! | `$` | a command line to compare; the shell runs it |
//! | `!` | why the line above it differs on purpose |
//! | `-`, `+` | what it then says otherwise: the lines of the real tool, and ours |
//!
//! A backslash at the end of a line continues it. Words after `--` choose sections by a
//! part of their name; `TABLE_TIMES=1` tells how long each line took.

mod answer;
mod images;
mod script;
mod twins;

use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use script::{Case, Section, Step};
use twins::Twins;

const TABLE: &[(&str, &str)] = &[
    ("qemu-img.txt", include_str!("qemu-img.txt")),
    ("projects.txt", include_str!("projects.txt")),
    ("errors.txt", include_str!("errors.txt")),
    ("qemu-io.txt", include_str!("qemu-io.txt")),
];

/// Sections that run at the same time.
const MAX_WORKERS: usize = 3;

/// What became of the command lines of a section.
#[derive(Default)]
struct Tally {
    same: usize,
    on_purpose: usize,
    different: usize,
    report: String,
}

fn main() -> ExitCode {
    // The options of cargo's own test programs mean nothing here.
    let wanted: Vec<String> = std::env::args()
        .skip(1)
        .filter(|word| !word.starts_with('-'))
        .collect();
    let sections: Vec<Section> = TABLE
        .iter()
        .flat_map(|(file, text)| script::parse(file, text))
        .filter(|section| wanted.is_empty() || wanted.iter().any(|w| section.name.contains(w)))
        .collect();
    let total = run_all(&sections);
    println!(
        "{} command lines in {} sections: {} the same, {} different on purpose, {} different",
        total.same + total.on_purpose + total.different,
        sections.len(),
        total.same,
        total.on_purpose,
        total.different
    );
    println!(
        "{} passed, {} failed",
        total.same + total.on_purpose,
        total.different
    );
    ExitCode::from(u8::from(total.different > 0))
}

fn run_all(sections: &[Section]) -> Tally {
    let next = AtomicUsize::new(0);
    let total = Mutex::new(Tally::default());
    let workers = std::thread::available_parallelism().map_or(1, usize::from) + 1;
    std::thread::scope(|scope| {
        for _ in 0..workers.min(MAX_WORKERS) {
            scope.spawn(|| {
                while let Some(section) = sections.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let tally = run_section(section);
                    let mut total = total.lock().expect("no worker panics");
                    total.same += tally.same;
                    total.on_purpose += tally.on_purpose;
                    total.different += tally.different;
                    print!("{}", tally.report);
                }
            });
        }
    });
    total.into_inner().expect("no worker panics")
}

fn run_section(section: &Section) -> Tally {
    let mut twins = Twins::new();
    let mut tally = Tally::default();
    for step in &section.steps {
        let done = match step {
            Step::Prepare(command) => twins.prepare(command),
            Step::Hold(arguments) => twins.hold(arguments),
            Step::Compare(case) => {
                compare(section, case, &mut twins, &mut tally);
                Ok(())
            }
        };
        if let Err(problem) = done {
            tally.different += 1;
            tally
                .report
                .push_str(&format!("\n{}: {problem}\n", section.place));
        }
    }
    tally
}

fn compare(section: &Section, case: &Case, twins: &mut Twins, tally: &mut Tally) {
    let started = Instant::now();
    let (theirs, ours) = twins.both(&case.command);
    if std::env::var_os("TABLE_TIMES").is_some() {
        let millis = started.elapsed().as_millis();
        println!(
            "{millis:>6} ms {}:{} {}",
            section.file, case.line, case.command
        );
    }
    let found = answer::difference(&theirs, &ours);
    let expected = case.mark.as_ref().map_or(&[][..], |mark| &mark.lines);
    if found == expected {
        match case.mark {
            None => tally.same += 1,
            Some(_) => tally.on_purpose += 1,
        }
        return;
    }
    tally.different += 1;
    tally.report.push_str(&format!(
        "\n{}:{} [{}]\n$ {}\n",
        section.file, case.line, section.name, case.command
    ));
    if let Some(mark) = &case.mark {
        tally.report.push_str(&format!(
            "it differs, but not as its mark says: {}\n",
            mark.reason
        ));
    }
    for line in &found {
        tally.report.push_str(&format!("{line}\n"));
    }
    if found.is_empty() {
        tally.report.push_str("it is the same now\n");
    }
}

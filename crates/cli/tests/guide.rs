//! Runs every command of docs/GUIDE.md and docs/OPERATIONS.md.
//!
//! Each `## ` section runs in a folder of its own, in one shell, from its first block to its
//! last. In a `console` block the lines after `$ ` (and `> `) are commands that must succeed, and
//! the others their output, in which `...` stands for anything. In `console fails` they must fail.
//! The commands of a `sh` block must succeed, whatever they print. A block that installs
//! something is marked `not-run: REASON`; how many there are is checked.

use std::fmt::Write as _;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use tempfile::TempDir;

const GUIDE: &str = include_str!("../../../docs/GUIDE.md");
const OPERATIONS: &str = include_str!("../../../docs/OPERATIONS.md");
const VELLUM: &str = env!("CARGO_BIN_EXE_vellum");
/// Why a block may be left out, and how many there are for that reason.
const NOT_RUN: [(&str, usize); 4] = [
    ("installs packages", 3),
    ("needs a registry", 1),
    ("needs a volume group", 1),
    ("needs libguestfs", 2),
];
const NOT_RUN_OF_OPERATIONS: [(&str, usize); 1] = [("needs systemd", 2)];
/// A section that takes longer waits for something that does not come.
const LIMIT: Duration = Duration::from_secs(180);
/// Marks the end of a command in what the shell prints.
const MARK: char = '\u{1}';

/// Commands of the guide that are run together.
struct Step {
    commands: String,
    /// What they must print; `None`: anything.
    output: Option<String>,
    must_fail: bool,
}

#[derive(Default)]
struct Section {
    title: String,
    steps: Vec<Step>,
}

/// The sections with commands, and the reasons of the blocks that are not run.
fn parse(guide: &str) -> (Vec<Section>, Vec<String>) {
    let (mut sections, mut not_run) = (vec![Section::default()], Vec::new());
    let mut lines = guide.lines();
    while let Some(line) = lines.next() {
        if let Some(title) = line.strip_prefix("## ") {
            sections.push(Section {
                title: title.to_owned(),
                steps: Vec::new(),
            });
        }
        let Some(kind) = line.strip_prefix("```") else {
            continue;
        };
        let block: Vec<&str> = lines.by_ref().take_while(|line| *line != "```").collect();
        let steps = &mut sections.last_mut().expect("one is there").steps;
        match kind {
            "sh" => steps.push(Step {
                commands: block.join("\n"),
                output: None,
                must_fail: false,
            }),
            "console" => steps.extend(console(&block, false)),
            "console fails" => steps.extend(console(&block, true)),
            _ => match kind.split_once(" not-run: ") {
                Some((_, reason)) => not_run.push(reason.to_owned()),
                None => panic!("a block that is neither run nor marked: {kind}"),
            },
        }
    }
    sections.retain(|section| !section.steps.is_empty());
    (sections, not_run)
}

/// The commands of a block with their output.
fn console(block: &[&str], must_fail: bool) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    let mut in_command = false;
    for line in block {
        if let Some(command) = line.strip_prefix("$ ") {
            steps.push(Step {
                commands: command.to_owned(),
                output: Some(String::new()),
                must_fail,
            });
            in_command = true;
            continue;
        }
        let step = steps
            .last_mut()
            .expect("a console block begins with a command");
        if let Some(more) = line.strip_prefix("> ").filter(|_| in_command) {
            step.commands += "\n";
            step.commands += more;
        } else {
            in_command = false;
            let output = step.output.get_or_insert_default();
            *output += line;
            *output += "\n";
        }
    }
    steps
}

/// A shell script that runs the steps in one shell and ends with the first that goes wrong.
fn script(steps: &[Step]) -> String {
    let mut script = String::from("trap 'failed=1' ERR\n");
    for step in steps {
        let wanted = u8::from(step.must_fail);
        write!(
            script,
            "failed=0\n{{\n{}\n}} 2>&1\n[ $? = 0 ] || failed=1\nprintf '\\n\\001%s\\001' $failed\n\
             [ $failed = {wanted} ] || exit 1\n",
            step.commands
        )
        .expect("a string takes everything");
    }
    script
}

/// Whether a text is what a pattern says, in which `...` stands for anything.
fn matches(pattern: &str, text: &str) -> bool {
    let Some((head, rest)) = pattern.split_once("...") else {
        return pattern == text;
    };
    let Some(text) = text.strip_prefix(head) else {
        return false;
    };
    let ends = (0..=text.len()).filter(|&end| text.is_char_boundary(end));
    rest.is_empty() || ends.into_iter().any(|end| matches(rest, &text[end..]))
}

/// What is wrong with a section.
fn run(section: &Section) -> Result<(), String> {
    let (folder, bin) = (folder(), folder());
    std::os::unix::fs::symlink(VELLUM, bin.path().join("vellum")).expect("a link");
    let path = std::env::var("PATH").unwrap_or_default();
    let output = folder.path().join(".output");
    let mut shell = Command::new("bash")
        .args(["-c", &script(&section.steps)])
        .current_dir(folder.path())
        .env("PATH", format!("{}:{path}", bin.path().display()))
        .env("LC_ALL", "C")
        .env("HOME", folder.path())
        .env("VELLUM_CONFIG", "")
        .stdin(Stdio::null())
        .stdout(std::fs::File::create(&output).expect("a file"))
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
        .expect("bash runs");
    let begun = Instant::now();
    let ended = loop {
        if shell.try_wait().expect("a child").is_some() {
            break true;
        }
        if begun.elapsed() > LIMIT {
            break false;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let group = Pid::from_child(&shell);
    let left = kill_process_group(group, Signal::KILL).is_ok();
    let _ = shell.wait();
    let servers = end_servers(folder.path());
    let printed = std::fs::read(&output).expect("it is there");
    compare(section, &String::from_utf8_lossy(&printed))?;
    match (ended, left || servers > 0) {
        (false, _) => Err(format!("'{}' takes too long", section.title)),
        (_, true) => Err(format!("'{}' leaves a server running", section.title)),
        _ => Ok(()),
    }
}

fn folder() -> TempDir {
    tempfile::tempdir().expect("a folder")
}

/// Ends the servers whose process ids stand in the folder; how many there were.
fn end_servers(folder: &Path) -> usize {
    let files = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let files = files.filter(|file| file.path().extension().is_some_and(|end| end == "pid"));
    let ids = files.filter_map(|file| std::fs::read_to_string(file.path()).ok());
    let ids = ids.filter_map(|text| text.trim().parse().ok().and_then(Pid::from_raw));
    let own = std::fs::canonicalize(VELLUM).ok();
    let servers = ids.filter(|id| {
        let program = format!("/proc/{}/exe", id.as_raw_nonzero());
        own.is_some() && std::fs::read_link(program).ok() == own && !gone(*id)
    });
    servers
        .filter(|id| kill_process(*id, Signal::KILL).is_ok())
        .count()
}

/// Whether a process ends within a few seconds, as one that got a signal does.
fn gone(id: Pid) -> bool {
    let process = format!("/proc/{}", id.as_raw_nonzero());
    (0..100).any(|_| {
        std::thread::sleep(Duration::from_millis(50));
        !Path::new(&process).exists()
    })
}

/// What the shell printed beside what the guide says.
fn compare(section: &Section, printed: &str) -> Result<(), String> {
    let mut parts = printed.split(MARK);
    for step in &section.steps {
        let told = parts.next().unwrap_or_default().trim_end();
        let status = parts.next();
        let context = format!(
            "'{}':\n$ {}\nprints:\n{told}\n",
            section.title, step.commands
        );
        match (status, step.must_fail) {
            (Some("0"), false) | (Some("1"), true) => {}
            (Some("0"), true) => return Err(format!("{context}and succeeds")),
            (Some(_), false) => return Err(format!("{context}and fails")),
            (None, _) => return Err(format!("{context}and does not end")),
            (Some(_), true) => return Err(format!("{context}and ends otherwise")),
        }
        if let Some(output) = &step.output
            && !matches(output.trim_end(), told)
        {
            return Err(format!("{context}and not:\n{output}"));
        }
    }
    Ok(())
}

/// Runs a guide of so many sections at least.
fn check(guide: &str, not_run_for: &[(&str, usize)], least: usize) {
    let (sections, mut not_run) = parse(guide);
    let may_be = not_run_for
        .iter()
        .flat_map(|(why, count)| vec![*why; *count]);
    not_run.sort();
    assert_eq!(
        not_run,
        may_be.collect::<Vec<_>>(),
        "blocks that are not run"
    );
    assert!(sections.len() >= least, "{} sections", sections.len());
    let failures: Vec<String> = std::thread::scope(|scope| {
        let running: Vec<_> = sections
            .iter()
            .map(|section| scope.spawn(|| run(section)))
            .collect();
        let ended = running.into_iter().map(|one| one.join().expect("no panic"));
        ended.filter_map(Result::err).collect()
    });
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
    let steps: usize = sections.iter().map(|section| section.steps.len()).sum();
    println!("{steps} steps in {} sections", sections.len());
}

#[test]
fn every_command_does_what_the_guide_says() {
    check(GUIDE, &NOT_RUN, 11);
}

#[test]
fn every_command_does_what_operations_says() {
    check(OPERATIONS, &NOT_RUN_OF_OPERATIONS, 7);
}

#[test]
fn a_guide_that_is_not_true_is_found() {
    let run_one = |block: &str| {
        let (sections, _) = parse(&format!("## x\n{block}"));
        run(&sections[0])
    };
    assert_eq!(run_one("```console\n$ echo a b\na ...\n```\n"), Ok(()));
    assert_eq!(run_one("```console fails\n$ false\n```\n"), Ok(()));
    assert!(run_one("```console\n$ echo a\nb\n```\n").is_err());
    assert!(run_one("```console\n$ false\n```\n").is_err());
    assert!(run_one("```console fails\n$ true\n```\n").is_err());
    assert!(run_one("```sh\nfalse\ntrue\n```\n").is_err());
    assert!(run_one("```sh\nexit 0\n```\n").is_err());
    assert!(run_one("```sh\nsleep 100 &\n```\n").is_err());
}

//! Two folders with the same files, one for each tool.

use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;
use vellum_testing::Said;
pub use vellum_testing::Said as Answer;

/// Runs a program; its lines without what differs from run to run.
fn run(program: &Path, folder: &Path, words: &[&str]) -> Answer {
    let mut command = Command::new(program);
    let said = Said::of(command.args(words).current_dir(folder).env("LC_ALL", "C"));
    let steady = |text: &str| text.lines().map(|line| steady(line) + "\n").collect();
    Answer {
        code: said.code,
        out: steady(&said.out),
        err: steady(&said.err),
    }
}

/// A line without what the file system, the clock or chance decides.
fn steady(line: &str) -> String {
    for word in [
        "disk size: ",
        "\"actual-size\": ",
        "uuid: ",
        "\"uuid\": ",
        "iters: ",
        "iters\": ",
        "\"date-sec\": ",
        "\"date-nsec\": ",
        "Run completed in ",
    ] {
        if let Some((head, _)) = line.split_once(word) {
            return format!("{head}{word}?");
        }
    }
    // A row of the table of snapshots.
    match line.find("  0000:00:00.000 ") {
        Some(clock) if clock > DATE_LEN => {
            format!("{}?{}", &line[..clock - DATE_LEN], &line[clock..])
        }
        _ => line.to_owned(),
    }
}

/// A line of a map or of `info` without what depends on where clusters lie.
fn without_place(line: &str) -> String {
    let cut = ["\"offset\": ", "file length: "]
        .iter()
        .find_map(|word| line.find(word));
    line[..cut.unwrap_or(line.len())].to_owned() + "\n"
}

/// Length of `YYYY-MM-DD HH:MM:SS`.
const DATE_LEN: usize = 19;

/// The twin folders. `qemu-img` in `ours` is Vellum.
pub struct Twins {
    root: TempDir,
}

impl Twins {
    /// Folders in which `prepare` has been done by the real tools: each line is
    /// a command line of `qemu-img` or `qemu-io`.
    pub fn new(prepare: &[&str]) -> Twins {
        let twins = Twins::empty();
        // Made twice rather than copied: a copy has other holes.
        for folder in [twins.ours(""), twins.theirs("")] {
            prepare.iter().for_each(|line| prepare_line(&folder, line));
        }
        twins
    }

    /// Like [`Twins::new`], but prepared once and copied: for what takes the real tools
    /// seconds, and has no holes that matter.
    pub fn copied(prepare: &[&str]) -> Twins {
        let twins = Twins::empty();
        let (ours, theirs) = (twins.ours(""), twins.theirs("."));
        prepare.iter().for_each(|line| prepare_line(&ours, line));
        let words = ["-a", "--sparse=auto", "../ours/.", "."];
        let copied = run(Path::new("cp"), &theirs, &words);
        assert_eq!(copied.code, Some(0), "{copied:?}");
        twins
    }

    fn empty() -> Twins {
        let root = tempfile::tempdir().expect("a temporary folder");
        for folder in ["ours", "theirs"] {
            std::fs::create_dir(root.path().join(folder)).expect("a folder");
        }
        std::fs::create_dir(root.path().join("bin")).expect("a folder");
        let link = root.path().join("bin/qemu-img");
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_vellum"), link).expect("a link");
        Twins { root }
    }

    /// A path in our folder.
    pub fn ours(&self, name: &str) -> PathBuf {
        self.root.path().join("ours").join(name)
    }

    /// A path in their folder.
    pub fn theirs(&self, name: &str) -> PathBuf {
        self.root.path().join("theirs").join(name)
    }

    /// Runs our tool only.
    pub fn run_ours(&self, words: &[&str]) -> Answer {
        run(
            &self.root.path().join("bin/qemu-img"),
            &self.root.path().join("ours"),
            words,
        )
    }

    /// Runs the real tool on our folder.
    pub fn run_theirs_on_ours(&self, words: &[&str]) -> Answer {
        run(Path::new("qemu-img"), &self.root.path().join("ours"), words)
    }

    /// Runs both: our answer and theirs.
    pub fn both(&self, words: &[&str]) -> [Answer; 2] {
        let folder = self.root.path().join("theirs");
        let theirs = run(Path::new("qemu-img"), &folder, words);
        [self.run_ours(words), theirs]
    }

    /// Runs both, and demands the same answer.
    #[track_caller]
    pub fn same_words(&self, words: &[&str]) -> Answer {
        let [ours, theirs] = self.both(words);
        assert_eq!(
            ours, theirs,
            "ours (left) and theirs (right) differ: {words:?}"
        );
        ours
    }

    /// Like [`Twins::same_words`] for a command line.
    #[track_caller]
    pub fn same(&self, line: &str) -> Answer {
        self.same_words(&line.split_whitespace().collect::<Vec<_>>())
    }

    /// Like [`Twins::same`], but where each put its clusters may differ: offsets in a
    /// map, the length of a file.
    #[track_caller]
    pub fn same_but_places(&self, line: &str) -> Answer {
        let [ours, theirs] = self.both(&line.split_whitespace().collect::<Vec<_>>());
        let placeless = |answer: &Answer| Answer {
            code: answer.code,
            out: answer.out.lines().map(without_place).collect(),
            err: answer.err.clone(),
        };
        let (one, two) = (placeless(&ours), placeless(&theirs));
        assert_eq!(one, two, "ours (left) and theirs (right) differ: {line}");
        ours
    }

    /// Runs several command lines with both tools.
    #[track_caller]
    pub fn all_same(&self, lines: &[&str]) {
        lines.iter().for_each(|line| drop(self.same(line)));
    }
}

/// Runs a command line of a real tool.
fn prepare_line(folder: &Path, line: &str) {
    let (program, rest) = line.split_once(' ').unwrap_or((line, ""));
    let words: Vec<String> = match program {
        "qemu-io" => qemu_io_words(rest),
        _ => rest.split_whitespace().map(str::to_owned).collect(),
    };
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let answer = run(Path::new(program), folder, &words);
    assert_eq!(answer.code, Some(0), "{line}: {answer:?}");
}

/// `IMAGE: COMMAND; COMMAND` as options of qemu-io.
fn qemu_io_words(text: &str) -> Vec<String> {
    let (image, commands) = text.split_once(": ").expect("IMAGE: COMMAND; ...");
    let mut words: Vec<String> = Vec::new();
    for command in commands.split("; ") {
        words.extend(["-c".to_owned(), command.to_owned()]);
    }
    words.extend(image.split_whitespace().map(str::to_owned));
    words
}

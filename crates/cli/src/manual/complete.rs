//! `vellum __complete`: what may stand where the cursor is, for the scripts that
//! `vellum completions` prints. They know nothing themselves: options, formats, keys of `-o`,
//! and the names of snapshots and bitmaps of the image on the command line come from here.
//!
//! The words are those after the program's name; the output is a line for each candidate,
//! `value<TAB>what it is`, and a last line that says what else fits: `:files`, `:folders`
//! or `:end`.
//!
//! Invariant: an image is opened for reading only, without waiting for its locks, and only if
//! it is a regular file; what fails leads to fewer candidates, never to a message.

mod running;

use std::fmt::Write;

use vellum_graph::{driver_names, option_names};
use vellum_images::create_options;
use vellum_options::create_options::OptionType;

use super::names::{Kind, of_image};
use super::tools::{self, Tool};
use crate::getopt::OptionSpec;

/// Formats that may be named for an image.
pub const FORMATS: [&str; 3] = ["qcow2", "raw", "luks"];
pub const CACHE_MODES: [&str; 5] = ["none", "writeback", "unsafe", "directsync", "writethrough"];
const SHELLS: [&str; 3] = ["bash", "zsh", "fish"];
/// Keys that an image described by options may have, whatever its driver.
const NODE_KEYS: [&str; 6] = [
    "driver",
    "node-name",
    "read-only",
    "discard",
    "file.filename",
    "file.driver",
];

/// What fits beside the candidates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Beside {
    #[default]
    Nothing,
    Files,
    Folders,
}

/// The words that may follow.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Candidates {
    /// Words, and what they are.
    candidates: Vec<(String, String)>,
    beside: Beside,
}

impl Candidates {
    fn files() -> Candidates {
        Candidates {
            beside: Beside::Files,
            ..Candidates::default()
        }
    }

    fn of<'a>(words: impl IntoIterator<Item = &'a str>) -> Candidates {
        let candidates = words
            .into_iter()
            .map(|word| (word.to_owned(), String::new()));
        Candidates {
            candidates: candidates.collect(),
            ..Candidates::default()
        }
    }

    /// The same behind a prefix that stands already.
    fn behind(mut self, prefix: &str) -> Candidates {
        for (word, _) in &mut self.candidates {
            word.insert_str(0, prefix);
        }
        self
    }

    /// The same, as far as it begins with what was typed.
    fn that_begins(mut self, typed: &str) -> Candidates {
        self.candidates.retain(|(word, _)| word.starts_with(typed));
        self
    }

    /// As the scripts read it.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for (word, about) in &self.candidates {
            let about: String = about.split_whitespace().collect::<Vec<_>>().join(" ");
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{word}\t{about}");
        }
        text.push_str(match self.beside {
            Beside::Nothing => ":end\n",
            Beside::Files => ":files\n",
            Beside::Folders => ":folders\n",
        });
        text
    }
}

/// What may stand in the place of the word number `at` behind `program`.
pub fn candidates(program: &str, words: &[String], at: usize) -> Candidates {
    let Some(tool) = tools::programs()
        .into_iter()
        .find(|tool| tool.name == program)
    else {
        return Candidates::default();
    };
    let typed = words.get(at).map_or("", String::as_str);
    let before = words.get(..at).unwrap_or_default();
    let after = words.get(at + 1..).unwrap_or_default();
    let candidates = match tool.subcommands.is_empty() {
        true => in_tool(&tool, before, typed, after),
        false => in_program(&tool, before, typed, after),
    };
    candidates.that_begins(typed)
}

/// Behind a program that has subcommands.
fn in_program(tool: &Tool, before: &[String], typed: &str, after: &[String]) -> Candidates {
    let command = before.iter().position(|word| !word.starts_with('-'));
    let Some(at) = command else {
        return match typed.starts_with('-') {
            true => options(tool),
            false => subcommands(tool),
        };
    };
    match before[at].as_str() {
        "help" if tool.name == "vellum" => subcommands(tool),
        "img" if tool.name == "vellum" => {
            candidates_as("qemu-img", &before[at + 1..], typed, after)
        }
        name => match tool.subcommands.iter().find(|tool| tool.name == name) {
            Some(subcommand) => in_tool(subcommand, &before[at + 1..], typed, after),
            None => Candidates::default(),
        },
    }
}

fn candidates_as(program: &str, before: &[String], typed: &str, after: &[String]) -> Candidates {
    let tool = tools::programs()
        .into_iter()
        .find(|tool| tool.name == program);
    tool.map_or_else(Candidates::default, |tool| {
        in_program(&tool, before, typed, after)
    })
}

fn subcommands(tool: &Tool) -> Candidates {
    let named = |tool: &Tool| (tool.name.to_owned(), tool.spec.about.to_owned());
    let mut candidates: Vec<_> = tool.subcommands.iter().map(named).collect();
    if tool.name == "vellum" {
        candidates.push(("help".into(), "Print the help of a command".into()));
        candidates.push((
            "img".into(),
            "The commands of qemu-img, its bench too".into(),
        ));
    }
    Candidates {
        candidates,
        ..Candidates::default()
    }
}

/// The names of a tool's options.
fn options(tool: &Tool) -> Candidates {
    let candidate = |option: &OptionSpec| Some((option.names().last()?, option.about.clone()));
    Candidates {
        candidates: tool.options.iter().filter_map(candidate).collect(),
        ..Candidates::default()
    }
}

/// A command line as far as it is written.
#[derive(Debug, Default)]
struct Line {
    operands: Vec<String>,
    values: Vec<(OptionSpec, String)>,
    /// The option whose value comes next.
    open: Option<OptionSpec>,
    /// No word is an option any more.
    only_operands: bool,
}

impl Line {
    fn read(tool: &Tool, words: &[String]) -> Line {
        let mut line = Line::default();
        for word in words {
            if let Some(option) = line.open.take() {
                line.values.push((option, word.clone()));
            } else if line.only_operands || word == "-" || !word.starts_with('-') {
                line.operands.push(word.clone());
            } else if word == "--" {
                line.only_operands = true;
            } else if let Some(name) = word.strip_prefix("--") {
                line.long(tool, name);
            } else {
                line.letters(tool, &word[1..]);
            }
        }
        line
    }

    fn long(&mut self, tool: &Tool, text: &str) {
        let (name, value) = match text.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (text, None),
        };
        let Some(option) = tool.long(name).cloned() else {
            return;
        };
        match value {
            Some(value) => self.values.push((option, value.to_owned())),
            None if option.value.is_some() => self.open = Some(option),
            None => self.values.push((option, String::new())),
        }
    }

    fn letters(&mut self, tool: &Tool, letters: &str) {
        for (at, letter) in letters.char_indices() {
            let option = tool
                .options
                .iter()
                .find(|option| option.short == Some(letter));
            let Some(option) = option.cloned() else {
                return;
            };
            let rest = &letters[at + letter.len_utf8()..];
            match option.value {
                None => self.values.push((option, String::new())),
                Some(_) if !rest.is_empty() => return self.values.push((option, rest.to_owned())),
                Some(_) => return self.open = Some(option),
            }
        }
    }

    /// The last value of an option, by its letter or name.
    fn value(&self, name: &str) -> Option<&str> {
        let is_named = |option: &OptionSpec| {
            option.long == Some(name)
                || option
                    .short
                    .is_some_and(|letter| name == letter.to_string())
        };
        let mut values = self.values.iter().rev();
        let found = values.find(|(option, _)| is_named(option));
        found.map(|(_, value)| value.as_str())
    }
}

/// Behind a tool's name.
fn in_tool(tool: &Tool, before: &[String], typed: &str, after: &[String]) -> Candidates {
    let line = Line::read(tool, before);
    if let Some(option) = &line.open {
        return value(tool, option, &line, typed, after);
    }
    if !line.only_operands && typed.starts_with('-') {
        let written = typed
            .strip_prefix("--")
            .and_then(|text| text.split_once('='));
        return match written {
            Some((name, typed)) => match tool.long(name) {
                Some(option) => {
                    value(tool, option, &line, typed, after).behind(&format!("--{name}="))
                }
                None => Candidates::default(),
            },
            None => options(tool),
        };
    }
    operand(tool, &line, typed)
}

/// Something that is no option.
fn operand(tool: &Tool, line: &Line, typed: &str) -> Candidates {
    let number = line.operands.len();
    match (tool.name, number) {
        ("completions", 0) => Candidates::of(SHELLS),
        ("completions", _) => Candidates::of(tools::programs().iter().map(|tool| tool.name)),
        ("install-links" | "man", _) => Candidates {
            beside: Beside::Folders,
            ..Candidates::default()
        },
        ("bitmap", 1) => of_image(Kind::Bitmap, &line.operands).into_answer(),
        ("ctl", _) => running::behind_ctl(line),
        ("daemon" | "qemu-storage-daemon", _) => Candidates::default(),
        ("dd", _) if !typed.contains('=') => {
            Candidates::of(["if=", "of=", "bs=", "count=", "skip="])
        }
        _ if line.value("image-opts").is_some() => pairs(typed, &node_keys(typed), |key| {
            (key.ends_with("driver")).then(driver_names)
        }),
        _ => Candidates::files(),
    }
}

/// The value of an option.
fn value(
    tool: &Tool,
    option: &OptionSpec,
    line: &Line,
    typed: &str,
    after: &[String],
) -> Candidates {
    let mut images = line.operands.clone();
    images.extend(after.iter().filter(|word| !word.starts_with('-')).cloned());
    let name = option.long.unwrap_or_default();
    match (tool.name, option.short, name) {
        ("snapshot", Some('a' | 'd'), _) | (_, _, "load-snapshot" | "snapshot") => {
            return of_image(Kind::Snapshot, &images).into_answer();
        }
        ("nbd" | "qemu-nbd", _, "bitmap") | ("send", _, "since" | "bitmap") => {
            return of_image(Kind::Bitmap, &images).into_answer();
        }
        ("bitmap", _, "merge") => {
            let source = line.value("b").map(|name| vec![name.to_owned()]);
            return of_image(Kind::Bitmap, &source.unwrap_or(images)).into_answer();
        }
        ("create" | "convert" | "amend" | "measure" | "receive", Some('o'), _) => {
            let format = match tool.name {
                "convert" | "measure" => line.value("O").unwrap_or("raw"),
                "create" => line.value("f").unwrap_or("raw"),
                "receive" => line.value("O").unwrap_or("qcow2"),
                _ => line.value("f").unwrap_or("qcow2"),
            };
            return creation_options(format, typed);
        }
        (_, _, "object") => return objects(typed),
        (_, _, "blockdev") => {
            return pairs(typed, &node_keys(typed), |key| {
                (key.ends_with("driver")).then(driver_names)
            });
        }
        (_, _, "export") => {
            let keys = [
                "type",
                "id",
                "node-name",
                "name",
                "writable",
                "description",
                "mountpoint",
                "growable",
                "allow-other",
            ];
            return pairs(typed, &keys.map(str::to_owned), |key| match key {
                "type" => Some(vec!["nbd", "fuse"]),
                "writable" | "growable" => Some(vec!["on", "off"]),
                "allow-other" => Some(vec!["auto", "on", "off"]),
                _ => None,
            });
        }
        _ => {}
    }
    by_placeholder(option)
}

/// What the help calls the value tells what it is.
fn by_placeholder(option: &OptionSpec) -> Candidates {
    match option.value.unwrap_or_default() {
        "FORMAT" => Candidates::of(match option.long {
            Some("output") => vec!["human", "json"],
            _ => FORMATS.to_vec(),
        }),
        name if name.ends_with("FMT") => Candidates::of(FORMATS),
        name if name.contains("CACHE") => Candidates::of(CACHE_MODES),
        "MODE" => match option.long {
            Some("discard") => Candidates::of(["unmap", "ignore", "on", "off"]),
            Some("aio") => Candidates::of(["threads", "native", "io_uring"]),
            Some("detect-zeroes") => Candidates::of(["off", "on", "unmap"]),
            _ => Candidates::of(CACHE_MODES),
        },
        "AIO" => Candidates::of(["threads", "native", "io_uring"]),
        "PREALLOC" => Candidates::of(["off", "metadata", "falloc", "full"]),
        choice if choice.contains('|') => Candidates::of(choice.split('|')),
        "FOLDER" | "DIR" | "DIRECTORY" => Candidates {
            beside: Beside::Folders,
            ..Candidates::default()
        },
        name if super::describe::names_a_file(name) => Candidates::files(),
        _ => Candidates::default(),
    }
}

/// `key=value,key=value`: keys that were not said yet, or values of the last one.
fn pairs<'a>(
    typed: &str,
    keys: &[String],
    values: impl Fn(&str) -> Option<Vec<&'a str>>,
) -> Candidates {
    let (said, last) = match typed.rfind(',') {
        Some(comma) => typed.split_at(comma + 1),
        None => ("", typed),
    };
    if let Some((key, _)) = last.split_once('=') {
        let found = values(key).map(Candidates::of).unwrap_or_default();
        return found.behind(&format!("{said}{key}="));
    }
    let is_said = |key: &str| {
        said.split(',')
            .any(|pair| pair.split('=').next() == Some(key))
    };
    let left = keys.iter().filter(|key| !is_said(key));
    let candidates = left.map(|key| (format!("{key}="), String::new())).collect();
    let candidates = Candidates {
        candidates,
        ..Candidates::default()
    };
    candidates.behind(said)
}

/// The keys of `-o`, each with what it means.
fn creation_options(format: &str, typed: &str) -> Candidates {
    let options = create_options::format_options(format).unwrap_or_default();
    let keys: Vec<String> = options
        .iter()
        .map(|option| option.name.to_owned())
        .collect();
    let mut candidates = pairs(typed, &keys, |key| {
        let option = options.iter().find(|option| option.name == key)?;
        Some(match (option.kind, key) {
            (OptionType::Bool, _) => vec!["on", "off"],
            (_, "backing_fmt") => FORMATS.to_vec(),
            (_, "cluster_size") => vec!["4k", "16k", "64k", "128k", "256k", "512k", "1M", "2M"],
            (_, "compat") => vec!["0.10", "1.1"],
            (_, "compression_type") => vec!["zlib", "zstd"],
            (_, "encrypt.format") => vec!["luks", "aes"],
            (_, "refcount_bits") => vec!["1", "2", "4", "8", "16", "32", "64"],
            (_, "preallocation") => {
                let (_, allowed) = option.help.split_once("allowed values: ")?;
                allowed.trim_end_matches(')').split(", ").collect()
            }
            _ => return None,
        })
    });
    for (word, about) in &mut candidates.candidates {
        let key = word.trim_end_matches('=').rsplit(',').next();
        let option = options.iter().find(|option| Some(option.name) == key);
        *about = option.map_or(String::new(), |option| option.help.to_owned());
    }
    candidates
}

/// Keys of a node's description, by the driver that it names.
fn node_keys(typed: &str) -> Vec<String> {
    let driver = typed
        .split(',')
        .find_map(|pair| pair.strip_prefix("driver="));
    let own = driver.into_iter().flat_map(option_names);
    NODE_KEYS
        .into_iter()
        .chain(own)
        .map(str::to_owned)
        .collect()
}

fn objects(typed: &str) -> Candidates {
    if typed.contains(',') {
        let keys = [
            "id",
            "data",
            "file",
            "format",
            "dir",
            "endpoint",
            "verify-peer",
            "username",
        ];
        return pairs(typed, &keys.map(str::to_owned), |key| match key {
            "format" => Some(vec!["raw", "base64"]),
            "endpoint" => Some(vec!["server", "client"]),
            "verify-peer" => Some(vec!["on", "off"]),
            _ => None,
        });
    }
    Candidates::of(crate::hint::OBJECTS)
}

impl super::names::Names {
    fn into_answer(self) -> Candidates {
        Candidates {
            candidates: self.0,
            ..Candidates::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Candidates for the last word of a line.
    fn complete(line: &str) -> Vec<String> {
        let mut words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        let program = words.remove(0);
        let at = words.len() - 1;
        let found = candidates(&program, &words, at);
        found.candidates.into_iter().map(|(word, _)| word).collect()
    }

    #[test]
    fn every_place_has_its_words() {
        for (line, expected) in [
            ("vellum sna", &["snapshot"][..]),
            ("vellum help ins", &["inspect", "install-links"]),
            ("vellum img be", &["bench"]),
            ("qemu-img be", &["bench"]),
            ("vellum convert -O q", &["qcow2"]),
            ("vellum convert -pO q", &["qcow2"]),
            ("vellum info --output=j", &["--output=json"]),
            ("vellum info --output j", &["json"]),
            ("vellum info --back", &["--backing-chain"]),
            ("vellum create -f qcow2 -o ext", &["extended_l2="]),
            (
                "vellum create -f qcow2 -o cluster_size=64k,ext",
                &["cluster_size=64k,extended_l2="],
            ),
            (
                "vellum create -f qcow2 -o compression_type=zs",
                &["compression_type=zstd"],
            ),
            (
                "vellum create -f qcow2 -o preallocation=fa",
                &["preallocation=falloc"],
            ),
            ("vellum convert -O raw -o preallocation=m", &[]),
            ("vellum convert -t unsa", &["unsafe"]),
            ("vellum completions f", &["fish"]),
            ("vellum check -r l", &["leaks", "log"]),
            ("vellum dd i", &["if="]),
            ("vellum info --object sec", &["secret", "secret_keyring"]),
            (
                "vellum info --image-opts driver=qcow2,l2-cache-s",
                &["driver=qcow2,l2-cache-size="],
            ),
            (
                "vellum io --image-opts driver=qcow2,jour",
                &["driver=qcow2,journal=", "driver=qcow2,journal-size="],
            ),
            ("qemu-nbd --pers", &["--persistent"]),
            ("vellum nope x", &[]),
            ("nope x", &[]),
        ] {
            assert_eq!(complete(line), expected, "{line}");
        }
    }

    #[test]
    fn files_and_folders_are_left_to_the_shell() {
        let beside = |words: &[&str]| {
            let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
            candidates("vellum", &words, words.len() - 1).beside
        };
        assert_eq!(beside(&["info", ""]), Beside::Files);
        assert_eq!(beside(&["info", "-f", "qcow2", "di"]), Beside::Files);
        assert_eq!(beside(&["info", "--", "-d"]), Beside::Files);
        assert_eq!(beside(&["create", "-b", ""]), Beside::Files);
        assert_eq!(beside(&["bench", "--dir", ""]), Beside::Folders);
        assert_eq!(beside(&["man", ""]), Beside::Folders);
        assert_eq!(beside(&["info", "--output", ""]), Beside::Nothing);
    }

    #[test]
    fn options_come_with_what_they_mean() {
        let words = ["check".to_owned(), "--rep".to_owned()];
        let text = candidates("vellum", &words, 1).text();
        assert!(text.starts_with("--repair\t"), "{text}");
        assert!(text.len() > "--repair\t\n:end\n".len(), "{text}");
    }
}

//! Completions and manual pages, as they are asked for.

use std::ffi::OsString;
use std::io;
use std::path::Path;

use clap::Command;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, italic, roman};
use vellum_io::error::io_text;

use crate::report;

use super::complete::candidates;
use super::pages::{self, Page};
use super::tools::{self, Tool};
use super::{describe, scripts};

pub(crate) const COMPLETIONS: &str = "\
Prints a completion script for PROGRAM (vellum, or one of the programs whose names it
answers to).  Usage:

  vellum completions bash|zsh|fish [PROGRAM]

For example, in ~/.bashrc:  source <(vellum completions bash)
";

const MAN: &str = "\
Writes manual pages, one for each tool, into a folder.  Usage:

  vellum man FOLDER
";

fn wants_help(words: &[OsString]) -> bool {
    words.iter().any(|word| word == "-h" || word == "--help")
}

/// `vellum completions`; returns the exit code.
pub fn completions(words: &[OsString]) -> i32 {
    if wants_help(words) {
        report::print(COMPLETIONS);
        return 0;
    }
    let words: Vec<&str> = words.iter().filter_map(|word| word.to_str()).collect();
    let (shell, program) = match words.as_slice() {
        [shell] => (*shell, "vellum"),
        [shell, program] => (*shell, *program),
        _ => return refused("Expecting a shell: bash, zsh or fish"),
    };
    let programs = tools::programs();
    let names = || programs.iter().map(|tool| tool.name.as_str());
    if !names().any(|name| name == program) {
        report::error(format_args!("'{program}' is none of the programs"));
        crate::hint::about_word(program, names());
        return 1;
    }
    match scripts::script(shell, program) {
        Some(script) => {
            report::print(script);
            0
        }
        None => refused(&format!("No completions for '{shell}': bash, zsh or fish")),
    }
}

/// A command line that is not understood; the exit code.
fn refused(message: &str) -> i32 {
    report::error(message);
    report::try_help();
    1
}

/// `vellum __complete PROGRAM INDEX WORDS...`, which the scripts call; see `complete.rs`.
pub fn complete(words: &[OsString]) -> i32 {
    let words: Vec<String> = words
        .iter()
        .map(|w| w.to_string_lossy().into_owned())
        .collect();
    let [program, at, words @ ..] = words.as_slice() else {
        return 1;
    };
    let Ok(at) = at.parse() else {
        return 1;
    };
    report::print(candidates(program, words, at).text());
    0
}

/// `vellum man`; returns the exit code.
pub fn man(words: &[OsString]) -> i32 {
    if wants_help(words) {
        report::print(MAN);
        return 0;
    }
    let folder = match words {
        [folder] if !folder.to_string_lossy().starts_with('-') => folder,
        _ => return refused("Expecting a folder"),
    };
    match write_pages(Path::new(folder)) {
        Ok(count) => {
            report::print_line(format_args!("{count} pages"));
            0
        }
        Err(error) => {
            let folder = Path::new(folder).display();
            let why = io_text(&error);
            report::error(format_args!("Cannot write into '{folder}': {why}"));
            1
        }
    }
}

/// A page for each program and each of its subcommands.
fn write_pages(folder: &Path) -> io::Result<usize> {
    std::fs::create_dir_all(folder)?;
    let mut count = 0;
    for tool in tools::programs() {
        write_page(folder, &tool.name, &tool.name, &tool)?;
        count += 1;
        for subcommand in &tool.subcommands {
            let name = format!("{}-{}", tool.name, subcommand.name);
            let call = format!("{} {}", tool.name, subcommand.name);
            write_page(folder, &name, &call, subcommand)?;
            count += 1;
        }
    }
    Ok(count)
}

fn write_page(folder: &Path, name: &str, call: &str, tool: &Tool) -> io::Result<()> {
    let command: Command = describe::command(tool);
    let command = command.name(name.to_owned()).display_name(name.to_owned());
    let mut page = Vec::new();
    let source = concat!("vellum ", env!("CARGO_PKG_VERSION"));
    let man = Man::new(command).source(source).manual("Vellum");
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    let (description, is_own) = (page_of(call), call.starts_with("vellum"));
    synopsis(call, tool, description).to_writer(&mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    if !tool.subcommands.is_empty() {
        man.render_subcommands_section(&mut page)?;
    }
    if let Some(description) = description {
        examples(call, description, is_own).to_writer(&mut page)?;
        exits(description).to_writer(&mut page)?;
    }
    settings(is_own).to_writer(&mut page)?;
    man.render_version_section(&mut page)?;
    std::fs::write(folder.join(format!("{name}.1")), page)
}

/// What is told of the tool that is called so, by any of its names.
fn page_of(call: &str) -> Option<&'static Page> {
    pages::of(match call {
        "vellum" | "qemu-img" => "vellum",
        "qemu-img bench" => "img bench",
        "qemu-io" => "io",
        "qemu-nbd" => "nbd",
        "qemu-storage-daemon" => "daemon",
        call => call.split_once(' ')?.1,
    })
}

/// How the tool is called, a line for each way.
fn synopsis(call: &str, tool: &Tool, page: Option<&Page>) -> Roff {
    let mut roff = Roff::default();
    roff.control("SH", ["SYNOPSIS"]);
    let own = page.map_or(&[][..], |page| page.usage);
    let usages = match crate::img::usage_of(&tool.name) {
        Some(usage) if own.is_empty() => {
            vec![usage.split_whitespace().collect::<Vec<_>>().join(" ")]
        }
        _ => own.iter().map(|usage| (*usage).to_owned()).collect(),
    };
    for usage in usages {
        roff.control("PP", []);
        roff.text([bold(call), roman(" "), roman(usage)]);
    }
    roff
}

/// The examples, with the name that the page is about; what only our own name can do is
/// left out under another.
pub(crate) fn examples(call: &str, page: &Page, is_own: bool) -> Roff {
    let mut roff = Roff::default();
    roff.control("SH", ["EXAMPLES"]);
    let for_own = |line: &str| line.contains("--journal") || line.contains(" - |");
    for (line, about) in page.examples {
        if !is_own && (for_own(line) || call == "qemu-img") {
            continue;
        }
        let line = match line.split_once(' ') {
            Some(("vellum", rest)) if !is_own => {
                let rest = rest.strip_prefix("img ").unwrap_or(rest);
                let after = rest.split_once(' ').map_or("", |(_, after)| after);
                format!("{call} {after}")
            }
            _ => (*line).to_owned(),
        };
        roff.control("TP", []);
        roff.text([bold(line)]);
        roff.text([roman(*about)]);
    }
    roff
}

pub(crate) fn exits(page: &Page) -> Roff {
    let mut roff = Roff::default();
    roff.control("SH", ["EXIT STATUS"]);
    for (code, meaning) in page.exits {
        roff.control("TP", []);
        roff.text([bold(*code)]);
        roff.text([roman(*meaning)]);
    }
    roff
}

/// Files and variables that every tool looks at.
fn settings(is_own: bool) -> Roff {
    let mut roff = Roff::default();
    roff.control("SH", ["FILES"]);
    roff.control("TP", []);
    roff.text([
        italic("~/.config/vellum/config.toml"),
        roman(", "),
        italic("/etc/vellum/config.toml"),
    ]);
    roff.control("PP", []);
    roff.control("nf", []);
    for line in vellum_graph::CONFIG_HELP.lines() {
        roff.text([roman(line)]);
    }
    roff.control("fi", []);
    roff.control("SH", ["ENVIRONMENT"]);
    for (name, meaning) in [
        ("VELLUM_CONFIG", "the file of settings; empty: none"),
        ("NO_COLOR", "any value: no colours on a terminal"),
    ] {
        roff.control("TP", []);
        roff.text([bold(name)]);
        roff.text([roman(meaning)]);
    }
    if is_own {
        roff.control("SH", ["SEE ALSO"]);
        roff.text([
            bold("vellum"),
            roman("(1), and "),
            bold("vellum help"),
            roman(" COMMAND"),
        ]);
    }
    roff
}

#[cfg(test)]
mod tests {
    use crate::manual::read;

    use super::*;

    /// Every tool with every subcommand.
    fn all() -> Vec<(String, Tool)> {
        let mut all = Vec::new();
        for tool in tools::programs() {
            for subcommand in tool.subcommands.clone() {
                all.push((format!("{} {}", tool.name, subcommand.name), subcommand));
            }
            all.push((tool.name.clone(), tool));
        }
        all
    }

    #[test]
    fn helps_and_parsers_speak_of_the_same_options() {
        let mut wrong = Vec::new();
        for (name, tool) in all() {
            let explained = read::options(&tool.help, &tool.options);
            for option in &explained {
                let is_parsed = |written: &String| {
                    let mut shapes = tool.options.iter();
                    shapes.any(|shape| read::names(shape).contains(written))
                };
                let unknown = option.names.iter().filter(|written| !is_parsed(written));
                wrong.extend(unknown.map(|written| format!("{name}: no such option: {written}")));
                if option.about.is_empty() {
                    wrong.push(format!("{name}: nothing explains {:?}", option.names));
                }
            }
            for shape in &tool.options {
                let written = read::names(shape);
                let is_explained = explained
                    .iter()
                    .any(|option| written.iter().any(|name| option.names.contains(name)));
                if !is_explained && !is_silent(&name, &written) {
                    wrong.push(format!("{name}: the help lacks {}", written.join(", ")));
                }
            }
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }

    /// Options that are refused by name, or accepted without effect, are for scripts: no
    /// help tells of them. Of the image tool's all are told but second names.
    fn is_silent(tool: &str, written: &[String]) -> bool {
        let second_names = ["--source-image-opts"];
        match tool.starts_with("vellum ") || tool.starts_with("qemu-img") {
            true if !tool.ends_with(" io")
                && !tool.ends_with(" nbd")
                && !tool.ends_with(" daemon") =>
            {
                written
                    .iter()
                    .any(|name| second_names.contains(&name.as_str()))
            }
            _ => true,
        }
    }

    #[test]
    fn every_description_is_sound() {
        for (_, tool) in all() {
            describe::command(&tool).debug_assert();
        }
    }

    #[test]
    fn every_page_tells_how_to_call_and_what_the_codes_mean() {
        let folder = tempfile::tempdir().unwrap();
        write_pages(folder.path()).unwrap();
        for entry in std::fs::read_dir(folder.path()).unwrap() {
            let path = entry.unwrap().path();
            let page = std::fs::read_to_string(&path).unwrap();
            let (_, synopsis) = page.split_once(".SH SYNOPSIS").unwrap();
            let synopsis = synopsis.split(".SH").next().unwrap_or_default();
            assert!(synopsis.contains(".PP"), "{path:?}");
            assert!(page.contains(".SH \"EXIT STATUS\""), "{path:?}");
            // QEMU's names have no command of ours in their examples.
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            let examples = page.split(".SH EXAMPLES").nth(1).unwrap_or_default();
            let examples = examples.split(".SH").next().unwrap_or_default();
            assert!(
                name.starts_with("vellum") || !examples.contains("vellum"),
                "{path:?}"
            );
        }
    }

    #[test]
    fn pages_are_written_for_everything() {
        let folder = tempfile::tempdir().unwrap();
        let count = write_pages(folder.path()).unwrap();
        assert!(count > 20, "{count}");
        let page = std::fs::read_to_string(folder.path().join("vellum-convert.1")).unwrap();
        for word in [
            r"\-\-target\-format",
            "vellum\\-convert",
            "Copy images to a new one",
            ".SH EXAMPLES",
            ".SH \"EXIT STATUS\"",
            "VELLUM_CONFIG",
        ] {
            assert!(page.contains(word), "{word} is not in:\n{page}");
        }
    }
}

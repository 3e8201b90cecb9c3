//! Completions and manual pages, as they are asked for.

use std::ffi::OsString;
use std::io;
use std::path::Path;

use clap::Command;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, italic, roman};
use vellum_io::error::io_text;

use crate::report;
use crate::spec::Spec;

use super::complete::candidates;
use super::tools::{self, COMPLETIONS, MAN, Tool};
use super::{describe, scripts};

/// `vellum completions`; returns the exit code.
pub fn completions(words: &[OsString]) -> i32 {
    if COMPLETIONS.gives_help(words) {
        return 0;
    }
    let words: Vec<&str> = words.iter().filter_map(|word| word.to_str()).collect();
    let (shell, program) = match words.as_slice() {
        [shell] => (*shell, "vellum"),
        [shell, program] => (*shell, *program),
        _ => return refused("Expecting a shell: bash, zsh or fish"),
    };
    let programs = tools::programs();
    let names = || programs.iter().map(|tool| tool.name);
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
    if MAN.gives_help(words) {
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
        write_page(folder, tool.name, tool.name, &tool)?;
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
    let (spec, is_own) = (tool.spec, call.starts_with("vellum"));
    synopsis(call, spec).to_writer(&mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    if !tool.subcommands.is_empty() {
        man.render_subcommands_section(&mut page)?;
    }
    examples(call, spec, is_own).to_writer(&mut page)?;
    exits(spec).to_writer(&mut page)?;
    settings(is_own).to_writer(&mut page)?;
    man.render_version_section(&mut page)?;
    std::fs::write(folder.join(format!("{name}.1")), page)
}

/// How the tool is called, a line for each way.
fn synopsis(call: &str, spec: &Spec) -> Roff {
    let mut roff = Roff::default();
    roff.control("SH", ["SYNOPSIS"]);
    for usage in spec.calls() {
        roff.control("PP", []);
        roff.text([bold(call), roman(" "), roman(usage)]);
    }
    roff
}

/// The examples, with the name that the page is about; what only our own name can do is
/// left out under another.
fn examples(call: &str, spec: &Spec, is_own: bool) -> Roff {
    let mut roff = Roff::default();
    roff.control("SH", ["EXAMPLES"]);
    let for_own = |line: &str| line.contains("--journal") || line.contains(" - |");
    for (line, about) in spec.examples() {
        if !is_own && (for_own(line) || call == "qemu-img") {
            continue;
        }
        let line = match line.split_once(' ') {
            Some(("vellum", rest)) if !is_own => {
                let rest = rest.strip_prefix("img ").unwrap_or(rest);
                let after = rest.split_once(' ').map_or("", |(_, after)| after);
                format!("{call} {after}")
            }
            _ => line.to_owned(),
        };
        roff.control("TP", []);
        roff.text([bold(line)]);
        roff.text([roman(about)]);
    }
    roff
}

fn exits(spec: &Spec) -> Roff {
    let mut roff = Roff::default();
    roff.control("SH", ["EXIT STATUS"]);
    for (code, meaning) in spec.exits() {
        roff.control("TP", []);
        roff.text([bold(code)]);
        roff.text([roman(meaning)]);
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
    use crate::getopt::OptionSpec;

    use super::*;

    /// Every tool with every subcommand.
    fn all() -> Vec<(String, Tool)> {
        let mut all = Vec::new();
        for tool in tools::programs() {
            for subcommand in tool.subcommands.clone() {
                all.push((format!("{} {}", tool.name, subcommand.name), subcommand));
            }
            all.push((tool.name.to_owned(), tool));
        }
        all
    }

    #[test]
    fn every_option_is_explained() {
        for (name, tool) in all() {
            let hidden = crate::option_rows::options_in(tool.spec.hidden);
            for option in &tool.options {
                let is_hidden = hidden.iter().any(|hidden| hidden.id == option.id);
                assert_eq!(option.about.is_empty(), is_hidden, "{name}: {}", option.id);
            }
        }
    }

    /// Every example is one that the tool's parser takes.
    #[test]
    fn every_tool_has_examples_with_options_that_exist() {
        for (name, tool) in all() {
            assert!(tool.spec.examples().count() > 0, "{name}");
            assert!(tool.spec.exits().count() > 0, "{name}");
            let examples = tool.spec.examples().filter(|_| tool.subcommands.is_empty());
            for (line, _) in examples {
                let plain = line.split('|').next().unwrap_or_default();
                for word in plain.split_whitespace().filter(|word| word.len() > 1) {
                    let option = word.split('=').next().unwrap_or_default();
                    let known = tool.options.iter().flat_map(OptionSpec::names);
                    let is_known = known.into_iter().any(|known| known == option);
                    let is_option = word.starts_with('-') && !plain.contains("'write");
                    assert!(!is_option || is_known, "{line}: {word}");
                }
            }
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

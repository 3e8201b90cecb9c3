//! Completions and manuals, made from what the parsers and the helps say: the tables of
//! options tell how an option is written, the helps what it means. Nothing about an option
//! is written a second time; a test demands that both speak of the same ones.
//!
//! `read` takes a help apart, `tools` lists the tools, `describe` makes a `clap` description of
//! each, from which `clap_complete` and `clap_mangen` write.

mod describe;
mod read;
mod tools;

use std::ffi::OsString;
use std::io;
use std::path::Path;

use clap::Command;
use clap_complete::Shell;
use clap_mangen::Man;

use crate::report;
use tools::Tool;

pub use tools::subcommand_names;

const COMPLETIONS: &str = "\
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
        _ => {
            report::error("Expecting a shell: bash, zsh or fish");
            return 1;
        }
    };
    let shell = match shell {
        "bash" => Shell::Bash,
        "zsh" => Shell::Zsh,
        "fish" => Shell::Fish,
        other => {
            report::error(format_args!(
                "No completions for '{other}': bash, zsh or fish"
            ));
            return 1;
        }
    };
    let Some(tool) = tools::programs().into_iter().find(|t| t.name == program) else {
        report::error(format_args!("'{program}' is none of the programs"));
        return 1;
    };
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut describe::command(&tool), program, &mut script);
    report::print(String::from_utf8_lossy(&script));
    0
}

/// `vellum man`; returns the exit code.
pub fn man(words: &[OsString]) -> i32 {
    if wants_help(words) {
        report::print(MAN);
        return 0;
    }
    let [folder] = words else {
        report::error("Expecting a folder");
        return 1;
    };
    match write_pages(Path::new(folder)) {
        Ok(count) => {
            report::print_line(format_args!("{count} pages"));
            0
        }
        Err(error) => {
            let folder = Path::new(folder).display();
            report::error(format_args!("Cannot write into '{folder}': {error}"));
            1
        }
    }
}

/// A page for each program and each of its subcommands.
fn write_pages(folder: &Path) -> io::Result<usize> {
    std::fs::create_dir_all(folder)?;
    let mut count = 0;
    for tool in tools::programs() {
        write_page(folder, &tool.name, &tool)?;
        count += 1;
        for subcommand in &tool.subcommands {
            let name = format!("{}-{}", tool.name, subcommand.name);
            write_page(folder, &name, subcommand)?;
            count += 1;
        }
    }
    Ok(count)
}

fn write_page(folder: &Path, name: &str, tool: &Tool) -> io::Result<()> {
    let command: Command = describe::command(tool);
    let command = command.name(name.to_owned()).display_name(name.to_owned());
    let mut page = Vec::new();
    let source = concat!("vellum ", env!("CARGO_PKG_VERSION"));
    Man::new(command)
        .source(source)
        .manual("Vellum")
        .render(&mut page)?;
    std::fs::write(folder.join(format!("{name}.1")), page)
}

#[cfg(test)]
mod tests {
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
    fn pages_are_written_for_everything() {
        let folder = tempfile::tempdir().unwrap();
        let count = write_pages(folder.path()).unwrap();
        assert!(count > 20, "{count}");
        let page = std::fs::read_to_string(folder.path().join("vellum-convert.1")).unwrap();
        for word in [
            r"\-\-target\-format",
            "vellum\\-convert",
            "Copy images to a new one",
        ] {
            assert!(page.contains(word), "{word} is not in:\n{page}");
        }
    }
}

//! The `vellum` program: every tool in one binary.
//!
//! Called by the name of one of QEMU's programs (through a link) it is that
//! program; called by its own name, the first word says which tool is meant:
//! `vellum bench`, `vellum io`, `vellum nbd`, or a subcommand of the image tool,
//! with or without `img` before it. (Of the names that are taken twice, `bench`
//! alone is our own, and `img bench` is QEMU's.)

mod audit;
mod bench;
mod ctl;
mod daemon;
mod getopt;
mod hint;
mod html_page;
mod img;
mod inspect;
mod install;
mod io;
mod local;
mod localtime;
mod manual;
mod mount;
mod nbd;
mod object;
mod oci;
mod option_rows;
mod output;
mod progress;
mod report;
mod serve;
mod server;
mod size;
mod spec;
mod style;
mod terminal;
mod trace;
mod version;

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

// What tests take out belongs into no program.
const _: () = assert!(
    !vellum_storage::mutants::ARE_BUILT_IN,
    "build vellum-cli without the feature `mutants` of vellum-storage: name fewer packages or features"
);

fn main() -> ExitCode {
    let mut words = std::env::args_os();
    let called = words.next().unwrap_or_default();
    let name = Path::new(&called).file_name().map_or_else(
        || "vellum".to_owned(),
        |name| name.to_string_lossy().into_owned(),
    );
    report::set_program(&name);
    report::set_hinter(hint::about);
    hint::set_subcommands(manual::subcommand_names);
    vellum_graph::stderr::print_every_line(name.starts_with("qemu-"));
    vellum_storage::lock::report_waits(hint::about_wait);
    outlive_the_file_size_limit();
    let code = run(&name, words.collect());
    // Codes beyond a byte do not exist; 255 stands for them as for -1.
    ExitCode::from(u8::try_from(code).unwrap_or(255))
}

/// Has a write beyond the limit of file sizes (`ulimit -f`) fail, as one without room does, and not end the
/// program, which may serve others.
fn outlive_the_file_size_limit() {
    // Without it the signal ends the program, as before.
    drop(signal_hook::flag::register(
        libc::SIGXFSZ,
        std::sync::Arc::default(),
    ));
}

fn run(name: &str, mut words: Vec<OsString>) -> i32 {
    match name {
        "qemu-img" => return img::main(name, words, &[]),
        "qemu-io" => return io::main(name, words),
        "qemu-nbd" => return nbd::main(name, words),
        "qemu-storage-daemon" => return daemon::main(name, words),
        _ => {}
    }
    let first = words.first().and_then(|word| word.to_str());
    let Some(tool) = first.and_then(tool) else {
        return match first {
            Some("help") => help(name, words.split_off(1)),
            // `vellum --help convert` is asked as often.
            Some("-h" | "--help") if words.len() > 1 => help(name, words.split_off(1)),
            Some("version") if words.len() == 1 => run(name, vec!["--version".into()]),
            Some("img") => img::main(name, words.split_off(1), manual::OTHERS),
            Some("__complete") => manual::complete(&words[1..]),
            _ => img::main(name, words, manual::OTHERS),
        };
    };
    report::set_command(first.unwrap_or_default());
    tool(name, words.split_off(1))
}

/// A tool: the program's name and the words after its own to its exit code.
type Main = fn(&str, Vec<OsString>) -> i32;

/// The tools beside the image tool.
fn tool(name: &str) -> Option<Main> {
    Some(match name {
        "audit" => audit::main,
        "bench" => bench::main,
        "completions" => |_, words| manual::completions(&words),
        "ctl" => ctl::main,
        "daemon" => daemon::main,
        "inspect" => inspect::main,
        "install-links" => |_, words| install::main(&words),
        "io" => io::main,
        "man" => |_, words| manual::man(&words),
        "mount" => mount::main,
        "nbd" => nbd::main,
        "oci" => oci::main,
        "serve" => serve::main,
        _ => return None,
    })
}

/// `vellum help [COMMAND]`: the same as `vellum [COMMAND] --help`.
fn help(name: &str, mut words: Vec<OsString>) -> i32 {
    if words.first().is_some_and(|word| word == "config") && words.len() == 1 {
        report::print(vellum_graph::CONFIG_HELP);
        return 0;
    }
    words.retain(|word| word != "-h" && word != "--help" && word != "help");
    words.push("--help".into());
    run(name, words)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each tool takes each option that its specification lists: one that it forgets fails an assertion. An option
    /// that does not exist ends each command line.
    #[test]
    fn every_option_is_taken() {
        const ENDS_AT_ONCE: [&str; 3] = ["help", "version", "trace"];
        for spec in manual::OTHERS {
            let main = tool(spec.name).expect(spec.name);
            for option in spec.options() {
                let names = option
                    .names()
                    .filter(|_| !ENDS_AT_ONCE.contains(&option.id));
                let Some(name) = names.last() else {
                    continue;
                };
                let words = [Some(name.as_str()), option.value.map(|_| "1"), Some("-?")];
                let words = words.into_iter().flatten().map(OsString::from).collect();
                assert_ne!(main("vellum", words), 0, "{} {name}", spec.name);
            }
        }
    }
}

//! The `vellum` program: every tool in one binary.
//!
//! Called by the name of one of QEMU's programs (through a link) it is that
//! program; called by its own name, the first word says which tool is meant:
//! `vellum bench`, `vellum io`, `vellum nbd`, or a subcommand of the image tool,
//! with or without `img` before it. (Of the names that are taken twice, `bench`
//! alone is our own, and `img bench` is QEMU's.)

mod audit;
mod bench;
mod daemon;
mod getopt;
mod hint;
mod img;
mod inspect;
mod install;
mod io;
mod localtime;
mod manual;
mod nbd;
mod object;
mod output;
mod page;
mod paint;
mod report;
mod size;
mod terminal;
mod trace;

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut words = std::env::args_os();
    let called = words.next().unwrap_or_default();
    let name = Path::new(&called).file_name().map_or_else(
        || "vellum".to_owned(),
        |name| name.to_string_lossy().into_owned(),
    );
    report::set_program(&name);
    let code = run(&name, words.collect());
    // Codes beyond a byte do not exist; 255 stands for them as for -1.
    ExitCode::from(u8::try_from(code).unwrap_or(255))
}

fn run(name: &str, mut words: Vec<OsString>) -> i32 {
    match name {
        "qemu-img" => return img::main(name, words),
        "qemu-io" => return io::main(name, words),
        "qemu-nbd" => return nbd::main(name, words),
        "qemu-storage-daemon" => return daemon::main(name, words),
        _ => {}
    }
    match words.first().and_then(|word| word.to_str()) {
        Some("audit") => audit::main(name, words.split_off(1)),
        Some("bench") => bench::main(name, words.split_off(1)),
        Some("img") => img::main(name, words.split_off(1)),
        Some("inspect") => inspect::main(name, words.split_off(1)),
        Some("io") => io::main(name, words.split_off(1)),
        Some("nbd") => nbd::main(name, words.split_off(1)),
        Some("completions") => manual::completions(&words[1..]),
        Some("install-links") => install::main(&words[1..]),
        Some("man") => manual::man(&words[1..]),
        Some("daemon") => daemon::main(name, words.split_off(1)),
        _ => img::main(name, words),
    }
}

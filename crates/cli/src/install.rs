//! `vellum install-links`: links by whose names this program is QEMU's tools.
//!
//! Invariant: nothing is replaced but links that lead to a program called `vellum`.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use vellum_io::error::io_text;

use crate::report;
use crate::spec::Spec;

pub const SPEC: Spec = Spec {
    name: "install-links",
    about: "Make links by the names of QEMU's programs",
    explains: "Makes links to this program by the names of QEMU's programs.",
    usage: "FOLDER\n",
    closing: "
The links are qemu-img, qemu-io, qemu-nbd and qemu-storage-daemon.  What FOLDER holds by
these names is left alone unless it is a link to a vellum.
",
    examples: "\
vellum install-links ~/.local/bin
  qemu-img is vellum there
",
    ..Spec::EMPTY
};

/// The names that the program answers to.
pub const NAMES: [&str; 4] = ["qemu-img", "qemu-io", "qemu-nbd", "qemu-storage-daemon"];

/// Runs the tool and returns its exit code.
pub fn main(words: &[OsString]) -> i32 {
    if SPEC.gives_help(words) {
        return 0;
    }
    let folder = match words {
        [folder] if !folder.to_string_lossy().starts_with('-') => folder,
        _ => {
            report::error("Expecting a folder");
            report::try_help();
            return 1;
        }
    };
    let folder = Path::new(folder);
    let installed = std::env::current_exe()
        .map_err(|error| format!("Cannot tell where this program is: {}", io_text(&error)))
        .and_then(|program| install(&program, folder));
    match installed {
        Ok(()) => 0,
        Err(message) => {
            report::error(message);
            1
        }
    }
}

/// Makes the links; looks at all of them before it makes the first.
fn install(program: &Path, folder: &Path) -> Result<(), String> {
    let links: Vec<PathBuf> = NAMES.iter().map(|name| folder.join(name)).collect();
    for link in &links {
        check(link)?;
    }
    for link in &links {
        let cannot =
            |error: io::Error| format!("Cannot make '{}': {}", link.display(), io_text(&error));
        match std::fs::remove_file(link) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(cannot(error)),
        }
        std::os::unix::fs::symlink(program, link).map_err(cannot)?;
        report::print_line(format_args!("{} -> {}", link.display(), program.display()));
    }
    Ok(())
}

/// Whether a link may be made here.
fn check(link: &Path) -> Result<(), String> {
    let Ok(found) = std::fs::symlink_metadata(link) else {
        return Ok(());
    };
    let is_ours = found.is_symlink()
        && std::fs::read_link(link)
            .is_ok_and(|target| target.file_name().is_some_and(|name| name == "vellum"));
    match is_ours {
        true => Ok(()),
        false => Err(format!(
            "'{}' exists and is no link to vellum; it is left alone",
            link.display()
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_replace_links_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let program = Path::new("/opt/vellum");
        install(program, folder.path()).unwrap();
        install(Path::new("/usr/bin/vellum"), folder.path()).unwrap();
        for name in NAMES {
            let target = std::fs::read_link(folder.path().join(name)).unwrap();
            assert_eq!(target, Path::new("/usr/bin/vellum"));
        }
        let taken = folder.path().join("qemu-io");
        std::fs::remove_file(&taken).unwrap();
        std::fs::write(&taken, b"QEMU's own").unwrap();
        assert!(install(program, folder.path()).is_err());
        assert_eq!(std::fs::read(&taken).unwrap(), b"QEMU's own");
        let first = std::fs::read_link(folder.path().join("qemu-img")).unwrap();
        assert_eq!(first, Path::new("/usr/bin/vellum"), "nothing was begun");
    }
}

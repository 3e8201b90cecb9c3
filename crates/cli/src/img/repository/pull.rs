//! `pull`: copies a disk out of a repository.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde_json::json;
use vellum_graph::repository::Named;
use vellum_images::create;
use vellum_io::error::io_text;
use vellum_io::lane;
use vellum_options::filename;
use vellum_repository::PushId;
use vellum_storage::{FileOptions, FileStorage};

use super::super::command::{Command, Failure, Outcome, Subcommand, fail, not_taken};
use super::super::convert;
use super::super::rows::{OBJECT, PROGRESS, QUIET, REPOSITORY, TAG};
use super::{find, named};
use crate::spec::Spec;

pub static PULL: Subcommand = Subcommand {
    spec: Spec {
        name: "pull",
        about: "Copy a disk out of a repository",
        usage: "\
[-O FMT] [-o OPTIONS] [-c] [-n] [-p] [-q] [--object OBJDEF]
        REPOSITORY[:TAG[@NUMBER]] FILENAME",
        arguments: &[
            QUIET,
            PROGRESS,
            "-O, --target-format FMT  the format of FILENAME (qcow2; raw for .raw and .img)",
            "-o, --target-options OPTIONS  options of that format",
            "-c, --compress  compress what is written",
            "-n, --no-create  FILENAME is there: overwrite what it holds",
            OBJECT,
            REPOSITORY,
            TAG,
            "FILENAME  the file to make; it appears when it is complete",
        ],
        examples: "\
vellum pull s3://backups/site:vm1 disk.qcow2
  the newest one
vellum pull -O raw s3://backups/site:vm1@3 disk.raw
  the third one, as a raw image
",
        ..Spec::EMPTY
    },
    run,
};

fn run(command: Command<'_>, args: Vec<OsString>) -> Outcome {
    let mut words = Vec::<String>::new();
    let (mut format, mut existing, mut settings) = (None, false, Vec::<String>::new());
    let common = command.parse(args, |name, value| {
        match name {
            "target-format" => format = Some(value),
            "target-options" => {
                settings.push(value.clone());
                words.extend(["-o".into(), value]);
            }
            "compress" => words.push("-c".into()),
            "no-create" => existing = true,
            _ => return not_taken(name),
        }
        Ok(())
    })?;
    words.extend(common.quiet.then(|| "-q".into()));
    words.extend(common.progress.then(|| "-p".into()));
    let [disk, target] = common.operands.as_slice() else {
        let message = "Expecting a disk in a repository and a file";
        return Err(Failure::Usage(message.into()));
    };
    let format = format.unwrap_or_else(|| format_of(target).to_owned());
    if !existing {
        refuse_several_files(target, &format, &settings.join(","))?;
    }
    let named = named(disk)?;
    let (number, push) = find_disk(&named)?;
    words.extend(["-O".to_owned(), format]);
    if existing {
        words.push("-n".into());
    }
    let node = json!({"driver": "raw", "file": named.node(number, push)});
    words.push(format!("json:{node}"));
    match unfinished_path(target, existing)? {
        None => copy(command, words, target),
        Some((path, unfinished)) => {
            let name = unfinished.to_string_lossy().into_owned();
            let copied = copy(command, words, &name);
            if !matches!(copied, Ok(0)) {
                // What is wrong was said.
                let _ = fs::remove_file(&unfinished);
                return copied;
            }
            let like_before = like(&path, &unfinished);
            if let Err(error) = &like_before {
                let _ = fs::remove_file(&unfinished);
                return fail(format!("Could not replace '{target}': {error}"));
            }
            match give_name(&unfinished, &path, sync) {
                Ok(()) => Ok(0),
                Err(error) => fail(format!("Could not create '{target}': {}", io_text(&error))),
            }
        }
    }
}

/// Refuses an image of several files: all but one would have their names before they are whole, in the
/// place of what was there.
fn refuse_several_files(target: &str, format: &str, options: &str) -> Result<(), Failure> {
    let others = create::settings(target, format).and_then(|mut settings| {
        settings.parse(options)?;
        create::other_files(target, format, &settings)
    });
    // What else is wrong with them the copy tells.
    match others.is_ok_and(|others| !others.is_empty()) {
        true => fail(
            "What is pulled is one file, without a data file or extents beside it: 'vellum convert' \
             makes others of it",
        ),
        false => Ok(()),
    }
}

/// The number of the disk, and what has made it. The copy chooses by itself what its lane is like, so this one is another
/// thread's.
fn find_disk(named: &Named) -> Result<(u64, PushId), Failure> {
    let find = || {
        let found = lane::block_on(find(named));
        found.map(|(_, manifest)| (manifest.number, manifest.push))
    };
    std::thread::scope(|scope| {
        let started = std::thread::Builder::new().spawn_scoped(scope, find);
        let found = started
            .map_err(|error| vellum::Error::no_thread(&error))?
            .join();
        found.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn copy(command: Command<'_>, mut words: Vec<String>, target: &str) -> Outcome {
    words.push(target.to_owned());
    let command = Command {
        subcommand: &convert::CONVERT,
        ..command
    };
    (convert::CONVERT.run)(command, words.into_iter().map(OsString::from).collect())
}

/// The format that a name's ending says; qcow2 unless that is of a raw disk.
fn format_of(target: &str) -> &'static str {
    let ending = Path::new(target).extension();
    match ending.and_then(|ending| ending.to_str()) {
        Some("raw" | "img") => "raw",
        _ => "qcow2",
    }
}

/// Where the image is made until it is complete; `None` where it is made in its place.
///
/// Invariant: no two pulls have the same place, on whatever hosts and in whatever containers they are, as each removes what
/// lies there, and gives it the disk's name. So it is drawn at random.
fn unfinished_path(target: &str, existing: bool) -> Result<Option<(PathBuf, PathBuf)>, Failure> {
    if existing || filename::protocol(target).is_some() {
        return Ok(None);
    }
    let path = fs::canonicalize(target).unwrap_or_else(|_| PathBuf::from(target));
    // A link to nothing yet is followed.
    if path.is_symlink() || fs::metadata(&path).is_ok_and(|found| !found.is_file()) {
        return Ok(None);
    }
    let Some(name) = path.file_name() else {
        return Ok(None);
    };
    let mut random = [0; 16];
    if let Err(error) = getrandom::fill(&mut random) {
        return fail(format!("no random number for a name: {error}"));
    }
    let mut name = name.to_owned();
    name.push(format!(".pull-{:032x}", u128::from_ne_bytes(random)));
    let unfinished = path.with_file_name(name);
    // A name that looks like a protocol's is none behind a slash.
    let unfinished = match unfinished.is_absolute() {
        true => unfinished,
        false => Path::new(".").join(unfinished),
    };
    Ok(Some((path, unfinished)))
}

/// Has the new file be as the one that it replaces, which nobody may be using: its locks are held until
/// the new one has the name.
fn like(path: &Path, unfinished: &Path) -> Result<Option<std::sync::Arc<FileStorage>>, String> {
    let Ok(before) = fs::metadata(path) else {
        return Ok(None);
    };
    let text = |error: &std::io::Error| io_text(error);
    let opened = FileStorage::open(path, &FileOptions::default());
    let held = opened.map_err(|error| vellum_options::error_text(&error))?;
    fs::set_permissions(unfinished, before.permissions()).map_err(|error| text(&error))?;
    // Only root may give files away; others keep what they make.
    let _ = std::os::unix::fs::chown(unfinished, Some(before.uid()), Some(before.gid()));
    Ok(Some(held))
}

/// Gives a complete image its name, durably; if that fails before it has the name, it is removed.
fn give_name(
    unfinished: &Path,
    path: &Path,
    sync: impl Fn(&Path) -> std::io::Result<()>,
) -> std::io::Result<()> {
    let named = sync(unfinished).and_then(|()| fs::rename(unfinished, path));
    if named.is_err() {
        // The first error is the one to tell.
        let _ = fs::remove_file(unfinished);
    }
    named.and_then(|()| sync(path.parent().unwrap_or(Path::new("."))))
}

fn sync(path: &Path) -> std::io::Result<()> {
    let path = if path.as_os_str().is_empty() {
        Path::new(".")
    } else {
        path
    };
    fs::File::open(path)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(target: &str, existing: bool) -> Option<(PathBuf, PathBuf)> {
        unfinished_path(target, existing).ok().flatten()
    }

    #[test]
    fn an_image_that_cannot_be_synced_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let (path, unfinished) = (
            folder.path().join("disk"),
            folder.path().join("disk.pull-0"),
        );
        fs::write(&unfinished, "new").unwrap();
        fs::write(&path, "old").unwrap();
        let fails = |_: &Path| Err(std::io::Error::from_raw_os_error(5));
        assert!(give_name(&unfinished, &path, fails).is_err());
        assert!(!unfinished.exists());
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        fs::write(&unfinished, "new").unwrap();
        give_name(&unfinished, &path, sync).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
    }

    #[test]
    fn an_image_is_made_beside_its_name() {
        let (path, unfinished) = places("/nowhere/disk.qcow2", false).unwrap();
        assert_eq!(path, Path::new("/nowhere/disk.qcow2"));
        assert!(unfinished.starts_with("/nowhere"));
        let name = unfinished
            .file_name()
            .unwrap()
            .to_string_lossy()
            .into_owned();
        assert!(name.starts_with("disk.qcow2.pull-"));
        assert_eq!(places("/dev/null", false), None);
        assert_eq!(places("/nowhere/disk", true), None);
        assert_eq!(places("nbd://localhost", false), None);
        assert_eq!(
            (format_of("a.img"), format_of("a"), format_of("b/c.qcow2")),
            ("raw", "qcow2", "qcow2")
        );
    }

    /// Processes in containers have the same number, often 1.
    #[test]
    fn no_two_pulls_make_an_image_in_the_same_place() {
        let place = || places("/nowhere/disk.qcow2", false).unwrap().1;
        assert_ne!(place(), place());
    }
}

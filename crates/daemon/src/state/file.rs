//! The state file: a line about it, and a line with what there is.
//!
//! Invariants:
//! - At any moment, and after a power cut, the file is one that was written whole.
//! - Nothing is followed but what the file's own name leads to, once, before it is locked: two daemons
//!   cannot keep one file by two names, and nothing else is written to.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use blake2::{Blake2b512, Digest};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde_json::{Value, json};
use vellum_io::error::io_text;

/// What the first line calls the file, with the version of what is in it.
const MARK: &str = "vellum-state";
const VERSION: u64 = 1;
/// A file that is longer is none of ours, and none is written.
const MAX_BYTES: u64 = 256 << 20;
/// More than what a file has beside what it says.
const HEAD_BYTES: u64 = 256;

/// So long is a daemon waited for that was killed.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(10);

/// A name of our own for what is not whole yet.
fn new_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    name.into()
}

/// Where a state file is: what links lead to, if its name is one.
///
/// # Errors
/// If that is nowhere.
pub(super) fn real_path(path: &Path) -> Result<PathBuf, String> {
    let failed = |why: &str| {
        let path = path.display();
        Err(format!("the state file '{path}' has no place: {why}"))
    };
    let is_link = |path: &Path| std::fs::symlink_metadata(path).is_ok_and(|it| it.is_symlink());
    let found = match is_link(path) {
        false => Ok(path.to_owned()),
        true => match std::fs::canonicalize(path) {
            // The file that it leads to is to be made.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let target = std::fs::read_link(path).map(|target| folder_of(path).join(target));
                target.and_then(|target| match is_link(&target) {
                    true => Err(io::Error::other("it leads to a link that leads nowhere")),
                    false => Ok(target),
                })
            }
            found => found,
        },
    };
    let found = found.or_else(|error| failed(&io_text(&error)))?;
    // Before a lock is made beside it.
    match std::fs::symlink_metadata(&found) {
        Ok(what) if !what.is_file() => failed("it is no regular file"),
        _ => Ok(found),
    }
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Opens what is at a path, if that is a regular file; anything else could keep its reader for ever.
fn open_regular(options: &mut std::fs::OpenOptions, path: &Path) -> io::Result<File> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = options.custom_flags(flags).open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::other("it is no regular file")),
    }
}

/// Keeps other daemons away from a state file as long as what is returned is open. One that was killed
/// may hold it for a moment longer.
///
/// # Errors
/// If one keeps it, or there can be no lock.
pub(super) fn lock(path: &Path) -> Result<File, String> {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    let failed = |error: io::Error| {
        let why = io_text(&error);
        format!("cannot lock the state file '{}': {why}", path.display())
    };
    let mut options = File::options();
    let options = options.write(true).create(true).truncate(false).mode(0o600);
    let file = open_regular(options, Path::new(&name)).map_err(failed)?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(Errno::WOULDBLOCK) if Instant::now() < deadline => std::thread::sleep(PAUSE),
            Err(Errno::WOULDBLOCK) => {
                return Err(format!(
                    "another daemon keeps the state file '{}'; end that first, or choose another file",
                    path.display()
                ));
            }
            Err(errno) => return Err(failed(errno.into())),
        }
    }
}

fn sum(text: &str) -> String {
    let digest = Blake2b512::digest(text.as_bytes());
    digest[..16]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// Refuses a file that no start would read.
fn check_length(len_bytes: u64) -> io::Result<()> {
    match len_bytes <= MAX_BYTES {
        true => Ok(()),
        false => Err(io::Error::other(format!(
            "it would have {len_bytes} bytes, and may have {MAX_BYTES}: remove nodes, exports or jobs"
        ))),
    }
}

/// Why a file was not written.
#[derive(Debug)]
pub(super) enum WriteFailure {
    /// The one before is in its place.
    AsBefore(io::Error),
    /// It is in its place, and may not be after a power cut.
    Replaced(io::Error),
}

impl WriteFailure {
    pub(super) fn error(&self) -> &io::Error {
        match self {
            WriteFailure::AsBefore(error) | WriteFailure::Replaced(error) => error,
        }
    }
}

/// Puts a file in the place of the one that is there, durably.
///
/// # Errors
/// What the system says, and which of the two is there.
pub(super) fn write(path: &Path, body: &str) -> Result<(), WriteFailure> {
    let folder = replace(path, body).map_err(WriteFailure::AsBefore)?;
    folder.sync_all().map_err(WriteFailure::Replaced)
}

/// Puts a file in the place of the one that is there; the folder that is to know it durably.
fn replace(path: &Path, body: &str) -> io::Result<File> {
    check_length(body.len() as u64 + HEAD_BYTES)?;
    let head = json!({MARK: VERSION, "sum": sum(body)});
    let new = new_path(path);
    // When the file is there it is too late to find that no more can be opened.
    let folder = File::open(folder_of(path))?;
    // Images have names that others need not know.
    match std::fs::remove_file(&new) {
        // What a daemon that was killed had begun.
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let mut options = File::options();
    let options = options.write(true).create_new(true);
    let mut file = options.mode(0o600).open(&new)?;
    file.write_all(format!("{head}\n{body}\n").as_bytes())?;
    file.sync_all()?;
    std::fs::rename(&new, path)?;
    Ok(folder)
}

/// Reads a file; `None` if there is none.
///
/// # Errors
/// If it cannot be read, or is not as it was written; what a person should do is said.
pub(super) fn read(path: &Path) -> Result<Option<Value>, String> {
    let mut text = String::new();
    let whole = || {
        let file = open_regular(File::options().read(true), path)?;
        let about = file.metadata()?;
        if about.len() > MAX_BYTES {
            return Err(io::Error::other(format!(
                "it has {} bytes, and this program writes none with more than {MAX_BYTES}",
                about.len()
            )));
        }
        match about.nlink() {
            0 | 1 => file.take(MAX_BYTES).read_to_string(&mut text),
            links => Err(io::Error::other(format!(
                "it has {links} names (hard links), of which another daemon may keep one: remove the others"
            ))),
        }
    };
    match { whole }() {
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => {
            let why = io_text(&error);
            return Err(format!(
                "cannot read the state file '{}': {why}",
                path.display()
            ));
        }
    }
    let damaged = |why: &str| {
        format!(
            "the state file '{}' is damaged ({why}): put a copy of it back, or move it away to \
             start without what was made at run time",
            path.display()
        )
    };
    let (head, body) = text
        .split_once('\n')
        .ok_or_else(|| damaged("it has no second line"))?;
    let head: Value = serde_json::from_str(head).map_err(|_| damaged("its first line"))?;
    match head[MARK].as_u64() {
        Some(VERSION) => {}
        Some(other) => {
            return Err(format!(
                "the state file '{}' is of version {other}, of a newer program",
                path.display()
            ));
        }
        None => return Err(damaged("its first line")),
    }
    let body = body.strip_suffix('\n').unwrap_or(body);
    if head["sum"] != sum(body) {
        return Err(damaged("its sum"));
    }
    let content = serde_json::from_str(body).map_err(|_| damaged("its second line"))?;
    Ok(Some(content))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_lead_to_one_place_and_nothing_else_is_followed() {
        use std::os::unix::fs::symlink;
        let folder = tempfile::tempdir().expect("a folder");
        let root = std::fs::canonicalize(folder.path()).expect("it is there");
        let at = |name: &str| root.join(name);
        std::fs::create_dir(at("other")).expect("a folder");
        symlink("other/state", at("link")).expect("a link");
        symlink("link", at("further")).expect("a link");
        symlink("further", at("loop-a")).expect("a link");
        // It is to be made there.
        assert_eq!(real_path(&at("link")), Ok(at("other/state")));
        assert!(
            real_path(&at("further"))
                .unwrap_err()
                .contains("leads nowhere")
        );
        let content = json!({"nodes": []});
        write(&at("other/state"), &content.to_string()).expect("room");
        for name in ["link", "further", "loop-a", "other/state", "other/../link"] {
            assert_eq!(real_path(&at(name)), Ok(at("other/state")), "{name}");
        }
        assert!(real_path(&at("..")).is_err());

        std::fs::write(at("precious"), "precious").expect("room");
        symlink(at("precious"), at("other/state.new")).expect("a link");
        write(&at("other/state"), &content.to_string()).expect("room");
        let kept = std::fs::read_to_string(at("precious")).expect("it is there");
        assert_eq!(kept, "precious");
        symlink(at("precious"), at("other/state.lock")).expect("a link");
        assert!(lock(&at("other/state")).is_err());

        std::fs::hard_link(at("other/state"), at("twin")).expect("a link");
        for name in ["twin", "other/state"] {
            assert!(
                read(&at(name)).unwrap_err().contains("hard links"),
                "{name}"
            );
        }
        std::fs::remove_file(at("twin")).expect("it is there");
        assert_eq!(read(&at("other/state")), Ok(Some(content)));
    }

    #[test]
    fn what_is_no_file_is_not_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let pipe = folder.path().join("pipe");
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0)
            .expect("a pipe");
        for path in [&*pipe, Path::new("/dev/zero"), folder.path()] {
            let why = read(path).unwrap_err();
            assert!(why.contains("no regular file"), "{why}");
        }
    }

    #[test]
    fn what_no_start_would_read_is_not_written() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("state");
        write(&path, "{}").expect("room");
        let long = "x".repeat(usize::try_from(MAX_BYTES).expect("an address"));
        let why = write(&path, &long).unwrap_err();
        assert!(matches!(why, WriteFailure::AsBefore(_)));
        assert!(why.error().to_string().contains("may have 268435456"));
        assert_eq!(read(&path), Ok(Some(json!({}))));
        let file = File::options().write(true).open(&path).expect("a file");
        file.set_len(MAX_BYTES + 1).expect("a hole");
        assert!(read(&path).unwrap_err().contains("with more than"));
    }

    #[test]
    fn what_is_not_as_it_was_written_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("state");
        assert_eq!(read(&path), Ok(None));
        let content = json!({"nodes": [{"node-name": "a"}]});
        write(&path, &content.to_string()).expect("room");
        assert_eq!(read(&path), Ok(Some(content.clone())));
        write(&path, "{}").expect("room");
        write(&path, &content.to_string()).expect("room");
        assert_eq!(
            std::fs::read_dir(folder.path()).expect("a folder").count(),
            1
        );
        let whole = std::fs::read(&path).expect("it is there");
        for at in 0..whole.len() {
            let mut other = whole.clone();
            other[at] ^= 1;
            std::fs::write(&path, &other).expect("room");
            // The last byte only ends the line.
            assert!(read(&path).is_err() || at + 1 == whole.len(), "byte {at}");
            std::fs::write(&path, &whole[..at]).expect("room");
            assert!(read(&path).is_err() || at + 1 == whole.len(), "{at} bytes");
        }
        std::fs::write(&path, "{\"vellum-state\":2}\n{}\n").expect("room");
        assert!(read(&path).unwrap_err().contains("newer program"));
    }
}

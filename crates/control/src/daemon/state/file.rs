//! The state file: a line about it, and a line with what there is.
//!
//! Invariant: at any moment, and after a power cut, the file is one that was written whole.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
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
/// A file that is longer is none of ours.
const MAX_BYTES: u64 = 256 << 20;

/// So long is a daemon waited for that was killed.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(10);

/// A name of our own for what is not whole yet.
fn new_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    name.into()
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
    let file = options.open(name).map_err(failed)?;
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

/// Puts a file in the place of the one that is there, durably.
///
/// # Errors
/// What the system says; the old one is there then.
pub(super) fn write(path: &Path, content: &Value) -> io::Result<()> {
    let body = content.to_string();
    let head = json!({MARK: VERSION, "sum": sum(&body)});
    let new = new_path(path);
    // Images have names that others need not know.
    let mut options = File::options();
    let options = options.write(true).create(true).truncate(true).mode(0o600);
    let mut file = options.open(&new)?;
    file.write_all(format!("{head}\n{body}\n").as_bytes())?;
    file.sync_all()?;
    std::fs::rename(&new, path)?;
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    File::open(folder)?.sync_all()
}

/// Reads a file; `None` if there is none.
///
/// # Errors
/// If it cannot be read, or is not as it was written; what a person should do is said.
pub(super) fn read(path: &Path) -> Result<Option<Value>, String> {
    let mut text = String::new();
    let whole = File::open(path).and_then(|file| file.take(MAX_BYTES).read_to_string(&mut text));
    match whole {
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
    fn what_is_not_as_it_was_written_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("state");
        assert_eq!(read(&path), Ok(None));
        let content = json!({"nodes": [{"node-name": "a"}]});
        write(&path, &content).expect("room");
        assert_eq!(read(&path), Ok(Some(content.clone())));
        write(&path, &json!({})).expect("room");
        write(&path, &content).expect("room");
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

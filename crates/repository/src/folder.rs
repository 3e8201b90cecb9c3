//! [`FolderObjects`]: a folder as a store of objects, for repositories on disks and network shares.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use futures_channel::oneshot;
use rustix::fs::{CWD, Mode, OFlags, RenameFlags, renameat_with};
use rustix::io::Errno;
use vellum_io::{Error, ErrorKind, Io, Result};

use crate::objects::{ObjectInfo, Objects};

/// What begins the names of files that are not complete.
const UNFINISHED: &str = ".vellum-";

/// How often something is tried that fails for a reason which passes, and the pause between.
const MOST_TRIES: u32 = 5;
const TRY_PAUSE: Duration = Duration::from_millis(20);

/// A folder with a file for each object. A file gets its name when it is complete and durable.
#[derive(Debug)]
pub struct FolderObjects {
    root: Arc<PathBuf>,
    name: String,
}

impl FolderObjects {
    /// The repository in a folder; it is made with its first object.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        let root = root.into();
        FolderObjects {
            name: root.display().to_string(),
            root: Arc::new(root),
        }
    }

    /// Does something that blocks on a thread of its own; they are few, and for long requests.
    fn run<T: Send + 'static>(
        &self,
        operation: &'static str,
        key: &str,
        work: impl Fn(&Path, &str) -> io::Result<T> + Send + Sync + 'static,
    ) -> Io<T> {
        let (root, key) = (self.root.clone(), key.to_owned());
        let target = root.join(&key).display().to_string();
        let work = Arc::new(move || check_inside(&root, &key).and_then(|()| work(&root, &key)));
        // A machine that is short of threads now may have one a moment later.
        let started = patiently(|| {
            let (send, receive) = oneshot::channel();
            let work = work.clone();
            let thread = std::thread::Builder::new().name("vellum-folder".to_owned());
            thread.spawn(move || {
                // The caller may be gone; the result goes with it.
                let _ = send.send(work());
            })?;
            Ok(receive)
        });
        Io::start(async move {
            let done = match started {
                Ok(receive) => receive
                    .await
                    .unwrap_or_else(|_| Err(io::Error::other("a thread has ended"))),
                Err(error) => return Err(Error::no_thread(&error).target(target)),
            };
            done.map_err(|error| Error::from_io(operation, &error).target(target))
        })
    }

    /// As [`FolderObjects::run`], of what may be done twice: what passes is tried again.
    fn run_again<T: Send + 'static>(
        &self,
        operation: &'static str,
        key: &str,
        work: impl Fn(&Path, &str) -> io::Result<T> + Send + Sync + 'static,
    ) -> Io<T> {
        self.run(operation, key, move |root, key| {
            patiently(|| work(root, key))
        })
    }
}

/// Tries something again that fails for a reason which passes (`EAGAIN`, `EINTR`, `ETIMEDOUT`), some times.
fn patiently<T>(mut work: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let mut tries = 1;
    loop {
        let passes = |error: &io::Error| {
            matches!(
                error.kind(),
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted | io::ErrorKind::TimedOut
            )
        };
        match work() {
            Err(error) if passes(&error) && tries < MOST_TRIES => {
                tries += 1;
                std::thread::sleep(TRY_PAUSE);
            }
            done => return done,
        }
    }
}

impl Objects for FolderObjects {
    fn name(&self) -> &str {
        &self.name
    }

    fn get(&self, key: &str, limit_bytes: u64) -> Io<Vec<u8>> {
        self.run_again("read", key, move |root, key| {
            let mut content = Vec::new();
            let file = open_file(&root.join(key))?;
            file.take(limit_bytes.saturating_add(1))
                .read_to_end(&mut content)?;
            match content.len() as u64 > limit_bytes {
                true => Err(io::Error::other(
                    "the file is too long for what it should be",
                )),
                false => Ok(content),
            }
        })
    }

    fn get_range(&self, key: &str, range: Range<u64>) -> Io<Vec<u8>> {
        self.run_again("read", key, move |root, key| {
            let mut file = open_file(&root.join(key))?;
            let len_bytes = range.end.saturating_sub(range.start);
            // What somebody else says of a length gets no memory before it is looked at.
            if range.end > file.metadata()?.len() {
                return Err(io::Error::other("the file is shorter than it should be"));
            }
            let mut content = vec![0; len_bytes as usize];
            file.seek(SeekFrom::Start(range.start))?;
            file.read_exact(&mut content)?;
            Ok(content)
        })
    }

    fn put(&self, key: &str, content: Vec<u8>) -> Io<()> {
        self.run("write", key, move |root, key| {
            let path = root.join(key);
            unfinished(&path, &content)?
                .persist(&path)
                .map_err(|error| error.error)?;
            sync_folder(&path)
        })
    }

    fn put_new(&self, key: &str, content: Vec<u8>) -> Io<bool> {
        self.run("write", key, move |root, key| {
            let path = root.join(key);
            if path.exists() {
                return Ok(false);
            }
            let is_new = name_new(unfinished(&path, &content)?, &path)?;
            sync_folder(&path)?;
            Ok(is_new)
        })
    }

    fn list(&self, prefix: &str) -> Io<Vec<ObjectInfo>> {
        self.run_again("list", prefix, |root, prefix| {
            let mut found = Vec::new();
            list_below(&root.join(prefix), prefix, &mut found)?;
            found.sort_unstable_by(|a, b| a.key.cmp(&b.key));
            Ok(found)
        })
    }

    fn remove_unfinished(&self, older: Duration) -> Io<()> {
        self.run("clean", "", move |root, _| {
            remove_unfinished_below(root, older)
        })
    }

    fn remove(&self, key: &str) -> Io<()> {
        self.run("remove", key, |root, key| {
            let path = root.join(key);
            match fs::remove_file(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                done => done?,
            }
            // The folder of a push goes with its last object.
            if key.matches('/').count() > 1
                && let Some(parent) = path.parent()
            {
                let _ = fs::remove_dir(parent);
            }
            Ok(())
        })
    }
}

/// Refuses a key whose way leads through a link: what is behind it is not the repository's, and lists
/// would not find what was put there.
fn check_inside(root: &Path, key: &str) -> io::Result<()> {
    let mut path = root.to_owned();
    for part in key.split('/').filter(|part| !part.is_empty()) {
        path.push(part);
        match fs::symlink_metadata(&path) {
            Ok(found) if found.is_symlink() => {
                let message = format!(
                    "{} is a link, which a repository cannot have",
                    path.display()
                );
                return Err(io::Error::other(message));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            found => {
                found?;
            }
        }
    }
    Ok(())
}

/// Opens a regular file: others that a name may lead to could wait for ever, or be somebody else's.
fn open_file(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::other("not a regular file")),
    }
}

/// A durable file without its name, in the folder where that will be.
fn unfinished(path: &Path, content: &[u8]) -> io::Result<tempfile::NamedTempFile> {
    let folder = path.parent().unwrap_or(Path::new("."));
    // Somebody may remove the folder between the two, when it is empty.
    let mut tries = 0..8;
    let mut file = loop {
        make_folders(folder)?;
        let made = tempfile::Builder::new()
            .prefix(UNFINISHED)
            .tempfile_in(folder);
        match made {
            Err(error) if error.kind() == io::ErrorKind::NotFound && tries.next().is_some() => {}
            made => break made?,
        }
    };
    file.write_all(content)?;
    file.as_file().sync_all()?;
    Ok(file)
}

/// Makes folders, durably.
fn make_folders(folder: &Path) -> io::Result<()> {
    if folder.as_os_str().is_empty() || folder.is_dir() {
        return Ok(());
    }
    if let Some(parent) = folder.parent() {
        make_folders(parent)?;
    }
    match fs::create_dir(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    sync_folder(folder)
}

fn sync_folder(path: &Path) -> io::Result<()> {
    let parent = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty());
    File::open(parent.unwrap_or(Path::new(".")))?.sync_all()
}

/// Gives a file its name, unless another one has it.
fn name_new(file: tempfile::NamedTempFile, path: &Path) -> io::Result<bool> {
    let unfinished = file.path().to_owned();
    match renameat_with(CWD, &unfinished, CWD, path, RenameFlags::NOREPLACE) {
        Ok(()) => {
            // It has no other name to be removed.
            let _ = file.keep();
            Ok(true)
        }
        Err(Errno::EXIST) => Ok(false),
        // Network shares know only links.
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
            match fs::hard_link(&unfinished, path) {
                Ok(()) => Ok(true),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
                Err(error) => Err(error),
            }
        }
        Err(error) => Err(error.into()),
    }
}

/// Removes files that never got their names, from any folder.
fn remove_unfinished_below(folder: &Path, older: Duration) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_unfinished_below(&entry.path(), older)?;
            continue;
        }
        let is_unfinished = entry.file_name().to_string_lossy().starts_with(UNFINISHED);
        let changed = entry.metadata().and_then(|found| found.modified());
        let age = changed.map(|changed| changed.elapsed().unwrap_or_default());
        if is_unfinished && age.is_ok_and(|age| age >= older) {
            // Somebody else may have done it.
            let _ = fs::remove_file(entry.path());
        }
    }
    Ok(())
}

fn list_below(folder: &Path, prefix: &str, found: &mut Vec<ObjectInfo>) -> io::Result<()> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        let Some(name) = name.to_str().filter(|name| !name.starts_with('.')) else {
            continue;
        };
        let key = format!("{prefix}{name}");
        let kind = entry.file_type()?;
        if kind.is_dir() {
            list_below(&entry.path(), &format!("{key}/"), found)?;
            continue;
        }
        if kind.is_symlink() {
            let message = format!(
                "{} is a link, which a repository cannot have",
                entry.path().display()
            );
            return Err(io::Error::other(message));
        }
        // Nothing else was put there by a push.
        if !kind.is_file() {
            continue;
        }
        let metadata = match entry.metadata() {
            // Removed meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            metadata => metadata?,
        };
        let changed = metadata.modified()?.duration_since(UNIX_EPOCH);
        found.push(ObjectInfo {
            key,
            len_bytes: metadata.len(),
            changed_seconds: changed.map_or(0, |changed| changed.as_secs()),
        });
    }
    Ok(())
}

/// Refuses a folder that holds something else: the first push would mix with it.
///
/// # Errors
/// If there are files in it, and no repository.
pub fn check_folder(root: &Path) -> Result<()> {
    let mut entries = match fs::read_dir(root) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => {
            let error = Error::from_io("open", &error);
            return Err(error.target(root.display().to_string()));
        }
        Ok(entries) => entries,
    };
    // What a killed push has left is no file of others.
    let is_other = |entry: io::Result<fs::DirEntry>| {
        let name = entry.map(|entry| entry.file_name());
        name.is_ok_and(|name| !name.to_string_lossy().starts_with(UNFINISHED))
    };
    if root.join(crate::names::MARKER).exists() || !entries.any(is_other) {
        return Ok(());
    }
    let message = "the folder is neither empty nor a repository";
    Err(Error::new(ErrorKind::InvalidArgument, "open", message).target(root.display().to_string()))
}

#[cfg(test)]
mod tests {
    use rustix::fs::mkfifoat;
    use vellum_io::lane;

    use super::*;

    #[test]
    fn what_passes_is_tried_again() {
        let tried = std::cell::Cell::new(0);
        let fail = |times: u32, kind: io::ErrorKind| {
            tried.set(0);
            patiently(|| {
                tried.set(tried.get() + 1);
                if tried.get() > times {
                    Ok(())
                } else {
                    Err(kind.into())
                }
            })
        };
        fail(2, io::ErrorKind::WouldBlock).unwrap();
        fail(1, io::ErrorKind::Interrupted).unwrap();
        fail(100, io::ErrorKind::WouldBlock).unwrap_err();
        assert_eq!(tried.get(), MOST_TRIES);
        fail(1, io::ErrorKind::NotFound).unwrap_err();
        assert_eq!(tried.get(), 1);
    }

    #[test]
    fn a_folder_does_what_a_store_does() {
        let folder = tempfile::tempdir().unwrap();
        let objects = FolderObjects::new(folder.path().join("repository"));
        lane::block_on(async {
            assert_eq!(objects.list("a/").await.unwrap(), []);
            assert!(objects.put_new("a/b/1", vec![1, 2, 3]).await.unwrap());
            assert!(!objects.put_new("a/b/1", vec![4]).await.unwrap());
            assert_eq!(objects.get("a/b/1", 3).await.unwrap(), [1, 2, 3]);
            assert!(objects.get("a/b/1", 2).await.is_err());
            objects.put("a/b/1", vec![5; 9]).await.unwrap();
            assert_eq!(objects.get_range("a/b/1", 7..9).await.unwrap(), [5, 5]);
            assert!(objects.get_range("a/b/1", 7..10).await.is_err());
            objects.put("a/2", vec![]).await.unwrap();
            let listed = objects.list("a/").await.unwrap();
            let keys = listed.iter().map(|object| object.key.as_str());
            assert_eq!(keys.collect::<Vec<_>>(), ["a/2", "a/b/1"]);
            assert_eq!(listed[1].len_bytes, 9);
            objects.remove("a/b/1").await.unwrap();
            objects.remove("a/b/1").await.unwrap();
            for name in ["fifo", "folder", "link"] {
                let path = folder.path().join("repository").join(name);
                match name {
                    "folder" => fs::create_dir(&path).unwrap(),
                    "link" => std::os::unix::fs::symlink("a/2", &path).unwrap(),
                    _ => mkfifoat(CWD, &path, Mode::RWXU).unwrap(),
                }
                assert!(objects.get(name, 9).await.is_err(), "{name}");
            }
            let error = objects.get("a/b/1", 9).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NotFound);
        });
        // The folder of a push goes with its last object.
        assert!(!folder.path().join("repository/a/b").exists());
        assert!(folder.path().join("repository/a").exists());
    }

    #[test]
    fn folders_of_others_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        check_folder(folder.path()).unwrap();
        check_folder(&folder.path().join("new")).unwrap();
        fs::write(folder.path().join(".vellum-xyz"), "x").unwrap();
        check_folder(folder.path()).unwrap();
        let objects = FolderObjects::new(folder.path());
        lane::block_on(objects.remove_unfinished(Duration::from_secs(3600))).unwrap();
        assert!(folder.path().join(".vellum-xyz").exists());
        lane::block_on(objects.remove_unfinished(Duration::ZERO)).unwrap();
        assert!(!folder.path().join(".vellum-xyz").exists());
        fs::write(folder.path().join("letter"), "x").unwrap();
        assert!(check_folder(folder.path()).is_err());
    }
}

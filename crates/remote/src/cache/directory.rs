//! The folder of a cache: the two files of each version of a file, and a third one whose time says when that was opened.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rustix::fs::FallocateFlags;
use vellum_io::{Error, ErrorKind, Result};
use vellum_storage::lock::ranges;

use super::layout::{HEADER_BYTES, Identity, USERS};

const INDEX: &str = "index";
const DATA: &str = "data";
/// Empty. Its time of change is when the version was opened last: those of the others move with each block that is
/// stored or thrown out.
const OPENED: &str = "opened";
/// The order in which blocks were wanted, when that was recorded.
const TRACE: &str = "trace";
/// What whoever makes room claims.
const LOCK: &str = "lock";
/// So often somebody may take files away while they are opened.
const ATTEMPTS: u32 = 100;
/// The longest pause between two of them.
const PAUSE_MILLISECONDS: u64 = 16;

/// A cache's folder.
#[derive(Debug, Clone)]
pub(super) struct Directory(PathBuf);

/// The open files of one version.
#[derive(Debug)]
pub(super) struct Files {
    /// Claims are made on it; it says who uses the others.
    pub(super) index: File,
    pub(super) data: File,
}

/// When a version was opened last: until then others may have been filled, but not this one since its server has
/// another one.
///
/// One that nobody has opened since that is noted comes before all others, by the time when its data were changed.
pub(super) type Opened = (Option<SystemTime>, SystemTime);

/// What an index is now.
enum Prepared {
    Whole,
    /// It is damaged, and somebody has it open.
    InUse(Error),
}

/// Waits for what others are doing for a moment: not all of them equally long.
fn pause() {
    let milliseconds = 1 + RandomState::new().hash_one(0) % PAUSE_MILLISECONDS;
    std::thread::sleep(Duration::from_millis(milliseconds));
}

fn failed(operation: &'static str, path: &Path, error: &io::Error) -> Error {
    Error::from_io(operation, error).target(path.display().to_string())
}

fn wrong(kind: ErrorKind, path: &Path, why: &str) -> Error {
    let path = path.display().to_string();
    Error::new(kind, "open", format!("'{path}': {why}")).target(path)
}

impl Directory {
    /// The folder. It has to be there, to be this user's alone, and to be empty or a cache already:
    /// an image may name a cache, and is not to have files made just anywhere.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let refuse = |why: &str| Err(wrong(ErrorKind::InvalidArgument, path, why));
        let directory = Directory(path.to_owned());
        let found = match fs::metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return refuse("there is no such folder for a cache; make it with 'mkdir -m 700'");
            }
            found => found.map_err(|error| failed("open", path, &error))?,
        };
        // A process's own folder there belongs to its effective user.
        let is_ours = fs::metadata("/proc/self").is_ok_and(|own| own.uid() == found.uid());
        if !found.is_dir() || !is_ours || found.mode() & 0o077 != 0 {
            return refuse("a cache wants a folder that is this user's alone ('chmod 700')");
        }
        if !directory.lock_file().exists() {
            let mut listed = fs::read_dir(path).map_err(|error| failed("list", path, &error))?;
            let is_other = listed.next().is_some() && directory.stems()?.is_empty();
            // What was listed may be the file that another process has just made it a cache with.
            if is_other && !directory.lock_file().exists() {
                return refuse("it is no cache, and not empty; a cache wants a folder of its own");
            }
            directory.lock()?;
        }
        Ok(directory)
    }

    fn lock_file(&self) -> PathBuf {
        self.0.join(LOCK)
    }

    /// The file that whoever makes room claims; it says that the folder is a cache.
    pub(super) fn lock(&self) -> Result<File> {
        use std::os::unix::fs::OpenOptionsExt;
        let path = self.lock_file();
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false);
        let opened = options.mode(0o600).open(&path);
        opened.map_err(|error| failed("open", &path, &error))
    }

    fn file(&self, stem: &str, kind: &str) -> PathBuf {
        self.0.join(format!("{stem}.{kind}"))
    }

    pub(super) fn trace(&self, identity: &Identity) -> PathBuf {
        self.file(&identity.stem(), TRACE)
    }

    /// Opens a file of these for reading and writing; makes it, if asked.
    fn open_file(&self, stem: &str, kind: &str, make: bool) -> Result<File> {
        use std::os::unix::fs::OpenOptionsExt;
        let path = self.file(stem, kind);
        let mut options = File::options();
        options.read(true).write(true).create(make).mode(0o600);
        // Whoever has put a link there means another file to be written.
        options
            .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32)
            .open(&path)
            .map_err(|error| failed("open", &path, &error))
    }

    /// Opens the files of a version, and makes those that are not there. They are not taken away as
    /// long as they are open.
    pub(super) fn files(&self, identity: &Identity) -> Result<Files> {
        let stem = identity.stem();
        let mut damage = None;
        for attempt in 0..ATTEMPTS {
            if attempt > 0 {
                pause();
            }
            let index = self.open_file(&stem, INDEX, true)?;
            if !ranges::try_share(&index, &USERS)? || !self.is_there(&stem, &index) {
                // Somebody is making it, or taking it away.
                continue;
            }
            if let Prepared::InUse(error) = self.prepare(identity, &index)? {
                damage = Some(error);
                continue;
            }
            let data = self.open_file(&stem, DATA, true)?;
            set_len_at_least(&data, identity.len_bytes)
                .map_err(|error| failed("make", &self.file(&stem, DATA), &error))?;
            self.note_opened(&stem)?;
            // It is mapped, and memory for which a disk has no room ends the program.
            allocate(&index, &identity.table())
                .map_err(|error| failed("make", &self.file(&stem, INDEX), &error))?;
            return Ok(Files { index, data });
        }
        Err(damage.unwrap_or_else(|| {
            let message = "its files come and go; is another program at work in the folder?";
            Error::new(ErrorKind::Io, "open", message).target(self.0.display().to_string())
        }))
    }

    fn note_opened(&self, stem: &str) -> Result<()> {
        let noted = self
            .open_file(stem, OPENED, true)?
            .set_modified(SystemTime::now());
        noted.map_err(|error| failed("make", &self.file(stem, OPENED), &error))
    }

    /// When a version was opened last.
    pub(super) fn opened(&self, stem: &str) -> io::Result<Opened> {
        let changed = |kind| fs::metadata(self.file(stem, kind)).and_then(|found| found.modified());
        Ok((changed(OPENED).ok(), changed(DATA)?))
    }

    /// Whether an open index is still the one of this name.
    fn is_there(&self, stem: &str, index: &File) -> bool {
        let named = fs::metadata(self.file(stem, INDEX));
        match (named, index.metadata()) {
            (Ok(named), Ok(open)) => (named.dev(), named.ino()) == (open.dev(), open.ino()),
            _ => false,
        }
    }

    /// Sees that an index has the header of a version. Two may do this at once: they write the same.
    fn prepare(&self, identity: &Identity, index: &File) -> Result<Prepared> {
        let path = self.file(&identity.stem(), INDEX);
        let mut page = vec![0; HEADER_BYTES as usize];
        let is_new = match index.read_exact_at(&mut page, 0) {
            Ok(()) => page.iter().all(|&byte| byte == 0),
            Err(_) => true,
        };
        if !is_new {
            match Identity::decode(&page) {
                Ok(found) if identity.is_told_by(&found) => return Ok(Prepared::Whole),
                Ok(_) => {
                    let why = "it is the index of another file; remove it";
                    return Err(wrong(ErrorKind::InvalidImage, &path, why));
                }
                // A power cut may have torn it. Nobody has used it then, or it would be whole.
                Err(error) => {
                    if !ranges::try_claim(index, &USERS)? {
                        // Whoever has found the same a moment ago lets it go, too.
                        let error = wrong(error.kind(), &path, error.message());
                        return Ok(Prepared::InUse(error));
                    }
                    let emptied = index.set_len(0);
                    emptied.map_err(|error| failed("make", &path, &error))?;
                }
            }
        }
        let made = index.write_all_at(&identity.encode(), 0);
        made.map_err(|error| failed("make", &path, &error))?;
        ranges::try_share(index, &USERS)?;
        Ok(Prepared::Whole)
    }

    /// The versions in the folder, whole or not: what their files' names begin with.
    pub(super) fn stems(&self) -> Result<Vec<String>> {
        let listed = fs::read_dir(&self.0).map_err(|error| failed("list", &self.0, &error))?;
        let mut stems = BTreeSet::new();
        for entry in listed {
            let entry = entry.map_err(|error| failed("list", &self.0, &error))?;
            let name = PathBuf::from(entry.file_name());
            if name
                .extension()
                .is_some_and(|kind| kind == INDEX || kind == DATA)
                && let Some(stem) = name.file_stem().and_then(|stem| stem.to_str())
            {
                stems.insert(stem.to_owned());
            }
        }
        Ok(stems.into_iter().collect())
    }

    /// What an index says that it is of, with the files, if all of them are there and sound.
    pub(super) fn look_into(&self, stem: &str) -> Option<(Identity, Files)> {
        let index = self.open_file(stem, INDEX, false).ok()?;
        let mut page = vec![0; HEADER_BYTES as usize];
        index.read_exact_at(&mut page, 0).ok()?;
        let identity = Identity::decode(&page).ok()?;
        // Its table must be there to be mapped.
        let len_bytes = index.metadata().ok()?.len();
        let data = self.open_file(stem, DATA, false).ok()?;
        (len_bytes >= identity.table().end).then_some((identity, Files { index, data }))
    }

    /// Bytes that the data of all versions takes.
    pub(super) fn used_bytes(&self) -> Result<u64> {
        let used = |stem: &String| {
            let found = fs::metadata(self.file(stem, DATA));
            found.map_or(0, |found| found.blocks() * 512)
        };
        Ok(self.stems()?.iter().map(used).sum())
    }

    /// Takes away what is there of a version that is not whole, if nobody has it open or makes it.
    pub(super) fn remove_damaged(&self, stem: &str) -> Result<()> {
        let index = self.open_file(stem, INDEX, true)?;
        match self.look_into(stem) {
            // Somebody has made it whole meanwhile.
            Some(_) => Ok(()),
            None => self.remove_unused(stem, Some(&index)),
        }
    }

    /// Takes the files of a version away, if nobody has them open.
    pub(super) fn remove_unused(&self, stem: &str, index: Option<&File>) -> Result<()> {
        if !index.map_or(Ok(true), |index| ranges::try_claim(index, &USERS))? {
            return Ok(());
        }
        // The index last: whoever finds none makes all of them.
        for kind in [OPENED, DATA, INDEX] {
            let path = self.file(stem, kind);
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(failed("remove", &path, &error));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

fn set_len_at_least(file: &File, len_bytes: u64) -> io::Result<()> {
    if file.metadata()?.len() < len_bytes {
        file.set_len(len_bytes)?;
    }
    Ok(())
}

/// Has a file take the space of a range, whose bytes stay.
fn allocate(file: &File, range: &Range<u64>) -> io::Result<()> {
    let len_bytes = range.end - range.start;
    match rustix::fs::fallocate(file, FallocateFlags::empty(), range.start, len_bytes) {
        Err(rustix::io::Errno::OPNOTSUPP) => {
            let start = file.metadata()?.len().clamp(range.start, range.end);
            let zeroes = vec![0; (range.end - start) as usize];
            file.write_all_at(&zeroes, start)
        }
        done => done.map_err(Into::into),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(version: &str) -> Identity {
        Identity {
            source: "s3://b/k".to_owned(),
            version: version.to_owned(),
            len_bytes: 1 << 20,
        }
    }

    fn private_folder() -> tempfile::TempDir {
        use std::os::unix::fs::PermissionsExt;
        let mode = fs::Permissions::from_mode(0o700);
        tempfile::Builder::new()
            .permissions(mode)
            .tempdir()
            .unwrap()
    }

    #[test]
    fn versions_have_files_of_their_own() {
        let folder = private_folder();
        let directory = Directory::open(folder.path()).unwrap();
        let files = directory.files(&identity("1")).unwrap();
        directory.files(&identity("2")).unwrap();
        assert_eq!(directory.stems().unwrap().len(), 2);
        assert_eq!(files.data.metadata().unwrap().len(), 1 << 20);
        let (found, _) = directory.look_into(&identity("1").stem()).unwrap();
        assert_eq!(found, identity("1"));
    }

    /// Whatever is stored or thrown out of the others meanwhile.
    #[test]
    fn the_version_that_was_opened_last_is_known() {
        let folder = private_folder();
        let directory = Directory::open(folder.path()).unwrap();
        let opened = |version: &str| directory.opened(&identity(version).stem()).unwrap();
        let path = |kind| {
            folder
                .path()
                .join(format!("{}.{kind}", identity("0").stem()))
        };
        drop(directory.files(&identity("0")).unwrap());
        // One of before that was noted.
        fs::remove_file(path(OPENED)).unwrap();
        let first = directory.files(&identity("1")).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        drop(directory.files(&identity("2")).unwrap());
        std::thread::sleep(Duration::from_millis(20));
        first.data.write_all_at(&[1], 0).unwrap();
        let old = File::options().write(true).open(path(DATA)).unwrap();
        old.write_all_at(&[1], 0).unwrap();
        assert!(opened("0") < opened("1") && opened("1") < opened("2"));
        std::thread::sleep(Duration::from_millis(20));
        drop(directory.files(&identity("1")).unwrap());
        assert!(opened("2") < opened("1"), "it was opened once more");
    }

    #[test]
    fn several_make_one_folder_a_cache() {
        for _ in 0..200 {
            let folder = private_folder();
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| Directory::open(folder.path()).expect("a cache"));
                }
            });
        }
    }

    #[test]
    fn a_folder_that_is_no_cache_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let folder = private_folder();
        let path = folder.path();
        let refused = |path: &Path, word: &str| {
            let error = Directory::open(path).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        };
        refused(&path.join("none"), "mkdir");
        fs::write(path.join("letter"), "").unwrap();
        refused(path, "not empty");
        refused(&path.join("letter"), "alone");
        fs::remove_file(path.join("letter")).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o750)).unwrap();
        refused(path, "alone");
        fs::set_permissions(path, fs::Permissions::from_mode(0o700)).unwrap();
        Directory::open(path).unwrap();
        Directory::open(path).unwrap();
    }

    #[test]
    fn only_what_nobody_uses_is_removed() {
        let folder = private_folder();
        let directory = Directory::open(folder.path()).unwrap();
        let stem = identity("1").stem();
        let used = directory.files(&identity("1")).unwrap();
        let (_, files) = directory.look_into(&stem).unwrap();
        directory.remove_unused(&stem, Some(&files.index)).unwrap();
        assert_eq!(directory.stems().unwrap(), std::slice::from_ref(&stem));
        drop(used);
        directory.remove_unused(&stem, Some(&files.index)).unwrap();
        assert!(directory.stems().unwrap().is_empty());
        // Whoever comes now makes new ones.
        directory.files(&identity("1")).unwrap();
        assert_eq!(directory.stems().unwrap(), [stem]);
    }

    #[test]
    fn a_header_of_something_else_is_refused() {
        let folder = private_folder();
        let directory = Directory::open(folder.path()).unwrap();
        drop(directory.files(&identity("1")).unwrap());
        let index = |name: &str| {
            folder
                .path()
                .join(format!("{}.index", identity(name).stem()))
        };
        fs::copy(index("1"), index("2")).unwrap();
        let error = directory.files(&identity("2")).unwrap_err();
        assert!(error.message().contains("another file"), "{error}");
        // One that a power cut has torn is made anew, unless somebody uses it.
        fs::write(index("2"), [7; 5000]).unwrap();
        let files = directory.files(&identity("2")).unwrap();
        assert!(directory.look_into(&identity("2").stem()).is_some());
        files.index.write_all_at(&[1], 9).unwrap();
        assert!(directory.files(&identity("2")).is_err());
        drop(files);
        directory.files(&identity("2")).unwrap();
    }

    #[test]
    fn several_make_one_torn_index_anew() {
        for _ in 0..50 {
            let folder = private_folder();
            let directory = Directory::open(folder.path()).unwrap();
            let index = folder
                .path()
                .join(format!("{}.index", identity("1").stem()));
            fs::write(index, [7; 5000]).unwrap();
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| directory.files(&identity("1")).expect("files"));
                }
            });
        }
    }

    #[test]
    fn what_is_damaged_goes_unless_somebody_has_it_open() {
        let folder = private_folder();
        let directory = Directory::open(folder.path()).unwrap();
        let path = |kind| {
            folder
                .path()
                .join(format!("{}.{kind}", identity("1").stem()))
        };
        let stem = identity("1").stem();
        for damage in [&[][..], &[7; 5000]] {
            let used = directory.files(&identity("1")).unwrap();
            directory.remove_damaged(&stem).unwrap();
            assert!(path(DATA).exists(), "it is whole");
            fs::write(path(INDEX), damage).unwrap();
            directory.remove_damaged(&stem).unwrap();
            assert!(path(DATA).exists(), "it is used");
            drop(used);
            directory.remove_damaged(&stem).unwrap();
            assert!(directory.stems().unwrap().is_empty());
        }
        drop(directory.files(&identity("1")).unwrap());
        fs::remove_file(path(INDEX)).unwrap();
        assert_eq!(directory.stems().unwrap(), std::slice::from_ref(&stem));
        directory.remove_damaged(&stem).unwrap();
        assert!(directory.stems().unwrap().is_empty());
    }
}

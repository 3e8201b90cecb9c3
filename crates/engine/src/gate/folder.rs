//! The gate that stays inside one directory.
//!
//! Invariant: names are resolved by the kernel, from the directory's descriptor and with
//! `RESOLVE_BENEATH`. No check of a path comes before its opening, so that nothing exchanged
//! in between leads elsewhere.

use std::fmt;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{self, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use vellum_io::{Error, ErrorKind, Io, Result};
use vellum_storage::file::{Create, FileKind};
use vellum_storage::{FileOptions, FileStorage, Storage};

use super::{FileRequest, Gate};
use crate::BlockDevice;
use crate::qcow2::{OpenOptions, Qcow2};
use crate::raw::{Raw, RawOptions};

/// How many backing files may follow each other, unless the caller says otherwise.
const DEFAULT_MAX_DEPTH: u32 = 200;

/// How often an open is tried that a change of the directory tree has disturbed.
const MAX_ATTEMPTS: u32 = 128;

/// A gate that opens backing files, data files and write logs inside one directory, and nothing else.
///
/// - A name counts from the directory of the image that it stands in, for all of them alike. As a gate it serves images that lie directly in the directory;
///   [`Folder::open_image`] opens one anywhere below it.
/// - Refused with [`ErrorKind::Denied`]: absolute names, names with a protocol (`nbd://`,
///   `json:`), and whatever leads out of the directory, by `..` or by symbolic links. The
///   kernel checks that while it opens, so nobody can exchange a directory in between.
/// - Backing files are raw or qcow2, as the image says; one that does not say which is refused.
///   Only regular files are opened.
/// - At most 200 backing files follow each other, or as many as [`Folder::max_depth`] says.
/// - Files are opened, and locked, as [`FileOptions`] does by default, or as
///   [`Folder::file_options`] says; backing images as [`OpenOptions`] does by default, or as
///   [`Folder::backing_options`] says for each: their caches, and what unlocks them.
///
/// Needs Linux 5.6 or newer.
///
/// ```
/// use std::sync::Arc;
/// use vellum::gate::Folder;
/// use vellum::qcow2::create::{CreateOptions, create};
/// use vellum::qcow2::OpenOptions;
/// use vellum::storage::file::{Create, FileOptions, FileStorage};
/// use vellum::{BlockDevice, Buffer, io::lane};
///
/// # let directory = tempfile::tempdir()?;
/// # let directory = directory.path();
/// lane::block_on(async {
///     std::fs::write(directory.join("base.raw"), [7; 65536])?;
///     let file = FileOptions::default().create(Create::Truncate);
///     let file = FileStorage::open(directory.join("overlay.qcow2"), &file)?;
///     let options = CreateOptions::default()
///         .size_bytes(65536)
///         .backing_file(Some("base.raw".to_owned()))
///         .backing_format(Some("raw".to_owned()));
///     create(file, None, &options).await?;
///
///     let folder = Folder::new(directory)?;
///     let image = folder.open_image("overlay.qcow2", OpenOptions::default()).await?;
///     assert_eq!(image.read(0, Buffer::for_read(512)).await?[..], [7; 512]);
///     image.close().await
/// })?;
/// # Ok::<(), vellum::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Folder {
    root: Arc<Root>,
    /// Where the image lies that asks, from the root.
    place: PathBuf,
    depth: u32,
    max_depth: u32,
    file_options: FileOptions,
    backing_options: BackingOptions,
}

/// Says how each backing image is opened.
#[derive(Clone)]
struct BackingOptions(Arc<dyn Fn(&FileRequest) -> OpenOptions + Send + Sync>);

impl fmt::Debug for BackingOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BackingOptions")
    }
}

struct Root {
    fd: OwnedFd,
    /// For messages.
    path: PathBuf,
}

impl fmt::Debug for Root {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.path.fmt(f)
    }
}

impl Folder {
    /// A gate for images that lie directly in `directory`. The directory is opened now: one
    /// that is put in its place later is not used.
    ///
    /// # Errors
    /// What the system says if it cannot be opened.
    pub fn new(directory: impl AsRef<Path>) -> Result<Folder> {
        let path = directory.as_ref();
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = fs::open(path, flags, Mode::empty()).map_err(|errno| {
            Error::from_errno("open", errno.raw_os_error()).target(path.display().to_string())
        })?;
        let path = path.to_owned();
        Ok(Folder {
            root: Arc::new(Root { fd, path }),
            place: PathBuf::new(),
            depth: 0,
            max_depth: DEFAULT_MAX_DEPTH,
            file_options: FileOptions::default(),
            backing_options: BackingOptions(Arc::new(|_| OpenOptions::default())),
        })
    }

    /// How many backing files may follow each other below an image.
    #[must_use]
    pub fn max_depth(mut self, max_depth: u32) -> Folder {
        self.max_depth = max_depth;
        self
    }

    /// How files are opened: backing files, data files, and those of [`Folder::open_image`].
    /// `read_only`, `create` and `kind` are the gate's own, whatever `options` say.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// use vellum::gate::Folder;
    /// use vellum::storage::FileOptions;
    ///
    /// // Around the page cache, as QEMU's cache mode `none` has it.
    /// let folder = Folder::new(&directory)?.file_options(FileOptions::default().direct(true));
    /// # drop(folder);
    /// # Ok::<(), vellum::Error>(())
    /// ```
    #[must_use]
    pub fn file_options(mut self, options: FileOptions) -> Folder {
        self.file_options = options;
        self
    }

    /// How qcow2 backing images are opened. `options` is asked for each of them, and hears
    /// which image asks and for what; nothing in that is trusted. All are opened for reading
    /// only, whatever it says.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// use vellum::gate::Folder;
    /// use vellum::qcow2::{CacheOptions, OpenOptions};
    ///
    /// let folder = Folder::new(&directory)?.backing_options(|request| {
    ///     let passphrase = (request.name == "base.qcow2").then(|| "open sesame".into());
    ///     OpenOptions::default()
    ///         .cache(CacheOptions::default().l2_cache_size_bytes(Some(1 << 20)))
    ///         .passphrase(passphrase)
    /// });
    /// # drop(folder);
    /// # Ok::<(), vellum::Error>(())
    /// ```
    #[must_use]
    pub fn backing_options(
        mut self,
        options: impl Fn(&FileRequest) -> OpenOptions + Send + Sync + 'static,
    ) -> Folder {
        self.backing_options = BackingOptions(Arc::new(options));
        self
    }

    /// Opens a qcow2 image inside the directory, for reading only if `options` say so, with
    /// this gate for the files that it names.
    ///
    /// # Errors
    /// [`ErrorKind::Denied`] if `name` leads out of the directory, and whatever
    /// [`FileStorage::open_patiently`] and [`Qcow2::open`] report.
    pub async fn open_image(&self, name: &str, options: OpenOptions) -> Result<Arc<Qcow2>> {
        let path = self.place.join(checked(name)?);
        let file = self.open_file(&path, options.read_only).await?;
        Qcow2::open(file, Arc::new(self.beside(name)), options).await
    }

    /// The gate for an image of that name.
    fn beside(&self, name: &str) -> Folder {
        let path = self.place.join(name);
        Folder {
            place: path.parent().map(Path::to_owned).unwrap_or_default(),
            ..self.clone()
        }
    }

    async fn open_file(&self, path: &Path, read_only: bool) -> Result<Arc<FileStorage>> {
        let full = self.root.path.join(path).display().to_string();
        let own = self.file_options.clone();
        let options = own
            .read_only(read_only)
            .create(Create::No)
            .kind(FileKind::Regular);
        let fd = open_beneath(&self.root.fd, path, &options)
            .map_err(|errno| explain(errno).target(&*full))?;
        FileStorage::from_descriptor_patiently(fd, full, &options).await
    }

    async fn backing(self, request: FileRequest) -> Result<Arc<dyn BlockDevice>> {
        if self.depth >= self.max_depth {
            return Err(refuse(
                ErrorKind::Denied,
                format!(
                    "more than {} backing files follow each other",
                    self.max_depth
                ),
            ));
        }
        let Some(format) = request.format.as_deref() else {
            return Err(refuse(ErrorKind::InvalidArgument, format_missing(&request)));
        };
        if !matches!(format, "raw" | "qcow2") {
            return Err(refuse(
                ErrorKind::Unsupported,
                format!("the format '{format}' is not known here (raw and qcow2 are)"),
            ));
        }
        let path = self.place.join(checked(&request.name)?);
        let file = self.open_file(&path, true).await?;
        if format == "raw" {
            return Ok(Raw::open(file, RawOptions::default().read_only(true))?);
        }
        let gate = Folder {
            depth: self.depth + 1,
            ..self.beside(&request.name)
        };
        let BackingOptions(options) = &self.backing_options;
        let options = options(&request).read_only(true);
        Ok(Qcow2::open(file, Arc::new(gate), options).await?)
    }

    async fn data_file(self, request: FileRequest) -> Result<Arc<dyn Storage>> {
        let path = self.place.join(checked(&request.name)?);
        Ok(self.open_file(&path, !request.writable).await?)
    }

    async fn checksums(self, request: FileRequest) -> Result<Arc<dyn Storage>> {
        let path = self.place.join(checked(&request.name)?);
        Ok(self.open_file(&path, !request.writable).await?)
    }

    async fn write_log(self, request: FileRequest) -> Result<Arc<dyn Storage>> {
        let path = self.place.join(checked(&request.name)?);
        Ok(self.open_file(&path, true).await?)
    }
}

impl Gate for Folder {
    fn open_backing(&self, request: FileRequest) -> Io<Arc<dyn BlockDevice>> {
        let asks = asks("backing file", &request);
        let opened = self.clone().backing(request);
        // A task of its own, so that the stack does not grow with the chain.
        Io::task(vellum_io::spawn(async move { opened.await.map_err(asks) }))
    }

    fn open_data_file(&self, request: FileRequest) -> Io<Arc<dyn Storage>> {
        let asks = asks("data file", &request);
        let opened = self.clone().data_file(request);
        Io::start(async move { opened.await.map_err(asks) })
    }

    fn open_write_log(&self, request: FileRequest) -> Io<Arc<dyn Storage>> {
        let asks = asks("write log", &request);
        let opened = self.clone().write_log(request);
        Io::start(async move { opened.await.map_err(asks) })
    }

    fn open_checksums(&self, request: FileRequest) -> Io<Arc<dyn Storage>> {
        let asks = asks("checksums", &request);
        let opened = self.clone().checksums(request);
        Io::start(async move { opened.await.map_err(asks) })
    }
}

/// Adds to an error which image asked for what.
fn asks(what: &str, request: &FileRequest) -> impl FnOnce(Error) -> Error + 'static {
    let message = format!("Could not open {what} '{}'", request.name);
    let image = request.image.clone();
    move |error| error.context("open", message).target(image)
}

fn refuse(kind: ErrorKind, message: impl Into<String>) -> Error {
    Error::new(kind, "open", message)
}

fn format_missing(request: &FileRequest) -> String {
    format!(
        "the image does not say in which format its backing file is, and a guess would let a guest \
         that writes to a raw disk choose the format; `vellum rebase -u -b {} -F FORMAT {}` says it",
        request.name, request.image
    )
}

/// The name, if it is that of a file below the image's directory or beside it.
fn checked(name: &str) -> Result<&str> {
    let denied = |what: &str| {
        Err(refuse(
            ErrorKind::Denied,
            format!("{what} are not allowed here"),
        ))
    };
    if name.starts_with('/') {
        return denied("absolute names");
    }
    // As QEMU has it: a colon before the first slash ends a protocol.
    if name
        .find([':', '/'])
        .is_some_and(|at| name[at..].starts_with(':'))
    {
        return denied("names with a protocol");
    }
    Ok(name)
}

/// Opens a file without leaving the directory.
fn open_beneath(root: &OwnedFd, path: &Path, options: &FileOptions) -> Result<OwnedFd, Errno> {
    let access = match options.read_only {
        true => OFlags::RDONLY,
        false => OFlags::RDWR,
    };
    let direct = match options.direct {
        true => OFlags::DIRECT,
        false => OFlags::empty(),
    };
    // A FIFO would keep us waiting for its other end; what is no regular file is refused later.
    let flags = access | direct | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    let mut attempts = 0;
    let fd = loop {
        attempts += 1;
        match fs::openat2(root, path, flags, Mode::empty(), resolve) {
            // Something was renamed meanwhile, and the kernel cannot tell that `..` is safe.
            Err(Errno::AGAIN | Errno::INTR) if attempts < MAX_ATTEMPTS => {}
            result => break result?,
        }
    };
    fs::fcntl_setfl(&fd, fs::fcntl_getfl(&fd)? - OFlags::NONBLOCK)?;
    Ok(fd)
}

fn explain(errno: Errno) -> Error {
    match errno {
        Errno::XDEV => refuse(ErrorKind::Denied, "the name leads out of the directory"),
        Errno::NOSYS => refuse(
            ErrorKind::Unsupported,
            "staying inside of a directory needs Linux 5.6 or newer (openat2)",
        ),
        errno => Error::from_errno("open", errno.raw_os_error()),
    }
}

#[cfg(test)]
mod tests;

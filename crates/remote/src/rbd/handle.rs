//! A connection to a cluster and an open image, as types that close themselves.
//!
//! Everything here but [`Image::name`] and its like blocks: only threads of
//! [`crate::blocking`] may call it.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int};
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures_channel::oneshot;
use parking_lot::Mutex;
use vellum_io::{Error, ErrorKind, Result};

use super::at_exit::Counted;
use super::library::{self, ImageInfo, Library, Pointer};
use super::options::{Encryption, EncryptionFormat, RbdOptions};
use crate::blocking;

/// Features and flags of images.
const STRIPING: u64 = 1 << 1;
const FAST_DIFF: u64 = 1 << 4;
const FAST_DIFF_INVALID: u64 = 1 << 1;
/// From this version of librbd on, `rbd_diff_iterate2` tells the truth of clones and stripes.
const GOOD_DIFF: (c_int, c_int) = (1, 17);
/// What Ceph waits for a cluster (`client_mount_timeout`), and what is waited here, in seconds.
const THEIR_MOUNT_SECONDS: f64 = 300.0;
const OUR_MOUNT_SECONDS: &str = "30";

/// A connection to a pool.
pub(super) struct Pool {
    library: &'static Library,
    cluster: Pointer,
    pool: Pointer,
    /// Until after the end of the connection, since it is dropped behind that.
    _counted: Counted,
}

// SAFETY: librados lets any thread use its handles, several at a time.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

fn failed(operation: &'static str, returned: c_int, what: impl FnOnce(&str) -> String) -> Error {
    let error = Error::from_errno(operation, -returned);
    let message = what(error.message());
    Error::new(error.kind(), operation, message).with_errno(-returned)
}

fn text(value: &str) -> Result<CString> {
    CString::new(value).map_err(|_| {
        let message = "names and options of rbd contain no zero bytes";
        Error::new(ErrorKind::InvalidArgument, "open", message)
    })
}

/// A string or none, for a function that takes it only while it is called.
fn pointer(value: &Option<CString>) -> *const c_char {
    value
        .as_ref()
        .map_or(std::ptr::null(), |value| value.as_ptr())
}

impl Pool {
    pub(super) fn open(options: &RbdOptions) -> Result<Pool> {
        let library = library::load()
            .map_err(|message| Error::new(ErrorKind::Unsupported, "open", message))?;
        let user = options.user.as_deref().map(text).transpose()?;
        let counted = Counted::open();
        let mut cluster = null_mut();
        // SAFETY: a place for the handle, and a name or none.
        let made = unsafe { (library.rados_create)(&mut cluster, pointer(&user)) };
        if made < 0 {
            return Err(failed("open", made, |why| {
                format!("error initializing: {why}")
            }));
        }
        let mut pool = Pool {
            library,
            cluster,
            pool: null_mut(),
            _counted: counted,
        };
        pool.configure(options)?;
        pool.connect(options)?;
        Ok(pool)
    }

    fn configure(&self, options: &RbdOptions) -> Result<()> {
        let conf = options.conf.as_deref().map(text).transpose()?;
        // SAFETY: an open handle, and a path or none.
        let read = unsafe { (self.library.rados_conf_read_file)(self.cluster, pointer(&conf)) };
        if let Some(path) = options.conf.as_ref().filter(|_| read < 0) {
            return Err(failed("open", read, |why| {
                format!("error reading conf file {path}: {why}")
            }));
        }
        if self.get("client_mount_timeout")?.parse() == Ok(THEIR_MOUNT_SECONDS) {
            self.set("client_mount_timeout", OUR_MOUNT_SECONDS)?;
        }
        for (key, value) in options.settings() {
            self.set(&key, &value)?;
        }
        Ok(())
    }

    fn set(&self, key: &str, value: &str) -> Result<()> {
        let (name, value) = (text(key)?, text(value)?);
        // SAFETY: an open handle and two strings.
        let set =
            unsafe { (self.library.rados_conf_set)(self.cluster, name.as_ptr(), value.as_ptr()) };
        match set {
            0.. => Ok(()),
            _ => Err(failed("open", set, |why| {
                format!("invalid conf option {key}: {why}")
            })),
        }
    }

    /// What Ceph's option is set to; nothing if there is none.
    fn get(&self, key: &str) -> Result<String> {
        let name = text(key)?;
        let mut value = [0 as c_char; 64];
        let (place, len) = (value.as_mut_ptr(), value.len() - 1);
        // SAFETY: an open handle, a string, and a place with its length, behind which a zero byte
        // stays.
        unsafe {
            (self.library.rados_conf_get)(self.cluster, name.as_ptr(), place, len);
            Ok(CStr::from_ptr(value.as_ptr())
                .to_string_lossy()
                .into_owned())
        }
    }

    fn connect(&mut self, options: &RbdOptions) -> Result<()> {
        // SAFETY: an open handle.
        let connected = unsafe { (self.library.rados_connect)(self.cluster) };
        if connected < 0 {
            return Err(failed("open", connected, |why| {
                let hint = match -connected {
                    libc::EPERM | libc::EACCES => {
                        "is it the key of this user? see the options 'user' and 'key-secret', and \
                         the keyring"
                    }
                    libc::ENOENT => {
                        "there is no keyring for this user; see the options 'key-secret' and 'conf'"
                    }
                    _ => {
                        "is the cluster there, and its configuration and keyring here? see the \
                         options 'conf', 'user' and 'server'"
                    }
                };
                format!("error connecting: {why} ({hint})")
            }));
        }
        let name = text(&options.pool)?;
        // SAFETY: a connected handle, a string, and a place for the pool's handle.
        let opened = unsafe {
            (self.library.rados_ioctx_create)(self.cluster, name.as_ptr(), &mut self.pool)
        };
        if opened < 0 {
            self.pool = null_mut();
            return Err(failed("open", opened, |why| {
                format!("error opening pool {}: {why}", options.pool)
            }));
        }
        if let Some(namespace) = &options.namespace {
            let namespace = text(namespace)?;
            // SAFETY: an open pool and a string.
            unsafe { (self.library.rados_ioctx_set_namespace)(self.pool, namespace.as_ptr()) };
        }
        Ok(())
    }

    /// Makes an image; `order`: the objects' size as a power of two.
    pub(super) fn create(&self, image: &str, size_bytes: u64, order: Option<u32>) -> Result<()> {
        let name = text(image)?;
        let mut order = order.unwrap_or(0) as c_int;
        // SAFETY: an open pool, a string, and a place for a number.
        let made =
            unsafe { (self.library.rbd_create)(self.pool, name.as_ptr(), size_bytes, &mut order) };
        match made {
            0.. => Ok(()),
            _ => Err(failed("create", made, |why| {
                let hint = match made {
                    m if m == -libc::EEXIST => " (write into it with 'convert -n', or remove it)",
                    _ => "",
                };
                format!("error rbd create: {why}{hint}")
            })),
        }
    }

    /// Removes an image.
    pub(super) fn remove(&self, image: &str) -> Result<()> {
        let name = text(image)?;
        // SAFETY: an open pool and a string.
        let removed = unsafe { (self.library.rbd_remove)(self.pool, name.as_ptr()) };
        match removed {
            0.. => Ok(()),
            _ => Err(failed("remove", removed, str::to_owned)),
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: nobody uses the handles any more, and each is given back once.
        unsafe {
            if !self.pool.is_null() {
                (self.library.rados_ioctx_destroy)(self.pool);
            }
            (self.library.rados_shutdown)(self.cluster);
        }
    }
}

/// An image that is open, and the connection below it.
struct Open {
    pool: Pool,
    image: Pointer,
}

// SAFETY: librbd lets any thread use its handles, several at a time.
unsafe impl Send for Open {}
// SAFETY: as above.
unsafe impl Sync for Open {}

impl Open {
    /// Closes the image; what its cache holds is written first.
    fn close(self) -> Result<()> {
        // SAFETY: the last use of the handle. The pool goes after it.
        let closed = unsafe { (self.pool.library.rbd_close)(self.image) };
        match closed {
            0.. => Ok(()),
            _ => Err(Error::from_errno("close", -closed)),
        }
    }
}

/// An open image. Whoever drops it last does not wait: a thread closes it.
pub(super) struct Image {
    name: String,
    open: Option<Open>,
    closed: Mutex<Option<oneshot::Sender<Result<()>>>>,
    /// How many changes have begun, and how many have ended.
    changes: AtomicU64,
}

impl Image {
    /// Opens an image; also what will say how its closing has ended.
    pub(super) fn open(
        pool: Pool,
        options: &RbdOptions,
    ) -> Result<(Arc<Image>, oneshot::Receiver<Result<()>>)> {
        let name = text(&options.image)?;
        let snapshot = options.snapshot.as_deref().map(text).transpose()?;
        let open = match options.writable {
            true => pool.library.rbd_open,
            false => pool.library.rbd_open_read_only,
        };
        let mut image = null_mut();
        // SAFETY: an open pool, a string, a place for the handle, and a string or none.
        let opened = unsafe { open(pool.pool, name.as_ptr(), &mut image, pointer(&snapshot)) };
        if opened < 0 {
            return Err(failed("open", opened, |why| {
                let at = options.snapshot.as_ref().map(|name| format!("@{name}"));
                let at = at.unwrap_or_default();
                format!("error reading header from {}{at}: {why}", options.image)
            }));
        }
        let (closed, receive) = oneshot::channel();
        let image = Image {
            name: options.name.clone(),
            open: Some(Open { pool, image }),
            closed: Mutex::new(Some(closed)),
            changes: AtomicU64::new(0),
        };
        if let Some(encryption) = &options.encryption {
            image.decrypt(encryption)?;
        }
        Ok((Arc::new(image), receive))
    }

    fn decrypt(&self, encryption: &Encryption) -> Result<()> {
        let passphrase = encryption.passphrase.as_ptr();
        let len = encryption.passphrase.len();
        let load = self.library().rbd_encryption_load;
        /// `rbd_encryption_luks1_format_options_t`, and that of LUKS2.
        #[repr(C)]
        struct Luks {
            algorithm: c_int,
            passphrase: *const u8,
            len: usize,
        }
        let options = Luks {
            algorithm: 1,
            passphrase,
            len,
        };
        let format = match encryption.format {
            EncryptionFormat::Luks1 => 0,
            EncryptionFormat::Luks2 => 1,
        };
        // SAFETY: an open image, and the options of the format with their size.
        let loaded = unsafe {
            let options = &raw const options;
            load(self.pointer(), format, options.cast(), size_of::<Luks>())
        };
        match loaded {
            0.. => Ok(()),
            _ => Err(failed("open", loaded, |why| {
                format!("error loading the image's encryption: {why} (is its passphrase right?)")
            })),
        }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Notes that a change begins or has ended.
    pub(super) fn note_change(&self) {
        self.changes.fetch_add(1, Ordering::SeqCst);
    }

    /// A number that stays the same while no change begins or ends.
    pub(super) fn changes(&self) -> u64 {
        self.changes.load(Ordering::SeqCst)
    }

    pub(super) fn library(&self) -> &'static Library {
        self.handle().pool.library
    }

    pub(super) fn pointer(&self) -> Pointer {
        self.handle().image
    }

    fn handle(&self) -> &Open {
        self.open.as_ref().expect("only a drop takes it")
    }

    fn ask<T>(
        &self,
        function: unsafe extern "C" fn(Pointer, *mut T) -> c_int,
        mut value: T,
    ) -> Result<T> {
        // SAFETY: an open image, and a place of the type that the function wants.
        let asked = unsafe { function(self.pointer(), &mut value) };
        match asked {
            0.. => Ok(value),
            _ => Err(Error::from_errno("open", -asked).target(&self.name)),
        }
    }

    pub(super) fn size_bytes(&self) -> Result<u64> {
        self.ask(self.library().rbd_get_size, 0)
    }

    /// What tells a snapshot of the image from all others, of all clusters: nothing ever changes in it. Nothing if that
    /// cannot be told (images of the oldest format).
    pub(super) fn snapshot_id(&self, snapshot: &str) -> Option<String> {
        let library = self.library();
        let mut value = [0 as c_char; 256];
        let (place, len) = (value.as_mut_ptr(), value.len() - 1);
        let told = |value: &[c_char]| {
            // SAFETY: a place behind which a zero byte stays.
            let value = unsafe { CStr::from_ptr(value.as_ptr()) };
            value.to_string_lossy().into_owned()
        };
        // SAFETY: an open connection, and a place with its length.
        let asked = unsafe { (library.rados_cluster_fsid)(self.handle().pool.cluster, place, len) };
        let cluster = (asked >= 0).then(|| told(&value))?;
        value.fill(0);
        let place = value.as_mut_ptr();
        // SAFETY: an open image, and a place with its length.
        let asked = unsafe { (library.rbd_get_id)(self.pointer(), place, len) };
        let image = (asked >= 0).then(|| told(&value))?;
        let snapshot = text(snapshot).ok()?;
        let mut number = 0;
        // SAFETY: an open image, a string, and a place for a number.
        let asked =
            unsafe { (library.rbd_snap_get_id)(self.pointer(), snapshot.as_ptr(), &mut number) };
        (asked >= 0).then(|| format!("{cluster} {image} {number}"))
    }

    /// In how large units whole objects can be told of: for images of which it can be told
    /// truly which of them are there.
    pub(super) fn diff_unit_bytes(&self) -> Result<Option<u64>> {
        let library = self.library();
        let features = self.ask(library.rbd_get_features, 0)?;
        let flags = self.ask(library.rbd_get_flags, 0)?;
        if features & FAST_DIFF == 0 || flags & FAST_DIFF_INVALID != 0 {
            return Ok(None);
        }
        let mut stripes = 1;
        if features & STRIPING != 0 {
            stripes = self.ask(library.rbd_get_stripe_count, 1)?;
        }
        let mut info = ImageInfo::empty();
        // SAFETY: an open image, and a place with its size.
        let told = unsafe { (library.rbd_stat)(self.pointer(), &mut info, size_of::<ImageInfo>()) };
        if told < 0 || info.object_bytes == 0 {
            return Ok(None);
        }
        let (mut major, mut minor, mut extra) = (0, 0, 0);
        // SAFETY: places for three numbers.
        unsafe { (library.rbd_version)(&mut major, &mut minor, &mut extra) };
        if (major, minor) < GOOD_DIFF && (stripes > 1 || self.has_parent()) {
            return Ok(None);
        }
        Ok(info.object_bytes.checked_mul(stripes))
    }

    fn has_parent(&self) -> bool {
        let none = null_mut();
        let ask = self.library().rbd_get_parent_info;
        // SAFETY: an open image, and no places for the names.
        let told = unsafe { ask(self.pointer(), none, 0, none, 0, none, 0) };
        told != -libc::ENOENT
    }

    /// The runs of a range that have data, in order; `range` must begin at a unit
    /// ([`Image::diff_unit_bytes`]).
    pub(super) fn runs(&self, range: Range<u64>) -> Result<Vec<Range<u64>>> {
        extern "C" fn note(offset: u64, len: usize, exists: c_int, runs: Pointer) -> c_int {
            // SAFETY: the argument that was given below, of which nobody else knows.
            let runs = unsafe { &mut *runs.cast::<Vec<Range<u64>>>() };
            if exists != 0 {
                let end = offset.saturating_add(len as u64);
                match runs.last_mut() {
                    Some(last) if last.end == offset => last.end = end,
                    _ => runs.push(offset..end),
                }
            }
            0
        }
        let mut runs: Vec<Range<u64>> = Vec::new();
        let list: *mut Vec<Range<u64>> = &mut runs;
        let len = range.end - range.start;
        let none = std::ptr::null();
        let iterate = self.library().rbd_diff_iterate2;
        // SAFETY: an open image, and a list that outlives the call, which alone uses it.
        let told = unsafe {
            iterate(
                self.pointer(),
                none,
                range.start,
                len,
                1,
                1,
                note,
                list.cast(),
            )
        };
        match told {
            0.. => Ok(runs),
            _ => Err(Error::from_errno("block status", -told).target(&self.name)),
        }
    }

    pub(super) fn resize(&self, len_bytes: u64) -> Result<()> {
        // SAFETY: an open image.
        let resized = unsafe { (self.library().rbd_resize)(self.pointer(), len_bytes) };
        match resized {
            0.. => Ok(()),
            _ => Err(Error::from_errno("truncate", -resized).target(&self.name)),
        }
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        let (Some(open), Some(closed)) = (self.open.take(), self.closed.lock().take()) else {
            return;
        };
        // Without a thread it stays open: to give up what is below it would be worse.
        let open = ManuallyDrop::new(open);
        let closing = Counted::closing();
        // The last request may have ended just now, on a thread that librbd's closing waits for.
        let _ = blocking::start(move || {
            let result = ManuallyDrop::into_inner(open).close();
            drop(closing);
            // Nobody may be interested.
            let _ = closed.send(result);
        });
    }
}

impl std::fmt::Debug for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Image({})", self.name)
    }
}

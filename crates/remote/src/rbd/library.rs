//! librbd, loaded with the first image on Ceph instead of with the program: few hosts have it, and
//! a program that is linked to it would not start without.
//!
//! Only [`super::handle`] and [`super::completion`] call its functions. The library is never
//! unloaded.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use super::at_exit;

/// The library; those of librados below it are found through it.
const NAME: &CStr = c"librbd.so.1";
/// What brings it.
const PACKAGE: &str = "librbd1";

/// A cluster, a pool of it, an image, the end of a request: what librbd points at.
pub(super) type Pointer = *mut c_void;
/// What is called for each run of an image: offset, length, whether there is data, and the argument.
pub(super) type EachRun = extern "C" fn(u64, usize, c_int, Pointer) -> c_int;
/// What is called when a request has ended.
pub(super) type Ended = extern "C" fn(Pointer, Pointer);

macro_rules! functions {
    ($($name:ident($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// Its functions, under their own names.
        pub(super) struct Library {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Library {
            fn find(library: Pointer) -> Result<Self, String> {
                Ok(Library {
                    $($name: {
                        let address = address(library, concat!(stringify!($name), "\0"))?;
                        // SAFETY: the function of this name has this type: since Ceph 16 at the
                        // latest, and for good, as its users are not built anew.
                        unsafe {
                            std::mem::transmute::<
                                Pointer,
                                unsafe extern "C" fn($($argument),*) $(-> $result)?,
                            >(address)
                        }
                    },)*
                })
            }
        }
    };
}

functions! {
    rados_create(*mut Pointer, *const c_char) -> c_int;
    rados_conf_read_file(Pointer, *const c_char) -> c_int;
    rados_conf_set(Pointer, *const c_char, *const c_char) -> c_int;
    rados_conf_get(Pointer, *const c_char, *mut c_char, usize) -> c_int;
    rados_connect(Pointer) -> c_int;
    rados_shutdown(Pointer);
    rados_cluster_fsid(Pointer, *mut c_char, usize) -> c_int;
    rados_ioctx_create(Pointer, *const c_char, *mut Pointer) -> c_int;
    rados_ioctx_set_namespace(Pointer, *const c_char);
    rados_ioctx_destroy(Pointer);
    rbd_version(*mut c_int, *mut c_int, *mut c_int);
    rbd_create(Pointer, *const c_char, u64, *mut c_int) -> c_int;
    rbd_remove(Pointer, *const c_char) -> c_int;
    rbd_open(Pointer, *const c_char, *mut Pointer, *const c_char) -> c_int;
    rbd_open_read_only(Pointer, *const c_char, *mut Pointer, *const c_char) -> c_int;
    rbd_close(Pointer) -> c_int;
    rbd_get_id(Pointer, *mut c_char, usize) -> c_int;
    rbd_snap_get_id(Pointer, *const c_char, *mut u64) -> c_int;
    rbd_get_size(Pointer, *mut u64) -> c_int;
    rbd_get_features(Pointer, *mut u64) -> c_int;
    rbd_get_flags(Pointer, *mut u64) -> c_int;
    rbd_get_stripe_count(Pointer, *mut u64) -> c_int;
    rbd_stat(Pointer, *mut ImageInfo, usize) -> c_int;
    rbd_get_parent_info(Pointer, *mut c_char, usize, *mut c_char, usize, *mut c_char, usize) -> c_int;
    rbd_encryption_load(Pointer, c_int, *const c_void, usize) -> c_int;
    rbd_resize(Pointer, u64) -> c_int;
    rbd_diff_iterate2(Pointer, *const c_char, u64, u64, u8, u8, EachRun, Pointer) -> c_int;
    rbd_aio_create_completion(Pointer, Ended, *mut Pointer) -> c_int;
    rbd_aio_get_return_value(Pointer) -> isize;
    rbd_aio_release(Pointer);
    rbd_aio_readv(Pointer, *const libc::iovec, c_int, u64, Pointer) -> c_int;
    rbd_aio_writev(Pointer, *const libc::iovec, c_int, u64, Pointer) -> c_int;
    rbd_aio_write_zeroes(Pointer, u64, usize, Pointer, c_int, c_int) -> c_int;
    rbd_aio_discard(Pointer, u64, u64, Pointer) -> c_int;
    rbd_aio_flush(Pointer, Pointer) -> c_int;
}

/// `rbd_image_info_t`.
#[repr(C)]
pub(super) struct ImageInfo {
    pub(super) size_bytes: u64,
    pub(super) object_bytes: u64,
    pub(super) objects: u64,
    pub(super) order: c_int,
    block_name_prefix: [c_char; 24],
    parent_pool: i64,
    parent_name: [c_char; 96],
}

impl ImageInfo {
    pub(super) fn empty() -> Self {
        ImageInfo {
            size_bytes: 0,
            object_bytes: 0,
            objects: 0,
            order: 0,
            block_name_prefix: [0; 24],
            parent_pool: 0,
            parent_name: [0; 96],
        }
    }
}

/// The library, loaded at the first call.
///
/// # Errors
/// What is missing, and which package brings it.
pub(super) fn load() -> Result<&'static Library, String> {
    static LOADED: OnceLock<Result<Library, String>> = OnceLock::new();
    LOADED.get_or_init(load_once).as_ref().map_err(Clone::clone)
}

fn load_once() -> Result<Library, String> {
    if cfg!(target_feature = "crt-static") {
        return Err(format!(
            "this build of vellum contains its libraries and cannot load {}: use one that is \
             linked to the system's, or 'rbd device map'",
            NAME.to_string_lossy()
        ));
    }
    // SAFETY: a name that ends in a zero byte. What runs while librbd is loaded expects nothing
    // of us.
    let library = unsafe { libc::dlopen(NAME.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if library.is_null() {
        return Err(format!(
            "images on Ceph need librbd: install the package '{PACKAGE}' ({})",
            reason()
        ));
    }
    let found = Library::find(library).map_err(|reason| {
        format!("librbd is too old; version 16 of Ceph or a later one is needed ({reason})")
    })?;
    at_exit::register();
    Ok(found)
}

fn address(library: Pointer, name: &str) -> Result<Pointer, String> {
    // SAFETY: an open library that is never closed, and a name that ends in a zero byte.
    let found = unsafe { libc::dlsym(library, name.as_ptr().cast()) };
    match found.is_null() {
        true => Err(reason()),
        false => Ok(found),
    }
}

/// Why the dynamic linker has refused, for the thread that asked.
fn reason() -> String {
    // SAFETY: no arguments.
    let message = unsafe { libc::dlerror() };
    if message.is_null() {
        return format!("{} cannot be loaded", NAME.to_string_lossy());
    }
    // SAFETY: not null, so a string of the dynamic linker's, which stays as it is until this
    // thread asks it for something again.
    let message = unsafe { CStr::from_ptr(message) };
    message.to_string_lossy().into_owned()
}

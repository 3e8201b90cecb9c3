//! Keys that the kernel keeps.

use vellum::{Error, ErrorKind, Result};
use zeroize::Zeroizing;

/// The kernel's number of the call that reads a key.
const KEYCTL_READ: libc::c_long = 11;
/// The kernel's longest key.
const MAX_KEY_BYTES: usize = 32767;

/// Reads the key with a serial number.
///
/// # Errors
/// In QEMU's words, with what the kernel says.
pub(crate) fn read(serial: i32) -> Result<Zeroizing<Vec<u8>>> {
    let mut bytes = Zeroizing::new(vec![0_u8; MAX_KEY_BYTES]);
    // SAFETY: the kernel writes no more bytes than it is told, into memory that lives on.
    let len = unsafe {
        libc::syscall(
            libc::SYS_keyctl,
            KEYCTL_READ,
            libc::c_long::from(serial),
            bytes.as_mut_ptr(),
            bytes.len(),
        )
    };
    let len = usize::try_from(len).map_err(|_| {
        let error = Error::from_io("read", &std::io::Error::last_os_error());
        Error::new(
            ErrorKind::InvalidArgument,
            "define a secret",
            format!(
                "Unable to read serial key {serial:08x}: {}",
                error.message()
            ),
        )
    })?;
    bytes.truncate(len.min(MAX_KEY_BYTES));
    Ok(bytes)
}

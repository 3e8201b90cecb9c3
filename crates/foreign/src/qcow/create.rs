//! New qcow images.

use std::sync::Arc;

use vellum::luks::CryptMethod;
use vellum::{Error, ErrorKind, Result, Storage};
use vellum_storage::ZeroFlags;

use super::header::{HEADER_BYTES, Header};
use crate::fields::write_at;

vellum_io::with_setters! {
    /// What a new image is to be.
    #[derive(Debug, Clone, PartialEq, Eq, Default)]
    pub struct CreateOptions {
        /// The virtual size in bytes, rounded up to whole sectors.
        pub size_bytes: u64,
        /// The name of a backing file. With one, clusters are a sector, so that nothing is copied.
        pub backing_file: Option<String>,
        /// The guest's data is encrypted, with AES-CBC, of which the passphrase is the key: see
        /// [`open`](super::open). Only for programs that know nothing else, since whoever sees two states
        /// of an image, or can guess what is in it, learns a lot.
        pub is_encrypted: bool,
    }
}

/// Makes an image in an empty file.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] for a size or a name that an image cannot have; else what the storage
/// says.
pub async fn create(file: &Arc<dyn Storage>, options: &CreateOptions) -> Result<()> {
    let refused = |message: &str| {
        let error = Error::new(ErrorKind::InvalidArgument, "create", message);
        Err(error.target(file.name()))
    };
    if options.size_bytes == 0 {
        return refused("Image size is too small, cannot be zero length");
    }
    let name = options.backing_file.as_deref().unwrap_or_default();
    let Some(size_bytes) = options.size_bytes.checked_next_multiple_of(512) else {
        return refused("Image too large");
    };
    let has_backing = options.backing_file.is_some();
    let (cluster_bits, l2_bits) = if has_backing { (9, 12) } else { (12, 9) };
    let header = Header {
        backing_offset_bytes: if has_backing { HEADER_BYTES as u64 } else { 0 },
        backing_len_bytes: name.len() as u32,
        size_bytes,
        cluster_bits,
        l2_bits,
        crypt_method: match options.is_encrypted {
            true => CryptMethod::Aes,
            false => CryptMethod::None,
        },
        l1_offset_bytes: (HEADER_BYTES + name.len()).next_multiple_of(8) as u64,
    };
    let mut bytes = header.encode();
    if name.len() > 1023 {
        return refused("Backing file name too long");
    }
    if let Err(error) = Header::decode(&bytes) {
        return refused(error.message());
    }
    bytes.extend(name.as_bytes());
    let l1_bytes = (header.l1_len() * 8).next_multiple_of(512);
    let zeroes = file.write_zeroes(header.l1_offset_bytes, l1_bytes, ZeroFlags::default());
    zeroes.await?;
    write_at(&**file, 0, &bytes).await?;
    file.flush().await
}

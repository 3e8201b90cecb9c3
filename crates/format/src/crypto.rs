//! The pointer to the encryption header (LUKS).

use crate::bytes;
use crate::error::{FormatError, FormatErrorKind, Result};
use crate::types::HostOffset;
use alloc::format;

/// Bytes of the pointer in its header extension.
pub const ENCRYPTION_HEADER_POINTER_SIZE_BYTES: usize = 16;

/// How guest data is encrypted: the header's `crypt_method`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum CryptMethod {
    /// Not at all.
    #[default]
    None,
    /// AES-CBC, QEMU's first attempt; legacy.
    Aes,
    /// LUKS, with its header in clusters of the image.
    Luks,
}

impl CryptMethod {
    pub(crate) fn decode(number: u32) -> Result<Self> {
        match number {
            0 => Ok(CryptMethod::None),
            1 => Ok(CryptMethod::Aes),
            2 => Ok(CryptMethod::Luks),
            _ => Err(FormatError::new(
                FormatErrorKind::Unsupported,
                "header",
                "crypt_method",
                number.into(),
                format!("Unsupported encryption method {number}"),
            )),
        }
    }

    /// The number that the header stores.
    pub const fn number(self) -> u32 {
        match self {
            CryptMethod::None => 0,
            CryptMethod::Aes => 1,
            CryptMethod::Luks => 2,
        }
    }
}

/// Where the LUKS header is: the payload of the header extension `0x0537be77`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EncryptionHeaderPointer {
    /// Start of the LUKS header; the start of a cluster.
    pub offset: HostOffset,
    /// Bytes that are written there; whole clusters are allocated.
    pub length_bytes: u64,
}

impl EncryptionHeaderPointer {
    /// Decodes the extension's data.
    ///
    /// # Errors
    /// [`FormatErrorKind::Invalid`] for an extension of another length than 16 bytes, and for
    /// an offset that does not start a cluster or ends beyond all files.
    pub fn decode(data: &[u8], cluster_size_bytes: u64) -> Result<Self> {
        let fields = (bytes::be64(data, 0), bytes::be64(data, 8));
        let (Some(offset), Some(length_bytes), ENCRYPTION_HEADER_POINTER_SIZE_BYTES) =
            (fields.0, fields.1, data.len())
        else {
            let length = data.len();
            return Err(fault(
                "length",
                length as u64,
                format!("CRYPTO header extension size {length}, but expected size 16"),
            ));
        };
        if offset & cluster_size_bytes.wrapping_sub(1) != 0 {
            let message = format!(
                "Encryption header offset '{offset}' is not a multiple of cluster size \
                 '{cluster_size_bytes}'"
            );
            return Err(fault("offset", offset, message));
        }
        if offset
            .checked_add(length_bytes)
            .is_none_or(|end| end > crate::limits::MAX_SIZE_BYTES)
        {
            let message = format!("Encryption header length '{length_bytes}' is too large");
            return Err(fault("length", length_bytes, message));
        }
        Ok(EncryptionHeaderPointer {
            offset: HostOffset(offset),
            length_bytes,
        })
    }

    /// The extension's data.
    pub fn encode(self) -> [u8; ENCRYPTION_HEADER_POINTER_SIZE_BYTES] {
        let mut data = [0; ENCRYPTION_HEADER_POINTER_SIZE_BYTES];
        data[..8].copy_from_slice(&self.offset.0.to_be_bytes());
        data[8..].copy_from_slice(&self.length_bytes.to_be_bytes());
        data
    }
}

fn fault(field: &'static str, value: u64, message: alloc::string::String) -> FormatError {
    FormatError::new(
        FormatErrorKind::Invalid,
        "encryption header pointer",
        field,
        value,
        message,
    )
}

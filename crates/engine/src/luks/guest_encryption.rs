//! [`GuestEncryption`]: how the guest data of an open image is encrypted, whatever the image's format; and
//! [`Unlocking`], what whoever opens it says of that.

use vellum_format::crypto::CryptMethod;
use vellum_io::{Error, ErrorKind, Result};
use vellum_storage::Storage;

use super::{CurrentHeader, EncryptedStorage, MasterKey, Passphrase};

/// How the guest data of an open image is encrypted.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum GuestEncryption {
    /// Not at all.
    None,
    /// In a way that does not matter, since no data is read.
    Locked,
    /// By what holds its data.
    #[non_exhaustive]
    Luks {
        /// What unlocked it.
        passphrase: Passphrase,
        /// What holds its data.
        plain: EncryptedStorage,
        /// The key of its sectors.
        key: MasterKey,
        /// Its header.
        header: CurrentHeader,
    },
    /// Cluster by cluster, by guest offset.
    Legacy(EncryptedStorage),
}

impl GuestEncryption {
    /// That of an image for which [`Unlocking::needed_passphrase`] asks for none.
    pub fn without_key(method: CryptMethod) -> Self {
        match method {
            CryptMethod::None => GuestEncryption::None,
            CryptMethod::Aes | CryptMethod::Luks => GuestEncryption::Locked,
        }
    }

    /// Whether guest data is encrypted.
    pub fn is_some(&self) -> bool {
        !matches!(self, GuestEncryption::None)
    }

    /// The key of the sectors of a LUKS image.
    pub(crate) fn volume_key(&self) -> Option<&[u8]> {
        match self {
            GuestEncryption::Luks { key, .. } => Some(key.bytes()),
            _ => None,
        }
    }

    /// Makes a request of the guest's bytes at `guest_bytes`, which lie at `host_bytes` of `data`. It is given
    /// the storage, and the offset in it, that show them as the guest does.
    ///
    /// # Errors
    /// [`ErrorKind::Denied`] if the image is locked.
    pub fn at<T>(
        &self,
        data: &dyn Storage,
        guest_bytes: u64,
        host_bytes: u64,
        request: impl FnOnce(&dyn Storage, u64) -> T,
    ) -> Result<T> {
        match self {
            GuestEncryption::None | GuestEncryption::Luks { .. } => Ok(request(data, host_bytes)),
            GuestEncryption::Legacy(cipher) => {
                let placed = cipher.placed(guest_bytes, host_bytes);
                Ok(request(&placed, guest_bytes))
            }
            GuestEncryption::Locked => {
                let message = "the image was opened without its key";
                Err(Error::new(ErrorKind::Denied, "unlock", message).target(data.name()))
            }
        }
    }
}

vellum_io::with_setters! {
    /// What whoever opens an image says of its encryption.
    #[derive(Debug, Clone, Default)]
    pub struct Unlocking {
        /// How it must be encrypted (`encrypt.format`), if that is demanded.
        pub format: Option<String>,
        /// What unlocks it (`encrypt.key-secret`).
        pub passphrase: Option<Passphrase>,
        /// No guest data is read or written, so that no passphrase is needed.
        pub no_data: bool,
    }
}

fn method_name(method: CryptMethod) -> &'static str {
    match method {
        CryptMethod::None => "none",
        CryptMethod::Aes => "aes",
        CryptMethod::Luks => "luks",
    }
}

impl Unlocking {
    /// The passphrase that an image needs which is encrypted in some way; `None` if it needs none.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] in QEMU's words if another way is demanded, or the passphrase is missing.
    pub fn needed_passphrase(&self, method: CryptMethod) -> Result<Option<&Passphrase>> {
        let refused = |message: String| Error::new(ErrorKind::InvalidArgument, "open", message);
        let found = method_name(method);
        match &self.format {
            Some(expected) if method == CryptMethod::None => Err(refused(format!(
                "No encryption in image header, but options specified format '{expected}'"
            ))),
            Some(expected) if expected != found => Err(refused(format!(
                "Header reported '{found}' encryption format but options specify '{expected}'"
            ))),
            _ if method == CryptMethod::None || self.no_data => Ok(None),
            _ => {
                let message = "Parameter 'encrypt.key-secret' is required for cipher";
                let given = self.passphrase.as_ref();
                given.map(Some).ok_or_else(|| refused(message.to_owned()))
            }
        }
    }
}

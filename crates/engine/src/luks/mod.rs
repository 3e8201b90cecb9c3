//! Encryption: LUKS1 volumes, by themselves or inside qcow2 images, and the AES-CBC
//! of old qcow2 images.
//!
//! A volume's header ([`LuksHeader`]) says how it is encrypted and keeps copies of its
//! master key, each encrypted with a passphrase. [`format()`] makes a header,
//! [`read_header`] and [`unlock`] lead to the master key, [`change_keys`] adds and
//! erases copies of it. What is encrypted is seen through an [`EncryptedStorage`]:
//! plain bytes above, sectors of 512 encrypted bytes below. [`LuksDevice`] is such a
//! volume as a block device.
//!
//! A volume is made, written, and opened again:
//!
//! ```
//! use std::sync::Arc;
//! use vellum::luks::{FormatOptions, IterationTime, LuksDevice, LuksOptions, format};
//! use vellum::io::lane;
//! use vellum::storage::MemStorage;
//! use vellum::{BlockDevice, Buffer, Buffers, RequestFlags, Storage};
//!
//! lane::block_on(async {
//!     let file: Arc<dyn Storage> = Arc::new(MemStorage::new());
//!     let options = FormatOptions {
//!         iteration_time: IterationTime::Milliseconds(10),
//!         ..FormatOptions::default()
//!     };
//!     let volume = format(&options, &"open sesame".into(), false).await?;
//!     let header = Buffers::from_iter([Buffer::copy_of(&volume.bytes)]);
//!     file.write(0, header, Default::default()).await?;
//!     file.truncate(volume.size_bytes + (1 << 20)).await?;
//!
//!     let options = LuksOptions::default().passphrase(Some("open sesame".into()));
//!     let device = LuksDevice::open(file, options).await?;
//!     assert_eq!(device.size_bytes(), 1 << 20);
//!     let bytes = Buffer::copy_of(b"nobody else reads this");
//!     device.write(0, bytes, RequestFlags::default()).await?;
//!     let read = device.read(7, Buffer::for_read(4)).await?;
//!     assert_eq!(&read[..], b"else");
//!     device.close().await
//! })
//! # .unwrap();
//! ```
//!
//! Encrypted qcow2 images are made with [`CreateOptions::encryption`], opened with
//! [`OpenOptions::passphrase`], and get other passphrases from [`Qcow2::change_keys`].
//!
//! [`CreateOptions::encryption`]: crate::qcow2::create::CreateOptions::encryption
//! [`OpenOptions::passphrase`]: crate::qcow2::OpenOptions::passphrase
//! [`Qcow2::change_keys`]: crate::qcow2::Qcow2::change_keys
//!
//! Invariants:
//! - What was never written does not read as zeroes, and neither does a hole:
//!   nothing above an [`EncryptedStorage`] may take a place for zero that it has not
//!   written.
//! - A sector is the unit of encryption and of the disk, so a power cut never leaves
//!   one that decrypts to a third thing.
//! - Keys and passphrases are wiped from memory when they are dropped, and no error
//!   or debug text shows them.
//!
//! | file | what it does |
//! | --- | --- |
//! | `format`, `volume`, `slots` | new headers; from a passphrase to the master key; passphrases added and erased |
//! | `hash`, `split`, `passphrase` | PBKDF2 and its time; the anti-forensic splitter; secrets that are wiped |
//! | `cipher`, `modes`, `xts`, `iv` | sectors encrypted and decrypted |
//! | `storage`, `device` | plain bytes above, encrypted sectors below; a volume of the luks format |
//! | `legacy` | the AES-CBC of qcow images and old qcow2 images |
//! | `guest_encryption` | how an open image's guest data is encrypted, whatever its format |
//! | `scratch` | files that end with the program, and whose key does |

mod cipher;
mod current_header;
mod device;
mod format;
mod guest_encryption;
mod hash;
mod iv;
mod legacy;
mod modes;
mod passphrase;
mod scratch;
mod slots;
mod split;
mod storage;
mod volume;
mod xts;

pub use cipher::SECTOR_BYTES;
pub use current_header::CurrentHeader;
pub use device::{AsLuks, LuksDevice, LuksOptions};
pub use format::{FormatOptions, IterationTime, NewVolume, format, header_size_bytes};
pub use guest_encryption::{GuestEncryption, Unlocking};
pub use passphrase::Passphrase;
pub use slots::{KeyChange, change_keys};
pub use storage::EncryptedStorage;
pub use vellum_format::crypto::CryptMethod;
pub use vellum_format::luks::names::{Cipher, Hash, IvGenerator, Mode};
pub use vellum_format::luks::{KeySlot, LuksHeader, Suite, is_luks};
pub use volume::{MasterKey, read_header, unlock};

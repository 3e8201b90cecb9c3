//! Header extensions: typed records between the header and the backing file's name.

use crate::bitmap::BitmapsExtension;
use crate::bytes;
use crate::crypto::{CryptMethod, EncryptionHeaderPointer};
use crate::error::{FormatError, FormatErrorKind, Result};
use crate::features::{Autoclear, Compatible, Incompatible};
use crate::limits;
use alloc::borrow::Cow;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

/// Type numbers of the extensions.
pub mod kind {
    /// The end of the extensions.
    pub const END: u32 = 0;
    /// Format of the backing file.
    pub const BACKING_FORMAT: u32 = 0xe279_2aca;
    /// Names of features.
    pub const FEATURE_NAMES: u32 = 0x6803_f857;
    /// Where the bitmap directory is.
    pub const BITMAPS: u32 = 0x2385_2875;
    /// Where the encryption header is.
    pub const CRYPTO_HEADER: u32 = 0x0537_be77;
    /// Name of the external data file.
    pub const EXTERNAL_DATA_FILE: u32 = 0x4441_5441;
    /// Vellum's own: tables of bitmaps that are in use and not to be trusted, 8
    /// bytes each, for as long as the autoclear bit for crash-consistent bitmaps is set.
    pub const LOST_BITMAPS: u32 = 0x564c_4c42;
    /// Vellum's own: where the seal is, for as long as its autoclear bit is set
    /// ([`crate::seal`]).
    pub const SEAL: u32 = 0x564c_5345;
    /// Vellum's own: identity and name of the write log
    /// ([`WriteLogExtension`](crate::write_log::WriteLogExtension)).
    pub const WRITE_LOG: u32 = 0x564c_4c4a;
    /// Vellum's own: identity and name of the file with the checksums, in the same form, for as
    /// long as their autoclear bit is set ([`crate::checksums`]).
    pub const CHECKSUMS: u32 = 0x564c_4353;
}

/// Bytes of an extension's type and length.
const PREFIX_SIZE_BYTES: usize = 8;
const FEATURE_NAME_SIZE_BYTES: usize = 48;

/// One header extension.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Extension {
    /// Format of the backing file, for example `raw`.
    BackingFormat(Vec<u8>),
    /// Names of features, for programs that do not know them.
    FeatureNames(Vec<FeatureName>),
    /// Where the bitmap directory is.
    Bitmaps(BitmapsExtension),
    /// Where the encryption header is.
    CryptoHeader(EncryptionHeaderPointer),
    /// Name of the external data file.
    ExternalDataFile(Vec<u8>),
    /// An extension that is not known here, kept as it is.
    Unknown {
        /// Its type number.
        kind: u32,
        /// Its data, without padding.
        data: Vec<u8>,
    },
}

/// Which feature field a [`FeatureName`] speaks of.
pub mod feature_type {
    /// `incompatible_features`
    pub const INCOMPATIBLE: u8 = 0;
    /// `compatible_features`
    pub const COMPATIBLE: u8 = 1;
    /// `autoclear_features`
    pub const AUTOCLEAR: u8 = 2;
}

/// The name of one feature bit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FeatureName {
    /// One of [`feature_type`]; others are kept.
    pub feature_type: u8,
    /// Number of the bit.
    pub bit: u8,
    /// The name, padded with zeros.
    pub name: [u8; 46],
}

impl FeatureName {
    /// The name of bit `bit`; names longer than 46 bytes are cut.
    pub fn new(feature_type: u8, bit: u8, name: &str) -> Self {
        let mut padded = [0; 46];
        for (to, from) in padded.iter_mut().zip(name.bytes()) {
            *to = from;
        }
        FeatureName {
            feature_type,
            bit,
            name: padded,
        }
    }

    /// The name as text.
    pub fn text(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(bytes::until_nul(&self.name))
    }

    fn decode(raw: &[u8]) -> Option<Self> {
        Some(FeatureName {
            feature_type: *raw.first()?,
            bit: *raw.get(1)?,
            name: bytes::array(raw, 2)?,
        })
    }
}

/// The feature names that QEMU writes into every version 3 image.
pub fn default_feature_names() -> Vec<FeatureName> {
    use feature_type::{AUTOCLEAR, COMPATIBLE, INCOMPATIBLE};
    let bit = |bits: u64| bits.trailing_zeros() as u8;
    [
        (INCOMPATIBLE, Incompatible::DIRTY.bits(), "dirty bit"),
        (INCOMPATIBLE, Incompatible::CORRUPT.bits(), "corrupt bit"),
        (
            INCOMPATIBLE,
            Incompatible::EXTERNAL_DATA.bits(),
            "external data file",
        ),
        (
            INCOMPATIBLE,
            Incompatible::COMPRESSION.bits(),
            "compression type",
        ),
        (
            INCOMPATIBLE,
            Incompatible::EXTENDED_L2.bits(),
            "extended L2 entries",
        ),
        (
            COMPATIBLE,
            Compatible::LAZY_REFCOUNTS.bits(),
            "lazy refcounts",
        ),
        (AUTOCLEAR, Autoclear::BITMAPS.bits(), "bitmaps"),
        (
            AUTOCLEAR,
            Autoclear::RAW_EXTERNAL_DATA.bits(),
            "raw external data",
        ),
    ]
    .into_iter()
    .map(|(feature_type, bits, name)| FeatureName::new(feature_type, bit(bits), name))
    .collect()
}

/// What the rest of the header says that extensions depend on.
#[derive(Debug, Clone, Copy)]
pub struct Context {
    /// Bytes of a cluster.
    pub cluster_size_bytes: u64,
    /// How guest data is encrypted.
    pub crypt_method: CryptMethod,
    /// Whether the autoclear bit vouches for the bitmaps.
    pub bitmaps_consistent: bool,
}

/// Decodes the extensions in `area`, which begins behind the header proper and
/// ends with the first cluster or where the backing file's name begins.
///
/// The end marker ends the list early; its absence is no fault.
///
/// # Errors
/// [`FormatErrorKind::Invalid`] for an extension that goes on beyond `area`, and as
/// [`Extension::decode`].
pub fn decode_all(area: &[u8], context: &Context) -> Result<Vec<Extension>> {
    let mut extensions = Vec::new();
    let mut rest = area;
    while !rest.is_empty() {
        let (kind, data) = split_first(rest)?;
        if kind == kind::END {
            break;
        }
        let used = PREFIX_SIZE_BYTES.saturating_add(bytes::padded(data.len()));
        rest = rest.get(used..).unwrap_or(&[]);
        extensions.push(Extension::decode(kind, data, context)?);
    }
    Ok(extensions)
}

/// The feature names in `area`, as far as it can be read: they only help to word
/// an error.
pub(crate) fn find_feature_names(area: &[u8]) -> Vec<FeatureName> {
    let mut names = Vec::new();
    let mut rest = area;
    while let Ok((kind, data)) = split_first(rest) {
        match kind {
            kind::END => break,
            kind::FEATURE_NAMES => names = decode_cut_feature_names(data),
            _ => {}
        }
        let used = PREFIX_SIZE_BYTES.saturating_add(bytes::padded(data.len()));
        rest = rest.get(used..).unwrap_or(&[]);
    }
    names
}

/// Type and data of the first extension in `area`.
fn split_first(area: &[u8]) -> Result<(u32, &[u8])> {
    let (Some(kind), Some(length)) = (bytes::be32(area, 0), bytes::be32(area, 4)) else {
        return Err(too_large(area.len() as u64));
    };
    let data = usize::try_from(length)
        .ok()
        .and_then(|length| area.get(PREFIX_SIZE_BYTES..)?.get(..length))
        .ok_or_else(|| too_large(length.into()))?;
    Ok((kind, data))
}

fn too_large(length: u64) -> FormatError {
    fault("length", length, "Header extension too large")
}

fn fault(field: &'static str, value: u64, message: impl Into<Cow<'static, str>>) -> FormatError {
    FormatError::new(
        FormatErrorKind::Invalid,
        "header extension",
        field,
        value,
        message,
    )
}

/// As [`decode_feature_names`]; of a last name that is cut off, what is there.
fn decode_cut_feature_names(data: &[u8]) -> Vec<FeatureName> {
    let mut whole = data.to_vec();
    whole.resize(data.len().next_multiple_of(FEATURE_NAME_SIZE_BYTES), 0);
    decode_feature_names(&whole)
}

fn decode_feature_names(data: &[u8]) -> Vec<FeatureName> {
    data.chunks_exact(FEATURE_NAME_SIZE_BYTES)
        .filter_map(FeatureName::decode)
        .collect()
}

impl Extension {
    /// Decodes the data of one extension.
    ///
    /// # Errors
    /// [`FormatErrorKind::Invalid`] for data that the format does not allow, or not in such an
    /// image.
    pub fn decode(kind: u32, data: &[u8], context: &Context) -> Result<Self> {
        let cluster_size = context.cluster_size_bytes;
        Ok(match kind {
            kind::BACKING_FORMAT => {
                check_backing_format(data)?;
                Extension::BackingFormat(data.to_vec())
            }
            kind::FEATURE_NAMES => Extension::FeatureNames(decode_feature_names(data)),
            kind::BITMAPS => Extension::Bitmaps(BitmapsExtension::decode(
                data,
                cluster_size,
                context.bitmaps_consistent,
            )?),
            kind::CRYPTO_HEADER => {
                if context.crypt_method != CryptMethod::Luks {
                    return Err(fault(
                        "crypt_method",
                        context.crypt_method.number().into(),
                        "CRYPTO header extension only expected with LUKS encryption method",
                    ));
                }
                Extension::CryptoHeader(EncryptionHeaderPointer::decode(data, cluster_size)?)
            }
            kind::EXTERNAL_DATA_FILE => Extension::ExternalDataFile(data.to_vec()),
            _ => Extension::Unknown {
                kind,
                data: data.to_vec(),
            },
        })
    }

    /// The extension's type number.
    pub const fn kind(&self) -> u32 {
        match self {
            Extension::BackingFormat(_) => kind::BACKING_FORMAT,
            Extension::FeatureNames(_) => kind::FEATURE_NAMES,
            Extension::Bitmaps(_) => kind::BITMAPS,
            Extension::CryptoHeader(_) => kind::CRYPTO_HEADER,
            Extension::ExternalDataFile(_) => kind::EXTERNAL_DATA_FILE,
            Extension::Unknown { kind, .. } => *kind,
        }
    }

    /// Place in the order in which QEMU writes extensions.
    pub(crate) const fn rank(&self) -> u8 {
        match self {
            Extension::BackingFormat(_) => 0,
            Extension::ExternalDataFile(_) => 1,
            Extension::CryptoHeader(_) => 2,
            Extension::FeatureNames(_) => 3,
            Extension::Bitmaps(_) => 4,
            Extension::Unknown { .. } => 5,
        }
    }

    /// Appends the extension with its type, length and padding to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Extension::BackingFormat(data)
            | Extension::ExternalDataFile(data)
            | Extension::Unknown { data, .. } => push_record(out, self.kind(), data),
            Extension::Bitmaps(bitmaps) => push_record(out, self.kind(), &bitmaps.encode()),
            Extension::CryptoHeader(pointer) => push_record(out, self.kind(), &pointer.encode()),
            Extension::FeatureNames(names) => {
                let mut data = Vec::with_capacity(names.len() * FEATURE_NAME_SIZE_BYTES);
                for name in names {
                    data.extend_from_slice(&[name.feature_type, name.bit]);
                    data.extend_from_slice(&name.name);
                }
                push_record(out, self.kind(), &data);
            }
        }
    }
}

/// Appends the marker that ends the list of extensions.
pub fn encode_end(out: &mut Vec<u8>) {
    push_record(out, kind::END, &[]);
}

fn push_record(out: &mut Vec<u8>, kind: u32, data: &[u8]) {
    out.extend_from_slice(&kind.to_be_bytes());
    // Data beyond 4 GiB cannot fit the cluster either, which the header checks.
    let length = u32::try_from(data.len()).unwrap_or(u32::MAX);
    out.extend_from_slice(&length.to_be_bytes());
    out.extend_from_slice(data);
    out.resize(out.len() + (bytes::padded(data.len()) - data.len()), 0);
}

pub(crate) fn check_backing_format(name: &[u8]) -> Result<()> {
    let length = name.len();
    let end = limits::MAX_BACKING_FORMAT_LEN_BYTES + 1;
    if length < end {
        return Ok(());
    }
    let message = format!("ERROR: ext_backing_format: len={length} too large (>={end})");
    Err(fault("backing_format", length as u64, message))
}

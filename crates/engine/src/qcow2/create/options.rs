//! What image to make: the options, checked against each other, and the header that they make.

use vellum_format::extension::{Extension, default_feature_names};
use vellum_format::features::{Autoclear, Compatible, Incompatible};
use vellum_format::header::CompressionType;
use vellum_format::{FormatError, FormatErrorKind, Geometry, Header, limits};

use super::encrypted::{self, Encryption};
use super::layout::Layout;
use crate::luks::NewVolume;
use crate::{Error, ErrorKind, Preallocation, Result};

/// Cluster size where none is asked for.
pub const DEFAULT_CLUSTER_SIZE_BYTES: u64 = 65536;

/// Guest sizes are whole sectors.
pub(super) const SECTOR_SIZE_BYTES: u64 = 512;

vellum_io::with_setters! {
    /// What image to make: the `-o` options of `qemu-img create`, with its defaults.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct CreateOptions {
        /// Virtual size; rounded up to whole sectors of 512 bytes.
        pub size_bytes: u64,
        /// Version of the format: 2 (`compat=0.10`) or 3 (`compat=1.1`).
        pub version: u32,
        /// `cluster_size`: a power of two from 512 bytes to 2 MiB.
        pub cluster_size_bytes: u64,
        /// `refcount_bits`: a power of two up to 64.
        pub refcount_bits: u64,
        /// `extended_l2`: clusters are made of 32 subclusters.
        pub extended_l2: bool,
        /// `lazy_refcounts`: refcounts may lag behind while the image is in use.
        pub lazy_refcounts: bool,
        /// `compression_type`
        pub compression_type: CompressionType,
        /// `backing_file`: its name as it is to stand in the image.
        pub backing_file: Option<String>,
        /// `backing_fmt`: the format of the backing file.
        pub backing_format: Option<String>,
        /// `data_file`: the name of the external data file as it is to stand in the image.
        pub data_file: Option<String>,
        /// `data_file_raw`: the external data file is a raw image of the disk.
        pub data_file_raw: bool,
        /// `preallocation`
        pub preallocation: Preallocation,
        /// `encrypt.*`: guest data is encrypted.
        pub encryption: Option<Encryption>,
    }
}

impl Default for CreateOptions {
    fn default() -> Self {
        CreateOptions {
            size_bytes: 0,
            version: 3,
            cluster_size_bytes: DEFAULT_CLUSTER_SIZE_BYTES,
            refcount_bits: 1 << limits::DEFAULT_REFCOUNT_ORDER,
            extended_l2: false,
            lazy_refcounts: false,
            compression_type: CompressionType::Zlib,
            backing_file: None,
            backing_format: None,
            data_file: None,
            data_file_raw: false,
            preallocation: Preallocation::Off,
            encryption: None,
        }
    }
}

pub(super) fn refuse(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, "create", message)
}

pub(super) fn too_large() -> Error {
    // EFBIG, which tells this refusal from the others.
    refuse("The image size is too large for file format 'qcow2' (try using a larger cluster size)")
        .with_errno(27)
}

/// What the caller is told of an option that needs version 3.
fn needs_version_3(what: &str, above: &str) -> Error {
    refuse(format!(
        "{what} compatibility level 1.1 {above} above (use version=v3 or greater)"
    ))
}

impl CreateOptions {
    /// Checks the options against each other, in QEMU's order and words.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] with the first objection.
    pub fn validate(&self) -> Result<()> {
        self.layout().map(|_| ())
    }

    /// Bytes of the finished image file, data included if it is preallocated.
    ///
    /// # Errors
    /// As [`CreateOptions::validate`].
    pub fn file_size_bytes(&self) -> Result<u64> {
        self.layout().map(|layout| layout.file_size_bytes())
    }

    /// Bytes of the image file when all of the disk has been written: what a storage of fixed
    /// length must have so that no write of the guest fails for want of room. Snapshots, bitmaps
    /// and compressed clusters need more. It is what `measure` calls fully allocated.
    ///
    /// # Errors
    /// As [`CreateOptions::validate`].
    pub fn full_size_bytes(&self) -> Result<u64> {
        self.layout().map(|layout| layout.full_size_bytes())
    }

    pub(super) fn layout(&self) -> Result<Layout> {
        if !matches!(self.version, 2 | 3) {
            let message = format!(
                "Parameter 'version' does not accept value '{}'",
                self.version
            );
            return Err(refuse(message));
        }
        self.check_clusters()?;
        self.check_backing()?;
        self.check_refcounts()?;
        self.check_data_file()?;
        if self.compression_type != CompressionType::Zlib && self.version < 3 {
            return Err(needs_version_3(
                "Non-zlib compression type is only supported with",
                "and",
            ));
        }
        let geometry = Geometry {
            cluster_bits: self.cluster_size_bytes.trailing_zeros(),
            extended_l2: self.extended_l2,
            refcount_order: self.refcount_bits.trailing_zeros(),
            version: self.version,
            external_data: self.data_file.is_some(),
        };
        let encryption_bytes = self.encryption_header_bytes()?;
        self.guest_size_bytes()
            .and_then(|size| Layout::new(geometry, size, self.maps_everything(), encryption_bytes))
            .ok_or_else(too_large)
    }

    fn check_clusters(&self) -> Result<()> {
        if self.extended_l2 && self.version < 3 {
            return Err(needs_version_3(
                "Extended L2 entries are only supported with",
                "and",
            ));
        }
        let (min, max) = (1 << limits::MIN_CLUSTER_BITS, 1 << limits::MAX_CLUSTER_BITS);
        if !self.cluster_size_bytes.is_power_of_two()
            || !(min..=max).contains(&self.cluster_size_bytes)
        {
            let message = format!(
                "Cluster size must be a power of two between {min} and {}k",
                max >> 10
            );
            return Err(refuse(message));
        }
        let min = 1 << limits::MIN_EXTENDED_L2_CLUSTER_BITS;
        if self.extended_l2 && self.cluster_size_bytes < min {
            return Err(refuse(format!(
                "Extended L2 entries are only supported with cluster sizes of at least {min} bytes"
            )));
        }
        Ok(())
    }

    fn check_backing(&self) -> Result<()> {
        let preallocated = self.preallocation != Preallocation::Off;
        if self.backing_file.is_some() && preallocated && !self.extended_l2 {
            return Err(refuse(
                "Backing file and preallocation can only be used at the same time if extended_l2 \
                 is on",
            ));
        }
        if self.backing_format.is_some() && self.backing_file.is_none() {
            return Err(refuse("Backing format cannot be used without backing file"));
        }
        Ok(())
    }

    fn check_refcounts(&self) -> Result<()> {
        if self.lazy_refcounts && self.version < 3 {
            return Err(needs_version_3("Lazy refcounts only supported with", "and"));
        }
        if !self.refcount_bits.is_power_of_two() || self.refcount_bits > 64 {
            return Err(refuse(
                "Refcount width must be a power of two and may not exceed 64 bits",
            ));
        }
        if self.version < 3 && self.refcount_bits != 1 << limits::DEFAULT_REFCOUNT_ORDER {
            return Err(needs_version_3(
                "Different refcount widths than 16 bits require",
                "or",
            ));
        }
        Ok(())
    }

    fn check_data_file(&self) -> Result<()> {
        if self.data_file_raw && self.data_file.is_none() {
            return Err(refuse("data-file-raw requires data-file"));
        }
        if self.data_file_raw && self.backing_file.is_some() {
            return Err(refuse(
                "Backing file and data-file-raw cannot be used at the same time",
            ));
        }
        if self.data_file.is_some() && self.version < 3 {
            return Err(needs_version_3(
                "External data files are only supported with",
                "and",
            ));
        }
        Ok(())
    }

    fn guest_size_bytes(&self) -> Option<u64> {
        self.size_bytes
            .checked_next_multiple_of(SECTOR_SIZE_BYTES)
            .filter(|&size| size <= limits::MAX_SIZE_BYTES)
    }

    /// Whether every guest cluster is mapped from the start. A raw data file needs
    /// it: it must read the same whether or not it is read through the image.
    fn maps_everything(&self) -> bool {
        self.preallocation != Preallocation::Off || self.data_file_raw
    }

    fn header(&self, layout: &Layout, luks: Option<&NewVolume>) -> Header {
        let when = |set: bool, bits: u64| if set { bits } else { 0 };
        let zstd = self.compression_type == CompressionType::Zstd;
        let mut header = Header {
            version: self.version,
            cluster_bits: layout.geometry.cluster_bits,
            size_bytes: layout.guest_size_bytes,
            crypt_method: encrypted::method(self),
            l1_entries: layout.l1_entries as u32,
            l1_table_offset: layout.l1_table_offset(),
            refcount_table_offset: layout.refcount_table_offset(),
            refcount_table_clusters: layout.refcount_table_clusters as u32,
            snapshot_count: 0,
            snapshots_offset: Default::default(),
            incompatible: Incompatible(
                when(self.data_file.is_some(), Incompatible::EXTERNAL_DATA.bits())
                    | when(zstd, Incompatible::COMPRESSION.bits())
                    | when(self.extended_l2, Incompatible::EXTENDED_L2.bits()),
            ),
            compatible: Compatible(when(self.lazy_refcounts, Compatible::LAZY_REFCOUNTS.bits())),
            autoclear: Autoclear(when(
                self.data_file_raw,
                Autoclear::RAW_EXTERNAL_DATA.bits(),
            )),
            refcount_order: layout.geometry.refcount_order,
            compression_type: self.compression_type,
            unknown_header_tail: Vec::new(),
            extensions: Vec::new(),
            backing_file: None,
        };
        if let Some(name) = &self.data_file {
            header.set_extension(Extension::ExternalDataFile(name.clone().into_bytes()));
        }
        if let Some(luks) = luks {
            header.set_extension(encrypted::pointer(layout, luks));
        }
        // In a small first cluster they would leave no room for a backing file's name.
        if self.version >= 3 && layout.geometry.cluster_size_bytes() > 4096 {
            header.set_extension(Extension::FeatureNames(default_feature_names()));
        }
        header
    }

    /// The bytes of the first cluster, as far as they are not zeroes.
    pub(super) fn encoded_header(
        &self,
        layout: &Layout,
        luks: Option<&NewVolume>,
    ) -> Result<Vec<u8>> {
        let mut header = self.header(layout, luks);
        let bytes = header.encode().map_err(|error| {
            refuse(format!("Could not update qcow2 header: {}", reason(&error)))
        })?;
        let Some(backing_file) = &self.backing_file else {
            return Ok(bytes);
        };
        header.backing_file = Some(backing_file.clone().into_bytes());
        if let Some(format) = &self.backing_format {
            header.set_extension(Extension::BackingFormat(format.clone().into_bytes()));
        }
        header.encode().map_err(|error| {
            refuse(format!(
                "Could not assign backing file '{backing_file}' with format '{}': {}",
                self.backing_format.as_deref().unwrap_or("(null)"),
                reason(&error)
            ))
        })
    }
}

/// Why a header cannot be written, as QEMU puts it.
fn reason(error: &FormatError) -> &'static str {
    match error.kind() {
        FormatErrorKind::NoSpace => "No space left on device",
        _ => "Invalid argument",
    }
}

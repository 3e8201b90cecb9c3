//! Header to bytes.

use super::{Header, MAGIC, Purpose, decode, fault, field, invalid};
use crate::error::{FormatErrorKind, Result};
use crate::extension::{self, Extension};
use crate::features::Incompatible;
use crate::geometry;
use crate::limits;
use alloc::vec::Vec;

impl Header {
    /// The first bytes of the image: header, extensions and the backing file's
    /// name. The rest of the first cluster is to be zeros.
    ///
    /// # Errors
    /// [`FormatErrorKind::NoSpace`] if the header with its extensions does not fit the first
    /// cluster, and for what [`Header::decode`] would refuse the kind that it would say.
    pub fn encode(&self) -> Result<Vec<u8>> {
        self.check_encodable()?;
        let header_len = self.header_len_bytes() as usize;
        let mut out = Vec::with_capacity(1024);
        out.resize(header_len, 0);
        self.put_fields(&mut out);
        for extension in &self.extensions {
            extension.encode(&mut out);
        }
        extension::encode_end(&mut out);
        if let Some(name) = &self.backing_file {
            let offset = out.len() as u64;
            put(&mut out, field::BACKING_FILE_OFFSET, &offset.to_be_bytes());
            let length = name.len() as u32;
            put(&mut out, field::BACKING_FILE_SIZE, &length.to_be_bytes());
            out.extend_from_slice(name);
        }
        if out.len() as u64 > self.geometry().cluster_size_bytes() {
            return Err(fault(
                FormatErrorKind::NoSpace,
                "header_length",
                out.len() as u64,
                "The header with its extensions does not fit the first cluster",
            ));
        }
        Ok(out)
    }

    fn check_encodable(&self) -> Result<()> {
        geometry::check_version(self.version)?;
        geometry::check_cluster_bits(self.cluster_bits)?;
        self.check_version_2()?;
        decode::check_compression_bit(self.compression_type, self.incompatible)?;
        let unknown: Incompatible = self.incompatible.unknown();
        if !unknown.is_empty() {
            return Err(fault(
                FormatErrorKind::Unsupported,
                "incompatible_features",
                unknown.bits(),
                "Unknown incompatible features cannot be written",
            ));
        }
        self.check_values(Purpose::Use)?;
        self.check_names()?;
        self.check_parts()
    }

    /// Version 2 has no place for what came later.
    fn check_version_2(&self) -> Result<()> {
        let plain = self.incompatible.is_empty()
            && self.compatible.is_empty()
            && self.autoclear.is_empty()
            && self.refcount_order == limits::DEFAULT_REFCOUNT_ORDER
            && self.unknown_header_tail.is_empty();
        if self.version >= 3 || plain {
            return Ok(());
        }
        Err(invalid(
            "version",
            self.version,
            "Features and refcount widths other than 16 bits need version 3",
        ))
    }

    fn check_names(&self) -> Result<()> {
        for extension in &self.extensions {
            if let Extension::BackingFormat(name) = extension {
                extension::check_backing_format(name)?;
            }
        }
        let Some(name) = &self.backing_file else {
            return Ok(());
        };
        if name.len() > limits::MAX_BACKING_FILE_LEN_BYTES as usize {
            let length = name.len() as u64;
            return Err(invalid(
                "backing_file_size",
                length,
                "Backing file name too long",
            ));
        }
        if name.is_empty() || name.contains(&0) {
            let length = name.len() as u64;
            let message = "Backing file name is empty or contains NUL";
            return Err(invalid("backing_file_size", length, message));
        }
        Ok(())
    }

    fn put_fields(&self, out: &mut [u8]) {
        let fields_32 = [
            (field::MAGIC, MAGIC),
            (field::VERSION, self.version),
            (field::CLUSTER_BITS, self.cluster_bits),
            (field::CRYPT_METHOD, self.crypt_method.number()),
            (field::L1_SIZE, self.l1_entries),
            (field::REFCOUNT_TABLE_CLUSTERS, self.refcount_table_clusters),
            (field::SNAPSHOT_COUNT, self.snapshot_count),
        ];
        for (at, value) in fields_32 {
            put(out, at, &value.to_be_bytes());
        }
        let fields_64 = [
            (field::SIZE, self.size_bytes),
            (field::L1_TABLE_OFFSET, self.l1_table_offset.0),
            (field::REFCOUNT_TABLE_OFFSET, self.refcount_table_offset.0),
            (field::SNAPSHOTS_OFFSET, self.snapshots_offset.0),
        ];
        for (at, value) in fields_64 {
            put(out, at, &value.to_be_bytes());
        }
        if self.version >= 3 {
            self.put_fields_v3(out);
        }
    }

    fn put_fields_v3(&self, out: &mut [u8]) {
        let features = [
            (field::INCOMPATIBLE_FEATURES, self.incompatible.bits()),
            (field::COMPATIBLE_FEATURES, self.compatible.bits()),
            (field::AUTOCLEAR_FEATURES, self.autoclear.bits()),
        ];
        for (at, value) in features {
            put(out, at, &value.to_be_bytes());
        }
        put(
            out,
            field::REFCOUNT_ORDER,
            &self.refcount_order.to_be_bytes(),
        );
        put(
            out,
            field::HEADER_LENGTH,
            &self.header_len_bytes().to_be_bytes(),
        );
        put(
            out,
            field::COMPRESSION_TYPE,
            &[self.compression_type.number()],
        );
        put(out, field::TAIL, &self.unknown_header_tail);
    }
}

/// Copies `value` to `at`; the header's length was made to hold every field.
fn put(out: &mut [u8], at: usize, value: &[u8]) {
    if let Some(place) = out.get_mut(at..at + value.len()) {
        place.copy_from_slice(value);
    }
}

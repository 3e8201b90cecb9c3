//! [`SealedReads`]: what an open image needs to verify what it reads.

use std::ops::Range;
use std::sync::Arc;

use vellum_format::Header;
use vellum_format::seal::{LEAF_BYTES, LeafHasher};
use vellum_io::{Error, ErrorKind, Result};
use vellum_storage::Storage;

use super::area::{Sealed, VerifyReads, is_sealed, unit_bytes};
use super::seen::SeenLeaves;
use super::tree::Tree;
use crate::luks::GuestEncryption;
use crate::qcow2::options::{OpenOptions, OpenPurpose};

/// What an open image verifies its reads with.
#[derive(Debug)]
pub(crate) struct SealedReads {
    /// Leaves that were compared, where once is enough.
    seen: Option<SeenLeaves>,
    pub(super) hasher: Arc<LeafHasher>,
    pub(super) tree: Tree,
}

impl SealedReads {
    /// Reads the seal of an image that is opened, if reads are to be verified.
    ///
    /// # Errors
    /// [`ErrorKind::Corrupt`] where there should be a seal and none can be used;
    /// [`ErrorKind::InvalidArgument`] where verifying is demanded and there is none.
    pub(crate) async fn open(
        file: &Arc<dyn Storage>,
        header: &Header,
        encryption: &GuestEncryption,
        options: &OpenOptions,
    ) -> Result<Option<SealedReads>> {
        let demanded = options.verify.filter(|verify| *verify != VerifyReads::Off);
        let mode = options.verify.unwrap_or(VerifyReads::First);
        if !is_sealed(header) || !options.read_only {
            return match demanded {
                Some(_) => {
                    let message = "the image has no seal that its reads could be verified with";
                    Err(Error::new(ErrorKind::InvalidArgument, "open", message).target(file.name()))
                }
                None => Ok(None),
            };
        }
        // What a snapshot shows is not sealed, and without its key no data is read.
        let is_guest_data = options.purpose == OpenPurpose::GuestData;
        if mode == VerifyReads::Off || !is_guest_data || options.snapshot.is_some() {
            return Ok(None);
        }
        let unusable = |error: Error| {
            let why = error.message().to_owned();
            let message = format!(
                "The seal of the image cannot be used: {why}. 'vellum verify' tells more; with \
                 verify=off the image is read without it"
            );
            error.context("open", message)
        };
        let sealed = Sealed::read(file, header).await.map_err(unusable)?;
        if let Some(fault) = sealed.header_fault(file, header).await? {
            return Err(unusable(super::area::broken(file, fault)));
        }
        let size_bytes = sealed.superblock.size_bytes;
        let hasher = LeafHasher::new(size_bytes, unit_bytes(header), encryption.volume_key());
        Ok(Some(SealedReads {
            seen: (mode == VerifyReads::First).then(|| SeenLeaves::new(size_bytes)),
            hasher: Arc::new(hasher),
            tree: sealed.content(file),
        }))
    }

    /// Whether all that was to be compared of a range has been.
    #[inline]
    pub(crate) fn is_done(&self, offset_bytes: u64, len_bytes: u64) -> bool {
        let leaves = leaves_of(&(offset_bytes..offset_bytes + len_bytes));
        let seen = self.seen.as_ref();
        seen.is_some_and(|seen| seen.contains_all(leaves))
    }

    /// Whether a leaf need not be compared.
    pub(super) fn may_skip(&self, leaf: u64) -> bool {
        self.seen.as_ref().is_some_and(|seen| seen.contains(leaf))
    }

    /// Notes that a leaf agrees with the seal.
    pub(super) fn note(&self, leaf: u64) {
        if let Some(seen) = &self.seen {
            seen.insert(leaf);
        }
    }
}

/// The leaves that a range has bytes of.
pub(super) fn leaves_of(range: &Range<u64>) -> Range<u64> {
    range.start / LEAF_BYTES..range.end.div_ceil(LEAF_BYTES)
}

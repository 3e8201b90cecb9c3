//! What a range is, for `map` and those who copy.

use vellum::{Extent, ExtentKind, HostLocation, Result};

use super::core::Core;
use crate::layout::{Layout, Place};

impl<L: Layout> Core<L> {
    pub(super) async fn block_status(
        &self,
        offset_bytes: u64,
        len_bytes: u64,
        max_depth: u32,
    ) -> Result<Extent> {
        if len_bytes == 0 {
            return Ok(Extent::new(0, ExtentKind::AbsentZero));
        }
        let run = self.run_at(offset_bytes, len_bytes).await?;
        match run.place {
            Place::Zero => Ok(Extent::new(run.len_bytes, ExtentKind::Zero)),
            Place::Compressed => Ok(Extent::new(run.len_bytes, ExtentKind::Compressed)),
            Place::Data { file, offset_bytes } => {
                self.data(file, offset_bytes, run.len_bytes).await
            }
            Place::Absent => self.below(offset_bytes, run.len_bytes, max_depth).await,
        }
    }

    async fn data(&self, file: usize, offset_bytes: u64, len_bytes: u64) -> Result<Extent> {
        let file = self.file(file)?;
        let mut extent = Extent {
            len_bytes,
            kind: ExtentKind::Data,
            // What is encrypted is not the guest's bytes.
            host: (!self.layout.encryption().is_some()).then(|| HostLocation {
                offset_bytes,
                ..HostLocation::start_of(&**file)
            }),
            depth: 0,
        };
        if self.layout.is_preallocated() {
            let there = file.block_status(offset_bytes, len_bytes).await?;
            extent.len_bytes = there.len_bytes.clamp(1, len_bytes);
            if there.status.is_zero() {
                extent.kind = ExtentKind::ZeroData;
            }
        }
        Ok(extent)
    }

    async fn below(&self, offset_bytes: u64, len_bytes: u64, max_depth: u32) -> Result<Extent> {
        let Some(backing) = &self.backing else {
            if !self.layout.has_backing_files() {
                return Ok(Extent::new(len_bytes, ExtentKind::Zero));
            }
            return Ok(Extent::new(len_bytes, ExtentKind::AbsentZero));
        };
        if max_depth == 0 {
            return Ok(Extent::new(len_bytes, ExtentKind::Absent));
        }
        let there = backing.size_bytes().saturating_sub(offset_bytes);
        if there == 0 {
            return Ok(Extent::new(len_bytes, ExtentKind::AbsentZero));
        }
        let len_bytes = len_bytes.min(there);
        let below = backing.block_status(offset_bytes, len_bytes, max_depth - 1);
        let below = below.await?;
        Ok(Extent {
            depth: below.depth + 1,
            ..below
        })
    }
}

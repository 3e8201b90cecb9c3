//! Block status: what a guest range is made of, without reading it.

use std::sync::Arc;

use vellum_format::types::{GuestOffset, HostOffset};
use vellum_io::Result;

use crate::qcow2::image::Image;
use crate::qcow2::mapping::lookup::{MappingRun, RunKind};
use crate::{Extent, ExtentKind, HostLocation};

impl Image {
    /// The first extent at `offset_bytes`, `len_bytes` long at most; looks into
    /// `max_depth` layers below this one.
    pub(crate) async fn status(
        &self,
        offset_bytes: u64,
        len_bytes: u64,
        max_depth: u32,
    ) -> Result<Extent> {
        let run = self.first_run(GuestOffset(offset_bytes), len_bytes).await?;
        self.status_of_run(run, max_depth).await
    }

    async fn status_of_run(&self, run: MappingRun, max_depth: u32) -> Result<Extent> {
        match run.kind {
            RunKind::Unallocated { host } => self.status_below(&run, host, max_depth).await,
            RunKind::Zero { host } => Ok(Extent {
                host: self.location(host),
                ..Extent::new(run.len_bytes, ExtentKind::Zero)
            }),
            RunKind::Data { host, .. } => self.status_of_data(host, run.len_bytes).await,
            RunKind::Compressed(_) => Ok(Extent::new(run.len_bytes, ExtentKind::Compressed)),
        }
    }

    async fn status_of_data(&self, host: HostOffset, len_bytes: u64) -> Result<Extent> {
        let data = Extent {
            host: self.location(Some(host)),
            ..Extent::new(len_bytes, ExtentKind::Data)
        };
        // Whether a hole is what was sealed is told by reading it.
        let is_verified = self.seal.is_some();
        if is_verified || self.is_encrypted() || !self.looks_preallocated().await? {
            return Ok(data);
        }
        let found = self.data.block_status(host.bytes(), len_bytes).await?;
        Ok(Extent {
            len_bytes: found.len_bytes,
            kind: match found.status.is_zero() {
                true => ExtentKind::ZeroData,
                false => ExtentKind::Data,
            },
            ..data
        })
    }

    fn location(&self, host: Option<HostOffset>) -> Option<HostLocation> {
        host.filter(|_| !self.is_encrypted())
            .map(|host| HostLocation {
                offset_bytes: host.bytes(),
                ..self.data_start.clone()
            })
    }

    /// The status of a run that this layer does not hold.
    pub(crate) async fn status_below(
        &self,
        run: &MappingRun,
        host: Option<HostOffset>,
        max_depth: u32,
    ) -> Result<Extent> {
        let nothing = |len_bytes, kind| Extent {
            host: self.location(host),
            ..Extent::new(len_bytes, kind)
        };
        let Some(backing) = &self.backing else {
            return Ok(nothing(run.len_bytes, ExtentKind::AbsentZero));
        };
        let there = backing.size_bytes().saturating_sub(run.guest.bytes());
        if there == 0 {
            return Ok(nothing(run.len_bytes, ExtentKind::AbsentZero));
        }
        let len_bytes = run.len_bytes.min(there);
        if max_depth == 0 {
            return Ok(nothing(len_bytes, ExtentKind::Absent));
        }
        let below = backing
            .block_status(run.guest.bytes(), len_bytes, max_depth - 1)
            .await?;
        Ok(Extent {
            depth: below.depth.saturating_add(1),
            ..below
        })
    }
}

/// The status of a range as seen by a device: never beyond its end.
pub(crate) async fn block_status(
    image: Arc<Image>,
    offset_bytes: u64,
    len_bytes: u64,
    max_depth: u32,
) -> Result<Extent> {
    image.check_range("block status", offset_bytes, len_bytes)?;
    if len_bytes == 0 {
        return Ok(Extent::new(0, ExtentKind::AbsentZero));
    }
    let mut len_bytes = len_bytes;
    if !image.write_buffer.is_empty() {
        let range = offset_bytes..offset_bytes + len_bytes;
        // What cannot be written back now is data all the same.
        drop(image.write_back_range(range.clone()).await);
        let cluster_bytes = image.geometry.cluster_size_bytes();
        if let Some(kept) = image.write_buffer.piece_from(offset_bytes, cluster_bytes) {
            if kept.start <= offset_bytes {
                let len_bytes = kept.end.min(range.end) - offset_bytes;
                return Ok(Extent::new(len_bytes, ExtentKind::Data));
            }
            len_bytes = len_bytes.min(kept.start - offset_bytes);
        }
    }
    if image.seal.is_some() {
        // The run that was compared is the one that is told.
        let run = image
            .first_run(GuestOffset(offset_bytes), len_bytes)
            .await?;
        image.verify_run(&run).await?;
        return image.status_of_run(run, max_depth).await;
    }
    image.status(offset_bytes, len_bytes, max_depth).await
}

//! New places for metadata: clusters that are given back unless the change that
//! needs them has come about.

use std::ops::Range;
use std::sync::Arc;

use vellum_format::types::{HostCluster, HostOffset};
use vellum_io::{Error, ErrorKind, Result};

use crate::qcow2::alloc::allocator::Allocation;
use crate::qcow2::image::Image;

impl Image {
    /// Allocates `count` clusters side by side.
    pub(crate) async fn allocate_side_by_side(&self, count: u64) -> Result<HostOffset> {
        let taken = self.allocate(count).await?;
        if taken.clusters == count {
            return Ok(taken.start);
        }
        self.give_back(taken).await;
        self.allocator.allocate_run(count).await
    }
}

/// Clusters that were allocated for a change. Until the change has come about
/// nothing leads to them.
#[derive(Debug, Default)]
pub(super) struct Places {
    /// By cluster.
    runs: Vec<Range<u64>>,
    /// All of them must lie below this one.
    below: Option<HostCluster>,
}

impl Places {
    /// Places that all lie below a cluster inside the file.
    pub(super) fn below(limit: HostCluster) -> Places {
        Places {
            below: Some(limit),
            ..Places::default()
        }
    }

    fn note(&mut self, image: &Image, start: HostOffset, count: u64) {
        let first = start.cluster(&image.geometry).index();
        match self.runs.last_mut() {
            Some(last) if last.end == first => last.end += count,
            _ => self.runs.push(first..first + count),
        }
    }

    async fn take(&mut self, image: &Image, want: u64) -> Result<Allocation> {
        let taken = match self.below {
            None => image.allocate(want).await?,
            Some(limit) => {
                image.begin_allocation().await?;
                let taken = image.allocator.allocate_below(limit, want).await?;
                taken.ok_or_else(no_room_below)?
            }
        };
        self.note(image, taken.start, taken.clusters);
        Ok(taken)
    }

    /// `count` clusters anywhere, added to `offsets`.
    pub(super) async fn many(
        &mut self,
        image: &Image,
        mut count: u64,
        offsets: &mut Vec<HostOffset>,
    ) -> Result<()> {
        while count > 0 {
            let taken = self.take(image, count).await?;
            let cluster_bytes = image.geometry.cluster_size_bytes();
            let starts = (0..taken.clusters).map(|index| index * cluster_bytes);
            offsets.extend(starts.map(|inside| HostOffset(taken.start.bytes() + inside)));
            count -= taken.clusters;
        }
        Ok(())
    }

    /// `count` clusters side by side; nowhere, if there are none.
    pub(super) async fn run(&mut self, image: &Image, count: u64) -> Result<HostOffset> {
        if count == 0 {
            return Ok(HostOffset::ZERO);
        }
        let start = match self.below {
            None => image.allocate_side_by_side(count).await?,
            Some(limit) => {
                image.begin_allocation().await?;
                let taken = image.allocator.allocate_run_below(limit, count).await?;
                taken.ok_or_else(no_room_below)?.start
            }
        };
        self.note(image, start, count);
        Ok(start)
    }

    /// Gives all of them back.
    pub(super) async fn give_back(self, image: &Arc<Image>) {
        for run in self.runs {
            let count = run.end - run.start;
            // If even that fails they are leaked.
            drop(image.allocator.release(HostCluster(run.start), count).await);
        }
    }
}

fn no_room_below() -> Error {
    let message = "there is no room for the metadata further down in the file";
    Error::new(ErrorKind::NoSpace, "compact", message)
}

//! One way through an image, step by step.

use std::sync::Arc;

use vellum_format::l2::Mapping;
use vellum_format::types::{GuestOffset, HostCluster};
use vellum_io::Result;

use super::shared::SharedPlace;
use crate::qcow2::image::Image;

/// What one step moves at most, if that is a whole cluster.
const STEP_BYTES: u64 = 1 << 20;
/// After so much was moved it is made durable, and what it has left can be used again.
const BYTES_PER_COMMIT: u64 = 64 << 20;

/// What comes next in a pass.
#[derive(Debug, Clone, Copy)]
enum Stage {
    /// What an L1 entry of this index leads to: whether it is counted.
    Counted(u64),
    /// Tables that the header leads to, and refcount blocks.
    Metadata,
    /// The clusters of the disk from this guest offset on, and their L2 tables.
    Clusters(u64),
    /// What snapshots use.
    Shared(SharedPlace),
    /// The end of the file.
    Cut,
}

/// A pass that is not over.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pass {
    /// Whatever lies from here on is moved.
    limit: HostCluster,
    stage: Stage,
    not_committed_bytes: u64,
    /// There was no room for something that lies above the limit.
    ran_out: bool,
}

impl Pass {
    /// A pass that moves everything from `limit` on.
    pub(super) fn new(limit: HostCluster) -> Pass {
        Pass {
            limit,
            stage: Stage::Metadata,
            not_committed_bytes: 0,
            ran_out: false,
        }
    }

    /// As [`Pass::new`], of an image of which nobody knows yet that everything in it is counted.
    pub(super) fn first(limit: HostCluster) -> Pass {
        Pass::new(limit).then(Stage::Counted(0))
    }

    /// How much of the disk was looked at.
    pub(super) fn looked_at_bytes(&self) -> u64 {
        match self.stage {
            Stage::Counted(_) | Stage::Metadata => 0,
            Stage::Clusters(at) => at,
            Stage::Shared(_) | Stage::Cut => u64::MAX / 2,
        }
    }

    /// The same with nothing left to do but to cut the file.
    pub(super) fn cut_now(self) -> Pass {
        self.then(Stage::Cut)
    }

    fn then(self, stage: Stage) -> Pass {
        Pass { stage, ..self }
    }
}

/// What a step came to.
pub(super) struct Moved {
    pub(super) bytes: u64,
    pub(super) next: Next,
}

/// What is left of a pass.
pub(super) enum Next {
    Step(Pass),
    /// Nothing; whether there was room for all that had to be moved.
    Over {
        had_room: bool,
    },
}

/// Clusters side by side in the disk that lie above the limit in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Above {
    guest: GuestOffset,
    clusters: u64,
    compressed: bool,
}

impl Image {
    /// Takes the next step of a pass.
    pub(super) async fn compact_step(self: &Arc<Self>, pass: Pass) -> Result<Moved> {
        match pass.stage {
            Stage::Counted(index) => {
                if index == 0 {
                    self.check_metadata_counted().await?;
                }
                let snapshots = self.snapshot_table();
                let longest = snapshots.entries.iter().map(|entry| entry.l1_entries).max();
                let stage = match index < self.l1.len().max(longest.unwrap_or(0).into()) {
                    true => {
                        self.check_table_counted(index).await?;
                        Stage::Counted(index + 1)
                    }
                    false => Stage::Metadata,
                };
                let next = Next::Step(pass.then(stage));
                Ok(Moved { bytes: 0, next })
            }
            Stage::Metadata => {
                // What is packed from now on is packed below the limit.
                self.seal_packed().await?;
                let bytes =
                    self.move_bitmaps(pass.limit).await? + self.move_metadata(pass.limit).await?;
                let next = Next::Step(pass.then(Stage::Clusters(0)));
                Ok(Moved { bytes, next })
            }
            Stage::Clusters(at) if at >= self.size_bytes() => Ok(Moved {
                bytes: 0,
                next: Next::Step(pass.then(Stage::Shared(SharedPlace::default()))),
            }),
            Stage::Shared(at) => {
                let moved = self.move_shared(at, pass.limit).await?;
                let stage = moved.next.map_or(Stage::Cut, Stage::Shared);
                let next = Next::Step(Pass {
                    ran_out: !moved.had_room,
                    ..pass.then(stage)
                });
                Ok(Moved {
                    bytes: moved.bytes,
                    next,
                })
            }
            Stage::Clusters(at) => self.compact_from(pass, at).await,
            Stage::Cut => {
                self.give_back_moved().await?;
                self.cut_tail().await?;
                let next = Next::Over {
                    had_room: !pass.ran_out,
                };
                Ok(Moved { bytes: 0, next })
            }
        }
    }

    /// Moves the first clusters from the guest offset `at` on that lie above the limit; if there
    /// are none in its L2 table, that.
    async fn compact_from(self: &Arc<Self>, pass: Pass, at: u64) -> Result<Moved> {
        let table_bytes = self.geometry.bytes_per_l2_table();
        let table_end = (at / table_bytes + 1).saturating_mul(table_bytes);
        let is_own = self.mapper().owned_table(GuestOffset(at))?.is_some();
        let found = match is_own {
            true => self.first_above(at, table_end, pass.limit).await?,
            false => None,
        };
        let (moved, next) = match found {
            Some(above) => {
                let end = above.guest.bytes() + above.clusters * self.geometry.cluster_size_bytes();
                let moved = match above.compressed {
                    true => self.move_packed(above.guest, end, pass.limit).await?,
                    false => self.move_data(above.guest, end, pass.limit).await?,
                };
                (moved, end)
            }
            None if is_own => (self.move_table(at, pass.limit).await?, table_end),
            None => (Some(0), table_end),
        };
        let Some(bytes) = moved else {
            // There is no room below any more.
            let pass = Pass {
                ran_out: true,
                ..pass.then(Stage::Cut)
            };
            let next = Next::Step(pass);
            return Ok(Moved { bytes: 0, next });
        };
        let mut pass = pass.then(Stage::Clusters(next));
        pass.not_committed_bytes += bytes;
        if pass.not_committed_bytes >= BYTES_PER_COMMIT {
            self.commit().await?;
            pass.not_committed_bytes = 0;
        }
        let next = Next::Step(pass);
        Ok(Moved { bytes, next })
    }

    /// The first clusters of a part of an L2 table, as many as one step moves, that lie above the limit.
    async fn first_above(&self, from: u64, end: u64, limit: HostCluster) -> Result<Option<Above>> {
        // The table is not used again meanwhile, whatever becomes of it.
        let _reading = self.read_epochs.enter();
        let cluster = self.geometry.cluster_size_bytes();
        let most = (STEP_BYTES / cluster).max(1);
        let mut found: Option<Above> = None;
        let mut at = from;
        while at < end.min(self.size_bytes()) {
            let guest = GuestOffset(at);
            let compressed = self.is_above(&self.mapping(guest).await?, limit);
            match (&mut found, compressed) {
                (None, Some(compressed)) => {
                    found = Some(Above {
                        guest,
                        clusters: 1,
                        compressed,
                    });
                }
                (Some(run), Some(same)) if same == run.compressed && run.clusters < most => {
                    run.clusters += 1;
                }
                (Some(_), _) => break,
                (None, None) => {}
            }
            at += cluster;
        }
        Ok(found)
    }

    /// Whether a cluster lies above the limit and can be moved; if so, whether it is compressed.
    pub(super) fn is_above(&self, mapping: &Mapping, limit: HostCluster) -> Option<bool> {
        let limit_bytes = limit.index() * self.geometry.cluster_size_bytes();
        match mapping {
            Mapping::Compressed(data) => {
                // Nobody knows which of the data beside it a snapshot uses.
                let is_shared = !self.snapshot_table().entries.is_empty();
                (!is_shared && data.end().bytes() > limit_bytes).then_some(true)
            }
            _ => {
                let host = mapping.host().filter(|_| mapping.copied())?;
                (host.bytes() >= limit_bytes).then_some(false)
            }
        }
    }

    /// Makes durable what was moved, and lets go what it has left.
    async fn give_back_moved(self: &Arc<Self>) -> Result<()> {
        self.seal_packed().await?;
        self.settle().await
    }

    /// Makes the mapping durable, and gives back what it has dropped.
    pub(super) async fn settle(self: &Arc<Self>) -> Result<()> {
        self.commit().await?;
        // Rule 5: what reads still look at is not cut off.
        self.read_epochs.wait_for_all().await;
        self.commit().await
    }
}

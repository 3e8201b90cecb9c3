//! Which parts of the sources a copy is about.

use std::sync::Arc;

use vellum::{BlockDevice, Extent, Result};

use crate::piece::{CHUNK_BYTES, Content};

/// Pieces that are compared take two buffers: half of the usual length keeps all of them
/// among the memory that a thread uses again.
const COMPARED_BYTES: u64 = CHUNK_BYTES / 2;

/// Which parts of the sources are copied.
#[derive(Debug, Clone, Default)]
pub enum Scope {
    /// All of them.
    #[default]
    Everything,
    /// What the first so many layers of the source decide: itself, its backing file and
    /// so on. The target is the layer below, so it shows all the rest (a commit).
    Layers(u32),
    /// Where the target holds nothing itself, and is going to show something else than
    /// the source (a rebase).
    Differences(Differences),
}

/// What a target is going to show where it holds nothing itself.
#[derive(Debug, Clone)]
pub struct Differences {
    /// The device that will show through; as long as the source.
    pub shown: Arc<dyn BlockDevice>,
    /// The grain of the comparison, in bytes: the target's clusters (or subclusters).
    pub unit_bytes: u64,
    /// From here on the source has nothing and reads as zeroes: these are written as
    /// zeroes, those before as data (QEMU's way; it shows in maps).
    pub source_end_bytes: u64,
    /// Write what differs compressed; the unit must be the target's cluster then. What
    /// lies in a unit of which the target holds a part is written as usual.
    pub compress: bool,
}

impl Scope {
    /// What `source` holds at `at` for a copy to `target`, and for how many bytes (at
    /// most `limit_bytes`); `None` if everything counts.
    pub(crate) async fn look_below(
        &self,
        source: &Arc<dyn BlockDevice>,
        target: &Arc<dyn BlockDevice>,
        at: u64,
        limit_bytes: u64,
    ) -> Result<Option<(Content, u64)>> {
        match self {
            Scope::Everything => Ok(None),
            Scope::Layers(layers) => look_above(source, at, limit_bytes, *layers).await.map(Some),
            Scope::Differences(differences) => {
                let look = differences.look(source, target, at, limit_bytes);
                look.await.map(Some)
            }
        }
    }

    /// Whether only some layers of the source count, and the target is the one below.
    pub(crate) fn is_of_layers(&self) -> bool {
        matches!(self, Scope::Layers(_))
    }

    /// Whether long runs of zeroes have to be looked at in pieces too.
    pub(crate) fn compares(&self) -> bool {
        matches!(self, Scope::Differences(_))
    }

    /// Pieces of data are this long at most.
    pub(crate) fn chunk_bytes(&self, usual_bytes: u64) -> u64 {
        match self {
            Scope::Differences(differences) => {
                usual_bytes.min(COMPARED_BYTES).max(differences.unit_bytes)
            }
            _ => usual_bytes,
        }
    }
}

/// What the first `layers` layers hold at `at`, and for how many bytes.
pub(crate) async fn look_above(
    source: &Arc<dyn BlockDevice>,
    at: u64,
    limit_bytes: u64,
    layers: u32,
) -> Result<(Content, u64)> {
    let layers = layers.max(1);
    let extent = source.block_status(at, limit_bytes, layers - 1).await?;
    let len_bytes = extent.len_bytes.clamp(1, limit_bytes);
    Ok((decided_above(&extent, layers), len_bytes))
}

/// What the first `layers` layers say of an extent that they were asked for.
fn decided_above(extent: &Extent, layers: u32) -> Content {
    if extent.kind.is_present() {
        return match extent.kind.is_zero() {
            true => Content::Zero,
            false => Content::Data,
        };
    }
    // The layer below `depth` ends before: what is beyond its end hides what is below
    // it, unless it is the target itself, which shows zeroes there of its own.
    match extent.kind.is_zero() && extent.depth + 1 < layers {
        true => Content::Zero,
        false => Content::Backing,
    }
}

impl Differences {
    /// Cuts a range so that it is whole units, or lies inside one: the target holds
    /// some subclusters of a unit, or ends in it.
    fn in_units(&self, at: u64, len_bytes: u64) -> u64 {
        let unit_bytes = self.unit_bytes;
        let inside_bytes = at % unit_bytes;
        if inside_bytes != 0 {
            return len_bytes.min(unit_bytes - inside_bytes);
        }
        match len_bytes / unit_bytes * unit_bytes {
            0 => len_bytes,
            whole_bytes => whole_bytes,
        }
    }

    /// Whether a range of a target of this size may be written compressed.
    pub(crate) fn may_compress(&self, at: u64, len_bytes: u64, size_bytes: u64) -> bool {
        let ends_well = len_bytes.is_multiple_of(self.unit_bytes) || at + len_bytes == size_bytes;
        self.compress && at.is_multiple_of(self.unit_bytes) && ends_well
    }

    async fn look(
        &self,
        source: &Arc<dyn BlockDevice>,
        target: &Arc<dyn BlockDevice>,
        at: u64,
        limit_bytes: u64,
    ) -> Result<(Content, u64)> {
        let held = target.block_status(at, limit_bytes, 0).await?;
        let limit_bytes = held.len_bytes.clamp(1, limit_bytes);
        if held.kind.is_present() {
            return Ok((Content::Backing, limit_bytes));
        }
        let limit_bytes = self.in_units(at, limit_bytes);
        let old = source.block_status(at, limit_bytes, u32::MAX).await?;
        let len_bytes = old.len_bytes.clamp(1, limit_bytes);
        let new = self.shown.block_status(at, len_bytes, u32::MAX).await?;
        let len_bytes = new.len_bytes.clamp(1, len_bytes);
        let end = self.source_end_bytes.next_multiple_of(self.unit_bytes);
        let different = match at >= end {
            true => Content::Zero,
            false => Content::Data,
        };
        // Clusters are compared as wholes: a piece that begins one goes on to its end.
        let whole_bytes = (at + len_bytes) / self.unit_bytes * self.unit_bytes;
        if len_bytes < limit_bytes && whole_bytes <= at {
            let unit_end = (at / self.unit_bytes + 1) * self.unit_bytes;
            return Ok((different, limit_bytes.min(unit_end - at)));
        }
        let len_bytes = match len_bytes < limit_bytes {
            true => whole_bytes - at,
            false => len_bytes,
        };
        if (old.kind.is_zero() && new.kind.is_zero()) || is_same_place(&old, &new) {
            return Ok((Content::Backing, len_bytes));
        }
        let to_end = if at < end { end - at } else { u64::MAX };
        Ok((different, len_bytes.min(to_end)))
    }
}

/// Whether two extents are the same bytes of the same storage: both devices stand on it.
fn is_same_place(one: &Extent, two: &Extent) -> bool {
    let place = |extent: &Extent| {
        let host = extent.host.as_ref().filter(|_| extent.kind.is_data())?;
        Some((host.identity, host.offset_bytes))
    };
    place(one).is_some() && place(one) == place(two)
}

#[cfg(test)]
mod tests {
    use vellum::ExtentKind;

    use super::*;

    #[test]
    fn what_lies_beyond_a_short_layer_is_decided_there() {
        let extent = |kind, depth| Extent {
            depth,
            ..Extent::new(1, kind)
        };
        for (extent, layers, content) in [
            (extent(ExtentKind::Data, 0), 1, Content::Data),
            (extent(ExtentKind::Zero, 1), 2, Content::Zero),
            (extent(ExtentKind::Absent, 0), 1, Content::Backing),
            // The target itself is short.
            (extent(ExtentKind::AbsentZero, 0), 1, Content::Backing),
            (extent(ExtentKind::AbsentZero, 1), 2, Content::Backing),
            // A layer above the target is.
            (extent(ExtentKind::AbsentZero, 0), 2, Content::Zero),
        ] {
            assert_eq!(decided_above(&extent, layers), content, "{extent:?}");
        }
    }
}

//! Chains of clusters: the table tells for each the next one.

use super::boot::{Boot, Width};
use crate::error::{Error, Result};
use crate::source::Source;

/// A place in a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Position {
    /// So many are before it.
    pub(super) index: u32,
    pub(super) cluster: u32,
}

/// Finds the cluster `index` of a chain, from a place in it that is known, if that helps.
/// `None`: the chain ends before.
pub(super) fn find(
    source: &Source,
    boot: &Boot,
    first: u32,
    index: u32,
    known: Option<Position>,
) -> Result<Option<Position>> {
    let start = Position {
        index: 0,
        cluster: first,
    };
    let mut position = known.filter(|known| known.index <= index).unwrap_or(start);
    // So long a chain goes in a circle.
    if index >= boot.clusters {
        return Ok(None);
    }
    if !is_data(boot, position.cluster) {
        return match first == 0 || is_end(boot, first) {
            true => Ok(None),
            false => Err(Error::damaged("the number of a cluster", first.into())),
        };
    }
    while position.index < index {
        let next = next(source, boot, position.cluster)?;
        if is_end(boot, next) {
            return Ok(None);
        }
        if !is_data(boot, next) {
            let at = position.cluster.into();
            return Err(Error::damaged("what follows cluster", at));
        }
        position = Position {
            index: position.index + 1,
            cluster: next,
        };
    }
    Ok(Some(position))
}

fn is_data(boot: &Boot, cluster: u32) -> bool {
    cluster >= 2 && cluster - 2 < boot.clusters
}

fn is_end(boot: &Boot, cluster: u32) -> bool {
    match boot.width {
        Width::Bits12 => cluster >= 0xff8,
        Width::Bits16 => cluster >= 0xfff8,
        Width::Bits32 => cluster >= 0x0fff_fff8,
    }
}

/// What the table has for a cluster.
fn next(source: &Source, boot: &Boot, cluster: u32) -> Result<u32> {
    let number = u64::from(cluster);
    let mut bytes = [0; 4];
    let (at, len) = match boot.width {
        Width::Bits12 => (number + number / 2, 2),
        Width::Bits16 => (number * 2, 2),
        Width::Bits32 => (number * 4, 4),
    };
    source.read(boot.table_bytes + at, &mut bytes[..len])?;
    let entry = u32::from_le_bytes(bytes);
    Ok(match boot.width {
        Width::Bits12 if cluster.is_multiple_of(2) => entry & 0xfff,
        Width::Bits12 => entry >> 4,
        Width::Bits16 => entry,
        Width::Bits32 => entry & 0x0fff_ffff,
    })
}

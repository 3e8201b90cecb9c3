//! Makes room in a cache's folder: the groups of blocks that were used longest ago go, whichever
//! version of whichever file they are of.
//!
//! Invariants:
//! - One process at a time does this.
//! - A group is thrown out under a claim on all of its entries; one that somebody fills stays. Its
//!   generation is odd from before the first entry goes until the last byte is gone, so nobody takes
//!   bytes of it that were read meanwhile. Whoever dies in between leaves it odd, and whoever fills
//!   it next does the rest ([`finish`]).

use vellum_io::{Buffer, Buffers, Result};
use vellum_storage::lock::ranges;
use vellum_storage::{WriteFlags, ZeroFlags};

use super::directory::Directory;
use super::layout::{BLOCK_BYTES, entries_of};
use super::place::Place;
use super::table::SharedTable;

/// A version with what is needed to throw out parts of it.
struct Version {
    stem: String,
    place: Place,
    table: SharedTable,
}

/// Throws groups out until what is there takes `goal_bytes` at most, or nothing is left to go. If
/// somebody else does so already, nothing is done; whether it was this one's turn.
pub(super) async fn make_room(directory: &Directory, goal_bytes: u64) -> Result<bool> {
    let lock = directory.lock()?;
    if !ranges::try_claim(&lock, &(0..1))? {
        return Ok(false);
    }
    let mut left_bytes = directory.used_bytes()?;
    if left_bytes <= goal_bytes {
        return Ok(true);
    }
    let versions = versions(directory)?;
    left_bytes = directory.used_bytes()?;
    let mut groups = Vec::new();
    for (at, version) in versions.iter().enumerate() {
        let used = |group| version.table.used_milliseconds(group);
        let all = (0..version.place.identity.groups()).map(|group| (used(group), at, group));
        groups.extend(all.filter(|&(used, ..)| used != 0));
    }
    groups.sort_unstable();
    for (_, at, group) in groups {
        if left_bytes <= goal_bytes {
            break;
        }
        left_bytes = left_bytes.saturating_sub(throw_out(&versions[at], group).await?);
    }
    for Version { stem, place, table } in &versions {
        let mut groups = 0..place.identity.groups();
        if groups.all(|group| table.used_milliseconds(group) == 0) {
            directory.remove_unused(stem, place.claims())?;
        }
    }
    Ok(true)
}

fn versions(directory: &Directory) -> Result<Vec<Version>> {
    let mut versions = Vec::new();
    for stem in directory.stems()? {
        let Some((identity, files)) = directory.look_into(&stem) else {
            // It is nobody's, and is made anew by whoever wants it: until then it would take room for ever.
            directory.remove_damaged(&stem)?;
            continue;
        };
        let table = SharedTable::map(&files.index, &identity.table())?;
        let place = Place::of_files(identity, files)?;
        versions.push(Version { stem, place, table });
    }
    Ok(versions)
}

/// Throws a group out, unless somebody is filling it; says how many bytes it has had at most.
async fn throw_out(version: &Version, group: u64) -> Result<u64> {
    let Version { place, table, .. } = version;
    let blocks = place.identity.group_blocks(group);
    let entries = entries_of(&blocks);
    if !place.try_claim(&entries)? {
        return Ok(0);
    }
    table.set_generation(group, table.generation(group) | 1);
    let done = finish(place, table, group).await;
    place.release(&entries);
    done.map(|()| (blocks.end - blocks.start) * BLOCK_BYTES)
}

/// Does what is left of throwing out a group whose generation is odd. Under a claim on all of its
/// entries.
pub(super) async fn finish(place: &Place, table: &SharedTable, group: u64) -> Result<()> {
    let blocks = place.identity.group_blocks(group);
    let entries = entries_of(&blocks);
    let absent = Buffer::zeroed((entries.end - entries.start) as usize);
    let absent = Buffers::from_iter([absent]);
    let flags = WriteFlags::default();
    place.index.write(entries.start, absent, flags).await?;
    let start = blocks.start * BLOCK_BYTES;
    let len_bytes = (blocks.end * BLOCK_BYTES).min(place.identity.len_bytes) - start;
    let unmap = ZeroFlags {
        may_unmap: true,
        ..ZeroFlags::default()
    };
    place.data.write_zeroes(start, len_bytes, unmap).await?;
    table.set_used(group, 0);
    table.set_generation(group, (table.generation(group) | 1) + 1);
    Ok(())
}

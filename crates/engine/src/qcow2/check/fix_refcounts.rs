//! Puts single refcounts right, in the blocks where they are.
//!
//! Order: counts go up; barrier, also for what was read; counts go down; barrier. A crash leaves leaked
//! clusters at worst. Space that the lowered counts give up goes back to the storage
//! only where nothing else was wrong: what leads to a cluster may have been lost.

use std::ops::Range;

use vellum_format::refcount;
use vellum_io::finish_all;

use super::counts::CHUNK_CLUSTERS;
use super::outcome::Outcome;
use super::report::Fix;
use super::source::Image;
use crate::Result;
use crate::qcow2::header::load;

/// Blocks in work at the same time.
const BLOCKS_AT_ONCE: usize = 16;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Pass {
    Raise,
    Lower,
}

/// Makes refcounts what the references say, as far as `fix` allows.
pub(super) async fn fix_refcounts(image: &Image, outcome: &mut Outcome, fix: Fix) -> Result<()> {
    if fix == Fix::All && write_pass(image, outcome, Pass::Raise).await? {
        image.flush().await?;
    }
    if write_pass(image, outcome, Pass::Lower).await? {
        image.flush().await?;
    }
    for chunk in chunks(outcome) {
        for cluster in differing(outcome, chunk) {
            let (count, reference) = outcome.pair(cluster);
            if fix == Fix::All || count > reference {
                outcome.stored.set(cluster, reference);
            }
        }
    }
    Ok(())
}

/// Counts no cluster behind the end of the file that nothing leads to. A crash may have left such counts, which no check
/// looks at; when the file grows over them, these clusters leak.
pub(super) async fn clear_beyond(image: &Image, outcome: &Outcome) -> Result<()> {
    let per_block = image.geometry.refcount_block_entries();
    let end_of_file = outcome.tally.clusters;
    let reaches_beyond = |number: u64| (number + 1) * per_block > end_of_file;
    let (numbers, offsets) = outcome.stored.blocks(image, reaches_beyond);
    image.spend(offsets.len() as u64 * image.geometry.cluster_size_bytes())?;
    let clears = numbers.into_iter().zip(offsets).map(|(number, offset)| {
        let clusters = (number * per_block).max(end_of_file)..(number + 1) * per_block;
        clear_unused(image, outcome, offset, clusters)
    });
    let cleared = finish_all(BLOCKS_AT_ONCE, clears).await?;
    match cleared.contains(&true) {
        true => image.flush().await,
        false => Ok(()),
    }
}

/// Sets the counts of those clusters of one block to 0 that nothing leads to; whether there were any.
async fn clear_unused(
    image: &Image,
    outcome: &Outcome,
    offset: u64,
    clusters: Range<u64>,
) -> Result<bool> {
    let geometry = &image.geometry;
    let order = geometry.refcount_order;
    let size = geometry.cluster_size_bytes();
    let mut block = load::read_bytes(&image.storage, offset, size).await?;
    image.note_read(size);
    let mut has_changed = false;
    for cluster in clusters {
        let index = geometry.refcount_block_index(cluster);
        if refcount::get(&block, order, index) != 0 && outcome.tally.is_free(cluster) {
            has_changed |= refcount::set(&mut block, order, index, 0);
        }
    }
    if has_changed {
        image.write(offset, block).await?;
    }
    Ok(has_changed)
}

/// Gives the space of clusters back that are counted and not used.
pub(super) async fn punch_leaks(image: &Image, leaks: &[Range<u64>]) {
    for run in leaks {
        let (start, end) = (image.offset_of(run.start), image.offset_of(run.end));
        // A hint: that it failed does not matter to anybody.
        drop(image.storage.discard(start, end - start).await);
    }
}

/// The clusters that have a count and no reference, at most as many runs as are worth
/// remembering.
pub(super) fn leaked_runs(outcome: &Outcome) -> Vec<Range<u64>> {
    const MOST_RUNS: usize = 1 << 16;
    let mut runs: Vec<Range<u64>> = Vec::new();
    for cluster in chunks(outcome).flat_map(|chunk| differing(outcome, chunk)) {
        if outcome.tally.references.get(cluster) > 0 {
            continue;
        }
        match runs.last_mut() {
            Some(last) if last.end == cluster => last.end += 1,
            _ => runs.push(cluster..cluster + 1),
        }
        if runs.len() >= MOST_RUNS {
            break;
        }
    }
    runs
}

/// All clusters, in pieces that are compared at once.
fn chunks(outcome: &Outcome) -> impl Iterator<Item = Range<u64>> + use<> {
    let clusters = outcome.tally.clusters;
    let firsts = (0..clusters).step_by(CHUNK_CLUSTERS as usize);
    firsts.map(move |first| first..clusters.min(first + CHUNK_CLUSTERS))
}

/// Clusters whose readable refcount is not the number of references.
fn differing(outcome: &Outcome, range: Range<u64>) -> Vec<u64> {
    let mut found = Vec::new();
    let mut first = range.start;
    while first < range.end {
        let end = (first / CHUNK_CLUSTERS + 1) * CHUNK_CLUSTERS;
        let end = end.min(range.end);
        if !outcome.chunk_is_same(first) {
            found.extend((first..end).filter(|&cluster| {
                let (count, reference) = outcome.pair(cluster);
                count != reference
            }));
        }
        first = end;
    }
    found
}

/// Writes the blocks that this pass changes; says whether there were any.
async fn write_pass(image: &Image, outcome: &Outcome, pass: Pass) -> Result<bool> {
    let per_block = image.geometry.refcount_block_entries();
    let wanted = |&cluster: &u64| {
        let (count, reference) = outcome.pair(cluster);
        match pass {
            Pass::Raise => count < reference,
            Pass::Lower => count > reference,
        }
    };
    let changed = outcome.stored.entries().filter_map(|(number, entry)| {
        let start = (number * per_block).min(outcome.tally.clusters);
        let end = ((number + 1) * per_block).min(outcome.tally.clusters);
        let mut clusters = differing(outcome, start..end);
        clusters.retain(wanted);
        (!clusters.is_empty()).then(|| (entry.raw_offset(), clusters))
    });
    let writes = changed.map(|(offset, clusters)| async move {
        write_counts(image, outcome, offset, &clusters).await
    });
    let written = finish_all(BLOCKS_AT_ONCE, writes).await?;
    Ok(!written.is_empty())
}

/// Sets the counts of some clusters of one block to their references.
async fn write_counts(
    image: &Image,
    outcome: &Outcome,
    offset: u64,
    clusters: &[u64],
) -> Result<()> {
    let geometry = &image.geometry;
    let size = geometry.cluster_size_bytes();
    let mut block = load::read_bytes(&image.storage, offset, size).await?;
    for &cluster in clusters {
        let index = geometry.refcount_block_index(cluster);
        let reference = outcome.tally.references.get(cluster);
        // References are kept within the width of a count.
        let fits = refcount::set(&mut block, geometry.refcount_order, index, reference);
        debug_assert!(fits, "a count of {reference}");
    }
    image.write(offset, block).await
}

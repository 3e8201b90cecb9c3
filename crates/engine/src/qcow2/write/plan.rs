//! What a write does to the clusters that it touches: pure functions from the
//! old mapping and the request to the new mapping.
//!
//! A write is done step by step. The clusters of one step lie side by side on
//! disk, all in places that they have already, or all in new ones. The step
//! writes `fill_start..fill_end`: the guest's bytes and, around them, what has to
//! be copied from the old content (COW).

use vellum_format::geometry::Geometry;
use vellum_format::l2::Mapping;
use vellum_format::types::{GuestOffset, HostOffset};

/// Where the clusters of a step are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Target {
    /// Into the places that they have, from this one on.
    Own(HostOffset),
    /// Into newly allocated clusters.
    New,
}

/// The first clusters of a request that can be written together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) target: Target,
    pub(crate) clusters: usize,
}

/// The cluster's place, if it may be overwritten there.
fn own_place(mapping: &Mapping) -> Option<HostOffset> {
    mapping.host().filter(|_| mapping.copied())
}

/// Finds the first step for clusters with these mappings; `mappings` is not empty.
pub(crate) fn first_step(geometry: &Geometry, mappings: &[Mapping]) -> Step {
    let cluster = geometry.cluster_size_bytes();
    match mappings.first().and_then(own_place) {
        Some(start) => {
            let follows = |(index, mapping): &(usize, &Mapping)| {
                let expected = start.bytes() + *index as u64 * cluster;
                own_place(mapping).is_some_and(|host| host.bytes() == expected)
            };
            let clusters = mappings.iter().enumerate().take_while(follows).count();
            Step {
                target: Target::Own(start),
                clusters,
            }
        }
        None => {
            let clusters = mappings
                .iter()
                .take_while(|m| own_place(m).is_none())
                .count();
            Step {
                target: Target::New,
                clusters,
            }
        }
    }
}

/// Where the write has to begin so that the first cluster is whole, in guest
/// bytes, when the request begins at `start`.
pub(crate) fn fill_start(geometry: &Geometry, step: &Step, first: &Mapping, start: u64) -> u64 {
    let cluster_start = geometry.cluster_start(start);
    let touched = geometry.subcluster_index(GuestOffset(start));
    let at = |index: u32| cluster_start + u64::from(index) * geometry.subcluster_size_bytes();
    match (step.target, first) {
        (Target::Own(_), Mapping::Data { .. }) => start,
        (Target::Own(_), Mapping::Subclusters { allocated, .. }) => {
            if allocated >> touched & 1 != 0 {
                start
            } else {
                at(touched)
            }
        }
        (Target::New, Mapping::Subclusters { allocated, .. }) => {
            at(touched.min(allocated.trailing_zeros()))
        }
        (Target::New, Mapping::Unallocated) if geometry.extended_l2 => at(touched),
        _ => cluster_start,
    }
}

/// Where the write has to end so that the last cluster is whole, in guest bytes,
/// when the request ends before `end`.
pub(crate) fn fill_end(geometry: &Geometry, step: &Step, last: &Mapping, end: u64) -> u64 {
    let cluster_start = geometry.cluster_start(end - 1);
    let touched = geometry.subcluster_index(GuestOffset(end - 1));
    let behind =
        |index: u32| cluster_start + u64::from(index + 1) * geometry.subcluster_size_bytes();
    let cluster_end = cluster_start + geometry.cluster_size_bytes();
    match (step.target, last) {
        (Target::Own(_), Mapping::Data { .. }) => end,
        (Target::Own(_), Mapping::Subclusters { allocated, .. }) => {
            if allocated >> touched & 1 != 0 {
                end
            } else {
                behind(touched)
            }
        }
        (Target::New, Mapping::Subclusters { allocated, .. }) => match allocated.checked_ilog2() {
            Some(highest) => behind(touched.max(highest)),
            None => behind(touched),
        },
        (Target::New, Mapping::Unallocated) if geometry.extended_l2 => behind(touched),
        _ => cluster_end,
    }
}

/// The bits of the subclusters of the cluster at `cluster_start` that the guest
/// range `start..end` touches.
pub(crate) fn touched_bits(geometry: &Geometry, cluster_start: u64, start: u64, end: u64) -> u32 {
    let size = geometry.subcluster_size_bytes();
    let count = u64::from(geometry.subclusters_per_cluster());
    let first = start.saturating_sub(cluster_start) / size;
    let stop = end.saturating_sub(cluster_start).div_ceil(size).min(count);
    if first >= stop {
        return 0;
    }
    let width = stop - first;
    ((u64::from(u32::MAX) >> (32 - width)) << first) as u32
}

/// The mapping of a cluster after `written` (subcluster bits) was written to it
/// at `host`.
pub(crate) fn written(geometry: &Geometry, old: &Mapping, host: HostOffset, bits: u32) -> Mapping {
    if !geometry.extended_l2 {
        return Mapping::Data { host, copied: true };
    }
    let (allocated, zero) = match *old {
        Mapping::Subclusters {
            allocated, zero, ..
        } => (allocated, zero),
        _ => (0, 0),
    };
    Mapping::Subclusters {
        host: Some(host),
        copied: true,
        allocated: allocated | bits,
        zero: zero & !bits,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry(extended_l2: bool) -> Geometry {
        Geometry {
            cluster_bits: 16,
            extended_l2,
            refcount_order: 4,
            version: 3,
            external_data: false,
        }
    }

    const HOST: HostOffset = HostOffset(0x50000);
    const NEXT: HostOffset = HostOffset(0x60000);

    fn data(host: HostOffset, copied: bool) -> Mapping {
        Mapping::Data { host, copied }
    }

    fn subclusters(copied: bool, allocated: u32, zero: u32) -> Mapping {
        Mapping::Subclusters {
            host: Some(HOST),
            copied,
            allocated,
            zero,
        }
    }

    #[test]
    fn steps_end_where_the_place_changes() {
        let zero = Mapping::Zero {
            host: Some(NEXT),
            copied: true,
        };
        let step = first_step(
            &geometry(false),
            &[data(HOST, true), zero, data(HOST, true)],
        );
        assert_eq!(
            step,
            Step {
                target: Target::Own(HOST),
                clusters: 2
            }
        );
        let shared = [Mapping::Unallocated, data(HOST, false), data(HOST, true)];
        let step = first_step(&geometry(false), &shared);
        assert_eq!(
            step,
            Step {
                target: Target::New,
                clusters: 2
            }
        );
    }

    fn filled(extended: bool, mapping: Mapping, start: u64, end: u64) -> (u64, u64) {
        let geometry = geometry(extended);
        let step = first_step(&geometry, &[mapping]);
        (
            fill_start(&geometry, &step, &mapping, start),
            fill_end(&geometry, &step, &mapping, end),
        )
    }

    #[test]
    fn standard_clusters_are_filled_whole_unless_they_hold_data() {
        let zero = Mapping::Zero {
            host: Some(HOST),
            copied: true,
        };
        assert_eq!(filled(false, data(HOST, true), 100, 200), (100, 200));
        assert_eq!(filled(false, data(HOST, false), 100, 200), (0, 0x10000));
        assert_eq!(filled(false, zero, 100, 0x10000), (0, 0x10000));
        assert_eq!(
            filled(false, Mapping::Unallocated, 0x10000, 0x20000),
            (0x10000, 0x20000)
        );
    }

    #[test]
    fn extended_clusters_are_filled_by_subcluster() {
        assert_eq!(filled(true, Mapping::Unallocated, 2100, 6000), (2048, 6144));
        assert_eq!(
            filled(true, subclusters(true, 0b010, 0), 2100, 2200),
            (2100, 2200)
        );
        assert_eq!(
            filled(true, subclusters(true, 0b010, 0), 2100, 4200),
            (2100, 6144)
        );
        // A shared cluster takes its other subclusters along.
        assert_eq!(
            filled(true, subclusters(false, 0b1_0001, 0), 2100, 2200),
            (0, 5 * 2048)
        );
        assert_eq!(
            filled(true, subclusters(false, 0, 1), 2100, 2200),
            (2048, 4096)
        );
    }

    #[test]
    fn written_subclusters_are_marked_and_others_kept() {
        let geometry = geometry(true);
        assert_eq!(touched_bits(&geometry, 0x10000, 0x10800, 0x11001), 0b110);
        assert_eq!(touched_bits(&geometry, 0x10000, 0, 0x20000), u32::MAX);
        assert_eq!(touched_bits(&geometry, 0x10000, 0x20000, 0x30000), 0);
        let new = written(&geometry, &subclusters(true, 0b1, 0b110), HOST, 0b010);
        assert_eq!(new, subclusters(true, 0b11, 0b100));
        let plain = written(
            &super::tests::geometry(false),
            &Mapping::Unallocated,
            HOST,
            1,
        );
        assert_eq!(plain, data(HOST, true));
    }
}

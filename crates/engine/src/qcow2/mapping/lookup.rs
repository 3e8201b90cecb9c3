//! Guest range -> list of mapped runs (a *view*). No I/O: a lookup either hits
//! in memory, or names the L2 slice that has to be loaded first.

use smallvec::SmallVec;
use vellum_format::FormatError;
use vellum_format::compressed::CompressedDescriptor;
use vellum_format::geometry::Geometry;
use vellum_format::l2::{L2Entry, Mapping};
use vellum_format::types::{GuestOffset, HostOffset};
use vellum_io::{Error, Result};

use super::l1::L1Table;
use super::packed::{L2Codec, SliceView};
use crate::qcow2::integrity::errors::{bad_entry, bad_format, corrupt, hex};
use crate::qcow2::table_cache::cache::TableCache;

/// What a run of guest bytes is mapped to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RunKind {
    /// Nothing here: the backing file shows through.
    Unallocated {
        /// Where the bytes will lie once written, if the cluster has a place.
        host: Option<HostOffset>,
    },
    /// Zeroes.
    Zero {
        /// The preallocated place of the bytes, if there is one.
        host: Option<HostOffset>,
    },
    /// Bytes at `host`.
    Data {
        /// Where the run's first byte lies.
        host: HostOffset,
        /// The cluster belongs to this image state alone: it may be overwritten.
        copied: bool,
    },
    /// Part of one compressed cluster.
    Compressed(CompressedDescriptor),
}

/// A run of guest bytes of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MappingRun {
    /// Guest offset of the first byte.
    pub(crate) guest: GuestOffset,
    /// Length in bytes.
    pub(crate) len_bytes: u64,
    /// What the bytes are mapped to.
    pub(crate) kind: RunKind,
}

impl MappingRun {
    /// Extends this run by `next` if the two are one.
    fn try_append(&mut self, next: &MappingRun) -> bool {
        let follows = |a: HostOffset, b: HostOffset| a.bytes() + self.len_bytes == b.bytes();
        let joins = match (self.kind, next.kind) {
            (RunKind::Unallocated { host: a }, RunKind::Unallocated { host: b })
            | (RunKind::Zero { host: a }, RunKind::Zero { host: b }) => match (a, b) {
                (None, None) => true,
                (Some(a), Some(b)) => follows(a, b),
                _ => false,
            },
            (RunKind::Data { host: a, copied: x }, RunKind::Data { host: b, copied: y }) => {
                x == y && follows(a, b)
            }
            _ => false,
        };
        if joins {
            self.len_bytes += next.len_bytes;
        }
        joins
    }
}

/// The runs of a guest range, in order and without gaps.
pub(crate) type View = SmallVec<[MappingRun; 2]>;

/// A part of an L2 table: what the cache holds and a miss loads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Slice {
    /// Host offset of the slice in bytes: its key in the cache.
    pub(crate) key: u64,
}

/// The outcome of a lookup.
#[derive(Debug)]
pub(crate) enum Lookup<T> {
    /// Found in memory.
    Hit(T),
    /// This slice has to be loaded first.
    Miss(Slice),
}

/// Where the L2 entry of a cluster lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct EntryPlace {
    /// The slice that holds it.
    pub(crate) slice: Slice,
    /// Its index in the slice.
    pub(crate) index: usize,
}

/// L2 slices in memory.
pub(crate) type L2Cache = TableCache<L2Codec>;

/// The tables that a lookup goes through.
pub(crate) struct Mapper<'a> {
    pub(crate) geometry: &'a Geometry,
    pub(crate) l1: &'a L1Table,
    pub(crate) l2: &'a L2Cache,
    /// Somebody is going to write there: errors have QEMU's words for that.
    pub(crate) to_write: bool,
}

impl Mapper<'_> {
    fn entries_per_slice(&self) -> u64 {
        self.l2.table_bytes() as u64 / self.geometry.l2_entry_size_bytes()
    }

    /// The L2 table for `guest`, if it exists and is this image state's own: no snapshot
    /// shares it.
    pub(crate) fn owned_table(&self, guest: GuestOffset) -> Result<Option<HostOffset>> {
        let index = self.geometry.l1_index(guest);
        let entry = self.l1.get(index);
        let table = entry
            .decode(self.geometry)
            .map_err(|e| bad_entry("write", &e, "L1 index", index))?;
        Ok(table.filter(|_| entry.copied()))
    }

    /// Where the L2 entry of the cluster at `guest` lies; `None` if its L2 table
    /// does not exist.
    pub(crate) fn place(&self, guest: GuestOffset) -> Result<Option<EntryPlace>> {
        let entry = self.l1.get(self.geometry.l1_index(guest));
        let table = entry
            .decode(self.geometry)
            .map_err(|e| bad_entry("map", &e, "L1 index", self.geometry.l1_index(guest)))?;
        Ok(table.map(|table| self.place_in(table, guest)))
    }

    /// Where the L2 entry of the cluster at `guest` lies in the L2 table `table`.
    pub(crate) fn place_in(&self, table: HostOffset, guest: GuestOffset) -> EntryPlace {
        let index = self.geometry.l2_index(guest) as u64;
        let per_slice = self.entries_per_slice();
        let key = table.bytes() + (index / per_slice) * self.l2.table_bytes() as u64;
        EntryPlace {
            slice: Slice { key },
            index: (index % per_slice) as usize,
        }
    }

    /// Guest bytes that one slice maps.
    pub(crate) fn slice_guest_bytes(&self) -> u64 {
        self.entries_per_slice() << self.geometry.cluster_bits
    }

    /// The mapping of the cluster at `guest`.
    pub(crate) fn cluster(&self, guest: GuestOffset) -> Result<Lookup<Mapping>> {
        let Some(place) = self.place(guest)? else {
            return Ok(Lookup::Hit(Mapping::Unallocated));
        };
        let entry = self.l2.with_content(place.slice.key, |content| {
            self.l2.codec().view(content).entry(place.index)
        });
        match entry {
            None => Ok(Lookup::Miss(place.slice)),
            Some(entry) => self.decode(entry, guest).map(Lookup::Hit),
        }
    }

    fn decode(&self, entry: Option<L2Entry>, guest: GuestOffset) -> Result<Mapping> {
        let entry = entry.ok_or_else(|| corrupt("map", "L2 entry outside its slice"))?;
        entry
            .decode(self.geometry)
            .map_err(|e| self.bad_l2_entry(&e, guest).at(guest.bytes()))
    }

    /// The error of an L2 entry, with its place in QEMU's words.
    #[cold]
    fn bad_l2_entry(&self, error: &FormatError, guest: GuestOffset) -> Error {
        let table = self.l1.get(self.geometry.l1_index(guest)).raw_offset();
        let index = hex(self.geometry.l2_index(guest) as u64);
        match error.field() {
            "host_offset" => {
                let why = error.message();
                let message = format!("{why} (L2 offset: {table:#x}, L2 index: {index})");
                corrupt("map", message)
            }
            _ if self.geometry.extended_l2 => {
                // QEMU's readers have a space more than its writers.
                let gap = if self.to_write { " " } else { "  " };
                let why = error.message();
                let message = format!("{why}{gap}(L2 offset: {table:#x}, L2 index: {index})");
                corrupt("map", message)
            }
            _ => bad_format("map", error),
        }
    }

    /// The runs from `guest` on, `len_bytes` at most. A hit may cover less than
    /// that: it ends where a slice is not in memory, but is never empty.
    pub(crate) fn view(&self, guest: GuestOffset, len_bytes: u64) -> Result<Lookup<View>> {
        self.runs(guest, len_bytes, usize::MAX)
    }

    /// The first of the runs that [`Mapper::view`] finds, without a look at the others:
    /// of a scattered image there are many.
    pub(crate) fn first_run(
        &self,
        guest: GuestOffset,
        len_bytes: u64,
    ) -> Result<Lookup<MappingRun>> {
        Ok(match self.runs(guest, len_bytes, 1)? {
            Lookup::Hit(view) => Lookup::Hit(view[0]),
            Lookup::Miss(slice) => Lookup::Miss(slice),
        })
    }

    /// The runs from `guest` on, until there is one more than `enough`.
    fn runs(&self, guest: GuestOffset, len_bytes: u64, enough: usize) -> Result<Lookup<View>> {
        let mut view = View::new();
        let end = guest.bytes() + len_bytes;
        let mut at = guest;
        while at.bytes() < end && view.len() <= enough {
            let Some(place) = self.place(at)? else {
                let table_bytes = self.geometry.bytes_per_l2_table();
                let table_end = (at.bytes() / table_bytes + 1).saturating_mul(table_bytes);
                let len_bytes = table_end.min(end) - at.bytes();
                let kind = RunKind::Unallocated { host: None };
                push(
                    &mut view,
                    MappingRun {
                        guest: at,
                        len_bytes,
                        kind,
                    },
                );
                at = GuestOffset(at.bytes() + len_bytes);
                continue;
            };
            let clusters_left = self.entries_per_slice() - place.index as u64;
            let slice_end = self.geometry.cluster_start(at.bytes())
                + clusters_left * self.geometry.cluster_size_bytes();
            let stop = slice_end.min(end);
            let hit = self.l2.with_content(place.slice.key, |content| {
                let slice = self.l2.codec().view(content);
                self.view_slice((&slice, place.index), at, stop, &mut view, enough)
            });
            match hit {
                Some(result) => result?,
                None if view.is_empty() => return Ok(Lookup::Miss(place.slice)),
                None => break,
            }
            at = GuestOffset(stop);
        }
        Ok(Lookup::Hit(view))
    }

    fn view_slice(
        &self,
        (slice, first): (&SliceView<'_>, usize),
        from: GuestOffset,
        stop: u64,
        view: &mut View,
        enough: usize,
    ) -> Result<()> {
        let cluster = self.geometry.cluster_size_bytes();
        let mut at = from.bytes();
        let mut entries = slice.entries(first);
        while at < stop && view.len() <= enough {
            let guest = GuestOffset(at);
            let mapping = self.decode(entries.next(), guest)?;
            let left = (stop - self.geometry.cluster_start(at)).div_ceil(cluster) - 1;
            let more = entries.continuing(&mapping).min(left);
            entries.skip_continuing(more);
            let end = (self.geometry.cluster_start(at) + (1 + more) * cluster).min(stop);
            self.push_cluster(view, guest, end - at, mapping);
            at = end;
        }
        Ok(())
    }

    /// Adds the runs of `len_bytes` bytes inside one cluster, or inside it and those
    /// that continue it.
    fn push_cluster(&self, view: &mut View, guest: GuestOffset, len_bytes: u64, mapping: Mapping) {
        let inside = guest.in_cluster(self.geometry);
        let shift = |host: HostOffset| HostOffset(host.bytes() + inside);
        let kind = match mapping {
            Mapping::Unallocated => RunKind::Unallocated { host: None },
            Mapping::Zero { host, .. } => RunKind::Zero {
                host: host.map(shift),
            },
            Mapping::Data { host, copied } => RunKind::Data {
                host: shift(host),
                copied,
            },
            Mapping::Compressed(descriptor) => RunKind::Compressed(descriptor),
            Mapping::Subclusters {
                host,
                copied,
                allocated,
                zero,
            } => {
                let bits = Bits {
                    host,
                    copied,
                    allocated,
                    zero,
                };
                return self.push_subclusters(view, guest, len_bytes, bits);
            }
        };
        push(
            view,
            MappingRun {
                guest,
                len_bytes,
                kind,
            },
        );
    }

    fn push_subclusters(&self, view: &mut View, guest: GuestOffset, len_bytes: u64, bits: Bits) {
        let size = self.geometry.subcluster_size_bytes();
        let end = guest.bytes() + len_bytes;
        let mut at = guest.bytes();
        while at < end {
            let next = (at / size + 1) * size;
            let stop = next.min(end);
            let index = self.geometry.subcluster_index(GuestOffset(at));
            let inside = self.geometry.offset_in_cluster(at);
            let host = bits.host.map(|host| HostOffset(host.bytes() + inside));
            let kind = match host {
                Some(host) if bits.allocated >> index & 1 != 0 => RunKind::Data {
                    host,
                    copied: bits.copied,
                },
                _ if bits.zero >> index & 1 != 0 => RunKind::Zero { host },
                _ => RunKind::Unallocated { host },
            };
            push(
                view,
                MappingRun {
                    guest: GuestOffset(at),
                    len_bytes: stop - at,
                    kind,
                },
            );
            at = stop;
        }
    }
}

struct Bits {
    host: Option<HostOffset>,
    copied: bool,
    allocated: u32,
    zero: u32,
}

fn push(view: &mut View, run: MappingRun) {
    if !view.last_mut().is_some_and(|last| last.try_append(&run)) {
        view.push(run);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qcow2::table_cache::cache::Budget;
    use vellum_format::l1::L1Entry;

    const TABLE: u64 = 0x40000;

    fn geometry(extended_l2: bool) -> Geometry {
        Geometry {
            cluster_bits: 16,
            extended_l2,
            refcount_order: 4,
            version: 3,
            external_data: false,
        }
    }

    fn look<R>(geometry: Geometry, mappings: &[Mapping], test: impl FnOnce(&Mapper<'_>) -> R) -> R {
        let mut l1 = [0; 16];
        assert!(L1Entry::new(HostOffset(TABLE), true).write(&mut l1, 0));
        let l1 = L1Table::new(HostOffset(0x30000), &l1);
        let mut slice = vec![0; 4096];
        for (index, mapping) in mappings.iter().enumerate() {
            assert!(
                mapping
                    .encode(&geometry)
                    .write(&mut slice, index, &geometry)
            );
        }
        let budget = Budget {
            max_bytes: 1 << 20,
            adaptive: false,
            holds_all: false,
        };
        let l2 = L2Cache::with_codec(L2Codec::new(geometry), 4096, budget);
        l2.insert_clean(TABLE, &slice);
        test(&Mapper {
            geometry: &geometry,
            l1: &l1,
            l2: &l2,
            to_write: false,
        })
    }

    fn hit(lookup: Result<Lookup<View>>) -> View {
        match lookup.unwrap() {
            Lookup::Hit(view) => view,
            Lookup::Miss(slice) => panic!("miss of {slice:?}"),
        }
    }

    #[test]
    fn neighbours_make_one_run() {
        let data = |host| Mapping::Data {
            host: HostOffset(host),
            copied: true,
        };
        let mappings = [
            data(0x100000),
            data(0x110000),
            data(0x200000),
            Mapping::Unallocated,
        ];
        look(geometry(false), &mappings, |mapper| {
            let view = hit(mapper.view(GuestOffset(0x1000), 0x40000));
            let runs: Vec<_> = view
                .iter()
                .map(|r| (r.guest.bytes(), r.len_bytes))
                .collect();
            assert_eq!(
                runs,
                [(0x1000, 0x1f000), (0x20000, 0x10000), (0x30000, 0x11000)]
            );
            let host = HostOffset(0x101000);
            assert_eq!(view[0].kind, RunKind::Data { host, copied: true });
            for run in view {
                let rest = 0x41000 - run.guest.bytes();
                let Lookup::Hit(first) = mapper.first_run(run.guest, rest).unwrap() else {
                    panic!("the slice is there");
                };
                assert_eq!(first, run);
            }
        });
    }

    #[test]
    fn a_view_ends_at_a_missing_slice_and_skips_missing_tables() {
        look(geometry(false), &[], |mapper| {
            let slice_bytes = 512 << 16;
            let view = hit(mapper.view(GuestOffset(0), 2 * slice_bytes));
            assert_eq!(view[0].len_bytes, slice_bytes);
            let miss = mapper.view(GuestOffset(slice_bytes), 512).unwrap();
            assert!(matches!(miss, Lookup::Miss(Slice { key }) if key == TABLE + 4096));
            let view = hit(mapper.view(GuestOffset(8192 << 16), 512));
            assert_eq!(view[0].kind, RunKind::Unallocated { host: None });
        });
    }

    #[test]
    fn subclusters_are_told_apart() {
        let host = Some(HostOffset(0x100000));
        let mapping = Mapping::Subclusters {
            host,
            copied: true,
            allocated: 0b0110,
            zero: 0b1000,
        };
        look(geometry(true), &[mapping], |mapper| {
            let view = hit(mapper.view(GuestOffset(0), 0x10000));
            let kinds: Vec<_> = view.iter().map(|run| (run.len_bytes, run.kind)).collect();
            let at = |offset: u64| HostOffset(0x100000 + offset);
            assert_eq!(
                kinds,
                [
                    (2048, RunKind::Unallocated { host }),
                    (
                        4096,
                        RunKind::Data {
                            host: at(2048),
                            copied: true
                        }
                    ),
                    (
                        2048,
                        RunKind::Zero {
                            host: Some(at(6144))
                        }
                    ),
                    (
                        0x10000 - 8192,
                        RunKind::Unallocated {
                            host: Some(at(8192))
                        }
                    ),
                ]
            );
        });
    }
}

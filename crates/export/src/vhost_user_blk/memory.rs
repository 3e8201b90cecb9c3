//! A guest's memory: regions that its client has mapped too.
//!
//! Invariants:
//! - Regions do not overlap, neither as the guest sees them nor as the client does.
//! - An address leads to memory that is mapped, or to an error: nothing is computed from it.

use std::os::fd::AsFd;
use std::sync::Arc;

use smallvec::SmallVec;
use vellum_io::Result;
pub(super) use vellum_io::shared_memory::total_len;
use vellum_io::shared_memory::{SharedBuffer, SharedMemory};

use super::message::{RegionDescription, broken};

/// Most regions at a time.
pub(super) const MAX_REGIONS: usize = 64;

/// Ranges of a guest's memory, in order.
pub(super) type Pieces = SmallVec<[SharedBuffer; 4]>;

/// The regions of a guest's memory.
#[derive(Debug, Default)]
pub(super) struct GuestMemory(Vec<Region>);

#[derive(Debug)]
struct Region {
    place: RegionDescription,
    memory: Arc<SharedMemory>,
}

fn overlap(a: u64, a_len: u64, b: u64, b_len: u64) -> bool {
    a < b.saturating_add(b_len) && b < a.saturating_add(a_len)
}

impl GuestMemory {
    /// Maps one more region, which is in `file`.
    ///
    /// # Errors
    /// If there are too many, it overlaps another one, ends beyond the last address, or cannot
    /// be mapped.
    pub(super) fn add(&mut self, place: RegionDescription, file: impl AsFd) -> Result<()> {
        if self.0.len() >= MAX_REGIONS {
            return Err(broken(format!("more than {MAX_REGIONS} regions of memory")));
        }
        let len_bytes = place.len_bytes;
        let fits = |address: u64| address.checked_add(len_bytes).is_some();
        if !fits(place.guest_address) || !fits(place.client_address) {
            return Err(broken(format!(
                "a region of {len_bytes} bytes of memory wraps around"
            )));
        }
        let (guest, client) = (place.guest_address, place.client_address);
        let is_taken = |other: &Region| {
            let other = &other.place;
            overlap(guest, len_bytes, other.guest_address, other.len_bytes)
                || overlap(client, len_bytes, other.client_address, other.len_bytes)
        };
        if self.0.iter().any(is_taken) {
            return Err(broken(format!("regions of memory overlap at {guest:#x}")));
        }
        let memory = SharedMemory::map(file.as_fd(), place.offset_bytes, len_bytes)?;
        let memory = Arc::new(memory);
        let at = self
            .0
            .partition_point(|other| other.place.guest_address < guest);
        self.0.insert(at, Region { place, memory });
        Ok(())
    }

    /// Forgets a region. Who uses it goes on doing so.
    ///
    /// # Errors
    /// If there is none such.
    pub(super) fn remove(&mut self, place: RegionDescription) -> Result<()> {
        // The offset in a file that is not sent is no part of what names a region.
        let same = |other: &Region| {
            other.place.guest_address == place.guest_address
                && other.place.client_address == place.client_address
                && other.place.len_bytes == place.len_bytes
        };
        match self.0.iter().position(same) {
            Some(at) => {
                self.0.remove(at);
                Ok(())
            }
            None => {
                let address = place.guest_address;
                Err(broken(format!(
                    "there is no region of memory at {address:#x}"
                )))
            }
        }
    }

    /// The same memory with counters of its own: lanes with one each share none.
    pub(super) fn for_another_lane(&self) -> GuestMemory {
        let regions = self.0.iter().map(|region| Region {
            place: region.place,
            memory: Arc::new(SharedMemory::clone(&region.memory)),
        });
        GuestMemory(regions.collect())
    }

    /// `len_bytes` bytes at an address of the guest, added to `pieces`: several where regions
    /// follow each other.
    ///
    /// # Errors
    /// If they are not all there.
    pub(super) fn find(&self, address: u64, len_bytes: u32, pieces: &mut Pieces) -> Result<()> {
        let outside = || {
            broken(format!(
                "{len_bytes} bytes at {address:#x} are not in memory"
            ))
        };
        let (mut at, mut left) = (address, u64::from(len_bytes));
        while left > 0 {
            let after = self
                .0
                .partition_point(|region| region.place.guest_address <= at);
            let region = after.checked_sub(1).and_then(|index| self.0.get(index));
            let region = region.ok_or_else(outside)?;
            let inside = at - region.place.guest_address;
            let there = region.place.len_bytes.saturating_sub(inside).min(left);
            if there == 0 {
                return Err(outside());
            }
            pieces.push(region.memory.range(inside, there).ok_or_else(outside)?);
            left -= there;
            at = at.checked_add(there).ok_or_else(outside)?;
        }
        Ok(())
    }

    /// `len_bytes` bytes at an address of the client's, in one piece.
    ///
    /// # Errors
    /// If they are not all in one region.
    pub(super) fn find_by_client(&self, address: u64, len_bytes: u64) -> Result<SharedBuffer> {
        let found = self.0.iter().find_map(|region| {
            let inside = address.checked_sub(region.place.client_address)?;
            region.memory.range(inside, len_bytes)
        });
        found.ok_or_else(|| {
            broken(format!(
                "a ring of {len_bytes} bytes at {address:#x} is not in memory"
            ))
        })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Memory of pages that begin at these addresses, for the guest and (a gigabyte further)
    /// the client.
    pub(in super::super) fn memory_of(regions: &[(u64, u64)]) -> GuestMemory {
        let mut memory = GuestMemory::default();
        for &(guest_address, len_bytes) in regions {
            add(&mut memory, guest_address, len_bytes).expect("a region");
        }
        memory
    }

    fn add(memory: &mut GuestMemory, guest_address: u64, len_bytes: u64) -> Result<()> {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(len_bytes.min(1 << 20)).expect("a length");
        let place = RegionDescription {
            guest_address,
            len_bytes,
            client_address: guest_address.wrapping_add(1 << 30),
            offset_bytes: 0,
        };
        memory.add(place, file)
    }

    #[test]
    fn ranges_are_found_across_neighbours_and_not_across_gaps() {
        let memory = memory_of(&[(0x2000, 0x1000), (0x1000, 0x1000), (0x4000, 0x1000)]);
        let find = |address, len| {
            let mut pieces = Pieces::new();
            memory.find(address, len, &mut pieces).map(|()| pieces)
        };
        assert_eq!(find(0x1fff, 2).expect("two pieces").len(), 2);
        assert_eq!(find(0x1000, 0x2000).expect("two pieces").len(), 2);
        for (address, len) in [
            (0xfff, 2),
            (0x2fff, 2),
            (0x4fff, 2),
            (u64::MAX, 2),
            (0, u32::MAX),
        ] {
            assert!(find(address, len).is_err(), "{address:#x} {len}");
        }
        let client = |address: u64, len| memory.find_by_client((1 << 30) + address, len).is_ok();
        assert!(client(0x4000, 0x1000));
        assert!(!client(0x4000, 0x1001) && !client(0x1800, 0x1000) && !client(0, 8));
    }

    #[test]
    fn regions_that_overlap_wrap_or_are_too_many_are_refused() {
        let mut memory = memory_of(&[(0x1000, 0x2000)]);
        for (address, len) in [
            (0x2fff, 1),
            (0, 0x1001),
            (0x1800, 8),
            (u64::MAX, 2),
            (0x9000, 2 << 20),
        ] {
            assert!(
                add(&mut memory, address, len).is_err(),
                "{address:#x} {len}"
            );
        }
        for number in 1..MAX_REGIONS as u64 {
            add(&mut memory, 0x10000 * number, 0x1000).expect("a region");
        }
        assert!(add(&mut memory, 1 << 40, 0x1000).is_err());
    }
}

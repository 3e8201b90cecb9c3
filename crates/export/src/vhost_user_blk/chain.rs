//! Chains of descriptors: the memory of one request.
//!
//! Invariants:
//! - A walk ends: it takes no more steps than a table has entries, and goes to another table
//!   once at most.
//! - A chain is no more than [`MAX_DESCRIPTORS`] ranges of memory that is mapped, those that
//!   the device reads before those that it writes. Anything else is an error, not a shorter chain.

use vellum_io::Result;
use vellum_io::shared_memory::SharedBuffer;

use super::dirty_log::Written;
use super::memory::{GuestMemory, Pieces};
use super::message::broken;
use super::ring::{DESCRIPTOR_BYTES, Ring};

/// Most descriptors of a request. More than a queue may have entries: Linux counts those of an
/// indirect table by what the device says of segments.
pub(super) const MAX_DESCRIPTORS: usize = 1024;

const FLAG_NEXT: u16 = 1;
const FLAG_WRITE: u16 = 2;
const FLAG_INDIRECT: u16 = 4;

/// The memory of a request.
#[derive(Debug, Default)]
pub(super) struct Chain {
    /// What the device reads.
    pub(super) readable: Pieces,
    /// What the device writes.
    pub(super) writable: Pieces,
    /// Where the guest has that.
    pub(super) written: Written,
}

/// One entry of a table, as it was when it was read.
#[derive(Debug, Clone, Copy)]
struct Descriptor {
    address: u64,
    len_bytes: u32,
    flags: u16,
    next: u16,
}

impl Descriptor {
    fn read(table: &SharedBuffer, index: usize) -> Descriptor {
        let mut bytes = [0; DESCRIPTOR_BYTES];
        table.copy_to(index * DESCRIPTOR_BYTES, &mut bytes);
        let [
            a0,
            a1,
            a2,
            a3,
            a4,
            a5,
            a6,
            a7,
            l0,
            l1,
            l2,
            l3,
            f0,
            f1,
            n0,
            n1,
        ] = bytes;
        Descriptor {
            address: u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]),
            len_bytes: u32::from_le_bytes([l0, l1, l2, l3]),
            flags: u16::from_le_bytes([f0, f1]),
            next: u16::from_le_bytes([n0, n1]),
        }
    }

    fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }
}

/// A table of descriptors.
struct Table<'a> {
    /// Only an indirect table may lie in several pieces of memory: it is copied then.
    memory: &'a SharedBuffer,
    entries: usize,
}

/// Follows the chain that begins with `head`.
///
/// # Errors
/// If it is none: it loops, leads outside, or is too long.
pub(super) fn walk(ring: &Ring, memory: &GuestMemory, head: u16, indirect: bool) -> Result<Chain> {
    let table = Table {
        memory: ring.descriptors(),
        entries: usize::from(ring.size()),
    };
    let mut chain = Chain::default();
    let first = Descriptor::read(table.memory, usize::from(head));
    if !first.has(FLAG_INDIRECT) {
        chain.follow(&table, first, memory)?;
        return Ok(chain);
    }
    if !indirect {
        return Err(broken("an indirect descriptor, which was not agreed upon"));
    }
    if first.has(FLAG_NEXT) {
        return Err(broken("an indirect descriptor with another one behind it"));
    }
    let len = first.len_bytes as usize;
    let entries = len / DESCRIPTOR_BYTES;
    if len == 0 || !len.is_multiple_of(DESCRIPTOR_BYTES) || entries > MAX_DESCRIPTORS {
        return Err(broken(format!("an indirect table of {len} bytes")));
    }
    let mut pieces = Pieces::new();
    memory.find(first.address, first.len_bytes, &mut pieces)?;
    let [memory_of_table] = &pieces[..] else {
        return Err(broken("an indirect table in several regions of memory"));
    };
    let table = Table {
        memory: memory_of_table,
        entries,
    };
    let first = Descriptor::read(table.memory, 0);
    chain.follow(&table, first, memory)?;
    Ok(chain)
}

impl Chain {
    fn follow(&mut self, table: &Table<'_>, first: Descriptor, memory: &GuestMemory) -> Result<()> {
        let mut descriptor = first;
        for _ in 0..table.entries {
            self.add(descriptor, memory)?;
            if !descriptor.has(FLAG_NEXT) {
                return Ok(());
            }
            let next = usize::from(descriptor.next);
            if next >= table.entries {
                let entries = table.entries;
                return Err(broken(format!("descriptor {next} of a table of {entries}")));
            }
            descriptor = Descriptor::read(table.memory, next);
        }
        Err(broken("a chain of descriptors that loops"))
    }

    fn add(&mut self, descriptor: Descriptor, memory: &GuestMemory) -> Result<()> {
        if descriptor.has(FLAG_INDIRECT) {
            return Err(broken("an indirect descriptor amid a chain"));
        }
        if descriptor.len_bytes == 0 {
            return Err(broken("a descriptor of no bytes"));
        }
        let writes = descriptor.has(FLAG_WRITE);
        if !writes && !self.writable.is_empty() {
            return Err(broken("memory to be read behind memory to be written"));
        }
        let pieces = match writes {
            true => &mut self.writable,
            false => &mut self.readable,
        };
        memory.find(descriptor.address, descriptor.len_bytes, pieces)?;
        if writes {
            self.written
                .push((descriptor.address, descriptor.len_bytes));
        }
        if self.readable.len() + self.writable.len() > MAX_DESCRIPTORS {
            return Err(broken(format!(
                "a request of more than {MAX_DESCRIPTORS} ranges"
            )));
        }
        Ok(())
    }
}

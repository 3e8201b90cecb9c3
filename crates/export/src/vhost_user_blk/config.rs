//! What the device says of itself: features and configuration space. Pure.

/// Bytes of a sector, in which offsets and lengths are counted.
pub(super) const SECTOR_BYTES: u64 = 512;
/// Most bytes of a segment of a request's data.
pub(super) const MAX_SEGMENT_BYTES: u32 = 64 << 10;
/// Most segments of a request's data; two more descriptors hold header and status.
pub(super) const MAX_SEGMENTS: u32 = 254;
/// Most ranges of one request to discard or zero.
pub(super) const MAX_RANGES: u32 = 32;
/// Most sectors of one such range.
pub(super) const MAX_RANGE_SECTORS: u32 = 4 << 20;
/// Bytes of the configuration space.
pub(super) const CONFIG_BYTES: usize = 60;
/// Where the guest switches the write cache on and off.
pub(super) const WRITE_CACHE_AT: usize = 32;
/// Most bytes of a serial number.
pub const SERIAL_BYTES: usize = 20;

/// Bits of features.
pub(super) mod feature {
    /// Segments have a greatest length.
    pub(in super::super) const SIZE_MAX: u64 = 1 << 1;
    /// Requests have a greatest number of segments.
    pub(in super::super) const SEG_MAX: u64 = 1 << 2;
    /// Nothing can be changed.
    pub(in super::super) const READ_ONLY: u64 = 1 << 5;
    /// There is a size of logical blocks.
    pub(in super::super) const BLOCK_SIZE: u64 = 1 << 6;
    /// There is a write cache, which can be flushed.
    pub(in super::super) const FLUSH: u64 = 1 << 9;
    /// There are an alignment and a length that requests had better have.
    pub(in super::super) const TOPOLOGY: u64 = 1 << 10;
    /// The write cache can be switched off.
    pub(in super::super) const CONFIG_WCE: u64 = 1 << 11;
    /// Several queues.
    pub(in super::super) const MULTIPLE_QUEUES: u64 = 1 << 12;
    /// Space can be given back.
    pub(in super::super) const DISCARD: u64 = 1 << 13;
    /// Zeroes need not be sent.
    pub(in super::super) const WRITE_ZEROES: u64 = 1 << 14;
    /// The client can be told which memory was written.
    pub(in super::super) const LOG_ALL: u64 = 1 << 26;
    /// Descriptors may be in tables of their own.
    pub(in super::super) const INDIRECT: u64 = 1 << 28;
    /// Both sides say when they want to be told.
    pub(in super::super) const EVENT_INDEX: u64 = 1 << 29;
    /// The protocol between client and server has features of its own.
    pub(in super::super) const PROTOCOL: u64 = 1 << 30;
    /// The device keeps to version 1 of the standard.
    pub(in super::super) const VERSION_1: u64 = 1 << 32;
}

/// What the device is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Geometry {
    pub(super) size_bytes: u64,
    pub(super) logical_block_bytes: u32,
    /// Ranges that are aligned to this can be given back.
    pub(super) discard_alignment_bytes: u64,
    pub(super) queues: u16,
    pub(super) read_only: bool,
    /// The write cache is on.
    pub(super) write_back: bool,
}

impl Geometry {
    /// What is offered.
    pub(super) fn features(&self) -> u64 {
        let always = feature::SIZE_MAX
            | feature::SEG_MAX
            | feature::BLOCK_SIZE
            | feature::FLUSH
            | feature::TOPOLOGY
            | feature::CONFIG_WCE
            | feature::MULTIPLE_QUEUES
            | feature::LOG_ALL
            | feature::INDIRECT
            | feature::EVENT_INDEX
            | feature::PROTOCOL
            | feature::VERSION_1;
        match self.read_only {
            true => always | feature::READ_ONLY,
            false => always | feature::DISCARD | feature::WRITE_ZEROES,
        }
    }

    /// The configuration space.
    pub(super) fn config(&self) -> [u8; CONFIG_BYTES] {
        let mut space = [0; CONFIG_BYTES];
        let mut put = |at: usize, bytes: &[u8]| space[at..at + bytes.len()].copy_from_slice(bytes);
        let capacity = self.size_bytes / SECTOR_BYTES;
        put(0, &capacity.to_le_bytes());
        put(8, &MAX_SEGMENT_BYTES.to_le_bytes());
        put(12, &MAX_SEGMENTS.to_le_bytes());
        put(20, &self.logical_block_bytes.to_le_bytes());
        // Topology: no blocks beside the logical ones, and any length does.
        put(26, &1_u16.to_le_bytes());
        put(28, &1_u32.to_le_bytes());
        put(WRITE_CACHE_AT, &[u8::from(self.write_back)]);
        put(34, &self.queues.to_le_bytes());
        if !self.read_only {
            let alignment = self
                .discard_alignment_bytes
                .max(u64::from(self.logical_block_bytes));
            let alignment = u32::try_from(alignment / SECTOR_BYTES).unwrap_or(1);
            put(36, &MAX_RANGE_SECTORS.to_le_bytes());
            put(40, &MAX_RANGES.to_le_bytes());
            put(44, &alignment.to_le_bytes());
            put(48, &MAX_RANGE_SECTORS.to_le_bytes());
            put(52, &MAX_RANGES.to_le_bytes());
            // Zeroes may give space back.
            put(56, &[1]);
        }
        space
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DISK: Geometry = Geometry {
        size_bytes: 10 << 20,
        logical_block_bytes: 4096,
        discard_alignment_bytes: 64 << 10,
        queues: 4,
        read_only: false,
        write_back: true,
    };

    #[test]
    fn the_configuration_space_has_its_fields_where_the_standard_has_them() {
        let space = DISK.config();
        let u32_at = |at: usize| u32::from_le_bytes(space[at..at + 4].try_into().expect("four"));
        assert_eq!(u32_at(0), 20 << 10);
        assert_eq!((u32_at(8), u32_at(12), u32_at(20)), (65536, 254, 4096));
        assert_eq!((space[32], space[34], space[56]), (1, 4, 1));
        assert_eq!((u32_at(40), u32_at(44), u32_at(52)), (32, 128, 32));
    }

    #[test]
    fn a_disk_that_is_only_read_offers_no_changes() {
        let disk = Geometry {
            read_only: true,
            ..DISK
        };
        assert_eq!(
            disk.features() & (feature::DISCARD | feature::WRITE_ZEROES),
            0
        );
        assert_ne!(disk.features() & feature::READ_ONLY, 0);
        assert_eq!(disk.config()[36..], [0; 24]);
    }
}

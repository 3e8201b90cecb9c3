//! L1 and L2 entries, compressed descriptors and refcounts, case by case.

use vellum_format::refcount::{self, RefcountTableEntry};
use vellum_format::{
    CompressedDescriptor, FormatErrorKind, Geometry, HostOffset, L1Entry, L2Entry, Mapping,
};

const COPIED: u64 = 1 << 63;
const HOST: HostOffset = HostOffset(0x50000);

fn geometry() -> Geometry {
    Geometry::new(3, 16, false, 4, false).expect("a good geometry")
}

fn extended() -> Geometry {
    Geometry {
        extended_l2: true,
        ..geometry()
    }
}

fn external() -> Geometry {
    Geometry {
        external_data: true,
        ..geometry()
    }
}

fn decode(descriptor: u64, bitmap: u64, geometry: &Geometry) -> Result<Mapping, String> {
    L2Entry { descriptor, bitmap }
        .decode(geometry)
        .map_err(|error| {
            assert_eq!(error.kind(), FormatErrorKind::Corrupt);
            error.to_string()
        })
}

fn data(host: HostOffset, copied: bool) -> Result<Mapping, String> {
    Ok(Mapping::Data { host, copied })
}

fn zero(host: Option<HostOffset>, copied: bool) -> Result<Mapping, String> {
    Ok(Mapping::Zero { host, copied })
}

#[test]
fn standard_entries() {
    let g = &geometry();
    assert_eq!(decode(0, 0, g), Ok(Mapping::Unallocated));
    assert_eq!(decode(HOST.0 | COPIED, 0, g), data(HOST, true));
    assert_eq!(decode(HOST.0, 0, g), data(HOST, false));
    assert_eq!(decode(1, 0, g), zero(None, false));
    assert_eq!(decode(HOST.0 | COPIED | 1, 0, g), zero(Some(HOST), true));
    // A copied flag without a cluster says nothing.
    assert_eq!(decode(COPIED, 0, g), Ok(Mapping::Unallocated));
    assert_eq!(decode(COPIED | 1, 0, g), zero(None, false));
}

#[test]
fn standard_entries_that_are_refused() {
    let g = &geometry();
    let unaligned = Err("Cluster allocation offset 0x50200 unaligned".to_owned());
    assert_eq!(decode(0x50200, 0, g), unaligned);
    assert_eq!(decode(0x50200 | 1, 0, g), unaligned);
    let v2 = Geometry { version: 2, ..*g };
    let pre_v3 = Err("Zero cluster entry found in pre-v3 image".to_owned());
    assert_eq!(decode(1, 0, &v2), pre_v3);
    assert_eq!(decode(HOST.0 | 1, 0, &v2), pre_v3);
}

#[test]
fn reserved_bits_are_reported_but_do_not_matter() {
    let entry = L2Entry {
        descriptor: HOST.0 | 0x3f00_0000_0000_01fe,
        bitmap: 0,
    };
    assert_eq!(entry.reserved_bits(), 0x3f00_0000_0000_01fe);
    assert!(entry.decode(&geometry()).is_ok());
    assert_eq!(
        L1Entry(0x7f00_0000_0005_01ff).reserved_bits(),
        0x7f00_0000_0000_01ff
    );
}

#[test]
fn external_data_begins_at_offset_0() {
    let g = &external();
    assert_eq!(decode(COPIED, 0, g), data(HostOffset(0), true));
    assert_eq!(decode(0, 0, g), Ok(Mapping::Unallocated));
    let encoded = Mapping::Data {
        host: HostOffset(0),
        copied: true,
    }
    .encode(g);
    assert_eq!(encoded.descriptor, COPIED);
    assert_eq!(
        decode(1 << 62, 0, g),
        Err("Compressed cluster entry found in image with external data file".to_owned())
    );
}

#[test]
fn extended_entries() {
    let g = &extended();
    let subclusters = |host, copied, allocated, zero| {
        Ok(Mapping::Subclusters {
            host,
            copied,
            allocated,
            zero,
        })
    };
    assert_eq!(decode(0, 0, g), Ok(Mapping::Unallocated));
    assert_eq!(decode(0, 5 << 32, g), subclusters(None, false, 0, 5));
    assert_eq!(
        decode(HOST.0 | COPIED, (5 << 32) | 2, g),
        subclusters(Some(HOST), true, 2, 5)
    );
    // A cluster may be allocated ahead with no subcluster in use.
    assert_eq!(decode(HOST.0, 0, g), subclusters(Some(HOST), false, 0, 0));
    // Bit 0 of the descriptor means nothing here.
    assert_eq!(
        decode(HOST.0 | 1, 1, g),
        subclusters(Some(HOST), false, 1, 0)
    );
}

#[test]
fn extended_entries_that_are_refused() {
    let g = &extended();
    let invalid = Err("Invalid cluster entry found".to_owned());
    assert_eq!(decode(HOST.0, (1 << 32) | 1, g), invalid);
    assert_eq!(decode(0, 1, g), invalid);
}

#[test]
fn whole_clusters_become_32_subclusters() {
    let g = &extended();
    let copied = true;
    let written = Mapping::Data { host: HOST, copied }.encode(g);
    assert_eq!(written.bitmap, 0xffff_ffff);
    let zeroed = Mapping::Zero { host: None, copied }.encode(g);
    assert_eq!(
        (zeroed.descriptor, zeroed.bitmap),
        (0, 0xffff_ffff_0000_0000)
    );
}

#[test]
fn l2_entries_in_their_table() {
    let entry = L2Entry {
        descriptor: 0x1122,
        bitmap: 0x3344,
    };
    let mut table = [0; 32];
    assert!(entry.write(&mut table, 1, &extended()));
    assert_eq!(L2Entry::read(&table, 1, &extended()), Some(entry));
    assert!(!entry.write(&mut table[..31], 1, &extended()));
    assert!(entry.write(&mut table, 3, &geometry()));
    assert_eq!(table[24..], 0x1122u64.to_be_bytes());
    assert_eq!(L2Entry::read(&table, usize::MAX, &geometry()), None);
}

#[test]
fn l1_entries() {
    let g = &geometry();
    let entry = L1Entry::new(HOST, true);
    assert_eq!(entry.0, COPIED | 0x50000);
    assert_eq!(entry.decode(g), Ok(Some(HOST)));
    assert!(entry.copied() && !entry.with_copied(false).copied());
    assert_eq!(L1Entry::UNALLOCATED.decode(g), Ok(None));
    let error = L1Entry(0x50200).decode(g).expect_err("unaligned");
    assert_eq!(error.to_string(), "L2 table offset 0x50200 unaligned");
    assert_eq!((error.structure(), error.value()), ("L1 entry", 0x50200));
    assert_eq!(
        format!("{error:#}"),
        "L1 entry: l2_offset = 0x50200: L2 table offset 0x50200 unaligned"
    );
}

#[test]
fn compressed_descriptors() {
    // 64 KiB clusters: 54 bits of offset, 8 bits of sectors.
    let descriptor = CompressedDescriptor::decode((1 << 62) | (3 << 54) | 0x51234, 16)
        .expect("a good descriptor");
    assert_eq!(descriptor.host_offset, HostOffset(0x51234));
    assert_eq!(descriptor.additional_sectors, 3);
    assert_eq!(descriptor.max_len_bytes(), 4 * 512 - 0x34);
    assert_eq!(descriptor.end(), HostOffset(0x51a00));
    let made = CompressedDescriptor::new(HostOffset(0x51234), 1600, 16);
    assert_eq!(made, Ok(descriptor));
    assert_eq!(descriptor.encode(16), (1 << 62) | (3 << 54) | 0x51234);
}

#[test]
fn compressed_descriptors_have_limits() {
    assert_eq!(CompressedDescriptor::offset_end(9), 1 << 56);
    assert_eq!(CompressedDescriptor::offset_end(16), 1 << 54);
    assert_eq!(CompressedDescriptor::offset_end(21), 1 << 49);
    assert!(CompressedDescriptor::decode(1 << 60, 9).is_err());
    assert!(CompressedDescriptor::new(HostOffset(1 << 54), 1, 16).is_err());
    assert!(CompressedDescriptor::new(HostOffset(0), 256 * 512, 16).is_ok());
    let error = CompressedDescriptor::new(HostOffset(1), 256 * 512, 16).expect_err("too long");
    assert_eq!(error.kind(), FormatErrorKind::TooLarge);
}

#[test]
fn refcount_table_entries() {
    let g = &geometry();
    assert_eq!(RefcountTableEntry(0).decode(g), Ok(None));
    assert_eq!(RefcountTableEntry(0x500ff).decode(g), Ok(Some(HOST)));
    assert_eq!(RefcountTableEntry(0x500ff).reserved_bits(), 0xff);
    let error = RefcountTableEntry(0x50200)
        .decode(g)
        .expect_err("unaligned");
    assert_eq!(error.to_string(), "Refblock offset 0x50200 unaligned");
    assert!(RefcountTableEntry(1 << 56).decode(g).is_err());
}

#[test]
fn narrow_refcounts_fill_bytes_from_the_low_end() {
    let mut block = [0u8; 2];
    assert!(refcount::set(&mut block, 0, 3, 1));
    assert_eq!(block, [0b1000, 0]);
    assert!(refcount::set(&mut block, 1, 4, 3));
    assert_eq!(block, [0b1000, 0b11]);
    assert!(refcount::set(&mut block, 2, 1, 0xa));
    assert_eq!(block, [0xa8, 3]);
    assert_eq!(refcount::get(&block, 2, 1), 0xa);
    assert!(!refcount::set(&mut block, 2, 1, 16), "16 needs five bits");
    assert!(!refcount::set(&mut block, 2, 4, 1), "beyond the block");
    assert_eq!(block, [0xa8, 3]);
}

#[test]
fn wide_refcounts_are_big_endian() {
    let mut block = [0u8; 16];
    assert!(refcount::set(&mut block, 4, 1, 0x1234));
    assert!(refcount::set(&mut block, 5, 1, 0x5566_7788));
    assert!(refcount::set(&mut block, 6, 1, u64::MAX));
    assert_eq!(block[..8], [0, 0, 0x12, 0x34, 0x55, 0x66, 0x77, 0x88]);
    assert_eq!(refcount::get(&block, 4, 1), 0x1234);
    assert_eq!(refcount::get(&block, 6, 1), u64::MAX);
    assert!(!refcount::set(&mut block, 4, 1, 0x10000));
    assert_eq!(refcount::get(&block, 3, 16), 0, "beyond the block");
}

#[test]
fn many_refcounts_change_as_single_ones_do_or_none_does() {
    for order in 0..=6 {
        let max = if order == 6 {
            u64::MAX
        } else {
            (1 << (1 << order)) - 1
        };
        let mut block = [0; 64];
        let start = [max / 2, max, 0, max - 1];
        for (index, &count) in start.iter().enumerate() {
            assert!(refcount::set(&mut block, order, index, count));
        }
        let counts = |block: &[u8]| [0, 1, 2, 3].map(|index| refcount::get(block, order, index));
        let before = block;
        for (changes, fits) in [
            (&[0, -1, 1, 1][..], true),
            (&[0, 0, 0], true),
            (&[1, 1, 0, 0], false),
            (&[0, -1, -1, 0], false),
            (&[0, -1, i32::MIN, 0], false),
            (&[0, i32::MAX], false),
        ] {
            let mut changed = before;
            let sums = start.iter().zip(changes);
            let sums: Vec<_> = sums
                .map(|(&count, &change)| i128::from(count) + i128::from(change))
                .collect();
            let expected = sums.iter().all(|sum| (0..=i128::from(max)).contains(sum));
            assert_eq!(expected, fits, "a bad case for order {order}: {changes:?}");
            assert_eq!(refcount::add(&mut changed, order, changes), fits);
            let now = counts(&changed);
            match fits {
                true => assert!(
                    sums.iter()
                        .zip(now)
                        .all(|(&sum, now)| sum == i128::from(now))
                ),
                false => assert_eq!(changed, before, "order {order}: {changes:?}"),
            }
        }
        let beyond = vec![0; ((block.len() * 8) >> order) + 1];
        let mut one = beyond.clone();
        *one.last_mut().expect("more than one") = 1;
        assert!(!refcount::add(&mut block, order, &one));
        assert_eq!(block, before);
    }
}

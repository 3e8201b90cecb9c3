use proptest::prelude::*;
use vellum_format::HostOffset;
use vellum_format::bitmap::BitmapsExtension;
use vellum_format::crypto::{CryptMethod, EncryptionHeaderPointer};

use super::*;

const CLUSTER_BYTES: usize = 65536;

/// What the names of a header are like; lengths in bytes, 0: none.
#[derive(Debug, Clone, Copy)]
struct Names {
    version: u32,
    backing: usize,
    data_file: usize,
    bitmaps: bool,
    unknown: usize,
    mark: u8,
}

fn header(names: Names) -> Header {
    let mut header = Header {
        version: names.version,
        cluster_bits: 16,
        size_bytes: 1 << 20,
        crypt_method: Default::default(),
        l1_entries: 1,
        l1_table_offset: HostOffset(3 << 16),
        refcount_table_offset: HostOffset(1 << 16),
        refcount_table_clusters: 1,
        snapshot_count: 0,
        snapshots_offset: HostOffset(0),
        incompatible: Default::default(),
        compatible: Default::default(),
        autoclear: Default::default(),
        refcount_order: 4,
        compression_type: Default::default(),
        unknown_header_tail: Vec::new(),
        extensions: Vec::new(),
        backing_file: None,
    };
    if names.backing > 0 {
        header.backing_file = Some(vec![names.mark; names.backing]);
        header.set_extension(Extension::BackingFormat(vec![names.mark; 5]));
    }
    if names.data_file > 0 {
        header.set_extension(Extension::ExternalDataFile(vec![
            names.mark;
            names.data_file
        ]));
    }
    if names.bitmaps && names.version > 2 {
        header.autoclear = vellum_format::features::Autoclear::BITMAPS;
        header.set_extension(Extension::Bitmaps(BitmapsExtension {
            count: 1,
            directory_size_bytes: 32,
            directory_offset: HostOffset(5 << 16),
        }));
    }
    if names.unknown > 0 {
        header.set_extension(Extension::Unknown {
            kind: 0x1234_5678,
            data: vec![names.mark; names.unknown],
        });
    }
    refresh_feature_names(&mut header);
    header
}

fn cluster_of(header: &Header, len: usize) -> Vec<u8> {
    let mut cluster = header.encode().expect("valid");
    cluster.resize(len, 0);
    cluster
}

/// What a header says; the feature names are for people only.
fn meaning(cluster: &[u8]) -> Header {
    let mut header = Header::decode_for(cluster, Purpose::Use).expect("a header at any time");
    header.remove_extension(kind::FEATURE_NAMES);
    header
}

/// Every moment at which power may fail: each prefix of the stages with any
/// sectors of the next.
fn after_cuts(old: &[u8], stages: &[Piece], mut look: impl FnMut(&[u8])) {
    let mut durable = old.to_vec();
    for stage in stages {
        let sectors = stage.bytes.len().div_ceil(SECTOR_BYTES);
        // All subsets of a few sectors; of many, the prefixes and single ones.
        let subsets: Vec<u64> = match sectors {
            0..=4 => (0..1 << sectors).collect(),
            _ => (0..sectors.min(60))
                .flat_map(|s| [(1 << s) - 1, 1 << s])
                .collect(),
        };
        for subset in subsets {
            let mut torn = durable.clone();
            for sector in (0..sectors.min(60)).filter(|sector| subset >> sector & 1 != 0) {
                let from = sector * SECTOR_BYTES;
                let to = (from + SECTOR_BYTES).min(stage.bytes.len());
                let at = stage.offset_bytes;
                torn[at + from..at + to].copy_from_slice(&stage.bytes[from..to]);
            }
            look(&torn);
        }
        let at = stage.offset_bytes;
        durable[at..at + stage.bytes.len()].copy_from_slice(&stage.bytes);
        look(&durable);
    }
}

fn names() -> impl Strategy<Value = Names> {
    let len = prop_oneof![Just(0usize), 1usize..40, 300usize..1023];
    (
        2u32..4,
        len.clone(),
        len.clone(),
        any::<bool>(),
        len,
        b'a'..=b'z',
    )
        .prop_map(
            |(version, backing, data_file, bitmaps, unknown, mark)| Names {
                version,
                backing,
                data_file,
                bitmaps,
                unknown,
                mark,
            },
        )
}

proptest! {
    #[test]
    fn a_torn_header_is_the_old_one_or_the_new_one(before in names(), after in names()) {
        let (before, after) = (header(before), header(after));
        let old = cluster_of(&before, CLUSTER_BYTES);
        let (old_meaning, new_meaning) = (meaning(&old), meaning(&cluster_of(&after, CLUSTER_BYTES)));
        let stages = stages(&old, &after).expect("it fits");
        let mut is_new = false;
        after_cuts(&old, &stages, |cluster| {
            let now = meaning(cluster);
            assert!(now == old_meaning || now == new_meaning, "{now:?}");
            is_new = now == new_meaning;
        });
        prop_assert!(is_new || stages.is_empty());
        let mut end = old;
        for stage in stages {
            let at = stage.offset_bytes;
            end[at..at + stage.bytes.len()].copy_from_slice(&stage.bytes);
        }
        prop_assert_eq!(end, cluster_of(&after, CLUSTER_BYTES));
    }
}

#[test]
fn the_end_of_a_header_is_where_its_last_part_ends() {
    let plain = Names {
        version: 3,
        backing: 0,
        data_file: 0,
        bitmaps: false,
        unknown: 0,
        mark: b'x',
    };
    for names in [
        plain,
        Names {
            backing: 33,
            ..plain
        },
        Names {
            data_file: 700,
            bitmaps: true,
            ..plain
        },
        Names {
            version: 2,
            backing: 9,
            unknown: 3,
            ..plain
        },
    ] {
        let encoded = header(names).encode().expect("valid");
        let cluster = cluster_of(&header(names), CLUSTER_BYTES);
        assert_eq!(end_of_header(&cluster), encoded.len(), "{names:?}");
    }
}

#[test]
fn one_sector_is_one_write() {
    let names = Names {
        version: 3,
        backing: 7,
        data_file: 0,
        bitmaps: false,
        unknown: 0,
        mark: b'x',
    };
    let old = cluster_of(&header(names), CLUSTER_BYTES);
    let mut changed = header(names);
    changed.size_bytes = 2 << 20;
    changed.l1_entries = 7;
    let stages = stages(&old, &changed).expect("it fits");
    assert_eq!(stages.len(), 1);
    assert_eq!(
        (stages[0].offset_bytes, stages[0].bytes.len()),
        (0, SECTOR_BYTES)
    );
}

/// Where it finds a feature that it does not know, QEMU reads no further than the place of the LUKS header.
#[test]
fn the_name_of_what_keeps_others_out_stands_before_the_luks_header() {
    let mut header = header(Names {
        version: 3,
        backing: 7,
        data_file: 0,
        bitmaps: true,
        unknown: 0,
        mark: b'x',
    });
    header.crypt_method = CryptMethod::Luks;
    header.set_extension(Extension::CryptoHeader(EncryptionHeaderPointer {
        offset: HostOffset(6 << 16),
        length_bytes: 2 << 20,
    }));
    let kinds = |header: &Header| {
        header
            .extensions
            .iter()
            .map(Extension::kind)
            .collect::<Vec<_>>()
    };
    refresh_feature_names(&mut header);
    let (format, luks, names, bitmaps) = (
        kind::BACKING_FORMAT,
        kind::CRYPTO_HEADER,
        kind::FEATURE_NAMES,
        kind::BITMAPS,
    );
    assert_eq!(kinds(&header), [format, luks, names, bitmaps]);
    header.set_extension(Extension::Unknown {
        kind: kind::WRITE_LOG,
        data: vec![0; 24],
    });
    refresh_feature_names(&mut header);
    let with_log = [format, names, luks, bitmaps, kind::WRITE_LOG];
    assert_eq!(kinds(&header), with_log);
    header.remove_extension(kind::WRITE_LOG);
    refresh_feature_names(&mut header);
    assert_eq!(kinds(&header), [format, luks, names, bitmaps]);
}

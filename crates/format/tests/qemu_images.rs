//! Structures that `qemu-img` 10.0.2 has written (`tests/data`) decode to what was
//! asked of it and encode to the same bytes.

use vellum_format::bitmap::{self, BitmapFlags};
use vellum_format::crypto::CryptMethod;
use vellum_format::extension::{Extension, default_feature_names};
use vellum_format::features::{Autoclear, Compatible, Incompatible};
use vellum_format::header::{self, CompressionType};
use vellum_format::{Header, HostOffset, snapshot};

const HEADERS: [&[u8]; 9] = [
    include_bytes!("data/v2-backing.header"),
    include_bytes!("data/v2-snapshot.header"),
    include_bytes!("data/v3.header"),
    include_bytes!("data/v3-backing.header"),
    include_bytes!("data/v3-bitmaps.header"),
    include_bytes!("data/v3-data-file.header"),
    include_bytes!("data/v3-luks.header"),
    include_bytes!("data/v3-small.header"),
    include_bytes!("data/v3-snapshots.header"),
];

fn decode(bytes: &[u8]) -> Header {
    Header::decode(bytes).expect("a good header")
}

fn without_trailing_zeros(bytes: &[u8]) -> &[u8] {
    let end = bytes
        .iter()
        .rposition(|&byte| byte != 0)
        .map_or(0, |at| at + 1);
    &bytes[..end]
}

#[test]
fn headers_are_rewritten_byte_for_byte() {
    for bytes in HEADERS {
        assert!(header::probe(bytes));
        let encoded = decode(bytes).encode().expect("encodable");
        assert_eq!(
            without_trailing_zeros(&encoded),
            without_trailing_zeros(bytes)
        );
    }
}

#[test]
fn version_2_with_backing_file() {
    let header = decode(HEADERS[0]);
    assert_eq!((header.version, header.header_len_bytes()), (2, 72));
    assert_eq!(header.refcount_order, 4);
    assert_eq!(header.backing_file_text().as_deref(), Some("v3.qcow2"));
    assert_eq!(header.backing_format().as_deref(), Some("qcow2"));
    assert!(header.incompatible.is_empty());
}

#[test]
fn plain_version_3() {
    let header = decode(HEADERS[2]);
    assert_eq!((header.version, header.cluster_bits), (3, 16));
    assert_eq!(header.size_bytes, 1 << 30);
    assert_eq!(header.l1_entries, 2);
    assert_eq!(header.l1_table_offset, HostOffset(0x30000));
    assert_eq!(header.refcount_table_offset, HostOffset(0x10000));
    assert_eq!(
        header.extensions,
        [Extension::FeatureNames(default_feature_names())]
    );
    assert_eq!(header.backing_file, None);
    assert_eq!(header.header_len_bytes(), 112);
}

#[test]
fn external_data_file() {
    let header = decode(HEADERS[5]);
    let expected =
        Incompatible::EXTERNAL_DATA | Incompatible::COMPRESSION | Incompatible::EXTENDED_L2;
    assert_eq!(header.incompatible, expected);
    assert_eq!(header.autoclear, Autoclear::RAW_EXTERNAL_DATA);
    assert_eq!(header.compression_type, CompressionType::Zstd);
    assert_eq!(header.external_data_file(), Some(b"x.raw".as_slice()));
    assert!(header.geometry().external_data && header.geometry().extended_l2);
}

#[test]
fn luks() {
    let header = decode(HEADERS[6]);
    assert_eq!(header.crypt_method, CryptMethod::Luks);
    let pointer = header.encryption_header().expect("a pointer");
    assert!(header.geometry().is_cluster_aligned(pointer.offset.bytes()));
    assert!(pointer.length_bytes > 0);
}

#[test]
fn small_clusters_have_no_feature_names() {
    let header = decode(HEADERS[7]);
    assert_eq!((header.cluster_bits, header.refcount_order), (9, 0));
    assert_eq!(header.compatible, Compatible::LAZY_REFCOUNTS);
    assert_eq!(header.extensions, []);
}

#[test]
fn bitmap_directory() {
    let header = decode(HEADERS[4]);
    let extension = header.bitmaps().expect("bitmaps");
    let directory = include_bytes!("data/v3-bitmaps.directory");
    assert_eq!(extension.directory_size_bytes, directory.len() as u64);
    let geometry = header.geometry();
    let size = header.guest_size_bytes();
    let entries = bitmap::decode_directory(directory, extension.count, &geometry, size)
        .expect("a good directory");
    let names: Vec<_> = entries.iter().map(|entry| entry.name_text()).collect();
    assert_eq!(names, ["first", "second bitmap"]);
    assert_eq!(entries[0].flags, BitmapFlags::AUTO);
    assert_eq!(entries[1].flags, BitmapFlags::default());
    assert_eq!(
        (entries[0].granularity_bits, entries[1].granularity_bits),
        (16, 9)
    );
    let encoded = bitmap::encode_directory(&entries, &geometry, size).expect("encodable");
    assert_eq!(encoded, directory);
}

#[test]
fn bitmaps_count_only_with_their_autoclear_bit() {
    let mut header = decode(HEADERS[4]);
    header.autoclear = header.autoclear.without(Autoclear::BITMAPS);
    assert_eq!(header.bitmaps(), None);
    let again = decode(&header.encode().expect("encodable"));
    assert_eq!(again, header);
}

#[test]
fn snapshot_tables() {
    let tables: [(&[u8], &[&str]); 2] = [
        (include_bytes!("data/v2-snapshot.table"), &["old"]),
        (
            include_bytes!("data/v3-snapshots.table"),
            &["one", "number two"],
        ),
    ];
    for (table, names) in tables {
        let (entries, used) =
            snapshot::decode_table(table, names.len() as u32).expect("a good table");
        assert_eq!(used, table.len());
        assert_eq!(
            entries
                .iter()
                .map(|entry| entry.name_text())
                .collect::<Vec<_>>(),
            names
        );
        for entry in &entries {
            assert_eq!(entry.disk_size_bytes, Some(10 << 20));
            assert_eq!(entry.vm_state_size_bytes, 0);
            assert!(entry.check_l1_table(&decode(HEADERS[8]).geometry()).is_ok());
        }
        assert_eq!(snapshot::encode_table(&entries).expect("encodable"), table);
    }
}

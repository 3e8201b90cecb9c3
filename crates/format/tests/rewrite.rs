//! Rewriting a header: what is unknown stays, what does not fit is refused.

use proptest::prelude::*;
use vellum_format::extension::{Extension, FeatureName, default_feature_names, kind};
use vellum_format::features::{Autoclear, Compatible, Incompatible};
use vellum_format::header::field;
use vellum_format::{FormatErrorKind, Header};

fn plain() -> Header {
    Header::decode(include_bytes!("data/v3.header")).expect("a good header")
}

fn rewritten(header: &Header) -> Header {
    Header::decode(&header.encode().expect("encodable")).expect("decodable")
}

fn unknown(kind: u32, data: &[u8]) -> Extension {
    let data = data.to_vec();
    Extension::Unknown { kind, data }
}

#[test]
fn unknown_extensions_stay() {
    let mut header = plain();
    header.extensions.push(unknown(0x1234_5678, b"seven b"));
    header.extensions.push(unknown(0x1234_5678, b""));
    assert_eq!(rewritten(&header), header);
}

#[test]
fn an_unknown_header_tail_stays() {
    let mut header = plain();
    header.unknown_header_tail = (1..=15).collect();
    assert_eq!(header.header_len_bytes(), 120);
    let bytes = header.encode().expect("encodable");
    assert_eq!(bytes[field::TAIL..120], (1..=15).collect::<Vec<u8>>());
    assert_eq!(rewritten(&header), header);
}

#[test]
fn a_short_header_grows_to_the_known_length() {
    let mut bytes = plain().encode().expect("encodable");
    bytes.drain(104..112);
    bytes[field::HEADER_LENGTH..][..4].copy_from_slice(&104u32.to_be_bytes());
    let header = Header::decode(&bytes).expect("decodable");
    assert_eq!(header, plain());
    assert_eq!(header.header_len_bytes(), 112);
}

#[test]
fn unknown_optional_features_stay() {
    let mut header = plain();
    header.compatible = Compatible(1 << 40);
    header.autoclear = Autoclear(1 << 41);
    assert_eq!(rewritten(&header), header);
    assert_eq!(header.autoclear.unknown(), Autoclear(1 << 41));
}

#[test]
fn extensions_go_where_qemu_puts_them() {
    let mut header = plain();
    header.extensions.push(unknown(7, b"x"));
    header.set_extension(Extension::BackingFormat(b"raw".to_vec()));
    header.set_extension(Extension::ExternalDataFile(b"data".to_vec()));
    header.set_extension(Extension::BackingFormat(b"qcow2".to_vec()));
    let kinds: Vec<_> = header.extensions.iter().map(Extension::kind).collect();
    let expected = [
        kind::BACKING_FORMAT,
        kind::EXTERNAL_DATA_FILE,
        kind::FEATURE_NAMES,
        7,
    ];
    assert_eq!(kinds, expected);
    assert_eq!(header.backing_format().as_deref(), Some("qcow2"));
    header.remove_extension(kind::BACKING_FORMAT);
    assert_eq!(header.backing_format(), None);
}

#[test]
fn what_does_not_fit_the_cluster_is_refused() {
    let mut header = plain();
    header
        .extensions
        .push(unknown(1, &vec![0xff; 65_536 - 512]));
    let error = header.encode().expect_err("too large");
    assert_eq!(error.kind(), FormatErrorKind::NoSpace);
}

#[test]
fn version_2_has_no_place_for_features() {
    let mut header = Header::decode(include_bytes!("data/v2-backing.header")).expect("good");
    header.compatible = Compatible::LAZY_REFCOUNTS;
    assert!(header.encode().is_err());
    header.compatible = Compatible::empty();
    header.refcount_order = 3;
    assert!(header.encode().is_err());
}

#[test]
fn headers_that_nobody_could_open_are_refused() {
    let broken: [fn(&mut Header); 7] = [
        |header| header.l1_entries = 0,
        |header| header.refcount_table_clusters = 0,
        |header| header.cluster_bits = 40,
        |header| header.incompatible = Incompatible(1 << 9),
        |header| header.incompatible = Incompatible::COMPRESSION,
        |header| header.backing_file = Some(vec![b'x'; 1024]),
        |header| header.backing_file = Some(b"a\0b".to_vec()),
    ];
    for change in broken {
        let mut header = plain();
        change(&mut header);
        assert!(header.encode().is_err());
    }
}

#[test]
fn feature_names_are_cut_to_their_field() {
    let name = FeatureName::new(0, 9, &"n".repeat(60));
    assert_eq!(name.text(), "n".repeat(46));
    assert_eq!(default_feature_names().len(), 8);
}

prop_compose! {
    fn any_header()(
        version in 2u32..=3,
        cluster_bits in 9u32..=21,
        size_clusters in 0u64..1000,
        refcount_order in 0u32..=6,
        compatible in any::<u64>(),
        backing_file in prop::option::of(prop::collection::vec(1u8.., 1..100)),
        unknown_data in prop::collection::vec(any::<u8>(), 0..40),
        tail in prop::collection::vec(any::<u8>(), 0..3),
    ) -> Header {
        let mut header = plain();
        header.version = version;
        header.cluster_bits = cluster_bits;
        header.size_bytes = size_clusters << cluster_bits;
        header.l1_entries = 4096;
        header.l1_table_offset.0 = 3 << cluster_bits;
        header.refcount_table_offset.0 = 1 << cluster_bits;
        header.backing_file = backing_file;
        header.extensions = vec![unknown(0xabcd, &unknown_data)];
        if version == 3 {
            header.refcount_order = refcount_order;
            header.compatible = Compatible(compatible);
            // Tails are as long as headers are: up to a multiple of 8.
            header.unknown_header_tail = tail.iter().flat_map(|&byte| [byte; 8]).skip(1).collect();
            if header.unknown_header_tail == [0; 7] {
                header.unknown_header_tail.clear();
            }
        }
        header
    }
}

proptest! {
    #[test]
    fn headers_survive_a_rewrite(header in any_header()) {
        prop_assert_eq!(rewritten(&header), header);
    }
}

use proptest::prelude::*;

use super::*;
use vellum_format::types::HostOffset;

fn codec(extended_l2: bool) -> L2Codec {
    L2Codec::new(Geometry::new(3, 16, extended_l2, 4, false).unwrap())
}

fn bytes_of(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

/// Packs, and checks that everything comes back by every way; the bytes it takes.
fn check(codec: &L2Codec, words: &[u64]) -> usize {
    let bytes = bytes_of(words);
    let Some(packed) = codec.pack(&bytes) else {
        return bytes.len();
    };
    let mut unpacked = vec![0xaa; bytes.len()];
    codec.unpack(&packed, &mut unpacked);
    assert_eq!(unpacked, bytes);
    let view = codec.view(Content::Packed(&packed));
    let raw = codec.view(Content::Raw(&bytes));
    for index in 0..words.len() / codec.columns() {
        assert_eq!(view.entry(index), raw.entry(index), "{index}");
    }
    for index in 0..words.len() / codec.columns() {
        check_continuing(codec, &view, &raw, index, words.len() / codec.columns());
    }
    let first = words.len() / codec.columns() / 3;
    assert!(
        raw.entries(first)
            .zip(view.entries(first))
            .all(|(a, b)| a == b)
    );
    let used = L2Codec::heap_bytes(&packed);
    assert!(used < bytes.len(), "{used} bytes are no gain");
    used
}

/// What is said to continue an entry does, and what follows comes after it.
fn check_continuing(
    codec: &L2Codec,
    view: &SliceView<'_>,
    raw: &SliceView<'_>,
    index: usize,
    count: usize,
) {
    let geometry = &codec.geometry;
    let mut entries = view.entries(index);
    let mapping = entries.next().expect("an entry").decode(geometry);
    let Ok(mapping) = mapping else { return };
    let more = entries.continuing(&mapping).min((count - 1 - index) as u64);
    let behind =
        |host: HostOffset, step| HostOffset(host.bytes() + step * geometry.cluster_size_bytes());
    for step in 1..=more {
        let expected = match mapping {
            Mapping::Data { host, copied } => Mapping::Data {
                host: behind(host, step),
                copied,
            },
            Mapping::Zero { host, copied } => Mapping::Zero {
                host: host.map(|host| behind(host, step)),
                copied,
            },
            mapping => mapping,
        };
        let there = raw.entry(index + step as usize).expect("an entry");
        assert_eq!(there.decode(geometry), Ok(expected), "{index} and {step}");
    }
    entries.skip_continuing(more);
    let next = index + 1 + more as usize;
    if next < count {
        assert_eq!(entries.next(), raw.entry(next), "{index} and {more}");
    }
}

const COPIED: u64 = 1 << 63;

/// Clusters `0..count` of 64 KiB in no order.
fn scattered(count: u64) -> impl Iterator<Item = u64> {
    (1u64..).map(move |index| COPIED | (index * 0x9e37_79b9 % count) << 16)
}

#[test]
fn a_slice_of_zeroes_takes_nothing() {
    assert_eq!(check(&codec(false), &[0; 512]), 0);
}

#[test]
fn what_continues_is_told_and_ends_before_the_flags() {
    let near_the_end = (1 << 56) - (5 << 16);
    let words: Vec<u64> = (0..512).map(|i| near_the_end + (i << 16)).collect();
    check(&codec(false), &words);
    let word = |i: u64| match i {
        0..100 => COPIED | (0x50_0000 + (i << 16)),
        100..200 => 0,
        200..300 => 1,
        300..400 => COPIED | (0x150_0000 + (i << 16)) | 1,
        _ => COPIED | 0x90_0000,
    };
    let words: Vec<u64> = (0..512).map(word).collect();
    let codec = codec(false);
    check(&codec, &words);
    let packed = codec.pack(&bytes_of(&words)).expect("runs");
    let view = codec.view(Content::Packed(&packed));
    let more = [0, 99, 100, 250, 300, 450].map(|index| {
        let mut entries = view.entries(index);
        let mapping = entries.next().expect("an entry").decode(&codec.geometry);
        entries.continuing(&mapping.expect("a sound entry"))
    });
    assert_eq!(more, [99, 0, 99, 49, 99, 0]);
}

#[test]
fn clusters_in_a_row_are_one_run() {
    let words: Vec<u64> = (0..512).map(|i| COPIED | (0x50_0000 + (i << 16))).collect();
    assert_eq!(check(&codec(false), &words), 16);
    let extended: Vec<u64> = words[..256]
        .iter()
        .flat_map(|&word| [word, 0xffff_ffff])
        .collect();
    assert_eq!(check(&codec(true), &extended), 24);
}

#[test]
fn scattered_clusters_take_what_the_image_needs() {
    // 20 GiB: 327,680 clusters, 19 bits.
    let words: Vec<u64> = scattered(327_680).take(512).collect();
    let used = check(&codec(false), &words);
    assert!(used <= 512 * 19 / 8 + 24, "{used}");
    let mut holes = words.clone();
    (0..512).step_by(3).for_each(|index| holes[index] = 0);
    let used = check(&codec(false), &holes);
    assert!(used <= 512 * 19 / 8 + 24, "{used}");
}

#[test]
fn partial_subclusters_are_packed() {
    let words: Vec<u64> = scattered(327_680)
        .take(256)
        .flat_map(|word| [word, word >> 20 & 0xffff_ffff])
        .collect();
    assert!(check(&codec(true), &words) < 4096 * 2 / 3);
}

#[test]
fn compressed_clusters_are_packed() {
    // 30,000 bytes each, 60 sectors; the length lies at bit 54.
    let words: Vec<u64> = (0..512)
        .map(|i| 1 << 62 | (59 + i % 3) << 54 | (0x1_2345_6789 + i * 30_011))
        .collect();
    assert!(check(&codec(false), &words) < 4096 * 45 / 100);
}

fn word() -> impl Strategy<Value = u64> {
    prop_oneof![
        Just(0),
        any::<u64>(),
        Just(1),
        Just(u64::MAX),
        (0..1u64 << 20).prop_map(|cluster| COPIED | cluster << 16),
        (0..1u64 << 20).prop_map(|cluster| cluster << 16 | 1),
        (0..1u64 << 40, 0..256u64).prop_map(|(host, sectors)| 1 << 62 | sectors << 54 | host),
    ]
}

/// Pieces of one kind, as real slices have them.
fn slice() -> impl Strategy<Value = Vec<u64>> {
    let piece = prop_oneof![
        (word(), 1..100usize).prop_map(|(word, len)| vec![word; len]),
        (word(), 1..100u64)
            .prop_map(|(word, len)| (0..len).map(|i| word.wrapping_add(i << 16)).collect()),
        prop::collection::vec(word(), 1..20),
        prop::collection::vec((0..1u64 << 20).prop_map(|c| COPIED | c << 16), 1..200),
    ];
    prop::collection::vec(piece, 1..12).prop_map(|pieces| {
        let mut words = pieces.concat();
        words.resize(512, 0);
        words
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn any_slice_comes_back(words in slice(), extended in any::<bool>(), garbage in any::<bool>()) {
        let mut words = words;
        if garbage {
            words.iter_mut().enumerate().for_each(|(i, word)| *word ^= (i as u64) << 3);
        }
        check(&codec(extended), &words);
    }

    #[test]
    fn any_few_words_come_back(words in prop::collection::vec(word(), 64), extended in any::<bool>(), bits in 9..22u32) {
        let geometry = Geometry::new(3, if extended { bits.max(14) } else { bits }, extended, 4, false).unwrap();
        check(&L2Codec::new(geometry), &words);
    }
}

//! Headers with one fault each are refused in QEMU's words; where `qemu-img` is
//! installed, it is asked too.

use std::process::Command;

use vellum_format::extension::kind;
use vellum_format::header::{Purpose, field};
use vellum_format::{FormatErrorKind, Header};

const V3: &[u8] = include_bytes!("data/v3.header");
const V3_BACKING: &[u8] = include_bytes!("data/v3-backing.header");
const V3_LUKS: &[u8] = include_bytes!("data/v3-luks.header");
const V3_BITMAPS: &[u8] = include_bytes!("data/v3-bitmaps.header");
/// Where the extensions of those headers begin.
const EXTENSIONS: usize = 112;

/// Bytes to put at an offset.
type Patch = (usize, Vec<u8>);

struct Case {
    base: &'static [u8],
    patches: Vec<Patch>,
    message: &'static str,
    /// False for the few that QEMU does not refuse, or refuses later.
    same_in_qemu: bool,
}

fn case(base: &'static [u8], patches: &[Patch], message: &'static str) -> Case {
    Case {
        base,
        patches: patches.to_vec(),
        message,
        same_in_qemu: true,
    }
}

fn ours_only(base: &'static [u8], patches: &[Patch], message: &'static str) -> Case {
    Case {
        same_in_qemu: false,
        ..case(base, patches, message)
    }
}

fn be32(at: usize, value: u32) -> Patch {
    (at, value.to_be_bytes().to_vec())
}

fn be64(at: usize, value: u64) -> Patch {
    (at, value.to_be_bytes().to_vec())
}

fn extension(kind: u32, data: &[u8]) -> Patch {
    let mut bytes = kind.to_be_bytes().to_vec();
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    (EXTENSIONS, bytes)
}

fn fixed_field_cases() -> Vec<Case> {
    vec![
        ours_only(V3, &[be32(0, 0x5146_49fa)], "Image is not in qcow2 format"),
        case(
            V3,
            &[be32(field::VERSION, 4)],
            "Unsupported qcow2 version 4",
        ),
        case(
            V3,
            &[be32(field::CLUSTER_BITS, 8)],
            "Unsupported cluster size: 2^8",
        ),
        case(
            V3,
            &[be32(field::CLUSTER_BITS, 22)],
            "Unsupported cluster size: 2^22",
        ),
        case(
            V3,
            &[be32(field::HEADER_LENGTH, 96)],
            "qcow2 header too short",
        ),
        case(
            V3,
            &[be32(field::HEADER_LENGTH, 65544)],
            "qcow2 header exceeds cluster size",
        ),
        ours_only(
            V3,
            &[be32(field::HEADER_LENGTH, 113)],
            "qcow2 header length is not a multiple of 8",
        ),
        case(
            V3,
            &[be64(field::BACKING_FILE_OFFSET, 65537)],
            "Invalid backing file offset",
        ),
        case(
            V3,
            &[be32(field::REFCOUNT_ORDER, 7)],
            "Reference count entry width too large; may not exceed 64 bits",
        ),
        case(
            V3,
            &[
                be32(field::CLUSTER_BITS, 13),
                be64(field::INCOMPATIBLE_FEATURES, 16),
            ],
            "Unsupported subcluster size: 256",
        ),
        case(
            V3,
            &[be32(field::CRYPT_METHOD, 3)],
            "Unsupported encryption method 3",
        ),
    ]
}

fn table_cases() -> Vec<Case> {
    vec![
        case(
            V3,
            &[be32(field::REFCOUNT_TABLE_CLUSTERS, 0)],
            "Image does not contain a reference count table",
        ),
        case(
            V3,
            &[be32(field::REFCOUNT_TABLE_CLUSTERS, 129)],
            "Reference count table too large",
        ),
        case(
            V3,
            &[be64(field::REFCOUNT_TABLE_OFFSET, 512)],
            "Reference count table offset invalid",
        ),
        case(
            V3,
            &[be32(field::SNAPSHOT_COUNT, 65537)],
            "Snapshot table too large",
        ),
        case(
            V3,
            &[be64(field::SNAPSHOTS_OFFSET, 1)],
            "Snapshot table offset invalid",
        ),
        case(
            V3,
            &[be32(field::L1_SIZE, (4 << 20) + 1)],
            "Active L1 table too large",
        ),
        case(
            V3,
            &[be64(field::L1_TABLE_OFFSET, 1 << 63)],
            "Active L1 table offset invalid",
        ),
        case(
            V3,
            &[be64(field::SIZE, (1 << 30) + 1)],
            "L1 table is too small",
        ),
        case(V3, &[be64(field::SIZE, (1 << 61) - 1)], "Image is too big"),
    ]
}

fn feature_cases() -> Vec<Case> {
    vec![
        case(
            V3,
            &[(field::COMPRESSION_TYPE, vec![2])],
            "qcow2: unknown compression type: 2",
        ),
        case(
            V3,
            &[(field::COMPRESSION_TYPE, vec![1])],
            "qcow2: Compression type incompatible feature bit must be set",
        ),
        case(
            V3,
            &[be64(field::INCOMPATIBLE_FEATURES, 8)],
            "qcow2: Compression type incompatible feature bit must not be set",
        ),
        case(
            V3,
            &[be64(field::INCOMPATIBLE_FEATURES, 0x60)],
            "Unsupported qcow2 feature(s): Unknown incompatible feature: 60",
        ),
        case(
            V3,
            // The first feature name becomes that of bit 5.
            &[
                be64(field::INCOMPATIBLE_FEATURES, 0x60),
                (EXTENSIONS + 9, vec![5]),
            ],
            "Unsupported qcow2 feature(s): dirty bit, Unknown incompatible feature: 40",
        ),
        case(
            V3,
            &[be64(field::AUTOCLEAR_FEATURES, 2)],
            "data-file-raw requires a data file",
        ),
    ]
}

fn extension_cases() -> Vec<Case> {
    let too_long = "Header extension too large";
    vec![
        case(V3, &[be32(EXTENSIONS + 4, 65536)], too_long),
        case(
            V3_BACKING,
            &[be64(field::BACKING_FILE_OFFSET, 116)],
            too_long,
        ),
        case(
            V3,
            &[extension(kind::BACKING_FORMAT, b"sixteen-byte-fmt")],
            "ERROR: ext_backing_format: len=16 too large (>=16)",
        ),
        case(
            V3,
            &[extension(kind::CRYPTO_HEADER, &[0; 16])],
            "CRYPTO header extension only expected with LUKS encryption method",
        ),
        case(
            V3_LUKS,
            &[extension(kind::CRYPTO_HEADER, &[0; 24])],
            "CRYPTO header extension size 24, but expected size 16",
        ),
        case(
            V3_LUKS,
            &[be64(EXTENSIONS + 8, 77)],
            "Encryption header offset '77' is not a multiple of cluster size '65536'",
        ),
        ours_only(
            V3,
            &[be32(field::CRYPT_METHOD, 2)],
            "Missing CRYPTO header for crypt method 2",
        ),
        case(
            V3_BACKING,
            &[be32(field::BACKING_FILE_SIZE, 1024)],
            "Backing file name too long",
        ),
    ]
}

fn bitmap_cases() -> Vec<Case> {
    let data = EXTENSIONS + 8 + 384 + 8;
    vec![
        case(
            V3_BITMAPS,
            &[be32(data, 0)],
            "found bitmaps extension with zero bitmaps",
        ),
        case(
            V3_BITMAPS,
            &[be32(data, 65536)],
            "bitmaps_ext: Image has 65536 bitmaps, exceeding the QEMU supported maximum of 65535",
        ),
        case(
            V3_BITMAPS,
            &[be32(data + 4, 1)],
            "bitmaps_ext: Reserved field is not zero",
        ),
        case(
            V3_BITMAPS,
            &[be64(data + 8, 67_107_841)],
            "bitmaps_ext: bitmap directory size (67107841) exceeds the maximum supported size \
             (67107840)",
        ),
        case(
            V3_BITMAPS,
            &[be64(data + 16, 8)],
            "bitmaps_ext: invalid bitmap directory offset",
        ),
        case(
            V3_BITMAPS,
            &[be32(data - 4, 16)],
            "bitmaps_ext: Invalid extension length",
        ),
    ]
}

fn cases() -> Vec<Case> {
    [
        fixed_field_cases(),
        table_cases(),
        feature_cases(),
        extension_cases(),
        bitmap_cases(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn patched(case: &Case) -> Vec<u8> {
    let mut image = case.base.to_vec();
    image.resize(1 << 20, 0);
    for (at, bytes) in &case.patches {
        image[*at..at + bytes.len()].copy_from_slice(bytes);
    }
    image
}

#[test]
fn faults_are_named_in_qemus_words() {
    for case in cases() {
        let error = Header::decode(&patched(&case)).expect_err(case.message);
        assert_eq!(error.to_string(), case.message);
        assert!(!error.structure().is_empty() && !error.field().is_empty());
    }
}

#[test]
fn qemu_says_the_same() {
    if Command::new("qemu-img").arg("--version").output().is_err() {
        eprintln!("qemu-img is not installed: nobody to ask");
        return;
    }
    let path = std::env::temp_dir().join(format!("vellum-words-{}.qcow2", std::process::id()));
    for case in cases().iter().filter(|case| case.same_in_qemu) {
        std::fs::write(&path, patched(case)).expect("write the image");
        let output = Command::new("qemu-img")
            .args(["map", "-f", "qcow2"])
            .arg(&path)
            .output()
            .expect("run qemu-img");
        let words = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(words.contains(case.message), "{} != {words}", case.message);
    }
    std::fs::remove_file(&path).expect("remove the image");
}

#[test]
fn a_check_tolerates_what_it_can_report() {
    let mut image = V3.to_vec();
    image[field::REFCOUNT_TABLE_CLUSTERS..][..4].fill(0);
    image[field::SNAPSHOTS_OFFSET..][..8].fill(1);
    assert!(Header::decode(&image).is_err());
    let header = Header::decode_for(&image, Purpose::Check).expect("checkable");
    assert_eq!(header.refcount_table_clusters, 0);
}

#[test]
fn kinds_tell_foreign_files_from_broken_images() {
    let kind = |bytes: &[u8]| Header::decode(bytes).expect_err("bad header").kind();
    assert_eq!(kind(b""), FormatErrorKind::NotQcow2);
    assert_eq!(kind(b"QFI\xfb\0\0\0\x09"), FormatErrorKind::Unsupported);
    assert_eq!(kind(b"QFI\xfb\0\0\0\x03"), FormatErrorKind::Invalid);
}

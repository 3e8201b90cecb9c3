//! Images that we create, as QEMU sees them.

use std::path::Path;

use crate::common::{open, qemu, qemu_ok, qemu_verdict, vellum_verdict};
use vellum::Preallocation;
use vellum::qcow2::create::{CreateOptions, create};
use vellum_format::header::CompressionType;
use vellum_io::lane;
use vellum_storage::file::Create;

const MIB: u64 = 1 << 20;

fn make(dir: &Path, name: &str, options: &CreateOptions) {
    let storage = open(&dir.join(name), Create::Truncate);
    let data = options
        .data_file
        .as_ref()
        .map(|name| open(&dir.join(name), Create::Truncate));
    lane::block_on(create(storage, data, options)).expect("valid options");
}

/// The options as `qemu-img create -o` takes them.
fn as_text(options: &CreateOptions) -> String {
    let on = |set: bool| if set { "on" } else { "off" };
    let mut text = format!(
        "compat={},cluster_size={},refcount_bits={},extended_l2={},lazy_refcounts={},\
         compression_type={},preallocation={},data_file_raw={}",
        if options.version == 2 { "0.10" } else { "1.1" },
        options.cluster_size_bytes,
        options.refcount_bits,
        on(options.extended_l2),
        on(options.lazy_refcounts),
        options.compression_type.name(),
        options.preallocation.name(),
        on(options.data_file_raw),
    );
    let named = [
        ("backing_file", &options.backing_file),
        ("backing_fmt", &options.backing_format),
        ("data_file", &options.data_file),
    ];
    for (key, value) in named {
        if let Some(value) = value {
            text += &format!(",{key}={value}");
        }
    }
    text
}

/// What `qemu-img info` says, without what differs from file to file.
fn info(dir: &Path, name: &str) -> String {
    qemu_ok("qemu-img", dir, &["info", "--output=json", name])
        .lines()
        .filter(|line| !line.contains("filename") && !line.contains("actual-size"))
        .filter(|line| !line.contains("\"length\""))
        .collect::<Vec<_>>()
        .join("\n")
}

/// The default options with a size, changed.
fn with(size_bytes: u64, change: impl FnOnce(&mut CreateOptions)) -> CreateOptions {
    let mut options = CreateOptions::default().size_bytes(size_bytes);
    change(&mut options);
    options
}

fn set_backing(options: &mut CreateOptions) {
    options.backing_file = Some("base.raw".into());
    options.backing_format = Some("raw".into());
}

fn set_data_file(options: &mut CreateOptions) {
    options.data_file = Some("data.raw".into());
}

fn cases() -> Vec<CreateOptions> {
    let size = 64 * MIB;
    let mut cases = vec![
        with(size, |_| ()),
        with(0, |_| ()),
        with(1000, |_| ()),
        with(size, |o| o.version = 2),
        with(size, |o| o.lazy_refcounts = true),
        with(size, |o| o.compression_type = CompressionType::Zstd),
        with(size, |o| o.extended_l2 = true),
        with(size, |o| {
            (o.extended_l2, o.cluster_size_bytes) = (true, 16384)
        }),
        with(size, set_backing),
        with(size, |o| {
            o.version = 2;
            set_backing(o);
        }),
        with(size, set_data_file),
        with(size, |o| {
            o.data_file_raw = true;
            set_data_file(o);
        }),
    ];
    cases.extend((9..=21).map(|bits| with(size, |o| o.cluster_size_bytes = 1 << bits)));
    cases.extend((0..=6).map(|order| with(size, |o| o.refcount_bits = 1 << order)));
    cases.extend(preallocated_cases());
    cases
}

fn preallocated_cases() -> Vec<CreateOptions> {
    let modes = [
        Preallocation::Metadata,
        Preallocation::Falloc,
        Preallocation::Full,
    ];
    let of_mode = |preallocation| {
        let size = 8 * MIB;
        let mut cases = vec![
            with(size, |_| ()),
            with(size - 1536, |_| ()),
            with(size, |o| o.extended_l2 = true),
            with(size, |o| o.cluster_size_bytes = 2 * MIB),
            with(size, set_data_file),
            with(size, |o| {
                o.extended_l2 = true;
                set_backing(o);
            }),
        ];
        for options in &mut cases {
            options.preallocation = preallocation;
        }
        cases
    };
    modes.into_iter().flat_map(of_mode).collect()
}

#[test]
fn images_are_what_qemu_makes() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let dir = dir.path();
    qemu_ok("qemu-img", dir, &["create", "-f", "raw", "base.raw", "8M"]);
    for options in cases() {
        let text = as_text(&options);
        let size = options.size_bytes.to_string();
        let args = [
            "create",
            "-q",
            "-f",
            "qcow2",
            "-o",
            &text,
            "theirs.qcow2",
            &size,
        ];
        qemu_ok("qemu-img", dir, &args);
        let length = |name: &str| dir.join(name).metadata().expect("just made").len();
        let data_length = options.data_file.as_ref().map(|name| length(name));
        make(dir, "ours.qcow2", &options);

        assert_eq!(info(dir, "ours.qcow2"), info(dir, "theirs.qcow2"), "{text}");
        assert_eq!(length("ours.qcow2"), length("theirs.qcow2"), "{text}");
        assert_eq!(
            options.data_file.as_ref().map(|name| length(name)),
            data_length,
            "{text}"
        );
        let verdict = qemu_verdict(&dir.join("ours.qcow2"));
        assert_eq!(
            (verdict.exit_code, &verdict.messages[..]),
            (0, &[][..]),
            "{text}"
        );
        assert_eq!(verdict, vellum_verdict(&dir.join("ours.qcow2")), "{text}");
    }
}

#[test]
fn small_clusters_with_large_refcount_structures_are_consistent() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    for refcount_bits in [1, 16, 64] {
        let options = CreateOptions::default()
            .size_bytes(200 * MIB)
            .cluster_size_bytes(512)
            .refcount_bits(refcount_bits)
            .preallocation(Preallocation::Metadata);
        make(dir.path(), "image", &options);
        assert_eq!(
            qemu_verdict(&dir.path().join("image")).exit_code,
            0,
            "{refcount_bits}"
        );
    }
}

#[test]
fn qemu_can_use_what_we_make() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    for options in cases()
        .into_iter()
        .filter(|options| options.size_bytes >= MIB)
    {
        qemu_ok(
            "qemu-img",
            dir.path(),
            &["create", "-f", "raw", "base.raw", "64M"],
        );
        make(dir.path(), "image", &options);
        let write = [
            "-f",
            "qcow2",
            "-c",
            "write -P 7 1000k 50k",
            "-c",
            "read -P 7 1000k 50k",
            "image",
        ];
        let text = qemu_ok("qemu-io", dir.path(), &write);
        assert!(!text.contains("failed"), "{text}");
        assert_eq!(
            qemu_verdict(&dir.path().join("image")).exit_code,
            0,
            "{options:?}"
        );
    }
}

#[test]
fn invalid_options_are_refused_as_by_qemu() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let changes: &[fn(&mut CreateOptions)] = &[
        |o| o.cluster_size_bytes = 256,
        |o| o.cluster_size_bytes = 4 * MIB,
        |o| (o.version, o.extended_l2) = (2, true),
        |o| (o.extended_l2, o.cluster_size_bytes) = (true, 8192),
        |o| o.refcount_bits = 3,
        |o| o.refcount_bits = 128,
        |o| (o.version, o.refcount_bits) = (2, 8),
        |o| (o.version, o.lazy_refcounts) = (2, true),
        |o| (o.version, o.data_file) = (2, Some("data".into())),
        |o| (o.version, o.compression_type) = (2, CompressionType::Zstd),
        |o| o.data_file_raw = true,
        |o| o.backing_format = Some("raw".into()),
        |o| (o.cluster_size_bytes, o.size_bytes) = (512, 1 << 40),
    ];
    for options in changes.iter().map(|change| with(MIB, change)) {
        let text = as_text(&options);
        let size = options.size_bytes.to_string();
        let args = [
            "create",
            "-q",
            "-f",
            "qcow2",
            "-o",
            &text,
            "theirs.qcow2",
            &size,
        ];
        let theirs = qemu("qemu-img", dir.path(), &args).stderr;
        let ours = options
            .validate()
            .expect_err("QEMU refuses it")
            .message()
            .to_owned();
        let theirs = String::from_utf8_lossy(&theirs);
        assert_eq!(
            theirs.trim_end(),
            format!("qemu-img: theirs.qcow2: {ours}"),
            "{text}"
        );
    }
}

//! Images that we create, as QEMU sees them.

mod common;

use std::path::Path;

use common::{open, qemu, qemu_ok, qemu_verdict, vellum_verdict};
use vellum::qcow2::create::{CreateOptions, Preallocation, create};
use vellum_format::header::CompressionType;
use vellum_storage::file::Create;
use vellum_storage::lane;

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

fn cases() -> Vec<CreateOptions> {
    let base = CreateOptions {
        size_bytes: 64 * MIB,
        ..CreateOptions::default()
    };
    let some = |text: &str| Some(text.to_owned());
    let mut cases = vec![
        base.clone(),
        CreateOptions {
            size_bytes: 0,
            ..base.clone()
        },
        CreateOptions {
            size_bytes: 1000,
            ..base.clone()
        },
        CreateOptions {
            version: 2,
            ..base.clone()
        },
        CreateOptions {
            lazy_refcounts: true,
            ..base.clone()
        },
        CreateOptions {
            compression_type: CompressionType::Zstd,
            ..base.clone()
        },
        CreateOptions {
            extended_l2: true,
            ..base.clone()
        },
        CreateOptions {
            extended_l2: true,
            cluster_size_bytes: 16384,
            ..base.clone()
        },
        CreateOptions {
            backing_file: some("base.raw"),
            backing_format: some("raw"),
            ..base.clone()
        },
        CreateOptions {
            backing_file: some("base.raw"),
            backing_format: some("raw"),
            version: 2,
            ..base.clone()
        },
        CreateOptions {
            data_file: some("data.raw"),
            ..base.clone()
        },
        CreateOptions {
            data_file: some("data.raw"),
            data_file_raw: true,
            ..base.clone()
        },
    ];
    for bits in 9..=21 {
        cases.push(CreateOptions {
            cluster_size_bytes: 1 << bits,
            ..base.clone()
        });
    }
    for order in 0..=6 {
        cases.push(CreateOptions {
            refcount_bits: 1 << order,
            ..base.clone()
        });
    }
    for preallocation in [
        Preallocation::Metadata,
        Preallocation::Falloc,
        Preallocation::Full,
    ] {
        let base = CreateOptions {
            preallocation,
            size_bytes: 8 * MIB,
            ..base.clone()
        };
        cases.push(base.clone());
        cases.push(CreateOptions {
            size_bytes: 8 * MIB - 1536,
            ..base.clone()
        });
        cases.push(CreateOptions {
            extended_l2: true,
            ..base.clone()
        });
        cases.push(CreateOptions {
            cluster_size_bytes: 2 * MIB,
            ..base.clone()
        });
        cases.push(CreateOptions {
            data_file: some("data.raw"),
            ..base.clone()
        });
        cases.push(CreateOptions {
            backing_file: some("base.raw"),
            backing_format: some("raw"),
            extended_l2: true,
            ..base
        });
    }
    cases
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
        let options = CreateOptions {
            size_bytes: 200 * MIB,
            cluster_size_bytes: 512,
            refcount_bits,
            preallocation: Preallocation::Metadata,
            ..CreateOptions::default()
        };
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
    let base = CreateOptions {
        size_bytes: MIB,
        ..CreateOptions::default()
    };
    let some = |text: &str| Some(text.to_owned());
    let cases = [
        CreateOptions {
            cluster_size_bytes: 256,
            ..base.clone()
        },
        CreateOptions {
            cluster_size_bytes: 4 * MIB,
            ..base.clone()
        },
        CreateOptions {
            version: 2,
            extended_l2: true,
            ..base.clone()
        },
        CreateOptions {
            extended_l2: true,
            cluster_size_bytes: 8192,
            ..base.clone()
        },
        CreateOptions {
            refcount_bits: 3,
            ..base.clone()
        },
        CreateOptions {
            refcount_bits: 128,
            ..base.clone()
        },
        CreateOptions {
            version: 2,
            refcount_bits: 8,
            ..base.clone()
        },
        CreateOptions {
            version: 2,
            lazy_refcounts: true,
            ..base.clone()
        },
        CreateOptions {
            version: 2,
            data_file: some("data"),
            ..base.clone()
        },
        CreateOptions {
            version: 2,
            compression_type: CompressionType::Zstd,
            ..base.clone()
        },
        CreateOptions {
            data_file_raw: true,
            ..base.clone()
        },
        CreateOptions {
            backing_format: some("raw"),
            ..base.clone()
        },
        CreateOptions {
            cluster_size_bytes: 512,
            size_bytes: 1 << 40,
            ..base
        },
    ];
    for options in cases {
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

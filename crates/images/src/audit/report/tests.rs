use std::path::Path;
use std::sync::Arc;

use vellum::qcow2::create::{CreateOptions, create};
use vellum_format::header::field;
use vellum_io::lane;
use vellum_storage::MemStorage;

use crate::audit::Form;

use super::*;

fn qcow2(options: CreateOptions) -> Vec<u8> {
    let storage = Arc::new(MemStorage::new());
    let options = options.size_bytes(1 << 20);
    let made = lane::block_on(create(storage.clone(), None, &options));
    made.expect("an image");
    storage.snapshot()
}

fn plain() -> Vec<u8> {
    qcow2(CreateOptions::default())
}

fn with_backing(name: &str, format: Option<&str>) -> Vec<u8> {
    qcow2(
        CreateOptions::default()
            .backing_file(Some(name.to_owned()))
            .backing_format(format.map(str::to_owned)),
    )
}

fn look(bytes: Vec<u8>, policy: &Policy) -> Report {
    let storage = Arc::new(MemStorage::with_bytes(bytes));
    lane::block_on(audit(storage, policy)).expect("memory can be read")
}

/// The codes of what speaks against an image.
#[track_caller]
fn reasons(bytes: Vec<u8>, policy: &Policy) -> Vec<&'static str> {
    let report = look(bytes, policy);
    let rejects = report.findings.iter().filter(|f| f.level == Level::Reject);
    let mut codes: Vec<_> = rejects.map(|finding| finding.code).collect();
    assert_eq!(report.is_safe(), codes.is_empty());
    codes.dedup();
    codes
}

fn allowing() -> Policy {
    Policy {
        allow_backing: true,
        allow_data_file: true,
        ..Policy::default()
    }
}

#[test]
fn a_plain_image_is_safe() {
    let report = look(plain(), &Policy::default());
    assert!(report.is_safe(), "{report:?}");
    assert_eq!(report.format, "qcow2");
    assert_eq!(report.checked, Some(Checked::default()));
    assert!(report.references.is_empty());
}

#[test]
fn raw_bytes_are_safe_with_a_word_of_advice() {
    let report = look(vec![7; 4096], &Policy::default());
    assert!(report.is_safe());
    assert_eq!(report.findings[0].code, "raw-without-format");
    let declared = Policy {
        format: Some("raw".into()),
        ..Policy::default()
    };
    assert!(look(vec![7; 4096], &declared).findings.is_empty());
    assert!(look(Vec::new(), &declared).is_safe(), "an empty file");
}

#[test]
fn a_backing_file_needs_leave_and_a_format() {
    let image = || with_backing("/etc/shadow", Some("raw"));
    assert_eq!(reasons(image(), &Policy::default()), ["backing-file"]);
    assert_eq!(reasons(image(), &allowing()), [""; 0]);
    let unnamed = with_backing("base", None);
    assert_eq!(reasons(unnamed, &allowing()), ["backing-format"]);
}

#[test]
fn protocols_and_descriptions_need_leave_of_their_own() {
    for name in [
        "nbd://host/x",
        "json:{\"driver\":\"raw\",\"file\":{\"driver\":\"host_device\",\"filename\":\"/dev/sda\"}}",
        "json:not JSON at all",
        "ssh://host/x",
        "rbd:pool/image:conf=/etc/ceph.conf",
        "fat:/",
    ] {
        let image = || with_backing(name, Some("raw"));
        assert_eq!(reasons(image(), &allowing()), ["backing-file"], "{name}");
        let policy = Policy {
            allow_protocols: true,
            ..allowing()
        };
        assert_eq!(reasons(image(), &policy), [""; 0], "{name}");
    }
    let report = look(
        with_backing("json:{\"file\":{\"filename\":\"/dev/sda\"}}", Some("raw")),
        &Policy::default(),
    );
    assert_eq!(
        report.references[0].form,
        Form::Json(vec!["/dev/sda".to_owned()])
    );
}

#[test]
fn a_folder_confines_also_through_links() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("images");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("base"), b"x").unwrap();
    std::fs::write(root.path().join("secret"), b"x").unwrap();
    std::os::unix::fs::symlink("../secret", folder.join("innocent")).unwrap();
    let judge = |name: &Path| {
        let policy = Policy {
            within: Some(folder.clone()),
            ..allowing()
        };
        reasons(with_backing(name.to_str().unwrap(), Some("raw")), &policy)
    };
    assert_eq!(judge(&folder.join("base")), [""; 0]);
    assert_eq!(judge(&folder.join("innocent")), ["backing-file"]);
    assert_eq!(judge(&folder.join("../secret")), ["backing-file"]);
    assert_eq!(judge(&folder.join("missing")), ["backing-file"]);
    assert_eq!(judge(Path::new("/etc/passwd")), ["backing-file"]);
}

/// CVE-2024-32498: the guest's data lies in another file, here one of the host's.
#[test]
fn an_external_data_file_needs_leave() {
    let image = || {
        let mut bytes = plain();
        // The incompatible bit, and the name as a header extension.
        bytes[field::INCOMPATIBLE_FEATURES + 7] |= 4;
        let at = 112;
        let name = b"/etc/passwd";
        let mut extension = 0x4441_5441_u32.to_be_bytes().to_vec();
        extension.extend((name.len() as u32).to_be_bytes());
        extension.extend(name);
        extension.resize(extension.len().next_multiple_of(8) + 8, 0);
        bytes[at..at + extension.len()].copy_from_slice(&extension);
        bytes
    };
    assert_eq!(reasons(image(), &Policy::default()), ["data-file"]);
    let report = look(image(), &Policy::default());
    assert_eq!(report.references[0].name, "/etc/passwd");
    assert!(report.references[0].in_effect);
    assert_eq!(reasons(image(), &allowing()), [""; 0]);
    let mut sleeping = image();
    sleeping[field::INCOMPATIBLE_FEATURES + 7] &= !4;
    assert_eq!(reasons(sleeping, &Policy::default()), ["data-file"]);
    let mut unnamed = plain();
    unnamed[field::INCOMPATIBLE_FEATURES + 7] |= 4;
    assert_eq!(reasons(unnamed, &Policy::default()), ["data-file"]);
}

/// CVE-2026-27211: a guest writes a qcow2 header with a backing file into its raw disk.
#[test]
fn a_raw_disk_that_carries_a_header_is_rejected() {
    let mut disk = with_backing("/etc/shadow", Some("raw"));
    disk.resize(1 << 20, 0xa5);
    let declared = Policy {
        format: Some("raw".into()),
        ..allowing()
    };
    assert_eq!(reasons(disk.clone(), &declared), ["format-mismatch"]);
    let report = look(disk.clone(), &declared);
    assert_eq!(report.references[0].name, "/etc/shadow", "still told");
    let probed = reasons(disk, &Policy::default());
    assert!(probed.contains(&"backing-file"), "{probed:?}");
}

#[test]
fn two_formats_in_one_file_are_one_too_many() {
    let mut footer = plain();
    let end = footer.len().next_multiple_of(512);
    footer.resize(end + 512, 0);
    footer[end..end + 8].copy_from_slice(b"conectix");
    assert_eq!(reasons(footer, &Policy::default()), ["polyglot"]);
    for (at, mark) in [
        (510, &b"\x55\xaa"[..]),
        (512, b"EFI PART"),
        (0x8001, b"CD001"),
    ] {
        let mut image = plain();
        image[at..at + mark.len()].copy_from_slice(mark);
        assert_eq!(reasons(image, &Policy::default()), ["polyglot"], "{at:#x}");
    }
    let mut disk = vec![0; 1 << 16];
    disk[510..512].copy_from_slice(b"\x55\xaa");
    disk[0x8001..0x8006].copy_from_slice(b"CD001");
    assert_eq!(reasons(disk.clone(), &Policy::default()), [""; 0], "a disk");
    disk[64..68].copy_from_slice(b"\x7f\x10\xda\xbe");
    assert_eq!(
        reasons(disk, &Policy::default()),
        ["unsupported-format", "polyglot"]
    );
}

#[test]
fn formats_of_other_programs_are_told_with_what_they_name() {
    let descriptor = b"# x\nversion=1\nRW 2048 FLAT \"/etc/passwd\" 0\n".to_vec();
    let report = look(descriptor, &Policy::default());
    assert_eq!(report.format, "vmdk");
    let codes: Vec<_> = report.findings.iter().map(|f| f.code).collect();
    // It is no whole descriptor either.
    assert_eq!(codes, ["extent", "inconsistent"]);
    let mut sparse = vec![0; 1 << 16];
    sparse[..4].copy_from_slice(b"KDMV");
    sparse[28] = 1;
    sparse[36] = 1;
    let text = b"RW 1 FLAT \"/dev/sda\"\nparentFileNameHint=\"/x\"";
    sparse[512..512 + text.len()].copy_from_slice(text);
    let report = look(sparse, &Policy::default());
    let names: Vec<_> = report.references.iter().map(|r| r.name.as_str()).collect();
    assert_eq!(names, ["/dev/sda", "/x"]);
    let mut qcow = b"QFI\xfb\0\0\0\x01".to_vec();
    qcow.extend(48_u64.to_be_bytes());
    qcow.extend(4_u32.to_be_bytes());
    qcow.resize(48, 0);
    qcow.extend(b"/etc");
    let report = look(qcow, &Policy::default());
    assert_eq!(report.references[0].name, "/etc");
    let mut qed = b"QED\0".to_vec();
    qed.resize(64, 0);
    (qed[16], qed[56], qed[60]) = (1, 64, 5);
    qed.extend(b"/back");
    assert_eq!(look(qed, &Policy::default()).references[0].name, "/back");
    let mut vhd = b"conectix".to_vec();
    vhd.resize(2048, 0);
    (vhd[22], vhd[63]) = (2, 4);
    vhd[512 + 64..512 + 68].copy_from_slice(b"\0/\0p");
    assert_eq!(look(vhd, &Policy::default()).references[0].name, "/p");
}

#[test]
fn images_of_other_programs_are_checked() {
    use vellum_foreign::vdi;

    let file = Arc::new(MemStorage::new());
    let storage: Arc<dyn vellum::Storage> = file.clone();
    let options = vdi::CreateOptions::default()
        .size_bytes(4 << 20)
        .is_static(true);
    lane::block_on(vdi::create(&storage, &options)).expect("an image");
    let bytes = file.snapshot();
    let report = look(bytes.clone(), &Policy::default());
    assert!(report.is_safe(), "{report:?}");
    assert_eq!(report.checked, Some(Checked::default()));
    let small = Policy {
        max_size_bytes: Some(1 << 20),
        ..Policy::default()
    };
    assert_eq!(reasons(bytes.clone(), &small), ["virtual-size"]);
    let hasty = Policy {
        max_time: Duration::ZERO,
        ..Policy::default()
    };
    assert_eq!(reasons(bytes.clone(), &hasty), ["time-limit"]);
    let mut twice = bytes;
    let map = u32::from_le_bytes(twice[0x154..0x158].try_into().unwrap()) as usize;
    twice.copy_within(map..map + 4, map + 4);
    assert_eq!(reasons(twice, &Policy::default()), ["inconsistent"]);
}

/// The file that holds a sparse VMDK names itself, by a name that it had.
#[test]
fn a_sparse_vmdk_names_no_other_file() {
    use vellum_foreign::vmdk;

    let file = Arc::new(MemStorage::new());
    let storage: Arc<dyn vellum::Storage> = file.clone();
    let options = vmdk::CreateOptions::default().size_bytes(4 << 20);
    let made = vmdk::create(&storage, &[], &options);
    lane::block_on(made).expect("an image");
    let bytes = file.snapshot();
    let report = look(bytes.clone(), &Policy::default());
    assert!(
        report.is_safe() && report.references.is_empty(),
        "{report:?}"
    );
    let at = bytes
        .windows(10)
        .position(|bytes| bytes.starts_with(b"RW 8192 "))
        .expect("a line");
    let mut other = bytes;
    let line = b"RW 8192 SPARSE \"/x\"\n#";
    other[at..at + line.len()].copy_from_slice(line);
    assert_eq!(reasons(other, &Policy::default()), ["extent"]);
}

#[test]
fn what_contradicts_itself_is_rejected() {
    let mut marked = plain();
    marked[field::INCOMPATIBLE_FEATURES + 7] |= 2;
    assert_eq!(reasons(marked, &Policy::default()), ["corrupt"]);
    let mut unknown = plain();
    unknown[field::INCOMPATIBLE_FEATURES] |= 0x80;
    assert_eq!(reasons(unknown, &Policy::default()), ["header"]);
    let mut mapped = plain();
    let l1 = u64::from_be_bytes(mapped[field::L1_TABLE_OFFSET..][..8].try_into().unwrap());
    let entry = (1_u64 << 63 | 0x40_0000).to_be_bytes();
    mapped[l1 as usize..l1 as usize + 8].copy_from_slice(&entry);
    let found = reasons(mapped, &Policy::default());
    assert_eq!(found, ["cut-short", "inconsistent"]);
    let mut snapshots = plain();
    snapshots[field::SNAPSHOT_COUNT + 3] = 1;
    snapshots[field::SNAPSHOTS_OFFSET + 6] = 2;
    let found = reasons(snapshots, &Policy::default());
    assert!(!found.is_empty(), "a snapshot table that is none");
}

#[test]
fn limits_are_kept() {
    let small = Policy {
        max_size_bytes: Some(1 << 19),
        ..Policy::default()
    };
    assert_eq!(reasons(plain(), &small), ["virtual-size"]);
    assert_eq!(reasons(vec![0; 1 << 20], &small), ["virtual-size"]);
    let poor = Policy {
        max_memory_bytes: 10,
        ..Policy::default()
    };
    assert_eq!(reasons(plain(), &poor), ["memory-limit"]);
    let hasty = Policy {
        max_time: Duration::ZERO,
        ..Policy::default()
    };
    assert_eq!(reasons(plain(), &hasty), ["time-limit"]);
}

/// Both kinds of other files, by the gate that an embedder has without saying more.
#[test]
fn a_gate_that_denies_all_opens_nothing() {
    use vellum::ErrorKind;
    use vellum::gate::DenyAll;
    use vellum::qcow2::{OpenOptions, Qcow2};

    let folder = tempfile::tempdir().expect("a folder");
    let other = folder.path().join("other");
    std::fs::write(&other, [1; 512]).expect("a file that could be opened");
    let name = other.display().to_string();
    let external = Arc::new(MemStorage::new());
    let options = CreateOptions::default()
        .size_bytes(1 << 20)
        .data_file(Some(name.clone()));
    let data: Arc<dyn vellum::Storage> = Arc::new(MemStorage::new());
    let made = lane::block_on(create(external.clone(), Some(data), &options));
    made.expect("an image");
    for bytes in [with_backing(&name, Some("raw")), external.snapshot()] {
        let storage = Arc::new(MemStorage::with_bytes(bytes));
        let gate = Arc::new(DenyAll);
        let opened = lane::block_on(Qcow2::open(storage, gate, OpenOptions::default()));
        assert_eq!(opened.unwrap_err().kind(), ErrorKind::Denied);
    }
}

#[test]
fn what_would_be_allowed_is_named() {
    let permissions = |bytes, policy: &Policy| -> Vec<_> {
        let report = look(bytes, policy);
        let rejects = report.findings.iter().filter(|f| f.level == Level::Reject);
        rejects.map(|finding| finding.permission).collect()
    };
    let default = Policy::default();
    let named = with_backing("base", Some("raw"));
    assert_eq!(
        permissions(named.clone(), &default),
        [Some(Permission::Backing)]
    );
    let within = Policy {
        within: Some("/proc/self".into()),
        ..allowing()
    };
    assert_eq!(permissions(named, &within), [Some(Permission::Folder)]);
    let remote = with_backing("nbd://host/x", Some("raw"));
    assert_eq!(
        permissions(remote, &allowing()),
        [Some(Permission::Protocols)]
    );
    let small = Policy {
        max_size_bytes: Some(512),
        max_memory_bytes: 1,
        ..Policy::default()
    };
    let limits = [Some(Permission::Size), Some(Permission::Memory)];
    assert_eq!(permissions(plain(), &small), limits);
}

#[test]
fn what_is_no_disk_is_told() {
    let warnings = |bytes: &[u8]| -> Vec<_> {
        let report = look(bytes.to_vec(), &Policy::default());
        assert!(report.is_safe());
        let warnings = report
            .findings
            .into_iter()
            .filter(|f| f.level == Level::Warning);
        warnings.map(|finding| finding.code).collect()
    };
    assert_eq!(warnings(b""), ["empty"]);
    for start in [
        &b"\x1f\x8b\x08\0more"[..],
        b"\xfd7zXZ\0",
        b"PK\x03\x04",
        b"\x7fELF\x02",
        b"%PDF-1.7",
    ] {
        assert_eq!(warnings(start), ["not-a-disk"], "{start:?}");
    }
    let mut tar = vec![0; 1024];
    tar[257..262].copy_from_slice(b"ustar");
    assert_eq!(warnings(&tar), ["not-a-disk"]);
    // A disk may begin with a program for whoever runs it: its partition table tells.
    let mut disk = vec![0; 1024];
    disk[..4].copy_from_slice(b"MZ\x90\0");
    assert_eq!(warnings(&disk), ["not-a-disk"]);
    disk[510..512].copy_from_slice(b"\x55\xaa");
    assert!(warnings(&disk).is_empty());
    assert!(warnings(&vec![0; 1024]).is_empty());
}

#[test]
fn a_vhdx_with_a_log_that_waits_is_rejected_with_what_to_do() {
    use vellum::BlockDevice;
    use vellum_foreign::vhdx;

    let bytes = lane::block_on(async {
        let storage = Arc::new(MemStorage::new());
        let file: Arc<dyn vellum::Storage> = storage.clone();
        let options = vhdx::CreateOptions::default().size_bytes(16 << 20);
        vhdx::create(&file, &options).await.unwrap();
        let device = vhdx::open(file, None, vhdx::OpenOptions::default());
        let device = device.await.unwrap();
        let bytes = vellum::Buffer::copy_of(&[7; 4096]);
        device.write(0, bytes, Default::default()).await.unwrap();
        device.flush().await.unwrap();
        // It was not closed.
        storage.snapshot()
    });
    let report = look(bytes.clone(), &Policy::default());
    assert!(
        report
            .findings
            .iter()
            .any(|finding| finding.message.contains("check -r all"))
    );
    assert_eq!(reasons(bytes, &Policy::default()), ["log"]);
}

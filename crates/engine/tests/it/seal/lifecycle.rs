//! What a sealed image allows, how a seal goes, and what a crash leaves.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{Either, select};
use vellum::qcow2::check::{CheckOptions, Fix, check, repair};
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::seal::{SealInfo, SealOptions, VerifyOptions, VerifyReads, unseal};
use vellum::qcow2::{OpenOptions, Qcow2, read_header};
use vellum::{BlockDevice, Buffer, Buffers, ErrorKind, RequestFlags, Storage};
use vellum_format::features::Autoclear;
use vellum_io::lane;
use vellum_storage::MemStorage;
use vellum_storage::file::Create;

use crate::common::open;
use crate::seal::disk::{Disk, Kind};

fn storage(disk: &Disk) -> Arc<dyn Storage> {
    disk.file.clone()
}

#[test]
fn a_sealed_image_is_sound_and_is_not_written() {
    lane::block_on(async {
        for kind in Kind::ALL {
            let disk = Disk::new(kind, 1).await;
            let before = disk.file.snapshot();
            disk.seal().await.unwrap();
            let found = check(storage(&disk), &CheckOptions::default())
                .await
                .unwrap();
            assert_eq!(
                (found.corruptions, found.leaks, found.check_errors),
                (0, 0, 0)
            );
            for unwanted in [OpenOptions::default(), OpenOptions::default().discard(true)] {
                let refused = disk.open(unwanted).await.unwrap_err();
                assert_eq!(refused.kind(), ErrorKind::ReadOnly);
                assert!(refused.message().contains("--unseal"), "{refused}");
            }
            let fix = repair(storage(&disk), Fix::All, &CheckOptions::default()).await;
            assert_eq!(fix.unwrap_err().kind(), ErrorKind::ReadOnly);
            assert!(unseal(&storage(&disk)).await.unwrap());
            assert!(!unseal(&storage(&disk)).await.unwrap());
            let after = disk.file.snapshot();
            assert!(after.len() <= before.len(), "{kind:?}");
            // Names of features are written anew with the header.
            let rest = kind.cluster_bytes() as usize..after.len();
            assert!(after[rest.clone()] == before[rest], "{kind:?}");
            disk.seal().await.unwrap();
            assert_eq!(disk.verify().await.unwrap().0.differences, 0);
        }
    });
}

#[test]
fn opening_with_leave_to_do_so_gives_the_seal_up() {
    lane::block_on(async {
        let disk = Disk::new(Kind::Plain, 2).await;
        let sealed = disk.seal().await.unwrap();
        assert!(sealed.root.is_some() && !sealed.keyed);
        let image = disk
            .open(OpenOptions::default().unseal(true))
            .await
            .unwrap();
        assert!(!image.header().autoclear.contains(Autoclear::SEALED));
        let bytes = Buffer::copy_of(&[9; 4096]);
        image
            .write(0, bytes, RequestFlags::default())
            .await
            .unwrap();
        image.close().await.unwrap();
        let refused = disk.verify().await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
        let refused = disk
            .open_to_read(Some(VerifyReads::Always))
            .await
            .unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
        assert!(disk.open_to_read(None).await.is_ok());
        let header = read_header(&storage(&disk)).await.unwrap();
        assert_eq!(
            SealInfo::read(&storage(&disk), &header).await.unwrap(),
            None
        );
    });
}

#[test]
fn what_cannot_be_sealed_says_what_to_do() {
    lane::block_on(async {
        let old: Arc<dyn Storage> = Arc::new(MemStorage::new());
        let options = CreateOptions::default().size_bytes(1 << 20).version(2);
        create(old.clone(), None, &options).await.unwrap();
        let gate = Arc::new(vellum::gate::DenyAll);
        let image = vellum::qcow2::Qcow2::open(old, gate, OpenOptions::default());
        let refused = image.await.unwrap().seal(SealOptions::default()).await;
        assert!(refused.unwrap_err().message().contains("compat=1.1"));

        let disk = Disk::new(Kind::Plain, 3).await;
        let image = disk.open_to_read(None).await.unwrap();
        let refused = image.seal(SealOptions::default()).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ReadOnly);
        // A refcount that is too low.
        let header = read_header(&storage(&disk)).await.unwrap();
        let table = header.refcount_table_offset.bytes();
        let buffers = Buffers::from_buf([Buffer::for_read(8)]);
        let bytes = disk.file.read(table, buffers).into_single().await.unwrap();
        let block = u64::from_be_bytes(bytes[..].try_into().unwrap());
        let zero = Buffers::from_iter([Buffer::copy_of(&[0; 2])]);
        disk.file
            .write(block + 2 * 2, zero, Default::default())
            .await
            .unwrap();
        let refused = disk.seal().await.unwrap_err();
        assert!(refused.message().contains("check -r all"), "{refused}");
    });
}

#[test]
fn equal_blocks_of_an_encrypted_image_do_not_show() {
    lane::block_on(async {
        let (first, second) = (
            Disk::new(Kind::Encrypted, 5).await,
            Disk::new(Kind::Encrypted, 5).await,
        );
        assert!(first.content == second.content);
        let (first, second) = (first.seal().await.unwrap(), second.seal().await.unwrap());
        assert!(first.keyed && first.root != second.root);
        let plain = Disk::new(Kind::Plain, 5).await.seal().await.unwrap();
        let again = Disk::new(Kind::Plain, 5).await.seal().await.unwrap();
        assert_eq!(plain.root, again.root);
    });
}

#[test]
fn a_snapshot_of_a_sealed_image_is_read_without_the_seal() {
    lane::block_on(async {
        let disk = Disk::new(Kind::Snapshots, 6).await;
        disk.seal().await.unwrap();
        let first = vellum::qcow2::SnapshotSelector::Id("1".into());
        let options = OpenOptions::default().read_only(true).snapshot(Some(first));
        let shown = disk.open(options).await.unwrap();
        assert!(!shown.verifies_reads());
        let all = Buffer::for_read(disk.content.len());
        assert!(shown.read(0, all).await.unwrap()[..] != disk.content[..]);
    });
}

#[test]
fn each_mode_reads_the_same() {
    lane::block_on(async {
        for kind in Kind::ALL {
            let disk = Disk::new(kind, 8).await;
            disk.seal().await.unwrap();
            for verify in [VerifyReads::Off, VerifyReads::First, VerifyReads::Always] {
                for step in [512, 1536, 4096, 70_000, 1 << 20] {
                    assert_eq!(
                        disk.read_all(Some(verify), step).await,
                        0,
                        "{kind:?} {verify:?}"
                    );
                }
            }
        }
    });
}

/// The tables of small clusters are loaded many at a time, and each of those who seal or verify waits for
/// what another one loads.
#[test]
fn many_small_tables_hold_nobody_up() {
    let folder = tempfile::tempdir().unwrap();
    for cluster_bytes in [512, 1024] {
        let path = folder.path().join(cluster_bytes.to_string());
        let work = async move {
            let file = || open(&path, Create::IfMissing);
            let options = CreateOptions::default()
                .size_bytes(16 << 20)
                .cluster_size_bytes(cluster_bytes);
            create(file(), None, &options).await.unwrap();
            let gate = Arc::new(vellum::gate::DenyAll);
            let image = Qcow2::open(file(), gate.clone(), OpenOptions::default());
            let image = image.await.unwrap();
            let mut bytes = Buffer::zeroed(16 << 20);
            bytes.fill(1);
            let written = image.write(0, bytes, RequestFlags::default()).await;
            drop(written.unwrap());
            image.close().await.unwrap();
            let image = Qcow2::open(file(), gate.clone(), OpenOptions::default());
            let image = image.await.unwrap();
            image.seal(SealOptions::default()).await.unwrap();
            image.close().await.unwrap();
            let options = OpenOptions::default().read_only(true);
            let image = Qcow2::open(file(), gate, options).await.unwrap();
            image.verify(VerifyOptions::default()).await.unwrap()
        };
        lane::block_on(async move {
            let patience = lane::sleep(Duration::from_secs(60));
            match select(Box::pin(work), patience).await {
                Either::Left((found, _)) => assert_eq!(found.differences, 0),
                Either::Right(_) => panic!("somebody waits for what nobody loads"),
            }
        });
    }
}

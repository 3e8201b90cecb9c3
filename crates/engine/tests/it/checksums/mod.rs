//! Checksums: what a disk changes is never read as data, whatever was written before, and what was
//! written is never taken for changed, whoever was killed meanwhile.

mod disk;
mod opening;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use vellum::qcow2::check::{CheckOptions, Fix, check, repair};
use vellum::qcow2::checksums::{ChecksumOptions, name_of_checksums};
use vellum::qcow2::{Backing, NewSnapshot, OpenOptions, Qcow2, read_header};
use vellum::{
    BlockDevice, Buffer, ErrorKind, Io, Preallocation, RequestFlags, Storage, ZeroRequest,
};
use vellum_io::Buffers;
use vellum_io::lane::{self, block_on};
use vellum_storage::wrap::{FaultStorage, Matching, Operation, Record, Times, TraceStorage};
use vellum_storage::{MemStorage, WriteFlags, delegate};

use disk::{BLOCK, Beside, Disk, Model, SIZE_BYTES, host_of, one};

#[test]
fn what_is_written_has_its_sums_and_what_the_disk_changes_is_not_read() {
    for seed in 0..6 {
        println!("seed {seed}");
        let mut rng = fastrand::Rng::with_seed(seed);
        block_on(async {
            let bits = [9, 12, 16, 18][seed as usize % 4];
            let disk = Disk::new(bits, bits > 14 && seed > 3).await;
            let mut model = Model::new();
            for life in 0..4 {
                let image = disk.open().await;
                model.change(&image, &mut rng, 120).await;
                assert_eq!(model.compare(&image, &mut rng).await, 0);
                match life {
                    // A program that is killed: what it wrote is in the file.
                    1 => image.flush().await.unwrap(),
                    _ => image.close().await.unwrap(),
                }
            }
            let report = check(disk.image.clone(), &CheckOptions::default()).await;
            assert_eq!(report.unwrap().corruptions, 0);
            let image = disk.open_read_only().await;
            assert_eq!(model.compare(&image, &mut rng).await, 0);
            image.close().await.unwrap();
            let len_bytes = disk.image.len_bytes().unwrap();
            // What the killed program had been writing to has no sums: they are added.
            let image = disk.open().await;
            let mut scrub = image.scrub().unwrap();
            while scrub.step().await.unwrap() {}
            scrub.finish(false).await.unwrap();
            image.close().await.unwrap();
            let mut found = 0;
            for _ in 0..60 {
                let (byte, bit) = (rng.u64(..len_bytes), rng.u8(..8));
                disk.flip(byte, bit).await;
                let opened = disk.open_with(OpenOptions::default().read_only(true)).await;
                if let Ok(image) = opened {
                    let failures = model.compare(&image, &mut rng).await;
                    let mut scrub = image.scrub().unwrap();
                    while scrub.step().await.unwrap() {}
                    let report = scrub.finish(false).await.unwrap();
                    let named = report
                        .damaged
                        .iter()
                        .any(|range| range.file.contains(&byte));
                    assert_eq!(named, report.damaged_bytes > 0, "{report:?}");
                    assert!(named || failures == 0, "byte {byte}");
                    found += usize::from(named);
                    image.close().await.unwrap();
                }
                disk.flip(byte, bit).await;
            }
            // The header's own cluster, without which nothing can be opened, may be hit too.
            assert!(found > 20, "{found} of 60 flips were found");
        });
    }
}

/// Blocks that were written to in part after the disk changed them must not be vouched for.
#[test]
fn a_part_of_a_damaged_block_does_not_heal_it() {
    block_on(async {
        let disk = Disk::new(16, false).await;
        let mut model = Model::new();
        let image = disk.open().await;
        model.write(&image, 0..65536, 7).await;
        image.close().await.unwrap();
        let image = disk.open().await;
        let host = host_of(&image, 0).await;
        disk.flip(host + 100, 3).await;
        model.write(&image, 2048..2560, 8).await;
        let bad = image.read(0, Buffer::for_read(512)).await;
        assert_eq!(bad.unwrap_err().errno(), 5);
        model.write(&image, 2048..2560, 7).await;
        let bad = image.read(2048, Buffer::for_read(512)).await;
        assert_eq!(bad.unwrap_err().errno(), 5, "not even if it is what it was");
        // Beside it nothing is wrong, and all of it anew is right again.
        image.read(4096, Buffer::for_read(4096)).await.unwrap();
        model.write(&image, 0..4096, 9).await;
        assert_eq!(
            model
                .compare(&image, &mut fastrand::Rng::with_seed(1))
                .await,
            0
        );
        image.close().await.unwrap();
    });
}

/// What a disk loses it may lose as a hole, or with the end of the file: nobody is told of zeroes
/// there.
#[test]
fn what_the_disk_has_lost_is_no_hole() {
    block_on(async {
        let disk = Disk::new(16, false).await;
        let mut model = Model::new();
        let image = disk.open().await;
        model.write(&image, 0..1 << 20, 7).await;
        image
            .write_zeroes(1 << 20, 65536, ZeroRequest::default())
            .await
            .unwrap();
        let host = host_of(&image, 524_288).await;
        image.close().await.unwrap();
        disk.image.discard(host, 65536).await.unwrap();
        let image = disk.open_read_only().await;
        let extent = image.block_status(524_288, 65536, u32::MAX).await.unwrap();
        assert!(!extent.kind.is_zero(), "{extent:?}");
        assert!(image.read(524_288, Buffer::for_read(65536)).await.is_err());
        image.close().await.unwrap();
        disk.image.truncate(host + 65536).await.unwrap();
        let image = disk.open_read_only().await;
        let mut scrub = image.scrub().unwrap();
        while scrub.step().await.unwrap() {}
        let report = scrub.finish(false).await.unwrap();
        assert!(report.damaged_bytes > 65536, "{report:?}");
        assert!(
            image
                .read(524_288 + 65536, Buffer::for_read(512))
                .await
                .is_err()
        );
        image.close().await.unwrap();
    });
}

/// The header is compared as well, whoever opens the image: it says how large the disk is.
#[test]
fn a_changed_header_opens_nothing() {
    block_on(async {
        let disk = Disk::new(16, false).await;
        let image = disk.open().await;
        Model::new().write(&image, 0..65536, 7).await;
        let mut scrub = image.scrub().unwrap();
        while scrub.step().await.unwrap() {}
        image.close().await.unwrap();
        // The size, the L1 table's place and length.
        for byte in [28, 29, 30, 38, 39, 44, 45] {
            disk.flip(byte, 1).await;
            for read_only in [true, false] {
                let options = OpenOptions::default().read_only(read_only);
                assert!(disk.open_with(options).await.is_err(), "byte {byte}");
            }
            disk.flip(byte, 1).await;
        }
        disk.open_read_only().await.close().await.unwrap();
    });
}

/// A file that begins with zeroes is somebody's all the same.
#[test]
fn no_file_with_content_is_overwritten() {
    block_on(async {
        let disk = Disk::new(16, false).await;
        let bytes = Buffer::copy_of(b"somebody's");
        let write = disk.sums.write(65_600, one(bytes), WriteFlags::default());
        write.await.unwrap();
        let error = disk.open_with(disk.keep()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        assert_eq!(disk.sums.len_bytes().unwrap(), 65_610);
    });
}

/// A region is settled some seconds after the last write there, when image and sums are durable; what
/// the disk changes after that is found, though the program was killed.
#[test]
fn what_rests_is_settled_behind_both_flushes() {
    block_on(async {
        let disk = Disk::new(16, false).await;
        let mut model = Model::new();
        let image = disk.open().await;
        model.write(&image, 0..65536, 7).await;
        image.close().await.unwrap();
        let (file, sums) = (
            TraceStorage::new(disk.image.clone()),
            TraceStorage::new(disk.sums.clone()),
        );
        let options = disk.keep().checksums(Some(ChecksumOptions::Keep {
            storage: sums.clone(),
            name: "disk.vsums".to_owned(),
        }));
        let gate = Arc::new(Beside(disk.sums.clone()));
        let image = Qcow2::open(file.clone(), gate, options).await.unwrap();
        model.write(&image, 4096..8192, 8).await;
        let host = host_of(&image, 0).await;
        file.take();
        sums.take();
        let is_entry = |record: &Record| {
            record.call.operation == Operation::Write && record.call.len_bytes == 8
        };
        let settled = loop {
            lane::sleep(Duration::from_millis(100)).await;
            let records = sums.records();
            if records
                .iter()
                .any(|record| is_entry(record) && record.succeeded)
            {
                break records;
            }
        };
        let done: Vec<_> = settled.iter().map(|record| record.call.operation).collect();
        assert_eq!(done, [Operation::Write, Operation::Flush, Operation::Write]);
        let in_order = |pair: &[Record]| pair[0].ended < Some(pair[1].started);
        assert!(settled.windows(2).all(in_order), "{settled:?}");
        assert_eq!(file.count(&Matching::operation(Operation::Flush)), 1);
        // Killed: nothing is closed.
        drop(image);
        disk.flip(host + 4096, 1).await;
        let image = disk.open_read_only().await;
        let bad = image.read(4096, Buffer::for_read(512)).await;
        assert_eq!(bad.unwrap_err().errno(), 5);
        image.close().await.unwrap();
    });
}

/// A request that fails leaves an undamaged block readable, and a damaged one damaged.
#[test]
fn a_failed_write_neither_hides_nor_makes_damage() {
    block_on(async {
        let disk = Disk::new(16, false).await;
        let mut model = Model::new();
        let image = disk.open().await;
        model.write(&image, 0..65536, 7).await;
        image.close().await.unwrap();
        let faults = FaultStorage::new(disk.image.clone());
        let gate = Arc::new(Beside(disk.sums.clone()));
        let image = Qcow2::open(faults.clone(), gate, disk.keep())
            .await
            .unwrap();
        let host = host_of(&image, 0).await;
        disk.flip(host + 4096 + 5, 3).await;
        let matching = Matching::operation(Operation::Write).touching(host..host + 65536);
        faults.fail(matching, 0, Times::Always, 28);
        for block in [0, 4096] {
            let bytes = Buffer::copy_of(&[9; 4096]);
            let written = image.write(block, bytes, RequestFlags::default()).await;
            assert_eq!(written.unwrap_err().errno(), 28);
        }
        faults.heal();
        let sound = image.read(0, Buffer::for_read(4096)).await.unwrap();
        assert!(sound.iter().all(|byte| *byte == 7));
        let bad = image.read(4096, Buffer::for_read(4096)).await;
        assert_eq!(bad.unwrap_err().errno(), 5);
        image.close().await.unwrap();
    });
}

/// A disk that writes the first half of what it is given, and fails.
#[derive(Debug)]
struct Torn {
    inner: Arc<MemStorage>,
    is_torn: AtomicBool,
}

impl Storage for Torn {
    delegate!(
        inner: capabilities, name, len_bytes, modified_at, read, write_zeroes, discard, flush, truncate, block_status
    );

    fn write(&self, offset_bytes: u64, buffers: Buffers, flags: WriteFlags) -> Io<Buffers> {
        if !self.is_torn.load(Ordering::Relaxed) {
            return self.inner.write(offset_bytes, buffers, flags);
        }
        let half = Buffer::copy_of(&buffers[0][..buffers[0].len() / 2]);
        let written = self.inner.write(offset_bytes, one(half), flags);
        Io::boxed(async move {
            written.await?;
            Err(vellum::Error::new(vellum::ErrorKind::Io, "write", "torn").with_errno(5))
        })
    }
}

/// What others have in a block of which a write is torn can be read, and a torn block is written anew.
#[test]
fn a_torn_write_does_not_take_the_rest_of_its_block() {
    block_on(async {
        let disk = Disk::new(16, false).await;
        let mut model = Model::new();
        let image = disk.open().await;
        model.write(&image, 0..65536, 7).await;
        image.close().await.unwrap();
        let torn = Arc::new(Torn {
            inner: disk.image.clone(),
            is_torn: AtomicBool::new(false),
        });
        let gate = Arc::new(Beside(disk.sums.clone()));
        let image = Qcow2::open(torn.clone(), gate, disk.keep()).await.unwrap();
        host_of(&image, 0).await;
        torn.is_torn.store(true, Ordering::Relaxed);
        for range in [1024..3072, 8192..12288] {
            let bytes = Buffer::copy_of(&vec![9; (range.end - range.start) as usize]);
            let written = image
                .write(range.start, bytes, RequestFlags::default())
                .await;
            assert_eq!(written.unwrap_err().errno(), 5);
        }
        torn.is_torn.store(false, Ordering::Relaxed);
        let found = image.read(0, Buffer::for_read(8192)).await.unwrap();
        for (at, byte) in found.iter().enumerate() {
            let new = if (1024..2048).contains(&at) { 9 } else { 7 };
            assert_eq!(*byte, new, "{at}");
        }
        let all_torn = image.read(8192, Buffer::for_read(512)).await;
        assert_eq!(all_torn.unwrap_err().errno(), 5);
        model.write(&image, 8192..12288, 3).await;
        image.read(8192, Buffer::for_read(512)).await.unwrap();
        image.close().await.unwrap();
    });
}

#[test]
fn a_scrub_repairs_what_the_backing_file_has() {
    block_on(async {
        let disk = Disk::new(16, false).await;
        let below = Arc::new(MemStorage::new());
        let bytes = Buffer::copy_of(&vec![5; SIZE_BYTES as usize]);
        below
            .write(0, one(bytes), WriteFlags::default())
            .await
            .unwrap();
        let raw = vellum::raw::Raw::open(below, vellum::raw::RawOptions::default().read_only(true));
        let options = disk.keep().backing(Backing::Given(raw.unwrap()));
        let image = disk.open_with(options.clone()).await.unwrap();
        let mut model = Model(vec![5; SIZE_BYTES as usize]);
        model.write(&image, 100_000..100_512, 6).await;
        image.close().await.unwrap();
        let image = disk.open_with(options).await.unwrap();
        let (same, other) = (host_of(&image, 65536).await, host_of(&image, 100_000).await);
        disk.flip(same + 5, 0).await;
        disk.flip(other, 0).await;
        let mut scrub = image.scrub().unwrap();
        while scrub.step().await.unwrap() {}
        let report = scrub.finish(true).await.unwrap();
        let told: Vec<_> = report
            .damaged
            .iter()
            .map(|range| (range.guest.clone().unwrap().start, range.is_repaired))
            .collect();
        assert_eq!(told, [(65536, true), (98304, false)]);
        let rest = image.read(65536, Buffer::for_read(4096)).await.unwrap();
        assert!(rest.iter().all(|byte| *byte == 5));
        assert!(image.read(100_000, Buffer::for_read(512)).await.is_err());
        model.write(&image, 98304..102_400, 1).await;
        image.close().await.unwrap();
    });
}

#[test]
fn who_changes_the_file_past_the_checksums_drops_them() {
    block_on(async {
        let disk = Disk::new(16, false).await;
        let mut model = Model::new();
        let image = disk.open().await;
        model.write(&image, 0..1 << 20, 7).await;
        image.close().await.unwrap();
        let has_some = async || {
            let file: Arc<dyn Storage> = disk.image.clone();
            name_of_checksums(&read_header(&file).await.unwrap()).is_some()
        };
        assert!(has_some().await);
        repair(disk.image.clone(), Fix::Leaks, &CheckOptions::default())
            .await
            .unwrap();
        assert!(!has_some().await);
        // Without the option it is an image like others, and with it begins anew.
        let image = disk.open_with(OpenOptions::default()).await.unwrap();
        assert_eq!(image.scrub().unwrap_err().kind(), ErrorKind::Unsupported);
        model.write(&image, 4096..8192, 8).await;
        image.close().await.unwrap();
        let image = disk.open().await;
        let mut scrub = image.scrub().unwrap();
        while scrub.step().await.unwrap() {}
        let report = scrub.finish(false).await.unwrap();
        assert!(
            report.new_bytes > 1 << 20 && report.damaged_bytes == 0,
            "{report:?}"
        );
        image.close().await.unwrap();
        assert!(has_some().await);
        let off = OpenOptions::default().checksums(Some(ChecksumOptions::GiveUp));
        disk.open_with(off).await.unwrap().close().await.unwrap();
        assert!(!has_some().await);
    });
}

/// A copy of an image does not use the checksums of the one it was copied from.
#[test]
fn checksums_of_another_image_are_refused() {
    block_on(async {
        let disk = Disk::new(16, false).await;
        let image = disk.open().await;
        Model::new().write(&image, 0..65536, 7).await;
        image.close().await.unwrap();
        let bytes = disk.image.read(
            0,
            one(Buffer::for_read(disk.image.len_bytes().unwrap() as usize)),
        );
        let copy = Disk {
            image: Arc::new(MemStorage::new()),
            sums: disk.sums.clone(),
        };
        let written = copy
            .image
            .write(0, bytes.await.unwrap(), WriteFlags::default());
        written.await.unwrap();
        disk.open().await.close().await.unwrap();
        for options in [OpenOptions::default(), copy.keep()] {
            let error = copy.open_with(options).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidImage);
            assert!(error.to_string().contains("checksums=off"), "{error}");
        }
        let gone = Disk {
            image: copy.image.clone(),
            sums: Arc::new(MemStorage::new()),
        };
        let error = gone.open_with(OpenOptions::default()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidImage);
        let foreign = Disk {
            sums: disk.image.clone(),
            ..Disk::new(16, false).await
        };
        let error = foreign.open_with(foreign.keep()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    });
}

#[test]
fn other_changes_of_an_image_keep_the_checksums() {
    block_on(async {
        let disk = Disk::new(16, false).await;
        let mut rng = fastrand::Rng::with_seed(3);
        let mut model = Model::new();
        let image = disk.open().await;
        model.change(&image, &mut rng, 60).await;
        image.create_snapshot(NewSnapshot::default()).await.unwrap();
        model.change(&image, &mut rng, 30).await;
        image
            .resize(SIZE_BYTES + (4 << 20), Preallocation::Off)
            .await
            .unwrap();
        image.resize(SIZE_BYTES, Preallocation::Off).await.unwrap();
        image.close().await.unwrap();
        let image = disk.open_read_only().await;
        let mut scrub = image.scrub().unwrap();
        while scrub.step().await.unwrap() {}
        let report = scrub.finish(false).await.unwrap();
        assert_eq!(report.damaged, []);
        let covered = report.compared_bytes + BLOCK;
        assert!(covered >= disk.image.len_bytes().unwrap() / 2, "{report:?}");
        assert_eq!(model.compare(&image, &mut rng).await, 0);
        image.close().await.unwrap();
    });
}

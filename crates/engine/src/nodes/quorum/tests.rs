use std::sync::Mutex;

use vellum_io::lane::block_on;
use vellum_storage::MemStorage;

use super::*;
use crate::{Raw, RawOptions, Storage, delegate};

const SIZE_BYTES: u64 = 64 << 10;

struct Set {
    files: Vec<Arc<MemStorage>>,
    quorum: Arc<Quorum>,
    reports: Arc<Mutex<Vec<String>>>,
}

fn raw(storage: Arc<dyn Storage>) -> Arc<dyn BlockDevice> {
    Raw::open(storage, RawOptions::default()).expect("a device")
}

fn set(count: usize, options: QuorumOptions) -> Set {
    let files: Vec<_> = (0..count)
        .map(|_| Arc::new(MemStorage::with_bytes(vec![0; SIZE_BYTES as usize])))
        .collect();
    let children = files.iter().enumerate().map(|(number, file)| QuorumChild {
        name: format!("c{number}"),
        device: raw(file.clone()),
    });
    set_of(files.clone(), children.collect(), options)
}

fn set_of(files: Vec<Arc<MemStorage>>, children: Vec<QuorumChild>, options: QuorumOptions) -> Set {
    let reports = Arc::new(Mutex::new(Vec::new()));
    let heard = reports.clone();
    let hear = move |report: QuorumReport| {
        let line = match report {
            QuorumReport::Bad {
                child,
                operation,
                error,
                ..
            } => format!("{child} {operation:?} {}", error.is_some()),
            QuorumReport::Failure { .. } => "failure".to_owned(),
        };
        heard.lock().unwrap().push(line);
    };
    Set {
        files,
        quorum: Quorum::new(children, options, hear).expect("a quorum"),
        reports,
    }
}

fn two_of_three(read_pattern: ReadPattern, rewrites: bool) -> Set {
    let options = QuorumOptions {
        threshold: 2,
        read_pattern,
        rewrites,
    };
    set(3, options)
}

async fn write(device: &dyn BlockDevice, byte: u8) -> Result<()> {
    let bytes = Buffer::copy_of(&[byte; 4096]);
    let written = device.write(8192, bytes, RequestFlags::default()).await?;
    assert_eq!(written[..], [byte; 4096]);
    Ok(())
}

async fn read(device: &dyn BlockDevice) -> Result<u8> {
    Ok(device.read(8192, Buffer::for_read(4096)).await?[4095])
}

impl Set {
    async fn damage(&self, child: usize, byte: u8) {
        write(&*raw(self.files[child].clone()), byte).await.unwrap();
    }

    fn reports(&self) -> Vec<String> {
        std::mem::take(&mut self.reports.lock().unwrap())
    }
}

#[test]
fn what_one_child_has_lost_the_others_answer_and_repair() {
    block_on(async {
        let set = two_of_three(ReadPattern::Quorum, true);
        write(&*set.quorum, 7).await.unwrap();
        for child in 0..3 {
            set.damage(child, 9).await;
            assert_eq!(read(&*set.quorum).await.unwrap(), 7);
            assert_eq!(set.reports(), [format!("c{child} Read false")]);
            assert_eq!(read(&*set.quorum).await.unwrap(), 7);
            assert!(set.reports().is_empty(), "it was written again");
        }
        set.damage(0, 1).await;
        set.damage(1, 2).await;
        read(&*set.quorum).await.unwrap_err();
        assert_eq!(set.reports(), ["failure"], "nobody knows who is right");
    });
}

#[test]
fn nothing_is_repaired_that_nobody_wants_repaired() {
    block_on(async {
        let set = two_of_three(ReadPattern::Quorum, false);
        set.damage(2, 9).await;
        for _ in 0..2 {
            assert_eq!(read(&*set.quorum).await.unwrap(), 0);
            assert_eq!(set.reports(), ["c2 Read false"]);
        }
    });
}

#[test]
fn the_first_that_can_be_read_answers() {
    block_on(async {
        let set = two_of_three(ReadPattern::Fifo, false);
        set.damage(0, 5).await;
        assert_eq!(read(&*set.quorum).await.unwrap(), 5, "nobody compares");
        assert!(set.reports().is_empty());
    });
}

/// A device that cannot be written to.
#[derive(Debug)]
struct Worn(Arc<dyn BlockDevice>);

fn worn<T>() -> Io<T> {
    Io::ready(Err(Error::new(ErrorKind::Io, "write", "worn out")))
}

impl BlockDevice for Worn {
    delegate!(0: info, size_bytes, read, block_status, truncate, close);
    fn write(&self, _: u64, _: Buffer, _: RequestFlags) -> Io<Buffer> {
        worn()
    }
    fn write_zeroes(&self, _: u64, _: u64, _: ZeroRequest) -> Io<()> {
        worn()
    }
    fn discard(&self, _: u64, _: u64) -> Io<()> {
        worn()
    }
    fn flush(&self) -> Io<()> {
        worn()
    }
}

/// Of three children so many fail every write and flush.
fn with_failing(failing: usize) -> Set {
    let files: Vec<_> = (0..3)
        .map(|_| Arc::new(MemStorage::with_bytes(vec![0; SIZE_BYTES as usize])))
        .collect();
    let children = files.iter().enumerate().map(|(number, file)| {
        let device = raw(file.clone());
        QuorumChild {
            name: format!("c{number}"),
            device: match number < failing {
                true => Arc::new(Worn(device)),
                false => device,
            },
        }
    });
    let options = QuorumOptions {
        threshold: 2,
        read_pattern: ReadPattern::Quorum,
        rewrites: false,
    };
    set_of(files.clone(), children.collect(), options)
}

#[test]
fn a_write_is_made_if_enough_children_have_it() {
    block_on(async {
        let set = with_failing(1);
        write(&*set.quorum, 3).await.unwrap();
        assert_eq!(set.reports(), ["c0 Write true"]);
        assert_eq!(read(&*set.quorum).await.unwrap(), 3);
        assert_eq!(set.reports(), ["c0 Read false"]);
        set.quorum.flush().await.unwrap();
        assert_eq!(set.reports(), ["c0 Flush true"]);
        let set = with_failing(2);
        write(&*set.quorum, 3).await.unwrap_err();
        assert_eq!(set.reports(), ["c0 Write true", "c1 Write true", "failure"]);
        set.quorum.flush().await.unwrap_err();
    });
}

#[test]
fn a_discard_reaches_no_child() {
    block_on(async {
        let set = two_of_three(ReadPattern::Quorum, false);
        write(&*set.quorum, 7).await.unwrap();
        set.quorum.discard(4096, 8192).await.unwrap();
        for file in &set.files {
            assert_eq!(read(&*raw(file.clone())).await.unwrap(), 7);
        }
        set.quorum
            .discard(SIZE_BYTES - 512, 1024)
            .await
            .unwrap_err();
    });
}

#[test]
fn zeroes_that_some_children_cannot_write_at_once_are_not_written() {
    block_on(async {
        let set = two_of_three(ReadPattern::Quorum, false);
        write(&*set.quorum, 7).await.unwrap();
        let zeroes = set
            .quorum
            .write_zeroes(8192, 4096, ZeroRequest::default().no_fallback(true));
        assert_eq!(zeroes.await.unwrap_err().kind(), ErrorKind::Unsupported);
        assert_eq!(read(&*set.quorum).await.unwrap(), 7);
        let zeroes = set.quorum.write_zeroes(8192, 4096, ZeroRequest::default());
        zeroes.await.unwrap();
        assert_eq!(read(&*set.quorum).await.unwrap(), 0);
    });
}

/// A device that is written to and never has that durable.
#[derive(Debug)]
struct Forgetful(Arc<dyn BlockDevice>);

impl BlockDevice for Forgetful {
    delegate!(
        0: info, size_bytes, read, write, write_zeroes, discard, block_status, truncate, close,
    );
    fn flush(&self) -> Io<()> {
        worn()
    }
}

#[test]
fn a_flush_does_not_count_a_child_that_lacks_what_was_written() {
    block_on(async {
        let mut set = with_failing(0);
        let files = set.files.clone();
        let child = |number: usize, device| QuorumChild {
            name: format!("c{number}"),
            device,
        };
        let children = vec![
            child(0, Arc::new(Forgetful(raw(files[0].clone())))),
            child(1, raw(files[1].clone())),
            child(
                2,
                Arc::new(WornOnce(raw(files[2].clone()), Mutex::new(true))),
            ),
        ];
        let options = QuorumOptions {
            threshold: 2,
            read_pattern: ReadPattern::Quorum,
            rewrites: false,
        };
        set = set_of(set.files, children, options);
        write(&*set.quorum, 3).await.unwrap();
        set.reports();
        for _ in 0..2 {
            let flushed = set.quorum.flush().await;
            flushed.expect_err("only c1 has it, and durable");
            assert_eq!(set.reports(), ["c0 Flush true"]);
        }
    });
}

/// A device that fails its first write.
#[derive(Debug)]
struct WornOnce(Arc<dyn BlockDevice>, Mutex<bool>);

impl BlockDevice for WornOnce {
    delegate!(
        0: info, size_bytes, read, write_zeroes, discard, flush, block_status, truncate, close,
    );
    fn write(&self, at: u64, buffer: Buffer, flags: RequestFlags) -> Io<Buffer> {
        match std::mem::take(&mut *self.1.lock().unwrap()) {
            true => worn(),
            false => self.0.write(at, buffer, flags),
        }
    }
}

#[test]
fn a_quorum_without_children_or_with_a_threshold_that_cannot_be_met_is_refused() {
    let options = |threshold| QuorumOptions {
        threshold,
        read_pattern: ReadPattern::Quorum,
        rewrites: false,
    };
    Quorum::new(Vec::new(), options(1), |_| ()).unwrap_err();
    let child = |len: usize| QuorumChild {
        name: String::new(),
        device: raw(Arc::new(MemStorage::with_bytes(vec![0; len]))),
    };
    Quorum::new(vec![child(512)], options(2), |_| ()).unwrap_err();
    Quorum::new(vec![child(512)], options(0), |_| ()).unwrap_err();
    Quorum::new(vec![child(512), child(1024)], options(1), |_| ()).unwrap_err();
}

//! A file system that is full for a while: whichever write finds no room, that request fails, and when there
//! is room again all goes on, as if nothing had been.

use std::sync::Arc;

use crate::common::images::{create, open};
use crate::common::run;
use crate::cuts::{Recorded, States, assert_kept};
use vellum::storage::MemStorage;
use vellum::{BlockDevice, Buffer, ErrorKind, RequestFlags, Storage, ZeroRequest};
use vellum_storage::wrap::{FaultStorage, Matching, Operation, Times};

const MIB: u64 = 1 << 20;
const SIZE_BYTES: u64 = 6 * MIB;
const ENOSPC: i32 = 28;
const ROUNDS: u64 = 3;
const WRITES: u64 = 4;
/// At about so many moments of each run the power is cut.
const CUTS: usize = 5;

const FORMATS: [&str; 7] = ["parallels", "qcow", "qed", "vdi", "vhdx", "vmdk", "vpc"];

/// Has a request done, once more if there was no room. Whether there was none.
async fn insist<T, F: Future<Output = vellum::Result<T>>>(
    what: &str,
    request: impl Fn() -> F,
) -> bool {
    match request().await {
        Ok(_) => false,
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::NoSpace, "{what}: {error}");
            let again = request().await;
            drop(again.unwrap_or_else(|error| panic!("{what}: there is room again: {error}")));
            true
        }
    }
}

/// Writes to old blocks and new ones and flushes that; gives what was there for good at which moment, and how
/// many requests found no room.
async fn change(what: &str, device: &dyn BlockDevice, file: &Recorded) -> (States, usize) {
    let mut bytes = vec![0; SIZE_BYTES as usize];
    let mut states = vec![(file.moment(), bytes.clone())];
    let mut failed = 0;
    for round in 0..ROUNDS {
        for number in 0..WRITES {
            // Each place once.
            let at = (number * MIB + round * 200 * 1024) as usize;
            let piece = &mut bytes[at..at + 5000];
            piece.fill((round * WRITES + number) as u8 + 1);
            let flags = RequestFlags::default();
            let write = || device.write(at as u64, Buffer::copy_of(piece), flags);
            failed += usize::from(insist(what, write).await);
        }
        let zeroed = 4 * MIB + round * 65536;
        let zero = || device.write_zeroes(zeroed, 65536, ZeroRequest::default());
        failed += usize::from(insist(what, zero).await);
        failed += usize::from(insist(what, || device.flush()).await);
        states.push((file.moment(), bytes.clone()));
    }
    (states, failed)
}

/// Fails one request of the image's file, and cuts the power after it. Whether there was such a request.
async fn fail_one(format: &str, operation: Operation, number: usize) -> bool {
    let what = format!("{format}, {operation:?} {number}");
    let recorded = Recorded::new(create(format, SIZE_BYTES).await.snapshot());
    let file = FaultStorage::new(recorded.clone());
    let device = open(format, file.clone()).await;
    let begun = recorded.moment();
    file.fail(Matching::operation(operation), number, Times::Once, ENOSPC);
    let (mut states, failed) = change(&what, &*device, &recorded).await;
    file.heal();
    device.close().await.unwrap();
    let bytes = states[states.len() - 1].1.clone();
    states.push((recorded.moment(), bytes.clone()));
    let random = &mut fastrand::Rng::with_seed(number as u64);
    let step = (recorded.moment() - begun) / CUTS + 1;
    let read = |image| read_all(format, image);
    assert_kept((&recorded, &states), step, random, &what, read).await;
    let moment = recorded.moment();
    let whole = Arc::new(MemStorage::with_bytes(recorded.cut(moment, random)));
    assert!(read_all(format, whole).await == bytes, "{what}");
    failed > 0
}

async fn read_all(format: &str, image: Arc<dyn Storage>) -> Vec<u8> {
    let device = open(format, image).await;
    let read = device.read(0, Buffer::for_read(SIZE_BYTES as usize)).await;
    read.unwrap().to_vec()
}

#[test]
fn all_goes_on_when_there_is_room_again() {
    for format in FORMATS {
        for operation in [
            Operation::Write,
            Operation::WriteZeroes,
            Operation::Truncate,
        ] {
            run(async {
                let mut number = 0;
                while fail_one(format, operation, number).await {
                    number += 1;
                }
                println!("{format}: {number} of {operation:?}");
                assert!(number > 15 || operation != Operation::Write, "{format}");
            });
        }
    }
}

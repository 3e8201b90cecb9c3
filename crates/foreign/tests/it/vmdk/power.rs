//! Power cuts: what was flushed stays, and the rest is as it was or as it became.

use vellum::storage::MemStorage;

use super::*;
use crate::cuts::{Recorded, assert_between};

const GRAIN: usize = 65536;
const SIZE: usize = 3 << 20;

async fn open_memory(file: Arc<dyn Storage>) -> Device {
    let descriptor = read_descriptor(&*file).await.unwrap();
    let options = OpenOptions::default();
    open(file, descriptor, Vec::new(), None, &options)
        .await
        .unwrap()
}

async fn read_all(device: &dyn BlockDevice) -> Vec<u8> {
    let read = device.read(0, Buffer::for_read(SIZE)).await;
    read.unwrap().to_vec()
}

/// Writes to some grains; to none twice in a stream.
async fn write_some(
    device: &dyn BlockDevice,
    bytes: &mut [u8],
    grains: &mut Vec<usize>,
    is_stream: bool,
    random: &mut fastrand::Rng,
) {
    if !is_stream {
        // Some of them once more, but none twice between two flushes.
        random.shuffle(&mut grains[..20]);
    }
    for number in 0..3 {
        let grain = match is_stream {
            true => grains.pop().unwrap(),
            false => grains[number],
        };
        let (at, len) = match is_stream {
            true => (grain * GRAIN, GRAIN),
            false => (
                grain * GRAIN + 512 * random.usize(0..64),
                512 * random.usize(1..64),
            ),
        };
        if !is_stream && random.u8(0..4) == 0 {
            let at = grain * GRAIN;
            bytes[at..at + GRAIN].fill(0);
            let zeroes = device.write_zeroes(at as u64, GRAIN as u64, ZeroRequest::default());
            zeroes.await.unwrap();
            continue;
        }
        random.fill(&mut bytes[at..at + len]);
        let buffer = Buffer::copy_of(&bytes[at..at + len]);
        let written = device.write(at as u64, buffer, RequestFlags::default());
        written.await.unwrap();
    }
}

#[test]
fn a_power_cut_at_any_moment_loses_nothing_that_was_flushed() {
    for (seed, subformat) in (70..).zip([Subformat::MonolithicSparse, Subformat::StreamOptimized]) {
        let is_stream = subformat == Subformat::StreamOptimized;
        let random = &mut fastrand::Rng::with_seed(seed);
        let mut grains: Vec<usize> = (0..SIZE / GRAIN).collect();
        random.shuffle(&mut grains);
        run(async {
            let new = Arc::new(MemStorage::new());
            let options = CreateOptions::default()
                .size_bytes(SIZE as u64)
                .zeroed_grain(true)
                .subformat(subformat);
            create(&(new.clone() as Arc<dyn Storage>), &[], &options)
                .await
                .unwrap();
            let file = Recorded::new(new.snapshot());
            let device = open_memory(file.clone()).await;
            let mut bytes = vec![0; SIZE];
            let mut states = vec![(0, bytes.clone())];
            for _ in 0..4 {
                write_some(&*device, &mut bytes, &mut grains, is_stream, random).await;
                device.flush().await.unwrap();
                states.push((file.moment(), bytes.clone()));
            }
            close(device).await;
            states.push((file.moment(), bytes));
            for moment in 0..=file.moment() {
                let at = states.iter().rposition(|(at, _)| *at <= moment).unwrap();
                let (before, after) = (&states[at].1, &states[(at + 1).min(states.len() - 1)].1);
                let left: Arc<dyn Storage> =
                    Arc::new(MemStorage::with_bytes(file.cut(moment, random)));
                let what = format!("seed {seed}, cut at {moment}");
                let descriptor = read_descriptor(&*left).await.unwrap();
                let found = check(left.clone(), descriptor, Vec::new()).await.unwrap();
                assert_eq!(found.messages, Vec::<String>::new(), "{what}");
                let device = open_memory(left).await;
                assert_between(&read_all(&*device).await, before, after, &what);
                // And it can be written to.
                let grain = vec![7; GRAIN];
                let free = grains[20] * GRAIN;
                let written = Buffer::copy_of(&grain);
                let written = device.write(free as u64, written, RequestFlags::default());
                written.await.unwrap();
                let mut expected = (before.clone(), after.clone());
                expected.0[free..free + GRAIN].fill(7);
                expected.1[free..free + GRAIN].fill(7);
                assert_between(&read_all(&*device).await, &expected.0, &expected.1, &what);
                close(device).await;
            }
        });
    }
}

//! Random histories of a bitmap: it is what was written, also after a crash, and a clean
//! close leaks nothing.

use std::ops::Range;

use proptest::prelude::*;
use vellum::Preallocation;
use vellum::qcow2::{NewSnapshot, Qcow2, SnapshotSelector};
use vellum::{BlockDevice, ZeroRequest};
use vellum_io::lane;

use super::{every, expect_sound, memory, new_image, open_image, ranges, write};

#[derive(Debug, Clone)]
enum Step {
    Write(u64, u64),
    Zero(u64, u64),
    Discard(u64, u64),
    Resize(u64),
    Snapshot,
    Clear,
    Disable,
    Enable,
    Crash,
    Reopen,
}

fn step() -> impl Strategy<Value = Step> {
    let place = || (0u64..4000, 1u64..200);
    prop_oneof![
        6 => place().prop_map(|(at, len)| Step::Write(at * 256, len * 256)),
        2 => place().prop_map(|(at, len)| Step::Zero(at * 512, len * 512)),
        // All of the first cluster of bits, where that is small.
        1 => Just(Step::Write(0, SIZE_BYTES)),
        1 => place().prop_map(|(at, len)| Step::Discard(at * 512, len * 4096)),
        1 => (1u64..8000).prop_map(|sectors| Step::Resize(sectors * 512)),
        1 => Just(Step::Snapshot),
        1 => Just(Step::Clear),
        1 => Just(Step::Disable),
        1 => Just(Step::Enable),
        1 => Just(Step::Crash),
        1 => Just(Step::Reopen),
    ]
}

const SIZE_BYTES: u64 = 4500 * 512;

/// A bitmap as it should be: what must be dirty, and what may be.
struct Model {
    size_bytes: u64,
    granularity_bytes: u64,
    enabled: bool,
    must: Vec<bool>,
    may: Vec<bool>,
}

impl Model {
    fn mark(&mut self, at: u64, len: u64) {
        if self.enabled && len > 0 {
            let first = (at / self.granularity_bytes) as usize;
            let end = (at + len).div_ceil(self.granularity_bytes) as usize;
            self.must[first..end].fill(true);
            self.may[first..end].fill(true);
        }
    }

    fn set(&mut self, dirty: bool) {
        self.must.fill(dirty);
        self.may.fill(dirty);
    }

    /// What comes into being is dirty.
    fn resize(&mut self, size_bytes: u64) {
        let old_bytes = std::mem::replace(&mut self.size_bytes, size_bytes);
        let bits = size_bytes.div_ceil(self.granularity_bytes) as usize;
        self.must.resize(bits, false);
        self.may.resize(bits, false);
        self.mark(old_bytes, size_bytes.saturating_sub(old_bytes));
    }

    /// What of a range lies inside the device.
    fn clip(&self, at: u64, len: u64) -> (u64, u64) {
        let at = at.min(self.size_bytes);
        (at, len.min(self.size_bytes - at))
    }

    fn compare(&self, ranges: &[Range<u64>]) {
        let mut told = vec![false; self.must.len()];
        for range in ranges {
            let end = range.end.div_ceil(self.granularity_bytes);
            told[(range.start / self.granularity_bytes) as usize..end as usize].fill(true);
        }
        for (bit, told) in told.into_iter().enumerate() {
            assert!(told || !self.must[bit], "bit {bit} must be set");
            assert!(!told || self.may[bit], "bit {bit} must not be set");
        }
    }
}

async fn change(image: &Qcow2, model: &mut Model, step: &Step) {
    match *step {
        Step::Write(at, len) => {
            let (at, len) = model.clip(at, len);
            write(image, at, len).await;
            model.mark(at, len);
        }
        Step::Zero(at, len) => {
            let (at, len) = model.clip(at, len);
            let zeroed = image.write_zeroes(at, len, ZeroRequest::default()).await;
            zeroed.expect("zeroed");
            model.mark(at, len);
        }
        Step::Discard(at, len) => {
            let (at, len) = model.clip(at, len);
            image.discard(at, len).await.expect("discarded");
            // A part of a cluster may be left as it is.
            if model.enabled && len > 0 {
                let first = (at / model.granularity_bytes) as usize;
                let end = (at + len).div_ceil(model.granularity_bytes) as usize;
                model.may[first..end].fill(true);
            }
        }
        Step::Resize(size_bytes) => {
            let resized = image.resize(size_bytes, Preallocation::Off).await;
            resized.expect("resized");
            model.resize(size_bytes);
        }
        Step::Snapshot => match image.snapshots().first() {
            Some(one) => {
                let one = SnapshotSelector::Id(one.id.clone());
                image.delete_snapshot(one).await.expect("deleted");
            }
            None => {
                let taken = image.create_snapshot(NewSnapshot::default()).await;
                drop(taken.expect("taken"));
            }
        },
        Step::Clear => {
            image.bitmaps().clear("a").await.expect("cleared");
            model.set(false);
        }
        Step::Disable => {
            image.bitmaps().disable("a").await.expect("disabled");
            model.enabled = false;
        }
        Step::Enable => {
            image.bitmaps().enable("a").await.expect("enabled");
            model.enabled = true;
        }
        Step::Crash | Step::Reopen => {}
    }
}

async fn play(cluster_bytes: u64, granularity_bytes: u64, steps: Vec<Step>) {
    let mut file = new_image(SIZE_BYTES, cluster_bytes).await;
    let mut image = open_image(file.clone()).await;
    let added = image.bitmaps().add("a", every(granularity_bytes)).await;
    added.expect("added");
    let bits = SIZE_BYTES.div_ceil(granularity_bytes) as usize;
    let mut model = Model {
        size_bytes: SIZE_BYTES,
        granularity_bytes,
        enabled: true,
        must: vec![false; bits],
        may: vec![false; bits],
    };
    // What a crash leaks stays leaked.
    let mut has_crashed = false;
    for step in steps {
        match step {
            Step::Crash => {
                has_crashed = true;
                file = memory(file.snapshot());
                image = open_image(file.clone()).await;
                let found = ranges(&image, "a").await;
                for range in &found {
                    let end = range.end.div_ceil(granularity_bytes) as usize;
                    model.may[(range.start / granularity_bytes) as usize..end].fill(true);
                }
            }
            Step::Reopen => {
                image.close().await.expect("closed");
                expect_sound(file.clone(), has_crashed).await;
                image = open_image(file.clone()).await;
            }
            step => change(&image, &mut model, &step).await,
        }
        model.compare(&ranges(&image, "a").await);
    }
    image.close().await.expect("closed");
    expect_sound(file, has_crashed).await;
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn a_bitmap_is_what_was_written(
        cluster_bits in prop_oneof![Just(9u32), 9u32..17],
        granularity_bits in prop_oneof![Just(9u32), 9u32..18],
        steps in prop::collection::vec(step(), 1..25),
    ) {
        lane::block_on(play(1 << cluster_bits, 1 << granularity_bits, steps));
    }
}

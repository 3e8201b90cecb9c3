//! A scenario: two images made alike, and what is done to both.

use super::bitmaps;
use super::ending::Ending;
use super::foreign::Foreign;
use super::operation::Batch;
use super::shape::{MOST_COMPRESSED, Shape, compressed_write};
use crate::random::Random;

/// Who makes or writes an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tool {
    /// The program under test.
    Vellum,
    /// QEMU's programs.
    Qemu,
}

/// Two images and their lives. The second one is written by QEMU only.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// What both are like.
    pub shape: Shape,
    /// Who makes the first and the second.
    pub creators: [Tool; 2],
    /// Compressed writes to both at first. No cluster is written twice, which QEMU
    /// refuses.
    pub preparation: Vec<String>,
    /// Who does that to the first image.
    pub preparer: Tool,
    /// How their bitmaps are made, which is right after the images are.
    pub bitmaps: Vec<Vec<String>>,
    /// What is done to both.
    pub batches: Vec<Batch>,
    /// What is done to both in the end.
    pub ending: Ending,
    /// The writers of the first image take turns; otherwise it is Vellum alone.
    pub alternate: bool,
}

impl Scenario {
    /// The scenario of a seed, with images of another format than qcow2 where that is given.
    pub fn random(seed: u64, format: Option<&'static Foreign>) -> Scenario {
        let random = &mut Random::new(seed);
        let shape = match format {
            Some(format) => format.shape(random),
            None => Shape::random(random),
        };
        let creators = [(); 2].map(|()| random.pick(&[Tool::Vellum, Tool::Qemu]));
        let mut preparation = Vec::new();
        if shape.can_compress() && random.chance(40) {
            let inside = shape.size_bytes.min(shape.reach_bytes);
            let mut taken = Vec::new();
            // Those of qcow are of one cluster.
            let most = shape.foreign.map_or(MOST_COMPRESSED, |_| 1);
            for _ in 0..random.between(1, 4) {
                let write = compressed_write(random, inside, shape.cluster_bits, most, &mut taken);
                preparation.extend(write);
            }
        }
        let preparer = random.pick(&[Tool::Vellum, Tool::Vellum, Tool::Qemu]);
        let count = random.between(1, 4);
        let mut batches: Vec<Batch> = (0..count).map(|_| Batch::random(random, &shape)).collect();
        let alternate = random.chance(25);
        let ending = Ending::random(random, &shape);
        let bitmaps = bitmaps::made_first(random, &shape);
        for batch in batches.iter_mut().filter(|_| !bitmaps.is_empty()) {
            batch.bitmaps = bitmaps::changes(random);
        }
        Scenario {
            shape,
            creators,
            preparation,
            preparer,
            bitmaps,
            batches,
            ending,
            alternate,
        }
    }

    /// Who writes the first image in a batch.
    pub fn writer(&self, batch: usize) -> Tool {
        match self.alternate && batch % 2 == 1 {
            true => Tool::Qemu,
            false => Tool::Vellum,
        }
    }

    /// How many commands there are; a smaller scenario has fewer.
    pub fn weight(&self) -> usize {
        let groups: usize = self.batches.iter().map(|batch| batch.groups.len()).sum();
        let ending = usize::from(self.ending != Ending::None);
        let bitmaps: usize = self.batches.iter().map(|batch| batch.bitmaps.len()).sum();
        groups + self.preparation.len() + self.batches.len() + ending + bitmaps
    }
}

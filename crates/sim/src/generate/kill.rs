//! What follows a kill.

use super::GuestRegions;
use crate::rng::Rng;
use crate::scenario::{ImageOptions, Op, Place, Step};

/// The steps of the process after a killed one; often none: it opens the image and closes it.
pub fn after_kill(image: &ImageOptions, rng: &mut Rng) -> Vec<Step> {
    if image.place != Place::Unchecked || rng.chance(1, 2) {
        return Vec::new();
    }
    let places = GuestRegions::new(image, rng);
    let mut steps = Vec::new();
    for _ in 0..rng.between(1, 8) {
        let mut op = places.op(rng);
        if let Op::Write { fua, .. } | Op::WriteZeroes { fua, .. } = &mut op {
            // Durable alone, unlike what it may rely on.
            *fua |= rng.chance(1, 3);
        }
        steps.push(Step::Start(op));
        if rng.chance(1, 2) {
            steps.push(Step::Wait);
        }
    }
    steps
}

//! What a filter knows of its moment, for the one that takes its place.

use std::sync::Arc;

use vellum::BlockDevice;
use vellum_io::bits::Bits;

use super::core::{Broken, Core};
use super::{CopyBeforeWrite, CopyBeforeWriteOptions};

/// Which old bytes are in the target, which are in the source alone, and which nobody may see: what
/// a filter hands on to the one that stands where it stood.
#[derive(Debug, Clone)]
pub struct Moment {
    size_bytes: u64,
    grain_bytes: u64,
    todo: Bits,
    hidden: Option<Bits>,
    broken: Option<Broken>,
}

impl Moment {
    /// The size that the source had, in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }
}

impl CopyBeforeWrite {
    /// What the filter knows of its moment: of one without a fleece, whose users are held up. Copies
    /// that have begun end before.
    pub async fn moment(&self) -> Moment {
        self.core.settled().await;
        let state = self.core.lock();
        Moment {
            size_bytes: self.core.size_bytes,
            grain_bytes: self.core.grain_bytes,
            todo: state.todo.clone(),
            hidden: state.hidden.clone(),
            broken: state.broken,
        }
    }

    /// Goes on with what another filter has begun: the source shows what that one's does, and the
    /// target holds what that one's has got.
    pub fn resumed(
        source: Arc<dyn BlockDevice>,
        target: Arc<dyn BlockDevice>,
        options: CopyBeforeWriteOptions,
        moment: &Moment,
    ) -> Arc<Self> {
        let mut core = Core::new(source, target, options);
        core.size_bytes = moment.size_bytes;
        core.grain_bytes = moment.grain_bytes;
        let mut state = core.lock();
        state.todo = moment.todo.clone();
        state.hidden = moment.hidden.clone();
        state.broken = moment.broken;
        drop(state);
        Arc::new(CopyBeforeWrite {
            core: Arc::new(core),
        })
    }

    /// Keeps nothing and shows nothing of the moment any more: nobody knows what has changed since.
    pub fn give_up(&self) {
        self.core.give_up(Broken::Copy);
    }
}

//! [`Space`]: where the next block goes, and the file's length.
//!
//! All of a block is in the file before it is used. Blocks get their places side by side; who needs a longer file makes
//! it long enough for all that have places by then, one at a time, as a length that is set late would cut the file.

use std::sync::Arc;

use parking_lot::Mutex;
use vellum::{Error, ErrorKind, Result, Storage};

use super::bat::BLOCK_ALIGNMENT_BYTES;
use crate::joined::Joined;
use crate::places::{NewPlace, Places};

/// Where files end at most.
const MAX_BYTES: u64 = i64::MAX as u64;

/// See the module's head.
#[derive(Debug)]
pub(super) struct Space {
    block_bytes: u64,
    state: Mutex<State>,
    /// The files that are being made longer, by their lengths.
    growths: Joined<u64, ()>,
}

#[derive(Debug)]
struct State {
    places: Places,
    /// The file is so long.
    len_bytes: u64,
}

fn aligned(offset_bytes: u64) -> u64 {
    let aligned = offset_bytes.checked_next_multiple_of(BLOCK_ALIGNMENT_BYTES);
    aligned.unwrap_or(u64::MAX)
}

impl Space {
    /// That of a file of a length. A region may lie where it has not come to yet.
    pub(super) fn new(len_bytes: u64, regions_end_bytes: u64, block_bytes: u64) -> Space {
        let end_bytes = aligned(len_bytes.max(regions_end_bytes));
        Space {
            block_bytes,
            state: Mutex::new(State {
                places: Places::new(end_bytes, block_bytes),
                len_bytes,
            }),
            growths: Joined::default(),
        }
    }

    /// Takes space for a block, and has the file have all of it.
    pub(super) async fn take(&self, file: &Arc<dyn Storage>) -> Result<NewPlace> {
        let place = self.state.lock().places.take_below(MAX_BYTES);
        let place = place.ok_or_else(|| {
            let message = "the VHDX image cannot become larger";
            Error::new(ErrorKind::NoSpace, "write", message).target(file.name())
        })?;
        let end_bytes = place.start_bytes + self.block_bytes;
        let grown = self.grow(file, end_bytes).await;
        grown.inspect_err(|_| self.give_back(place.start_bytes))?;
        Ok(place)
    }

    /// Waits until the file is at least so long.
    async fn grow(&self, file: &Arc<dyn Storage>, least_bytes: u64) -> Result<()> {
        loop {
            let len_bytes = self.state.lock().len_bytes;
            if len_bytes >= least_bytes {
                return Ok(());
            }
            let longer = self.make_longer(file, len_bytes);
            self.growths.join(len_bytes, longer).await?;
        }
    }

    /// Makes the file as long as places have been given out, if it still has a length.
    async fn make_longer(&self, file: &Arc<dyn Storage>, from_bytes: u64) -> Result<()> {
        let end_bytes = {
            let state = self.state.lock();
            if state.len_bytes != from_bytes {
                return Ok(());
            }
            state.places.end_bytes()
        };
        file.truncate(end_bytes).await?;
        self.state.lock().len_bytes = end_bytes;
        Ok(())
    }

    /// Takes a place back that no entry leads to.
    pub(super) fn give_back(&self, start_bytes: u64) {
        self.state.lock().places.give_back(start_bytes);
    }
}

//! [`LiveStream`]: an image in use is given what the layers below it hold.

use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;

use futures_util::future::select;
use futures_util::stream::{FuturesUnordered, StreamExt};
use vellum::nodes::CopyOnRead;
use vellum::{BlockDevice, Result};

use super::commit::Copied;
use crate::copy::Observer;
use crate::job::{Reins, Wish};
use crate::rate::RateLimit;

/// Bytes that are brought up at once.
const PIECE_BYTES: u64 = 1 << 20;

/// What is brought up.
#[derive(Debug)]
pub struct LiveStream {
    /// The image; its users go through `filter`.
    pub image: Arc<dyn BlockDevice>,
    /// Keeps copies and writes of one range apart.
    pub filter: Arc<CopyOnRead>,
    /// How many layers below the image are brought up; those below them stay what the
    /// image stands on.
    pub layers: u32,
    /// How many pieces are in flight at once.
    pub parallel: usize,
}

impl LiveStream {
    /// Brings everything up, and makes it durable. From then on the image shows the same
    /// with the layers left out.
    ///
    /// # Errors
    /// What reading and writing meet. The image shows what it did.
    pub async fn run(&self, reins: &Reins, observer: &mut dyn Observer) -> Result<Copied> {
        let size_bytes = self.image.size_bytes();
        let mut rate = RateLimit::new(reins.speed().clone());
        let mut running = FuturesUnordered::new();
        let mut at = 0;
        let mut result = Ok(Copied::All);
        while at < size_bytes {
            reins.until(|wish| wish != Wish::Pause).await;
            if reins.wish() == Wish::Cancel {
                result = Ok(Copied::GivenUp);
                break;
            }
            let (range, hidden) = match self.look(at, size_bytes).await {
                Ok(found) => found,
                Err(error) => {
                    result = Err(error);
                    break;
                }
            };
            at = range.end;
            if hidden {
                let wait = pin!(rate.wait_for(range.end - range.start));
                select(wait, pin!(reins.until(|wish| wish == Wish::Cancel))).await;
                running.push(self.filter.fetch(range));
                if running.len() >= self.parallel.max(1)
                    && let Some(Err(error)) = running.next().await
                {
                    result = Err(error);
                    break;
                }
            }
            observer.progress(at, size_bytes);
        }
        while let Some(fetched) = running.next().await {
            result = fetched.and(result);
        }
        if matches!(result, Ok(Copied::All)) {
            self.image.flush().await?;
        }
        result
    }

    /// A piece from `at` on, and whether a layer that is brought up decides what it shows.
    async fn look(&self, at: u64, size_bytes: u64) -> Result<(Range<u64>, bool)> {
        let len_bytes = size_bytes - at;
        let extent = self.image.block_status(at, len_bytes, self.layers).await?;
        let from_below = match extent.present {
            true => extent.depth > 0,
            // The layer below `depth` ends before, and hides what is below it there.
            false => extent.zero && extent.depth < self.layers,
        };
        let mut len_bytes = extent.len_bytes.clamp(1, len_bytes);
        if from_below {
            len_bytes = len_bytes.min(PIECE_BYTES - at % PIECE_BYTES);
        }
        Ok((at..at + len_bytes, from_below))
    }
}

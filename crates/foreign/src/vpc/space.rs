//! [`Space`]: where the next block goes, and the footer behind it.
//!
//! A footer that is going to lie behind new blocks is durable before any of them gets a place, as they go over the
//! one before. Whoever finds no room before it moves it, once for all who do; nobody else waits for that.

use std::sync::Arc;

use parking_lot::Mutex;
use vellum::{Error, ErrorKind, Result, Storage};

use super::footer::{Footer, LEN_BYTES};
use super::header::UNALLOCATED;
use super::image::is_footer;
use crate::fields;
use crate::joined::Joined;
use crate::places::{NewPlace, Places};

/// The footer is put so far behind the last block, that not every new one has to wait for it.
const AHEAD_BYTES: u64 = 16 << 20;
/// No entry leads there, or further.
const NOWHERE_BYTES: u64 = UNALLOCATED as u64 * 512;

/// See the module's head.
#[derive(Debug)]
pub(super) struct Space {
    footer: Footer,
    bitmap_bytes: u64,
    block_bytes: u64,
    /// From there on the file had nothing when it was opened.
    fresh_bytes: u64,
    state: Mutex<State>,
    /// The footers that are being moved, by where they lie.
    moves: Joined<u64, ()>,
}

#[derive(Debug)]
struct State {
    places: Places,
    /// Where the last footer lies, durably: blocks end before it.
    footer_bytes: u64,
    /// There may be unused space before the footer.
    has_grown: bool,
    /// A barrier failed: which footers there are, nobody knows (rule 11).
    failure: Option<Error>,
}

/// A place for a block, and whether nothing was ever written where the block's bytes go.
#[derive(Debug, Clone, Copy)]
pub(super) struct FoundPlace {
    pub offset_bytes: u64,
    pub is_fresh: bool,
}

impl Space {
    /// That of an image whose last block ends at `free_bytes`.
    pub(super) async fn new(
        file: &dyn Storage,
        footer: Footer,
        free_bytes: u64,
        bitmap_bytes: u64,
        block_bytes: u64,
    ) -> Result<Space> {
        let file_bytes = file.len_bytes()?;
        let last_bytes = file_bytes.saturating_sub(LEN_BYTES as u64);
        // A file without a footer at its end gets one before anything else.
        let footer_bytes = match last_bytes >= free_bytes && is_footer(file, last_bytes).await? {
            true => last_bytes,
            false => free_bytes,
        };
        Ok(Space {
            footer,
            bitmap_bytes,
            block_bytes,
            fresh_bytes: file_bytes,
            state: Mutex::new(State {
                places: Places::new(free_bytes, bitmap_bytes + block_bytes),
                footer_bytes,
                has_grown: false,
                failure: None,
            }),
            moves: Joined::default(),
        })
    }

    /// Takes space for a block, before the last footer or with another one behind it, and writes its bitmap: the
    /// block is going to be written whole.
    pub(super) async fn take(&self, file: &Arc<dyn Storage>) -> Result<FoundPlace> {
        let place = self.find(file).await?;
        let start = place.start_bytes;
        let bitmap = vec![0xff; self.bitmap_bytes as usize];
        let written = fields::write_at(&**file, start, &bitmap).await;
        written.inspect_err(|_| self.give_back(start))?;
        // The footers that were written since are all where a bitmap goes, if there are bitmaps.
        let is_behind = self.bitmap_bytes > 0 && start + self.bitmap_bytes >= self.fresh_bytes;
        Ok(FoundPlace {
            offset_bytes: start,
            is_fresh: place.is_new && is_behind,
        })
    }

    async fn find(&self, file: &Arc<dyn Storage>) -> Result<NewPlace> {
        loop {
            let footer_bytes = {
                let mut state = self.state.lock();
                if let Some(failure) = &state.failure {
                    return Err(failure.clone());
                }
                let footer_bytes = state.footer_bytes;
                let is_full = state.places.end_bytes() >= NOWHERE_BYTES;
                let most_bytes = if is_full { 0 } else { footer_bytes };
                match state.places.take_below(most_bytes) {
                    Some(place) => return Ok(place),
                    None if is_full => {
                        let message = "the VHD image cannot become larger";
                        let error = Error::new(ErrorKind::NoSpace, "write", message);
                        return Err(error.target(file.name()));
                    }
                    None => footer_bytes,
                }
            };
            let moved = self.move_footer(file, footer_bytes);
            self.moves.join(footer_bytes, moved).await?;
        }
    }

    /// Puts a footer where blocks have room before it, if the last one still lies at `from_bytes`.
    async fn move_footer(&self, file: &Arc<dyn Storage>, from_bytes: u64) -> Result<()> {
        let end_bytes = {
            let state = self.state.lock();
            if state.footer_bytes != from_bytes {
                return Ok(());
            }
            state.places.end_bytes()
        };
        let whole_bytes = self.bitmap_bytes + self.block_bytes;
        let to_bytes = end_bytes + (AHEAD_BYTES / whole_bytes).max(1) * whole_bytes;
        fields::write_at(&**file, to_bytes, self.footer.bytes()).await?;
        let flushed = fields::barrier(&**file).await;
        let mut state = self.state.lock();
        if let Err(error) = flushed {
            state.failure = Some(error.clone());
            return Err(error);
        }
        state.footer_bytes = to_bytes;
        state.has_grown = true;
        Ok(())
    }

    /// Takes a place back that no entry leads to.
    pub(super) fn give_back(&self, start_bytes: u64) {
        self.state.lock().places.give_back(start_bytes);
    }

    /// Cuts the file off behind the last block and a footer. Everything else is durable, and nobody takes
    /// places.
    pub(super) async fn end(&self, file: &Arc<dyn Storage>) -> Result<()> {
        let (free_bytes, footer_bytes) = {
            let mut state = self.state.lock();
            if !state.has_grown || !file.capabilities().growable {
                return Ok(());
            }
            state.places.cut();
            (state.places.end_bytes(), state.footer_bytes)
        };
        if footer_bytes > free_bytes {
            fields::write_at(&**file, free_bytes, self.footer.bytes()).await?;
            fields::barrier(&**file).await?;
            self.state.lock().footer_bytes = free_bytes;
        }
        file.truncate(free_bytes + LEN_BYTES as u64).await?;
        self.state.lock().has_grown = false;
        Ok(())
    }
}

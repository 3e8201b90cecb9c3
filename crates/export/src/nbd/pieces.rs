//! Requests that may ask for a whole disk, carried out piece by piece: none begins for a
//! client that is gone.
//!
//! Invariants:
//! - No piece begins once the server has hung up, or the client has been gone for half a second;
//!   what was begun ends before its export does.
//! - Between pieces others on the lane have their turn, also where the device never waits.

use std::sync::Arc;
use std::time::Duration;

use vellum::{BlockDevice, ZeroRequest};
use vellum_io::{Buffer, Error, ErrorKind, Io, Result, lane};
use vellum_nbd::request::Range;

use super::connection::Request;

/// How much is read at once to fill a cache, in bytes.
pub(super) const CACHE_BYTES: u64 = 1 << 20;
/// The first piece of zeroes or of a trim in bytes; what is no longer is one request.
const FIRST_BYTES: u64 = 16 << 20;
/// Pieces that take less become longer, so that nothing costs what there is nothing to do for.
const SHORT: Duration = Duration::from_millis(20);
/// And the others shorter.
const LONG: Duration = Duration::from_millis(100);
const LEAST_BYTES: u64 = 1 << 20;
/// No longer, for what lies behind much that was quick may be slow, and a piece ends before
/// the client's leaving counts; but on devices of which that would be very many.
const MOST_BYTES: u64 = 256 << 20;
const MOST_PIECES: u64 = 1 << 16;

/// The end of a request of which no more pieces begin.
pub(super) fn broken_off() -> Error {
    let message = "the client or the export is going away";
    Error::new(ErrorKind::Io, "serve", message).with_errno(libc::ESHUTDOWN)
}

/// Gives others on the lane their turn, however fast a device answers: a request that never
/// waits would keep its lane from hearing that its client is gone.
#[derive(Debug, Default)]
pub(super) struct Yielder(u32);

/// So many answers of a device are taken in one turn where each is quick.
const ANSWERS_A_TURN: u32 = 32;

impl Yielder {
    /// Counts an answer, and lets others have their turn now and then.
    pub(super) async fn pass(&mut self) {
        self.0 += 1;
        if self.0.is_multiple_of(ANSWERS_A_TURN) {
            lane::yield_now().await;
        }
    }
}

/// Gives a range back.
pub(super) fn trim(request: &Request, range: Range, fua: bool) -> Io<()> {
    let device = request.device().clone();
    if range.len_bytes > FIRST_BYTES {
        let discard = |device: &dyn BlockDevice, at, len| device.discard(at, len);
        return in_pieces(request, range, fua, discard);
    }
    Io::boxed(async move {
        if range.len_bytes > 0 {
            device.discard(range.offset_bytes, range.len_bytes).await?;
        }
        if fua { device.flush().await } else { Ok(()) }
    })
}

/// Makes a range read as zeroes.
pub(super) fn zero(request: &Request, range: Range, flags: ZeroRequest) -> Io<()> {
    if range.len_bytes <= FIRST_BYTES {
        let device = request.device();
        return device.write_zeroes(range.offset_bytes, range.len_bytes, flags);
    }
    let piece = flags.fua(false);
    in_pieces(request, range, flags.fua, move |device, at, len| {
        device.write_zeroes(at, len, piece)
    })
}

/// Reads a range and drops it, so that the caches below have it.
pub(super) fn cache(request: &Request, range: Range) -> Io<()> {
    let device = request.export().device.clone();
    let connection = request.connection.clone();
    Io::boxed(async move {
        let (mut at, end) = (range.offset_bytes, range.offset_bytes + range.len_bytes);
        while at < end {
            if !connection.goes_on() {
                return Err(broken_off());
            }
            let step = CACHE_BYTES.min(end - at);
            device.read(at, Buffer::for_read(step as usize)).await?;
            at += step;
            lane::yield_now().await;
        }
        Ok(())
    })
}

/// Does something with a range, piece by piece, and makes it durable if that is wanted.
fn in_pieces(
    request: &Request,
    range: Range,
    fua: bool,
    act: impl Fn(&dyn BlockDevice, u64, u64) -> Io<()> + 'static,
) -> Io<()> {
    let device: Arc<dyn BlockDevice> = request.device().clone();
    let connection = request.connection.clone();
    let most_bytes = most_bytes(device.size_bytes());
    Io::boxed(async move {
        let (mut at, end) = (range.offset_bytes, range.offset_bytes + range.len_bytes);
        let mut piece_bytes = FIRST_BYTES;
        while at < end {
            if !connection.goes_on() {
                return Err(broken_off());
            }
            // Cuts are where clusters begin.
            let len_bytes = (piece_bytes - at % piece_bytes).min(end - at);
            let begun = lane::now();
            act(&*device, at, len_bytes).await?;
            at += len_bytes;
            lane::yield_now().await;
            let took = lane::now().duration_since(begun);
            piece_bytes = next_piece(piece_bytes, took, most_bytes);
        }
        finish(&*device, fua).await
    })
}

async fn finish(device: &dyn BlockDevice, fua: bool) -> Result<()> {
    if fua { device.flush().await } else { Ok(()) }
}

/// How long a piece of a device may be at most, in bytes: a power of two.
fn most_bytes(size_bytes: u64) -> u64 {
    let few = (size_bytes / MOST_PIECES).checked_next_power_of_two();
    few.unwrap_or(MOST_BYTES).max(MOST_BYTES)
}

/// How long the next piece is to be in bytes: always a power of two.
fn next_piece(piece_bytes: u64, took: Duration, most_bytes: u64) -> u64 {
    if took < SHORT {
        (piece_bytes * 2).min(most_bytes)
    } else if took > LONG {
        (piece_bytes / 2).max(LEAST_BYTES)
    } else {
        piece_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_follow_the_time_that_they_take() {
        let (short, long) = (Duration::ZERO, Duration::from_secs(1));
        let after = |took| (0..60).fold(FIRST_BYTES, |piece, _| next_piece(piece, took, 1 << 40));
        assert_eq!(after(short), 1 << 40);
        assert_eq!(after(long), LEAST_BYTES);
        assert_eq!(next_piece(FIRST_BYTES, SHORT, 1 << 40), FIRST_BYTES);
    }

    #[test]
    fn pieces_are_short_unless_they_would_be_many() {
        assert_eq!(most_bytes(0), MOST_BYTES);
        assert_eq!(most_bytes(16 << 40), MOST_BYTES);
        assert_eq!(most_bytes((16 << 40) + (1 << 17)), 2 * MOST_BYTES);
        assert_eq!(most_bytes(1 << 63), 1 << 47);
    }
}

//! What a piece of a disk becomes in a stream, and back. It computes only, on any thread.

use std::cell::RefCell;

use vellum::Buffer;
use vellum_format::stream::payload_hash;
use zstd::bulk::{Compressor, Decompressor};

thread_local! {
    // They own tables that are worth keeping.
    static COMPRESSOR: RefCell<Option<(i32, Compressor<'static>)>> = const { RefCell::new(None) };
    static DECOMPRESSOR: RefCell<Option<Decompressor<'static>>> = const { RefCell::new(None) };
}

/// A piece of the disk, ready to be sent.
pub(super) enum Packed {
    /// It reads as zeroes.
    Zeroes,
    /// It is sent as it is.
    Plain(Buffer, [u8; 32]),
    /// It is sent as a frame of zstd, which is shorter.
    Frame(Vec<u8>, [u8; 32]),
}

/// Packs a piece; level 0 compresses nothing.
pub(super) fn pack(bytes: Buffer, level: i32) -> Packed {
    if bytes.is_zero() {
        return Packed::Zeroes;
    }
    match compress(&bytes, level) {
        Some(frame) => {
            let hash = payload_hash(&frame);
            Packed::Frame(frame, hash)
        }
        None => {
            let hash = payload_hash(&bytes);
            Packed::Plain(bytes, hash)
        }
    }
}

/// `None`: that would not make it shorter.
fn compress(bytes: &[u8], level: i32) -> Option<Vec<u8>> {
    if level == 0 {
        return None;
    }
    COMPRESSOR.with_borrow_mut(|kept| {
        if kept.as_ref().is_none_or(|(of, _)| *of != level) {
            *kept = Some((level, Compressor::new(level).ok()?));
        }
        let (_, compressor) = kept.as_mut()?;
        let frame = compressor.compress(bytes).ok()?;
        (frame.len() < bytes.len()).then_some(frame)
    })
}

/// The bytes of a piece whose payload has arrived. `None`: it is not what was sent.
pub(super) fn unpack(payload: Buffer, hash: &[u8; 32], len_bytes: usize) -> Option<Buffer> {
    if payload_hash(&payload) != *hash {
        return None;
    }
    if payload.len() == len_bytes {
        return Some(payload);
    }
    DECOMPRESSOR.with_borrow_mut(|kept| {
        if kept.is_none() {
            *kept = Decompressor::new().ok();
        }
        let mut bytes = Buffer::for_read(len_bytes);
        let decompressor = kept.as_mut()?;
        let len = decompressor.decompress_to_buffer(&payload[..], &mut bytes[..]);
        (len.ok()? == len_bytes).then_some(bytes)
    })
}

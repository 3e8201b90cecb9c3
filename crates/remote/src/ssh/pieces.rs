//! Requests that are longer than a server takes: cut, and put together again without a copy.

use vellum_io::{Buffer, Buffers};

/// The lengths of buffers.
pub(super) fn lengths(buffers: &Buffers) -> Vec<usize> {
    buffers.iter().map(Buffer::len).collect()
}

/// Cuts buffers into parts of `most_bytes` at most.
pub(super) fn cut(buffers: Buffers, most_bytes: u64) -> Vec<Buffers> {
    let most = usize::try_from(most_bytes).unwrap_or(usize::MAX).max(1);
    let mut parts = Vec::new();
    let mut part = Buffers::new();
    let mut room = most;
    for mut buffer in buffers {
        while !buffer.is_empty() {
            let piece = buffer.split_to(room.min(buffer.len()));
            room -= piece.len();
            part.push(piece);
            if room == 0 {
                parts.push(std::mem::take(&mut part));
                room = most;
            }
        }
    }
    if !part.is_empty() {
        parts.push(part);
    }
    parts
}

/// Puts pieces that were cut together again, to buffers of the lengths that they had.
pub(super) fn join(pieces: impl IntoIterator<Item = Buffer>, lengths: &[usize]) -> Buffers {
    let mut pieces = pieces.into_iter();
    let whole = lengths.iter().map(|&len| {
        let mut buffer = Buffer::zeroed(0);
        while buffer.len() < len {
            let Some(piece) = pieces.next() else { break };
            buffer = Buffer::join_all([buffer, piece]);
        }
        buffer
    });
    whole.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_cut_is_joined_where_it_lies() {
        for most in 1..20 {
            let bytes: Vec<u8> = (0..30).collect();
            let buffers: Buffers = [&bytes[..7], &bytes[7..7], &bytes[7..30]]
                .map(Buffer::copy_of)
                .into_iter()
                .collect();
            let (lengths, address) = (lengths(&buffers), buffers[2].as_ptr());
            let parts = cut(buffers, most);
            assert!(
                parts
                    .iter()
                    .all(|part| vellum_io::buffer::total_len(part) <= most)
            );
            let whole = join(parts.into_iter().flatten(), &lengths);
            assert_eq!(whole[2].as_ptr(), address);
            assert_eq!(
                (whole.len(), &whole[0][..], &whole[2][..]),
                (3, &bytes[..7], &bytes[7..])
            );
        }
    }
}

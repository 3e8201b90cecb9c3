//! Deflate, by itself or in zlib's wrapping, of whole blocks of a known size.

use flate2::{Compress, Compression, Decompress, FlushCompress, FlushDecompress, Status};

/// What stands around deflated bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wrapper {
    /// Zlib's header and checksum; the stream has to end where the block does.
    Zlib,
    /// Nothing; what comes after the block's bytes does not matter.
    None,
}

/// A block of exactly `len` bytes; `None` if it does not decompress to that.
pub(crate) fn inflate(compressed: &[u8], len: usize, wrapper: Wrapper) -> Option<Vec<u8>> {
    let mut stream = Decompress::new(wrapper == Wrapper::Zlib);
    let mut block = vec![0; len];
    let status = stream.decompress(compressed, &mut block, FlushDecompress::Finish);
    let has_ended = match (status.ok()?, wrapper) {
        (Status::StreamEnd, _) | (_, Wrapper::None) => true,
        (_, Wrapper::Zlib) => false,
    };
    (has_ended && stream.total_out() == len as u64).then_some(block)
}

/// A block deflated without a wrapper, with a window of so many bits (9 to 15); `None` if that makes
/// it no smaller.
pub(crate) fn deflate(block: &[u8], window_bits: u8) -> Option<Vec<u8>> {
    let level = Compression::default();
    let mut stream = Compress::new_with_window_bits(level, false, window_bits);
    let mut compressed = vec![0; block.len().saturating_sub(1)];
    let status = stream.compress(block, &mut compressed, FlushCompress::Finish);
    let len = usize::try_from(stream.total_out()).ok()?;
    compressed.truncate(len);
    (status.ok()? == Status::StreamEnd).then_some(compressed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_was_deflated_inflates() {
        let block: Vec<u8> = (0..65536u32).map(|at| (at / 700) as u8).collect();
        let compressed = deflate(&block, 12).unwrap();
        assert!(compressed.len() < block.len());
        let inflated = inflate(&compressed, block.len(), Wrapper::None);
        assert_eq!(inflated.as_deref(), Some(&block[..]));
        assert_eq!(inflate(&compressed, block.len() + 1, Wrapper::None), None);
        let mut random = fastrand::Rng::with_seed(1);
        let noise: Vec<u8> = std::iter::repeat_with(|| random.u8(..))
            .take(4096)
            .collect();
        assert_eq!(deflate(&noise, 12), None);
    }

    proptest! {
        #[test]
        fn any_bytes_give_a_block_or_nothing(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            inflate(&bytes, 512, Wrapper::Zlib);
            inflate(&bytes, 512, Wrapper::None);
        }
    }
}

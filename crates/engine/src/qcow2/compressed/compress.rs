//! Compression of one cluster: bytes in, fewer bytes out, or the word that there are
//! not fewer.

use std::cell::RefCell;

use flate2::{FlushCompress, Status};
use libdeflater::CompressionLvl;
use vellum_format::header::CompressionType;
use vellum_io::{Error, ErrorKind, Result};
use zstd::zstd_safe::CCtx;

vellum_io::with_setters! {
    /// How clusters are compressed that [`BlockDevice::write_compressed`] writes.
    ///
    /// [`BlockDevice::write_compressed`]: crate::BlockDevice::write_compressed
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct CompressionOptions {
        /// How hard to try: 1 to 12 for zlib (to 9 with a small window), 1 to 22 for
        /// zstd; more is slower and smaller. Default: 2 for zlib, 1 for clusters in which
        /// much is noise, that no effort makes smaller; what comes out is mostly smaller
        /// than what QEMU writes, in a third of the time. 3 for zstd, as in QEMU.
        pub level: Option<u32>,
        /// zlib only: let no match reach back further than 4 KiB. QEMU and this engine
        /// read either; a reader that inflates a stream in pieces with the window that
        /// QEMU writes with needs this. Slower, and larger by some percent.
        pub small_window: bool,
    }
}

/// The codec of an image, with everything chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Codec {
    Deflate(i32),
    /// With a level that fits each cluster.
    FittingDeflate,
    SmallWindowDeflate(u32),
    Zstd(i32),
}

const DEFLATE_LEVEL: i32 = 2;
const NOISE_DEFLATE_LEVEL: i32 = 1;
const DEFAULT_SMALL_WINDOW_LEVEL: u32 = 6;
const DEFAULT_ZSTD_LEVEL: u32 = 3;
/// Logarithm of the window that QEMU writes with.
const SMALL_WINDOW_BITS: u8 = 12;

impl CompressionOptions {
    /// The codec for an image of this compression type.
    pub(crate) fn codec(&self, kind: CompressionType) -> Result<Codec> {
        let (default, most) = match (kind, self.small_window) {
            (CompressionType::Zlib, false) if self.level.is_none() => {
                return Ok(Codec::FittingDeflate);
            }
            (CompressionType::Zlib, false) => (DEFLATE_LEVEL as u32, 12),
            (CompressionType::Zlib, true) => (DEFAULT_SMALL_WINDOW_LEVEL, 9),
            (CompressionType::Zstd, false) => (DEFAULT_ZSTD_LEVEL, 22),
            (CompressionType::Zstd, true) => {
                return Err(invalid(
                    "a small compression window is for images of compression type zlib".into(),
                ));
            }
        };
        let level = self.level.unwrap_or(default);
        if !(1..=most).contains(&level) {
            return Err(invalid(format!(
                "compression level {level} is not between 1 and {most}"
            )));
        }
        Ok(match (kind, self.small_window) {
            (CompressionType::Zlib, false) => Codec::Deflate(level as i32),
            (CompressionType::Zlib, true) => Codec::SmallWindowDeflate(level),
            (CompressionType::Zstd, _) => Codec::Zstd(level as i32),
        })
    }
}

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, "open", message)
}

thread_local! {
    // All of them own tables of up to a megabyte that are worth keeping.
    static DEFLATERS: RefCell<Vec<(i32, libdeflater::Compressor)>> = const { RefCell::new(Vec::new()) };
    static SMALL_DEFLATER: RefCell<Option<(u32, flate2::Compress)>> = const { RefCell::new(None) };
    static ZSTD: RefCell<Option<CCtx<'static>>> = const { RefCell::new(None) };
    static SCRATCH: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Compresses a cluster. `None`: that would not make it smaller.
pub(crate) fn compress(codec: Codec, cluster: &[u8]) -> Option<Box<[u8]>> {
    SCRATCH.with_borrow_mut(|scratch| {
        scratch.resize(cluster.len().checked_sub(1)?, 0);
        let len = match codec {
            Codec::Deflate(level) => deflate(level, cluster, scratch),
            Codec::FittingDeflate => deflate(fitting_level(cluster), cluster, scratch),
            Codec::SmallWindowDeflate(level) => deflate_small(level, cluster, scratch),
            Codec::Zstd(level) => pack_zstd(level, cluster, scratch),
        }?;
        Some(Box::from(&scratch[..len]))
    })
}

/// A raw deflate stream (without a zlib header).
fn deflate(level: i32, cluster: &[u8], packed: &mut [u8]) -> Option<usize> {
    DEFLATERS.with_borrow_mut(|kept| {
        let place = kept.iter().position(|(of, _)| *of == level);
        let place = place.unwrap_or_else(|| {
            let level_of = CompressionLvl::new(level).unwrap_or_default();
            kept.push((level, libdeflater::Compressor::new(level_of)));
            kept.len() - 1
        });
        kept[place].1.deflate_compress(cluster, packed).ok()
    })
}

/// What is looked at to tell how much of a cluster is noise: so many stretches of so
/// many bytes, evenly spaced.
const SAMPLES: usize = 64;
const SAMPLE_BYTES: usize = 128;
/// So many different values are in a stretch of noise at least: 101 on average, with a
/// deviation of 4. Text has 30 to 50, machine code up to 80.
const NOISE_VALUES: u32 = 86;
/// Noise in every so many-th stretch is much noise.
const MUCH_NOISE: usize = 4;

/// The level that is worth its time for a cluster. Noise (what is compressed or
/// encrypted already) costs most of all data, and has no matches to be found.
fn fitting_level(cluster: &[u8]) -> i32 {
    let stride = (cluster.len() / SAMPLES).max(SAMPLE_BYTES);
    let samples = || cluster.chunks_exact(stride);
    let noise =
        samples().filter(|sample| different_values(&sample[..SAMPLE_BYTES]) >= NOISE_VALUES);
    match noise.count() * MUCH_NOISE >= samples().len().max(1) {
        true => NOISE_DEFLATE_LEVEL,
        false => DEFLATE_LEVEL,
    }
}

fn different_values(bytes: &[u8]) -> u32 {
    let mut seen = [0_u64; 4];
    for byte in bytes {
        seen[usize::from(byte >> 6)] |= 1 << (byte & 63);
    }
    seen.iter().map(|values| values.count_ones()).sum()
}

/// A raw deflate stream whose matches reach back 4 KiB at most.
fn deflate_small(level: u32, cluster: &[u8], packed: &mut [u8]) -> Option<usize> {
    SMALL_DEFLATER.with_borrow_mut(|kept| {
        if kept.as_ref().is_none_or(|(of, _)| *of != level) {
            let level_of = flate2::Compression::new(level);
            let deflater =
                flate2::Compress::new_with_window_bits(level_of, false, SMALL_WINDOW_BITS);
            *kept = Some((level, deflater));
        }
        let (_, deflater) = kept.as_mut()?;
        deflater.reset();
        let status = deflater.compress(cluster, packed, FlushCompress::Finish);
        (status.ok()? == Status::StreamEnd).then(|| deflater.total_out() as usize)
    })
}

/// One zstd frame.
fn pack_zstd(level: i32, cluster: &[u8], packed: &mut [u8]) -> Option<usize> {
    ZSTD.with_borrow_mut(|kept| {
        let context = kept.get_or_insert_with(CCtx::create);
        context.compress(packed, cluster, level).ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qcow2::compressed::decompress::decompress;

    fn text(len: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        while bytes.len() < len {
            let line = format!("line {} of {};\n", bytes.len(), bytes.len() % 97);
            bytes.extend_from_slice(line.as_bytes());
        }
        bytes.truncate(len);
        bytes
    }

    /// Bytes that nothing can make fewer.
    fn noise(len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        fastrand::Rng::with_seed(1).fill(&mut bytes);
        bytes
    }

    fn options(level: Option<u32>, small_window: bool) -> CompressionOptions {
        CompressionOptions {
            level,
            small_window,
        }
    }

    #[test]
    fn every_level_gives_back_what_it_was_given() {
        use CompressionType::{Zlib, Zstd};
        let modes = [(Zlib, false, 12), (Zlib, true, 9), (Zstd, false, 22)];
        for (kind, small_window, most) in modes {
            for level in 1..=most {
                let codec = options(Some(level), small_window).codec(kind);
                let codec = codec.expect("a level that there is");
                for len in [512, 65536, 200_000] {
                    let plain = text(len);
                    let packed = compress(codec, &plain).expect("text is compressible");
                    assert!(packed.len() < len);
                    let mut again = vec![0; len];
                    decompress(kind, &packed, &mut again, len).expect("its own output");
                    assert!(again == plain, "{codec:?} {len}");
                }
                assert_eq!(compress(codec, &noise(4096)), None, "{codec:?}");
            }
        }
    }

    #[test]
    fn a_small_window_is_small() {
        // What repeats only after 8 KiB is nothing to a window of 4 KiB.
        let plain = noise(8192).repeat(4);
        let large = compress(Codec::Deflate(6), &plain).expect("three quarters are repeated");
        assert!(large.len() < 10_000);
        assert_eq!(compress(Codec::SmallWindowDeflate(9), &plain), None);
        let packed = compress(Codec::SmallWindowDeflate(9), &text(65536)).expect("text");
        // A decoder with no more window than that reads it.
        let mut inflater = flate2::Decompress::new_with_window_bits(false, SMALL_WINDOW_BITS);
        let mut again = vec![0; 65536];
        let (mut read, mut written) = (0, 0);
        while written < again.len() {
            let end = (written + 777).min(again.len());
            let piece = &mut again[written..end];
            inflater
                .decompress(&packed[read..], piece, flate2::FlushDecompress::None)
                .expect("a stream for this window");
            read = inflater.total_in() as usize;
            written = inflater.total_out() as usize;
        }
        assert!(again == text(65536));
    }

    #[test]
    fn the_level_fits_the_cluster() {
        assert_eq!(fitting_level(&noise(65536)), NOISE_DEFLATE_LEVEL);
        assert_eq!(fitting_level(&text(65536)), DEFLATE_LEVEL);
        assert_eq!(fitting_level(&[0; 512]), DEFLATE_LEVEL);
        let mixed = |noise_len| [noise(noise_len), text(65536 - noise_len)].concat();
        assert_eq!(fitting_level(&mixed(20_000)), NOISE_DEFLATE_LEVEL);
        assert_eq!(fitting_level(&mixed(10_000)), DEFLATE_LEVEL);
        let codec = options(None, false).codec(CompressionType::Zlib);
        let codec = codec.expect("the default");
        for plain in [text(65536), mixed(20_000), text(512), text(2 << 20)] {
            let packed = compress(codec, &plain).expect("text is compressible");
            let mut again = vec![0; plain.len()];
            let len = again.len();
            decompress(CompressionType::Zlib, &packed, &mut again, len).expect("its own output");
            assert!(again == plain);
        }
        assert_eq!(compress(codec, &noise(65536)), None);
    }

    #[test]
    fn levels_that_there_are_not_are_refused() {
        use CompressionType::{Zlib, Zstd};
        for (kind, level, small_window) in [
            (Zlib, Some(0), false),
            (Zlib, Some(13), false),
            (Zlib, Some(10), true),
            (Zstd, Some(23), false),
            (Zstd, None, true),
        ] {
            let refused = options(level, small_window).codec(kind);
            assert_eq!(refused.unwrap_err().kind(), ErrorKind::InvalidArgument);
        }
    }
}

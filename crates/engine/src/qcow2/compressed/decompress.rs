//! Decompression of one cluster: bytes in, a cluster or its beginning out, nothing
//! else.
//!
//! What is on disk has no exact length: a descriptor counts 512-byte sectors, so
//! the stream is followed by whatever the last sector holds, and a stream that
//! another program wrote may run on beyond the cluster. Both are accepted; a
//! stream that ends before the output is full is not.
//!
//! A whole cluster is decompressed in one go. A beginning costs as much as there is
//! of it: deflate stops where the output is full (zstd works block by block, and a
//! cluster is one block).

use std::cell::RefCell;

use flate2::{FlushDecompress, Status};
use vellum_format::header::CompressionType;
use zstd::stream::raw::{Decoder, InBuffer, Operation, OutBuffer};
use zstd::zstd_safe::{DCtx, find_frame_compressed_size, get_frame_content_size};

use crate::{Error, ErrorKind, Result};

thread_local! {
    // All of them own tables of tens of kilobytes that are worth keeping.
    static INFLATER: RefCell<libdeflater::Decompressor> =
        RefCell::new(libdeflater::Decompressor::new());
    static STREAM_INFLATER: RefCell<flate2::Decompress> =
        RefCell::new(flate2::Decompress::new(false));
    static ZSTD: RefCell<DCtx<'static>> = RefCell::new(DCtx::create());
    static ZSTD_STREAM: RefCell<Option<Decoder<'static>>> = const { RefCell::new(None) };
}

/// Decompresses the first `output.len()` bytes of a cluster of `cluster_bytes`.
///
/// # Errors
/// [`ErrorKind::Corrupt`] if `input` is broken, or ends, before `output` is full;
/// the content of `output` is then unspecified.
pub(crate) fn decompress(
    kind: CompressionType,
    input: &[u8],
    output: &mut [u8],
    cluster_bytes: usize,
) -> Result<()> {
    let whole = output.len() == cluster_bytes;
    match kind {
        CompressionType::Zlib if whole => inflate(input, output),
        CompressionType::Zlib => inflate_prefix(input, output),
        CompressionType::Zstd if whole => unzstd(input, output),
        CompressionType::Zstd => unzstd_prefix(input, output),
    }
}

/// How long a cluster's compressed data really is, which is followed by anything; `None` where that cannot be
/// told, as where it is damaged or made of several frames.
pub(crate) fn exact_len(
    kind: CompressionType,
    input: &[u8],
    cluster_bytes: usize,
) -> Option<usize> {
    match kind {
        CompressionType::Zlib => {
            let mut inflater = flate2::Decompress::new(false);
            // Room for one byte more: only then it says that the stream has ended.
            let mut output = vec![0; cluster_bytes + 1];
            let status = inflater.decompress(input, &mut output, FlushDecompress::Finish);
            let is_whole = inflater.total_out() == cluster_bytes as u64;
            let has_ended = matches!(status, Ok(Status::StreamEnd));
            (is_whole && has_ended).then(|| inflater.total_in() as usize)
        }
        CompressionType::Zstd => {
            let content = get_frame_content_size(input).ok().flatten();
            let is_whole = content == Some(cluster_bytes as u64);
            is_whole.then(|| find_frame_compressed_size(input).ok())?
        }
    }
}

/// Inflates a raw deflate stream (without a zlib header) until `output` is full.
fn inflate(input: &[u8], output: &mut [u8]) -> Result<()> {
    let whole = INFLATER.with_borrow_mut(|inflater| inflater.deflate_decompress(input, output));
    match whole {
        Ok(len) if len == output.len() => Ok(()),
        Ok(len) => Err(too_short(len, output.len())),
        // The fast decoder wants the stream to end inside the cluster and refuses
        // what goes wrong anywhere; the slow one stops where the cluster is full.
        Err(_) => inflate_prefix(input, output),
    }
}

/// Inflates as much of a stream as fills `output`, whatever follows.
fn inflate_prefix(input: &[u8], output: &mut [u8]) -> Result<()> {
    STREAM_INFLATER.with_borrow_mut(|inflater| {
        inflater.reset(false);
        inflate_with(inflater, input, output)
    })
}

fn inflate_with(inflater: &mut flate2::Decompress, input: &[u8], output: &mut [u8]) -> Result<()> {
    loop {
        let (read, written) = (inflater.total_in() as usize, inflater.total_out() as usize);
        if written == output.len() {
            return Ok(());
        }
        let status = inflater
            .decompress(
                &input[read..],
                &mut output[written..],
                FlushDecompress::Finish,
            )
            .map_err(|error| broken(&error.to_string()))?;
        let len = inflater.total_out() as usize;
        let stuck = len == written && inflater.total_in() as usize == read;
        if len < output.len() && (status == Status::StreamEnd || stuck) {
            return Err(too_short(len, output.len()));
        }
    }
}

/// Decompresses zstd frames, one or several, until `output` is full.
fn unzstd(input: &[u8], output: &mut [u8]) -> Result<()> {
    // Nearly always the cluster is one frame, and needs no buffer between.
    if let Ok(len) = find_frame_compressed_size(input)
        && let Some(frame) = input.get(..len)
        && let Ok(len) = ZSTD.with_borrow_mut(|context| context.decompress(output, frame))
        && len == output.len()
    {
        return Ok(());
    }
    unzstd_prefix(input, output)
}

/// Decompresses as much of zstd frames as fills `output`, whatever follows.
fn unzstd_prefix(input: &[u8], output: &mut [u8]) -> Result<()> {
    ZSTD_STREAM.with_borrow_mut(|kept| {
        let mut decoder = match kept.take() {
            Some(decoder) => decoder,
            None => Decoder::new().map_err(|error| broken(&error.to_string()))?,
        };
        decoder
            .reinit()
            .map_err(|error| broken(&error.to_string()))?;
        unzstd_with(&mut decoder, input, output)?;
        *kept = Some(decoder);
        Ok(())
    })
}

fn unzstd_with(decoder: &mut Decoder<'_>, input: &[u8], output: &mut [u8]) -> Result<()> {
    let cluster_len = output.len();
    let mut input = InBuffer::around(input);
    let mut output = OutBuffer::around(output);
    while output.pos() < cluster_len {
        let before = (input.pos(), output.pos());
        decoder
            .run(&mut input, &mut output)
            .map_err(|error| broken(&error.to_string()))?;
        if (input.pos(), output.pos()) == before {
            return Err(too_short(before.1, cluster_len));
        }
    }
    Ok(())
}

fn broken(reason: &str) -> Error {
    Error::new(
        ErrorKind::Corrupt,
        "decompress",
        format!("broken compressed cluster: {reason}"),
    )
}

fn too_short(len: usize, cluster_len: usize) -> Error {
    broken(&format!(
        "the stream ends after {len} of {cluster_len} bytes"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(len: usize) -> Vec<u8> {
        (0..len)
            .map(|i| ((i * i) >> 7) as u8 ^ (i as u8 & 3))
            .collect()
    }

    fn deflate(bytes: &[u8]) -> Vec<u8> {
        let level = libdeflater::CompressionLvl::default();
        let mut compressor = libdeflater::Compressor::new(level);
        let mut packed = vec![0; compressor.deflate_compress_bound(bytes.len())];
        let len = compressor
            .deflate_compress(bytes, &mut packed)
            .expect("fits the bound");
        packed.truncate(len);
        packed
    }

    type Codec = (fn(&[u8]) -> Vec<u8>, fn(&[u8], &mut [u8]) -> Result<()>);

    /// Codecs for whole clusters of 64 KiB, and for beginnings.
    fn unpack<const CLUSTER: usize>(kind: CompressionType) -> fn(&[u8], &mut [u8]) -> Result<()> {
        match kind {
            CompressionType::Zlib => {
                |input, output| decompress(CompressionType::Zlib, input, output, CLUSTER)
            }
            CompressionType::Zstd => {
                |input, output| decompress(CompressionType::Zstd, input, output, CLUSTER)
            }
        }
    }

    fn codecs() -> [Codec; 4] {
        let zstd: fn(&[u8]) -> Vec<u8> =
            |bytes| zstd::bulk::compress(bytes, 3).expect("compresses");
        [
            (deflate, unpack::<65536>(CompressionType::Zlib)),
            (deflate, unpack::<{ 1 << 20 }>(CompressionType::Zlib)),
            (zstd, unpack::<65536>(CompressionType::Zstd)),
            (zstd, unpack::<{ 1 << 20 }>(CompressionType::Zstd)),
        ]
    }

    #[test]
    fn the_exact_length_is_told_whatever_follows() {
        let cluster = sample(65536);
        let zstd = zstd::bulk::compress(&cluster, 3).expect("compresses");
        for (kind, packed) in [
            (CompressionType::Zlib, deflate(&cluster)),
            (CompressionType::Zstd, zstd),
        ] {
            let len = packed.len();
            for behind in [0, 1, 700] {
                let mut input = packed.clone();
                input.resize(len + behind, 0xa5);
                assert_eq!(exact_len(kind, &input, cluster.len()), Some(len));
            }
            assert_eq!(exact_len(kind, &packed, 2 * cluster.len()), None);
            assert_eq!(exact_len(kind, &packed[..len - 1], cluster.len()), None);
            assert_eq!(exact_len(kind, b"", cluster.len()), None);
        }
    }

    #[test]
    fn a_beginning_needs_only_what_it_is_made_of() {
        let mut random = fastrand::Rng::with_seed(1);
        let cluster: Vec<u8> = (0..65536).map(|_| random.u8(..16)).collect();
        let packed = deflate(&cluster);
        for len in [1, 512, 4096, 30_000, 65_535] {
            let mut output = vec![0; len];
            let enough = packed.len() * len / cluster.len() + 1000;
            let input = &packed[..enough.min(packed.len())];
            inflate_prefix(input, &mut output).expect("enough");
            assert!(output == cluster[..len]);
        }
        assert!(inflate_prefix(&packed[..100], &mut [0; 30_000]).is_err());
    }

    #[test]
    fn fills_a_cluster_whatever_follows_the_stream() {
        for (compress, decompress) in codecs() {
            let cluster = sample(65536);
            let mut packed = compress(&cluster);
            packed.extend_from_slice(&[0xa5; 511]);
            let mut output = vec![0; cluster.len()];
            decompress(&packed, &mut output).expect("a whole stream");
            assert!(output == cluster);
        }
    }

    #[test]
    fn takes_the_head_of_a_stream_that_holds_more() {
        for (compress, decompress) in codecs() {
            let bytes = sample(100_000);
            let mut output = vec![0; 65536];
            decompress(&compress(&bytes), &mut output).expect("more than enough");
            assert!(output == bytes[..65536]);
        }
    }

    #[test]
    fn joins_several_zstd_frames() {
        let cluster = sample(4096);
        let mut packed = zstd::bulk::compress(&cluster[..1000], 1).expect("compresses");
        packed.extend(zstd::bulk::compress(&cluster[1000..], 1).expect("compresses"));
        let mut output = vec![0; cluster.len()];
        unzstd(&packed, &mut output).expect("two frames");
        assert!(output == cluster);
    }

    #[test]
    fn refuses_what_is_short_or_broken() {
        for (compress, decompress) in codecs() {
            let cluster = sample(65536);
            let packed = compress(&cluster);
            let mut output = vec![0; cluster.len()];
            assert!(decompress(&packed[..packed.len() / 2], &mut output).is_err());
            assert!(decompress(&compress(&cluster[..65000]), &mut output).is_err());
            assert!(decompress(&[0xff; 600], &mut output).is_err());
            assert!(decompress(&[], &mut output).is_err());
            decompress(&packed, &mut output).expect("still works after a failure");
        }
    }
}

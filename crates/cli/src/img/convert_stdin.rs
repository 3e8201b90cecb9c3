//! `convert` from standard input: raw bytes from a pipe, whose number is known only at its end.
//!
//! The target is made small and grows by doubling; in the end it gets its true size. If standard
//! input is a file, it is opened by name instead, and may have any format.

use std::fs::File;
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;
use std::sync::Arc;

use vellum::{BlockDevice, Buffer, Io, RequestFlags};
use vellum_graph::probe::{PROBE_BYTES, Probed, probe};
use vellum_io::error::io_text;
use vellum_io::lane;
use vellum_jobs::sparse::{Sparse, zero_runs};

use super::command::{Failure, fail};
use super::convert_args::Arguments;

/// Bytes that are collected before they are written: whole clusters of any size.
const CHUNK_BYTES: usize = 2 << 20;
const WRITES_IN_FLIGHT: usize = 8;
/// The size that a target begins with.
pub const START_BYTES: u64 = 1 << 30;
const SECTOR_BYTES: u64 = 512;
const DEFAULT_SPARSE_BYTES: u64 = 4096;

/// What standard input is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Input {
    /// A file or a block device, which has a name.
    File,
    /// A pipe, a socket or a terminal.
    Pipe,
}

/// The name of a file on standard input.
pub const INPUT_FILE: &str = "/dev/stdin";

/// Looks at standard input.
pub fn input() -> Input {
    let kind = std::fs::metadata(INPUT_FILE).map(|metadata| metadata.file_type());
    match kind {
        Ok(kind) if kind.is_file() || kind.is_block_device() => Input::File,
        _ => Input::Pipe,
    }
}

/// Refuses what a pipe cannot be.
pub fn check(arguments: &Arguments) -> Result<(), Failure> {
    if arguments.names.len() > 1 {
        return fail("Standard input must be the only source");
    }
    if let Some(format) = arguments.source_format.as_deref().filter(|f| *f != "raw") {
        return fail(format!(
            "Only raw images can be read from a pipe: {format} needs a file"
        ));
    }
    let needless = [
        (arguments.source_image_opts, "--image-opts"),
        (arguments.source_snapshot.is_some(), "-l"),
        (arguments.bitmaps, "--bitmaps"),
        (arguments.salvage, "--salvage"),
        (arguments.copy_range, "-C"),
        (arguments.backing.is_some(), "-B"),
        (arguments.no_create, "-n"),
    ];
    match needless.into_iter().find(|(is_set, _)| *is_set) {
        Some((_, option)) => fail(format!("{option} is not possible with a pipe")),
        None => Ok(()),
    }
}

/// The first bytes from the pipe. Without a format that the user names they must not look
/// like an image: copied as they are, they would become one of that format, whatever the
/// target is called.
pub async fn begin(arguments: &Arguments) -> Result<Chunk, Failure> {
    let mut bytes = Buffer::zeroed(CHUNK_BYTES);
    let len = fill(&mut bytes).await?;
    let format = match probe(&bytes[..len.min(PROBE_BYTES)]) {
        Probed::Raw => None,
        Probed::Qcow2 => Some("qcow2"),
        Probed::Luks => Some("luks"),
        Probed::Foreign(format) => Some(format),
    };
    match format.filter(|_| arguments.source_format.is_none()) {
        None => Ok(Chunk { bytes, len }),
        Some(format) => fail(format!(
            "Standard input looks like {format}, and only raw images can be read from a pipe: \
             give it as a file ('- < FILE' is one too), or copy it as it is with -f raw"
        )),
    }
}

/// Bytes from the pipe, and zeroes behind them.
pub struct Chunk {
    bytes: Buffer,
    len: usize,
}

/// Copies the pipe to a new image; says how many bytes came.
pub async fn copy(
    first: Chunk,
    target: &Arc<dyn BlockDevice>,
    arguments: &Arguments,
    mut progress: impl FnMut(u64),
) -> Result<u64, Failure> {
    let min_bytes = arguments.sparse_bytes.unwrap_or(DEFAULT_SPARSE_BYTES);
    let mut writer = Writer {
        target,
        compress: arguments.compress,
        sparse: Sparse::new(min_bytes, target.info().request_alignment_bytes.into()),
        keeps_zeroes: min_bytes == 0,
        running: Vec::new(),
    };
    let mut at = 0;
    let mut first = Some(first);
    loop {
        let Chunk { bytes: chunk, len } = match first.take() {
            Some(first) => first,
            None => {
                let mut bytes = Buffer::zeroed(CHUNK_BYTES);
                let len = fill(&mut bytes).await?;
                Chunk { bytes, len }
            }
        };
        let whole = (len as u64).next_multiple_of(SECTOR_BYTES);
        let is_last = len < CHUNK_BYTES;
        writer.make_room(at + whole, is_last).await?;
        writer.write(at, &chunk[..whole as usize]).await?;
        at += len as u64;
        progress(at);
        if is_last {
            writer.drain(0).await?;
            return Ok(at);
        }
    }
}

/// Fills a buffer from the pipe; fewer bytes only at its end.
async fn fill(buffer: &mut [u8]) -> Result<usize, Failure> {
    // Without the buffer of the standard library: what lies in that, nobody waits for.
    let input = std::io::stdin().as_fd().try_clone_to_owned();
    let mut input = File::from(input.map_err(reading)?);
    let mut len = 0;
    while len < buffer.len() {
        lane::poll_readable(input.as_fd()).await?;
        match input.read(&mut buffer[len..]) {
            Ok(0) => break,
            Ok(count) => len += count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(reading(error)),
        }
    }
    Ok(len)
}

struct Writer<'a> {
    target: &'a Arc<dyn BlockDevice>,
    compress: bool,
    sparse: Sparse,
    /// `-S 0`: zeroes are written too.
    keeps_zeroes: bool,
    running: Vec<Io<Buffer>>,
}

impl Writer<'_> {
    /// Makes the target so long at least, or exactly.
    async fn make_room(&mut self, end_bytes: u64, exactly: bool) -> Result<(), Failure> {
        let size = self.target.size_bytes();
        let wanted = match exactly {
            true => end_bytes,
            false if end_bytes <= size => return Ok(()),
            false => end_bytes.max(size.saturating_mul(2)),
        };
        if wanted < size {
            // What is cut off must not be in use.
            self.drain(0).await?;
        }
        if wanted != size {
            self.target.truncate(wanted).await.map_err(writing)?;
        }
        Ok(())
    }

    async fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), Failure> {
        if self.compress {
            let cluster = self.target.info().cluster_size_bytes.unwrap_or(1) as usize;
            let mut offset = at;
            for piece in bytes.chunks(cluster) {
                if !vellum_io::buffer::is_zero(piece) {
                    let piece = Buffer::copy_of(piece);
                    let flags = RequestFlags::default();
                    self.start(self.target.write_compressed(offset, piece, flags))
                        .await?;
                }
                offset += piece.len() as u64;
            }
            return Ok(());
        }
        let mut start = 0;
        for run in zero_runs(bytes, at, self.sparse) {
            let piece = &bytes[start..start + run.len_bytes];
            if !run.zero || self.keeps_zeroes {
                let flags = RequestFlags::default();
                let offset = at + start as u64;
                self.start(self.target.write(offset, Buffer::copy_of(piece), flags))
                    .await?;
            }
            start += run.len_bytes;
        }
        Ok(())
    }

    async fn start(&mut self, write: Io<Buffer>) -> Result<(), Failure> {
        self.running.push(write);
        self.drain(WRITES_IN_FLIGHT - 1).await
    }

    /// Waits until only so many writes run.
    async fn drain(&mut self, most: usize) -> Result<(), Failure> {
        while self.running.len() > most {
            self.running.remove(0).await.map_err(writing)?;
        }
        Ok(())
    }
}

fn reading(error: std::io::Error) -> Failure {
    Failure::Message(format!(
        "error while reading standard input: {}",
        io_text(&error)
    ))
}

fn writing(error: vellum::Error) -> Failure {
    let why = crate::report::error_text(&error);
    Failure::Message(format!("error while writing: {why}"))
}

//! `convert` to standard output: an image as a stream, for a pipe.
//!
//! The sources are looked over first, so that the metadata is known before the data: see
//! `vellum::qcow2::create::ImageStream`. Nothing is written before everything that can be
//! refused has been.
//!
//! Invariant: only under our own name; `-` is a file to QEMU's programs.

use std::collections::VecDeque;
use std::io::{IsTerminal, Write};
use std::ops::Range;
use std::sync::Arc;

use vellum::qcow2::create::ClusterSet;
use vellum::{BlockDevice, Buffer, Io};
use vellum_images::create;
use vellum_io::error::io_text;
use vellum_jobs::map::map;
use vellum_options::create_options::CreateSettings;

use super::command::{Command, Failure, Outcome, fail};
use super::convert_args::Arguments;
use crate::progress::Progress;
use crate::report;

/// Bytes of one read of the sources.
const READ_BYTES: u64 = 1 << 20;
/// Reads in flight: what a slow reader of the pipe makes us keep in memory.
const READS_IN_FLIGHT: usize = 8;

/// The name that means standard output, or standard input.
pub const DASH: &str = "-";
/// What standard output is, if that is a file.
pub const OUTPUT_FILE: &str = "/dev/stdout";

/// Whether `-` stands for a stream here.
pub fn has_streams(program: &str) -> bool {
    report::is_own_name(program)
}

/// Copies the sources to standard output.
pub async fn convert(
    command: Command<'_>,
    arguments: &Arguments,
    format: &str,
    sources: &[Arc<dyn BlockDevice>],
    settings: &CreateSettings,
) -> Outcome {
    check(arguments)?;
    let disk = Disk::new(sources);
    let progress = Progress::new(command.program, false, arguments.quiet, 1.0);
    let mut output = Output {
        progress,
        written_bytes: 0,
        total_bytes: 0,
    };
    match format {
        "qcow2" => {
            let options = create::qcow2_options(settings)?;
            options.validate()?;
            let mut set = ClusterSet::new(disk.size_bytes, options.cluster_size_bytes);
            disk.find_data(|range| set.add(range)).await?;
            let stream = options.stream(set)?;
            output.total_bytes = stream.len_bytes();
            for piece in stream.metadata() {
                output.write(&piece)?;
            }
            output.copy(&disk, stream.data(READ_BYTES)).await?;
        }
        "raw" => {
            output.total_bytes = disk.size_bytes;
            let starts = (0..disk.size_bytes).step_by(READ_BYTES as usize);
            let ranges = starts.map(|at| at..(at + READ_BYTES).min(disk.size_bytes));
            output.copy(&disk, ranges).await?;
        }
        other => return fail(format!("A {other} image cannot be written to a pipe")),
    }
    output.finish()
}

/// Refuses what has no meaning for a stream.
fn check(arguments: &Arguments) -> Result<(), Failure> {
    let refusals = [
        (
            arguments.compress,
            "-c: how long the data is must be known before the data",
        ),
        (arguments.no_create, "-n: there is nothing yet"),
        (arguments.bitmaps, "--bitmaps"),
        (arguments.salvage, "--salvage"),
        (arguments.rate_bytes.is_some(), "-r"),
    ];
    if let Some((_, why)) = refusals.into_iter().find(|(is_set, _)| *is_set) {
        return fail(format!(
            "Not possible when writing to standard output: {why}"
        ));
    }
    match std::io::stdout().is_terminal() {
        true => fail("Standard output is a terminal; an image goes into a pipe or a file"),
        false => Ok(()),
    }
}

/// The sources, one behind the other.
struct Disk<'a> {
    sources: &'a [Arc<dyn BlockDevice>],
    size_bytes: u64,
}

impl<'a> Disk<'a> {
    fn new(sources: &'a [Arc<dyn BlockDevice>]) -> Disk<'a> {
        Disk {
            sources,
            size_bytes: sources.iter().map(|source| source.size_bytes()).sum(),
        }
    }

    /// Calls `each` with every range that holds data.
    async fn find_data(&self, mut each: impl FnMut(Range<u64>)) -> vellum::Result<()> {
        let mut first = 0;
        for source in self.sources {
            let size = source.size_bytes();
            map(source, 0, size, |entry| {
                if entry.extent.kind.needs_reading() {
                    let start = first + entry.start_bytes;
                    each(start..start + entry.extent.len_bytes);
                }
            })
            .await?;
            first += size;
        }
        Ok(())
    }

    /// Starts to read a range; what lies beyond the end is zeroes.
    fn read(&self, range: Range<u64>) -> Io<Buffer> {
        let mut first = 0;
        for source in self.sources {
            let end = first + source.size_bytes();
            if range.start >= first && range.end <= end {
                let len = (range.end - range.start) as usize;
                return source.read(range.start - first, Buffer::for_read(len));
            }
            first = end;
        }
        Io::boxed(read_across(self.sources.to_vec(), range))
    }
}

/// Reads a range that touches several sources, or goes beyond the last.
async fn read_across(
    sources: Vec<Arc<dyn BlockDevice>>,
    range: Range<u64>,
) -> vellum::Result<Buffer> {
    let mut bytes = Buffer::zeroed((range.end - range.start) as usize);
    let mut first = 0;
    for source in sources {
        let end = first + source.size_bytes();
        let part = range.start.max(first)..range.end.min(end);
        if !part.is_empty() {
            let len = (part.end - part.start) as usize;
            let read = source.read(part.start - first, Buffer::for_read(len));
            let at = (part.start - range.start) as usize;
            bytes[at..at + len].copy_from_slice(&read.await?);
        }
        first = end;
    }
    Ok(bytes)
}

/// Standard output.
struct Output {
    progress: Progress,
    written_bytes: u64,
    total_bytes: u64,
}

impl Output {
    /// Writes what the ranges hold, reading ahead.
    async fn copy(
        &mut self,
        disk: &Disk<'_>,
        ranges: impl Iterator<Item = Range<u64>>,
    ) -> Result<(), Failure> {
        let mut running: VecDeque<(u64, Io<Buffer>)> = VecDeque::new();
        let mut ranges = ranges.fuse();
        loop {
            while running.len() < READS_IN_FLIGHT
                && let Some(range) = ranges.next()
            {
                running.push_back((range.start, disk.read(range)));
            }
            let Some((start, read)) = running.pop_front() else {
                return Ok(());
            };
            let bytes = read.await.map_err(|error| {
                let why = report::error_text(&error);
                Failure::Message(format!("error while reading offset {start}: {why}"))
            })?;
            self.write(&bytes)?;
        }
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        let written = std::io::stdout().lock().write_all(bytes);
        if let Err(error) = written {
            return fail(writing(&error));
        }
        self.written_bytes += bytes.len() as u64;
        self.progress.show(self.written_bytes, self.total_bytes);
        Ok(())
    }

    fn finish(self) -> Outcome {
        self.progress.end();
        match std::io::stdout().lock().flush() {
            Ok(()) => Ok(0),
            Err(error) => fail(writing(&error)),
        }
    }
}

fn writing(error: &std::io::Error) -> String {
    format!("error while writing to standard output: {}", io_text(error))
}

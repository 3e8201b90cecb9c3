//! `read`, `readv`, `write` and `writev`: commands that move data and wait for it.

use std::time::Instant;

use vellum::{Error, RequestFlags, Result, ZeroRequest};
use vellum_io::Buffer;
use vellum_io::error::errno_text;

use super::arguments::{self, MAX_REQUEST_BYTES, Words, require_sectors};
use super::image::Image;
use super::outcome::{Failed, Outcome};
use super::print::{self, Transfer};
use crate::report;

/// The byte that is written where no pattern is given.
pub const DEFAULT_PATTERN: u8 = 0xcd;

/// Reports a failed request as `what failed: why`.
pub fn failed(what: &str, error: &Error) -> Failed {
    report::print_line(format_args!("{what} failed: {}", errno_text(error.errno())));
    report::about_cause(error);
    Failed
}

/// What is done with bytes once they are read.
#[derive(Debug, Clone)]
pub struct Inspection {
    /// What every byte of the checked part must be.
    pub pattern: Option<u8>,
    /// The part that is checked.
    pub checked: std::ops::Range<usize>,
    /// Show the bytes.
    pub show: bool,
    /// Report nothing.
    pub quiet: bool,
    /// Report for machines.
    pub machine: bool,
}

impl Inspection {
    /// As the options say, with everything checked.
    pub fn of(words: &Words, len_bytes: u64) -> Outcome<Inspection> {
        Ok(Inspection {
            pattern: words.pattern('P')?,
            checked: 0..usize::try_from(len_bytes).map_err(|_| Failed)?,
            show: words.has('v'),
            quiet: words.has('q'),
            machine: words.has('C'),
        })
    }

    /// Checks, shows and reports what was read.
    pub fn finish(&self, bytes: &[u8], offset_bytes: u64, started: Instant) -> Outcome {
        let elapsed = started.elapsed();
        let result = self.check(&bytes[self.checked.clone()], offset_bytes);
        if self.quiet {
            return result;
        }
        if self.show {
            print::dump(bytes, offset_bytes);
        }
        Transfer {
            verb: "read",
            offset_bytes,
            len_bytes: bytes.len() as u64,
            elapsed,
            machine: self.machine,
        }
        .print();
        result
    }

    fn check(&self, bytes: &[u8], offset_bytes: u64) -> Outcome {
        match self.pattern {
            Some(pattern) if bytes.iter().any(|&byte| byte != pattern) => {
                report::print_line(format_args!(
                    "Pattern verification failed at offset {}, {} bytes",
                    offset_bytes + self.checked.start as u64,
                    bytes.len()
                ));
                Err(Failed)
            }
            _ => Ok(()),
        }
    }
}

/// `read`
pub async fn read(image: &Image, words: &Words, misalign: bool) -> Outcome {
    let check_len = words.number('l')?;
    let pattern = words.pattern('P')?;
    let check_start = words.number('s')?;
    let (offset, length) = words.offset_and_length()?;
    let offset = arguments::number(offset)?;
    let len = bounded_length(length, "")?;
    if pattern.is_none() && (check_len.is_some() || check_start.is_some()) {
        return Err(words.usage());
    }
    let start = check_start.unwrap_or(0);
    let end = check_len.map_or(Some(len), |count| start.checked_add(count));
    let Some(end) = end.filter(|&end| start <= end && end <= len) else {
        report::print_line("pattern verification range exceeds end of read data");
        return Err(Failed);
    };
    let mut inspection = Inspection::of(words, len)?;
    // Both are within `len`, which is the length of a buffer.
    inspection.checked = start as usize..end as usize;
    if words.has('b') {
        require_sectors(offset, "offset")?;
        require_sectors(len, "count")?;
    }
    let buffer = arguments::filled(len, 0, misalign)?;
    let started = Instant::now();
    let bytes = match words.has('b') {
        true => image.load_vm_state(offset, buffer).await,
        false => image.read(offset, buffer).await,
    };
    let bytes = bytes.map_err(|error| failed("read", &error))?;
    inspection.finish(&bytes, offset, started)
}

/// `readv`
pub async fn readv(image: &Image, words: &Words, misalign: bool) -> Outcome {
    let (offset, lengths) = words.offset_and_lengths()?;
    let len = lengths.iter().sum();
    let inspection = Inspection::of(words, len)?;
    let buffer = arguments::filled(len, 0, misalign)?;
    let started = Instant::now();
    let bytes = image
        .read(offset, buffer)
        .await
        .map_err(|error| failed("readv", &error))?;
    inspection.finish(&bytes, offset, started)
}

/// `write`
pub async fn write(image: &Image, words: &Words, misalign: bool) -> Outcome {
    let pattern = words.pattern('P')?;
    check_write_options(words)?;
    let (offset, length) = words.offset_and_length()?;
    let offset = arguments::number(offset)?;
    let len = match words.has('n') {
        true => arguments::number(length)?,
        false => bounded_length(length, " without -n")?,
    };
    if words.has('b') || words.has('c') {
        require_sectors(offset, "offset")?;
        require_sectors(len, "count")?;
    }
    let buffer = match (words.has('z'), words.value('s')) {
        (true, _) => Buffer::zeroed(0),
        (false, Some(path)) => arguments::filled_from(len, path, misalign)?,
        (false, None) => arguments::filled(len, pattern.unwrap_or(DEFAULT_PATTERN), misalign)?,
    };
    let started = Instant::now();
    let result = request_write(image, words, offset, len, buffer).await;
    result.map_err(|error| failed("write", &error))?;
    report_write(words, offset, len, started);
    Ok(())
}

async fn request_write(
    image: &Image,
    words: &Words,
    offset_bytes: u64,
    len_bytes: u64,
    buffer: Buffer,
) -> Result<()> {
    let fua = words.has('f');
    if words.has('b') {
        return image.save_vm_state(offset_bytes, buffer).await;
    }
    if words.has('c') && !words.has('z') {
        return image.write_compressed(offset_bytes, buffer).await;
    }
    if words.has('z') {
        let request = ZeroRequest::default()
            .may_unmap(words.has('u'))
            .no_fallback(words.has('n'))
            .fua(fua);
        return image.write_zeroes(offset_bytes, len_bytes, request).await;
    }
    image
        .write(offset_bytes, buffer, RequestFlags::default().fua(fua))
        .await
}

fn check_write_options(words: &Words) -> Outcome {
    let has = |letter| words.has(letter);
    let sources = ['z', 'P', 's'].into_iter().filter(|&letter| has(letter));
    let message = if has('b') && has('z') {
        "-b and -z cannot be specified at the same time"
    } else if has('f') && (has('b') || has('c')) {
        "-f and -b or -c cannot be specified at the same time"
    } else if has('n') && !has('z') {
        "-n requires -z to be specified"
    } else if has('u') && !has('z') {
        "-u requires -z to be specified"
    } else if sources.count() > 1 {
        "Only one of -z, -P, and -s can be specified at the same time"
    } else {
        return Ok(());
    };
    report::print_line(message);
    Err(Failed)
}

/// `writev`
pub async fn writev(image: &Image, words: &Words, misalign: bool) -> Outcome {
    let pattern = words.pattern('P')?.unwrap_or(DEFAULT_PATTERN);
    let (offset, lengths) = words.offset_and_lengths()?;
    let len = lengths.iter().sum();
    let buffer = arguments::filled(len, pattern, misalign)?;
    let flags = RequestFlags::default().fua(words.has('f'));
    let started = Instant::now();
    let result = image.write(offset, buffer, flags).await;
    result.map_err(|error| failed("writev", &error))?;
    report_write(words, offset, len, started);
    Ok(())
}

fn report_write(words: &Words, offset_bytes: u64, len_bytes: u64, started: Instant) {
    let elapsed = started.elapsed();
    if words.has('q') {
        return;
    }
    let machine = words.has('C');
    Transfer {
        verb: "wrote",
        offset_bytes,
        len_bytes,
        elapsed,
        machine,
    }
    .print();
}

/// A length that one request may have.
pub fn bounded_length(word: &str, unless: &str) -> Outcome<u64> {
    let len_bytes = arguments::number(word)?;
    if len_bytes <= MAX_REQUEST_BYTES {
        return Ok(len_bytes);
    }
    report::print_line(format_args!(
        "length cannot exceed {MAX_REQUEST_BYTES}{unless}, given {word}"
    ));
    Err(Failed)
}

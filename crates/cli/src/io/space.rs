//! `discard`, `flush`, `truncate`, `length`, `alloc` and `map`: commands that move no data.

use std::time::Instant;

use vellum::Preallocation;
use vellum::Result;

use super::arguments::{self, Words};
use super::image::Image;
use super::outcome::{Failed, Outcome};
use super::print::{Transfer, byte_text};
use super::transfer::{bounded_length, failed};
use crate::report;

/// What `alloc` looks at without a count.
const SECTOR_BYTES: u64 = 512;

/// `discard`
pub async fn discard(image: &Image, words: &Words) -> Outcome {
    let (offset, length) = words.offset_and_length()?;
    let offset_bytes = arguments::number(offset)?;
    let len_bytes = bounded_length(length, "")?;
    let started = Instant::now();
    let result = image.discard(offset_bytes, len_bytes).await;
    result.map_err(|error| failed("discard", &error))?;
    let elapsed = started.elapsed();
    if !words.has('q') {
        Transfer {
            verb: "discard",
            offset_bytes,
            len_bytes,
            elapsed,
            machine: words.has('C'),
        }
        .print();
    }
    Ok(())
}

/// `flush`: as in QEMU, a failure shows only in the exit code.
pub async fn flush(image: &Image) -> Outcome {
    image.device().flush().await.map_err(|_| Failed)
}

/// `truncate`
pub async fn truncate(image: &Image, words: &Words) -> Outcome {
    let mode = words.value('m').unwrap_or("off");
    let Some(preallocation) = Preallocation::from_name(mode) else {
        report::error(format_args!("Invalid preallocation mode '{mode}'"));
        return Err(Failed);
    };
    let Some(size) = words.operands.first() else {
        return Err(words.usage());
    };
    let size_bytes = arguments::number(size)?;
    let resized = image.device().resize(size_bytes, preallocation).await;
    resized.map_err(|error| {
        report::fail(&error);
        Failed
    })
}

/// `length`
pub fn length(image: &Image) -> Outcome {
    report::print_line(byte_text(image.device().size_bytes() as f64));
    Ok(())
}

/// `alloc`
pub async fn alloc(image: &Image, words: &Words) -> Outcome {
    let mut operands = words.operands.iter();
    let Some(offset) = operands.next() else {
        return Err(words.usage());
    };
    let offset = arguments::number(offset)?;
    let count = operands
        .next()
        .map(|word| arguments::number(word))
        .transpose()?;
    let size = image.device().size_bytes();
    let count = count
        .unwrap_or(SECTOR_BYTES)
        .min(size.saturating_sub(offset));
    let mut allocated = 0;
    let mut at = offset;
    while at < offset + count {
        let (present, len) = own_run(image, at, offset + count - at)
            .await
            .map_err(|error| failed("is_allocated", &error))?;
        allocated += if present { len } else { 0 };
        at += len;
    }
    let place = byte_text(offset as f64);
    report::print_line(format_args!(
        "{allocated}/{count} bytes allocated at offset {place}"
    ));
    Ok(())
}

/// `map`
pub async fn map(image: &Image) -> Outcome {
    let size = image.device().size_bytes();
    let mut start = 0;
    while start < size {
        let (present, len) = longest_run(image, start, size - start)
            .await
            .map_err(|error| {
                let text = report::error_text(&error);
                report::error(format_args!("Failed to get allocation status: {text}"));
                Failed
            })?;
        report::print_line(format_args!(
            "{} ({len:#x}) bytes {} at offset {} ({start:#x})",
            byte_text(len as f64),
            if present {
                "    allocated"
            } else {
                "not allocated"
            },
            byte_text(start as f64),
        ));
        start += len;
    }
    Ok(())
}

/// The first run at an offset: whether the image itself holds it, and its length.
async fn own_run(image: &Image, offset_bytes: u64, len_bytes: u64) -> Result<(bool, u64)> {
    let extent = image
        .device()
        .block_status(offset_bytes, len_bytes, 0)
        .await?;
    Ok((extent.kind.is_present(), extent.len_bytes))
}

/// The runs at an offset that are alike, as one.
async fn longest_run(image: &Image, offset_bytes: u64, len_bytes: u64) -> Result<(bool, u64)> {
    let (present, mut len) = own_run(image, offset_bytes, len_bytes).await?;
    while len < len_bytes {
        match own_run(image, offset_bytes + len, len_bytes - len).await? {
            (next, more) if next == present => len += more,
            _ => break,
        }
    }
    Ok((present, len))
}

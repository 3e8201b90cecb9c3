//! Opening a file: what the first answer tells of it.

use std::fs::File;

use tokio::time::timeout;
use vellum_io::{Error, ErrorKind, Result};

use super::answer::{Content, Version};
use super::source::{Answer, Source};
use super::spool;
use crate::failure::{self, Failure};
use crate::fetch::{FIRST_BYTES, PATIENCE, Retries};

/// What the first answer has brought.
pub(crate) enum First {
    Bytes(Vec<u8>),
    /// All of them.
    File(File),
}

/// Asks until there is an answer with bytes, or no hope.
pub(crate) async fn open(source: Source) -> Result<(Source, First, u64)> {
    let mut retries = Retries::new(source.timeout());
    loop {
        let failure = match open_once(&source).await {
            Ok((first, len_bytes)) => return Ok((source, first, len_bytes)),
            // Whoever mistypes a name wants to know now.
            Err(Failure::Unreachable(error)) => Failure::Final(error),
            Err(failure) => failure,
        };
        let waited = retries.wait_after(failure).await;
        waited.map_err(|error| error.context("open", "Error opening file"))?;
    }
}

async fn open_once(source: &Source) -> Result<(First, u64), Failure> {
    let answer = source.ask(&(0..FIRST_BYTES)).await?;
    let headers = answer.response.headers();
    let (end, total) = match answer.content {
        // Of a copy no second answer is ever compared.
        Content::Whole(_) => {
            let (file, len_bytes) = spool::spool(source, answer).await?;
            return Ok((First::File(file), len_bytes));
        }
        Content::Beyond(total) => (0, total),
        Content::Part {
            start: 0,
            end,
            total,
        } => (end, total),
        Content::Part { start, .. } => {
            let message =
                format!("the first bytes were asked for, and the server sends those from {start}");
            let error = Error::new(ErrorKind::Protocol, "open", message);
            return Err(Failure::Passing(error.target(source.name()), None));
        }
    };
    let version = Version::of(headers, total);
    let first = match end {
        0 => Vec::new(),
        _ => {
            let first = read_first(source, answer, end.min(FIRST_BYTES));
            let first = timeout(PATIENCE * source.timeout(), first).await;
            first.unwrap_or_else(|_| Err(failure::too_slow(source.name())))?
        }
    };
    source.set_version(version);
    Ok((First::Bytes(first), total))
}

async fn read_first(source: &Source, answer: Answer, len_bytes: u64) -> Result<Vec<u8>, Failure> {
    let mut response = answer.response;
    let mut first = Vec::new();
    while (first.len() as u64) < len_bytes {
        match response
            .chunk()
            .await
            .map_err(|error| source.broken(&error))?
        {
            Some(chunk) => first.extend_from_slice(&chunk),
            None => {
                let error = Error::new(ErrorKind::Protocol, "open", "the answer ends too early");
                return Err(Failure::Passing(error.target(source.name()), None));
            }
        }
    }
    first.truncate(len_bytes as usize);
    Ok(first)
}

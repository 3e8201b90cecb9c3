//! Files of servers that know no ranges: read once from their start to their end, into a temporary
//! file without a name.

use std::fs::File;
use std::io::Write;
use std::sync::Arc;

use rustix::fs::fstatvfs;
use vellum_io::{Error, ErrorKind, Result};

use reqwest::Version;
use reqwest::header::TRANSFER_ENCODING;

use super::answer::{self, Content};
use super::source::{Answer, Source};
use crate::blocking;
use crate::failure::Failure;
use crate::temporary;

/// What is left free in the file system of temporary files, whatever the server sends: 64 MiB.
const LEFT_FREE_BYTES: u64 = 64 << 20;
/// How often its free space is looked at, where the length is not known.
const LOOK_BYTES: u64 = 16 << 20;
/// Bytes that are written at once.
const WRITE_BYTES: usize = 1 << 20;

fn free_bytes(file: &File) -> Result<u64> {
    let space = fstatvfs(file).map_err(|error| Error::from_io("look at", &error.into()))?;
    Ok(space.f_bavail.saturating_mul(space.f_frsize))
}

fn no_space(source: &Source, wanted: u64, free: u64) -> Failure {
    let message = format!(
        "the server knows no ranges, so the whole file has to be copied first: {wanted} bytes, and \
         {} has {free} free; set TMPDIR to a folder with more, or use another server",
        std::env::temp_dir().display()
    );
    let error = Error::new(ErrorKind::NoSpace, "open", message);
    Failure::Final(error.target(source.name()))
}

/// Whether an answer of unknown length ends otherwise than with its connection, which a server that is
/// killed ends, too.
fn tells_its_end(response: &reqwest::Response) -> bool {
    let encodings = response.headers().get_all(TRANSFER_ENCODING).iter();
    let mut encodings = encodings.filter_map(|value| value.to_str().ok());
    response.version() >= Version::HTTP_2
        || encodings.any(|value| value.to_ascii_lowercase().contains("chunked"))
}

/// Copies the content of an answer with the whole file. What has come before a failure is of no
/// use: whoever tries again begins anew.
pub(super) async fn spool(source: &Source, answer: Answer) -> Result<(File, u64), Failure> {
    let Answer {
        mut response,
        content: Content::Whole(length),
    } = answer
    else {
        unreachable!("only whole files are spooled");
    };
    if length.is_none() && !tells_its_end(&response) {
        let message = "the server says neither how long the file is nor where it ends: what comes could \
                       be a part of it";
        let error = Error::new(ErrorKind::Unsupported, "open", message);
        return Err(Failure::Final(error.target(source.name())));
    }
    let file = tempfile::tempfile().map_err(|error| {
        let error = Error::from_io("make a temporary file for", &error);
        Failure::Final(error.target(source.name()))
    })?;
    let free = free_bytes(&file).map_err(Failure::Final)?;
    if let Some(length) = length.filter(|length| length.saturating_add(LEFT_FREE_BYTES) > free) {
        return Err(no_space(source, length, free));
    }
    let how_long = length.map_or_else(
        || "all of it".to_owned(),
        |length| format!("{length} bytes"),
    );
    (source.options().notice)(&format!(
        "'{}': the server knows no ranges; copying {how_long} to a temporary file first",
        source.name()
    ));
    let file = Arc::new(file);
    let (mut written, mut looked) = (0_u64, 0);
    let mut pending = Vec::new();
    loop {
        let chunk = response
            .chunk()
            .await
            .map_err(|error| source.broken(&error))?;
        if let Some(chunk) = &chunk {
            pending.extend_from_slice(chunk);
        }
        if pending.len() >= WRITE_BYTES || chunk.is_none() {
            written += pending.len() as u64;
            pending = write(source, &file, pending).await?;
            if length.is_none() && written > looked + LOOK_BYTES {
                looked = written;
                let free = free_bytes(&file).map_err(Failure::Final)?;
                if free < LEFT_FREE_BYTES {
                    return Err(no_space(source, written, free));
                }
            }
        }
        if chunk.is_none() {
            break;
        }
    }
    if length.is_some_and(|length| length != written) {
        let error = Error::new(ErrorKind::Protocol, "open", "the file ends too early");
        return Err(Failure::Passing(error.target(source.name()), None));
    }
    let durable = temporary::make_durable(&file, source.name()).await;
    durable.map_err(Failure::Final)?;
    source.set_version(answer::Version::of(response.headers(), written));
    let file = Arc::try_unwrap(file).or_else(|file| file.try_clone());
    let file = file.map_err(|error| Failure::Final(Error::from_io("open", &error)))?;
    Ok((file, written))
}

/// Writes on a thread that may wait; gives the empty buffer back.
async fn write(source: &Source, file: &Arc<File>, mut bytes: Vec<u8>) -> Result<Vec<u8>, Failure> {
    let file = file.clone();
    let written = blocking::run_io(move || {
        (&*file).write_all(&bytes)?;
        bytes.clear();
        Ok(bytes)
    });
    written.await.map_err(|error| {
        let error = Error::from_io("write a temporary copy of", &error);
        Failure::Final(error.target(source.name()))
    })
}

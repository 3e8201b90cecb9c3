//! `send`: writes a disk, or what has changed of one, as a stream.

use std::ffi::OsString;
use std::fs::File;
use std::io::{IsTerminal, Write};
use std::ops::Range;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;

use vellum::BlockDevice;
use vellum::qcow2::{AsQcow2, DirtyBitmap};
use vellum_format::stream::{Header, StreamId};
use vellum_graph::open_device;
use vellum_io::error::io_text;
use vellum_io::lane;
use vellum_jobs::Speed;
use vellum_jobs::transfer::{SendError, SendOptions, Sent, send};
use vellum_options::{CacheMode, OpenFlags};

use super::super::command::{
    Command, Failure, Outcome, Subcommand, cache_mode, fail, install_bulk_lane, not_taken, number,
    one_name, open_failure, reading_once, size,
};
use super::super::convert_stdout::OUTPUT_FILE;
use super::super::note::cannot;
use super::super::rows::{FILENAME, FORMAT, IMAGE_OPTS, OBJECT, QUIET, SHARE, SOURCE_CACHE};
use super::super::{convert_onto_source, cut_short, snapshot};
use super::source::SourceIdentity;
use super::{id_text, parse_header, parse_id, source, widen};
use crate::progress::Progress;
use crate::report;
use crate::size::human;
use crate::spec::{CommonArgs, Spec};

pub static SEND: Subcommand = Subcommand {
    spec: Spec {
        name: "send",
        about: "Write a disk, or what has changed of one, as a stream",
        usage: "\
[-f FMT | --image-opts] [--since BITMAP [--base TOKEN] | -l SNAPSHOT | --resume TOKEN]
        [-o FILE] [--level LEVEL] [-r RATE] [-m NUM_COROUTINES] [-T CACHE_MODE] [-U] [-p] [-q]
        [--object OBJDEF] FILENAME > STREAM",
        arguments: &[
            QUIET,
            "-p, --progress  show how far it is (with -o; else a bar on a terminal)",
            FORMAT,
            IMAGE_OPTS,
            "--since, --bitmap BITMAP  send only what this bitmap of FILENAME calls dirty, instead \
             of the whole disk",
            "--base TOKEN  the stream that the receiver must have: what changed since is in BITMAP",
            "--resume TOKEN  go on with a stream that was cut off, with what 'receive \
             --resume-token' prints",
            "-l, --snapshot SNAPSHOT  send an internal snapshot, by its ID or TAG",
            "-o, --file FILE  write the stream into a new file, not to standard output",
            "--level LEVEL  level of zstd from 1 to 22 (1); 0 compresses nothing",
            "-r, --rate RATE  write so many bytes of the stream in a second at most",
            "-m, --parallel NUM_COROUTINES  pieces of 1 MiB to read and compress side by side",
            SOURCE_CACHE,
            SHARE,
            OBJECT,
            FILENAME,
        ],
        closing: "\
The token of the stream is told at its end; 'vellum receive --token' tells it as well.
",
        examples: "\
vellum send disk.qcow2 | ssh host vellum receive disk.qcow2
  a copy of the disk on another machine
vellum send disk.qcow2 --since monday | ssh host vellum receive disk.qcow2
  what the bitmap 'monday' calls dirty
vellum send -o disk.stream disk.qcow2
  a file to be received later
",
        ..Spec::EMPTY
    },
    run,
};

const MAX_PARALLEL: u64 = 64;
const DEFAULT_LEVEL: i32 = 1;
const MAX_LEVEL: u64 = 22;
/// The grain of a disk without clusters.
const DEFAULT_GRAIN_BYTES: u64 = 64 << 10;

#[derive(Debug, Default)]
struct Arguments {
    common: CommonArgs,
    bitmap: Option<String>,
    base: Option<StreamId>,
    resume: Option<Header>,
    snapshot: Option<String>,
    file: Option<String>,
    cache: CacheMode,
    rate_bytes: u64,
    parallel: Option<u64>,
    level: Option<i32>,
}

fn run(command: Command<'_>, args: Vec<OsString>) -> Outcome {
    let mut arguments = Arguments::default();
    arguments.common = command.parse(args, |name, value| {
        match name {
            "since" | "bitmap" => arguments.bitmap = Some(value),
            "base" => arguments.base = Some(parse_id(&value)?),
            "resume" => arguments.resume = Some(resume_token(&value)?),
            "snapshot" => arguments.snapshot = Some(value),
            "file" => arguments.file = Some(value),
            "cache" => arguments.cache = cache_mode("cache", &value)?,
            "rate" => arguments.rate_bytes = size("rate limit", &value, 0, u64::MAX)?,
            "parallel" => {
                let count = number("number of coroutines", &value, 1, MAX_PARALLEL)?;
                arguments.parallel = Some(count);
            }
            "level" => {
                let level = number("compression level", &value, 0, MAX_LEVEL)?;
                arguments.level = Some(level as i32);
            }
            _ => return not_taken(name),
        }
        Ok(())
    })?;
    one_name(&arguments.common.operands)?;
    arguments.check()?;
    install_bulk_lane(arguments.cache.direct)?;
    lane::block_on(open_and_send(command, &mut arguments))
}

fn resume_token(text: &str) -> Result<Header, Failure> {
    parse_header(text).map_or_else(
        || {
            fail(
                "This is no token to go on with: 'vellum receive --resume-token DISK' prints one \
                 where DISK is half received",
            )
        },
        Ok,
    )
}

impl Arguments {
    fn check(&self) -> Result<(), Failure> {
        let refusals = [
            (
                self.resume.is_some() && (self.bitmap.is_some() || self.base.is_some()),
                "--resume excludes --since and --base: the token says what is sent",
            ),
            (
                self.base.is_some() && self.bitmap.is_none(),
                "--base needs --since: a whole disk builds on nothing",
            ),
            (
                self.snapshot.is_some() && self.bitmap.is_some(),
                "-l excludes --since: a bitmap tells of the disk as it is now",
            ),
            (
                self.file.is_none() && std::io::stdout().is_terminal(),
                "Standard output is a terminal; a stream goes into a pipe or a file (-o FILE)",
            ),
        ];
        match refusals.into_iter().find(|(refused, _)| *refused) {
            Some((_, message)) => fail(message),
            None => Ok(()),
        }
    }

    /// The bitmap that says what is sent, if one does.
    fn bitmap_name(&self) -> Result<Option<String>, Failure> {
        match &self.resume {
            Some(header) if header.bitmap.is_empty() => Ok(None),
            Some(header) => match String::from_utf8(header.bitmap.clone()) {
                Ok(name) => Ok(Some(name)),
                Err(_) => fail("The token names a bitmap that cannot be"),
            },
            None => Ok(self.bitmap.clone()),
        }
    }
}

async fn open_and_send(command: Command<'_>, arguments: &mut Arguments) -> Outcome {
    let name = one_name(&arguments.common.operands)?;
    let flags = OpenFlags {
        no_share: true,
        ..reading_once(arguments.cache, arguments.common.force_share)
    };
    let spec = arguments.common.image(name)?;
    let opened = open_device(&spec, &flags).await;
    let device = opened.map_err(|error| open_failure(name, &error))?;
    let source = std::slice::from_ref(&device);
    let target = arguments.file.as_deref().unwrap_or(OUTPUT_FILE);
    convert_onto_source::refuse_names(source, [target])?;
    cut_short::refuse(source).await?;
    let bitmap_name = arguments.bitmap_name()?;
    let bitmap = match &bitmap_name {
        Some(name) => Some(read_bitmap(&device, name).await?),
        None => None,
    };
    let snapshot = arguments.snapshot.as_deref();
    let identity = source::identity(&device, snapshot, bitmap.as_ref()).await;
    let source = match snapshot {
        Some(text) => snapshot::shown(&device, snapshot::selector(text)?).await?,
        None => device.clone(),
    };
    let header = match &arguments.resume {
        Some(header) => {
            check_resumed(header, &source, &identity)?;
            header.clone()
        }
        None => new_header(
            arguments,
            &source,
            bitmap_name,
            bitmap.as_ref(),
            identity.hash,
        )?,
    };
    let output = output(arguments.file.as_deref())?;
    let result = send_to(
        command,
        arguments,
        &source,
        &header,
        bitmap.as_ref(),
        output,
    )
    .await;
    // Nothing was changed, so nothing can be lost here.
    let _ = device.close().await;
    let sent = result?;
    if !arguments.common.quiet {
        report::info(format_args!(
            "sent {} as {}, token {}",
            human(sent.data_bytes),
            human(sent.stream_bytes),
            id_text(header.id)
        ));
    }
    Ok(0)
}

async fn read_bitmap(device: &Arc<dyn BlockDevice>, name: &str) -> Result<DirtyBitmap, Failure> {
    match device.as_qcow2() {
        Some(image) => Ok(image.bitmaps().read(name).await?),
        None => fail(format!(
            "Images of format '{}' have no bitmaps: leave out --since to send the whole disk",
            device.info().format
        )),
    }
}

fn new_header(
    arguments: &Arguments,
    source: &Arc<dyn BlockDevice>,
    bitmap_name: Option<String>,
    bitmap: Option<&DirtyBitmap>,
    identity: [u8; 32],
) -> Result<Header, Failure> {
    let mut id = [0; 16];
    if let Err(error) = getrandom::fill(&mut id) {
        return fail(format!("no random number for the stream: {error}"));
    }
    let grain_bytes = bitmap
        .map(DirtyBitmap::granularity_bytes)
        .or(source.info().cluster_size_bytes)
        .unwrap_or(DEFAULT_GRAIN_BYTES);
    Ok(Header {
        id: StreamId(id),
        size_bytes: source.size_bytes(),
        incremental: bitmap.is_some(),
        granularity_bytes: u32::try_from(grain_bytes).unwrap_or(1 << 31),
        base: arguments.base,
        start_bytes: 0,
        source: identity,
        bitmap: bitmap_name.unwrap_or_default().into_bytes(),
    })
}

/// Refuses to go on with another disk than the one that was begun with.
fn check_resumed(
    header: &Header,
    source: &Arc<dyn BlockDevice>,
    identity: &SourceIdentity,
) -> Result<(), Failure> {
    let size_bytes = source.size_bytes();
    if header.size_bytes != size_bytes {
        return fail(format!(
            "The token is of a disk of {}, and this one has {}",
            human(header.size_bytes),
            human(size_bytes)
        ));
    }
    if let Some(name) = &identity.unknown {
        return fail(format!(
            "The version of '{name}' is unknown, so it may have changed since: it is neither a file nor has a version, or \
             it was changed a moment ago. What is half received must be sent anew"
        ));
    }
    if header.source != identity.hash {
        return fail(
            "The token is not of this disk as it is now: it is another one, it was changed since, \
             or its bitmap was (of a snapshot -l must say so again). What is half received must be \
             sent anew",
        );
    }
    Ok(())
}

fn output(file: Option<&str>) -> Result<File, Failure> {
    let Some(name) = file else {
        // Without the buffer of the standard library, which looks for ends of lines.
        let duplicate = std::io::stdout().as_fd().try_clone_to_owned();
        let output = duplicate.map(File::from);
        let output = output.or_else(|error| fail(writing(&error)))?;
        widen(&output);
        return Ok(output);
    };
    let path = Path::new(name);
    File::create_new(path).or_else(|error| match error.kind() {
        std::io::ErrorKind::AlreadyExists => fail(format!(
            "'{name}' exists: -o is the file that the stream goes into, and it must be new"
        )),
        _ => cannot("make", path, &error),
    })
}

async fn send_to(
    command: Command<'_>,
    arguments: &Arguments,
    source: &Arc<dyn BlockDevice>,
    header: &Header,
    bitmap: Option<&DirtyBitmap>,
    mut output: File,
) -> Result<Sent, Failure> {
    let default = 4 + 2 * lane::compute_threads() as u64;
    let options = SendOptions {
        parallel: arguments.parallel.unwrap_or(default) as usize,
        level: arguments.level.unwrap_or(DEFAULT_LEVEL),
        speed: Speed::new(arguments.rate_bytes),
    };
    let ranges: Box<dyn Iterator<Item = Range<u64>> + '_> = match bitmap {
        Some(bitmap) => Box::new(bitmap.ranges()),
        None => Box::new(std::iter::once(0..header.size_bytes)),
    };
    // Standard output is taken.
    let wants_percent = arguments.common.progress && arguments.file.is_some();
    let mut progress = Progress::new(command.program, wants_percent, arguments.common.quiet, 1.0);
    let write = |bytes: &[u8]| output.write_all(bytes);
    let show = |done_bytes| progress.show(done_bytes, header.size_bytes);
    let sent = send(source, header, ranges, &options, write, show).await;
    progress.end();
    let sent = sent.map_err(failure)?;
    if arguments.file.is_some() {
        output.sync_all().or_else(|error| fail(writing(&error)))?;
    }
    Ok(sent)
}

fn failure(error: SendError<std::io::Error>) -> Failure {
    Failure::Message(match error {
        SendError::Read {
            offset_bytes,
            cause,
        } => {
            report::about_cause(&cause);
            let why = report::error_text(&cause);
            format!("error while reading offset {offset_bytes}: {why}")
        }
        SendError::Write(error) => writing(&error),
        SendError::Format(error) => format!("The disk cannot be sent: {error:#}"),
    })
}

fn writing(error: &std::io::Error) -> String {
    format!("error while writing the stream: {}", io_text(error))
}

//! The target of `receive`: which one a stream may be applied to, and how it is made and opened.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use vellum::{BlockDevice, ErrorKind};
use vellum_format::stream::Header;
use vellum_graph::layer_files::layer_files;
use vellum_graph::{encryption, open_device};
use vellum_images::create;
use vellum_options::create_options::CreateSettings;
use vellum_options::{CacheMode, ImageSpec, OpenFlags};

use super::super::command::{Failure, fail, open_failure};
use super::super::convert::make_target;
use super::super::note::cannot;
use super::super::resume::give_back_leaks;
use super::id_text;
use super::state::{Received, Receiving, State, partial};
use crate::report;
use crate::size::human;

/// How a target is made and opened.
#[derive(Debug, Default)]
pub struct TargetOptions {
    pub format: Option<String>,
    pub create_options: Option<String>,
    pub cache: CacheMode,
    /// `-n`: a whole disk goes into an image that is there.
    pub no_create: bool,
    pub force: bool,
    pub quiet: bool,
}

const DEFAULT_FORMAT: &str = "qcow2";

/// Gets the target of a stream ready, and open: it has the name of one that is half received then,
/// and the state speaks of it.
pub async fn ready(
    state: &mut State,
    disk: &str,
    header: &Header,
    options: &TargetOptions,
) -> Result<Arc<dyn BlockDevice>, Failure> {
    if let Some(receiving) = state.receiving.clone() {
        if receiving.header.id == header.id {
            return go_on(state, disk, header, &receiving, options).await;
        }
        if may_begin_again(header, &receiving) && !options.force {
            return begin_again(state, disk, header, &receiving, options).await;
        }
        if !options.force {
            return fail(format!(
                "'{disk}' is half received, from another stream: go on with that one, or give up \
                 what there is of it with --force"
            ));
        }
    }
    if header.start_bytes > 0 {
        return fail(format!(
            "The stream goes on with one that was cut off, and nothing of that is at '{disk}'"
        ));
    }
    let half = state.receiving.take();
    match header.incremental || options.no_create {
        true => begin_in_place(state, disk, header, half, options).await,
        false => begin_new(state, disk, header, options).await,
    }
}

/// The same changes, or more, since the same stream: whatever was written of the first of them is
/// written again.
fn may_begin_again(header: &Header, receiving: &Receiving) -> bool {
    let since = |header: &Header| header.base.filter(|_| header.incremental);
    header.start_bytes == 0
        && header.size_bytes == receiving.header.size_bytes
        && since(header).is_some()
        && since(header) == since(&receiving.header)
        && header.bitmap == receiving.header.bitmap
}

async fn go_on(
    state: &mut State,
    disk: &str,
    header: &Header,
    receiving: &Receiving,
    options: &TargetOptions,
) -> Result<Arc<dyn BlockDevice>, Failure> {
    let begun = Header {
        start_bytes: 0,
        ..header.clone()
    };
    if begun != receiving.header {
        return fail("The stream is not the one that was cut off, though it says so");
    }
    if header.start_bytes > receiving.done_bytes {
        return fail(format!(
            "The stream goes on at {}, and only {} of '{disk}' are there: send it with the token \
             that 'vellum receive --resume-token {disk}' prints",
            human(header.start_bytes),
            human(receiving.done_bytes)
        ));
    }
    state.find()?;
    let name = partial(disk);
    if receiving.format == "qcow2" {
        give_back_leaks(&name).await?;
    }
    if !options.quiet {
        report::info(format_args!("going on at {}", human(header.start_bytes)));
    }
    open(&name, &receiving.format, header, options).await
}

async fn begin_again(
    state: &mut State,
    disk: &str,
    header: &Header,
    receiving: &Receiving,
    options: &TargetOptions,
) -> Result<Arc<dyn BlockDevice>, Failure> {
    state.find()?;
    let name = partial(disk);
    if receiving.format == "qcow2" {
        give_back_leaks(&name).await?;
    }
    let target = open(&name, &receiving.format, header, options).await?;
    state.begin(Receiving::new(header, &receiving.format, false, &name)?)?;
    Ok(target)
}

/// Applies a stream to an image that is there. It is open, and so locked, before it gets the name
/// of one that is half received.
async fn begin_in_place(
    state: &mut State,
    disk: &str,
    header: &Header,
    half: Option<Receiving>,
    options: &TargetOptions,
) -> Result<Arc<dyn BlockDevice>, Failure> {
    // What is given up half received is what there is.
    let place = match half {
        Some(_) if !is_there(disk)? => partial(disk),
        _ => disk.to_owned(),
    };
    if !is_there(&place)? {
        return fail(match header.incremental {
            true => format!(
                "The stream says what has changed of a disk, and there is no '{disk}': receive a \
                 whole one first"
            ),
            false => format!("-n needs an image, and there is no '{disk}'"),
        });
    }
    if header.incremental && !options.force {
        check_base(state, disk, header)?;
    }
    let noted = [
        half.map(|half| half.format),
        state
            .received
            .as_ref()
            .map(|received| received.format.clone()),
    ];
    let format = options
        .format
        .clone()
        .or(noted.into_iter().flatten().next());
    let target = open_as(&place, format.as_deref(), options).await?;
    check_size(disk, &target, header)?;
    if header.incremental && !options.force {
        check_is_one_file(disk, &target)?;
    }
    let format = target.info().format;
    state.begin(Receiving::new(header, format, false, &place)?)?;
    Ok(target)
}

async fn begin_new(
    state: &mut State,
    disk: &str,
    header: &Header,
    options: &TargetOptions,
) -> Result<Arc<dyn BlockDevice>, Failure> {
    if is_there(disk)? && !options.force {
        return fail(format!(
            "'{disk}' exists: -n receives into it, --force replaces it by what is received"
        ));
    }
    refuse_in_use(disk).await?;
    let name = partial(disk);
    if is_there(&name)? {
        // The new file may get the same number, and is none that anybody may go on with.
        state.save()?;
        let removed = std::fs::remove_file(&name);
        removed.or_else(|error| cannot("remove", Path::new(&name), &error))?;
    }
    let format = options.format.as_deref().unwrap_or(DEFAULT_FORMAT);
    let mut settings = create::settings(&name, format)?;
    if let Some(text) = &options.create_options {
        settings.parse(text)?;
    }
    settings.set("size", &header.size_bytes.to_string())?;
    let others = create::other_files(&name, format, &settings)?;
    if settings.text("backing_file").is_some() || !others.is_empty() {
        // Others would be under a name of their own at once, where the disk before may have one.
        return fail(
            "What is received is one file: it has no backing file, no data file and no extents \
             beside it",
        );
    }
    let begun = make_and_begin(state, &name, format, &settings, header, options).await;
    if begun.is_err() && state.receiving.is_none() {
        // Nobody knows of it. The first error is the one to tell.
        let _ = std::fs::remove_file(&name);
    }
    begun
}

async fn make_and_begin(
    state: &mut State,
    name: &str,
    format: &str,
    settings: &CreateSettings,
    header: &Header,
    options: &TargetOptions,
) -> Result<Arc<dyn BlockDevice>, Failure> {
    make_target(name, format, settings).await?;
    let path = Path::new(name);
    // Without locks: nothing is read or changed.
    let durable = File::open(path).and_then(|file| file.sync_all());
    durable.or_else(|error| cannot("sync", path, &error))?;
    let target = open(name, format, header, options).await?;
    state.begin(Receiving::new(header, format, true, name)?)?;
    Ok(target)
}

/// Refuses changes of something else than the disk holds.
fn check_base(state: &State, disk: &str, header: &Header) -> Result<(), Failure> {
    let force = "--force applies it all the same";
    match (header.base, &state.received) {
        (Some(base), None) => fail(format!(
            "The stream says what has changed since stream {}, and nobody has noted what '{disk}' \
             holds: receive a whole disk first ({force})",
            id_text(base)
        )),
        (Some(base), Some(Received { id, .. })) if base != *id => fail(format!(
            "The stream says what has changed since stream {}, and '{disk}' holds stream {}: send \
             what has changed since that one, or the whole disk ({force})",
            id_text(base),
            id_text(*id)
        )),
        (_, Some(received)) if !state.is_as_received(received) => fail(format!(
            "'{disk}' has been changed since stream {} was received: send the whole disk ({force})",
            id_text(received.id)
        )),
        _ => Ok(()),
    }
}

/// Refuses changes of a disk in several files: what is noted of one of them says nothing of the others, which
/// somebody may have changed.
fn check_is_one_file(disk: &str, target: &Arc<dyn BlockDevice>) -> Result<(), Failure> {
    match layer_files(&**target).len() {
        0 | 1 => Ok(()),
        _ => fail(format!(
            "'{disk}' has a data file or extents beside it, and nobody can tell whether those are as they \
             were received: send the whole disk (--force applies it all the same)"
        )),
    }
}

/// Refuses to replace a disk that somebody uses: he would go on in a file without a name, and lose what he writes.
pub async fn refuse_in_use(disk: &str) -> Result<(), Failure> {
    if !is_there(disk)? {
        return Ok(());
    }
    let spec = ImageSpec::filename(disk).with_format(Some("raw"));
    let flags = OpenFlags {
        writable: true,
        no_share: true,
        ..OpenFlags::default()
    };
    match open_device(&spec, &flags).await {
        Err(error) if error.kind() == ErrorKind::Locked => Err(open_failure(disk, &error)),
        // Whoever may not write to a file may replace it.
        Err(_) => Ok(()),
        Ok(device) => {
            let closed = device.close().await;
            closed.map_err(|error| open_failure(disk, &error))
        }
    }
}

/// Whether there is a file; what is no regular one cannot be a target.
fn is_there(name: &str) -> Result<bool, Failure> {
    match std::fs::symlink_metadata(name) {
        Ok(file) if file.is_file() => Ok(true),
        Ok(_) => fail(format!(
            "'{name}' is no regular file: a disk that is being received has another name meanwhile, \
             which only files can have"
        )),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(error) => cannot("look at", Path::new(name), &error),
    }
}

async fn open(
    name: &str,
    format: &str,
    header: &Header,
    options: &TargetOptions,
) -> Result<Arc<dyn BlockDevice>, Failure> {
    let target = open_as(name, Some(format), options).await?;
    check_size(name, &target, header)?;
    Ok(target)
}

async fn open_as(
    name: &str,
    format: Option<&str>,
    options: &TargetOptions,
) -> Result<Arc<dyn BlockDevice>, Failure> {
    // What was made with a secret is opened with it.
    let secrets = encryption::key_secrets(options.create_options.as_deref())?;
    let spec = ImageSpec::filename(name)
        .with_format(format)
        .with_options(secrets);
    let flags = OpenFlags {
        writable: true,
        cache: options.cache,
        discard: true,
        no_share: true,
        ..OpenFlags::default()
    };
    let opened = open_device(&spec, &flags).await;
    opened.map_err(|error| open_failure(name, &error))
}

fn check_size(name: &str, target: &Arc<dyn BlockDevice>, header: &Header) -> Result<(), Failure> {
    match target.size_bytes() {
        size_bytes if size_bytes == header.size_bytes => Ok(()),
        size_bytes => fail(format!(
            "The stream is of a disk of {} bytes, and '{name}' has {size_bytes}: it can be given \
             that size with 'vellum resize'",
            header.size_bytes
        )),
    }
}

//! `convert`: copies one or more images into a new one.

use std::ffi::OsString;
use std::sync::Arc;

use parking_lot::Mutex;
use vellum::qcow2::{AsQcow2, SnapshotSelector};
use vellum::{BlockDevice, Error};
use vellum_graph::foreign::{self, CompressedWrites};
use vellum_graph::{encryption, open_device};
use vellum_images::create;
use vellum_images::upload::{self, UploadTarget};
use vellum_io::error::errno_text;
use vellum_io::lane;
use vellum_jobs::Speed;
use vellum_jobs::copy::{CopyError, CopyOptions, Observer, TargetBacking, copy};
use vellum_options::create_options::{CreateSettings, asks_for_help};
use vellum_options::{CacheMode, ImageSpec, OpenFlags, error_text};

use super::command::{
    Command, Failure, Outcome, Subcommand, cache_mode, fail, image_spec, incomplete,
    install_bulk_lane, open_failure, reading_once,
};
use super::convert_args::{Arguments, SPEC};
use super::convert_bitmaps;
use super::convert_onto_source;
use super::convert_stdin::{self, Input};
use super::convert_stdout::{self, DASH};
use super::create::print_option_help;
use super::cut_short;
use super::unfinished::Unfinished;
use super::{ova, resume, snapshot};
use crate::progress::{Progress, ProgressReporter};
use crate::{hint, report};

const DEFAULT_SPARSE_BYTES: u64 = 4096;
const DEFAULT_PARALLEL: u64 = 8;

pub static CONVERT: Subcommand = Subcommand { spec: SPEC, run };

fn run(command: Command<'_>, args: Vec<OsString>) -> Outcome {
    let mut arguments = Arguments::parse(command, args)?;
    if let Some(text) = &arguments.source_snapshot {
        snapshot::selector(text)?;
    }
    arguments.check()?;
    let format = arguments
        .target_format
        .clone()
        .unwrap_or_else(|| "raw".to_owned());
    let target = match arguments.names.len() {
        0 | 1 => None,
        _ => arguments.names.pop(),
    };
    if arguments
        .target_options
        .as_deref()
        .is_some_and(asks_for_help)
    {
        return print_option_help(&format, target.as_deref());
    }
    let Some(target) = target else {
        return incomplete("Must specify image file name");
    };
    let direct = [&arguments.source_cache, &arguments.target_cache]
        .into_iter()
        .flatten()
        .filter_map(|name| CacheMode::parse(name))
        .any(|cache| cache.direct);
    install_bulk_lane(direct)?;
    let object = match arguments.target_image_opts {
        true => None,
        false => upload::target(&target)?,
    };
    if object.is_some() && arguments.no_create {
        return fail("An object is made whole: -n has no meaning for it");
    }
    let local = object
        .as_ref()
        .map_or(&*target, UploadTarget::path)
        .to_owned();
    let unfinished = Unfinished::new(&local);
    let work = async {
        let code = convert(command, &mut arguments, &format, &local, &unfinished).await?;
        if let Some(object) = object {
            send(command, &arguments, &target, object).await?;
        }
        Ok(code)
    };
    let code = lane::block_on(unfinished.guard(command.program, work))?;
    if arguments.target_format.is_none() && !arguments.target_image_opts {
        hint::about_raw(&target, "-O");
    }
    Ok(code)
}

/// Makes an object of the image that was made.
async fn send(
    command: Command<'_>,
    arguments: &Arguments,
    target: &str,
    object: UploadTarget,
) -> Result<(), Failure> {
    let progress = Progress::new(command.program, arguments.progress, arguments.quiet, 0.0);
    let progress = Arc::new(Mutex::new(progress));
    let shown = progress.clone();
    let sent = object
        .send(move |done, total| shown.lock().show(done, total))
        .await;
    if let Some(progress) = Arc::into_inner(progress) {
        progress.into_inner().end();
    }
    sent.map_err(|error| {
        Failure::Message(format!(
            "{target}: error while writing: {}",
            error_text(&error)
        ))
    })
}

async fn convert(
    command: Command<'_>,
    arguments: &mut Arguments,
    format: &str,
    target_name: &str,
    unfinished: &Unfinished,
) -> Outcome {
    let streams = convert_stdout::has_streams(command.program);
    if streams && arguments.names.iter().any(|name| name == DASH) {
        match convert_stdin::input() {
            Input::Pipe => {
                return convert_pipe(command, arguments, format, target_name, unfinished).await;
            }
            Input::File => arguments.name_input(),
        }
    }
    // QEMU begins to count before it opens anything.
    let ended = |failure| {
        begun(command, arguments).progress.end();
        failure
    };
    let sources = open_sources(arguments).await.map_err(ended)?;
    if streams && target_name == DASH {
        let settings = target_settings(arguments, format, target_name, &sources)?;
        convert_onto_source::refuse_names(&sources, [convert_stdout::OUTPUT_FILE])?;
        return convert_stdout::convert(command, arguments, format, &sources, &settings).await;
    }
    if arguments.journal {
        return resume::convert(
            command,
            arguments,
            format,
            target_name,
            &sources,
            unfinished,
        )
        .await;
    }
    let source_bytes = sources
        .iter()
        .map(|source| source.size_bytes())
        .sum::<u64>();
    let ready = ready_target(arguments, format, target_name, &sources, unfinished).await;
    let (target, has_backing) = ready.map_err(ended)?;
    convert_bitmaps::check_target(arguments, format, &target)?;
    if has_backing && arguments.target_is_zero {
        report::error("Cannot use --target-is-zero when the destination image has a backing file");
        return Ok(0);
    }
    check_target_compression(arguments, &target)?;
    let target_bytes = target.size_bytes();
    // Also one that was just made: somebody else may have made it anew before it was locked.
    if target_bytes < source_bytes {
        return fail("output file is smaller than input file");
    }
    let options = copy_options(arguments, &target, has_backing);
    let mut observer = CopyTeller {
        reporter: begun(command, arguments),
        quiet: arguments.quiet,
    };
    let copied = copy(&sources, &target, &options, &mut observer).await;
    end_copy(copied, observer.reporter, target_name)?;
    convert_bitmaps::copy(arguments, &sources, &target).await?;
    target.close().await.map_err(|error| {
        hint::about_space(target_name, &error, None);
        Failure::Message(format!("error while writing: {}", error_text(&error)))
    })?;
    unfinished.is_done();
    Ok(0)
}

/// Tells how a copy has ended.
fn end_copy(
    copied: Result<(), CopyError>,
    mut reporter: ProgressReporter,
    target_name: &str,
) -> Result<(), Failure> {
    if copied.is_ok() {
        reporter.progress.show(1, 1);
    }
    reporter.progress.end();
    copied.map_err(|error| {
        hint::about_space(target_name, &error.cause, Some(reporter.left_bytes));
        hint::about_seal(&error.cause);
        copy_failure(error)
    })
}

/// Makes the target, or takes the one that is there; says whether it has a backing file.
async fn ready_target(
    arguments: &Arguments,
    format: &str,
    name: &str,
    sources: &[Arc<dyn BlockDevice>],
    unfinished: &Unfinished,
) -> Result<(Arc<dyn BlockDevice>, bool), Failure> {
    let settings = match arguments.no_create {
        true => None,
        false => Some(target_settings(arguments, format, name, sources)?),
    };
    let has_backing = match &settings {
        Some(settings) => settings.text("backing_file").is_some(),
        None => arguments.backing.is_some(),
    };
    convert_bitmaps::check_sources(arguments, sources).await?;
    let cache = target_cache(arguments)?;
    if let Some(settings) = &settings {
        let others = create::other_files(name, format, settings)?;
        let names = others.iter().map(String::as_str).chain([name]);
        convert_onto_source::refuse_names(sources, names)?;
        unfinished.makes(name);
        settings
            .text("data_file")
            .into_iter()
            .for_each(|file| unfinished.makes(file));
        make_target(name, format, settings).await?;
    }
    let target = open_target(arguments, format, name, cache).await?;
    if settings.is_none() {
        convert_onto_source::refuse_device(sources, &target)?;
    }
    unfinished.is_written();
    Ok((target, has_backing))
}

fn target_cache(arguments: &Arguments) -> Result<CacheMode, Failure> {
    match &arguments.target_cache {
        Some(name) => cache_mode("cache", name),
        None => Ok(CacheMode::UNSAFE),
    }
}

pub(super) async fn make_target(
    name: &str,
    format: &str,
    settings: &CreateSettings,
) -> Result<(), Failure> {
    let made = create::make(name, format, settings).await;
    made.map_err(|error| {
        hint::about_space(name, &error, settings.integer("size"));
        let why = error_text(&error);
        Failure::Message(format!("{name}: error while converting {format}: {why}"))
    })
}

/// Copies raw bytes from a pipe into a new image.
async fn convert_pipe(
    command: Command<'_>,
    arguments: &Arguments,
    format: &str,
    target_name: &str,
    unfinished: &Unfinished,
) -> Outcome {
    convert_stdin::check(arguments)?;
    if target_name == DASH {
        return fail("What comes from a pipe can be converted into a file only");
    }
    let mut settings = target_settings(arguments, format, target_name, &[])?;
    settings.set("size", &convert_stdin::START_BYTES.to_string())?;
    let cache = target_cache(arguments)?;
    let first = convert_stdin::begin(arguments).await?;
    unfinished.makes(target_name);
    make_target(target_name, format, &settings).await?;
    let target = open_target(arguments, format, target_name, cache).await?;
    unfinished.is_written();
    check_target_compression(arguments, &target)?;
    let mut progress = Progress::new(command.program, false, arguments.quiet, 1.0);
    let copied =
        convert_stdin::copy(first, &target, arguments, |bytes| progress.count(bytes)).await;
    progress.end();
    copied?;
    target.close().await.map_err(|error| {
        Failure::Message(format!("error while writing: {}", error_text(&error)))
    })?;
    unfinished.is_done();
    Ok(0)
}

async fn open_sources(arguments: &Arguments) -> Result<Vec<Arc<dyn BlockDevice>>, Failure> {
    let cache = match &arguments.source_cache {
        Some(name) => cache_mode("source cache", name)?,
        None => CacheMode::default(),
    };
    let flags = OpenFlags {
        no_share: true,
        ..reading_once(cache, arguments.force_share)
    };
    let mut sources = Vec::new();
    for name in &arguments.names {
        let format = arguments.source_format.as_deref();
        let spec = image_spec(name, arguments.source_image_opts, format)?;
        let opened = open_device(&spec, &flags).await;
        sources.push(opened.map_err(|error| open_failure(name, &error))?);
    }
    ova::verify(&sources).await?;
    if !arguments.accept_missing {
        cut_short::refuse(&sources).await?;
    }
    if let Some(text) = &arguments.source_snapshot {
        show_snapshot(&mut sources, text).await?;
    }
    Ok(sources)
}

/// Puts an internal snapshot in the place of the only source; one that is described by options in that
/// of the first, as QEMU does.
async fn show_snapshot(sources: &mut [Arc<dyn BlockDevice>], text: &str) -> Result<(), Failure> {
    let selector = snapshot::selector(text)?;
    let is_name = matches!(selector, SnapshotSelector::IdOrName(_));
    let [source, others @ ..] = sources else {
        return Ok(());
    };
    if is_name && !others.is_empty() {
        return fail("No support for concatenating multiple snapshot");
    }
    *source = snapshot::shown(source, selector).await?;
    Ok(())
}

/// The settings of a target to make.
pub(super) fn target_settings(
    arguments: &Arguments,
    format: &str,
    name: &str,
    sources: &[Arc<dyn BlockDevice>],
) -> Result<CreateSettings, Failure> {
    let mut settings = create::settings(name, format)?;
    if let Some(options) = &arguments.target_options {
        settings.parse(options)?;
    }
    // A size among the options does not count: the sources decide.
    let source_bytes = sources
        .iter()
        .map(|source| source.size_bytes())
        .sum::<u64>();
    settings.set("size", &source_bytes.to_string())?;
    let (backing, backing_format) = (&arguments.backing, &arguments.backing_format);
    create::set_backing(
        &mut settings,
        format,
        backing.as_deref(),
        backing_format.as_deref(),
    )?;
    let has_backing = settings.text("backing_file").is_some();
    if has_backing && sources.len() > 1 {
        return fail(
            "Having a backing file for the target makes no sense when concatenating multiple \
             input images",
        );
    }
    if has_backing && settings.text("backing_fmt").is_none() {
        return fail("Use of backing file requires explicit backing format");
    }
    if arguments.compress && encryption::is_asked_for(&settings) {
        return fail("Compression and encryption not supported at the same time");
    }
    if arguments.compress {
        check_compression(format, &settings)?;
    }
    if arguments.reproducible && (format == "luks" || encryption::is_asked_for(&settings)) {
        return fail("--reproducible excludes encryption: its keys are drawn at random");
    }
    Ok(settings)
}

const NO_COMPRESSION: &str = "Compression not supported for this file format";

/// Refuses a target that is to be compressed and cannot be.
fn check_target_compression(
    arguments: &Arguments,
    target: &Arc<dyn BlockDevice>,
) -> Result<(), Failure> {
    let can_be = match foreign::facts(&**target) {
        Some(facts) => facts.compression != CompressedWrites::No,
        None => target.as_qcow2().is_some(),
    };
    match arguments.compress && !can_be {
        false => Ok(()),
        true => fail(NO_COMPRESSION),
    }
}

/// Refuses what cannot be compressed.
fn check_compression(format: &str, settings: &CreateSettings) -> Result<(), Failure> {
    if format != "qcow2" && !foreign::compresses(format) {
        return fail(NO_COMPRESSION);
    }
    let encrypted = settings.text("encryption").is_some_and(|text| text == "on");
    if encrypted || settings.text("encrypt.format").is_some() {
        return fail("Compression and encryption not supported at the same time");
    }
    if settings
        .text("preallocation")
        .is_some_and(|mode| mode != "off")
    {
        return fail("Compression and preallocation not supported at the same time");
    }
    Ok(())
}

pub(super) async fn open_target(
    arguments: &Arguments,
    format: &str,
    name: &str,
    cache: CacheMode,
) -> Result<Arc<dyn BlockDevice>, Failure> {
    let failed = |error: Error| open_failure(name, &error);
    let spec = if arguments.target_image_opts {
        if arguments.target_format.is_some() {
            return fail("--image-opts and --format are mutually exclusive");
        }
        ImageSpec::image_opts(name).map_err(failed)?
    } else {
        // What was made with a secret is opened with it.
        let secrets = encryption::key_secrets(arguments.target_options.as_deref())?;
        ImageSpec::filename(name)
            .with_format(Some(format))
            .with_options(secrets)
    };
    let flags = OpenFlags {
        writable: true,
        cache,
        discard: true,
        compression: arguments.compression,
        reproducible: arguments.reproducible,
        // QEMU lets others write a raw target too. Nobody wants that.
        no_share: convert_stdout::has_streams(report::program()),
        ..OpenFlags::default()
    };
    open_device(&spec, &flags).await.map_err(failed)
}

pub(super) fn copy_options(
    arguments: &Arguments,
    target: &Arc<dyn BlockDevice>,
    has_backing: bool,
) -> CopyOptions {
    let min_sparse_bytes = match arguments.sparse_bytes {
        Some(0) => None,
        Some(bytes) => Some(bytes),
        None => Some(DEFAULT_SPARSE_BYTES),
    };
    let fresh = !arguments.no_create && !has_backing && min_sparse_bytes.is_some();
    CopyOptions {
        parallel: parallel(arguments),
        out_of_order: arguments.out_of_order,
        laid_out_in_order: !arguments.out_of_order,
        min_sparse_bytes,
        target_is_zero: arguments.target_is_zero || (fresh && target.info().has_zero_init),
        target_backing: has_backing.then(|| TargetBacking {
            size_bytes: target
                .backing()
                .map_or(u64::MAX, |backing| backing.size_bytes()),
        }),
        salvage: arguments.salvage,
        speed: Speed::new(arguments.rate_bytes.unwrap_or(0)),
        len_bytes: Some(target.size_bytes()),
        skip_bytes: 0,
        compressed_clusters_bytes: match arguments.compress || takes_only_compressed(target) {
            true => target.info().cluster_size_bytes,
            false => None,
        },
        copy_range: arguments.copy_range,
        ..CopyOptions::default()
    }
}

fn takes_only_compressed(target: &Arc<dyn BlockDevice>) -> bool {
    let facts = foreign::facts(&**target);
    facts.is_some_and(|facts| facts.compression == CompressedWrites::Only)
}

/// Pieces in flight: as many as were asked for; by default enough for every core to
/// have something to compress while other pieces are read and written.
fn parallel(arguments: &Arguments) -> usize {
    if arguments.reproducible {
        return 1;
    }
    let default = match arguments.compress {
        true => DEFAULT_PARALLEL.max(2 * lane::compute_threads() as u64),
        false => DEFAULT_PARALLEL,
    };
    arguments.parallel.unwrap_or(default) as usize
}

pub(super) fn copy_failure(error: CopyError) -> Failure {
    report::about_cause(&error.cause);
    let cause = errno_text(error.cause.errno());
    Failure::Message(format!(
        "error while {} {}: {cause}",
        error.step, error.offset_bytes
    ))
}

/// A reporter that has begun to count.
fn begun(command: Command<'_>, arguments: &Arguments) -> ProgressReporter {
    let mut reporter = ProgressReporter::new(command.program, arguments.progress, arguments.quiet);
    reporter.progress.show(0, 1);
    reporter
}

/// Tells the user how a copy goes, and what of the sources cannot be read.
struct CopyTeller {
    reporter: ProgressReporter,
    quiet: bool,
}

impl Observer for CopyTeller {
    fn wants_progress(&self) -> bool {
        self.reporter.wants_progress()
    }

    fn progress(&mut self, done_bytes: u64, total_bytes: u64) {
        self.reporter.progress(done_bytes, total_bytes);
    }

    fn unknown(&mut self, source_offset_bytes: u64, error: &Error) {
        if !self.quiet {
            self.reporter.progress.beside(|| {
                report::warning(format_args!(
                    "error while reading block status at offset {source_offset_bytes}: {}",
                    errno_text(error.errno())
                ));
            });
        }
    }

    fn unreadable(&mut self, offset_bytes: u64, error: &Error) {
        if !self.quiet {
            self.reporter.progress.beside(|| {
                report::warning(format_args!(
                    "error while reading offset {offset_bytes}: {}",
                    errno_text(error.errno())
                ));
            });
        }
    }
}

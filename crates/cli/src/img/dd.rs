//! `dd`: copies blocks of an image into a new one.

use std::ffi::OsString;

use vellum_graph::open_device;
use vellum_images::create;
use vellum_images::create_options::format_options;
use vellum_io::error::errno_text;
use vellum_io::lane;
use vellum_jobs::copy::{CopyError, CopyOptions, Step, copy};
use vellum_options::{CacheMode, ImageSpec, OpenFlags, error_text};

use super::command::{
    Command, Failure, MAX_BYTES, Outcome, Subcommand, fail, incomplete, install_bulk_lane,
    not_taken, number, open_failure, reading_once, size,
};
use super::convert_onto_source;
use super::convert_stdout;
use super::cut_short;
use super::rows::{OBJECT, SHARE};
use super::unfinished::Unfinished;
use crate::progress::ProgressReporter;
use crate::spec::{CommonArgs, Spec};
use crate::{hint, report};

pub static DD: Subcommand = Subcommand {
    spec: Spec {
        name: "dd",
        about: "Copy blocks of an image",
        usage: "\
[-f FMT|--image-opts] [-O OUTPUT_FMT] [-U]
        [bs=BLOCK_SIZE] [count=BLOCKS] [skip=BLOCKS] if=INPUT of=OUTPUT",
        arguments: &[
            "-f, --format FMT  the format of INPUT",
            "--image-opts  INPUT is a list of options, not a name (excludes --format)",
            "-O, --output-format OUTPUT_FMT  the format of OUTPUT (raw)",
            SHARE,
            OBJECT,
            "bs=BLOCK_SIZE[kKMGTP]  the size of a block (512)",
            "count=COUNT  blocks to copy (all)",
            "skip=COUNT  blocks of INPUT to leave out",
            "if=INPUT  the image to read",
            "of=OUTPUT  the image to make",
        ],
        examples: "\
vellum dd -O raw bs=1M count=1 if=disk.qcow2 of=first.raw
  the first MiB of a disk
",
        ..Spec::EMPTY
    },
    run,
};

const DEFAULT_BLOCK_BYTES: u64 = 512;
const MAX_BLOCK_BYTES: u64 = i32::MAX as u64;

#[derive(Debug)]
struct Arguments {
    common: CommonArgs,
    output_format: String,
    input: Option<String>,
    output: Option<String>,
    block_bytes: u64,
    count: Option<u64>,
    skip: u64,
}

fn run(command: Command<'_>, args: Vec<OsString>) -> Outcome {
    let mut arguments = Arguments {
        common: CommonArgs::default(),
        output_format: "raw".to_owned(),
        input: None,
        output: None,
        block_bytes: DEFAULT_BLOCK_BYTES,
        count: None,
        skip: 0,
    };
    let mut common = command.parse(args, |name, value| match name {
        "output-format" => {
            arguments.output_format = value;
            Ok(())
        }
        _ => not_taken(name),
    })?;
    for operand in std::mem::take(&mut common.operands) {
        take_operand(&mut arguments, &operand)?;
    }
    arguments.common = common;
    let (Some(input), Some(output)) = (&arguments.input, &arguments.output) else {
        return incomplete("Must specify both input and output files");
    };
    install_bulk_lane(false)?;
    let unfinished = Unfinished::new(output);
    let work = copy_blocks(command, &arguments, input, output, &unfinished);
    lane::block_on(unfinished.guard(command.program, work))
}

fn take_operand(arguments: &mut Arguments, operand: &str) -> Result<(), Failure> {
    let (name, value) = operand.split_once('=').unwrap_or((operand, ""));
    match name {
        "if" => arguments.input = Some(value.to_owned()),
        "of" => arguments.output = Some(value.to_owned()),
        "bs" => arguments.block_bytes = size("bs", value, 1, MAX_BLOCK_BYTES)?,
        "count" => arguments.count = Some(number("count", value, 0, MAX_BYTES)?),
        "skip" => arguments.skip = number("skip", value, 0, MAX_BYTES)?,
        _ => return incomplete(format!("unrecognized operand {name}")),
    }
    Ok(())
}

async fn copy_blocks(
    command: Command<'_>,
    arguments: &Arguments,
    input: &str,
    output: &str,
    unfinished: &Unfinished,
) -> Outcome {
    let spec = arguments.common.image(input)?;
    let flags = reading_once(CacheMode::default(), arguments.common.force_share);
    let opened = open_device(&spec, &flags).await;
    let source = opened.map_err(|error| open_failure(input, &error))?;
    cut_short::refuse(std::slice::from_ref(&source)).await?;
    let format = &arguments.output_format;
    if format_options(format).is_none() {
        return fail("Unknown file format");
    }
    let wanted = arguments
        .count
        .map_or(u64::MAX, |n| n.saturating_mul(arguments.block_bytes));
    let end_bytes = source.size_bytes().min(wanted);
    let skip_bytes = arguments.skip.saturating_mul(arguments.block_bytes);
    let mut settings = create::settings(output, format)?;
    settings.set("size", &end_bytes.saturating_sub(skip_bytes).to_string())?;
    convert_onto_source::refuse_names(std::slice::from_ref(&source), [output])?;
    unfinished.makes(output);
    create::make(output, format, &settings)
        .await
        .map_err(|error| {
            hint::about_space(output, &error, settings.integer("size"));
            Failure::Message(format!(
                "{output}: error while creating output image: {}",
                error_text(&error)
            ))
        })?;
    let spec = ImageSpec::filename(output).with_format(Some(format));
    let flags = OpenFlags {
        writable: true,
        discard: true,
        // As for the target of `convert`.
        no_share: convert_stdout::has_streams(command.program),
        ..OpenFlags::default()
    };
    let opened = open_device(&spec, &flags).await;
    let target = opened.map_err(|error| open_failure(output, &error))?;
    unfinished.is_written();
    if skip_bytes > end_bytes {
        report::error(format_args!("{input}: cannot skip to specified offset"));
    }
    let options = CopyOptions {
        min_sparse_bytes: None,
        len_bytes: Some(end_bytes),
        skip_bytes: skip_bytes.min(end_bytes),
        ..CopyOptions::default()
    };
    let mut reporter = ProgressReporter::new(command.program, false, false);
    let copied = copy(&[source], &target, &options, &mut reporter).await;
    reporter.progress.end();
    copied.map_err(|error| {
        hint::about_space(output, &error.cause, Some(reporter.left_bytes));
        hint::about_seal(&error.cause);
        copy_failure(error)
    })?;
    target.close().await?;
    unfinished.is_done();
    Ok(0)
}

fn copy_failure(error: CopyError) -> Failure {
    crate::report::about_cause(&error.cause);
    let step = match error.step {
        Step::Write => "writing to output",
        Step::Status | Step::Read | Step::ReadShown => "reading from input",
    };
    let cause = errno_text(error.cause.errno());
    Failure::Message(format!("error while {step} image file: {cause}"))
}

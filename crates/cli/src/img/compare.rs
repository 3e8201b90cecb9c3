//! `compare`: says whether two images hold the same.

use std::ffi::OsString;
use std::sync::Arc;

use vellum::BlockDevice;
use vellum_graph::open_device;
use vellum_io::error::errno_text;
use vellum_io::lane;
use vellum_jobs::compare::{CompareError, CompareOptions, Outcome as Found, Side, compare};
use vellum_options::CacheMode;

use super::command::{
    Command, Failure, Outcome, Subcommand, cache_mode, image_spec, install_bulk_lane, not_taken,
    open_failure, reading_once,
};
use super::rows::{OBJECT, PROGRESS, QUIET, SHARE};
use crate::progress::Progress;
use crate::spec::{CommonArgs, Spec};
use crate::{hint, report};

pub static COMPARE: Subcommand = Subcommand {
    spec: Spec {
        name: "compare",
        about: "Compare two images",
        usage: "\
[--image-opts | [-f FMT] [-F FMT]] [-s]
        [-T CACHE] [-U] [--object OBJDEF] FILENAME1 FILENAME2",
        arguments: &[
            QUIET,
            PROGRESS,
            "-f, --a-format FMT  the format of FILENAME1",
            "-F, --b-format FMT  the format of FILENAME2",
            "--image-opts  both names are lists of options (excludes --a-format and --b-format)",
            "-s, --strict  sizes and allocation have to agree too",
            "-T, --cache CACHE_MODE  cache mode of both (writeback)",
            SHARE,
            OBJECT,
            "FILENAME1, FILENAME2  the images",
        ],
        closing: "Exit codes: 0 the same, 1 different, 2 and more: the comparison failed.\n",
        examples: "\
vellum compare disk.raw disk.qcow2
  do both show the same?
vellum compare -s -f qcow2 -F qcow2 a.qcow2 b.qcow2
  same sizes and allocation too
",
        exits: "\
0  the images are the same
1  they differ
2  one could not be opened
3  where data lies could not be found out
4  one could not be read
",
        ..Spec::EMPTY
    },
    run,
};

/// Exit codes: the images differ, something is wrong with the command line or
/// the images, the allocation or the data could not be read.
const DIFFERENT: i32 = 1;
const FAILED: i32 = 2;
const STATUS_FAILED: i32 = 3;
const READ_FAILED: i32 = 4;

#[derive(Debug, Default)]
struct Arguments {
    common: CommonArgs,
    formats: [Option<String>; 2],
    strict: bool,
    cache: CacheMode,
}

fn run(command: Command<'_>, args: Vec<OsString>) -> Outcome {
    let mut arguments = Arguments::default();
    arguments.common = command.parse(args, |name, value| {
        match name {
            "a-format" => arguments.formats[0] = Some(value),
            "b-format" => arguments.formats[1] = Some(value),
            "strict" => arguments.strict = true,
            "cache" => {
                let mode = cache_mode("source cache", &value);
                arguments.cache = mode.map_err(|failure| failure.with_code(FAILED))?;
            }
            _ => return not_taken(name),
        }
        Ok(())
    })?;
    let [first, second] = arguments.common.operands.as_slice() else {
        return Err(Failure::Usage("Expecting two image file names".into()));
    };
    install_bulk_lane(arguments.cache.direct)?;
    lane::block_on(compare_images(command, [first, second], &arguments))
}

/// Opens one of the images.
async fn open(
    name: &str,
    format: Option<&str>,
    arguments: &Arguments,
) -> Result<Arc<dyn BlockDevice>, Failure> {
    let spec = image_spec(name, arguments.common.image_opts, format)?;
    let flags = reading_once(arguments.cache, arguments.common.force_share);
    open_device(&spec, &flags)
        .await
        .map_err(|error| open_failure(name, &error))
}

async fn compare_images(
    command: Command<'_>,
    names: [&String; 2],
    arguments: &Arguments,
) -> Outcome {
    let mut devices = Vec::new();
    for (name, format) in names.into_iter().zip(&arguments.formats) {
        let opened = open(name, format.as_deref(), arguments).await;
        devices.push(opened.map_err(|failure| failure.with_code(FAILED))?);
    }
    let mut progress = Progress::new(
        command.program,
        arguments.common.progress,
        arguments.common.quiet,
        2.0,
    );
    progress.show(0, 1);
    let options = CompareOptions {
        strict: arguments.strict,
    };
    let compared = compare(&devices[0], &devices[1], options, |done, all| {
        progress.show(done, all);
    });
    let compared = compared.await;
    progress.clear();
    let code = match compared {
        Ok(found) => print_outcome(&found, common_bytes(&devices), arguments.common.quiet),
        Err(error) => {
            let code = print_error(&error, names);
            if common_bytes(&devices).is_some_and(|common| error.offset_bytes >= common) {
                print(SIZE_WARNING, arguments.common.quiet);
            }
            code
        }
    };
    progress.end();
    Ok(code)
}

const SIZE_WARNING: &str = "Warning: Image size mismatch!";

/// The size of the smaller device, if the sizes differ.
fn common_bytes(devices: &[Arc<dyn BlockDevice>]) -> Option<u64> {
    let (first, second) = (devices[0].size_bytes(), devices[1].size_bytes());
    (first != second).then_some(first.min(second))
}

fn print(text: &str, quiet: bool) {
    if !quiet {
        report::print_line(text);
    }
}

fn print_outcome(found: &Found, common_bytes: Option<u64>, quiet: bool) -> i32 {
    let text = match found {
        Found::Identical => {
            if common_bytes.is_some() {
                print(SIZE_WARNING, quiet);
            }
            print("Images are identical.", quiet);
            return 0;
        }
        Found::SizeMismatch => "Strict mode: Image size mismatch!".to_owned(),
        Found::StatusMismatch(offset) => {
            format!("Strict mode: Offset {offset} block status mismatch!")
        }
        Found::ContentMismatch(offset) => {
            if common_bytes.is_some_and(|common| *offset >= common) {
                print(SIZE_WARNING, quiet);
            }
            format!("Content mismatch at offset {offset}!")
        }
    };
    print(&text, quiet);
    DIFFERENT
}

fn print_error(error: &CompareError, names: [&String; 2]) -> i32 {
    hint::about_seal(&error.cause);
    report::about_cause(&error.cause);
    let name = match error.side {
        Side::First => names[0],
        Side::Second => names[1],
    };
    if !error.reading {
        report::error(format_args!("Sector allocation test failed for {name}"));
        return STATUS_FAILED;
    }
    report::error(format_args!(
        "Error while reading offset {} of {name}: {}",
        error.offset_bytes,
        errno_text(error.cause.errno())
    ));
    READ_FAILED
}

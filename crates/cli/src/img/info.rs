//! `info`: prints what is known about an image.

use std::ffi::OsString;
use std::path::Path;

use serde_json::Value;
use vellum::ErrorKind;
use vellum_io::lane;
use vellum_options::{ImageSpec, error_text, filename, json};

use super::command::{Command, Failure, Outcome, Subcommand, not_taken, open_failure};
use super::describe::{Description, describe};
use super::human;
use super::ova;
use super::rows::{FILENAME, FORMAT, IMAGE_OPTS, OBJECT, OUTPUT, SHARE};
use crate::output::Output;
use crate::report;
use crate::spec::{CommonArgs, Spec};
use crate::terminal::quoted;

pub static INFO: Subcommand = Subcommand {
    spec: Spec {
        name: "info",
        about: "Tell about an image",
        usage: "\
[-f FMT | --image-opts] [-b] [-U] [--object OBJDEF]
        [--output human|json] FILENAME",
        arguments: &[
            FORMAT,
            IMAGE_OPTS,
            "-b, --backing-chain  tell about the backing files too",
            SHARE,
            OBJECT,
            OUTPUT,
            FILENAME,
        ],
        order: "output object",
        examples: "\
vellum info disk.qcow2
  format, size, what it takes, snapshots
vellum info --backing-chain overlay.qcow2
  all images that it stands on; a broken chain as far as it goes, and how to mend it
vellum info -U --output=json disk.qcow2
  for a program, while a machine uses it
",
        ..Spec::EMPTY
    },
    run,
};

#[derive(Debug, Default)]
struct Arguments {
    common: CommonArgs,
    chain: bool,
}

fn run(command: Command<'_>, args: Vec<OsString>) -> Outcome {
    let mut arguments = Arguments::default();
    arguments.common = command.parse(args, |name, _| match name {
        "backing-chain" => {
            arguments.chain = true;
            Ok(())
        }
        _ => not_taken(name),
    })?;
    let spec = arguments.common.one_image()?;
    // A handful of small reads: worker threads start faster than a ring.
    let options = lane::LaneOptions {
        backend: lane::Backend::Threads,
        ..Default::default()
    };
    lane::install(&options)?;
    if let Some(path) = ova::package(&arguments.common, &spec) {
        return lane::block_on(ova::info(&path, &arguments.common));
    }
    let chain = lane::block_on(collect(spec, &arguments));
    let (images, broken) = (chain.images, chain.broken);
    // QEMU's program shows nothing of a chain that does not end.
    match broken {
        Some(broken) if images.is_empty() || !report::is_own_name(command.program) => {
            Err(broken.failure)
        }
        broken => show(&images, &arguments, broken),
    }
}

/// Prints what was found, and then what ends the chain too early.
fn show(images: &[Description], arguments: &Arguments, broken: Option<Broken>) -> Outcome {
    match (arguments.common.output, arguments.chain) {
        (Output::Human, _) => {
            let texts: Vec<String> = images.iter().map(human::image).collect();
            report::print(texts.join("\n"));
        }
        (Output::Json, false) => {
            let values = images.iter().map(Description::to_json);
            values.for_each(|value| report::print_line(json::pretty(&value)));
        }
        (Output::Json, true) => {
            let values = images.iter().map(Description::to_json).collect();
            report::print_line(json::pretty(&Value::Array(values)));
        }
    }
    let Some(broken) = broken else {
        return Ok(0);
    };
    if let Some(image) = images.last() {
        report::error(broken.message(image));
        if let Some(line) = broken.mend(image) {
            report::eprint_line(&line);
        }
    }
    Ok(1)
}

/// An image and those below it, as far as they could be described.
#[derive(Debug, Default)]
struct Chain {
    images: Vec<Description>,
    broken: Option<Broken>,
}

/// Why a chain goes no further.
#[derive(Debug)]
struct Broken {
    /// In QEMU's words.
    failure: Failure,
    /// The same by itself.
    why: String,
    /// Another file in the place of the one that is named may mend it.
    is_name: bool,
}

impl Broken {
    /// What is wrong, and with which image's word.
    fn message(&self, image: &Description) -> String {
        format!(
            "The backing file that '{}' names cannot be used: {}",
            image.filename, self.why
        )
    }

    /// The command that has the image name another file: the one of the same name that lies
    /// beside it, if there is one.
    fn mend(&self, image: &Description) -> Option<String> {
        let backing = image.backing.as_ref().filter(|_| self.is_name)?;
        let format = backing.format.as_deref().unwrap_or("FORMAT");
        let named = Path::new(&backing.name).file_name().map(Path::new)?;
        let beside = Path::new(&image.file_name).with_file_name(named);
        let found = [beside.as_path(), named]
            .iter()
            .find_map(|place| std::fs::canonicalize(place).ok());
        let found = found.filter(|found| {
            let own = std::fs::canonicalize(&image.file_name).ok();
            own.as_ref() != Some(found)
        });
        let place = found.map_or("PLACE".to_owned(), |found| {
            quoted(&found.display().to_string())
        });
        Some(format!(
            "If that file lies elsewhere: vellum rebase -u -b {place} -F {format} {}",
            quoted(&image.file_name)
        ))
    }
}

/// Describes the image, and with `--backing-chain` all below it.
async fn collect(spec: ImageSpec, arguments: &Arguments) -> Chain {
    let mut chain = Chain::default();
    let mut seen = vec![spec.name.clone()];
    let mut next = Some(spec);
    while let Some(spec) = next.take() {
        let image = match describe(&spec, arguments.common.force_share).await {
            Ok(image) => image,
            Err(error) => {
                chain.broken = Some(Broken {
                    failure: open_failure(&spec.name, &error),
                    why: error_text(&error),
                    is_name: error.kind() == ErrorKind::NotFound,
                });
                return chain;
            }
        };
        if arguments.chain {
            match below(&image, &mut seen) {
                Ok(spec) => next = spec,
                Err(why) => {
                    chain.broken = Some(Broken {
                        failure: Failure::Message(why.clone()),
                        why,
                        is_name: true,
                    });
                }
            }
        }
        chain.images.push(image);
    }
    chain
}

/// What an image names as its backing file, unless that was `seen` before.
fn below(image: &Description, seen: &mut Vec<String>) -> Result<Option<ImageSpec>, String> {
    let Some(backing) = &image.backing else {
        return Ok(None);
    };
    let full = filename::resolve(&image.file_name, &backing.name);
    let full = full.map_err(|error| error_text(&error))?;
    if seen.contains(&full) {
        return Err(format!("Backing file '{full}' creates an infinite loop."));
    }
    seen.push(full.clone());
    let spec = ImageSpec::filename(full).with_format(backing.format.as_deref());
    Ok(Some(spec))
}

//! `info`: prints what is known about an image.

use std::ffi::OsString;

use serde_json::Value;
use vellum_control::{ImageSpec, filename, json};
use vellum_storage::lane;

use super::command::{Command, Failure, Outcome, Output, check_object, one_image, open_failure};
use super::describe::{Description, describe};
use super::help;
use super::human;
use crate::getopt::{OptionSpec, Shape, Takes, shapes};
use crate::report;

#[derive(Debug, Clone, Copy)]
enum Opt {
    Help,
    Format,
    ImageOpts,
    Chain,
    Output,
    ForceShare,
    Object,
}

const OPTIONS: &[OptionSpec<Opt>] = &[
    OptionSpec::new(Opt::Help, 'h', "help", Takes::Nothing),
    OptionSpec::new(Opt::Format, 'f', "format", Takes::Value),
    OptionSpec::long(Opt::ImageOpts, "image-opts", Takes::Nothing),
    OptionSpec::new(Opt::Chain, 'b', "backing-chain", Takes::Nothing),
    OptionSpec::long(Opt::Output, "output", Takes::Value),
    OptionSpec::new(Opt::ForceShare, 'U', "force-share", Takes::Nothing),
    OptionSpec::long(Opt::Object, "object", Takes::Value),
];

/// The options, as completions and manuals show them.
pub fn options() -> Vec<Shape> {
    shapes(OPTIONS)
}

#[derive(Debug, Default)]
struct Arguments {
    format: Option<String>,
    image_opts: bool,
    chain: bool,
    output: Output,
    force_share: bool,
}

pub fn run(command: Command<'_>, args: Vec<OsString>) -> Outcome {
    let mut arguments = Arguments::default();
    let mut parser = command.parser(OPTIONS, args);
    while let Some((option, value)) = parser.next_option()? {
        let value = value.unwrap_or_default();
        match option {
            Opt::Help => return help::subcommand(command),
            Opt::Format => arguments.format = Some(value),
            Opt::ImageOpts => arguments.image_opts = true,
            Opt::Chain => arguments.chain = true,
            Opt::Output => arguments.output = Output::parse(&value)?,
            Opt::ForceShare => arguments.force_share = true,
            Opt::Object => check_object(&value)?,
        }
    }
    let operands = parser.operands();
    let format = arguments.format.as_deref();
    let spec = one_image(&operands, arguments.image_opts, format)?;
    // A handful of small reads: worker threads start faster than a ring.
    let options = lane::LaneOptions {
        backend: lane::Backend::Threads,
        ..Default::default()
    };
    lane::install(&options)?;
    let images = lane::block_on(collect(spec, &arguments))?;
    match (arguments.output, arguments.chain) {
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
    Ok(0)
}

/// Describes the image, and with `--backing-chain` all below it.
async fn collect(spec: ImageSpec, arguments: &Arguments) -> Result<Vec<Description>, Failure> {
    let mut images: Vec<Description> = Vec::new();
    let mut seen = vec![spec.name.clone()];
    let mut next = Some(spec);
    while let Some(spec) = next.take() {
        let described = describe(&spec, arguments.force_share).await;
        let image = described.map_err(|error| open_failure(&spec.name, &error))?;
        if arguments.chain
            && let Some(backing) = &image.backing
        {
            let full = filename::resolve(&image.file_name, &backing.name)?;
            if seen.contains(&full) {
                return Err(Failure::Message(format!(
                    "Backing file '{full}' creates an infinite loop."
                )));
            }
            seen.push(full.clone());
            next = Some(ImageSpec::filename(full).with_format(backing.format.as_deref()));
        }
        images.push(image);
    }
    Ok(images)
}

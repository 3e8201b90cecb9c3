//! `open`: makes an overlay on a disk in a repository, which can be used at once.

use std::ffi::OsString;
use std::path::Path;

use serde_json::json;
use vellum_images::create::{self, CreateRequest};
use vellum_io::error::io_text;
use vellum_io::lane;

use super::super::command::{Command, Failure, Outcome, check_object, fail};
use super::super::help;
use super::{disk_name, find, named};
use crate::getopt::{OptionSpec, Shape, Takes, shapes};
use crate::report;

#[derive(Debug, Clone, Copy)]
enum Opt {
    Help,
    Quiet,
    Cache,
    Limit,
    Prefetch,
    Options,
    Object,
}

const OPTIONS: &[OptionSpec<Opt>] = &[
    OptionSpec::new(Opt::Help, 'h', "help", Takes::Nothing),
    OptionSpec::new(Opt::Quiet, 'q', "quiet", Takes::Nothing),
    OptionSpec::long(Opt::Cache, "cache", Takes::Value),
    OptionSpec::long(Opt::Limit, "limit", Takes::Value),
    OptionSpec::long(Opt::Prefetch, "prefetch", Takes::Nothing),
    OptionSpec::new(Opt::Options, 'o', "options", Takes::Value),
    OptionSpec::long(Opt::Object, "object", Takes::Value),
];

/// The options, as completions and manuals show them.
pub fn options() -> Vec<Shape> {
    shapes(OPTIONS)
}

pub fn run(command: Command<'_>, args: Vec<OsString>) -> Outcome {
    let mut cache = serde_json::Map::new();
    let (mut quiet, mut options) = (false, None);
    let mut parser = command.parser(OPTIONS, args);
    while let Some((option, value)) = parser.next_option()? {
        let value = value.unwrap_or_default();
        match option {
            Opt::Help => return help::subcommand(command),
            Opt::Quiet => quiet = true,
            // The overlay may be opened from any folder.
            Opt::Cache => match std::path::absolute(&value) {
                Ok(path) => drop(cache.insert("directory".into(), path.to_string_lossy().into())),
                Err(error) => {
                    return fail(format!("Invalid folder '{value}': {}", io_text(&error)));
                }
            },
            Opt::Limit => drop(cache.insert("limit".into(), value.into())),
            Opt::Prefetch => drop(cache.insert("prefetch".into(), true.into())),
            Opt::Options => super::super::create::add_options(&mut options, value)?,
            Opt::Object => check_object(&value)?,
        }
    }
    let operands = parser.operands();
    let [disk, overlay] = operands.as_slice() else {
        let message = "Expecting a disk in a repository and the overlay's name";
        return Err(Failure::Usage(message.into()));
    };
    if !cache.is_empty() && !cache.contains_key("directory") {
        let message = "--limit and --prefetch are of a cache: name its folder with --cache";
        return Err(Failure::Usage(message.into()));
    }
    if Path::new(overlay).exists() {
        return fail(format!("'{overlay}' is there already"));
    }
    let named = named(disk)?;
    let (_, manifest) = lane::block_on(find(&named))?;
    let mut node = named.node(manifest.number, manifest.push);
    if !cache.is_empty() {
        cache.insert("driver".into(), "cache".into());
        cache.insert("file".into(), node);
        node = cache.into();
    }
    let backing = json!({"driver": "raw", "file": node});
    let request = CreateRequest {
        filename: overlay.clone(),
        format: "qcow2".to_owned(),
        backing: Some(format!("json:{backing}")),
        backing_format: Some("raw".to_owned()),
        options,
        ..CreateRequest::default()
    };
    lane::block_on(async {
        let settings = create::prepare(&request).await?;
        create::make(&request.filename, &request.format, &settings).await
    })?;
    if !quiet {
        let name = disk_name(&manifest);
        report::print(format_args!("{overlay}: an overlay on {name}\n"));
    }
    Ok(0)
}

//! `open`: makes an overlay on a disk in a repository, which can be used at once.

use std::ffi::OsString;
use std::path::Path;

use serde_json::json;
use vellum_images::create::{self, CreateRequest};
use vellum_io::error::io_text;
use vellum_io::lane;

use super::super::command::{Command, Failure, Outcome, Subcommand, fail, not_taken};
use super::super::rows::{OBJECT, QUIET, REPOSITORY, TAG};
use super::{disk_name, find, named};
use crate::report;
use crate::spec::Spec;

pub static OPEN: Subcommand = Subcommand {
    spec: Spec {
        name: "open",
        about: "Make an overlay on a disk in a repository",
        usage: "\
[--cache FOLDER [--limit SIZE] [--prefetch]] [-o OPTIONS] [-q]
        [--object OBJDEF] REPOSITORY[:TAG[@NUMBER]] OVERLAY",
        arguments: &[
            QUIET,
            "--cache FOLDER  keep what was read in this folder, which is this user's alone, for \
             all disks",
            "--limit SIZE  what the folder takes at most",
            "--prefetch  bring everything there in the background",
            "-o, --options OPTIONS  options of the overlay",
            OBJECT,
            REPOSITORY,
            TAG,
            "OVERLAY  the qcow2 image to make, whose backing file the disk is",
        ],
        examples: "\
vellum open --cache /var/cache/vellum s3://backups/site:vm1 vm.qcow2
  a disk that can be used at once, and reads what it needs
vellum open /mnt/backups:vm1@3 old.qcow2
  the third one that was pushed, from a folder
",
        ..Spec::EMPTY
    },
    run,
};

fn run(command: Command<'_>, args: Vec<OsString>) -> Outcome {
    let mut cache = serde_json::Map::new();
    let mut options = None;
    let common = command.parse(args, |name, value| {
        match name {
            // The overlay may be opened from any folder.
            "cache" => match std::path::absolute(&value) {
                Ok(path) => drop(cache.insert("directory".into(), path.to_string_lossy().into())),
                Err(error) => {
                    return fail(format!("Invalid folder '{value}': {}", io_text(&error)));
                }
            },
            "limit" => drop(cache.insert("limit".into(), value.into())),
            "prefetch" => drop(cache.insert("prefetch".into(), true.into())),
            "options" => super::super::create::add_options(&mut options, value)?,
            _ => return not_taken(name),
        }
        Ok(())
    })?;
    let [disk, overlay] = common.operands.as_slice() else {
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
    if !common.quiet {
        let name = disk_name(&manifest);
        report::print(format_args!("{overlay}: an overlay on {name}\n"));
    }
    Ok(0)
}

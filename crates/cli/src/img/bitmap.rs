//! `bitmap`: changes the persistent bitmaps of an image.

use std::ffi::OsString;
use std::sync::Arc;

use vellum::BlockDevice;
use vellum::qcow2::AsQcow2;
use vellum::qcow2::{BitmapOptions, Bitmaps, DirtyBitmap};
use vellum_daemon::shown_bitmaps::with_hint;
use vellum_graph::open_device;
use vellum_io::lane;
use vellum_options::{ImageSpec, OpenFlags, error_text};

use super::activity::ActivityIndicator;
use super::command::{
    Command, Failure, MAX_BYTES, Outcome, Subcommand, fail, image_spec, incomplete, not_taken,
    open_failure, size,
};
use super::rows::{FILENAME, FORMAT, IMAGE_OPTS, OBJECT};
use crate::spec::{CommonArgs, Spec};

/// What stands for the node in messages; QEMU numbers its nodes, and scripts look past
/// the number.
const NODE_NAME: &str = "#block100";

pub static BITMAP: Subcommand = Subcommand {
    spec: Spec {
        name: "bitmap",
        about: "Change the bitmaps of an image",
        usage: "\
( --merge SOURCE | --add | --remove | --clear |
                --enable | --disable ).. [-f FMT | --image-opts]
        [ -b SRC_FILENAME [-F SOURCE_FMT]] [-g SIZE[KMGTPE]] [--object OBJDEF]
        FILENAME BITMAP",
        arguments: &[
            FORMAT,
            IMAGE_OPTS,
            "--add  make BITMAP, which records writes from now on",
            " -g, --granularity SIZE[KMGTPE]  bytes that a bit of it stands for (the cluster size, \
             4k to 64k)",
            "--remove  remove BITMAP",
            "--clear  forget what BITMAP has recorded",
            "--enable, --disable  have BITMAP record writes, or not",
            "--merge SOURCE  add what the bitmap SOURCE has recorded to BITMAP",
            " -b, --source-file SRC_FILENAME  the image that has SOURCE (FILENAME)",
            " -F, --source-format SRC_FMT  the format of SRC_FILENAME",
            OBJECT,
            FILENAME,
        ],
        closing: "What is asked for is done in the order of the command line.\n",
        examples: "\
vellum bitmap --add disk.qcow2 daily
  record writes from now on
vellum bitmap --merge monday disk.qcow2 week
  add what one recorded to another
vellum bitmap --remove disk.qcow2 daily
  remove it
",
        ..Spec::EMPTY
    },
    run,
};

/// One thing to do with the bitmap; done in the order of the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Action {
    Add,
    Remove,
    Clear,
    Enable,
    Disable,
    Merge(String),
}

impl Action {
    fn name(&self) -> &'static str {
        match self {
            Action::Add => "add",
            Action::Remove => "remove",
            Action::Clear => "clear",
            Action::Enable => "enable",
            Action::Disable => "disable",
            Action::Merge(_) => "merge",
        }
    }
}

#[derive(Debug, Default)]
struct Arguments {
    common: CommonArgs,
    actions: Vec<Action>,
    granularity_bytes: u64,
    source: Option<String>,
    source_format: Option<String>,
}

impl Arguments {
    /// Refuses what contradicts itself, in QEMU's order and words.
    fn check(&self) -> Result<(), Failure> {
        let is_merge = |action: &Action| matches!(action, Action::Merge(_));
        let refusals = [
            (
                self.actions.is_empty(),
                "Need at least one of --add, --remove, --clear, --enable, --disable, or --merge",
            ),
            (
                self.granularity_bytes > 0 && !self.actions.contains(&Action::Add),
                "granularity only supported with --add",
            ),
            (
                self.source_format.is_some() && self.source.is_none(),
                "-F only supported with -b",
            ),
            (
                self.source.is_some() && !self.actions.iter().any(is_merge),
                "Merge bitmap source file only supported with --merge",
            ),
        ];
        match refusals.into_iter().find(|(refused, _)| *refused) {
            Some((_, message)) => fail(message),
            None => Ok(()),
        }
    }
}

fn run(command: Command<'_>, args: Vec<OsString>) -> Outcome {
    let mut arguments = Arguments::default();
    arguments.common = command.parse(args, |name, value| {
        match name {
            "add" => arguments.actions.push(Action::Add),
            "remove" => arguments.actions.push(Action::Remove),
            "clear" => arguments.actions.push(Action::Clear),
            "enable" => arguments.actions.push(Action::Enable),
            "disable" => arguments.actions.push(Action::Disable),
            "merge" => arguments.actions.push(Action::Merge(value)),
            "granularity" => {
                arguments.granularity_bytes = size("granularity", &value, 0, MAX_BYTES)?;
            }
            "source-file" => arguments.source = Some(value),
            "source-format" => arguments.source_format = Some(value),
            _ => return not_taken(name),
        }
        Ok(())
    })?;
    arguments.check()?;
    let [file, bitmap] = arguments.common.operands.as_slice() else {
        return incomplete("Expecting filename and bitmap name");
    };
    let spec = arguments.common.image(file)?;
    let _indicator = ActivityIndicator::new(command.program, false, "Changing the bitmap", None);
    lane::block_on(change(&spec, bitmap, &arguments))
}

async fn change(spec: &ImageSpec, bitmap: &str, arguments: &Arguments) -> Outcome {
    let flags = OpenFlags {
        writable: true,
        ..OpenFlags::default()
    };
    let device = open_device(spec, &flags)
        .await
        .map_err(|error| open_failure(&spec.name, &error))?;
    let done = change_open(&device, bitmap, arguments).await;
    // Also after a failure: what was done before it stays.
    let closed = device.close().await;
    done?;
    closed?;
    Ok(0)
}

async fn change_open(
    device: &Arc<dyn BlockDevice>,
    bitmap: &str,
    arguments: &Arguments,
) -> Result<(), Failure> {
    let source = match &arguments.source {
        Some(name) => Some(open_source(name, arguments.source_format.as_deref()).await?),
        None => None,
    };
    let source = source.as_ref().unwrap_or(device);
    for action in &arguments.actions {
        let granularity_bytes = arguments.granularity_bytes;
        let done = act(device, bitmap, action, source, granularity_bytes).await;
        done.map_err(|message| {
            let name = action.name();
            Failure::Message(with_hint(format!(
                "Operation {name} on bitmap {bitmap} failed: {message}"
            )))
        })?;
    }
    Ok(())
}

async fn open_source(name: &str, format: Option<&str>) -> Result<Arc<dyn BlockDevice>, Failure> {
    let spec = image_spec(name, false, format)?;
    // Bitmaps are the image's own; what it stands on may be the image that gets them.
    let flags = OpenFlags {
        no_backing: true,
        ..OpenFlags::default()
    };
    let opened = open_device(&spec, &flags).await;
    opened.map_err(|error| open_failure(name, &error))
}

/// Does one thing; an error is QEMU's text.
async fn act(
    device: &Arc<dyn BlockDevice>,
    name: &str,
    action: &Action,
    source: &Arc<dyn BlockDevice>,
    granularity_bytes: u64,
) -> Result<(), String> {
    let Some(bitmaps) = device.as_qcow2().map(|image| image.bitmaps()) else {
        return Err(match action {
            Action::Add if !name.is_empty() => {
                format!("Can't store persistent bitmaps to {NODE_NAME}: Operation not supported")
            }
            Action::Add => "Bitmap name cannot be empty".to_owned(),
            _ => not_found(name),
        });
    };
    let done = match action {
        Action::Add => bitmaps.add(name, new_bitmap(granularity_bytes)).await,
        Action::Remove => bitmaps.remove(name).await,
        Action::Clear => bitmaps.clear(name).await,
        Action::Enable => bitmaps.enable(name).await,
        Action::Disable => bitmaps.disable(name).await,
        Action::Merge(from) => {
            let Some(other) = source.as_qcow2().map(|image| image.bitmaps()) else {
                return Err(not_found(from));
            };
            return merge(&bitmaps, name, &other, from).await;
        }
    };
    done.map_err(|error| error_text(&error))
}

fn new_bitmap(granularity_bytes: u64) -> BitmapOptions {
    BitmapOptions::default()
        // QEMU keeps 32 bits of it.
        .granularity_bytes((granularity_bytes > 0).then_some(granularity_bytes & 0xffff_ffff))
        .node_name(Some(NODE_NAME.to_owned()))
}

async fn merge(bitmaps: &Bitmaps, name: &str, other: &Bitmaps, from: &str) -> Result<(), String> {
    // The target is looked at first.
    bitmaps
        .find(name)
        .await
        .map_err(|error| error_text(&error))?;
    let source: Result<DirtyBitmap, _> = other.read(from).await;
    let source = source.map_err(|error| error_text(&error))?;
    let merged = bitmaps.merge(name, vec![source]).await;
    merged.map_err(|error| error_text(&error))
}

fn not_found(name: &str) -> String {
    format!("Dirty bitmap '{name}' not found")
}

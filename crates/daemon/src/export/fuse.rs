//! What an export has when it is a file (`type=fuse`).

use std::path::{Path, PathBuf};
use std::sync::Arc;

use vellum::{BlockDevice, Io, Preallocation, delegate};
use vellum_export::WhenFull;
use vellum_export::fuse::{AllowOther, Export, ExportOptions, Transport};
use vellum_graph::Nodes;
use vellum_graph::live::{Changes, RequiredAccess, User};
use vellum_io::error::io_text;
use vellum_options::Options;

use crate::failure::{Failure, failure, message, need};

use super::surroundings::Surroundings;

/// Most links that are followed from one path.
const LINKS_MAX: usize = 40;

/// The options of this type.
#[derive(Debug)]
pub(super) struct Wanted {
    mountpoint: PathBuf,
    growable: bool,
    allow_other: AllowOther,
    transport: Transport,
}

impl Wanted {
    /// Takes the options apart.
    pub(super) fn take(options: &mut Options) -> Result<Self, Failure> {
        let path = need(options, "mountpoint")?;
        let mountpoint = std::path::absolute(&path)
            .map_err(|error| message(format!("Failed to stat '{path}': {}", io_text(&error))))?;
        let growable = options.take_bool("growable").map_err(failure)?;
        let allow_other = match take_mode(options, "allow-other")? {
            Mode::Auto => AllowOther::Auto,
            Mode::Off => AllowOther::Off,
            Mode::On => AllowOther::On,
        };
        let transport = match take_mode(options, "io-uring")? {
            Mode::Auto => Transport::Auto,
            Mode::Off => Transport::Device,
            Mode::On => Transport::IoUring,
        };
        Ok(Wanted {
            mountpoint,
            growable: growable.unwrap_or(false),
            allow_other,
            transport,
        })
    }

    /// What users of the file do to the node. Nobody relies on its size: they ask for it.
    pub(super) fn access(&self, writable: bool) -> RequiredAccess {
        RequiredAccess {
            role: "root".to_owned(),
            changes: Changes {
                content: writable,
                size: writable && self.growable,
            },
            keeps: Changes::NONE,
        }
    }

    /// Refuses a file that an export is mounted over already.
    pub(super) fn check_free<'a>(
        &self,
        mut mounted: impl Iterator<Item = &'a Path>,
    ) -> Result<(), Failure> {
        let own = place(&self.mountpoint);
        match mounted.any(|other| place(other) == own) {
            false => Ok(()),
            true => Err(message(format!(
                "There already is a FUSE export on '{}'",
                self.mountpoint.display()
            ))),
        }
    }

    /// Mounts a device.
    pub(super) async fn serve(
        self,
        (device, when_full): (Arc<dyn BlockDevice>, WhenFull),
        writable: bool,
        around: &Surroundings<'_>,
    ) -> Result<Export, Failure> {
        let options = ExportOptions::default()
            .writable(writable)
            .fair_depth(around.neighbours.clone())
            .size_turns(around.size_turns.clone())
            .when_full(when_full)
            .growable(self.growable)
            .resizable(true)
            .allow_other(self.allow_other)
            .transport(self.transport);
        let export = Export::new(device, self.mountpoint, &options).await;
        export.map_err(failure)
    }
}

/// Whether something is wanted.
enum Mode {
    Auto,
    Off,
    On,
}

fn take_mode(options: &mut Options, name: &str) -> Result<Mode, Failure> {
    let text = options.take_text(name).map_err(failure)?;
    match text.as_deref() {
        None | Some("auto") => Ok(Mode::Auto),
        Some("off") => Ok(Mode::Off),
        Some("on") => Ok(Mode::On),
        Some(other) => Err(message(format!(
            "Parameter '{name}' does not accept value '{other}'"
        ))),
    }
}

/// Whether two paths name the same file, also by links; neither file is looked at.
pub(crate) fn is_same_place(one: &Path, other: &Path) -> bool {
    let followed = |path: &Path| {
        let mut path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        for _ in 0..LINKS_MAX {
            let Ok(target) = std::fs::read_link(&path) else {
                break;
            };
            path = path.parent().unwrap_or(Path::new("/")).join(target);
        }
        place(&path)
    };
    followed(one) == followed(other)
}

/// A file by the folder that it is in, whose name may be another one. The file itself is not
/// looked at: that would be a request to its own export.
fn place(path: &Path) -> PathBuf {
    let folder = path.parent().and_then(|folder| folder.canonicalize().ok());
    match (folder, path.file_name()) {
        (Some(folder), Some(name)) => folder.join(name),
        _ => path.to_owned(),
    }
}

/// A node whose size is changed only while nobody relies on it.
#[derive(Debug)]
pub(super) struct ResizeInTurn {
    device: Arc<dyn BlockDevice>,
    nodes: Nodes,
    /// Of the export.
    id: String,
    /// The number of the export's use of the node.
    joined: u64,
}

impl ResizeInTurn {
    pub(super) fn new(
        device: Arc<dyn BlockDevice>,
        nodes: &Nodes,
        id: &str,
        joined: u64,
    ) -> Arc<Self> {
        Arc::new(ResizeInTurn {
            device,
            nodes: nodes.clone(),
            id: id.to_owned(),
            joined,
        })
    }

    /// Does something that changes the size.
    fn in_turn(&self, change: impl FnOnce(&dyn BlockDevice) -> Io<()> + 'static) -> Io<()> {
        let (nodes, device) = (self.nodes.clone(), self.device.clone());
        let user = User::Export(self.id.clone());
        let Some(node) = nodes.used_by(self.joined) else {
            return change(&*self.device);
        };
        let access = RequiredAccess {
            role: "root".to_owned(),
            changes: Changes::SIZE,
            keeps: Changes::NONE,
        };
        Io::start(async move {
            let joined = nodes.join(user, &node, access)?;
            let changed = change(&*device).await;
            nodes.leave(joined.id);
            changed
        })
    }
}

impl BlockDevice for ResizeInTurn {
    delegate!(
        device: info, size_bytes, read, read_into, write, write_from, write_zeroes,
        write_compressed, discard, flush, block_status, clear, close, backing, storage, format_device, identity, allocated_bytes,
    );

    fn stands_for(&self) -> Option<Arc<dyn BlockDevice>> {
        self.device.stands_for()
    }

    fn truncate(&self, size_bytes: u64) -> Io<()> {
        self.in_turn(move |device| device.truncate(size_bytes))
    }

    fn resize(&self, size_bytes: u64, preallocation: Preallocation) -> Io<()> {
        self.in_turn(move |device| device.resize(size_bytes, preallocation))
    }
}

//! `snapshot`: handles the internal snapshots of an image.

use std::ffi::OsString;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use vellum::qcow2::AsQcow2;
use vellum::qcow2::{NewSnapshot, Qcow2, SnapshotSelector};
use vellum::{BlockDevice, Error, ErrorKind};
use vellum_graph::{open_device, qemu_repair};
use vellum_io::error::errno_text;
use vellum_io::lane;
use vellum_options::{ImageSpec, OpenFlags, error_text};

use super::activity::ActivityIndicator;
use super::command::{Command, Failure, Outcome, Subcommand, fail, not_taken, open_failure};
use super::human;
use super::rows::{FILENAME, FORMAT, IMAGE_OPTS, OBJECT};
use crate::spec::Spec;
use crate::{hint, report};

/// Longer names are cut to so many bytes, as QEMU cuts them.
const MAX_NAME_BYTES: usize = 255;

pub static SNAPSHOT: Subcommand = Subcommand {
    spec: Spec {
        name: "snapshot",
        about: "Handle the snapshots of an image",
        usage: "\
[-f FMT | --image-opts] [-l | -a|-c|-d SNAPSHOT]
        [-U] [--object OBJDEF] FILENAME",
        arguments: &[
            "-q, --quiet  accepted and ignored",
            FORMAT,
            IMAGE_OPTS,
            "-U, --force-share  others may write meanwhile (with -l)",
            OBJECT,
            "Operation, one of:",
            "  -l, --list    list the snapshots of FILENAME (the default)",
            "  -c, --create SNAPSHOT    take a snapshot with this name",
            "  -a, --apply SNAPSHOT    make the disk what it was",
            "  -d, --delete SNAPSHOT    delete a snapshot",
            FILENAME,
        ],
        closing: "-a takes the ID or the TAG of a snapshot, -d the TAG.\n",
        examples: "\
vellum snapshot -c before-upgrade disk.qcow2
  take one
vellum snapshot -l disk.qcow2
  list them
vellum snapshot -a before-upgrade disk.qcow2
  go back: what was written since is lost
vellum snapshot -d before-upgrade disk.qcow2
  delete it: there is no way back to it any more
",
        ..Spec::EMPTY
    },
    run,
};

/// What to do, and with which snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Action {
    List,
    Create(String),
    Apply(String),
    Delete(String),
}

fn run(command: Command<'_>, args: Vec<OsString>) -> Outcome {
    let mut action = None;
    let common = command.parse(args, |name, value| {
        let asked = match name {
            "list" => Action::List,
            "create" => Action::Create(value),
            "apply" => Action::Apply(value),
            "delete" => Action::Delete(value),
            _ => return not_taken(name),
        };
        if action.replace(asked).is_some() {
            let message = "Cannot mix '-l', '-a', '-c', '-d'";
            return Err(Failure::Usage(message.into()));
        }
        Ok(())
    })?;
    let spec = common.one_image()?;
    let action = action.unwrap_or(Action::List);
    let what = match &action {
        Action::List => "Looking for snapshots",
        Action::Create(_) => "Taking the snapshot",
        Action::Apply(_) => "Going back to the snapshot",
        Action::Delete(_) => "Deleting the snapshot",
    };
    let _indicator = ActivityIndicator::new(command.program, common.quiet, what, None);
    lane::block_on(perform(&spec, action, common.force_share))
}

async fn perform(spec: &ImageSpec, action: Action, force_share: bool) -> Outcome {
    let flags = OpenFlags {
        writable: action != Action::List,
        discard: true,
        force_share,
        ..OpenFlags::default()
    };
    let device = open_device(spec, &flags)
        .await
        .map_err(|error| open_failure(&spec.name, &error))?;
    let image = device.as_qcow2();
    let done = match &action {
        Action::List => {
            list(image);
            return Ok(0);
        }
        Action::Create(name) => create(image, name).await,
        Action::Apply(name) => apply(image, name).await,
        Action::Delete(name) => delete(image, name).await,
    };
    let closed = device.close().await;
    done?;
    closed?;
    Ok(0)
}

fn list(image: Option<&Qcow2>) {
    let snapshots = image.map(Qcow2::snapshots).unwrap_or_default();
    if !snapshots.is_empty() {
        report::print(format_args!(
            "Snapshot list:\n{}",
            human::snapshots(&snapshots)
        ));
    }
}

/// When a snapshot is made, since 1970: now, or what `SOURCE_DATE_EPOCH` says
/// (<https://reproducible-builds.org/specs/source-date-epoch/>).
fn creation_time() -> Result<Duration, Failure> {
    let Some(text) = std::env::var_os("SOURCE_DATE_EPOCH") else {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        return Ok(now.unwrap_or_default());
    };
    let seconds = text.to_str().and_then(|text| text.parse::<u32>().ok());
    match seconds {
        Some(seconds) => Ok(Duration::from_secs(seconds.into())),
        None => fail("SOURCE_DATE_EPOCH is no number of seconds since 1970".to_owned()),
    }
}

async fn create(image: Option<&Qcow2>, name: &str) -> Result<(), Failure> {
    let failed = |text: String| format!("Could not create snapshot '{name}': {text}");
    let Some(image) = image else {
        return fail(failed("Operation not supported".into()));
    };
    let now = creation_time()?;
    let new = NewSnapshot {
        name: cut(name),
        date_seconds: now.as_secs() as u32,
        date_nanoseconds: now.subsec_micros() * 1000,
        // Not "none", as one would think: what the real tool writes.
        icount: Some(0),
        ..NewSnapshot::default()
    };
    match image.create_snapshot(new).await {
        Ok(_) => {
            warn_of_danger(image);
            Ok(())
        }
        Err(error) => {
            about_space(image, &error);
            fail(failed(errno_text(error.errno())))
        }
    }
}

/// Warns of what QEMU's tool would do to the snapshots of an image. QEMU's command line says nothing of it.
pub(super) fn warn_of_danger(image: &Qcow2) {
    let danger = qemu_repair::snapshots_in_danger(image);
    if let Some(danger) = danger.filter(|_| report::is_own()) {
        report::warning(danger);
    }
}

fn about_space(image: &Qcow2, error: &Error) {
    hint::about_space(&image.info().name, error, None);
}

fn cut(name: &str) -> String {
    let mut end = name.len().min(MAX_NAME_BYTES);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    name[..end].to_owned()
}

async fn apply(image: Option<&Qcow2>, name: &str) -> Result<(), Failure> {
    let failed = |text: &str| fail(format!("Could not apply snapshot '{name}': {text}"));
    let Some(image) = image else {
        return failed("Block driver does not support snapshots");
    };
    let selector = SnapshotSelector::IdOrName(name.to_owned());
    match image.apply_snapshot(selector).await {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let reason = errno_text(error.errno());
            failed(&format!("Failed to load snapshot: {reason}"))
        }
        Err(error) => {
            about_space(image, &error);
            failed(&error_text(&error))
        }
    }
}

async fn delete(image: Option<&Qcow2>, name: &str) -> Result<(), Failure> {
    let failed = |text: &str| fail(format!("Could not delete snapshot '{name}': {text}"));
    let Some(image) = image else {
        return failed("snapshot not found");
    };
    // By its name alone, unlike everywhere else: what is gone cannot be had back.
    let selector = SnapshotSelector::Name(name.to_owned());
    match image.delete_snapshot(selector).await {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == ErrorKind::NotFound => failed("snapshot not found"),
        Err(error) => {
            about_space(image, &error);
            failed(&error_text(&error))
        }
    }
}

/// The snapshot that `-l` of other subcommands names: `snapshot.id=ID`,
/// `snapshot.name=NAME`, both, or a word that is either.
pub fn selector(text: &str) -> Result<SnapshotSelector, Failure> {
    if !text.starts_with("snapshot.") {
        return Ok(SnapshotSelector::IdOrName(text.to_owned()));
    }
    let parsed = vellum_options::Options::parse(text);
    let mut options = parsed.map_err(|error| wrong_selector(text, &error_text(&error)))?;
    let mut take = |key: &str| options.take_text(key);
    let (id, name) = (take("snapshot.id")?, take("snapshot.name")?);
    if let Some(key) = options.keys().next() {
        return Err(wrong_selector(text, &format!("Invalid parameter '{key}'")));
    }
    match (id, name) {
        (Some(id), Some(name)) => Ok(SnapshotSelector::IdAndName { id, name }),
        (Some(id), None) => Ok(SnapshotSelector::Id(id)),
        (None, Some(name)) => Ok(SnapshotSelector::Name(name)),
        (None, None) => Err(wrong_selector(text, "a snapshot has to be named")),
    }
}

fn wrong_selector(text: &str, reason: &str) -> Failure {
    report::error(reason);
    Failure::Message(format!("Failed in parsing snapshot param '{text}'"))
}

/// The disk of an image as it was when a snapshot was taken.
pub async fn shown(
    device: &Arc<dyn BlockDevice>,
    selector: SnapshotSelector,
) -> Result<Arc<dyn BlockDevice>, Error> {
    let failed = |text: &str| {
        let message = format!("Failed to load snapshot: {text}");
        Error::new(ErrorKind::InvalidArgument, "open", message)
    };
    let Some(image) = device.as_qcow2() else {
        let format = device.info().format;
        return Err(failed(&format!(
            "Block format '{format}' used by device '' does not support temporarily loading \
             internal snapshots"
        )));
    };
    match image.open_snapshot(selector).await {
        Ok(snapshot) => Ok(snapshot),
        Err(error) => Err(failed(&error_text(&error))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn snapshots_are_named_in_several_ways() {
        let parse = |text: &str| selector(text).ok();
        let text = |text: &str| text.to_owned();
        assert_eq!(parse("a"), Some(SnapshotSelector::IdOrName(text("a"))));
        assert_eq!(
            parse("snapshot.id=1"),
            Some(SnapshotSelector::Id(text("1")))
        );
        assert_eq!(
            parse("snapshot.name=a,,b"),
            Some(SnapshotSelector::Name(text("a,b")))
        );
        let both = SnapshotSelector::IdAndName {
            id: text("1"),
            name: text("n"),
        };
        assert_eq!(parse("snapshot.name=n,snapshot.id=1"), Some(both));
        assert_eq!(parse("snapshot.size=1"), None);
    }

    #[test]
    fn long_names_are_cut_between_characters() {
        let name = "ü".repeat(200);
        assert_eq!(cut(&name).len(), 254);
        assert_eq!(cut("short"), "short");
    }
}

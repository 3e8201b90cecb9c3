//! The disk of `vellum oci`: which one may be put into a registry, and how one that comes gets its
//! name.

use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use tempfile::{Builder, NamedTempFile};
use vellum::BlockDevice;
use vellum::qcow2::AsQcow2;
use vellum_graph::open_device;
use vellum_images::oci::{self, OciOptions, Packing, Pull, Push, Reference, RegistryOptions};
use vellum_io::error::io_text;
use vellum_options::{ImageSpec, OpenFlags, filename};

use super::arguments::{Arguments, Way};
use crate::local;
use crate::progress::{Progress, SharedProgress};
use crate::report;
use crate::size::human;

/// Does what was asked for.
pub async fn run(program: &str, arguments: &Arguments) -> Result<(), String> {
    let reference = Reference::parse(&arguments.image).map_err(told)?;
    let registry = RegistryOptions {
        username: arguments.user.clone(),
        password_secret: arguments.password.clone(),
        plain_http: arguments.plain_http,
        authorities: arguments.authorities.clone(),
        architecture: arguments.architecture.clone(),
    };
    let options = registry.resolve().map_err(told)?;
    let progress = SharedProgress::new(Progress::new(program, false, arguments.common.quiet, 1.0));
    let done = match arguments.way {
        Some(Way::Push) => push(arguments, reference, options, &progress).await,
        _ => pull(arguments, reference, options, &progress).await,
    };
    progress.end();
    let said = done?;
    if !arguments.common.quiet {
        report::print_line(said);
    }
    Ok(())
}

fn told(error: vellum::Error) -> String {
    report::error_text(&error)
}

/// The path of a disk, which has to be a file of this machine.
fn local_path(disk: &str) -> Result<String, String> {
    match local::refusal(disk) {
        Some(message) => Err(message),
        None => filename::local_path(disk).map_err(told),
    }
}

async fn push(
    arguments: &Arguments,
    reference: Reference,
    options: OciOptions,
    progress: &SharedProgress,
) -> Result<String, String> {
    let packing = match arguments.compression.as_deref() {
        None | Some("gzip") => Packing::Gzip,
        Some("none") => Packing::None,
        Some("zstd") => Packing::Zstd,
        Some(other) => return Err(format!("No compression '{other}': none, gzip or zstd")),
    };
    let disk = &arguments.disk;
    let path = local_path(disk)?;
    let spec = ImageSpec::from_argument(disk, false, arguments.common.format.as_deref());
    let flags = OpenFlags {
        // Nobody changes it meanwhile.
        no_share: true,
        no_data: true,
        no_backing: true,
        ..OpenFlags::default()
    };
    let opened = open_device(&spec.map_err(told)?, &flags).await;
    let device = opened.map_err(|error| format!("Could not open '{disk}': {}", told(error)))?;
    let name = name_in_image(disk, &device)?;
    let file = File::open(&path).map_err(|error| cannot("read", &path, &error))?;
    let shown = progress.clone();
    let push = Push {
        name: name.to_owned(),
        packing,
        progress: Arc::new(move |done, total| shown.show(done, total)),
    };
    let pushed = oci::push(file, reference.clone(), options, push).await;
    // Nothing was changed, so nothing can be lost here.
    let _ = device.close().await;
    let digest = pushed.map_err(told)?;
    Ok(format!("{reference}: {digest}"))
}

/// The name of a disk in an image; refuses one that is not all of itself.
fn name_in_image(disk: &str, device: &Arc<dyn BlockDevice>) -> Result<&'static str, String> {
    let lacks = |what: &str| {
        Err(format!(
            "'{disk}' has {what}, and an image for machines holds one file: make one with 'vellum \
             convert -O qcow2'"
        ))
    };
    let header = device.as_qcow2().map(|image| image.header());
    match (device.info().format, header) {
        (_, Some(header)) if header.backing_file.is_some() => lacks("a backing file"),
        (_, Some(header)) if header.external_data_file().is_some() => lacks("a data file"),
        ("qcow2", _) => Ok("disk.qcow2"),
        ("raw", _) => Ok("disk.img"),
        (format, _) => Err(format!(
            "Machines know disks of the formats qcow2 and raw, and '{disk}' is {format}"
        )),
    }
}

async fn pull(
    arguments: &Arguments,
    reference: Reference,
    options: OciOptions,
    progress: &SharedProgress,
) -> Result<String, String> {
    let path = local_path(&arguments.disk)?;
    let target = Path::new(&path);
    if target.symlink_metadata().is_ok() && !arguments.force {
        return Err(format!("'{path}' exists: --force replaces it"));
    }
    let folder = match target.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let made = Builder::new()
        .prefix(".vellum-oci-")
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(folder);
    let temporary = made.map_err(|error| cannot("make", &path, &error))?;
    let file = temporary.as_file().try_clone();
    let file = file.map_err(|error| cannot("make", &path, &error))?;
    let shown = progress.clone();
    let pull = Pull {
        path: arguments.path.clone(),
        progress: Box::new(move |done, total| shown.show(done, total)),
    };
    let pulled = oci::pull(reference.clone(), options, file, pull).await;
    let pulled = pulled.map_err(told)?;
    keep(temporary, target, folder, arguments.force)?;
    Ok(format!(
        "{}: {} of {reference}, {}",
        path,
        pulled.path,
        human(pulled.len_bytes)
    ))
}

/// Gives what is complete its name, durably.
fn keep(temporary: NamedTempFile, target: &Path, folder: &Path, force: bool) -> Result<(), String> {
    let name = target.display().to_string();
    let synced = temporary.as_file().sync_all();
    synced.map_err(|error| cannot("write", &name, &error))?;
    let kept = match force {
        true => temporary.persist(target),
        false => temporary.persist_noclobber(target),
    };
    kept.map_err(|error| cannot("make", &name, &error.error))?;
    let synced = File::open(folder).and_then(|folder| folder.sync_all());
    synced.map_err(|error| cannot("write", &name, &error))
}

fn cannot(verb: &str, path: &str, error: &std::io::Error) -> String {
    format!("Cannot {verb} '{path}': {}", io_text(error))
}

//! `seal`: stores the hashes of what an image holds, in the image or in a file beside it.

use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;

use vellum::qcow2::AsQcow2;
use vellum::qcow2::seal::{SealInfo, SealOptions, Signer, make_manifest, unseal};
use vellum::{BlockDevice, Storage};
use vellum_graph::{open_device, secret};
use vellum_images::minisign::{SecretKey, key_id};
use vellum_io::lane;
use vellum_options::{CacheMode, ImageSpec, OpenFlags};
use vellum_storage::file::{Create, FileOptions, FileStorage};

use super::command::{
    Command, Failure, Outcome, Subcommand, cache_mode, fail, install_bulk_lane, not_taken,
    open_failure, reading_once,
};
use super::rows::{FILENAME, FORMAT, IMAGE_OPTS, OBJECT, PROGRESS, QUIET, SOURCE_CACHE};
use super::snapshot;
use crate::progress::{Progress, SharedProgress};
use crate::report;
use crate::spec::{CommonArgs, Spec};

pub static SEAL: Subcommand = Subcommand {
    spec: Spec {
        name: "seal",
        about: "Keep an image from being changed, and let changes be found",
        usage: "\
[-f FMT | --image-opts] [--key FILE [--password-secret ID]]
        [--manifest FILE | --unseal] [-T CACHE_MODE] [-p] [-q]
        [--object OBJDEF] FILENAME",
        arguments: &[
            QUIET,
            PROGRESS,
            FORMAT,
            IMAGE_OPTS,
            SOURCE_CACHE,
            "--key FILE  sign with this secret key of minisign",
            "--password-secret ID  the secret object that holds the key's password",
            "--manifest FILE  write the hashes of all that a guest sees into FILE; FILENAME stays \
             as it is",
            "--unseal  give the seal up, so that the image can be changed",
            OBJECT,
            FILENAME,
        ],
        examples: "\
vellum seal base.qcow2
  whatever changes from now on is found
vellum seal --key minisign.key base.qcow2
  the same, signed: nobody else can seal it like this
vellum seal --manifest disk.manifest -f raw disk.raw
  the hashes of a disk of any format in a file beside it
vellum seal --unseal base.qcow2
  let it be changed again
",
        ..Spec::EMPTY
    },
    run,
};

#[derive(Debug, Default)]
struct Arguments {
    common: CommonArgs,
    cache: CacheMode,
    key: Option<String>,
    password: Option<String>,
    manifest: Option<String>,
    unseal: bool,
}

fn run(command: Command<'_>, args: Vec<OsString>) -> Outcome {
    let mut arguments = Arguments::default();
    arguments.common = command.parse(args, |name, value| {
        match name {
            "cache" => arguments.cache = cache_mode("source cache", &value)?,
            "key" => arguments.key = Some(value),
            "password-secret" => arguments.password = Some(value),
            "manifest" => arguments.manifest = Some(value),
            "unseal" => arguments.unseal = true,
            _ => return not_taken(name),
        }
        Ok(())
    })?;
    let spec = arguments.common.one_image()?;
    if arguments.unseal && (arguments.key.is_some() || arguments.manifest.is_some()) {
        let message = "--unseal excludes --key and --manifest";
        return Err(Failure::Usage(message.into()));
    }
    if arguments.password.is_some() && arguments.key.is_none() {
        return Err(Failure::Usage("--password-secret needs --key".into()));
    }
    install_bulk_lane(arguments.cache.direct)?;
    match (arguments.unseal, &arguments.manifest) {
        (true, _) => lane::block_on(unseal_image(&spec, &arguments)),
        (_, Some(name)) => lane::block_on(write_manifest(command, &spec, name, &arguments)),
        _ => lane::block_on(seal_image(command, &spec, &arguments)),
    }
}

/// What signs, if something is to.
fn signer(arguments: &Arguments) -> Result<Option<Signer>, Failure> {
    let Some(name) = &arguments.key else {
        return Ok(None);
    };
    let password = arguments.password.as_deref().map(secret::passphrase);
    let password = password.transpose()?;
    let text = std::fs::read_to_string(name)
        .map_err(|error| Failure::Message(format!("Could not read '{name}': {error}")))?;
    let password = password.as_ref().map(|password| password.bytes());
    let key = SecretKey::decode(&text, password).map_err(|error| {
        let why = error.message();
        Failure::Message(format!("Could not use '{name}': {why}"))
    })?;
    let image = arguments.common.operands.first();
    let file = image.and_then(|image| Path::new(image).file_name());
    // A comment is one line.
    let comment = file.map(|file| file.to_string_lossy().replace(char::is_control, "?"));
    let comment = format!("file:{}", comment.unwrap_or_default());
    Ok(Some(Arc::new(move |statement: &str| {
        Ok(key.sign(statement, &comment))
    })))
}

fn options_of(
    command: Command<'_>,
    arguments: &Arguments,
) -> Result<(SealOptions, SharedProgress), Failure> {
    let (wanted, quiet) = (arguments.common.progress, arguments.common.quiet);
    let progress = SharedProgress::new(Progress::new(command.program, wanted, quiet, 1.0));
    let shown = progress.clone();
    let on_progress = move |done, total| shown.show(done, total);
    let options = SealOptions::default()
        .signer(signer(arguments)?)
        .on_progress(Some(Arc::new(on_progress)));
    Ok((options, progress))
}

/// Opens the image to be changed.
async fn open(
    spec: &ImageSpec,
    arguments: &Arguments,
    flags: OpenFlags,
) -> Result<Arc<dyn BlockDevice>, Failure> {
    let flags = OpenFlags {
        writable: true,
        cache: arguments.cache,
        ..flags
    };
    let device = open_device(spec, &flags).await;
    let device = device.map_err(|error| open_failure(&spec.name, &error))?;
    match device.as_qcow2() {
        Some(_) => Ok(device),
        None => fail("Images of this format hold no seal; --manifest writes one beside them"),
    }
}

async fn seal_image(command: Command<'_>, spec: &ImageSpec, arguments: &Arguments) -> Outcome {
    let (options, progress) = options_of(command, arguments)?;
    let flags = OpenFlags {
        no_backing: true,
        read_once: true,
        ..OpenFlags::default()
    };
    let device = open(spec, arguments, flags).await?;
    let Some(image) = device.as_qcow2() else {
        return Ok(1);
    };
    let sealed = image.seal(options).await;
    progress.end();
    if sealed.is_ok() {
        snapshot::warn_of_danger(image);
    }
    let closed = device.close().await;
    let sealed = sealed.map_err(|error| failure(&spec.name, &error))?;
    closed.map_err(|error| failure(&spec.name, &error))?;
    tell(&sealed, arguments);
    Ok(0)
}

async fn unseal_image(spec: &ImageSpec, arguments: &Arguments) -> Outcome {
    // As for a repair: it is taken off an image that nobody could open otherwise, too.
    let flags = OpenFlags {
        for_check: true,
        ..OpenFlags::default()
    };
    let device = open(spec, arguments, flags).await?;
    let Some(storage) = device.storage() else {
        return Ok(1);
    };
    let was_sealed = unseal(&storage).await;
    let was_sealed = was_sealed.map_err(|error| failure(&spec.name, &error))?;
    let closed = storage.close().await;
    closed.map_err(|error| failure(&spec.name, &error))?;
    if !arguments.common.quiet {
        report::print_line(match was_sealed {
            true => "The image is not sealed any more.",
            false => "The image was not sealed.",
        });
    }
    Ok(0)
}

async fn write_manifest(
    command: Command<'_>,
    spec: &ImageSpec,
    name: &str,
    arguments: &Arguments,
) -> Outcome {
    let (options, progress) = options_of(command, arguments)?;
    let flags = reading_once(arguments.cache, false);
    let device = open_device(spec, &flags).await;
    let device = device.map_err(|error| open_failure(&spec.name, &error))?;
    if Path::new(name).exists() {
        return fail(format!("'{name}' is there already"));
    }
    let create = FileOptions::default().create(Create::IfMissing);
    let file: Arc<dyn Storage> = FileStorage::open(Path::new(name), &create).map_err(|error| {
        Failure::Message(format!("Could not create '{name}': {}", error.message()))
    })?;
    let made = make_manifest(&device, &file, &options).await;
    progress.end();
    let closed = device.close().await;
    let written = made.and_then(|made| closed.map(|()| made));
    let written = match file.close().await {
        Ok(()) => written,
        Err(error) => written.and(Err(error)),
    };
    match written {
        Ok(sealed) => {
            tell(&sealed, arguments);
            Ok(0)
        }
        Err(error) => {
            // Half a manifest is of no use to anybody.
            let _ = std::fs::remove_file(name);
            Err(failure(&spec.name, &error))
        }
    }
}

fn failure(name: &str, error: &vellum::Error) -> Failure {
    let why = vellum_options::error_text(error);
    Failure::Message(format!("Could not seal '{name}': {why}"))
}

fn tell(sealed: &SealInfo, arguments: &Arguments) {
    if arguments.common.quiet {
        return;
    }
    let root = sealed.root.as_deref().unwrap_or("nothing");
    report::print_line(format_args!("Content: {root}"));
    if let Some(signature) = &sealed.signature {
        let key = key_id(signature).unwrap_or_default();
        report::print_line(format_args!("Signed with key {key}"));
    }
}

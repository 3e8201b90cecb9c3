//! `verify`: compares an image with its seal, or with a manifest, and names what differs.

use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::{Value, json};
use vellum::qcow2::AsQcow2;
use vellum::qcow2::seal::{
    Difference, SealInfo, VerifyOptions, VerifyReads, VerifyReport, verify_manifest,
};
use vellum::{BlockDevice, Storage};
use vellum_graph::open_device;
use vellum_images::minisign;
use vellum_io::lane;
use vellum_options::{CacheMode, ImageSpec, OpenFlags, error_text};
use vellum_storage::{FileOptions, FileStorage};

use super::command::{
    Command, Failure, Outcome, Subcommand, cache_mode, fail, install_bulk_lane, not_taken,
    open_failure, reading_once,
};
use super::rows::{
    FILENAME, FORMAT, IMAGE_OPTS, OBJECT, OUTPUT, PROGRESS, QUIET, SHARE, SOURCE_CACHE,
};
use crate::output::Output;
use crate::progress::{Progress, SharedProgress};
use crate::report;
use crate::size::human;
use crate::spec::{CommonArgs, Spec};

pub static VERIFY: Subcommand = Subcommand {
    spec: Spec {
        name: "verify",
        about: "Compare an image with its seal",
        usage: "\
[-f FMT | --image-opts] [--manifest FILE] [--public-key FILE]
        [--statement FILE] [-T CACHE_MODE] [-p] [-q] [-U]
        [--output human|json] [--object OBJDEF] FILENAME",
        arguments: &[
            QUIET,
            PROGRESS,
            FORMAT,
            IMAGE_OPTS,
            SOURCE_CACHE,
            SHARE,
            OUTPUT,
            "--manifest FILE  compare with this file of hashes instead of the seal in FILENAME",
            "--public-key FILE  the seal must be signed with the key of this file of minisign",
            "--statement FILE  write what is signed into FILE, and the signature into FILE.minisig",
            OBJECT,
            FILENAME,
        ],
        closing: "Exit codes: 0 as it was sealed, 1 it could not be verified, 2 it differs.\n",
        examples: "\
vellum verify base.qcow2
  name what differs from the seal
vellum verify --public-key minisign.pub base.qcow2
  and see who has sealed it
vellum verify --manifest disk.manifest copy.qcow2
  compare a copy in another format
",
        exits: "\
0  everything is as it was sealed
1  it could not be verified, perhaps because it is not sealed
2  something differs, or the signature is not the key's
",
        ..Spec::EMPTY
    },
    run,
};

/// Exit code: image and seal differ, or the signature is not the key's.
const DIFFERENT: i32 = 2;
/// Differences that are told one by one; all are counted.
const MOST_TOLD: usize = 10_000;

#[derive(Debug, Default)]
struct Arguments {
    common: CommonArgs,
    cache: CacheMode,
    manifest: Option<String>,
    public_key: Option<String>,
    statement: Option<String>,
}

fn run(command: Command<'_>, args: Vec<OsString>) -> Outcome {
    let mut arguments = Arguments::default();
    arguments.common = command.parse(args, |name, value| {
        match name {
            "cache" => arguments.cache = cache_mode("source cache", &value)?,
            "manifest" => arguments.manifest = Some(value),
            "public-key" => arguments.public_key = Some(value),
            "statement" => arguments.statement = Some(value),
            _ => return not_taken(name),
        }
        Ok(())
    })?;
    let spec = arguments.common.one_image()?;
    // Read before the work of minutes.
    let key = arguments.public_key.as_deref().map(read_text).transpose()?;
    install_bulk_lane(arguments.cache.direct)?;
    lane::block_on(verify(command, &spec, key, &arguments))
}

fn read_text(name: &str) -> Result<String, Failure> {
    let text = std::fs::read_to_string(name);
    text.map_err(|error| Failure::Message(format!("Could not read '{name}': {error}")))
}

/// What is known of a signature.
enum Signature {
    /// There is none.
    None,
    /// It was not compared with a key.
    Unchecked(String),
    /// It is one of the key, which has signed this comment too.
    Valid(String, String),
    /// It is not.
    Invalid(String),
}

async fn verify(
    command: Command<'_>,
    spec: &ImageSpec,
    key: Option<String>,
    arguments: &Arguments,
) -> Outcome {
    let flags = OpenFlags {
        // Damage is to be found, not to be in the way.
        verify: Some(VerifyReads::Off),
        no_backing: arguments.manifest.is_none(),
        ..reading_once(arguments.cache, arguments.common.force_share)
    };
    let device = open_device(spec, &flags).await;
    let device = device.map_err(|error| open_failure(&spec.name, &error))?;
    let told: Arc<Mutex<Vec<Difference>>> = Arc::default();
    let (wanted, quiet) = (arguments.common.progress, arguments.common.quiet);
    let progress = SharedProgress::new(Progress::new(command.program, wanted, quiet, 1.0));
    let (shown, sink) = (progress.clone(), told.clone());
    let note = move |difference: &Difference| {
        let mut told = sink.lock();
        if told.len() < MOST_TOLD {
            told.push(difference.clone());
        }
    };
    let options = VerifyOptions::default()
        .on_difference(Some(Arc::new(note)))
        .on_progress(Some(Arc::new(move |done, total| shown.show(done, total))));
    let found = compare(&device, arguments, options).await;
    progress.end();
    let closed = device.close().await;
    let found = found?;
    closed.map_err(|error| Failure::Message(error_text(&error)))?;
    let signature = check_signature(found.seal.as_ref(), key.as_deref())?;
    if let (Some(name), Some(seal)) = (&arguments.statement, &found.seal) {
        write_statement(name, seal)?;
    }
    let told = std::mem::take(&mut *told.lock());
    match arguments.common.output {
        Output::Json => report::print_line(to_json(&spec.name, &found, &told, &signature)),
        Output::Human if quiet => {}
        Output::Human => report::print(to_text(&found, &told, &signature)),
    }
    let is_signed = match &signature {
        Signature::Invalid(_) => false,
        Signature::None => key.is_none(),
        Signature::Unchecked(_) | Signature::Valid(..) => true,
    };
    Ok(match found.differences == 0 && is_signed {
        true => 0,
        false => DIFFERENT,
    })
}

async fn compare(
    device: &Arc<dyn BlockDevice>,
    arguments: &Arguments,
    options: VerifyOptions,
) -> Result<VerifyReport, Failure> {
    let failed =
        |error: vellum::Error| Failure::Message(format!("Verify failed: {}", error_text(&error)));
    if let Some(name) = &arguments.manifest {
        let read_only = FileOptions::default().read_only(true);
        let file: Arc<dyn Storage> = FileStorage::open(Path::new(name), &read_only)
            .map_err(|error| open_failure(name, &error))?;
        return verify_manifest(device, &file, &options)
            .await
            .map_err(failed);
    }
    match device.as_qcow2() {
        Some(image) => image.verify(options).await.map_err(failed),
        None => fail("Images of this format hold no seal: --manifest names a file that does"),
    }
}

fn check_signature(seal: Option<&SealInfo>, key: Option<&str>) -> Result<Signature, Failure> {
    let Some((seal, signature)) = seal.and_then(|seal| Some((seal, seal.signature.as_ref()?)))
    else {
        return Ok(Signature::None);
    };
    let id = minisign::key_id(signature).unwrap_or_default();
    let Some(key) = key else {
        return Ok(Signature::Unchecked(id));
    };
    match minisign::verify(&seal.statement, signature, key) {
        Ok(comment) => Ok(Signature::Valid(id, comment)),
        Err(error) if error.kind() == vellum::ErrorKind::Denied => {
            Ok(Signature::Invalid(error.message().to_owned()))
        }
        Err(error) => Err(error.into()),
    }
}

/// Writes what is signed, and the signature, for minisign to look at.
fn write_statement(name: &str, seal: &SealInfo) -> Result<(), Failure> {
    let write = |name: &str, text: &str| {
        let written = std::fs::write(name, text);
        written.map_err(|error| Failure::Message(format!("Could not write '{name}': {error}")))
    };
    write(name, &seal.statement)?;
    match &seal.signature {
        Some(signature) => write(&format!("{name}.minisig"), signature),
        None => Ok(()),
    }
}

fn to_text(found: &VerifyReport, told: &[Difference], signature: &Signature) -> String {
    let mut text = String::new();
    for difference in told {
        let (start, end) = (difference.guest.start, difference.guest.end);
        let kind = difference.kind.name();
        text += &format!(
            "{start:#014x}-{end:#014x}  {kind:<10}  {}\n",
            difference.reason
        );
    }
    let more = found.differences.saturating_sub(told.len() as u64);
    if more > 0 {
        text += &format!("... and {more} more\n");
    }
    text += &match found.differences {
        0 => "Everything is as it was sealed.\n".to_owned(),
        1 => format!(
            "1 range differs from the seal, {} in all.\n",
            human(found.differing_bytes)
        ),
        ranges => format!(
            "{ranges} ranges differ from the seal, {} in all.\n",
            human(found.differing_bytes)
        ),
    };
    if let Some(seal) = &found.seal {
        let root = seal.root.as_deref().unwrap_or("nothing");
        text += &format!("Content: {root}\n");
    }
    text += &match signature {
        Signature::None => "Signature: none\n".to_owned(),
        Signature::Unchecked(id) => {
            format!("Signature: not checked; it names key {id} (--public-key)\n")
        }
        Signature::Valid(id, comment) => {
            let comment = crate::terminal::harmless(comment);
            format!("Signature: good, of key {id} ({comment})\n")
        }
        Signature::Invalid(why) => format!("Signature: bad. {why}\n"),
    };
    text
}

fn to_json(name: &str, found: &VerifyReport, told: &[Difference], signature: &Signature) -> String {
    let differences: Vec<Value> = told
        .iter()
        .map(|difference| {
            json!({
                "kind": difference.kind.name(),
                "start": difference.guest.start,
                "length": difference.guest.end - difference.guest.start,
                "reason": difference.reason,
            })
        })
        .collect();
    let (state, id, comment) = match signature {
        Signature::None => ("none", None, None),
        Signature::Unchecked(id) => ("unchecked", Some(id), None),
        Signature::Valid(id, comment) => ("valid", Some(id), Some(comment)),
        Signature::Invalid(_) => ("invalid", None, None),
    };
    let seal = found.seal.as_ref();
    let value = json!({
        "filename": name,
        "verified": found.differences == 0,
        "difference-count": found.differences,
        "differing-bytes": found.differing_bytes,
        "differences": differences,
        "content": seal.and_then(|seal| seal.root.as_deref()),
        "statement": seal.map(|seal| seal.statement.as_str()),
        "signature": { "state": state, "key": id, "comment": comment },
    });
    vellum_options::json::pretty(&value)
}

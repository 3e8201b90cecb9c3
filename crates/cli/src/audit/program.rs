//! `vellum audit`: the command, and its report as text and JSON.

use std::ffi::OsString;
use std::os::unix::fs::FileTypeExt;
use std::sync::Arc;

use serde_json::{Map, Value, json};
use vellum::{Error, ErrorKind, Storage};
use vellum_graph::ova::Package;
use vellum_images::audit::{Finding, Reference, Report, audit};
use vellum_io::lane;
use vellum_options::ova_name;
use vellum_storage::{FileOptions, FileStorage};

use crate::output::Output;
use crate::{local, report, spec};

use super::arguments::{Arguments, SPEC, option_for};
use super::text;

const SAFE: i32 = 0;

const UNREADABLE: i32 = 1;

const REJECTED: i32 = 2;

/// Runs the tool and returns its exit code.
pub fn main(_program: &str, args: Vec<OsString>) -> i32 {
    spec::run(&SPEC, Arguments::parse(args), |arguments| {
        Ok(audit_all(&arguments))
    })
}

/// Looks at all images; the exit code.
fn audit_all(arguments: &Arguments) -> i32 {
    let mut code = SAFE;
    let mut values = Vec::new();
    let mut counts = [0; 3];
    for image in &arguments.images {
        let outcome = lane::block_on(look_at(image, arguments));
        let verdict = match &outcome {
            Ok(found) if found.is_safe() => SAFE,
            Ok(_) => REJECTED,
            Err(_) => UNREADABLE,
        };
        code = code.max(verdict);
        counts[verdict as usize] += 1;
        match (arguments.output, &outcome) {
            (Output::Json, _) => values.push(to_json(image, &outcome)),
            (Output::Human, Ok(found)) => report::print(text::report(image, found)),
            (Output::Human, Err(error)) => {
                let why = report::error_text(error);
                report::error(format_args!("Could not read '{image}': {why}"));
            }
        }
    }
    match arguments.output {
        // Of one image the answer is no list, as it was before there could be several.
        Output::Json if values.len() == 1 => report::print_line(format_args!("{:#}", values[0])),
        Output::Json => report::print_line(format_args!("{:#}", Value::Array(values))),
        Output::Human if arguments.images.len() > 1 => {
            let [safe, unreadable, rejected] = counts;
            report::print_line(format_args!(
                "{} images: {safe} safe, {rejected} rejected, {unreadable} unreadable",
                arguments.images.len()
            ));
        }
        Output::Human => {}
    }
    code
}

async fn look_at(image: &str, arguments: &Arguments) -> vellum::Result<Report> {
    // As for the other commands, the name of a package alone stands for its disk.
    let package = match arguments.policy.format {
        None => ova_name::named_package(image),
        Some(_) => None,
    };
    let (path, member) = match (ova_name::split(image), &package) {
        (Some((package, member)), _) => (package, Some(member)),
        (None, Some(package)) => (package.as_str(), Some("")),
        (None, None) => (image, None),
    };
    if let Some(message) = local::refusal(path) {
        return Err(Error::new(ErrorKind::InvalidArgument, "open", message));
    }
    let path = std::path::Path::new(path);
    // A pipe would make the program wait, and a device of another kind do anything.
    let metadata = std::fs::metadata(path).map_err(|error| Error::from_io("open", &error))?;
    let kind = metadata.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        let message = "neither a regular file nor a block device";
        return Err(Error::new(ErrorKind::InvalidArgument, "open", message));
    }
    let options = FileOptions::default().read_only(true);
    let storage: Arc<dyn Storage> = FileStorage::open(path, &options)?;
    let Some(member) = member else {
        return audit(storage, &arguments.policy).await;
    };
    let package = Package::open(storage).await?;
    let storage = package.storage(Some(member).filter(|name| !name.is_empty()))?;
    audit(storage, &arguments.policy).await
}

fn to_json(image: &str, outcome: &vellum::Result<Report>) -> Value {
    let mut members = Map::new();
    members.insert("image".into(), image.into());
    let found = match outcome {
        Ok(found) => found,
        Err(error) => {
            members.insert("verdict".into(), "unreadable".into());
            members.insert("error".into(), report::error_text(error).into());
            return Value::Object(members);
        }
    };
    let verdict = if found.is_safe() { "safe" } else { "rejected" };
    members.insert("verdict".into(), verdict.into());
    members.insert("format".into(), found.format.as_str().into());
    members.insert("file-length".into(), found.file_length_bytes.into());
    let findings = found.findings.iter().map(finding);
    members.insert("findings".into(), findings.collect());
    let references = found.references.iter().map(reference);
    members.insert("references".into(), references.collect());
    let signatures = found
        .signatures
        .iter()
        .map(|signature| json!({ "format": signature.format, "offset": signature.offset_bytes }));
    members.insert("signatures".into(), signatures.collect());
    if let Some(facts) = &found.facts {
        let facts = json!({
            "version": facts.version,
            "virtual-size": facts.virtual_size_bytes,
            "cluster-size": facts.cluster_size_bytes,
            "snapshots": facts.snapshots,
            "bitmaps": facts.bitmaps,
            "encryption": facts.encryption,
            "seal-content": facts.seal_content,
            "seal-key": facts.seal_key,
        });
        members.insert("qcow2".into(), facts);
    }
    if let Some(checked) = &found.checked {
        let checked = json!({
            "corruptions": checked.corruptions,
            "leaks": checked.leaks,
            "check-errors": checked.errors,
        });
        members.insert("check".into(), checked);
    }
    Value::Object(members)
}

pub(crate) fn finding(finding: &Finding) -> Value {
    json!({
        "level": finding.level.name(),
        "code": finding.code,
        "message": finding.message,
        "option": finding.permission.map(option_for),
    })
}

fn reference(reference: &Reference) -> Value {
    json!({
        "role": reference.role.name(),
        "name": reference.name,
        "form": reference.form.name(),
        "format": reference.format,
        "resolved": reference.resolved,
        "in-effect": reference.in_effect,
        "allowed": reference.refused.is_none(),
        "refused-because": reference.refused,
    })
}

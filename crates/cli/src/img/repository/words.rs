//! What the commands of repositories say and take alike.

use serde_json::{Value, json};
use vellum_graph::repository::Named;
use vellum_repository::{DiskName, Manifest, Repository};

use crate::img::command::Failure;
use crate::size::human;

/// An error of a repository, which names what it is about.
pub(crate) fn told(error: &vellum::Error) -> String {
    let text = vellum_options::error_text(error);
    match error.target_name() {
        Some(target) if !text.contains(target) => format!("{target}: {text}"),
        _ => text,
    }
}

/// The failure of an error of a repository.
pub(crate) fn failed(error: vellum::Error) -> Failure {
    Failure::Message(told(&error))
}

/// Takes the name of a repository, and of a disk in it, apart.
pub(crate) fn named(name: &str) -> Result<Named, Failure> {
    Named::parse(name).map_err(|error| {
        let why = vellum_options::error_text(&error);
        Failure::Message(format!("Could not open '{name}': {why}"))
    })
}

/// The name of the disk of a manifest.
pub(crate) fn disk_name(manifest: &Manifest) -> DiskName {
    DiskName {
        tag: manifest.tag.clone(),
        number: Some(manifest.number),
    }
}

/// A manifest for programs.
pub(crate) fn manifest_json(manifest: &Manifest) -> Value {
    json!({
        "tag": manifest.tag.as_str(),
        "number": manifest.number,
        "push": manifest.push.to_string(),
        "virtual-size": manifest.disk_bytes,
        "created": manifest.created_seconds,
        "host": manifest.host,
        "incremental": manifest.base.is_some(),
        "read": manifest.cost.read_bytes,
        "new": manifest.cost.new_bytes,
        "sent": manifest.cost.sent_bytes,
    })
}

/// The newest disk of the tag that was named, or the one of the number.
pub(crate) async fn find(named: &Named) -> Result<(Repository, Manifest), Failure> {
    let repository = named.open().await.map_err(failed)?;
    let manifest = repository.find(&named.disk).await.map_err(failed)?;
    Ok((repository, manifest))
}

/// Sizes for people.
pub(crate) fn sizes(manifest: &Manifest) -> String {
    let cost = manifest.cost;
    format!(
        "{} of {} read, {} new, {} sent",
        human(cost.read_bytes),
        human(manifest.disk_bytes),
        human(cost.new_bytes),
        human(cost.sent_bytes)
    )
}

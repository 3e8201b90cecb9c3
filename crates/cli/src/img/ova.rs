//! Packages of virtual machines (OVA) as a whole: what `info` and `check` say of one, and what `convert`
//! does before it believes a member's bytes.

use std::sync::Arc;

use serde_json::{Map, Value, json};
use vellum::{BlockDevice, Storage};
use vellum_graph::ova::{self, Package, VirtualDisk};
use vellum_options::{ImageSpec, error_text, json as control_json};

use super::command::{Failure, Outcome, fail, open_failure};
use super::package_name;
use crate::output::Output;
use crate::report;
use crate::size::human;
use crate::spec::CommonArgs;
use crate::terminal::harmless;

/// The path of the package that the command line means as a whole, if it does.
pub fn package(arguments: &CommonArgs, spec: &ImageSpec) -> Option<String> {
    match arguments.image_opts {
        true => None,
        false => package_name::package(&spec.name, arguments.format.as_deref()),
    }
}

/// Compares those of the images that lie in packages with the manifests, before they are read.
pub async fn verify(images: &[Arc<dyn BlockDevice>]) -> Result<(), Failure> {
    for image in images {
        let mut next = Some(image.clone());
        while let Some(image) = next {
            let storage = image.storage();
            let storage = storage.or_else(|| image.bytes_in().map(|(storage, _)| storage));
            if let Some(storage) = storage {
                verify_one(&*storage).await?;
            }
            next = image.backing();
        }
    }
    Ok(())
}

async fn verify_one(storage: &dyn Storage) -> Result<(), Failure> {
    ova::verify(storage).await.map_err(|error| {
        let (name, why) = (storage.name(), error_text(&error));
        Failure::Message(format!("'{name}' is not what was packed: {why}"))
    })
}

/// Prints what is in a package.
pub async fn info(path: &str, arguments: &CommonArgs) -> Outcome {
    let package = open(path, arguments).await?;
    match arguments.output {
        Output::Human => report::print(text(path, &package)),
        Output::Json => report::print_line(control_json::pretty(&to_json(path, &package))),
    }
    Ok(0)
}

async fn open(path: &str, arguments: &CommonArgs) -> Result<Package, Failure> {
    let opened = ova::open_package(path, arguments.force_share).await;
    opened.map_err(|error| open_failure(path, &error))
}

/// Compares all that is in a package with what its manifest and its descriptor say.
pub async fn check(
    path: &str,
    arguments: &CommonArgs,
) -> Result<vellum_graph::foreign::CheckReport, Failure> {
    let package = open(path, arguments).await?;
    match package.check().await {
        Ok(found) => Ok(found),
        Err(error) => fail(format!("Check failed: {}", error_text(&error))),
    }
}

/// The functions that the sums of the manifest were made with.
fn functions(package: &Package) -> Option<Vec<&'static str>> {
    let sums = package.manifest()?.sums.iter();
    let mut names: Vec<_> = sums.map(|sum| sum.algorithm.name()).collect();
    names.sort_unstable();
    names.dedup();
    Some(names)
}

fn file_of<'a>(package: &'a Package, disk: &VirtualDisk) -> Option<&'a str> {
    let file = package.descriptor().file_of(disk)?;
    Some(&file.href)
}

fn to_json(path: &str, package: &Package) -> Value {
    let members = package.members().iter().map(|member| {
        let mut sums = package.manifest().into_iter();
        let has_sum = sums.any(|manifest| manifest.sums_of(&member.name).next().is_some());
        json!({ "name": member.name, "size": member.size_bytes, "in-manifest": has_sum })
    });
    let disks = package.descriptor().disks.iter().map(|disk| {
        let mut members = Map::new();
        members.insert("id".into(), disk.id.as_str().into());
        let optional = [
            ("file", file_of(package, disk).map(Value::from)),
            ("capacity", disk.capacity_bytes.map(Value::from)),
            ("format", disk.format.as_deref().map(Value::from)),
            ("parent", disk.parent.as_deref().map(Value::from)),
        ];
        let known = optional
            .into_iter()
            .filter_map(|(key, value)| Some((key, value?)));
        members.extend(known.map(|(key, value)| (key.to_owned(), value)));
        Value::Object(members)
    });
    let mut value = json!({
        "filename": path,
        "format": "ova",
        "machines": package.descriptor().machines,
        "members": members.collect::<Vec<_>>(),
        "disks": disks.collect::<Vec<_>>(),
    });
    value["manifest"] = functions(package).into();
    value["certificate"] = package.certificate().into();
    value
}

fn text(path: &str, package: &Package) -> String {
    let mut lines = vec![
        format!("package: {}", harmless(path)),
        "file format: ova".to_owned(),
    ];
    let machines = package.descriptor().machines.iter();
    lines.extend(machines.map(|name| format!("virtual machine: {}", harmless(name))));
    lines.push(match functions(package) {
        None => "manifest: none, so that nothing tells whether the members are as they were".into(),
        Some(functions) => format!(
            "manifest: {} ('vellum check' compares)",
            functions.join(", ")
        ),
    });
    if let Some(name) = package.certificate() {
        let name = harmless(name);
        lines.push(format!("certificate: {name} (not looked at)"));
    }
    lines.push("members:".to_owned());
    for member in package.members() {
        let (name, bytes) = (harmless(&member.name), member.size_bytes);
        lines.push(format!("    {name}: {} ({bytes} bytes)", human(bytes)));
    }
    lines.push("disks:".to_owned());
    for disk in &package.descriptor().disks {
        let size = disk.capacity_bytes.map_or("of unknown size".into(), human);
        let mut line = format!("    {}: {size}", harmless(&disk.id));
        match file_of(package, disk) {
            Some(file) => line += &format!(", in {}", harmless(file)),
            None => line += ", empty at first",
        }
        if let Some(format) = &disk.format {
            line += &format!(", {}", harmless(format));
        }
        lines.push(line);
    }
    lines.join("\n") + "\n"
}

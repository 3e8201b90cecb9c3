//! `[[disk]]`: a node with its image, and exports of it.
//!
//! A disk with limits is a `throttle` node of the disk's name over the image's own, `NAME-image`; one
//! without is the image's node.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};
use vellum_graph::driver_names;
use vellum_options::spec::is_protocol;
use vellum_options::{error_text, filename, size};

use crate::schema::check::{
    BLOCKDEV, EXPORT, Notation, check_blockdev, check_export, member_names,
};

use super::parts::{Part, PartKey, PartKind};
use super::place::{Mistake, Place, Source};
use super::section::{Entry, Section, meant};

/// What the node of an image is called whose disk has limits.
const IMAGE_SUFFIX: &str = "-image";
/// What begins the paths of devices.
const DEVICES: &str = "/dev/";
/// Files are there all the same.
const SHARED_MEMORY: &str = "/dev/shm/";
/// Members whose texts name no other node.
const NO_REFERENCES: [&str; 4] = ["driver", "node-name", "filename", "throttle-group"];

/// The nodes of the disks of a file, each with its disk.
pub(super) fn names(disks: &[Section<'_>]) -> BTreeMap<String, String> {
    let names = disks.iter().filter_map(|disk| disk.peek_text("name"));
    names
        .flat_map(|name| [(name.clone(), name.clone()), (image_node(&name), name)])
        .collect()
}

fn image_node(name: &str) -> String {
    format!("{name}{IMAGE_SUFFIX}")
}

/// A disk, and then its exports. `names` are the nodes of all disks.
pub(super) fn parts(
    mut disk: Section<'_>,
    names: &BTreeMap<String, String>,
) -> Result<Vec<Part>, Mistake> {
    let (name, place) = disk.need_text("name", "it is what exports and clients call the disk")?;
    let source = disk.source;
    if !is_well_formed(&name) {
        let text = "a name begins with a letter, and has letters, digits and -._ in it";
        return Err(source.mistake(place, text));
    }
    disk.name = format!("disk '{name}'");
    let exports = disk.tables("export")?;
    let limits = disk.text("throttle")?;
    let on_full = disk.word("on-full", &[("wait", "wait"), ("fail", "fail")])?;
    let chain = match disk.table("chain", "chain")? {
        Some(chain) => Some(chain_part(chain, &name, limits.is_some())?),
        None => None,
    };
    let common = Common::take(&mut disk)?;
    let (image, image_place) = take_image(&mut disk, &name, &common)?;
    disk.finish(&[])?;
    let mut needs = BTreeSet::new();
    references(&Value::Object(image.clone()), names, &mut needs);
    needs.remove(&PartKey::new(PartKind::Disk, name.clone()));
    let arguments = match limits {
        None => image,
        Some((group, _)) => {
            let members = limited(&name, &group, image, &common);
            needs.insert(PartKey::new(PartKind::Throttle, group));
            members
        }
    };
    check_blockdev(&Value::Object(arguments.clone()), Notation::Json)
        .map_err(|text| source.mistake(image_place, format!("disk '{name}': {text}")))?;
    let mut parts = vec![Part {
        key: PartKey::new(PartKind::Disk, name.clone()),
        arguments,
        needs,
        place,
    }];
    parts.extend(chain);
    for export in exports {
        parts.push(export_part(export, &name, on_full)?);
    }
    Ok(parts)
}

fn is_well_formed(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphabetic())
        && name
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "-._".contains(c))
}

/// What all nodes of a disk are told.
struct Common {
    read_only: Option<bool>,
    cache: Option<Value>,
    discard: Option<&'static str>,
}

impl Common {
    fn take(disk: &mut Section<'_>) -> Result<Common, Mistake> {
        let read_only = disk.switch("read-only")?;
        // As `--cache` of the other programs, as far as it is the node's: whether clients wait for
        // what they write to be durable, their exports say.
        let modes = [
            ("writeback", (false, false)),
            ("none", (true, false)),
            ("unsafe", (false, true)),
        ];
        let mode = disk.word("cache", &modes)?;
        let cache = mode.map(|(direct, no_flush)| json!({"direct": direct, "no-flush": no_flush}));
        let discard = disk.word("discard", &[("unmap", "unmap"), ("ignore", "ignore")])?;
        Ok(Common {
            read_only,
            cache,
            discard,
        })
    }

    fn put_into(&self, node: &mut Map<String, Value>) {
        let all = [
            ("read-only", self.read_only.map(Value::from)),
            ("cache", self.cache.clone()),
            ("discard", self.discard.map(Value::from)),
        ];
        for (key, value) in all {
            if let Some(value) = value {
                node.insert(key.to_owned(), value);
            }
        }
    }
}

/// A node with limits over that of the image.
fn limited(
    name: &str,
    group: &str,
    mut image: Map<String, Value>,
    common: &Common,
) -> Map<String, Value> {
    image.insert("node-name".to_owned(), json!(image_node(name)));
    let mut node = Map::new();
    node.insert("driver".to_owned(), json!("throttle"));
    node.insert("node-name".to_owned(), json!(name));
    common.put_into(&mut node);
    node.insert("throttle-group".to_owned(), json!(group));
    node.insert("file".to_owned(), Value::Object(image));
    node
}

/// The node of the image, and where the file says what it is.
fn take_image(
    disk: &mut Section<'_>,
    name: &str,
    common: &Common,
) -> Result<(Map<String, Value>, Place), Mistake> {
    let source = disk.source;
    let image = disk.text("image")?;
    let format = disk.text("format")?;
    let options = disk.take("options");
    let members = match &options {
        None => Map::new(),
        Some(entry) => match disk.json(entry)? {
            Value::Object(members) => members,
            _ => return Err(source.wrong(&entry.value.span(), "'options' is a table")),
        },
    };
    let driver = match (&format, members.get("driver").and_then(Value::as_str)) {
        (Some((format, place)), None) => check_format(source, format, *place)?,
        (None, Some(driver)) => driver.to_owned(),
        (Some((_, place)), Some(_)) => {
            let text = "'format' and 'options.driver' say the same; leave one of them out";
            return Err(source.mistake(*place, text));
        }
        (None, None) => {
            return Err(disk.wrong(format!(
                "'format' is missing in disk '{name}': what a guest writes would decide it \
                 (raw, qcow2, ...)"
            )));
        }
    };
    if let Some(entry) = &options {
        check_members(source, entry, &driver)?;
    }
    let mut node = Map::new();
    node.insert("driver".to_owned(), json!(driver));
    node.insert("node-name".to_owned(), json!(name));
    common.put_into(&mut node);
    let mut place = disk.place;
    match (image, members.contains_key("file")) {
        (Some((image, at)), false) => {
            node.insert("file".to_owned(), protocol(source, &image, at)?);
            place = at;
        }
        (None, true) => {}
        // Some drivers stand on no file, or on several.
        (None, false) if format.is_none() => {}
        (None, false) => {
            return Err(disk.wrong(format!(
                "'image' is missing in disk '{name}': a path or URL"
            )));
        }
        (Some((_, at)), true) => {
            let text = "'image' and 'options.file' say the same; leave one of them out";
            return Err(source.mistake(at, text));
        }
    }
    for (key, value) in members {
        if matches!(key.as_str(), "node-name") || (key != "driver" && node.contains_key(&key)) {
            let at = options.as_ref().map_or(place, |entry| {
                source.place(key_place(entry, &key).unwrap_or(entry.key_span.start))
            });
            let text = format!("'options.{key}' is said outside of the options already");
            return Err(source.mistake(at, text));
        }
        let mut value = value;
        resolve_filenames(source, &key, &mut value);
        node.insert(key, value);
    }
    Ok((node, place))
}

/// Has the names of files in options begin at the folder of the file.
fn resolve_filenames(source: Source<'_>, key: &str, value: &mut Value) {
    match value {
        Value::String(text) if key == "filename" => *text = source.resolve(text),
        Value::Object(members) => {
            for (key, value) in members {
                resolve_filenames(source, key, value);
            }
        }
        Value::Array(items) => {
            for item in items {
                resolve_filenames(source, "", item);
            }
        }
        _ => {}
    }
}

/// Where a key of a table stands.
fn key_place(entry: &Entry<'_>, key: &str) -> Option<usize> {
    let table = entry.value.get_ref().as_table()?;
    let (found, _) = table.iter().find(|(known, _)| known.get_ref() == key)?;
    Some(found.span().start)
}

fn check_format(source: Source<'_>, format: &str, place: Place) -> Result<String, Mistake> {
    let formats = || driver_names().into_iter().filter(|name| !is_protocol(name));
    match formats().any(|name| name == format) {
        true => Ok(format.to_owned()),
        false => {
            let meant = meant(format, formats());
            Err(source.mistake(place, format!("there is no format '{format}'{meant}")))
        }
    }
}

/// Refuses members of `options` that no node of a driver has.
fn check_members(source: Source<'_>, entry: &Entry<'_>, driver: &str) -> Result<(), Mistake> {
    let known = member_names(BLOCKDEV, driver);
    let table = entry.value.get_ref().as_table();
    for (key, _) in table.into_iter().flat_map(|table| table.iter()) {
        let name = key.get_ref();
        if !known.iter().any(|known| known == name) {
            let meant = meant(name, known.iter().map(String::as_str));
            let text = format!("nodes of driver '{driver}' have no option '{name}'{meant}");
            return Err(source.wrong(&key.span(), text));
        }
    }
    Ok(())
}

/// The node of the file that a path or URL names.
fn protocol(source: Source<'_>, image: &str, place: Place) -> Result<Value, Mistake> {
    let is_path = filename::protocol(image).is_none();
    let image = match is_path {
        true => source.resolve(image),
        false => image.to_owned(),
    };
    let options = filename::node_options(&image)
        .map_err(|error| source.mistake(place, error_text(&error)))?;
    let mut node = options.to_json();
    let is_device = image.starts_with(DEVICES) && !image.starts_with(SHARED_MEMORY);
    if node.get("driver").is_none() {
        node["driver"] = json!(if is_device { "host_device" } else { "file" });
    }
    Ok(node)
}

/// The disks that texts within a value name.
fn references(value: &Value, names: &BTreeMap<String, String>, found: &mut BTreeSet<PartKey>) {
    match value {
        Value::String(text) => {
            if let Some(disk) = names.get(text) {
                found.insert(PartKey::new(PartKind::Disk, disk.clone()));
            }
        }
        Value::Array(items) => items.iter().for_each(|item| references(item, names, found)),
        Value::Object(members) => {
            for (key, value) in members {
                if !NO_REFERENCES.contains(&key.as_str()) {
                    references(value, names, found);
                }
            }
        }
        _ => {}
    }
}

/// `chain = {...}`: what the backing chain of a disk may be.
fn chain_part(mut chain: Section<'_>, disk: &str, is_limited: bool) -> Result<Part, Mistake> {
    let source = chain.source;
    let mut arguments = Map::new();
    arguments.insert("node-name".to_owned(), json!(disk));
    if is_limited {
        arguments.insert("image-node".to_owned(), json!(image_node(disk)));
    }
    for key in ["max-layers", "max-overlay-bytes", "speed"] {
        let Some(entry) = chain.take(key) else {
            continue;
        };
        let number = match chain.json(&entry)? {
            Value::String(text) if key != "max-layers" => size::parse(&text).ok(),
            value => value.as_u64().filter(|number| *number > 0),
        };
        let Some(number) = number.filter(|number| i64::try_from(*number).is_ok()) else {
            let text = match key {
                "max-layers" => "'max-layers' is a number from 1 on: the disk's own image counts",
                _ => "it is a number of bytes above 0, or a text like \"10G\"",
            };
            return Err(source.wrong(&entry.value.span(), text));
        };
        arguments.insert(key.to_owned(), json!(number));
    }
    if !["max-layers", "max-overlay-bytes"]
        .iter()
        .any(|key| arguments.contains_key(*key))
    {
        return Err(chain.wrong("a chain is bounded by 'max-layers', or 'max-overlay-bytes'"));
    }
    let place = chain.place;
    chain.finish(&[])?;
    Ok(Part {
        key: PartKey::new(PartKind::Chain, disk),
        arguments,
        needs: BTreeSet::from([PartKey::new(PartKind::Disk, disk)]),
        place,
    })
}

/// `[[disk.export]]`.
///
/// `on_full` is what the disk says for all of them.
fn export_part(
    mut export: Section<'_>,
    disk: &str,
    on_full: Option<&str>,
) -> Result<Part, Mistake> {
    let source = export.source;
    let kinds = ["nbd", "vhost-user-blk", "fuse"].map(|kind| (kind, kind));
    let Some(kind) = export.word("type", &kinds)? else {
        let text =
            format!("'type' is missing in an export of disk '{disk}': nbd, vhost-user-blk or fuse");
        return Err(export.wrong(text));
    };
    export.name = format!("an export of type {kind}");
    let id = match export.text("id")? {
        Some((id, _)) => id,
        None => format!("{disk}-{kind}"),
    };
    if let Some(entry) = export.take("node-name") {
        let text = format!("it is an export of disk '{disk}'; leave 'node-name' out");
        return Err(source.wrong(&entry.key_span, text));
    }
    let mut arguments = Map::new();
    arguments.insert("type".to_owned(), json!(kind));
    arguments.insert("id".to_owned(), json!(id));
    arguments.insert("node-name".to_owned(), json!(disk));
    if let Some(on_full) = on_full {
        arguments.insert("on-full".to_owned(), json!(on_full));
    }
    let known = member_names(EXPORT, kind);
    for key in &known {
        if let Some(entry) = export.take(key) {
            arguments.insert(key.clone(), with_paths(source, key, export.json(&entry)?));
        }
    }
    let place = export.place;
    export.finish(&known)?;
    check_export(&Value::Object(arguments.clone()))
        .map_err(|text| source.mistake(place, format!("export '{id}': {text}")))?;
    let mut needs = BTreeSet::from([PartKey::new(PartKind::Disk, disk)]);
    if kind == "nbd" {
        needs.insert(PartKey::server());
    }
    Ok(Part {
        key: PartKey::new(PartKind::Export, id),
        arguments,
        needs,
        place,
    })
}

/// An option of an export; paths begin at the folder of the file, and sockets are those of unix if
/// nothing else is said.
fn with_paths(source: Source<'_>, key: &str, mut value: Value) -> Value {
    match (key, &mut value) {
        ("mountpoint", Value::String(path)) => *path = source.resolve(path),
        ("addr", Value::Object(address)) => {
            if let Some(Value::String(path)) = address.get_mut("path") {
                *path = source.resolve(path);
                address.entry("type").or_insert_with(|| json!("unix"));
            }
        }
        _ => {}
    }
    value
}

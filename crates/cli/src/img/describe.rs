//! The facts that `info` prints, gathered without opening what the image names.

use std::borrow::Cow;
use std::os::unix::fs::MetadataExt;

use serde_json::{Map, Value, json};
use vellum::Result;
use vellum::luks::{AsLuks, LuksHeader};
use vellum::qcow2::info::{ImageInfo, SnapshotInfo};
use vellum::qcow2::seal::SealInfo;
use vellum_graph::foreign::{self, Fact, Facts};
use vellum_graph::name_of_options::{child_keys, display_name, is_optional};
use vellum_graph::{ImageFile, check_options, open_device, open_file};
use vellum_images::format_specific::{bitmap, foreign_members, luks_members, object, snapshot};
use vellum_images::minisign;
use vellum_options::filename::{self, without_passwords};
use vellum_options::{ImageSpec, OpenFlags, Options, Source};

/// A backing file as the image names it.
#[derive(Debug, Clone)]
pub struct BackingName {
    /// The name in the image.
    pub name: String,
    /// The name as seen from here; `None` if that cannot be told.
    pub full: Option<String>,
    /// The format in the image.
    pub format: Option<String>,
}

/// What is known about an image, or about a node below it.
#[derive(Debug, Clone, Default)]
pub struct Description {
    /// The name shown for it.
    pub filename: String,
    /// The path of the file that it stands on.
    pub file_name: String,
    /// The name of its driver.
    pub format: &'static str,
    /// The virtual size.
    pub size_bytes: u64,
    /// What it takes on the host.
    pub disk_bytes: Option<u64>,
    /// Whether it was left in disorder; `None` where the driver has no idea of that.
    pub dirty: Option<bool>,
    /// The clusters that it is divided into.
    pub cluster_bytes: Option<u64>,
    /// Its internal snapshots.
    pub snapshots: Vec<SnapshotInfo>,
    /// The backing file.
    pub backing: Option<BackingName>,
    /// The header of a luks volume, and whether it stands apart.
    pub luks: Option<(LuksHeader, bool)>,
    /// What a qcow2 image says of itself.
    pub qcow2: Option<ImageInfo>,
    /// What an image of another format says of itself.
    pub foreign: Option<Facts>,
    /// The nodes that it stands on, by the names of their places.
    pub children: Vec<(Cow<'static, str>, Description)>,
}

/// Gathers the facts about an image.
pub async fn describe(spec: &ImageSpec, force_share: bool) -> Result<Description> {
    let flags = OpenFlags {
        metadata_only: true,
        force_share,
        ..OpenFlags::default()
    };
    let file = open_file(spec, &flags).await?;
    let mut node = Description {
        filename: without_passwords(&display_name(spec, file.format)).into_owned(),
        file_name: file.storage.name().to_owned(),
        format: file.format,
        ..Description::default()
    };
    node.children = children(spec, &file, force_share).await?;
    let is_format = file.format != file.protocol;
    if !is_format {
        node.size_bytes = whole_sectors(&file)?;
    }
    let info = match file.format {
        "qcow2" => Some(ImageInfo::read(file.storage.clone()).await?),
        _ => None,
    };
    node.disk_bytes = disk_bytes(&file);
    // A server may let nobody else in before.
    file.storage.close().await?;
    drop(file);
    if let Some(info) = info {
        // The driver's options are checked although nothing here needs them.
        check_options(spec, &flags).await?;
        node.describe_qcow2(info);
    } else if is_format {
        let device = open_device(spec, &flags).await?;
        node.size_bytes = device.size_bytes();
        let luks = device.as_luks();
        node.luks = luks.map(|luks| ((*luks.header()).clone(), luks.has_detached_header()));
        if let Some(facts) = foreign::facts(&*device) {
            node.describe_foreign((*facts).clone(), device.info().cluster_size_bytes);
            node.describe_extents(force_share).await?;
        }
        device.close().await?;
    }
    node.inherit();
    Ok(node)
}

/// Lengths are told in whole sectors.
fn whole_sectors(file: &ImageFile) -> Result<u64> {
    Ok(file.storage.len_bytes()?.next_multiple_of(512))
}

/// Describes the nodes below, as far as the options of `spec` tell them apart.
async fn children(
    spec: &ImageSpec,
    file: &ImageFile,
    force_share: bool,
) -> Result<Vec<(Cow<'static, str>, Description)>> {
    let options = spec.options()?;
    let mut children = Vec::new();
    for key in child_keys(file.format) {
        let below = options.clone().take_group(key);
        if below.is_empty() && is_optional(key) {
            continue;
        }
        // What stands on nothing is open already, and perhaps not to be opened twice.
        if below
            .get_text("driver")
            .is_some_and(|driver| !child_keys(driver).is_empty())
        {
            let spec = by_options(below, &spec.name);
            children.push(((*key).into(), Box::pin(describe(&spec, force_share)).await?));
        } else if file.format != file.protocol && !is_optional(key) {
            children.push(((*key).into(), file_below(file, below)?));
        } else if let Some(name) = below.get_text("filename") {
            // A filter: its file is opened for itself.
            let spec = ImageSpec::filename(name).with_format(Some("file"));
            children.push(((*key).into(), Box::pin(describe(&spec, force_share)).await?));
        }
    }
    Ok(children)
}

fn by_options(options: Options, name: &str) -> ImageSpec {
    ImageSpec {
        source: Source::Options(options),
        format: None,
        added: Options::new(),
        name: name.to_owned(),
    }
}

fn is_plain_file(driver: Option<&str>) -> bool {
    matches!(driver, Some("file" | "host_device" | "host_cdrom"))
}

/// The file that a format stands on, which `options` describe.
fn file_below(file: &ImageFile, options: Options) -> Result<Description> {
    let file_name = file.storage.name().to_owned();
    let filename = match file.protocol {
        "http" | "https" | "s3" | "gs" | "az" | "null-co" | "null-aio" => {
            let name = display_name(&by_options(options, &file_name), file.protocol);
            without_passwords(&name).into_owned()
        }
        _ => file_name.clone(),
    };
    let mut node = Description {
        filename,
        file_name,
        format: file.protocol,
        size_bytes: whole_sectors(file)?,
        ..Description::default()
    };
    node.disk_bytes = disk_bytes(file);
    node.inherit();
    Ok(node)
}

/// What a file or device takes on the host.
fn disk_bytes(file: &ImageFile) -> Option<u64> {
    match file.protocol {
        "file" | "host_device" => {
            let file = std::fs::metadata(file.storage.name()).ok()?;
            Some(file.blocks() * 512)
        }
        _ => file.storage.allocated_bytes().ok().flatten(),
    }
}

impl Description {
    fn describe_qcow2(&mut self, info: ImageInfo) {
        self.size_bytes = info.size_bytes;
        self.backing = info.backing_file.as_ref().map(|name| BackingName {
            name: name.clone(),
            full: filename::resolve(&self.file_name, name).ok(),
            format: info.backing_format.clone(),
        });
        self.dirty = Some(info.dirty);
        self.cluster_bytes = Some(info.cluster_size_bytes);
        self.snapshots.clone_from(&info.snapshots);
        self.qcow2 = Some(info);
    }

    fn describe_foreign(&mut self, facts: Facts, cluster_bytes: Option<u64>) {
        self.backing = facts.backing.as_ref().map(|backing| BackingName {
            name: backing.name.clone(),
            full: filename::resolve(&self.file_name, &backing.name).ok(),
            format: backing.format.clone(),
        });
        self.dirty = foreign::told_dirty(self.format, &facts);
        if foreign::tells_clusters(self.format) {
            self.cluster_bytes = cluster_bytes;
        }
        self.foreign = Some(facts);
    }

    /// The files that the image has beside the one that is named.
    async fn describe_extents(&mut self, force_share: bool) -> Result<()> {
        let specific = self.foreign.iter().flat_map(|facts| &facts.specific);
        let mut names = Vec::new();
        for (_, extents) in specific.filter(|(key, _)| *key == "extents") {
            let Fact::List(extents) = extents else {
                continue;
            };
            let members = extents.iter().flatten();
            names.extend(members.filter_map(|(key, fact)| match fact {
                Fact::Text(name) if *key == "filename" => Some(name.clone()),
                _ => None,
            }));
        }
        names.retain(|name| *name != self.file_name);
        for (number, name) in names.into_iter().enumerate() {
            let spec = ImageSpec::filename(name).with_format(Some("file"));
            let child = Box::pin(describe(&spec, force_share)).await?;
            let key = format!("extents.{number}").into();
            // As QEMU tells them: the last first, and before the file.
            self.children.insert(0, (key, child));
        }
        Ok(())
    }

    /// Takes over what a node without an answer of its own asks the one below.
    fn inherit(&mut self) {
        let below = self.children.iter();
        let below = below.filter(|(key, _)| !is_optional(key));
        let extents = below.clone().filter(|(key, _)| key.starts_with("extents."));
        let extents_bytes = extents
            .filter_map(|(_, extent)| extent.disk_bytes)
            .sum::<u64>();
        let mut below = below.filter(|(key, _)| !key.starts_with("extents."));
        let below = below.next().map(|(_, node)| node);
        self.disk_bytes = match (self.format, below) {
            // QEMU has these say nothing.
            ("blkdebug" | "blkverify", _) => None,
            (_, Some(below)) => below.disk_bytes.map(|bytes| bytes + extents_bytes),
            (_, None) => self.disk_bytes,
        };
        let Some(below) = below else {
            self.dirty = is_plain_file(Some(self.format)).then_some(false);
            return;
        };
        if self.luks.is_some() {
            self.dirty = Some(false);
        } else if self.qcow2.is_none() && self.foreign.is_none() {
            self.dirty = below.dirty;
            self.cluster_bytes = below.cluster_bytes;
            self.snapshots.clone_from(&below.snapshots);
        }
    }

    /// Whether what it holds cannot be read without a key.
    pub fn is_encrypted(&self) -> bool {
        let (qcow2, foreign) = (self.qcow2.as_ref(), self.foreign.as_ref());
        self.luks.is_some()
            || qcow2.is_some_and(|info| info.encryption.is_some())
            || foreign.is_some_and(|facts| facts.is_encrypted)
    }

    /// What the format alone knows, as QEMU's tree of members.
    pub fn format_specific(&self) -> Option<Value> {
        if let Some((header, detached)) = &self.luks {
            return Some(Value::Object(luks_members(header, *detached)));
        }
        if is_plain_file(Some(self.format)) {
            return Some(json!({}));
        }
        if let Some(facts) = &self.foreign {
            return foreign_members(facts);
        }
        let info = self.qcow2.as_ref()?;
        let mut members: Map<String, Value> = Map::new();
        let mut add = |key: &str, value: Value| drop(members.insert(key.to_owned(), value));
        add("compat", info.compat().into());
        add("compression-type", info.compression_type.name().into());
        add("refcount-bits", info.refcount_bits.into());
        if info.version >= 3 {
            add("lazy-refcounts", info.lazy_refcounts.into());
            add("corrupt", info.corrupt.into());
            add("extended-l2", info.extended_l2.into());
            if let Some(name) = &info.data_file {
                add("data-file", name.as_str().into());
            }
            if info.external_data {
                add("data-file-raw", info.data_file_raw.into());
            }
            if let Some(log) = &info.write_log {
                add("write-log", log.to_string().into());
            }
            if let Some(name) = &info.checksums {
                add("checksums", name.as_str().into());
            }
            if !info.bitmaps.is_empty() {
                add("bitmaps", info.bitmaps.iter().map(bitmap).collect());
            }
        }
        if info.sealed {
            add("seal", seal(info.seal.as_ref()));
        }
        if let Some(method) = info.encryption {
            let mut encrypt = match &info.luks {
                Some(header) => luks_members(header, false),
                None => Map::new(),
            };
            encrypt.insert("format".to_owned(), method.into());
            add("encrypt", Value::Object(encrypt));
        }
        Some(Value::Object(members))
    }

    /// The image as `--output=json` shows it.
    pub fn to_json(&self) -> Value {
        let mut members: Map<String, Value> = Map::new();
        let mut add = |key: &str, value: Value| drop(members.insert(key.to_owned(), value));
        add("filename", self.filename.as_str().into());
        add("format", self.format.into());
        if let Some(dirty) = self.dirty {
            add("dirty-flag", dirty.into());
        }
        if let Some(bytes) = self.disk_bytes {
            add("actual-size", bytes.into());
        }
        add("virtual-size", self.size_bytes.into());
        if self.luks.is_some() {
            add("encrypted", true.into());
        }
        if let Some(bytes) = self.cluster_bytes {
            add("cluster-size", bytes.into());
        }
        if self.luks.is_none() && self.is_encrypted() {
            add("encrypted", true.into());
        }
        if !self.snapshots.is_empty() {
            add("snapshots", self.snapshots.iter().map(snapshot).collect());
        }
        if let Some(backing) = &self.backing {
            add("backing-filename", backing.name.as_str().into());
            if let Some(full) = &backing.full {
                add("full-backing-filename", full.as_str().into());
            }
            if let Some(format) = &backing.format {
                add("backing-filename-format", format.as_str().into());
            }
        }
        if let Some(data) = self.format_specific() {
            add(
                "format-specific",
                object([("type", self.format.into()), ("data", data)]),
            );
        }
        let children = self.children.iter();
        let children = children.map(|(name, node)| json!({ "name": name, "info": node.to_json() }));
        add("children", children.collect());
        Value::Object(members)
    }
}

/// What a seal says, which QEMU's programs do not tell.
fn seal(seal: Option<&SealInfo>) -> Value {
    let Some(seal) = seal else {
        return object([("damaged", true.into())]);
    };
    let mut members = vec![("content", seal.root.as_deref().unwrap_or("nothing").into())];
    let key = seal.signature.as_deref().and_then(minisign::key_id);
    members.extend(key.map(|key| ("signed-with-key", key.into())));
    members.push(("size", seal.length_bytes.into()));
    object(members)
}

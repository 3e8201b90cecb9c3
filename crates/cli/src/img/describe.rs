//! The facts that `info` prints, gathered without opening what the image names.

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use serde_json::{Map, Value, json};
use vellum::luks::{IvGenerator, KeySlot, LuksHeader, SECTOR_BYTES};
use vellum::qcow2::info::ImageInfo;
use vellum::{Result, Storage};
use vellum_control::display::display_name;
use vellum_control::{ImageSpec, OpenFlags, filename, open};

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

/// What is known about an image.
#[derive(Debug, Clone)]
pub struct Description {
    /// The name shown for it.
    pub filename: String,
    /// The path of its file.
    pub file_name: String,
    /// The driver of its file.
    pub protocol: &'static str,
    /// The format's name.
    pub format: &'static str,
    /// The virtual size.
    pub size_bytes: u64,
    /// What it takes on the host.
    pub disk_bytes: Option<u64>,
    /// The length of its file.
    pub file_bytes: u64,
    /// The backing file.
    pub backing: Option<BackingName>,
    /// The header of a luks volume, and whether it stands apart.
    pub luks: Option<(LuksHeader, bool)>,
    /// What a qcow2 image says of itself.
    pub qcow2: Option<ImageInfo>,
}

/// Gathers the facts about an image.
pub async fn describe(spec: &ImageSpec, force_share: bool) -> Result<Description> {
    let flags = OpenFlags {
        metadata_only: true,
        force_share,
        ..OpenFlags::default()
    };
    let open::ImageFile {
        storage: file,
        format,
        protocol,
    } = open::open_file(spec, &flags).await?;
    let file_name = file.name().to_owned();
    // Lengths are told in whole sectors.
    let file_bytes = file.len_bytes()?.next_multiple_of(512);
    let mut description = Description {
        filename: display_name(spec, format),
        disk_bytes: disk_bytes(&file, protocol),
        file_name,
        protocol,
        format,
        size_bytes: file_bytes,
        file_bytes,
        backing: None,
        luks: None,
        qcow2: None,
    };
    if format == "qcow2" {
        let info = ImageInfo::read(file.clone()).await?;
        // A server may let nobody else in before.
        file.close().await?;
        drop(file);
        // The driver's options are checked although nothing here needs them.
        open::check_options(spec, &flags).await?;
        description.size_bytes = info.size_bytes;
        description.backing = info.backing_file.as_ref().map(|name| BackingName {
            name: name.clone(),
            full: filename::resolve(&description.file_name, name).ok(),
            format: info.backing_format.clone(),
        });
        description.qcow2 = Some(info);
    } else {
        file.close().await?;
        drop(file);
        let device = open::open_device(spec, &flags).await?;
        description.size_bytes = device.size_bytes();
        let luks = device.as_luks();
        description.luks = luks.map(|luks| (luks.header().clone(), luks.has_detached_header()));
        device.close().await?;
    }
    Ok(description)
}

/// What an image takes on the host, if its node can tell.
fn disk_bytes(file: &Arc<dyn Storage>, protocol: &str) -> Option<u64> {
    match protocol {
        "file" | "host_device" => {
            let file = std::fs::metadata(file.name()).ok()?;
            Some(file.blocks() * 512)
        }
        // QEMU has these say nothing.
        "blkdebug" | "blkverify" => None,
        _ => file.allocated_bytes().ok().flatten(),
    }
}

fn object(members: impl IntoIterator<Item = (&'static str, Value)>) -> Value {
    Value::Object(
        members
            .into_iter()
            .map(|(key, value)| (key.to_owned(), value))
            .collect(),
    )
}

impl Description {
    /// What the format alone knows, as QEMU's tree of members.
    pub fn format_specific(&self) -> Option<Value> {
        if let Some((header, detached)) = &self.luks {
            return Some(Value::Object(luks_members(header, *detached)));
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
            if !info.bitmaps.is_empty() {
                add("bitmaps", info.bitmaps.iter().map(bitmap).collect());
            }
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
        let own_words = self.format != "raw" && self.format != self.protocol;
        if own_words || tells_of_itself(self.protocol) {
            let dirty = self.qcow2.as_ref().is_some_and(|info| info.dirty);
            add("dirty-flag", dirty.into());
        }
        if let Some(bytes) = self.disk_bytes {
            add("actual-size", bytes.into());
        }
        add("virtual-size", self.size_bytes.into());
        if self.luks.is_some() {
            add("encrypted", true.into());
        }
        if let Some(info) = &self.qcow2 {
            add("cluster-size", info.cluster_size_bytes.into());
            if info.encryption.is_some() {
                add("encrypted", true.into());
            }
            if !info.snapshots.is_empty() {
                add("snapshots", info.snapshots.iter().map(snapshot).collect());
            }
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
        add(
            "children",
            json!([{ "name": "file", "info": self.file_to_json() }]),
        );
        Value::Object(members)
    }

    fn file_to_json(&self) -> Value {
        let mut members = vec![
            ("filename", self.file_name.as_str().into()),
            ("format", self.protocol.into()),
            ("virtual-size", self.file_bytes.into()),
            ("children", json!([])),
        ];
        if tells_of_itself(self.protocol) {
            let specific = json!({ "type": self.protocol, "data": {} });
            members.extend([("dirty-flag", false.into()), ("format-specific", specific)]);
        }
        members.extend(self.disk_bytes.map(|bytes| ("actual-size", bytes.into())));
        object(members)
    }
}

/// Whether the driver of the bytes has more to say than their size, as QEMU's have.
fn tells_of_itself(protocol: &str) -> bool {
    !matches!(protocol, "nbd" | "null-co" | "null-aio")
}

/// What `info` tells of a LUKS header.
fn luks_members(header: &LuksHeader, detached: bool) -> Map<String, Value> {
    let suite = header.suite().ok();
    let mut members: Map<String, Value> = Map::new();
    let mut add = |key: &str, value: Value| drop(members.insert(key.to_owned(), value));
    if let Some(suite) = suite {
        add("ivgen-alg", suite.iv_generator.name().into());
        let essiv = suite.iv_generator == IvGenerator::Essiv;
        if let Some(hash) = suite.iv_hash.filter(|_| essiv) {
            add("ivgen-hash-alg", hash.name().into());
        }
        add("detached-header", detached.into());
        add("hash-alg", suite.hash.name().into());
        add("cipher-alg", suite.cipher.name().into());
        add("cipher-mode", suite.mode.name().into());
    }
    add("uuid", header.uuid.as_str().into());
    add("slots", header.slots.iter().map(key_slot).collect());
    let payload = u64::from(header.payload_offset_sectors) * SECTOR_BYTES;
    add("payload-offset", payload.into());
    add("master-key-iters", header.digest_iterations.into());
    members
}

fn key_slot(slot: &KeySlot) -> Value {
    let place = ("key-offset", slot.key_offset_bytes().into());
    match slot.active {
        true => object([
            ("active", true.into()),
            ("iters", slot.iterations.into()),
            place,
            ("stripes", slot.stripes.into()),
        ]),
        false => object([("active", false.into()), place]),
    }
}

fn bitmap(info: &vellum::qcow2::info::BitmapInfo) -> Value {
    let flags = [("in-use", info.in_use), ("auto", info.auto)];
    let flags: Vec<Value> = flags
        .into_iter()
        .filter(|(_, set)| *set)
        .map(|(name, _)| name.into())
        .collect();
    object([
        ("flags", flags.into()),
        ("name", info.name.as_str().into()),
        ("granularity", info.granularity_bytes.into()),
    ])
}

fn snapshot(info: &vellum::qcow2::info::SnapshotInfo) -> Value {
    const NANOSECONDS: u64 = 1_000_000_000;
    let mut members = vec![
        ("id", info.id.as_str().into()),
        ("name", info.name.as_str().into()),
        ("vm-state-size", info.vm_state_size_bytes.into()),
        ("date-sec", info.date_seconds.into()),
        ("date-nsec", info.date_nanoseconds.into()),
        (
            "vm-clock-sec",
            (info.vm_clock_nanoseconds / NANOSECONDS).into(),
        ),
        (
            "vm-clock-nsec",
            (info.vm_clock_nanoseconds % NANOSECONDS).into(),
        ),
    ];
    members.extend(info.icount.map(|count| ("icount", count.into())));
    object(members)
}

//! What images of a format tell beside what all do, as the members that QEMU gives them: for `info` and for
//! the monitor.

use serde_json::{Map, Value};
use vellum::luks::{IvGenerator, KeySlot, LuksHeader, SECTOR_BYTES};
use vellum::qcow2::info::{BitmapInfo, SnapshotInfo};

use vellum_graph::foreign::{Fact, Facts};

const NANOSECONDS: u64 = 1_000_000_000;

/// An object of some members.
pub fn object(members: impl IntoIterator<Item = (&'static str, Value)>) -> Value {
    let members = members.into_iter();
    Value::Object(
        members
            .map(|(key, value)| (key.to_owned(), value))
            .collect(),
    )
}

/// What an image of another format than qcow2 tells; `None` if nothing.
pub fn foreign_members(facts: &Facts) -> Option<Value> {
    (!facts.specific.is_empty()).then(|| members_of(&facts.specific))
}

fn members_of(members: &[(&'static str, Fact)]) -> Value {
    object(members.iter().map(|(key, fact)| (*key, fact_value(fact))))
}

fn fact_value(fact: &Fact) -> Value {
    match fact {
        Fact::Text(text) => text.as_str().into(),
        Fact::Number(number) => (*number).into(),
        Fact::Bool(is_so) => (*is_so).into(),
        Fact::List(all) => all.iter().map(|one| members_of(one)).collect(),
    }
}

/// What the header of a LUKS volume tells; `detached`: it stands apart from the payload.
pub fn luks_members(header: &LuksHeader, detached: bool) -> Map<String, Value> {
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

/// A persistent bitmap.
pub fn bitmap(info: &BitmapInfo) -> Value {
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

/// A snapshot inside an image.
pub fn snapshot(info: &SnapshotInfo) -> Value {
    let clock = info.vm_clock_nanoseconds;
    let mut members = vec![
        ("id", info.id.as_str().into()),
        ("name", info.name.as_str().into()),
        ("vm-state-size", info.vm_state_size_bytes.into()),
        ("date-sec", info.date_seconds.into()),
        ("date-nsec", info.date_nanoseconds.into()),
        ("vm-clock-sec", (clock / NANOSECONDS).into()),
        ("vm-clock-nsec", (clock % NANOSECONDS).into()),
    ];
    members.extend(info.icount.map(|count| ("icount", count.into())));
    object(members)
}

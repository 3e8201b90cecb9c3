//! The groups whose limits `throttle` nodes keep (`--object throttle-group`).
//!
//! As in QEMU they belong to the process, and live as long as it, or until they are removed.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, MutexGuard};
use serde_json::{Map, Value};
use vellum::Result;
use vellum_options::{Options, Scalar};
use vellum_storage::nodes::throttle::{
    Lifted, Limit, ThrottleGroup, ThrottleLimits, ThrottleStorage, ThrottleWaits,
};

use crate::node::errors::invalid;
use crate::secret;

/// QEMU's name of the type.
pub const TYPE: &str = "throttle-group";

/// The name of all limits together.
pub const LIMITS: &str = "limits";

/// What stands before the names of limits that are properties of their own.
const SHORT: &str = "x-";

static GROUPS: Mutex<BTreeMap<String, Arc<ThrottleGroup>>> = Mutex::new(BTreeMap::new());

/// Nodes that keep the limits of a group, by the names of live nodes.
static NODES: Mutex<Vec<(String, Weak<ThrottleStorage>)>> = Mutex::new(Vec::new());

fn groups() -> MutexGuard<'static, BTreeMap<String, Arc<ThrottleGroup>>> {
    GROUPS.lock()
}

/// Makes the group that the properties of `--object throttle-group` describe; its
/// type is taken out already.
///
/// # Errors
/// In QEMU's words: an unknown property, limits that contradict each other, a name
/// that is taken.
pub fn add(mut options: Options) -> Result<()> {
    let id = secret::take_id(&mut options)?;
    let mut limits = ThrottleLimits::default();
    for (prefix, separate) in [(SHORT, true), ("limits.", false)] {
        for (name, property) in properties() {
            let key = format!("{prefix}{name}");
            if let Some(value) = take_property(&mut options, &key)? {
                property.set(&mut limits, value, if separate { &key } else { &name })?;
            }
        }
    }
    if options.contains(LIMITS) {
        return Err(invalid(
            "Invalid parameter type for 'limits', expected: object",
        ));
    }
    if let Some(key) = options.keys().next() {
        return Err(invalid(format!("Parameter '{key}' is unexpected")));
    }
    if groups().contains_key(&id) {
        return Err(secret::duplicate(&id));
    }
    check(&limits)?;
    groups().insert(id.clone(), ThrottleGroup::new(id, limits));
    Ok(())
}

/// How requests have waited for the limits of each group, by the names of these.
pub fn waits() -> Vec<(String, ThrottleWaits)> {
    let groups = groups();
    let waits = groups.iter().map(|(id, group)| (id.clone(), group.waits()));
    waits.collect()
}

fn check(limits: &ThrottleLimits) -> Result<()> {
    match limits.contradiction() {
        Some(message) => Err(invalid(message)),
        None => Ok(()),
    }
}

/// A whole number: of JSON, or a text of the command line.
fn take_property(options: &mut Options, key: &str) -> Result<Option<i64>> {
    let wrong_type = || {
        let message = format!("Invalid parameter type for '{key}', expected: integer");
        Err(invalid(message))
    };
    match options.take(key) {
        None => Ok(None),
        Some(Scalar::Number(number)) => match number.as_i64() {
            Some(value) => Ok(Some(value)),
            None => wrong_type(),
        },
        Some(Scalar::Text(text)) => {
            options.set_text(key, text);
            let taken = options.take_number(key);
            let expected = |_| invalid(format!("Parameter '{key}' expects integer"));
            Ok(taken.map_err(expected)?.map(|value| value as i64))
        }
        Some(_) => wrong_type(),
    }
}

/// A part of the limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Average,
    Burst,
    BurstSeconds,
}

/// One number of the limits.
#[derive(Debug, Clone, Copy)]
enum Property {
    Limit(fn(&mut ThrottleLimits) -> &mut Limit, Part),
    IopsSize,
}

/// All of them, with QEMU's names.
fn properties() -> Vec<(String, Property)> {
    type Place = fn(&mut ThrottleLimits) -> &mut Limit;
    let all: [(&str, Place); 6] = [
        ("iops-total", |limits| &mut limits.iops_total),
        ("iops-read", |limits| &mut limits.iops_read),
        ("iops-write", |limits| &mut limits.iops_write),
        ("bps-total", |limits| &mut limits.bps_total),
        ("bps-read", |limits| &mut limits.bps_read),
        ("bps-write", |limits| &mut limits.bps_write),
    ];
    let mut properties = vec![("iops-size".to_owned(), Property::IopsSize)];
    for (name, limit) in all {
        properties.push((name.to_owned(), Property::Limit(limit, Part::Average)));
        properties.push((format!("{name}-max"), Property::Limit(limit, Part::Burst)));
        let length = Property::Limit(limit, Part::BurstSeconds);
        properties.push((format!("{name}-max-length"), length));
    }
    properties
}

/// The names of all limits, without what stands before them where they are properties.
pub fn limit_names() -> Vec<String> {
    properties().into_iter().map(|(name, _)| name).collect()
}

/// What a limit is that nobody sets, by its name.
pub fn default_of(name: &str) -> u64 {
    let mut limits = ThrottleLimits::default();
    let found = properties().into_iter().find(|(known, _)| known == name);
    found.map_or(0, |(_, property)| *property.place(&mut limits))
}

impl Property {
    fn place(self, limits: &mut ThrottleLimits) -> &mut u64 {
        match self {
            Property::IopsSize => &mut limits.iops_size_bytes,
            Property::Limit(limit, part) => {
                let limit = limit(limits);
                match part {
                    Part::Average => &mut limit.average,
                    Part::Burst => &mut limit.burst,
                    Part::BurstSeconds => &mut limit.burst_seconds,
                }
            }
        }
    }

    /// Sets the number, which is called `key` there.
    fn set(self, limits: &mut ThrottleLimits, value: i64, key: &str) -> Result<()> {
        let is_short = key.starts_with(SHORT);
        if is_short && value < 0 {
            return Err(invalid("Property values cannot be negative"));
        }
        // As all members of `limits`: one that is below 0 is out of range.
        let value = value as u64;
        if matches!(self, Property::Limit(_, Part::BurstSeconds)) && value > u64::from(u32::MAX) {
            // QEMU has no space there in one of the two.
            let space = if is_short { "" } else { " " };
            return Err(invalid(format!(
                "{key} value must be in the{space}range [0, {}]",
                u32::MAX
            )));
        }
        *self.place(limits) = value;
        Ok(())
    }
}

/// Whether there is a group of this name.
pub fn contains(id: &str) -> bool {
    groups().contains_key(id)
}

/// The names of all groups.
pub fn names() -> Vec<String> {
    groups().keys().cloned().collect()
}

/// The group of a name.
///
/// # Errors
/// In QEMU's words, if there is none.
pub(crate) fn find(id: &str) -> Result<Arc<ThrottleGroup>> {
    let found = groups().get(id).cloned();
    found.ok_or_else(|| invalid(format!("Throttle group '{id}' does not exist")))
}

/// Removes a group; whether there was one.
///
/// # Errors
/// In QEMU's words, if nodes keep its limits.
pub fn remove(id: &str) -> Result<bool> {
    let mut groups = groups();
    match groups.get(id) {
        Some(group) if group.members() > 0 => Err(invalid(format!(
            "object '{id}' is in use, can not be deleted"
        ))),
        _ => Ok(groups.remove(id).is_some()),
    }
}

/// The names of the properties of a group, with their types.
pub fn property_types() -> Vec<(String, &'static str)> {
    let short = properties().into_iter();
    let short = short.map(|(name, _)| (format!("{SHORT}{name}"), "int"));
    [(LIMITS.to_owned(), "ThrottleLimits")]
        .into_iter()
        .chain(short)
        .collect()
}

fn unknown_property(property: &str) -> vellum::Error {
    invalid(format!("Property '{TYPE}.{property}' not found"))
}

/// The value of a property of a group.
///
/// # Errors
/// In QEMU's words, for a property that groups do not have.
pub fn get(id: &str, property: &str) -> Result<Value> {
    let mut limits = find(id)?.limits();
    if property == LIMITS {
        let all = properties().into_iter();
        let all: Map<String, Value> = all
            .map(|(name, property)| (name, Value::from(*property.place(&mut limits))))
            .collect();
        return Ok(Value::Object(all));
    }
    let mut all = properties().into_iter();
    match all.find(|(name, _)| property.strip_prefix(SHORT) == Some(name)) {
        Some((_, property)) => Ok(Value::from(*property.place(&mut limits))),
        None => Err(unknown_property(property)),
    }
}

/// Changes some of the limits of a group; the others stay.
///
/// # Errors
/// In QEMU's words, for a property that cannot be changed and for limits that cannot be.
pub fn set(id: &str, property: &str, value: Value) -> Result<()> {
    let group = find(id)?;
    if property != LIMITS {
        let mut all = properties().into_iter();
        return Err(
            match all.any(|(name, _)| property.strip_prefix(SHORT) == Some(&name)) {
                true => invalid("Property cannot be set after initialization"),
                false => unknown_property(property),
            },
        );
    }
    let Value::Object(members) = value else {
        return Err(invalid(
            "Invalid parameter type for 'limits', expected: object",
        ));
    };
    let mut limits = group.limits();
    let all: BTreeMap<String, Property> = properties().into_iter().collect();
    for (name, value) in members {
        let Some(property) = all.get(&name) else {
            let message = format!("Parameter 'limits.{name}' is unexpected");
            return Err(invalid(message));
        };
        let Some(value) = value.as_i64() else {
            return Err(invalid(format!(
                "Invalid parameter type for 'limits.{name}', expected: integer"
            )));
        };
        property.set(&mut limits, value, &name)?;
    }
    check(&limits)?;
    group.set_limits(limits);
    Ok(())
}

/// Notes that the live node `name` keeps the limits of a group.
pub(crate) fn note(name: &str, storage: &Arc<ThrottleStorage>) {
    let mut nodes = NODES.lock();
    nodes.retain(|(_, storage)| storage.strong_count() > 0);
    nodes.push((name.to_owned(), Arc::downgrade(storage)));
}

/// Whether any node keeps limits.
pub(crate) fn are_used() -> bool {
    !NODES.lock().is_empty()
}

/// Lets requests to some live nodes pass whatever their groups' limits are, for one who waits for
/// them to end; `None`: to all.
pub fn lift(names: Option<&[String]>) -> Vec<Lifted> {
    let nodes = NODES.lock();
    let wanted = nodes
        .iter()
        .filter(|(name, _)| names.is_none_or(|names| names.contains(name)));
    wanted
        .filter_map(|(_, storage)| Some(storage.upgrade()?.lift()))
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn text<T>(result: Result<T>) -> std::result::Result<T, String> {
        result.map_err(|error| error.message().to_owned())
    }

    #[test]
    fn groups_are_checked_and_kept() {
        for (options, message) in [
            ("x-iops-total=1", "Parameter 'id' is missing"),
            ("id=a,x-iops=1", "Parameter 'x-iops' is unexpected"),
            (
                "id=a,limits.iops=1",
                "Parameter 'limits.iops' is unexpected",
            ),
            (
                "id=a,x-iops-size=512",
                "iops size requires an iops value to be set",
            ),
            (
                "id=a,limits.bps-read-max-length=0",
                "the burst length cannot be 0",
            ),
        ] {
            let options = Options::parse(options).unwrap();
            assert_eq!(text(add(options)).unwrap_err(), message);
        }
        let options = Options::parse("id=kept,x-bps-total=1000,x-bps-total-max=2000").unwrap();
        add(options.clone()).unwrap();
        let message = "attempt to add duplicate property 'kept' to object (type 'container')";
        assert_eq!(text(add(options)).unwrap_err(), message);
    }

    #[test]
    fn a_change_of_some_limits_leaves_the_others() {
        add(Options::parse("id=changed,x-iops-read=7,limits.bps-write=9").unwrap()).unwrap();
        let refused = set("changed", LIMITS, json!({"bps-write": 1, "iops-total": 1}));
        assert!(text(refused).is_err());
        set("changed", LIMITS, json!({"bps-write": 10})).unwrap();
        let limits = get("changed", LIMITS).unwrap();
        assert_eq!(limits.as_object().unwrap().len(), 19);
        assert_eq!(limits["bps-write"], 10);
        assert_eq!(get("changed", "x-iops-read").unwrap(), 7);
        assert!(remove("changed").unwrap() && !remove("changed").unwrap());
    }
}

//! `throttle`, and the groups (`--object throttle-group`) whose limits it keeps.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use vellum::Result;
use vellum_storage::nodes::throttle::{Limit, ThrottleGroup, ThrottleLimits, ThrottleStorage};

use crate::file_node::CommonOptions;
use crate::graph::{OpenContext, OpenedNode, Role, child, invalid, refuse_unknown};
use crate::options::Options;

/// The groups of this process: objects have names that are valid everywhere in it.
static GROUPS: Mutex<BTreeMap<String, Arc<ThrottleGroup>>> = Mutex::new(BTreeMap::new());

fn groups() -> MutexGuard<'static, BTreeMap<String, Arc<ThrottleGroup>>> {
    GROUPS.lock()
}

/// Makes the group that the properties of `--object throttle-group` describe; its
/// type is taken out already.
///
/// # Errors
/// In QEMU's words: an unknown property, limits that contradict each other, a name
/// that is taken.
pub fn add_group(mut options: Options) -> Result<()> {
    let Some(id) = options.take_text("id")? else {
        return Err(invalid("Parameter 'id' is missing"));
    };
    let mut limits = ThrottleLimits::default();
    let all = [
        ("bps-total", &mut limits.bps_total),
        ("bps-read", &mut limits.bps_read),
        ("bps-write", &mut limits.bps_write),
        ("iops-total", &mut limits.iops_total),
        ("iops-read", &mut limits.iops_read),
        ("iops-write", &mut limits.iops_write),
    ];
    for (name, limit) in all {
        *limit = take_limit(&mut options, name)?;
    }
    limits.iops_size_bytes = take_property(&mut options, "iops-size")?.unwrap_or(0);
    if let Some(key) = options.keys().next() {
        let key = key.split('.').next().unwrap_or(key);
        return Err(invalid(format!("Parameter '{key}' is unexpected")));
    }
    if let Some(message) = limits.contradiction() {
        return Err(invalid(message));
    }
    let mut groups = groups();
    if groups.contains_key(&id) {
        return Err(invalid(format!(
            "attempt to add duplicate property '{id}' to object (type 'container')"
        )));
    }
    groups.insert(id.clone(), ThrottleGroup::new(id, limits));
    Ok(())
}

fn take_limit(options: &mut Options, name: &str) -> Result<Limit> {
    let defaults = Limit::default();
    Ok(Limit {
        average: take_property(options, name)?.unwrap_or(defaults.average),
        burst: take_property(options, &format!("{name}-max"))?.unwrap_or(defaults.burst),
        burst_seconds: take_property(options, &format!("{name}-max-length"))?
            .unwrap_or(defaults.burst_seconds),
    })
}

/// A property under its name of the command line (`x-NAME`), or of QMP (`limits.NAME`).
fn take_property(options: &mut Options, name: &str) -> Result<Option<u64>> {
    let mut take = |key: String| {
        let taken = options.take_number(&key);
        taken.map_err(|_| invalid(format!("Parameter '{key}' expects integer")))
    };
    let short = take(format!("x-{name}"))?;
    let long = take(format!("limits.{name}"))?;
    match short.or(long) {
        Some(value) if i64::try_from(value).is_err() => {
            Err(invalid("Property values cannot be negative"))
        }
        value => Ok(value),
    }
}

pub(super) async fn open(
    mut options: Options,
    _common: CommonOptions,
    around: OpenContext,
) -> Result<OpenedNode> {
    let name = options.take_text("throttle-group")?;
    let file = child(&mut options, "file", Role::Protocol, &around).await?;
    refuse_unknown(&options, "throttle")?;
    let Some(name) = name else {
        return Err(invalid("Please specify a throttle group"));
    };
    let Some(group) = groups().get(&name).cloned() else {
        return Err(invalid(format!("Throttle group '{name}' does not exist")));
    };
    let storage = ThrottleStorage::new(file.storage(), group);
    Ok(file.filter("throttle", Arc::new(storage)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn add(text: &str) -> std::result::Result<(), String> {
        let added = add_group(Options::parse(text).unwrap());
        added.map_err(|error| error.message().to_owned())
    }

    #[test]
    fn groups_are_checked_and_kept() {
        for (text, message) in [
            ("x-iops-total=1", "Parameter 'id' is missing"),
            ("id=a,x-iops=1", "Parameter 'x-iops' is unexpected"),
            (
                "id=a,x-iops-size=512",
                "iops size requires an iops value to be set",
            ),
            (
                "id=a,limits.bps-read-max-length=0",
                "the burst length cannot be 0",
            ),
        ] {
            assert_eq!(add(text).unwrap_err(), message, "{text}");
        }
        add("id=kept,x-bps-total=1000,x-bps-total-max=2000").unwrap();
        let message = "attempt to add duplicate property 'kept' to object (type 'container')";
        assert_eq!(add("id=kept").unwrap_err(), message);
    }
}

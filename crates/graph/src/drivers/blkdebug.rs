//! `blkdebug`: errors, breakpoints and limits on demand.
//!
//! Rules come from a configuration file (`config`) and from the options
//! `inject-error.N.KEY` and `set-state.N.KEY` (without `N` if there is one); both know the same keys.

use std::sync::Arc;

use vellum::{Error, Result};
use vellum_options::spec::is_protocol;
use vellum_options::{Options, filename, ini};
use vellum_storage::Event;
use vellum_storage::lock::PermissionSet;
use vellum_storage::nodes::debug::{
    Action, DebugStorage, Debugger, Injection, Limits, RequestKind, Rule,
};

use crate::live::child_access::ChildAccess;
use crate::live::uses::Changes;
use crate::node::driver::{DriverFacts, NamingKind};
use crate::node::errors::{invalid, refuse_unknown};
use crate::node::file_node::CommonOptions;
use crate::node::opened::OpenedNode;
use crate::node::origin::Role;
use crate::open::context::OpenContext;
use crate::open::node::child;

/// The driver.
pub(super) const FACTS: DriverFacts = DriverFacts {
    options: &[&[
        "config",
        "align",
        "max-transfer",
        "opt-write-zero",
        "max-write-zero",
        "opt-discard",
        "max-discard",
    ]],

    ..DriverFacts::filter("blkdebug").with_naming(
        NamingKind::Protocol,
        &[&["config", "inject-error.", "set-state."]],
        &["image"],
    )
};

/// The kinds of rules, by the names of their sections.
const SECTIONS: [&str; 2] = ["inject-error", "set-state"];

pub(super) async fn open(
    mut options: Options,
    _common: CommonOptions,
    around: OpenContext,
) -> Result<OpenedNode> {
    let rules = take_rules(&mut options)?;
    name_image(&mut options)?;
    let image = child(&mut options, "image", Role::Protocol, &around).await?;
    let storage = image.storage();
    let limits = take_limits(&mut options)?;
    let own = u64::from(storage.capabilities().request_alignment_bytes);
    if let Some((name, bytes)) = limits.contradiction(own) {
        return Err(invalid(format!(
            "Cannot meet constraints with {name} {bytes}"
        )));
    }
    let take = take_permissions(&mut options, "take-child-perms")?;
    let unshare = take_permissions(&mut options, "unshare-child-perms")?;
    let wanted = ChildAccess {
        changes: changes_by(take),
        ..ChildAccess::keeping(changes_by(unshare))
    };
    let nodes = &around.nodes;
    nodes.require(&around.place, "image", wanted).await?;
    refuse_unknown(&options, "blkdebug")?;
    let debugger = Debugger::new(rules, around.flags.print);
    let storage = DebugStorage::new(storage, debugger, limits);
    let mut opened = image.filter(FACTS, Arc::new(storage));
    for file in &mut opened.files {
        file.add_permissions(take, unshare);
    }
    Ok(opened)
}

/// The name of the node is that of its image; a format there stands on the file of that name.
fn name_image(options: &mut Options) -> Result<()> {
    if let Some(name) = options.take_text("filename")? {
        options.set_group("image", filename::node_options(&name)?);
    }
    let is_format = |driver: &str| !is_protocol(driver);
    if options.get_text("image.driver").is_some_and(is_format)
        && let Some(name) = options.take_text("image.filename")?
    {
        options.set_text("image.file.filename", name);
    }
    Ok(())
}

fn take_limits(options: &mut Options) -> Result<Limits> {
    let mut take = |key| Ok::<_, Error>(options.take_size(key)?.unwrap_or(0));
    Ok(Limits {
        align_bytes: take("align")?,
        max_transfer_bytes: take("max-transfer")?,
        opt_write_zero_bytes: take("opt-write-zero")?,
        max_write_zero_bytes: take("max-write-zero")?,
        opt_discard_bytes: take("opt-discard")?,
        max_discard_bytes: take("max-discard")?,
    })
}

fn take_permissions(options: &mut Options, key: &str) -> Result<PermissionSet> {
    let mut permissions = PermissionSet::NONE;
    let mut list = options.take_group(key);
    let mut index = 0;
    while let Some(name) = list.take_text(&index.to_string())? {
        permissions = permissions.with(match name.as_str() {
            "consistent-read" => PermissionSet::CONSISTENT_READ,
            "write" => PermissionSet::WRITE,
            "write-unchanged" => PermissionSet::WRITE_UNCHANGED,
            "resize" => PermissionSet::RESIZE,
            _ => {
                return Err(invalid(format!(
                    "Parameter 'null' does not accept value '{name}'"
                )));
            }
        });
        index += 1;
    }
    Ok(permissions)
}

/// What somebody with such permissions changes.
fn changes_by(permissions: PermissionSet) -> Changes {
    Changes {
        content: permissions.contains(PermissionSet::WRITE),
        size: permissions.contains(PermissionSet::RESIZE),
    }
}

/// All rules: those of the file first.
fn take_rules(options: &mut Options) -> Result<Vec<Rule>> {
    let mut sections = Vec::new();
    if let Some(path) = options.take_text("config")? {
        sections = read_config(&path)?;
    }
    for name in SECTIONS {
        let mut list = options.take_group(name);
        let mut index = 0;
        loop {
            let section = list.take_group(&index.to_string());
            if section.is_empty() {
                break;
            }
            sections.push((name, section));
            index += 1;
        }
        // A single one needs no number.
        if index == 0 && !list.is_empty() {
            sections.push((name, list));
        }
    }
    // All errors come before all changes of the state, as in QEMU.
    sections.sort_by_key(|(name, _)| *name);
    sections
        .into_iter()
        .map(|(name, section)| rule(name, section))
        .collect()
}

fn rule(section: &str, mut options: Options) -> Result<Rule> {
    let event = options.take_text("event")?;
    let state = number(&mut options, "state", 0)?;
    let action = match section {
        "set-state" => Action::SetState(number(&mut options, "new_state", 0)?),
        _ => Action::Inject(injection(&mut options)?),
    };
    if let Some(key) = options.keys().next() {
        return Err(invalid(format!(
            "[{section}] section doesn't support the option '{key}'"
        )));
    }
    let Some(name) = event else {
        return Err(invalid("Missing event name for rule"));
    };
    let Some(event) = Event::parse(&name) else {
        return Err(invalid(format!("invalid parameter value: {name}")));
    };
    Ok(Rule {
        event,
        state,
        action,
    })
}

fn injection(options: &mut Options) -> Result<Injection> {
    let kind = match options.take_text("iotype")? {
        None => None,
        Some(name) => match RequestKind::parse(&name) {
            Some(kind) => Some(kind),
            None => return Err(invalid(format!("invalid parameter value: {name}"))),
        },
    };
    let sector = options.take_number("sector")?;
    Ok(Injection {
        errno: number(options, "errno", libc::EIO)?,
        kind,
        // -1 is any.
        sector: sector.filter(|&sector| i64::try_from(sector).is_ok()),
        once: options.take_bool("once")?.unwrap_or(false),
        immediately: options.take_bool("immediately")?.unwrap_or(false),
    })
}

/// A number of C's type `int`; larger ones lose their upper bits there.
fn number(options: &mut Options, key: &str, default: i32) -> Result<i32> {
    let number = options.take_number(key)?;
    Ok(number.map_or(default, |number| number as i32))
}

fn read_config(path: &str) -> Result<Vec<(&'static str, Options)>> {
    let text = std::fs::read(path).map_err(|error| {
        let reason = Error::from_io("open", &error);
        let message = format!("Could not read blkdebug config file: {}", reason.message());
        Error::new(reason.kind(), "open", message).with_errno(reason.errno())
    })?;
    ini::parse(&String::from_utf8_lossy(&text), &SECTIONS)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(text: &str) -> std::result::Result<Vec<Rule>, String> {
        let mut options = Options::parse(text).unwrap();
        take_rules(&mut options).map_err(|error| error.message().to_owned())
    }

    #[test]
    fn a_single_rule_needs_no_number() {
        let (one, first) = ("inject-error.event=l2_load", "inject-error.0.event=l2_load");
        assert_eq!(rules(one), rules(first));
        assert_eq!(rules(one).map(|rules| rules.len()), Ok(1));
    }

    #[test]
    fn options_become_rules() {
        let found = rules(
            "set-state.0.event=write_aio,set-state.0.new_state=2,inject-error.0.event=l2_load,\
             inject-error.0.errno=28,inject-error.0.once=on,inject-error.0.iotype=read,\
             inject-error.1.event=none,inject-error.1.sector=7",
        );
        let injection = Injection {
            errno: 28,
            kind: Some(RequestKind::Read),
            sector: None,
            once: true,
            immediately: false,
        };
        let rule = |event, action| Rule {
            event,
            state: 0,
            action,
        };
        let expected = [
            rule(Event::L2Load, Action::Inject(injection)),
            rule(
                Event::None,
                Action::Inject(Injection {
                    errno: 5,
                    kind: None,
                    sector: Some(7),
                    once: false,
                    immediately: false,
                }),
            ),
            rule(Event::WriteAio, Action::SetState(2)),
        ];
        assert_eq!(found.unwrap(), expected);
    }

    #[test]
    fn a_file_says_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rules").display().to_string();
        let text = "[set-state]\nevent = \"write_aio\"\nnew_state = \"2\"\n\
                    [inject-error]\nevent = \"l2_load\"\nerrno = \"28\"\n";
        std::fs::write(&path, text).unwrap();
        let inline = "set-state.0.event=write_aio,set-state.0.new_state=2,\
                      inject-error.0.event=l2_load,inject-error.0.errno=28";
        assert_eq!(rules(&format!("config={path}")), rules(inline));
    }

    #[test]
    fn wrong_rules_are_named() {
        for (text, message) in [
            ("inject-error.0.errno=5", "Missing event name for rule"),
            ("set-state.new_state=5", "Missing event name for rule"),
            ("inject-error.0.event=x", "invalid parameter value: x"),
            (
                "inject-error.0.event=none,inject-error.0.bad=1",
                "[inject-error] section doesn't support the option 'bad'",
            ),
            (
                "set-state.0.event=none,set-state.0.state=x",
                "Parameter 'state' expects a number",
            ),
        ] {
            assert_eq!(rules(text).unwrap_err(), message);
        }
    }
}

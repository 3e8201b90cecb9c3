//! `blockdev-reopen`.

use std::rc::Rc;

use vellum_graph::drivers;
use vellum_options::{Options, Scalar, url_name};

use crate::daemon::Daemon;
use crate::qmp::{Arguments, Failure};

/// Drivers that stand on nothing, beside those of URLs.
const BOTTOM: [&str; 7] = [
    "file",
    "host_device",
    "host_cdrom",
    "nbd",
    "null-co",
    "null-aio",
    "repository",
];

/// Takes the options of the nodes.
pub(crate) fn take(mut arguments: Arguments) -> Result<Vec<Options>, Failure> {
    let items = arguments.need_objects("options")?;
    arguments.finish()?;
    let mut all = Vec::with_capacity(items.len());
    for (at, item) in items.into_iter().enumerate() {
        let options = item.into_options()?;
        // A quorum is refused, whatever its options are.
        all.push(match options.get_text("driver") {
            Some("quorum") => options,
            _ => check(options, &format!("options[{at}]."))?,
        });
    }
    Ok(all)
}

pub(crate) async fn reopen(daemon: Rc<Daemon>, all: Vec<Options>) -> Result<(), Failure> {
    let names = all.iter().filter_map(|one| one.get_text("node-name"));
    let names: Vec<String> = names.map(str::to_owned).collect();
    // A server may not answer for as long as it likes. Whoever asks for this waits for it, and no
    // other command does.
    daemon.wait_for_answers(&names).await?;
    daemon.nodes.flush_all(&names).await;
    let parts = daemon.parts.lock().await;
    // All that was written is durable before a node is closed, so this may be given up at the end.
    daemon.open_beside(parts.nodes.reopen(all)).await
}

/// Refuses what is no description of a node.
fn check(options: Options, prefix: &str) -> Result<Options, Failure> {
    let missing = |key: &str| {
        Err(Failure::new(format!(
            "Parameter '{prefix}{key}' is missing"
        )))
    };
    let Some(driver) = options.get_text("driver") else {
        return missing("driver");
    };
    if !drivers::driver_names().contains(&driver) {
        return Err(Failure::new(format!(
            "Parameter 'driver' does not accept value '{driver}'"
        )));
    }
    let has = |name: &str| {
        let group = format!("{name}.");
        options
            .keys()
            .any(|key| key == name || key.starts_with(&group))
    };
    let is_null = |name: &str| {
        let value = options.iter().find(|(key, _)| *key == name);
        matches!(value, Some((_, Scalar::Null)))
    };
    let below = if driver == "blkdebug" {
        "image"
    } else {
        "file"
    };
    if is_null(below) {
        return Err(Failure::new(format!(
            "Invalid parameter type for '{below}', expected: BlockdevRef"
        )));
    }
    if matches!(driver, "throttle") && !has("throttle-group") {
        return missing("throttle-group");
    }
    if matches!(driver, "file" | "host_device" | "host_cdrom") && !has("filename") {
        return missing("filename");
    }
    let is_bottom =
        BOTTOM.contains(&driver) || url_name::is_scheme(driver) || matches!(driver, "rbd" | "ssh");
    if !is_bottom && driver != "blkverify" && !has(below) {
        return missing(below);
    }
    let known: Vec<&str> = drivers::option_names(driver).collect();
    let is_known = |key: &str| {
        let first = key.split('.').next().unwrap_or_default();
        known
            .iter()
            .any(|known| known.split('.').next() == Some(first))
            || matches!(
                first,
                "image"
                    | "data-file"
                    | "server"
                    | "encrypt"
                    | "host-key-check"
                    | "auth-client-required"
            )
            || first.starts_with("inject-error")
            || first.starts_with("set-state")
            || first.contains("child-perms")
    };
    let unknown = options.keys().find(|key| !is_known(key)).map(str::to_owned);
    match unknown {
        Some(key) => Err(Failure::new(format!(
            "Parameter '{prefix}{key}' is unexpected"
        ))),
        None => Ok(options),
    }
}

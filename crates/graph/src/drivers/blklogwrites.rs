//! `blklogwrites`: a log of all writes, as dm-log-writes keeps it.

use std::sync::Arc;

use vellum::Result;
use vellum_options::Options;
use vellum_storage::nodes::debug::DebugStorage;
use vellum_storage::nodes::log_writes::{LogOptions, LogWritesStorage, is_valid_sector_size};

use crate::node::driver::{DriverFacts, NamingKind};
use crate::node::errors::{invalid, refuse_unknown};
use crate::node::file_node::CommonOptions;
use crate::node::opened::OpenedNode;
use crate::node::origin::Role;
use crate::open::context::OpenContext;
use crate::open::node::child;

/// The driver.
pub(super) const FACTS: DriverFacts = DriverFacts {
    options: &[&["log-append", "log-sector-size", "log-super-update-interval"]],
    is_reopened: false,
    has_past: true,
    ..DriverFacts::filter("blklogwrites").with_naming(NamingKind::Filter, &[], &["file", "log"])
};

pub(super) async fn open(
    mut options: Options,
    common: CommonOptions,
    around: OpenContext,
) -> Result<OpenedNode> {
    let append = options.take_bool("log-append")?.unwrap_or(false);
    let sector_bytes = options.take_size("log-sector-size")?;
    let update_interval = options.take_number("log-super-update-interval")?;
    let file = child(&mut options, "file", Role::Protocol, &around).await?;
    let log = child(&mut options, "log", Role::Protocol, &around).await?;
    refuse_unknown(&options, "blklogwrites")?;
    if append && sector_bytes.is_some() {
        return Err(invalid(
            "log-append and log-sector-size are mutually exclusive",
        ));
    }
    let defaults = LogOptions::default();
    let sector_bytes = sector_bytes.unwrap_or(defaults.sector_bytes);
    if !is_valid_sector_size(sector_bytes) {
        return Err(invalid(format!("Invalid log sector size {sector_bytes}")));
    }
    let update_interval = update_interval.unwrap_or(defaults.update_interval);
    if update_interval == 0 {
        return Err(invalid("Invalid log superblock update interval 0"));
    }
    let chosen = LogOptions {
        sector_bytes,
        // One that is opened anew goes on where it was, also when another process has ended.
        append: append || around.is_reopened() || around.place.restored,
        update_interval,
        read_only: !common.writable,
    };
    let storage = LogWritesStorage::open(file.storage(), log.storage(), chosen).await?;
    let sector_bytes = storage.sector_bytes();
    let storage = DebugStorage::aligned(Arc::new(storage), sector_bytes);
    let mut opened = file.filter(FACTS, Arc::new(storage));
    opened.files.extend(log.files);
    Ok(opened)
}

//! The table of drivers: one line each, and one file each beside this one for what their options mean. A new driver
//! (a format, a protocol, a filter) is a file there and a line here.
//!
//! A protocol or a filter takes its own options out of the ones that it is given, opens its children
//! ([`crate::open::node`]), refuses what is left over, and says what it has made. A format is given its file.

use std::sync::Arc;

use vellum::BlockDevice;
use vellum_options::Options;

use crate::node::file_node::{CommonOptions, FileUse};
use crate::open::context::{
    Driver, DriverTable, FormatOpening, Open, OpenContext, OpenFormat, Opening,
};

use super::{
    blkdebug, blklogwrites, blkverify, compress, copy_before_write, copy_on_read, file, foreign,
    http, luks, nbd, null, object, ova, preallocate, qcow2, quorum, raw, rbd, remote_cache,
    repository, ssh, throttle,
};

const fn node(
    name: &'static str,
    open: fn(Options, CommonOptions, OpenContext) -> Opening,
) -> Driver {
    Driver {
        name,
        open: Open::Node(open),
    }
}

const fn format(
    name: &'static str,
    file_use: FileUse,
    open: fn(FormatOpening) -> Opening<Arc<dyn BlockDevice>>,
) -> Driver {
    let open = Open::Format(OpenFormat { file_use, open });
    Driver { name, open }
}

/// Every driver, by name.
static DRIVERS: &[Driver] = &[
    node("az", |o, c, a| Box::pin(object::open("az", o, c, a))),
    node("blkdebug", |o, c, a| Box::pin(blkdebug::open(o, c, a))),
    node("blklogwrites", |o, c, a| {
        Box::pin(blklogwrites::open(o, c, a))
    }),
    node("blkverify", |o, c, a| Box::pin(blkverify::open(o, c, a))),
    format("bochs", FileUse::Format, |opening| {
        Box::pin(foreign::open(opening))
    }),
    node("cache", |o, c, a| Box::pin(remote_cache::open(o, c, a))),
    format("cloop", FileUse::Format, |opening| {
        Box::pin(foreign::open(opening))
    }),
    node("compress", |o, c, a| Box::pin(compress::open(o, c, a))),
    node("copy-before-write", |o, c, a| {
        Box::pin(copy_before_write::open(o, c, a))
    }),
    node("copy-on-read", |o, c, a| {
        Box::pin(copy_on_read::open(o, c, a))
    }),
    format("dmg", FileUse::Format, |opening| {
        Box::pin(foreign::open(opening))
    }),
    node("file", |o, c, a| Box::pin(file::open("file", o, c, a))),
    node("gs", |o, c, a| Box::pin(object::open("gs", o, c, a))),
    node("host_cdrom", |o, c, a| {
        Box::pin(file::open("host_cdrom", o, c, a))
    }),
    node("host_device", |o, c, a| {
        Box::pin(file::open("host_device", o, c, a))
    }),
    node("http", |o, c, a| Box::pin(http::open("http", o, c, a))),
    node("https", |o, c, a| Box::pin(http::open("https", o, c, a))),
    format("luks", FileUse::Format, |opening| {
        Box::pin(luks::open(opening))
    }),
    node("nbd", |o, c, a| Box::pin(nbd::open(o, c, a))),
    node("null-aio", |o, c, a| {
        Box::pin(null::open("null-aio", o, c, a))
    }),
    node("null-co", |o, c, a| {
        Box::pin(null::open("null-co", o, c, a))
    }),
    node("ova", |o, c, a| Box::pin(ova::open(o, c, a))),
    format("parallels", FileUse::Format, |opening| {
        Box::pin(foreign::open(opening))
    }),
    node("preallocate", |o, c, a| {
        Box::pin(preallocate::open(o, c, a))
    }),
    format("qcow", FileUse::Format, |opening| {
        Box::pin(foreign::open(opening))
    }),
    format("qcow2", FileUse::Format, |opening| {
        Box::pin(qcow2::open(opening))
    }),
    format("qed", FileUse::Format, |opening| {
        Box::pin(foreign::open(opening))
    }),
    node("quorum", |o, c, a| Box::pin(quorum::open(o, c, a))),
    format("raw", FileUse::Raw, |opening| Box::pin(raw::open(opening))),
    node("rbd", |o, c, a| Box::pin(rbd::open("rbd", o, c, a))),
    node("repository", |o, c, a| Box::pin(repository::open(o, c, a))),
    node("s3", |o, c, a| Box::pin(object::open("s3", o, c, a))),
    node("snapshot-access", |o, c, a| {
        Box::pin(copy_before_write::open_snapshot(o, c, a))
    }),
    node("ssh", |o, c, a| Box::pin(ssh::open("ssh", o, c, a))),
    node("throttle", |o, c, a| Box::pin(throttle::open(o, c, a))),
    format("vdi", FileUse::Format, |opening| {
        Box::pin(foreign::open(opening))
    }),
    format("vhdx", FileUse::Format, |opening| {
        Box::pin(foreign::open(opening))
    }),
    format("vmdk", FileUse::Format, |opening| {
        Box::pin(foreign::open(opening))
    }),
    format("vpc", FileUse::Format, |opening| {
        Box::pin(foreign::open(opening))
    }),
];

/// All drivers.
pub(crate) fn all() -> DriverTable {
    DriverTable(DRIVERS)
}

/// The names of all drivers, sorted.
pub fn driver_names() -> Vec<&'static str> {
    DRIVERS.iter().map(|driver| driver.name).collect()
}

#[cfg(test)]
mod tests {
    use vellum_options::spec::PROTOCOLS;

    use super::*;

    #[test]
    fn the_table_is_sorted_and_finds_its_drivers() {
        assert!(DRIVERS.is_sorted_by(|a, b| a.name < b.name));
        assert_eq!(all().find("null-co").unwrap().name, "null-co");
        for protocol in PROTOCOLS {
            assert!(all().find(protocol).is_ok(), "{protocol}");
        }
        let error = all().find("nothing").unwrap_err();
        assert_eq!(error.message(), "Unknown driver 'nothing'");
    }
}

//! The drivers that nodes may name: one line each in `DRIVERS`, one file each for
//! what their options mean. A new driver (a format, a protocol, a filter) is a file
//! here and a line there.
//!
//! A driver takes its own options out of the ones it is given, opens its children
//! (`graph::child`), refuses what is left over, and says what it has made.

mod blkdebug;
mod blklogwrites;
mod blkverify;
mod compress;
pub mod copy_before_write;
mod copy_on_read;
mod file;
#[cfg(feature = "remote")]
mod http;
pub(crate) mod luks;
mod names;
mod nbd;
#[cfg(not(all(feature = "rbd", feature = "remote", feature = "s3", feature = "ssh")))]
mod no_remote;
mod null;
#[cfg(feature = "s3")]
mod object;
mod ova;
mod preallocate;
mod quorum;
#[cfg(feature = "rbd")]
mod rbd;
#[cfg(feature = "remote")]
mod remote_cache;
#[cfg(not(feature = "remote"))]
#[path = "no_remote_cache.rs"]
mod remote_cache;
mod repository;
#[cfg(feature = "remote")]
mod server_options;
#[cfg(feature = "ssh")]
mod ssh;
mod throttle;

use std::future::Future;
use std::os::unix::fs::FileTypeExt;
use std::pin::Pin;

use vellum::Result;
use vellum_options::Options;

use crate::file_node::{self, CommonOptions};
use crate::graph::{OpenContext, OpenedNode};
use crate::open::{Format, open_format};
pub use names::option_names;
#[cfg(not(feature = "remote"))]
use no_remote as http;
#[cfg(not(feature = "s3"))]
use no_remote as object;
#[cfg(not(feature = "rbd"))]
use no_remote as rbd;
#[cfg(not(feature = "ssh"))]
use no_remote as ssh;
#[cfg(feature = "s3")]
pub use object::take as object_options;
#[cfg(feature = "rbd")]
pub use rbd::{create as create_rbd, remove as remove_rbd};
#[cfg(feature = "ssh")]
pub use ssh::create as create_ssh;

/// A node on its way.
pub(crate) type Opening = Pin<Box<dyn Future<Output = Result<OpenedNode>>>>;

/// Opens a node: its own options, what every node has, and what is around it.
pub(crate) type Open = fn(Options, CommonOptions, OpenContext) -> Opening;

/// A driver.
#[derive(Debug)]
pub(crate) struct Driver {
    pub(crate) name: &'static str,
    pub(crate) open: Open,
}

const fn driver(name: &'static str, open: Open) -> Driver {
    Driver { name, open }
}

/// Every driver, by name.
static DRIVERS: &[Driver] = &[
    driver("az", |o, c, a| Box::pin(object::open("az", o, c, a))),
    driver("blkdebug", |o, c, a| Box::pin(blkdebug::open(o, c, a))),
    driver("blklogwrites", |o, c, a| {
        Box::pin(blklogwrites::open(o, c, a))
    }),
    driver("blkverify", |o, c, a| Box::pin(blkverify::open(o, c, a))),
    driver("bochs", |o, c, a| Box::pin(foreign("bochs", o, c, a))),
    driver("cache", |o, c, a| Box::pin(remote_cache::open(o, c, a))),
    driver("cloop", |o, c, a| Box::pin(foreign("cloop", o, c, a))),
    driver("compress", |o, c, a| Box::pin(compress::open(o, c, a))),
    driver("copy-before-write", |o, c, a| {
        Box::pin(copy_before_write::open(o, c, a))
    }),
    driver("copy-on-read", |o, c, a| {
        Box::pin(copy_on_read::open(o, c, a))
    }),
    driver("dmg", |o, c, a| Box::pin(foreign("dmg", o, c, a))),
    driver("file", |o, c, a| Box::pin(file::open("file", o, c, a))),
    driver("gs", |o, c, a| Box::pin(object::open("gs", o, c, a))),
    driver("host_cdrom", |o, c, a| {
        Box::pin(file::open("host_cdrom", o, c, a))
    }),
    driver("host_device", |o, c, a| {
        Box::pin(file::open("host_device", o, c, a))
    }),
    driver("http", |o, c, a| Box::pin(http::open("http", o, c, a))),
    driver("https", |o, c, a| Box::pin(http::open("https", o, c, a))),
    driver("luks", |o, c, a| {
        Box::pin(open_format(Some(Format::Luks), o, c, a))
    }),
    driver("nbd", |o, c, a| Box::pin(nbd::open(o, c, a))),
    driver("null-aio", |o, c, a| {
        Box::pin(null::open("null-aio", o, c, a))
    }),
    driver("null-co", |o, c, a| {
        Box::pin(null::open("null-co", o, c, a))
    }),
    driver("ova", |o, c, a| Box::pin(ova::open(o, c, a))),
    driver("parallels", |o, c, a| {
        Box::pin(foreign("parallels", o, c, a))
    }),
    driver("preallocate", |o, c, a| {
        Box::pin(preallocate::open(o, c, a))
    }),
    driver("qcow", |o, c, a| Box::pin(foreign("qcow", o, c, a))),
    driver("qcow2", |o, c, a| {
        Box::pin(open_format(Some(Format::Qcow2), o, c, a))
    }),
    driver("qed", |o, c, a| Box::pin(foreign("qed", o, c, a))),
    driver("quorum", |o, c, a| Box::pin(quorum::open(o, c, a))),
    driver("raw", |o, c, a| {
        Box::pin(open_format(Some(Format::Raw { probed: false }), o, c, a))
    }),
    driver("rbd", |o, c, a| Box::pin(rbd::open("rbd", o, c, a))),
    driver("repository", |o, c, a| Box::pin(repository::open(o, c, a))),
    driver("s3", |o, c, a| Box::pin(object::open("s3", o, c, a))),
    driver("snapshot-access", |o, c, a| {
        Box::pin(copy_before_write::open_snapshot(o, c, a))
    }),
    driver("ssh", |o, c, a| Box::pin(ssh::open("ssh", o, c, a))),
    driver("throttle", |o, c, a| Box::pin(throttle::open(o, c, a))),
    driver("vdi", |o, c, a| Box::pin(foreign("vdi", o, c, a))),
    driver("vhdx", |o, c, a| Box::pin(foreign("vhdx", o, c, a))),
    driver("vmdk", |o, c, a| Box::pin(foreign("vmdk", o, c, a))),
    driver("vpc", |o, c, a| Box::pin(foreign("vpc", o, c, a))),
];

/// Opens an image of a format of other programs.
async fn foreign(
    name: &'static str,
    options: Options,
    common: CommonOptions,
    around: OpenContext,
) -> Result<OpenedNode> {
    open_format(Some(Format::named(name)?), options, common, around).await
}

/// The names of all drivers, sorted.
pub fn driver_names() -> Vec<&'static str> {
    DRIVERS.iter().map(|driver| driver.name).collect()
}

/// The driver of a name.
pub(crate) fn find(name: &str) -> Result<&'static Driver> {
    let found = DRIVERS.iter().find(|driver| driver.name == name);
    found.ok_or_else(|| file_node::unknown_driver(name))
}

/// The driver of a file that is named without one: devices have their own.
pub(crate) fn of_file(name: Option<&str>) -> Result<&'static Driver> {
    let kind = name.and_then(|name| std::fs::metadata(name).ok());
    let kind = kind.map(|metadata| metadata.file_type());
    match kind.is_some_and(|kind| kind.is_block_device() || kind.is_char_device()) {
        true => find("host_device"),
        false => find("file"),
    }
}

#[cfg(test)]
mod tests {
    use vellum_options::spec::PROTOCOLS;

    use super::*;

    #[test]
    fn the_table_is_sorted_and_finds_its_drivers() {
        assert!(DRIVERS.is_sorted_by(|a, b| a.name < b.name));
        assert_eq!(find("null-co").unwrap().name, "null-co");
        for protocol in PROTOCOLS {
            assert!(find(protocol).is_ok(), "{protocol}");
        }
        let error = find("nothing").unwrap_err();
        assert_eq!(error.message(), "Unknown driver 'nothing'");
    }
}

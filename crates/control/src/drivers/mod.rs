//! The drivers that nodes may name: one line each in [`DRIVERS`], one file each for
//! what their options mean. A new driver (a format, a protocol, a filter) is a file
//! here and a line there.
//!
//! A driver takes its own options out of the ones it is given, opens its children
//! ([`crate::graph::child`]), refuses what is left over, and says what it has made.

mod blkdebug;
mod blklogwrites;
mod blkverify;
mod compress;
pub(crate) mod copy_before_write;
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

use crate::file_node::{self, CommonOptions};
use crate::graph::{OpenContext, OpenedNode};
use crate::open::{Format, open_format};
use crate::options::Options;
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
pub(crate) use object::take as object_options;
#[cfg(feature = "rbd")]
pub(crate) use rbd::{create as create_rbd, remove as remove_rbd};
#[cfg(feature = "ssh")]
pub(crate) use ssh::create as create_ssh;

/// A node on its way.
pub(crate) type Opening = Pin<Box<dyn Future<Output = Result<OpenedNode>>>>;

/// Opens a node: its own options, what every node has, and what is around it.
pub(crate) type Open = fn(Options, CommonOptions, OpenContext) -> Opening;

/// A driver.
#[derive(Debug)]
pub(crate) struct Driver {
    pub(crate) name: &'static str,
    /// Whether it stands where QEMU wants a protocol, and on no file of its own.
    pub(crate) protocol: bool,
    pub(crate) open: Open,
}

const fn format(name: &'static str, open: Open) -> Driver {
    Driver {
        name,
        protocol: false,
        open,
    }
}

const fn protocol(name: &'static str, open: Open) -> Driver {
    Driver {
        name,
        protocol: true,
        open,
    }
}

/// Every driver, by name.
static DRIVERS: &[Driver] = &[
    protocol("az", |o, c, a| Box::pin(object::open("az", o, c, a))),
    protocol("blkdebug", |o, c, a| Box::pin(blkdebug::open(o, c, a))),
    protocol("blklogwrites", |o, c, a| {
        Box::pin(blklogwrites::open(o, c, a))
    }),
    protocol("blkverify", |o, c, a| Box::pin(blkverify::open(o, c, a))),
    format("bochs", |o, c, a| Box::pin(foreign("bochs", o, c, a))),
    protocol("cache", |o, c, a| Box::pin(remote_cache::open(o, c, a))),
    format("cloop", |o, c, a| Box::pin(foreign("cloop", o, c, a))),
    protocol("compress", |o, c, a| Box::pin(compress::open(o, c, a))),
    protocol("copy-before-write", |o, c, a| {
        Box::pin(copy_before_write::open(o, c, a))
    }),
    protocol("copy-on-read", |o, c, a| {
        Box::pin(copy_on_read::open(o, c, a))
    }),
    format("dmg", |o, c, a| Box::pin(foreign("dmg", o, c, a))),
    protocol("file", |o, c, a| Box::pin(file::open("file", o, c, a))),
    protocol("gs", |o, c, a| Box::pin(object::open("gs", o, c, a))),
    protocol("host_cdrom", |o, c, a| {
        Box::pin(file::open("host_cdrom", o, c, a))
    }),
    protocol("host_device", |o, c, a| {
        Box::pin(file::open("host_device", o, c, a))
    }),
    protocol("http", |o, c, a| Box::pin(http::open("http", o, c, a))),
    protocol("https", |o, c, a| Box::pin(http::open("https", o, c, a))),
    format("luks", |o, c, a| {
        Box::pin(open_format(Some(Format::Luks), o, c, a))
    }),
    protocol("nbd", |o, c, a| Box::pin(nbd::open(o, c, a))),
    protocol("null-aio", |o, c, a| {
        Box::pin(null::open("null-aio", o, c, a))
    }),
    protocol("null-co", |o, c, a| {
        Box::pin(null::open("null-co", o, c, a))
    }),
    protocol("ova", |o, c, a| Box::pin(ova::open(o, c, a))),
    format("parallels", |o, c, a| {
        Box::pin(foreign("parallels", o, c, a))
    }),
    protocol("preallocate", |o, c, a| {
        Box::pin(preallocate::open(o, c, a))
    }),
    format("qcow", |o, c, a| Box::pin(foreign("qcow", o, c, a))),
    format("qcow2", |o, c, a| {
        Box::pin(open_format(Some(Format::Qcow2), o, c, a))
    }),
    format("qed", |o, c, a| Box::pin(foreign("qed", o, c, a))),
    protocol("quorum", |o, c, a| Box::pin(quorum::open(o, c, a))),
    format("raw", |o, c, a| {
        Box::pin(open_format(Some(Format::Raw { probed: false }), o, c, a))
    }),
    protocol("rbd", |o, c, a| Box::pin(rbd::open("rbd", o, c, a))),
    protocol("repository", |o, c, a| Box::pin(repository::open(o, c, a))),
    protocol("s3", |o, c, a| Box::pin(object::open("s3", o, c, a))),
    protocol("snapshot-access", |o, c, a| {
        Box::pin(copy_before_write::open_snapshot(o, c, a))
    }),
    protocol("ssh", |o, c, a| Box::pin(ssh::open("ssh", o, c, a))),
    protocol("throttle", |o, c, a| Box::pin(throttle::open(o, c, a))),
    format("vdi", |o, c, a| Box::pin(foreign("vdi", o, c, a))),
    format("vhdx", |o, c, a| Box::pin(foreign("vhdx", o, c, a))),
    format("vmdk", |o, c, a| Box::pin(foreign("vmdk", o, c, a))),
    format("vpc", |o, c, a| Box::pin(foreign("vpc", o, c, a))),
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

/// Whether there is a driver of this name that needs no file below it.
pub fn is_protocol(name: &str) -> bool {
    find(name).is_ok_and(|driver| driver.protocol)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sorted_and_finds_its_drivers() {
        assert!(DRIVERS.is_sorted_by(|a, b| a.name < b.name));
        assert_eq!(find("null-co").unwrap().name, "null-co");
        assert!(is_protocol("file") && !is_protocol("qcow2") && !is_protocol("nothing"));
        let error = find("nothing").unwrap_err();
        assert_eq!(error.message(), "Unknown driver 'nothing'");
    }
}

//! The table of drivers: one line each, and one file each beside this one for what their options mean. A new driver
//! (a format, a protocol, a filter) is a file there and a line here.
//!
//! A protocol or a filter takes its own options out of the ones that it is given, opens its children
//! ([`crate::open::node`]), refuses what is left over, and says what it has made. A format is given its file.

use std::sync::Arc;

use vellum::BlockDevice;
use vellum_options::Options;

use crate::merged_options;
use crate::node::driver::{DriverFacts, NamingKind};
use crate::node::file_node::{CommonOptions, FileUse};
use crate::open::context::{
    Driver, DriverTable, FormatOpening, Open, OpenContext, OpenFormat, Opening,
};

use super::foreign::{self, ForeignFormat};
use super::{
    blkdebug, blklogwrites, blkverify, compress, copy_before_write, copy_on_read, file, http, luks,
    nbd, null, object, ova, preallocate, qcow2, quorum, raw, rbd, remote_cache, repository, ssh,
    throttle,
};

const fn node(
    facts: DriverFacts,
    open: fn(Options, CommonOptions, OpenContext) -> Opening,
) -> Driver {
    Driver {
        facts,
        open: Open::Node(open),
    }
}

const fn format(
    facts: DriverFacts,
    file_use: FileUse,
    open: fn(FormatOpening) -> Opening<Arc<dyn BlockDevice>>,
) -> Driver {
    let open = Open::Format(OpenFormat { file_use, open });
    Driver { facts, open }
}

/// A format of other programs.
const fn foreign_format(format: &'static ForeignFormat) -> Driver {
    let facts = DriverFacts {
        options: format.options,
        has_backing: format.has_backing,
        ..DriverFacts::named(format.name).with_naming(NamingKind::Format, format.options, &["file"])
    };
    self::format(facts, FileUse::Format, |opening| {
        Box::pin(foreign::open(opening))
    })
}

/// Every driver, by name.
static DRIVERS: &[Driver] = &[
    node(object::FACTS.called("az"), |o, c, a| {
        Box::pin(object::open("az", o, c, a))
    }),
    node(blkdebug::FACTS, |o, c, a| Box::pin(blkdebug::open(o, c, a))),
    node(blklogwrites::FACTS, |o, c, a| {
        Box::pin(blklogwrites::open(o, c, a))
    }),
    node(blkverify::FACTS, |o, c, a| {
        Box::pin(blkverify::open(o, c, a))
    }),
    foreign_format(&foreign::BOCHS),
    node(remote_cache::FACTS, |o, c, a| {
        Box::pin(remote_cache::open(o, c, a))
    }),
    foreign_format(&foreign::CLOOP),
    node(compress::FACTS, |o, c, a| Box::pin(compress::open(o, c, a))),
    node(copy_before_write::FACTS, |o, c, a| {
        Box::pin(copy_before_write::open(o, c, a))
    }),
    node(copy_on_read::FACTS, |o, c, a| {
        Box::pin(copy_on_read::open(o, c, a))
    }),
    foreign_format(&foreign::DMG),
    node(file::FACTS.called("file"), |o, c, a| {
        Box::pin(file::open("file", o, c, a))
    }),
    node(object::FACTS.called("gs"), |o, c, a| {
        Box::pin(object::open("gs", o, c, a))
    }),
    node(file::FACTS.called("host_cdrom"), |o, c, a| {
        Box::pin(file::open("host_cdrom", o, c, a))
    }),
    node(file::FACTS.called("host_device"), |o, c, a| {
        Box::pin(file::open("host_device", o, c, a))
    }),
    node(http::FACTS.called("http"), |o, c, a| {
        Box::pin(http::open("http", o, c, a))
    }),
    node(http::FACTS.called("https"), |o, c, a| {
        Box::pin(http::open("https", o, c, a))
    }),
    format(luks::FACTS, FileUse::Format, |opening| {
        Box::pin(luks::open(opening))
    }),
    node(nbd::FACTS, |o, c, a| Box::pin(nbd::open(o, c, a))),
    node(null::FACTS.called("null-aio"), |o, c, a| {
        Box::pin(null::open("null-aio", o, c, a))
    }),
    node(null::FACTS.called("null-co"), |o, c, a| {
        Box::pin(null::open("null-co", o, c, a))
    }),
    node(ova::FACTS, |o, c, a| Box::pin(ova::open(o, c, a))),
    foreign_format(&foreign::PARALLELS),
    node(preallocate::FACTS, |o, c, a| {
        Box::pin(preallocate::open(o, c, a))
    }),
    foreign_format(&foreign::QCOW),
    format(qcow2::FACTS, FileUse::Format, |opening| {
        Box::pin(qcow2::open(opening))
    }),
    foreign_format(&foreign::QED),
    node(quorum::FACTS, |o, c, a| Box::pin(quorum::open(o, c, a))),
    format(raw::FACTS, FileUse::Raw, |opening| {
        Box::pin(raw::open(opening))
    }),
    node(rbd::FACTS.called("rbd"), |o, c, a| {
        Box::pin(rbd::open("rbd", o, c, a))
    }),
    node(repository::FACTS, |o, c, a| {
        Box::pin(repository::open(o, c, a))
    }),
    node(object::FACTS.called("s3"), |o, c, a| {
        Box::pin(object::open("s3", o, c, a))
    }),
    node(copy_before_write::SNAPSHOT_FACTS, |o, c, a| {
        Box::pin(copy_before_write::open_snapshot(o, c, a))
    }),
    node(ssh::FACTS.called("ssh"), |o, c, a| {
        Box::pin(ssh::open("ssh", o, c, a))
    }),
    node(throttle::FACTS, |o, c, a| Box::pin(throttle::open(o, c, a))),
    foreign_format(&foreign::VDI),
    foreign_format(&foreign::VHDX),
    foreign_format(&foreign::VMDK),
    foreign_format(&foreign::VPC),
];

/// All drivers.
pub(crate) fn all() -> DriverTable {
    DriverTable(DRIVERS)
}

/// The names of all drivers, sorted.
pub fn driver_names() -> Vec<&'static str> {
    DRIVERS.iter().map(|driver| driver.facts.name).collect()
}

/// What there is to know of the driver of a name.
pub fn facts(name: &str) -> Option<DriverFacts> {
    all().find(name).ok().map(|driver| driver.facts)
}

/// The names of all options that a node of a driver takes, for whoever mistypes one. What they mean, and what
/// else is wrong with them, only the drivers know.
pub fn option_names(driver: &str) -> impl Iterator<Item = &'static str> {
    let own = facts(driver).map_or(&[][..], |facts| facts.options);
    let own = own.iter().copied().flatten().copied();
    let own = own.filter(|name| !name.ends_with('.'));
    let common = ["driver", "node-name", "file", "backing"];
    common.into_iter().chain(own).chain(merged_options::COMMON)
}

#[cfg(test)]
mod tests {
    use vellum::qcow2::create::CreateOptions;
    use vellum_io::lane;
    use vellum_options::spec::PROTOCOLS;
    use vellum_options::{ImageSpec, OpenFlags};

    use crate::open_device;
    use crate::testing::make_image;

    use super::*;

    #[test]
    fn the_table_is_sorted_and_finds_its_drivers() {
        assert!(DRIVERS.is_sorted_by(|a, b| a.facts.name < b.facts.name));
        assert_eq!(all().find("null-co").unwrap().facts.name, "null-co");
        for protocol in PROTOCOLS {
            assert!(all().find(protocol).is_ok(), "{protocol}");
        }
        let error = all().find("nothing").unwrap_err();
        assert_eq!(error.message(), "Unknown driver 'nothing'");
    }

    #[test]
    fn every_driver_says_what_may_change_among_its_options() {
        for Driver { facts, .. } in DRIVERS {
            let is_known = |name: &str| {
                let mut lists = facts.options.iter();
                lists.any(|list| list.contains(&name)) || name == "x-check-cache-dropped"
            };
            for name in facts.changeable {
                assert!(is_known(name), "{}: {name}", facts.name);
                assert!(facts.is_reopened, "{}: {name}", facts.name);
            }
            assert!(!facts.has_past || facts.is_filter, "{}", facts.name);
        }
    }

    /// What opening a node with one more option is refused with, if it is.
    fn refusal(driver: &str, file: &str, key: &str) -> Option<String> {
        let text = match driver {
            "null-co" => format!("driver=null-co,{key}=1"),
            "file" => format!("driver=file,filename={file},{key}=1"),
            "blkdebug" => format!("driver=blkdebug,image.filename={file},{key}=1"),
            _ => format!("driver={driver},file.filename={file},{key}=1"),
        };
        let spec = ImageSpec::image_opts(&text).unwrap();
        let opened = lane::block_on(open_device(&spec, &OpenFlags::default()));
        opened.err().map(|error| vellum_options::error_text(&error))
    }

    #[test]
    fn every_name_is_one_that_its_driver_takes() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("image").display().to_string();
        let options = CreateOptions::default().size_bytes(1 << 20);
        lane::block_on(make_image(&file, &options));
        for driver in [
            "blkdebug",
            "copy-on-read",
            "file",
            "null-co",
            "preallocate",
            "qcow2",
            "raw",
        ] {
            let unknown = refusal(driver, &file, "nonsense").unwrap();
            assert!(
                unknown.contains("support the option 'nonsense'"),
                "{unknown}"
            );
            let skipped = ["driver", "file", "filename", "backing", "config"];
            for name in option_names(driver).filter(|name| !skipped.contains(name)) {
                let refused = refusal(driver, &file, name).unwrap_or_default();
                assert!(
                    !refused.contains("support the option"),
                    "{driver}: {refused}"
                );
            }
        }
    }
}

//! `cache`: what was read of a file on another machine stays on this host.

use std::time::Duration;

use vellum::{Error, ErrorKind, Result};
use vellum_options::{Options, url_name};
use vellum_remote::{CacheOptions, CacheStorage};

use crate::node::driver::{DriverFacts, NamingKind};
use crate::node::errors::{invalid, refuse_unknown};
use crate::node::file_node::CommonOptions;
use crate::node::opened::OpenedNode;
use crate::node::origin::Role;
use crate::open::context::OpenContext;
use crate::open::node::child;
use crate::stderr;

/// The driver.
pub(super) const FACTS: DriverFacts = DriverFacts {
    options: &[&[
        "directory",
        "limit",
        "readahead",
        "outage",
        "prefetch",
        "prefetch-speed",
        "record-trace",
        "trace",
        "version",
    ]],

    ..DriverFacts::named("cache").with_naming(
        NamingKind::Filter,
        &[&[
            "directory",
            "limit",
            "outage",
            "prefetch",
            "prefetch-speed",
            "readahead",
            "trace",
            "version",
        ]],
        &["file"],
    )
};

/// What is in the memory of a child whose bytes go to the cache at once.
const CHILD_KEEP_BYTES: &str = "2097152";

const NO_VERSION: &str = "the server does not tell versions of the file apart (no strong entity tag, and no time or one of a few \
     seconds ago, within which the file may change unnoticed): try again in some seconds, or name this version with \
     'version', and use another name when the file is another one";
const NO_SNAPSHOT: &str = "an image on Ceph may change at any time, and only its snapshots do not: cache one \
     (rbd:POOL/IMAGE@SNAPSHOT), or name this version with 'version', and use another name when the \
     image is another one";

pub(super) async fn open(
    mut options: Options,
    common: CommonOptions,
    around: OpenContext,
) -> Result<OpenedNode> {
    if common.writable {
        return Err(invalid(
            "a cache of a file on another machine is read-only; make an overlay on it, and write to \
             that",
        ));
    }
    let cache = take(&mut options)?;
    let version = options.take_text("version")?;
    let mut file = options.take_group("file");
    let source = source_of(&file);
    let is_ceph = file.get_text("driver") == Some("rbd");
    have_child_keep_little(&mut file);
    options.set_group("file", file);
    let opened = child(&mut options, "file", Role::Protocol, &around).await;
    refuse_unknown(&options, "cache")?;
    let opened = match (opened, &source) {
        (Ok(opened), _) => opened,
        (Err(error), Some((source, name))) if is_outage(&error) => {
            return alone(source, version.as_deref(), name, cache, error).await;
        }
        (Err(error), _) => return Err(error),
    };
    let below = opened.storage();
    let source = source.map_or_else(|| below.name().to_owned(), |(source, _)| source);
    let Some(version) = version.or_else(|| below.version().known()) else {
        return Err(invalid(match is_ceph {
            true => NO_SNAPSHOT,
            false => NO_VERSION,
        }));
    };
    let notice = cache.notice;
    match CacheStorage::open(&source, &version, below.clone(), cache).await {
        Ok(storage) => Ok(opened.filter(FACTS, storage)),
        // A disk is not to stand still for want of a cache.
        Err(error) if error.kind() == ErrorKind::NoSpace => {
            notice(&format!("'{}': not cached: {error}", below.name()));
            Ok(opened.filter(FACTS, below))
        }
        Err(error) => Err(error),
    }
}

fn take(options: &mut Options) -> Result<CacheOptions> {
    let Some(directory) = options.take_text("directory")? else {
        return Err(invalid(
            "cache driver requires a 'directory' option: a folder that is this user's alone",
        ));
    };
    let mut cache = CacheOptions::new(directory);
    cache.limit_bytes = options.take_size("limit")?;
    if let Some(bytes) = options.take_size("readahead")? {
        cache.readahead_bytes = bytes;
    }
    if let Some(seconds) = options.take_number("outage")? {
        cache.outage = Duration::from_secs(seconds);
    }
    cache.prefetch = options.take_bool("prefetch")?.unwrap_or_default();
    cache.prefetch_bytes_per_second = options.take_size("prefetch-speed")?;
    cache.record_trace = options.take_bool("record-trace")?.unwrap_or_default();
    cache.trace = options.take_text("trace")?.map(Into::into);
    cache.notice = stderr::print_line;
    Ok(cache)
}

/// Which file a child is, in words that stay the same, and its name; `None` for a node that is there
/// already.
fn source_of(file: &Options) -> Option<(String, String)> {
    let driver = file.get_text("driver")?;
    let name = file.get_text("url").or(file.get_text("filename"));
    let name = name.unwrap_or(driver).to_owned();
    if !url_name::is_scheme(driver) {
        return Some((file.to_json().to_string(), name));
    }
    // Who asks, and how, does not change what is there.
    let named = ["driver", "url", "endpoint"];
    let mut words = Options::new();
    for key in named {
        if let Some(text) = file.get_text(key) {
            words.set_text(key, text);
        }
    }
    Some((words.to_json().to_string(), name))
}

fn have_child_keep_little(file: &mut Options) {
    let is_remote = file.get_text("driver").is_some_and(url_name::is_scheme);
    if !is_remote {
        return;
    }
    for (key, value) in [("readahead", "0"), ("keep-size", CHILD_KEEP_BYTES)] {
        if !file.contains(key) {
            file.set_text(key, value);
        }
    }
}

fn is_outage(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Io | ErrorKind::Protocol)
}

/// The cache without its server, if it holds all of the file: the version that was asked for, or was used
/// last. An overlay may have been made on that one, and is damaged on any other.
async fn alone(
    source: &str,
    version: Option<&str>,
    name: &str,
    cache: CacheOptions,
    error: Error,
) -> Result<OpenedNode> {
    let found = CacheStorage::find_whole(&cache.directory, source, version);
    let Some(found) = found.await else {
        return Err(error);
    };
    (cache.notice)(&format!(
        "'{name}': the server cannot be reached ({}); all of the file is in the cache, as it was \
         there last",
        vellum_options::error_text(&error)
    ));
    let storage = CacheStorage::open_alone(source, &found, name, cache).await?;
    Ok(OpenedNode::remote(FACTS, storage))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_is_named_by_where_it_is() {
        let source = |text: &str| source_of(&Options::parse(text).unwrap()).map(|both| both.0);
        let one = source("driver=https,url=https://h/x,timeout=7,username=me");
        assert_eq!(one, source("driver=https,url=https://h/x"));
        assert_ne!(one, source("driver=https,url=https://h/y"));
        assert_ne!(
            source("driver=s3,url=s3://b/k,endpoint=http://one"),
            source("driver=s3,url=s3://b/k,endpoint=http://two")
        );
        assert_eq!(source("node-name=x"), None);
    }
}

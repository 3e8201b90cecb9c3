//! `ssh`: files on other machines, by the system's `ssh`.

use std::sync::Arc;

use vellum::{Result, Storage};
use vellum_options::{Options, Scalar, ssh_name};
use vellum_remote::{HashKind, HostKeyCheck, SshOptions, SshStorage};

use crate::node::driver::DriverFacts;
use crate::node::errors::{invalid, refuse_unknown};
use crate::node::file_node::CommonOptions;
use crate::node::opened::OpenedNode;
use crate::open::context::OpenContext;
use crate::stderr;

use super::server_options::{refuse_left, take_timeout};

/// The driver.
pub(super) const FACTS: DriverFacts = DriverFacts {
    options: &[&[
        "server.host",
        "server.port",
        "path",
        "user",
        "host",
        "port",
        "host-key-check.mode",
        "host-key-check.type",
        "host-key-check.hash",
        "host_key_check",
        "timeout",
    ]],

    ..DriverFacts::named("ssh")
};

const DRIVER: &str = "ssh";

pub(super) async fn open(
    _driver: &'static str,
    mut options: Options,
    common: CommonOptions,
    _around: OpenContext,
) -> Result<OpenedNode> {
    let mut file = take(&mut options)?;
    refuse_unknown(&options, DRIVER)?;
    file.writable = common.writable;
    let storage = SshStorage::open(file).await?;
    Ok(OpenedNode {
        writable: common.writable,
        ..OpenedNode::remote(FACTS, storage)
    })
}

/// Makes a file, or empties one that is there, and opens it.
///
/// # Errors
/// If an option is wrong or unknown, or the server refuses.
pub async fn create(mut options: Options) -> Result<Arc<dyn Storage>> {
    options.take("driver");
    let mut file = take(&mut options)?;
    refuse_unknown(&options, DRIVER)?;
    file.writable = true;
    file.create = true;
    Ok(SshStorage::open(file).await?)
}

/// The file that options describe; takes them.
fn take(options: &mut Options) -> Result<SshOptions> {
    take_filename(options)?;
    let name = ssh_name::name_of(options).0;
    let mut server = options.take_group("server");
    let (old_host, old_port) = (options.take_text("host")?, take_port(options)?);
    let has_old = old_host.is_some() || old_port.is_some();
    if has_old && !server.is_empty() {
        return Err(invalid(
            "Cannot use 'server' and host/port at the same time",
        ));
    }
    let host = server.take_text("host")?.or(old_host);
    let Some(host) = host.filter(|host| !host.is_empty()) else {
        return Err(invalid("No hostname was specified"));
    };
    let port = take_port(&mut server)?.or(old_port);
    for accepted in [
        "type",
        "ipv4",
        "ipv6",
        "numeric",
        "keep-alive",
        "mptcp",
        "to",
    ] {
        server.take(accepted);
    }
    refuse_left(&server, "server")?;
    let Some(path) = options.take_text("path")? else {
        return Err(invalid("Parameter 'path' is missing"));
    };
    let mut file = SshOptions::new(host, path);
    file.name = name.unwrap_or(file.name);
    file.port = port;
    file.user = options.take_text("user")?;
    file.host_key_check = take_check(options)?;
    file.timeout = take_timeout(options)?.unwrap_or(file.timeout);
    file.notice = stderr::print_line;
    Ok(file)
}

/// Takes a name for the options that it stands for.
fn take_filename(options: &mut Options) -> Result<()> {
    let Some(filename) = options.take_text("filename")? else {
        return Ok(());
    };
    let conflict = |key: &str| {
        matches!(key, "host" | "port" | "path" | "user" | "host_key_check")
            || key.starts_with("server.")
    };
    if let Some(key) = options.keys().find(|key| conflict(key)) {
        return Err(invalid(format!(
            "Option '{key}' cannot be used with a file name"
        )));
    }
    for (key, value) in ssh_name::options(&filename)?.iter() {
        if key != "driver" {
            options.set(key, value.clone());
        }
    }
    Ok(())
}

fn take_port(options: &mut Options) -> Result<Option<u16>> {
    let text = match options.take("port") {
        None => return Ok(None),
        Some(Scalar::Text(text)) => text,
        Some(Scalar::Number(number)) => number.to_string(),
        Some(_) => String::new(),
    };
    let port = text.parse().ok().filter(|&port| port > 0);
    port.map(Some)
        .ok_or_else(|| invalid("Use only numeric port value"))
}

fn take_check(options: &mut Options) -> Result<HostKeyCheck> {
    let old = options.take_text("host_key_check")?;
    let mut group = options.take_group("host-key-check");
    let mode = group.take_text("mode")?;
    let (kind, hash) = (group.take_text("type")?, group.take_text("hash")?);
    refuse_left(&group, "host-key-check")?;
    if mode.is_none() {
        return old.map_or(Ok(HostKeyCheck::KnownHosts), |old| parse_check(&old));
    }
    match (mode.as_deref(), kind.as_deref(), hash) {
        (Some("none"), None, None) => Ok(HostKeyCheck::None),
        (Some("known_hosts"), None, None) => Ok(HostKeyCheck::KnownHosts),
        (Some("hash"), Some(kind), Some(hash)) => match hash_kind(kind) {
            Some(kind) => Ok(HostKeyCheck::Hash(kind, hash)),
            None => Err(invalid(format!(
                "Parameter 'host-key-check.type' does not accept value '{kind}'"
            ))),
        },
        (Some("hash"), None, _) => Err(invalid("Parameter 'host-key-check.type' is missing")),
        (Some("hash"), ..) => Err(invalid("Parameter 'host-key-check.hash' is missing")),
        (Some("none" | "known_hosts"), ..) => {
            Err(invalid("Parameter 'host-key-check.hash' is unexpected"))
        }
        (mode, ..) => {
            let mode = mode.unwrap_or_default();
            Err(invalid(format!(
                "Parameter 'host-key-check.mode' does not accept value '{mode}'"
            )))
        }
    }
}

fn hash_kind(name: &str) -> Option<HashKind> {
    match name {
        "md5" => Some(HashKind::Md5),
        "sha1" => Some(HashKind::Sha1),
        "sha256" => Some(HashKind::Sha256),
        _ => None,
    }
}

/// The older way to say it.
fn parse_check(text: &str) -> Result<HostKeyCheck> {
    let hash = text.split_once(':');
    match (
        text,
        hash.and_then(|(kind, hash)| Some((hash_kind(kind)?, hash))),
    ) {
        ("no", _) => Ok(HostKeyCheck::None),
        ("yes", _) => Ok(HostKeyCheck::KnownHosts),
        (_, Some((kind, hash))) => Ok(HostKeyCheck::Hash(kind, hash.to_owned())),
        _ => Err(invalid(format!("unknown host_key_check setting ({text})"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(text: &str) -> std::result::Result<SshOptions, String> {
        let mut options = Options::parse(text).unwrap();
        take(&mut options).map_err(|error| error.message().to_owned())
    }

    #[test]
    fn files_are_told_in_many_ways() {
        for text in [
            "filename=ssh://me@h:7/x?host_key_check=md5:aa",
            "host=h,port=7,path=/x,user=me,host_key_check=md5:aa",
            "server.host=h,server.port=7,path=/x,user=me,host-key-check.mode=hash,\
             host-key-check.type=md5,host-key-check.hash=aa",
        ] {
            let file = taken(text).unwrap();
            assert_eq!((&*file.host, file.port, &*file.path), ("h", Some(7), "/x"));
            assert_eq!(file.user.as_deref(), Some("me"));
            let check = HostKeyCheck::Hash(HashKind::Md5, "aa".to_owned());
            assert_eq!(file.host_key_check, check);
            assert_eq!(file.name, "ssh://me@h:7/x?host_key_check=md5:aa");
        }
        let file = taken("host=h,path=/x,timeout=3").unwrap();
        assert_eq!(file.host_key_check, HostKeyCheck::KnownHosts);
        assert_eq!(file.timeout.as_secs(), 3);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for (text, message) in [
            ("path=/x", "No hostname was specified"),
            ("host=h", "Parameter 'path' is missing"),
            ("host=h,port=x,path=/x", "Use only numeric port value"),
            (
                "host=h,path=/x,host_key_check=maybe",
                "unknown host_key_check setting (maybe)",
            ),
            (
                "host=h,path=/x,host-key-check.mode=hash,host-key-check.type=md5",
                "Parameter 'host-key-check.hash' is missing",
            ),
            (
                "host=h,path=/x,server.host=i",
                "Cannot use 'server' and host/port at the same time",
            ),
        ] {
            assert_eq!(taken(text).unwrap_err(), message, "{text}");
        }
    }
}

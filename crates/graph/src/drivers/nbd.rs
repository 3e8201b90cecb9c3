//! `nbd`: another program's disk, by the Network Block Device protocol.

use std::sync::Arc;
use std::time::Duration;

use vellum::Result;
use vellum_nbd::Upgrade;
use vellum_nbd::client::{Address, ClientOptions, NbdStorage};
use vellum_nbd::proto::{self, MAX_STRING_BYTES};
use vellum_options::{Options, nbd_name};

use crate::node::driver::DriverFacts;
use crate::node::errors::{invalid, refuse_unknown};
use crate::node::file_node::CommonOptions;
use crate::node::opened::{NodeKind, OpenedNode};
use crate::open::context::OpenContext;
use crate::tls;

/// The driver.
pub(super) const FACTS: DriverFacts = DriverFacts {
    options: &[&[
        "server.type",
        "server.path",
        "server.host",
        "server.port",
        "path",
        "host",
        "port",
        "export",
        "tls-creds",
        "tls-hostname",
        "x-dirty-bitmap",
        "reconnect-delay",
        "open-timeout",
    ]],

    ..DriverFacts::named("nbd")
};

const DRIVER: &str = "nbd";

pub(super) async fn open(
    mut options: Options,
    common: CommonOptions,
    around: OpenContext,
) -> Result<OpenedNode> {
    take_filename(&mut options)?;
    let name = nbd_name::name_of(&options);
    let address = take_address(&mut options)?;
    let mut client = ClientOptions::new(name.unwrap_or_default(), address);
    client.writable = common.writable;
    if let Some(export) = options.take_text("export")? {
        if export.len() > MAX_STRING_BYTES {
            return Err(invalid("export name too long to send to server"));
        }
        client.export = export;
    }
    client.tls = take_tls(&mut options, &client.address)?;
    client.dirty_bitmap = options.take_text("x-dirty-bitmap")?;
    if client
        .dirty_bitmap
        .as_ref()
        .is_some_and(|bitmap| bitmap.len() > MAX_STRING_BYTES)
    {
        return Err(invalid("x-dirty-bitmap query too long to send to server"));
    }
    let seconds = |number: Option<u64>| Duration::from_secs(number.unwrap_or(0));
    client.reconnect_delay = seconds(take_seconds(&mut options, "reconnect-delay")?);
    client.open_timeout = seconds(take_seconds(&mut options, "open-timeout")?);
    refuse_unknown(&options, DRIVER)?;
    let storage = NbdStorage::open(client).await?;
    if common.writable && storage.session().flags & proto::FLAG_READ_ONLY != 0 {
        use vellum_storage::Storage;
        storage.close().await?;
        return Err(invalid("Could not open image: Permission denied"));
    }
    around.nodes.note_server(&storage, &around.place);
    Ok(OpenedNode {
        driver: FACTS,
        kind: NodeKind::Storage(storage),
        filtered: None,
        files: Vec::new(),
        writable: common.writable,
    })
}

/// Takes what secures the connections. What asks for security and would have no effect is
/// refused.
fn take_tls(options: &mut Options, address: &Address) -> Result<Option<Arc<dyn Upgrade>>> {
    let mut named = options.take_group(nbd_name::TLS_GROUP);
    let is_named = named.take("name").is_some();
    let hostname = options.take_text("tls-hostname")?;
    let has_hostname = hostname.is_some();
    let hostname = hostname.or_else(|| address.host().map(str::to_owned));
    match (options.take_text("tls-creds")?, is_named) {
        (Some(_), true) => Err(invalid(
            "tls-creds cannot be used with a name that begins with 'nbds'",
        )),
        (Some(id), false) => tls::client(&id, hostname).map(Some),
        (None, true) => tls::for_uri(named, hostname).map(Some),
        (None, false) if has_hostname => {
            Err(invalid("tls-hostname is not permitted without tls-creds"))
        }
        (None, false) => Ok(None),
    }
}

/// A time in seconds, as QEMU's clock can count it.
fn take_seconds(options: &mut Options, key: &str) -> Result<Option<u64>> {
    let seconds = options.take_number(key)?;
    Ok(seconds.map(|seconds| seconds.min(u64::from(u32::MAX))))
}

/// Takes a name for the options that it stands for.
fn take_filename(options: &mut Options) -> Result<()> {
    let Some(filename) = options.take_text("filename")? else {
        return Ok(());
    };
    let conflict = |key: &str| {
        matches!(key, "host" | "port" | "path" | "export") || key.starts_with("server.")
    };
    if let Some(key) = options.keys().find(|key| conflict(key)) {
        return Err(invalid(format!(
            "Option '{key}' cannot be used with a file name"
        )));
    }
    for (key, value) in nbd_name::options(&filename)?.iter() {
        if key != "driver" {
            options.set(key, value.clone());
        }
    }
    Ok(())
}

fn take_address(options: &mut Options) -> Result<Address> {
    let path = options.take_text("path")?;
    let host = options.take_text("host")?;
    let port = take_port(options, "port")?;
    let mut server = options.take_group("server");
    if (path.is_some() || host.is_some() || port.is_some()) && !server.is_empty() {
        return Err(invalid(
            "Cannot use 'server' and path/host/port at the same time",
        ));
    }
    match (path, host, port) {
        (Some(_), Some(_), _) => Err(invalid("path and host may not be used at the same time")),
        (Some(_), None, Some(_)) => Err(invalid("port may not be used without host")),
        (Some(path), None, None) => Ok(Address::Unix(path)),
        (None, Some(host), port) => tcp(host, port),
        (None, None, _) if server.is_empty() => Err(invalid("NBD server address missing")),
        (None, None, _) => take_server(&mut server),
    }
}

fn take_server(server: &mut Options) -> Result<Address> {
    let missing = |key: &str| invalid(format!("Parameter 'server.{key}' is missing"));
    let kind = server.take_text("type")?.ok_or_else(|| missing("type"))?;
    let address = match kind.as_str() {
        "unix" => Address::Unix(server.take_text("path")?.ok_or_else(|| missing("path"))?),
        "inet" => {
            let host = server.take_text("host")?.ok_or_else(|| missing("host"))?;
            let port = take_port(server, "port")?.ok_or_else(|| missing("port"))?;
            for accepted in ["ipv4", "ipv6", "numeric", "keep-alive", "mptcp", "to"] {
                server.take(accepted);
            }
            tcp(host, Some(port))?
        }
        "vsock" | "fd" => {
            return Err(invalid(format!(
                "addresses of type '{kind}' are not part of this version"
            )));
        }
        other => {
            return Err(invalid(format!(
                "Parameter 'server.type' does not accept value '{other}'"
            )));
        }
    };
    match server.keys().next() {
        None => Ok(address),
        Some(key) => Err(invalid(format!("Parameter 'server.{key}' is unexpected"))),
    }
}

/// A port, which options give as a text or a number.
fn take_port(options: &mut Options, key: &str) -> Result<Option<String>> {
    use vellum_options::Scalar;
    match options.take(key) {
        None => Ok(None),
        Some(Scalar::Text(text)) => Ok(Some(text)),
        Some(Scalar::Number(number)) => Ok(Some(number.to_string())),
        Some(_) => Err(invalid(format!(
            "Invalid parameter type for '{key}', expected: string"
        ))),
    }
}

fn tcp(host: String, port: Option<String>) -> Result<Address> {
    let port = match port {
        None => proto::DEFAULT_PORT,
        Some(text) => text.parse().map_err(|_| {
            invalid(format!(
                "address resolution failed for {host}:{text}: Servname not supported for \
                 ai_socktype"
            ))
        })?,
    };
    Ok(Address::Tcp { host, port })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> std::result::Result<Address, String> {
        let mut options = Options::parse(text).unwrap();
        take_filename(&mut options)
            .and_then(|()| take_address(&mut options))
            .map_err(|error| error.message().to_owned())
    }

    #[test]
    fn addresses_are_told_in_many_ways() {
        let unix = Ok(Address::Unix("/s".to_owned()));
        let tcp = Ok(Address::Tcp {
            host: "h".to_owned(),
            port: 5,
        });
        for text in [
            "path=/s",
            "server.type=unix,server.path=/s",
            "filename=nbd:unix:/s",
        ] {
            assert_eq!(address(text), unix, "{text}");
        }
        for text in [
            "host=h,port=5",
            "server.type=inet,server.host=h,server.port=5",
            "filename=nbd://h:5/x",
        ] {
            assert_eq!(address(text), tcp, "{text}");
        }
    }

    #[test]
    fn contradictions_are_refused_in_qemus_words() {
        for (text, message) in [
            ("export=x", "NBD server address missing"),
            (
                "path=/s,host=h",
                "path and host may not be used at the same time",
            ),
            ("path=/s,port=1", "port may not be used without host"),
            (
                "path=/s,server.type=unix",
                "Cannot use 'server' and path/host/port at the same time",
            ),
            (
                "filename=nbd:h:1,export=e",
                "Option 'export' cannot be used with a file name",
            ),
            ("server.path=/s", "Parameter 'server.type' is missing"),
            (
                "server.type=inet,server.host=h",
                "Parameter 'server.port' is missing",
            ),
        ] {
            assert_eq!(address(text), Err(message.to_owned()), "{text}");
        }
    }
}

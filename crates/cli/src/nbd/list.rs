//! `--list`: connects to a server and prints its exports, as `qemu-nbd` does.

use vellum_io::lane;
use vellum_nbd::client::list::{self, ExportInfo, Listing};
use vellum_nbd::client::{self, Address};
use vellum_nbd::proto;
use vellum_nbd::request::Framing;

use super::arguments::{Arguments, DEFAULT_ADDRESS, DEFAULT_PORT};
use crate::report;
use crate::server::{Failure, bad_port};

/// The flags with the words for them.
const FLAG_NAMES: &[(u16, &str)] = &[
    (proto::FLAG_READ_ONLY, "readonly"),
    (proto::FLAG_SEND_FLUSH, "flush"),
    (proto::FLAG_SEND_FUA, "fua"),
    (proto::FLAG_ROTATIONAL, "rotational"),
    (proto::FLAG_SEND_TRIM, "trim"),
    (proto::FLAG_SEND_WRITE_ZEROES, "zeroes"),
    (proto::FLAG_SEND_DF, "df"),
    (proto::FLAG_CAN_MULTI_CONN, "multi"),
    (proto::FLAG_SEND_RESIZE, "resize"),
    (proto::FLAG_SEND_CACHE, "cache"),
    (proto::FLAG_SEND_FAST_ZERO, "fast-zero"),
    (proto::FLAG_BLOCK_STAT_PAYLOAD, "block-status-payload"),
];

/// Lists a server's exports.
pub(super) fn list(arguments: &Arguments) -> Result<(), Failure> {
    let listing = ask(arguments)?;
    report::print(describe(&listing));
    Ok(())
}

fn ask(arguments: &Arguments) -> Result<Listing, Failure> {
    let address = match &arguments.socket {
        Some(path) => Address::Unix(path.clone()),
        None => {
            let host = arguments.bind.as_deref().unwrap_or(DEFAULT_ADDRESS);
            let port = arguments.port.as_deref().unwrap_or(DEFAULT_PORT);
            Address::Tcp {
                host: host.to_owned(),
                port: port.parse().map_err(|_| bad_port(host, port))?,
            }
        }
    };
    let tls = arguments.client_tls(&address)?;
    let listed = lane::block_on(async { list::list(client::connect(&address).await?, tls).await });
    Ok(listed?)
}

fn describe(listing: &Listing) -> String {
    let mut text = format!("exports available: {}\n", listing.exports.len());
    for export in &listing.exports {
        text.push_str(&format!(" export: '{}'\n", export.name));
        if let Some(description) = &export.description {
            text.push_str(&format!("  description: {description}\n"));
        }
        if export.flags & proto::FLAG_HAS_FLAGS != 0 {
            describe_export(&mut text, export, listing.framing);
        }
    }
    text
}

fn describe_export(text: &mut String, export: &ExportInfo, framing: Framing) {
    text.push_str(&format!("  size:  {}\n", export.size_bytes));
    let set = FLAG_NAMES
        .iter()
        .filter(|(flag, _)| export.flags & flag != 0);
    let names: String = set.map(|(_, name)| format!(" {name}")).collect();
    text.push_str(&format!("  flags: {:#x} ({names} )\n", export.flags));
    if let Some([minimum, preferred, maximum]) = export.block_sizes {
        text.push_str(&format!("  min block: {minimum}\n"));
        text.push_str(&format!("  opt block: {preferred}\n"));
        text.push_str(&format!("  max block: {maximum}\n"));
    }
    match framing {
        Framing::Simple => {}
        Framing::Structured => text.push_str("  transaction size: 32-bit\n"),
        Framing::Extended => text.push_str("  transaction size: 64-bit\n"),
    }
    if !export.contexts.is_empty() {
        text.push_str(&format!(
            "  available meta contexts: {}\n",
            export.contexts.len()
        ));
        for context in &export.contexts {
            text.push_str(&format!("   {context}\n"));
        }
    }
}

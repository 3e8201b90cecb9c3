//! Asking a server what it offers.

use super::super::reply_decode::{self, Info};
use std::sync::Arc;

use super::super::channel::{Channel, Upgrade};
use super::super::option::{info_data, meta_data};
use super::super::proto;
use super::super::request::Framing;
use super::handshake::{End, Greeting, Handshake, protocol};
use vellum_io::Result;

/// What a server says of one export.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExportInfo {
    /// The name.
    pub name: String,
    /// The description, if there is one.
    pub description: Option<String>,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Transmission flags (`FLAG_*` of [`proto`]).
    pub flags: u16,
    /// Minimum, preferred and maximum block size in bytes, if the server tells.
    pub block_sizes: Option<[u32; 3]>,
    /// The metadata contexts.
    pub contexts: Vec<String>,
    /// The message of a server that does not want to describe the export.
    pub refusal: Option<String>,
}

/// What a server offers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listing {
    /// The richest framing that the server speaks.
    pub framing: Framing,
    /// The exports in the server's order.
    pub exports: Vec<ExportInfo>,
}

/// Asks the server behind `channel` for its exports, under TLS if `tls` is given, and
/// takes leave.
///
/// # Errors
/// As [`Handshake::agree`].
pub async fn list(channel: Channel, tls: Option<Arc<dyn Upgrade>>) -> Result<Listing> {
    let mut handshake = Handshake::new(channel).with_tls(tls);
    match handshake.greet().await? {
        Greeting::Fixed => {}
        Greeting::Newstyle => return Err(protocol("Server does not support export lists")),
        Greeting::Oldstyle { size_bytes, flags } => {
            let only = ExportInfo {
                size_bytes,
                flags,
                ..ExportInfo::default()
            };
            return Ok(Listing {
                framing: Framing::Simple,
                exports: vec![only],
            });
        }
    }
    let listed = ask(&mut handshake).await;
    let framing = handshake.framing;
    handshake.abort().await;
    let exports = listed?;
    Ok(Listing { framing, exports })
}

/// Asks for the exports and what there is to know of each.
async fn ask(handshake: &mut Handshake) -> Result<Vec<ExportInfo>> {
    handshake.choose_framing().await?;
    let Some(names) = handshake.list().await? else {
        return Err(protocol("Server does not support export lists"));
    };
    let mut exports = Vec::new();
    for (name, description) in names {
        let mut export = ExportInfo {
            name,
            description,
            ..ExportInfo::default()
        };
        describe(handshake, &mut export).await?;
        if handshake.framing > Framing::Simple && export.refusal.is_none() {
            export.contexts = contexts(handshake, &export.name).await?;
        }
        exports.push(export);
    }
    Ok(exports)
}

async fn describe(handshake: &mut Handshake, export: &mut ExportInfo) -> Result<()> {
    let wanted = [
        proto::INFO_NAME,
        proto::INFO_DESCRIPTION,
        proto::INFO_BLOCK_SIZE,
    ];
    let data = info_data(&export.name, &wanted);
    let (replies, end) = handshake.ask(proto::OPT_INFO, &data).await?;
    for (kind, data) in &replies {
        if *kind != proto::REP_INFO {
            continue;
        }
        match Info::decode(data).ok_or_else(|| protocol("Malformed information"))? {
            Info::Export { size_bytes, flags } => {
                (export.size_bytes, export.flags) = (size_bytes, flags);
            }
            Info::BlockSizes(sizes) => export.block_sizes = Some(sizes),
            Info::Description(text) => export.description = Some(text),
            Info::Other => {}
        }
    }
    export.refusal = match end {
        End::Ack => None,
        End::Unsupported => Some(String::new()),
        End::Refused(error) => Some(error.message().to_owned()),
    };
    Ok(())
}

async fn contexts(handshake: &mut Handshake, name: &str) -> Result<Vec<String>> {
    // No queries at all ask for every context.
    let data = meta_data(name, &[]);
    let (replies, _) = handshake.ask(proto::OPT_LIST_META_CONTEXT, &data).await?;
    Ok(replies
        .iter()
        .filter(|(kind, _)| *kind == proto::REP_META_CONTEXT)
        .filter_map(|(_, data)| reply_decode::meta_context(data))
        .map(|(_, name)| name)
        .collect())
}

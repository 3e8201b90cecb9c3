//! What is said while options are negotiated: decoding the client's words for the
//! server, encoding them for the client.
//!
//! Invariant: total functions over any bytes; nothing here panics or allocates
//! more than the bytes that it was given.

use super::proto;
use super::wire::Cursor;

/// Length in bytes of an option's header.
pub const OPTION_HEADER_BYTES: usize = 16;

/// The header of an option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OptionHeader {
    /// Which option.
    pub option: u32,
    /// How many bytes of data follow.
    pub len_bytes: u32,
}

impl OptionHeader {
    /// Decodes a header; `None` if the magic is wrong.
    pub fn decode(bytes: &[u8; OPTION_HEADER_BYTES]) -> Option<Self> {
        let mut cursor = Cursor::new(bytes);
        if cursor.u64()? != proto::OPTION_MAGIC {
            return None;
        }
        Some(OptionHeader {
            option: cursor.u32()?,
            len_bytes: cursor.u32()?,
        })
    }
}

/// An option with its data, encoded.
pub fn option_request(option: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(OPTION_HEADER_BYTES + data.len());
    bytes.extend(proto::OPTION_MAGIC.to_be_bytes());
    bytes.extend(option.to_be_bytes());
    // Options are built here and stay far below 4 GiB.
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes
}

/// Appends a string behind its length.
fn put_string(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u32).to_be_bytes());
    bytes.extend(text.as_bytes());
}

/// The data of `OPT_INFO` and `OPT_GO` that asks for the kinds `wanted`.
pub fn info_data(name: &str, wanted: &[u16]) -> Vec<u8> {
    let mut bytes = Vec::new();
    put_string(&mut bytes, name);
    bytes.extend((wanted.len() as u16).to_be_bytes());
    bytes.extend(wanted.iter().flat_map(|info| info.to_be_bytes()));
    bytes
}

/// The data of `OPT_LIST_META_CONTEXT` and `OPT_SET_META_CONTEXT`.
pub fn meta_data(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut bytes = Vec::new();
    put_string(&mut bytes, name);
    bytes.extend((queries.len() as u32).to_be_bytes());
    for query in queries {
        put_string(&mut bytes, query);
    }
    bytes
}

/// An option with its data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClientOption<'a> {
    /// Go to transmission with this export, or hang up.
    ExportName(&'a str),
    /// End the session.
    Abort,
    /// List the exports.
    List,
    /// Switch to TLS.
    StartTls,
    /// Describe an export.
    Info(InfoRequest<'a>),
    /// Describe an export and go to transmission.
    Go(InfoRequest<'a>),
    /// Use structured replies.
    StructuredReply,
    /// List metadata contexts.
    ListMetaContext(MetaQuery<'a>),
    /// Choose metadata contexts.
    SetMetaContext(MetaQuery<'a>),
    /// Use extended headers.
    ExtendedHeaders,
    /// An option that this server does not know.
    Unknown,
}

/// The data of `OPT_INFO` and `OPT_GO`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InfoRequest<'a> {
    /// The export's name.
    pub name: &'a str,
    /// The client asks for the canonical name.
    pub wants_name: bool,
    /// The client asks for the description.
    pub wants_description: bool,
    /// The client asks for the block sizes, and will obey them.
    pub wants_block_size: bool,
}

/// The data of `OPT_LIST_META_CONTEXT` and `OPT_SET_META_CONTEXT`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetaQuery<'a> {
    /// The export's name.
    pub name: &'a str,
    /// What is asked for: names of contexts, or (to list) namespaces.
    pub queries: Vec<&'a str>,
}

/// The data of an option does not fit the option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BadOption {
    /// What is wrong, for the client's log.
    pub message: &'static str,
}

impl<'a> ClientOption<'a> {
    /// Decodes the data of `option`.
    ///
    /// # Errors
    /// If the data is not what the option takes.
    pub fn decode(option: u32, data: &'a [u8]) -> Result<Self, BadOption> {
        let plain = |decoded: Self| match data.is_empty() {
            true => Ok(decoded),
            false => Err(BadOption {
                message: "the option takes no data",
            }),
        };
        match option {
            proto::OPT_EXPORT_NAME => decode_export_name(data).map(ClientOption::ExportName),
            // Data with an abort is an error that nobody would hear of.
            proto::OPT_ABORT => Ok(ClientOption::Abort),
            proto::OPT_LIST => plain(ClientOption::List),
            proto::OPT_STARTTLS => plain(ClientOption::StartTls),
            proto::OPT_INFO => decode_info(data).map(ClientOption::Info),
            proto::OPT_GO => decode_info(data).map(ClientOption::Go),
            proto::OPT_STRUCTURED_REPLY => plain(ClientOption::StructuredReply),
            proto::OPT_LIST_META_CONTEXT => decode_meta(data).map(ClientOption::ListMetaContext),
            proto::OPT_SET_META_CONTEXT => decode_meta(data).map(ClientOption::SetMetaContext),
            proto::OPT_EXTENDED_HEADERS => plain(ClientOption::ExtendedHeaders),
            _ => Ok(ClientOption::Unknown),
        }
    }
}

fn decode_export_name(data: &[u8]) -> Result<&str, BadOption> {
    if data.len() > proto::MAX_STRING_BYTES {
        return Err(BadOption {
            message: "the export name is too long",
        });
    }
    std::str::from_utf8(data).map_err(|_| BadOption {
        message: "the export name is not UTF-8",
    })
}

fn decode_info(data: &[u8]) -> Result<InfoRequest<'_>, BadOption> {
    parse_info(data).ok_or(BadOption {
        message: "malformed information request",
    })
}

fn parse_info(data: &[u8]) -> Option<InfoRequest<'_>> {
    let mut cursor = Cursor::new(data);
    let name = cursor.string(proto::MAX_STRING_BYTES)?;
    let mut request = InfoRequest {
        name,
        wants_name: false,
        wants_description: false,
        wants_block_size: false,
    };
    for _ in 0..cursor.u16()? {
        match cursor.u16()? {
            proto::INFO_NAME => request.wants_name = true,
            proto::INFO_DESCRIPTION => request.wants_description = true,
            proto::INFO_BLOCK_SIZE => request.wants_block_size = true,
            _ => {}
        }
    }
    cursor.is_empty().then_some(request)
}

fn decode_meta(data: &[u8]) -> Result<MetaQuery<'_>, BadOption> {
    parse_meta(data).ok_or(BadOption {
        message: "malformed metadata context query",
    })
}

fn parse_meta(data: &[u8]) -> Option<MetaQuery<'_>> {
    let mut cursor = Cursor::new(data);
    let name = cursor.string(proto::MAX_STRING_BYTES)?;
    let count = cursor.u32()?;
    let mut queries = Vec::new();
    for _ in 0..count {
        queries.push(cursor.string(proto::MAX_STRING_BYTES)?);
    }
    cursor.is_empty().then_some(MetaQuery { name, queries })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn string(text: &str) -> Vec<u8> {
        let mut bytes = (text.len() as u32).to_be_bytes().to_vec();
        bytes.extend(text.as_bytes());
        bytes
    }

    #[test]
    fn header_needs_its_magic() {
        let mut bytes = [0; OPTION_HEADER_BYTES];
        bytes[..8].copy_from_slice(&proto::OPTION_MAGIC.to_be_bytes());
        bytes[11] = 7;
        bytes[15] = 3;
        assert_eq!(
            OptionHeader::decode(&bytes),
            Some(OptionHeader {
                option: 7,
                len_bytes: 3
            })
        );
        bytes[0] ^= 1;
        assert_eq!(OptionHeader::decode(&bytes), None);
    }

    #[test]
    fn info_and_meta_are_read_exactly() {
        let mut info = string("disk");
        info.extend([0, 2, 0, 3, 0, 9]);
        let wanted = InfoRequest {
            name: "disk",
            wants_name: false,
            wants_description: false,
            wants_block_size: true,
        };
        assert_eq!(
            ClientOption::decode(proto::OPT_GO, &info),
            Ok(ClientOption::Go(wanted))
        );
        info.push(0);
        assert!(ClientOption::decode(proto::OPT_GO, &info).is_err());

        let mut meta = string("");
        meta.extend(1u32.to_be_bytes());
        meta.extend(string("base:allocation"));
        let query = MetaQuery {
            name: "",
            queries: vec!["base:allocation"],
        };
        assert_eq!(
            ClientOption::decode(proto::OPT_SET_META_CONTEXT, &meta),
            Ok(ClientOption::SetMetaContext(query))
        );
    }

    #[test]
    fn an_absurd_query_count_is_an_error_at_once() {
        let mut meta = string("");
        meta.extend(u32::MAX.to_be_bytes());
        assert!(ClientOption::decode(proto::OPT_LIST_META_CONTEXT, &meta).is_err());
    }

    #[test]
    fn every_prefix_of_valid_data_is_refused_without_a_panic() {
        let mut meta = string("x");
        meta.extend(1u32.to_be_bytes());
        meta.extend(string("base:"));
        for option in 0..16 {
            for end in 0..meta.len() {
                let _ = ClientOption::decode(option, &meta[..end]);
            }
        }
        for end in 0..meta.len() {
            assert!(ClientOption::decode(proto::OPT_SET_META_CONTEXT, &meta[..end]).is_err());
        }
    }
}

//! A small blocking client that asks a server what it offers.

use std::io::{self, Read, Write};

use super::proto;
use super::request::Framing;
use super::wire::Cursor;

/// Longest reply in bytes that is believed.
const MAX_REPLY_BYTES: u32 = 64 << 10;
/// Most replies to one option.
const MAX_REPLIES: usize = 4096;

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

fn broken(message: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message)
}

/// Asks the server behind `stream` for its exports, and takes leave.
pub fn list(stream: impl Read + Write) -> io::Result<Listing> {
    let mut client = Client { stream };
    client.greet()?;
    let framing = client.choose_framing()?;
    let mut exports = client.names()?;
    for export in &mut exports {
        client.describe(export)?;
        if framing > Framing::Simple && export.refusal.is_none() {
            export.contexts = client.contexts(&export.name)?;
        }
    }
    // The answer to this is not worth waiting for.
    let _ = client.send(proto::OPT_ABORT, &[]);
    Ok(Listing { framing, exports })
}

struct Client<S> {
    stream: S,
}

/// The replies to an option: those before the last, and whether the last was
/// an acknowledgement or an error with a message.
type Replies = (Vec<(u32, Vec<u8>)>, Result<(), String>);

impl<S: Read + Write> Client<S> {
    fn receive(&mut self, len_bytes: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; len_bytes];
        self.stream.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn greet(&mut self) -> io::Result<()> {
        let greeting = self.receive(18)?;
        let mut cursor = Cursor::new(&greeting);
        if cursor.u64() != Some(proto::INIT_MAGIC) {
            return Err(broken("Bad initial magic received"));
        }
        if cursor.u64() != Some(proto::OPTION_MAGIC) {
            return Err(broken("The server speaks the old handshake only"));
        }
        let offered = cursor.u16().unwrap_or(0);
        if offered & proto::FLAG_FIXED_NEWSTYLE == 0 {
            return Err(broken("The server does not answer options"));
        }
        // The client's flags have the values of the server's.
        let flags = u32::from(offered & (proto::FLAG_FIXED_NEWSTYLE | proto::FLAG_NO_ZEROES));
        self.stream.write_all(&flags.to_be_bytes())
    }

    fn send(&mut self, option: u32, data: &[u8]) -> io::Result<()> {
        let mut bytes = proto::OPTION_MAGIC.to_be_bytes().to_vec();
        bytes.extend(option.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        self.stream.write_all(&bytes)
    }

    fn reply(&mut self, option: u32) -> io::Result<(u32, Vec<u8>)> {
        let header = self.receive(20)?;
        let mut cursor = Cursor::new(&header);
        let magic = cursor.u64();
        let echoed = cursor.u32();
        let (Some(kind), Some(len)) = (cursor.u32(), cursor.u32()) else {
            return Err(broken("Short option reply"));
        };
        if magic != Some(proto::OPTION_REPLY_MAGIC) || echoed != Some(option) {
            return Err(broken("Unexpected option reply"));
        }
        if len > MAX_REPLY_BYTES {
            return Err(broken("Option reply too long"));
        }
        Ok((kind, self.receive(len as usize)?))
    }

    fn ask(&mut self, option: u32, data: &[u8]) -> io::Result<Replies> {
        self.send(option, data)?;
        let mut replies = Vec::new();
        while replies.len() < MAX_REPLIES {
            let (kind, data) = self.reply(option)?;
            if kind == proto::REP_ACK {
                return Ok((replies, Ok(())));
            }
            if kind & proto::REP_FLAG_ERROR != 0 {
                return Ok((replies, Err(String::from_utf8_lossy(&data).into_owned())));
            }
            replies.push((kind, data));
        }
        Err(broken("Too many option replies"))
    }

    fn choose_framing(&mut self) -> io::Result<Framing> {
        if self.ask(proto::OPT_EXTENDED_HEADERS, &[])?.1.is_ok() {
            return Ok(Framing::Extended);
        }
        Ok(match self.ask(proto::OPT_STRUCTURED_REPLY, &[])?.1 {
            Ok(()) => Framing::Structured,
            Err(_) => Framing::Simple,
        })
    }

    fn names(&mut self) -> io::Result<Vec<ExportInfo>> {
        let (replies, end) = self.ask(proto::OPT_LIST, &[])?;
        end.map_err(|message| broken(&format!("The server does not list: {message}")))?;
        let servers = replies
            .iter()
            .filter(|(kind, _)| *kind == proto::REP_SERVER);
        servers
            .map(|(_, data)| server_entry(data).ok_or(broken("Malformed list")))
            .collect()
    }

    fn describe(&mut self, export: &mut ExportInfo) -> io::Result<()> {
        let mut data = string_field(&export.name);
        let wanted = [
            proto::INFO_NAME,
            proto::INFO_DESCRIPTION,
            proto::INFO_BLOCK_SIZE,
        ];
        data.extend((wanted.len() as u16).to_be_bytes());
        data.extend(wanted.iter().flat_map(|info| info.to_be_bytes()));
        let (replies, end) = self.ask(proto::OPT_INFO, &data)?;
        for (kind, data) in &replies {
            if *kind == proto::REP_INFO {
                take_info(export, data).ok_or(broken("Malformed information"))?;
            }
        }
        export.refusal = end.err();
        Ok(())
    }

    fn contexts(&mut self, name: &str) -> io::Result<Vec<String>> {
        // No queries at all ask for every context.
        let mut data = string_field(name);
        data.extend(0_u32.to_be_bytes());
        let (replies, _) = self.ask(proto::OPT_LIST_META_CONTEXT, &data)?;
        let names = replies
            .iter()
            .filter(|(kind, _)| *kind == proto::REP_META_CONTEXT);
        Ok(names
            .filter_map(|(_, data)| data.get(4..))
            .map(|name| String::from_utf8_lossy(name).into_owned())
            .collect())
    }
}

fn string_field(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u32).to_be_bytes().to_vec();
    bytes.extend(text.as_bytes());
    bytes
}

fn server_entry(data: &[u8]) -> Option<ExportInfo> {
    let mut cursor = Cursor::new(data);
    let name = cursor.string(proto::MAX_STRING_BYTES)?.to_owned();
    let rest = data.get(4 + name.len()..)?;
    let description = (!rest.is_empty()).then(|| String::from_utf8_lossy(rest).into_owned());
    Some(ExportInfo {
        name,
        description,
        ..ExportInfo::default()
    })
}

fn take_info(export: &mut ExportInfo, data: &[u8]) -> Option<()> {
    let mut cursor = Cursor::new(data);
    match cursor.u16()? {
        proto::INFO_EXPORT => {
            export.size_bytes = cursor.u64()?;
            export.flags = cursor.u16()?;
        }
        proto::INFO_DESCRIPTION => {
            export.description = Some(String::from_utf8_lossy(data.get(2..)?).into_owned());
        }
        proto::INFO_BLOCK_SIZE => {
            export.block_sizes = Some([cursor.u32()?, cursor.u32()?, cursor.u32()?]);
        }
        _ => {}
    }
    Some(())
}

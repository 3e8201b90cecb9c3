//! The handshake from the client's side, up to a [`Session`].
//!
//! Invariant: whatever a server says, only so much of it is taken before the
//! handshake ends: `MAX_REPLIES` replies an option, each of a bounded length.

use super::super::channel::{Channel, Upgrade};
use super::super::option::{info_data, meta_data, option_request};
use super::super::proto;
use super::super::receive_buffer::{Disconnect, ReceiveBuffer};
use super::super::reply_decode::{
    self, Info, MAX_OPTION_REPLY_BYTES, OPTION_REPLY_BYTES, OptionReply,
};
use super::super::request::Framing;
use super::super::wire::Cursor;
use std::sync::Arc;

use vellum_io::{Error, ErrorKind, Result};

/// Most replies to one option that are taken.
const MAX_REPLIES: usize = 4096;
/// Most bytes in all replies to one option that are kept.
const MAX_REPLIES_BYTES: usize = 4 << 20;
/// Largest export in bytes.
const MAX_SIZE_BYTES: u64 = i64::MAX as u64;
/// The operation that errors of a secured channel name: they say all by themselves.
pub const TLS_OPERATION: &str = "tls";
/// Reserved bytes behind the answer to `OPT_EXPORT_NAME`, and of the old greeting.
const RESERVED_BYTES: usize = 124;

/// What client and server have agreed on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Session {
    /// How messages look.
    pub framing: Framing,
    /// Size of the export in bytes.
    pub size_bytes: u64,
    /// `FLAG_*`.
    pub flags: u16,
    /// Minimum, preferred and maximum block size in bytes, if the server tells.
    pub block_sizes: Option<[u32; 3]>,
    /// The number of the metadata context that was asked for, if the server has it.
    pub context: Option<u32>,
}

/// How an option has ended.
#[derive(Debug)]
pub(super) enum End {
    Ack,
    /// The server does not know it.
    Unsupported,
    Refused(Error),
}

/// The replies to an option before its last one.
pub(super) type Replies = Vec<(u32, Vec<u8>)>;

/// A handshake on its way.
#[derive(Debug)]
pub struct Handshake {
    channel: Channel,
    tls: Option<Arc<dyn Upgrade>>,
    input: ReceiveBuffer,
    no_zeroes: bool,
    pub(super) framing: Framing,
}

/// What a server is after its greeting.
#[derive(Debug)]
pub(super) enum Greeting {
    /// It answers options.
    Fixed,
    /// It takes the name of an export, and nothing else.
    Newstyle,
    /// It has one export, and no options at all.
    Oldstyle { size_bytes: u64, flags: u16 },
}

pub(super) fn protocol(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Protocol, "connect", message).with_errno(libc::EINVAL)
}

/// The failure of a read, after `what` was tried.
fn cut_off(what: &str, gone: Disconnect) -> Error {
    match gone {
        Disconnect::Closed => protocol(format!(
            "{what}: Unexpected end-of-file before all data were read"
        )),
        Disconnect::Failed(error) if error.operation() == TLS_OPERATION => {
            protocol(format!("{what}: {}", error.message()))
        }
        Disconnect::Failed(error) => {
            let errno = error.errno();
            protocol(format!(
                "{what}: Unable to read from socket: {}",
                error.message()
            ))
            .with_errno(errno)
        }
        Disconnect::Broken(reason) => protocol(format!("{what}: {reason}")),
        Disconnect::Untrusted(error) => error,
    }
}

impl Handshake {
    /// A handshake on a fresh connection.
    pub fn new(channel: Channel) -> Self {
        Handshake {
            channel,
            tls: None,
            input: ReceiveBuffer::new(),
            no_zeroes: false,
            framing: Framing::Simple,
        }
    }

    /// Insists on TLS.
    #[must_use]
    pub fn with_tls(mut self, tls: Option<Arc<dyn Upgrade>>) -> Self {
        self.tls = tls;
        self
    }

    /// Negotiates for the export called `name`, with the metadata context `context`.
    ///
    /// # Errors
    /// In QEMU's words for what the server refuses or does wrong.
    pub async fn agree(
        mut self,
        name: &str,
        context: &str,
    ) -> Result<(Channel, ReceiveBuffer, Session)> {
        let session = match self.greet().await? {
            Greeting::Oldstyle { .. } if !name.is_empty() => {
                return Err(protocol("Server does not support non-empty export names"));
            }
            Greeting::Oldstyle { size_bytes, flags } => self.session(size_bytes, flags),
            Greeting::Newstyle => self.export_name(name).await?,
            Greeting::Fixed => match self.choose(name, context).await {
                Ok(session) => session,
                Err(error) => {
                    self.abort().await;
                    return Err(error);
                }
            },
        };
        if session.size_bytes > MAX_SIZE_BYTES {
            return Err(protocol(format!(
                "export length {} is too large",
                session.size_bytes
            )));
        }
        Ok((self.channel, self.input, session))
    }

    fn session(&self, size_bytes: u64, flags: u16) -> Session {
        Session {
            framing: self.framing,
            size_bytes,
            flags,
            block_sizes: None,
            context: None,
        }
    }

    async fn read(&mut self, len_bytes: usize, what: &str) -> Result<Vec<u8>> {
        let needed = self.input.need(&self.channel, len_bytes).await;
        needed.map_err(|gone| cut_off(what, gone))?;
        let bytes = self.input.available()[..len_bytes].to_vec();
        self.input.consume(len_bytes);
        Ok(bytes)
    }

    async fn read_u64(&mut self, what: &str) -> Result<u64> {
        let bytes = self.read(8, what).await?;
        Ok(Cursor::new(&bytes).u64().unwrap_or_default())
    }

    async fn send(&mut self, bytes: &[u8], what: &str) -> Result<()> {
        let sent = self.channel.send_bytes(bytes).await;
        sent.map_err(|error| {
            let errno = error.errno();
            protocol(format!("{what}: {}", error.message())).with_errno(errno)
        })
    }

    /// Reads the server's greeting and answers it.
    pub(super) async fn greet(&mut self) -> Result<Greeting> {
        let magic = self.read_u64("Failed to read initial magic").await?;
        if magic != proto::INIT_MAGIC {
            return Err(protocol(format!("Bad initial magic received: {magic:#x}")));
        }
        let greeting = match self.read_u64("Failed to read server magic").await? {
            proto::OPTION_MAGIC => self.greet_newstyle().await?,
            proto::OLDSTYLE_MAGIC => self.greet_oldstyle().await?,
            other => return Err(protocol(format!("Bad server magic received: {other:#x}"))),
        };
        match (self.tls.take(), &greeting) {
            (None, _) => {}
            (Some(tls), Greeting::Fixed) => self.start_tls(&*tls).await?,
            (Some(_), _) => return Err(protocol("Server does not support STARTTLS")),
        }
        Ok(greeting)
    }

    async fn start_tls(&mut self, tls: &dyn Upgrade) -> Result<()> {
        let (replies, end) = self.ask(proto::OPT_STARTTLS, &[]).await?;
        match end {
            End::Ack => {}
            End::Unsupported => return Err(protocol("Server don't support STARTTLS option")),
            End::Refused(error) => {
                self.say_goodbye().await;
                return Err(error);
            }
        }
        if let Some((kind, _)) = replies.first() {
            return Err(unexpected_reply(*kind, proto::REP_ACK));
        }
        // What came in the clear behind the answer is not the server's word.
        if !self.input.available().is_empty() {
            return Err(protocol("the server sent more than its answer before TLS"));
        }
        self.channel = self.channel.upgrade(tls).await?;
        Ok(())
    }

    async fn greet_newstyle(&mut self) -> Result<Greeting> {
        let bytes = self.read(2, "Failed to read server flags").await?;
        let offered = Cursor::new(&bytes).u16().unwrap_or_default();
        self.no_zeroes = offered & proto::FLAG_NO_ZEROES != 0;
        // The client's flags have the values of the server's.
        let flags = u32::from(offered & (proto::FLAG_FIXED_NEWSTYLE | proto::FLAG_NO_ZEROES));
        let what = "Failed to send clientflags field";
        self.send(&flags.to_be_bytes(), what).await?;
        Ok(match offered & proto::FLAG_FIXED_NEWSTYLE {
            0 => Greeting::Newstyle,
            _ => Greeting::Fixed,
        })
    }

    async fn greet_oldstyle(&mut self) -> Result<Greeting> {
        let size_bytes = self.read_u64("Failed to read export length").await?;
        let bytes = self.read(4, "Failed to read export flags").await?;
        let flags = Cursor::new(&bytes).u32().unwrap_or_default();
        let flags = u16::try_from(flags)
            .map_err(|_| protocol(format!("Unexpected export flags {flags:#x}")))?;
        self.read(RESERVED_BYTES, "Failed to read reserved block")
            .await?;
        Ok(Greeting::Oldstyle { size_bytes, flags })
    }

    async fn choose(&mut self, name: &str, context: &str) -> Result<Session> {
        self.choose_framing().await?;
        let context = match self.framing {
            Framing::Simple => None,
            _ => self.set_context(name, context).await?,
        };
        let data = info_data(name, &[proto::INFO_BLOCK_SIZE]);
        let (replies, end) = self.ask(proto::OPT_GO, &data).await?;
        match end {
            End::Ack => {}
            End::Unsupported => {
                self.check_is_listed(name).await?;
                let session = self.export_name(name).await?;
                return Ok(Session { context, ..session });
            }
            End::Refused(error) => return Err(error),
        }
        let mut session = None;
        let mut block_sizes = None;
        for (kind, data) in &replies {
            if *kind != proto::REP_INFO {
                return Err(unexpected_reply(*kind, proto::REP_INFO));
            }
            match Info::decode(data) {
                Some(Info::Export { size_bytes, flags }) => {
                    session = Some(self.session(size_bytes, flags));
                }
                Some(Info::BlockSizes(sizes)) => block_sizes = Some(check_sizes(sizes)?),
                Some(_) => {}
                None => return Err(protocol("info length is wrong")),
            }
        }
        let session = session.ok_or_else(|| protocol("broken server omitted NBD_INFO_EXPORT"))?;
        Ok(Session {
            block_sizes,
            context,
            ..session
        })
    }

    /// Agrees on the richest framing that the server speaks.
    pub(super) async fn choose_framing(&mut self) -> Result<()> {
        for (option, framing) in [
            (proto::OPT_EXTENDED_HEADERS, Framing::Extended),
            (proto::OPT_STRUCTURED_REPLY, Framing::Structured),
        ] {
            // Whatever the reason of a refusal: it can be done without.
            if let End::Ack = self.ask(option, &[]).await?.1 {
                self.framing = framing;
                return Ok(());
            }
        }
        Ok(())
    }

    async fn set_context(&mut self, name: &str, context: &str) -> Result<Option<u32>> {
        let data = meta_data(name, &[context]);
        let (replies, end) = self.ask(proto::OPT_SET_META_CONTEXT, &data).await?;
        match end {
            End::Ack => {}
            // Without contexts an export is whole all the same.
            End::Unsupported | End::Refused(_) => return Ok(None),
        }
        let mut found = None;
        for (kind, data) in &replies {
            if *kind != proto::REP_META_CONTEXT {
                return Err(unexpected_reply(*kind, proto::REP_META_CONTEXT));
            }
            let (id, named) = reply_decode::meta_context(data)
                .ok_or_else(|| protocol("incorrect option length for a metadata context"))?;
            if named != context {
                return Err(protocol(format!(
                    "server returned metadata context '{named}' instead of '{context}'"
                )));
            }
            found = Some(id);
        }
        Ok(found)
    }

    async fn check_is_listed(&mut self, name: &str) -> Result<()> {
        let Some(exports) = self.list().await? else {
            // It may have what it does not list.
            return Ok(());
        };
        match exports.iter().any(|(listed, _)| listed == name) {
            true => Ok(()),
            false => Err(protocol(format!("No export with name '{name}' available"))),
        }
    }

    /// The names and descriptions of all exports; `None` if the server does not tell.
    pub(super) async fn list(&mut self) -> Result<Option<Vec<(String, Option<String>)>>> {
        let (replies, end) = self.ask(proto::OPT_LIST, &[]).await?;
        match end {
            End::Ack => {}
            End::Unsupported => return Ok(None),
            End::Refused(error) => return Err(error),
        }
        let entry = |(kind, data): &(u32, Vec<u8>)| match *kind {
            proto::REP_SERVER => reply_decode::list_entry(data)
                .ok_or_else(|| protocol("incorrect option name length")),
            other => Err(unexpected_reply(other, proto::REP_SERVER)),
        };
        replies.iter().map(entry).collect::<Result<_>>().map(Some)
    }

    /// Chooses an export the old way.
    async fn export_name(&mut self, name: &str) -> Result<Session> {
        let request = option_request(proto::OPT_EXPORT_NAME, name.as_bytes());
        self.send(&request, "Failed to send option request").await?;
        let size_bytes = self.read_u64("Failed to read export length").await?;
        let bytes = self.read(2, "Failed to read export flags").await?;
        let flags = Cursor::new(&bytes).u16().unwrap_or_default();
        if !self.no_zeroes {
            self.read(RESERVED_BYTES, "Failed to read reserved block")
                .await?;
        }
        Ok(self.session(size_bytes, flags))
    }

    async fn reply(&mut self, option: u32) -> Result<(u32, Vec<u8>)> {
        let what = "Failed to read option reply";
        let header = self.read(OPTION_REPLY_BYTES, what).await?;
        let reply = OptionReply::decode(&header)
            .ok_or_else(|| protocol("Unexpected option reply magic"))?;
        if reply.option != option {
            return Err(protocol(format!(
                "Unexpected option type {} ({}), expected {option} ({})",
                reply.option,
                proto::option_name(reply.option),
                proto::option_name(option),
            )));
        }
        if reply.len_bytes > MAX_OPTION_REPLY_BYTES {
            return Err(protocol(match reply.kind & proto::REP_FLAG_ERROR {
                0 => "option reply is too long",
                _ => "server error message is too long",
            }));
        }
        let what = "failed to read option reply data";
        let data = self.read(reply.len_bytes as usize, what).await?;
        Ok((reply.kind, data))
    }

    /// Sends an option and takes all replies to it.
    pub(super) async fn ask(&mut self, option: u32, data: &[u8]) -> Result<(Replies, End)> {
        let request = option_request(option, data);
        self.send(&request, "Failed to send option request").await?;
        let mut replies = Replies::new();
        let mut kept_bytes = 0;
        while replies.len() < MAX_REPLIES && kept_bytes < MAX_REPLIES_BYTES {
            let (kind, data) = self.reply(option).await?;
            if kind == proto::REP_ACK {
                return match data.is_empty() {
                    true => Ok((replies, End::Ack)),
                    false => Err(protocol("length too long for option end")),
                };
            }
            if kind & proto::REP_FLAG_ERROR != 0 {
                return Ok((replies, refusal(option, kind, &data)));
            }
            kept_bytes += data.len();
            replies.push((kind, data));
        }
        Err(protocol("too many replies to one option"))
    }

    /// Takes leave of a server whose export is not wanted after all.
    pub(super) async fn abort(mut self) {
        self.say_goodbye().await;
        self.channel.finish().await;
    }

    async fn say_goodbye(&mut self) {
        let request = option_request(proto::OPT_ABORT, &[]);
        // The answer to this is not worth waiting for.
        let _ = self.send(&request, "Failed to send option request").await;
    }
}

fn unexpected_reply(kind: u32, expected: u32) -> Error {
    protocol(format!("Unexpected reply type {kind} expected {expected}"))
}

fn refusal(option: u32, kind: u32, data: &[u8]) -> End {
    let named = format!("option {option} ({})", proto::option_name(option));
    let mut text = match kind {
        proto::REP_ERR_UNSUP => return End::Unsupported,
        proto::REP_ERR_POLICY => format!("Denied by server for {named}"),
        proto::REP_ERR_INVALID => format!("Invalid parameters for {named}"),
        proto::REP_ERR_PLATFORM => format!("Server lacks support for {named}"),
        proto::REP_ERR_TLS_REQD => {
            format!("TLS negotiation required before {named}\nDid you forget a valid tls-creds?")
        }
        proto::REP_ERR_UNKNOWN => "Requested export not available".to_owned(),
        proto::REP_ERR_SHUTDOWN => format!("Server shutting down before {named}"),
        proto::REP_ERR_BLOCK_SIZE_REQD => {
            format!("Server requires INFO_BLOCK_SIZE for {named}")
        }
        _ => format!("Unknown error code when asking for {named}"),
    };
    if !data.is_empty() {
        text.push_str("\nserver reported: ");
        text.push_str(&String::from_utf8_lossy(data));
    }
    End::Refused(protocol(text))
}

/// Block sizes that make sense together.
fn check_sizes(sizes: [u32; 3]) -> Result<[u32; 3]> {
    let [minimum, preferred, maximum] = sizes;
    if !minimum.is_power_of_two() {
        return Err(protocol(format!(
            "server minimum block size {minimum} is not a power of two"
        )));
    }
    if !preferred.is_power_of_two() || preferred < minimum {
        return Err(protocol(format!(
            "server preferred block size {preferred} is not valid"
        )));
    }
    if maximum < minimum {
        return Err(protocol(format!(
            "server maximum block size {maximum} is not valid"
        )));
    }
    // What ends inside a block could not be asked for.
    let maximum = match maximum {
        u32::MAX => maximum,
        _ => maximum - maximum % minimum,
    };
    Ok([minimum, preferred, maximum])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(end: End) -> String {
        match end {
            End::Refused(error) => error.message().to_owned(),
            other => format!("{other:?}"),
        }
    }

    #[test]
    fn refusals_are_told_in_qemus_words() {
        let tls = refusal(proto::OPT_GO, proto::REP_ERR_TLS_REQD, b"no");
        assert_eq!(
            text(tls),
            "TLS negotiation required before option 7 (go)\nDid you forget a valid \
             tls-creds?\nserver reported: no"
        );
        let unknown = refusal(proto::OPT_GO, proto::REP_ERR_UNKNOWN, b"");
        assert_eq!(text(unknown), "Requested export not available");
        let unsupported = refusal(proto::OPT_LIST, proto::REP_ERR_UNSUP, b"x");
        assert_eq!(text(unsupported), "Unsupported");
    }

    #[test]
    fn block_sizes_must_make_sense() {
        assert_eq!(check_sizes([1, 4096, 33]).unwrap(), [1, 4096, 33]);
        assert_eq!(check_sizes([512, 4096, 1025]).unwrap(), [512, 4096, 1024]);
        assert_eq!(
            check_sizes([512, 512, u32::MAX]).unwrap(),
            [512, 512, u32::MAX]
        );
        for bad in [
            [0, 1, 1],
            [3, 4, 8],
            [512, 256, 1024],
            [512, 1000, 4096],
            [512, 512, 1],
        ] {
            assert!(check_sizes(bad).is_err(), "{bad:?}");
        }
    }
}

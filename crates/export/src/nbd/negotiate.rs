//! The handshake: fixed newstyle negotiation up to an [`NegotiatedSession`].
//!
//! Invariant: a client that says nothing is ended by the limit of the handshake, or by the server's end.

use std::sync::Arc;

use tracing::trace;
use vellum_nbd::{Channel, Upgrade};

use super::connection::NegotiatedSession;
use super::export::{Export, MetaContext};
use super::exports::Exports;
use vellum_nbd::option::{
    BadOption, ClientOption, InfoRequest, MetaQuery, OPTION_HEADER_BYTES, OptionHeader,
};
use vellum_nbd::proto;
use vellum_nbd::receive_buffer::{Disconnect, ReceiveBuffer};
use vellum_nbd::reply_encode::option_reply;
use vellum_nbd::request::Framing;

/// Options longer than this in bytes are refused.
const MAX_OPTION_BYTES: u32 = 32 << 10;
/// Options longer than this in bytes end the connection.
const MAX_SKIPPED_BYTES: u32 = 32 << 20;

const CLIENT_FLAGS: u32 = proto::FLAG_C_FIXED_NEWSTYLE | proto::FLAG_C_NO_ZEROES;

/// Names are repeated to clients only up to here, in bytes.
const MAX_REPEATED_BYTES: usize = 80;

/// The state of one handshake.
struct Handshake<'a> {
    channel: Channel,
    tls: Option<&'a dyn Upgrade>,
    exports: &'a Exports,
    no_zeroes: bool,
    framing: Framing,
    /// The contexts chosen so far and the export that they were chosen for.
    contexts: Option<(Arc<Export>, Vec<MetaContext>)>,
}

/// What an option leads to.
enum OptionOutcome {
    /// More options.
    Continue,
    /// The transmission phase.
    Transmit(Arc<Export>),
    /// The end, as the client wishes.
    Leave,
}

/// Negotiates; `None`: the client left without choosing an export.
pub(super) async fn negotiate(
    channel: Channel,
    input: &mut ReceiveBuffer,
    exports: &Exports,
    tls: Option<&dyn Upgrade>,
) -> Result<Option<NegotiatedSession>, Disconnect> {
    let mut handshake = Handshake {
        channel,
        tls,
        exports,
        no_zeroes: false,
        framing: Framing::Simple,
        contexts: None,
    };
    handshake.greet(input).await?;
    loop {
        match handshake.next_option(input).await? {
            OptionOutcome::Continue => {}
            OptionOutcome::Transmit(export) => return Ok(Some(handshake.agree(export))),
            OptionOutcome::Leave => return Ok(None),
        }
    }
}

impl Handshake<'_> {
    async fn send(&self, bytes: &[u8]) -> Result<(), Disconnect> {
        self.channel.send_bytes(bytes).await?;
        Ok(())
    }

    async fn reply(
        &self,
        option: u32,
        kind: u32,
        data: &[u8],
    ) -> Result<OptionOutcome, Disconnect> {
        self.send(&option_reply(option, kind, data)).await?;
        Ok(OptionOutcome::Continue)
    }

    async fn greet(&mut self, input: &mut ReceiveBuffer) -> Result<(), Disconnect> {
        let mut greeting = Vec::with_capacity(18);
        greeting.extend(proto::INIT_MAGIC.to_be_bytes());
        greeting.extend(proto::OPTION_MAGIC.to_be_bytes());
        greeting.extend((proto::FLAG_FIXED_NEWSTYLE | proto::FLAG_NO_ZEROES).to_be_bytes());
        self.send(&greeting).await?;
        input.need(&self.channel, 4).await?;
        let mut flags = [0; 4];
        flags.copy_from_slice(&input.available()[..4]);
        input.consume(4);
        let flags = u32::from_be_bytes(flags);
        if flags & !CLIENT_FLAGS != 0 {
            return Err(Disconnect::Broken("unknown client flags"));
        }
        if flags & proto::FLAG_C_FIXED_NEWSTYLE == 0 {
            return Err(Disconnect::Broken(
                "the client does not speak fixed newstyle",
            ));
        }
        self.no_zeroes = flags & proto::FLAG_C_NO_ZEROES != 0;
        Ok(())
    }

    async fn next_option(
        &mut self,
        input: &mut ReceiveBuffer,
    ) -> Result<OptionOutcome, Disconnect> {
        input.need(&self.channel, OPTION_HEADER_BYTES).await?;
        let mut header = [0; OPTION_HEADER_BYTES];
        header.copy_from_slice(&input.available()[..OPTION_HEADER_BYTES]);
        let header = OptionHeader::decode(&header)
            .ok_or(Disconnect::Broken("an option with a wrong magic number"))?;
        input.consume(OPTION_HEADER_BYTES);
        trace!(
            name: "nbd_negotiate_options_check_option",
            option = header.option,
            bytes = header.len_bytes
        );
        if header.len_bytes > MAX_SKIPPED_BYTES {
            return Err(Disconnect::Broken("an absurdly long option"));
        }
        if self.needs_tls(header.option) {
            if header.option == proto::OPT_EXPORT_NAME {
                return Err(Disconnect::Broken("Option 0x1 not permitted before TLS"));
            }
            input
                .skip(&self.channel, u64::from(header.len_bytes))
                .await?;
            let text = format!("Option {:#x} not permitted before TLS", header.option);
            return self
                .reply(header.option, proto::REP_ERR_TLS_REQD, text.as_bytes())
                .await;
        }
        if header.len_bytes > MAX_OPTION_BYTES {
            input
                .skip(&self.channel, u64::from(header.len_bytes))
                .await?;
            let text = b"the option is too long";
            return self
                .reply(header.option, proto::REP_ERR_TOO_BIG, text)
                .await;
        }
        let len = header.len_bytes as usize;
        input.need(&self.channel, len).await?;
        let data = input.available()[..len].to_vec();
        input.consume(len);
        match ClientOption::decode(header.option, &data) {
            Ok(option) => self.answer(input, header.option, option).await,
            Err(BadOption { .. }) if header.option == proto::OPT_EXPORT_NAME => {
                Err(Disconnect::Broken("a malformed export name"))
            }
            Err(BadOption { message }) => {
                self.reply(header.option, proto::REP_ERR_INVALID, message.as_bytes())
                    .await
            }
        }
    }

    async fn answer(
        &mut self,
        input: &ReceiveBuffer,
        number: u32,
        option: ClientOption<'_>,
    ) -> Result<OptionOutcome, Disconnect> {
        match option {
            ClientOption::ExportName(name) => self.export_name(name).await,
            ClientOption::Abort => {
                // The client may be gone already; nobody minds.
                let _ = self.reply(number, proto::REP_ACK, &[]).await;
                self.channel.finish().await;
                Ok(OptionOutcome::Leave)
            }
            ClientOption::List => self.list(number).await,
            ClientOption::StartTls => self.start_tls(input, number).await,
            ClientOption::Info(request) => self.info(number, request).await,
            ClientOption::Go(request) => self.info(number, request).await,
            ClientOption::StructuredReply => self.structured(number).await,
            ClientOption::ExtendedHeaders => self.extended(number).await,
            ClientOption::ListMetaContext(query) => self.meta_context(number, query).await,
            ClientOption::SetMetaContext(query) => self.meta_context(number, query).await,
            ClientOption::Unknown => {
                let text = format!("Unsupported option {number}");
                self.reply(number, proto::REP_ERR_UNSUP, text.as_bytes())
                    .await
            }
        }
    }

    async fn start_tls(
        &mut self,
        input: &ReceiveBuffer,
        number: u32,
    ) -> Result<OptionOutcome, Disconnect> {
        let Some(tls) = self.tls else {
            let text = b"TLS not configured";
            return self.reply(number, proto::REP_ERR_POLICY, text).await;
        };
        if self.channel.is_secured() {
            let text = b"TLS already enabled";
            return self.reply(number, proto::REP_ERR_INVALID, text).await;
        }
        // What was said in the clear must not be taken for what is said under TLS.
        if !input.available().is_empty() {
            return Err(Disconnect::Broken(
                "bytes in the clear behind the request for TLS",
            ));
        }
        self.reply(number, proto::REP_ACK, &[]).await?;
        let secured = self.channel.upgrade(tls).await;
        self.channel = secured.map_err(Disconnect::Untrusted)?;
        Ok(OptionOutcome::Continue)
    }

    /// Whether an option has to wait until the connection is secured.
    fn needs_tls(&self, option: u32) -> bool {
        self.tls.is_some()
            && !self.channel.is_secured()
            && !matches!(option, proto::OPT_STARTTLS | proto::OPT_ABORT)
    }

    async fn list(&self, number: u32) -> Result<OptionOutcome, Disconnect> {
        for export in self.exports.list() {
            let mut data = (export.name.len() as u32).to_be_bytes().to_vec();
            data.extend(export.name.as_bytes());
            data.extend(export.description.iter().flat_map(|text| text.bytes()));
            self.reply(number, proto::REP_SERVER, &data).await?;
        }
        self.reply(number, proto::REP_ACK, &[]).await
    }

    async fn structured(&mut self, number: u32) -> Result<OptionOutcome, Disconnect> {
        match self.framing {
            Framing::Simple => self.framing = Framing::Structured,
            Framing::Structured => {
                let text = b"structured reply already negotiated";
                return self.reply(number, proto::REP_ERR_INVALID, text).await;
            }
            Framing::Extended => {
                let text = b"extended headers already negotiated";
                return self
                    .reply(number, proto::REP_ERR_EXT_HEADER_REQD, text)
                    .await;
            }
        }
        self.reply(number, proto::REP_ACK, &[]).await
    }

    async fn extended(&mut self, number: u32) -> Result<OptionOutcome, Disconnect> {
        if self.framing == Framing::Extended {
            let text = b"extended headers already negotiated";
            return self.reply(number, proto::REP_ERR_INVALID, text).await;
        }
        self.framing = Framing::Extended;
        self.reply(number, proto::REP_ACK, &[]).await
    }

    /// The transmission flags of `export` in this session.
    fn flags(&self, export: &Export) -> u16 {
        let mut flags = export.flags();
        if self.framing >= Framing::Structured {
            flags |= proto::FLAG_SEND_DF;
        }
        if self.framing >= Framing::Extended {
            flags |= proto::FLAG_BLOCK_STAT_PAYLOAD;
        }
        flags
    }

    async fn export_name(&mut self, name: &str) -> Result<OptionOutcome, Disconnect> {
        let export = self
            .exports
            .find(name)
            .ok_or(Disconnect::Broken("a request for an unknown export"))?;
        let mut data = export.device.size_bytes().to_be_bytes().to_vec();
        data.extend(self.flags(&export).to_be_bytes());
        if !self.no_zeroes {
            data.extend([0; 124]);
        }
        self.send(&data).await?;
        Ok(OptionOutcome::Transmit(export))
    }

    async fn unknown_export(&self, number: u32, name: &str) -> Result<OptionOutcome, Disconnect> {
        let text = format!("export '{}' not present", shortened(name));
        self.reply(number, proto::REP_ERR_UNKNOWN, text.as_bytes())
            .await
    }

    async fn info(
        &mut self,
        number: u32,
        request: InfoRequest<'_>,
    ) -> Result<OptionOutcome, Disconnect> {
        let Some(export) = self.exports.find(request.name) else {
            return self.unknown_export(number, request.name).await;
        };
        if request.wants_name {
            self.inform(number, proto::INFO_NAME, export.name.as_bytes())
                .await?;
        }
        if request.wants_description
            && let Some(description) = &export.description
        {
            self.inform(number, proto::INFO_DESCRIPTION, description.as_bytes())
                .await?;
        }
        let obeyed = request.wants_block_size || number == proto::OPT_INFO;
        let sizes = export.block_sizes(obeyed).map(u32::to_be_bytes).concat();
        self.inform(number, proto::INFO_BLOCK_SIZE, &sizes).await?;
        let mut whole = export.device.size_bytes().to_be_bytes().to_vec();
        whole.extend(self.flags(&export).to_be_bytes());
        self.inform(number, proto::INFO_EXPORT, &whole).await?;
        self.reply(number, proto::REP_ACK, &[]).await?;
        Ok(if number == proto::OPT_GO {
            OptionOutcome::Transmit(export)
        } else {
            OptionOutcome::Continue
        })
    }

    async fn inform(
        &self,
        number: u32,
        kind: u16,
        data: &[u8],
    ) -> Result<OptionOutcome, Disconnect> {
        let mut whole = kind.to_be_bytes().to_vec();
        whole.extend(data);
        self.reply(number, proto::REP_INFO, &whole).await
    }

    async fn meta_context(
        &mut self,
        number: u32,
        query: MetaQuery<'_>,
    ) -> Result<OptionOutcome, Disconnect> {
        let set = number == proto::OPT_SET_META_CONTEXT;
        if set {
            self.contexts = None;
        }
        if self.framing == Framing::Simple {
            let text = b"metadata contexts need structured replies";
            return self.reply(number, proto::REP_ERR_INVALID, text).await;
        }
        let Some(export) = self.exports.find(query.name) else {
            return self.unknown_export(number, query.name).await;
        };
        let wanted = |context: &MetaContext| {
            let named = |query: &&str| match set {
                true => export.is_named(*context, query),
                false => export.is_listed(*context, query),
            };
            query.queries.iter().any(named) || (!set && query.queries.is_empty())
        };
        let contexts: Vec<_> = export.contexts().filter(wanted).collect();
        for context in &contexts {
            // The numbers of a list mean nothing.
            let id = if set { context.id() } else { 0 };
            let mut data = id.to_be_bytes().to_vec();
            data.extend(export.context_name(*context).as_bytes());
            self.reply(number, proto::REP_META_CONTEXT, &data).await?;
        }
        if set {
            self.contexts = Some((export, contexts));
        }
        self.reply(number, proto::REP_ACK, &[]).await
    }

    fn agree(self, export: Arc<Export>) -> NegotiatedSession {
        let contexts = match self.contexts {
            Some((of, contexts)) if Arc::ptr_eq(&of, &export) => contexts,
            _ => Vec::new(),
        };
        NegotiatedSession {
            channel: self.channel,
            export,
            framing: self.framing,
            contexts,
        }
    }
}

/// A name that a client said, as it is repeated to it.
fn shortened(name: &str) -> String {
    if name.len() < MAX_REPEATED_BYTES {
        return name.to_owned();
    }
    let ends = name.char_indices().map(|(at, char)| at + char.len_utf8());
    let end = ends.take_while(|end| *end <= MAX_REPEATED_BYTES).last();
    format!("{}...", &name[..end.unwrap_or(0)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_names_are_not_repeated_whole() {
        let (whole, cut) = ("a".repeat(79), "a".repeat(80));
        assert_eq!(shortened(&whole), whole);
        assert_eq!(shortened(&"a".repeat(4000)), format!("{cut}..."));
        assert_eq!(shortened(&"ä".repeat(41)), format!("{}...", "ä".repeat(40)));
        assert_eq!(
            shortened(&format!("a{}", "ä".repeat(40))),
            format!("a{}...", "ä".repeat(39))
        );
    }
}

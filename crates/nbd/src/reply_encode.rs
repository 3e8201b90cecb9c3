//! Encoding what the server says.

use super::proto;
use super::request::Framing;

/// A reply to an option.
pub fn option_reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(20 + data.len());
    bytes.extend(proto::OPTION_REPLY_MAGIC.to_be_bytes());
    bytes.extend(option.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    // Replies are built here and stay far below 4 GiB.
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes
}

/// Longest header in bytes: an extended chunk with an offset and a 32-bit length.
const MAX_HEAD_BYTES: usize = 44;

/// The part of a reply before its payload, without an allocation.
#[derive(Debug, Clone, Copy)]
pub struct ReplyHeader {
    bytes: [u8; MAX_HEAD_BYTES],
    len_bytes: u8,
}

impl ReplyHeader {
    const fn empty() -> Self {
        ReplyHeader {
            bytes: [0; MAX_HEAD_BYTES],
            len_bytes: 0,
        }
    }

    fn put<const N: usize>(mut self, field: [u8; N]) -> Self {
        let at = usize::from(self.len_bytes);
        self.bytes[at..at + N].copy_from_slice(&field);
        self.len_bytes += N as u8;
        self
    }

    /// The encoded bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len_bytes)]
    }
}

/// Which request is answered, and in which form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplyTo {
    /// How messages look.
    pub framing: Framing,
    /// The client's name for the request.
    pub cookie: u64,
    /// The request's offset in bytes, which extended replies repeat.
    pub offset_bytes: u64,
}

impl ReplyTo {
    /// A simple reply; an answer to anything but an extended request or, with
    /// structured replies, a read.
    pub fn simple(&self, error: u32) -> ReplyHeader {
        ReplyHeader::empty()
            .put(proto::SIMPLE_REPLY_MAGIC.to_be_bytes())
            .put(error.to_be_bytes())
            .put(self.cookie.to_be_bytes())
    }

    fn chunk(&self, kind: u16, last: bool, len_bytes: u32) -> ReplyHeader {
        let flags = if last { proto::REPLY_FLAG_DONE } else { 0 };
        let magic = match self.framing {
            Framing::Extended => proto::EXTENDED_REPLY_MAGIC,
            _ => proto::STRUCTURED_REPLY_MAGIC,
        };
        let head = ReplyHeader::empty()
            .put(magic.to_be_bytes())
            .put(flags.to_be_bytes())
            .put(kind.to_be_bytes())
            .put(self.cookie.to_be_bytes());
        match self.framing {
            Framing::Extended => head
                .put(self.offset_bytes.to_be_bytes())
                .put(u64::from(len_bytes).to_be_bytes()),
            _ => head.put(len_bytes.to_be_bytes()),
        }
    }

    /// The success of a request that has no data to give back.
    pub fn done(&self) -> ReplyHeader {
        match self.framing {
            Framing::Extended => self.chunk(proto::REPLY_TYPE_NONE, true, 0),
            _ => self.simple(0),
        }
    }

    /// The end of a structured read without (more) data.
    pub fn end_of_chunks(&self) -> ReplyHeader {
        self.chunk(proto::REPLY_TYPE_NONE, true, 0)
    }

    /// Data of a read, `len_bytes` bytes at `offset_bytes`; the payload follows.
    pub fn data(&self, offset_bytes: u64, len_bytes: u32, last: bool) -> ReplyHeader {
        match self.framing {
            Framing::Simple => self.simple(0),
            _ => self
                .chunk(proto::REPLY_TYPE_OFFSET_DATA, last, 8 + len_bytes)
                .put(offset_bytes.to_be_bytes()),
        }
    }

    /// A hole of a structured read.
    pub fn hole(&self, offset_bytes: u64, len_bytes: u32, last: bool) -> ReplyHeader {
        self.chunk(proto::REPLY_TYPE_OFFSET_HOLE, last, 12)
            .put(offset_bytes.to_be_bytes())
            .put(len_bytes.to_be_bytes())
    }

    /// The extents of one metadata context; `payload_bytes` bytes of them follow.
    pub fn block_status(
        &self,
        context: u32,
        payload_bytes: u32,
        extents: u32,
        last: bool,
    ) -> ReplyHeader {
        match self.framing {
            Framing::Extended => self
                .chunk(proto::REPLY_TYPE_BLOCK_STATUS_EXT, last, 8 + payload_bytes)
                .put(context.to_be_bytes())
                .put(extents.to_be_bytes()),
            _ => self
                .chunk(proto::REPLY_TYPE_BLOCK_STATUS, last, 4 + payload_bytes)
                .put(context.to_be_bytes()),
        }
    }

    /// An error in chunks; `message_bytes` bytes of text follow.
    pub fn error_chunk(&self, error: u32, message_bytes: u16) -> ReplyHeader {
        self.chunk(proto::REPLY_TYPE_ERROR, true, 6 + u32::from(message_bytes))
            .put(error.to_be_bytes())
            .put(message_bytes.to_be_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_match_the_wire() {
        let address = ReplyTo {
            framing: Framing::Structured,
            cookie: 5,
            offset_bytes: 512,
        };
        assert_eq!(
            address.data(512, 4, true).as_bytes(),
            [
                &proto::STRUCTURED_REPLY_MAGIC.to_be_bytes()[..],
                &[0, 1, 0, 1],
                &5u64.to_be_bytes(),
                &12u32.to_be_bytes(),
                &512u64.to_be_bytes(),
            ]
            .concat()
        );
        assert_eq!(address.done().as_bytes().len(), 16);
    }

    #[test]
    fn the_longest_head_fits() {
        let address = ReplyTo {
            framing: Framing::Extended,
            cookie: 5,
            offset_bytes: 512,
        };
        assert_eq!(address.hole(0, 1, true).as_bytes().len(), MAX_HEAD_BYTES);
        assert_eq!(address.done().as_bytes().len(), 32);
    }
}

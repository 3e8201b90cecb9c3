//! The numbers of the NBD protocol, under the names of its specification.

/// First word of the server's greeting: `NBDMAGIC`.
pub const INIT_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Second word of the greeting, and the start of every option: `IHAVEOPT`.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Second word of a server that knows no options: straight to transmission.
pub const OLDSTYLE_MAGIC: u64 = 0x0000_4202_8186_1253;
/// Start of every reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Start of a compact request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Start of an extended request.
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// Start of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Start of a structured reply chunk.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
/// Start of an extended reply chunk.
pub const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// Handshake flag: the server answers every option.
pub const FLAG_FIXED_NEWSTYLE: u16 = 1 << 0;
/// Handshake flag: the server can leave out the 124 reserved zero bytes.
pub const FLAG_NO_ZEROES: u16 = 1 << 1;
/// Client flag: the client reads the answers to its options.
pub const FLAG_C_FIXED_NEWSTYLE: u32 = 1 << 0;
/// Client flag: the client wants no reserved zero bytes.
pub const FLAG_C_NO_ZEROES: u32 = 1 << 1;

/// Option: choose an export and go to transmission, without an answer on failure.
pub const OPT_EXPORT_NAME: u32 = 1;
/// Option: end the session.
pub const OPT_ABORT: u32 = 2;
/// Option: list the exports.
pub const OPT_LIST: u32 = 3;
/// Option: switch to TLS.
pub const OPT_STARTTLS: u32 = 5;
/// Option: describe an export.
pub const OPT_INFO: u32 = 6;
/// Option: describe an export and go to transmission.
pub const OPT_GO: u32 = 7;
/// Option: answer requests with structured chunks.
pub const OPT_STRUCTURED_REPLY: u32 = 8;
/// Option: list the metadata contexts of an export.
pub const OPT_LIST_META_CONTEXT: u32 = 9;
/// Option: choose the metadata contexts that block status reports.
pub const OPT_SET_META_CONTEXT: u32 = 10;
/// Option: use 64-bit request and reply headers.
pub const OPT_EXTENDED_HEADERS: u32 = 11;

/// Option reply: done.
pub const REP_ACK: u32 = 1;
/// Option reply: one export of a list.
pub const REP_SERVER: u32 = 2;
/// Option reply: one piece of information about an export.
pub const REP_INFO: u32 = 3;
/// Option reply: one metadata context.
pub const REP_META_CONTEXT: u32 = 4;
/// Bit of every option reply that is an error.
pub const REP_FLAG_ERROR: u32 = 1 << 31;
/// Option error: not known here.
pub const REP_ERR_UNSUP: u32 = REP_FLAG_ERROR | 1;
/// Option error: the server's policy forbids it.
pub const REP_ERR_POLICY: u32 = REP_FLAG_ERROR | 2;
/// Option error: malformed or out of place.
pub const REP_ERR_INVALID: u32 = REP_FLAG_ERROR | 3;
/// Option error: the server's platform cannot do it.
pub const REP_ERR_PLATFORM: u32 = REP_FLAG_ERROR | 4;
/// Option error: only after the switch to TLS.
pub const REP_ERR_TLS_REQD: u32 = REP_FLAG_ERROR | 5;
/// Option error: no such export.
pub const REP_ERR_UNKNOWN: u32 = REP_FLAG_ERROR | 6;
/// Option error: the server is going away.
pub const REP_ERR_SHUTDOWN: u32 = REP_FLAG_ERROR | 7;
/// Option error: the client must ask for the block sizes first.
pub const REP_ERR_BLOCK_SIZE_REQD: u32 = REP_FLAG_ERROR | 8;
/// Option error: more data than the server takes.
pub const REP_ERR_TOO_BIG: u32 = REP_FLAG_ERROR | 9;
/// Option error: extended headers are in use, so this makes no sense any more.
pub const REP_ERR_EXT_HEADER_REQD: u32 = REP_FLAG_ERROR | 10;

/// Information: size and transmission flags.
pub const INFO_EXPORT: u16 = 0;
/// Information: the export's canonical name.
pub const INFO_NAME: u16 = 1;
/// Information: a description for people.
pub const INFO_DESCRIPTION: u16 = 2;
/// Information: minimum, preferred and maximum block size.
pub const INFO_BLOCK_SIZE: u16 = 3;

/// Transmission flag: always set.
pub const FLAG_HAS_FLAGS: u16 = 1 << 0;
/// Transmission flag: writes are refused.
pub const FLAG_READ_ONLY: u16 = 1 << 1;
/// Transmission flag: `CMD_FLUSH` works.
pub const FLAG_SEND_FLUSH: u16 = 1 << 2;
/// Transmission flag: `CMD_FLAG_FUA` works.
pub const FLAG_SEND_FUA: u16 = 1 << 3;
/// Transmission flag: the device turns, so seeks cost.
pub const FLAG_ROTATIONAL: u16 = 1 << 4;
/// Transmission flag: `CMD_TRIM` works.
pub const FLAG_SEND_TRIM: u16 = 1 << 5;
/// Transmission flag: `CMD_WRITE_ZEROES` works.
pub const FLAG_SEND_WRITE_ZEROES: u16 = 1 << 6;
/// Transmission flag: `CMD_FLAG_DF` works.
pub const FLAG_SEND_DF: u16 = 1 << 7;
/// Transmission flag: several connections see one another's flushed writes.
pub const FLAG_CAN_MULTI_CONN: u16 = 1 << 8;
/// Transmission flag: the size may change.
pub const FLAG_SEND_RESIZE: u16 = 1 << 9;
/// Transmission flag: `CMD_CACHE` works.
pub const FLAG_SEND_CACHE: u16 = 1 << 10;
/// Transmission flag: `CMD_FLAG_FAST_ZERO` works.
pub const FLAG_SEND_FAST_ZERO: u16 = 1 << 11;
/// Transmission flag: block status takes a payload that selects contexts.
pub const FLAG_BLOCK_STAT_PAYLOAD: u16 = 1 << 12;

/// Request: read.
pub const CMD_READ: u16 = 0;
/// Request: write.
pub const CMD_WRITE: u16 = 1;
/// Request: end the session.
pub const CMD_DISC: u16 = 2;
/// Request: make completed writes durable.
pub const CMD_FLUSH: u16 = 3;
/// Request: give space back.
pub const CMD_TRIM: u16 = 4;
/// Request: bring a range into the server's cache.
pub const CMD_CACHE: u16 = 5;
/// Request: make a range read as zeroes.
pub const CMD_WRITE_ZEROES: u16 = 6;
/// Request: what is known of a range.
pub const CMD_BLOCK_STATUS: u16 = 7;

/// Request flag: durable when answered.
pub const CMD_FLAG_FUA: u16 = 1 << 0;
/// Request flag: write zeroes out rather than punch a hole.
pub const CMD_FLAG_NO_HOLE: u16 = 1 << 1;
/// Request flag: answer a read in one piece.
pub const CMD_FLAG_DF: u16 = 1 << 2;
/// Request flag: one extent is enough.
pub const CMD_FLAG_REQ_ONE: u16 = 1 << 3;
/// Request flag: fail rather than write zeroes out slowly.
pub const CMD_FLAG_FAST_ZERO: u16 = 1 << 4;
/// Request flag: the length is that of a payload (extended headers only).
pub const CMD_FLAG_PAYLOAD_LEN: u16 = 1 << 5;

/// Chunk flag: the last one of its reply.
pub const REPLY_FLAG_DONE: u16 = 1 << 0;
/// Chunk: nothing to say.
pub const REPLY_TYPE_NONE: u16 = 0;
/// Chunk: an offset and the data there.
pub const REPLY_TYPE_OFFSET_DATA: u16 = 1;
/// Chunk: an offset and how many bytes read as zeroes there.
pub const REPLY_TYPE_OFFSET_HOLE: u16 = 2;
/// Chunk: 32-bit extents of one metadata context.
pub const REPLY_TYPE_BLOCK_STATUS: u16 = 5;
/// Chunk: 64-bit extents of one metadata context.
pub const REPLY_TYPE_BLOCK_STATUS_EXT: u16 = 6;
/// Chunk: an error.
pub const REPLY_TYPE_ERROR: u16 = (1 << 15) | 1;
/// Chunk: an error at an offset.
pub const REPLY_TYPE_ERROR_OFFSET: u16 = (1 << 15) | 2;

/// `base:allocation`: the range takes no space.
pub const STATE_HOLE: u32 = 1 << 0;
/// `base:allocation`: the range reads as zeroes.
pub const STATE_ZERO: u32 = 1 << 1;
/// `qemu:dirty-bitmap`: the range is dirty.
pub const STATE_DIRTY: u32 = 1 << 0;

/// Error: not allowed.
pub const EPERM: u32 = 1;
/// Error: the storage failed.
pub const EIO: u32 = 5;
/// Error: out of memory.
pub const ENOMEM: u32 = 12;
/// Error: the request makes no sense.
pub const EINVAL: u32 = 22;
/// Error: no space, or a write beyond the end.
pub const ENOSPC: u32 = 28;
/// Error: a reply would be too long for one chunk.
pub const EOVERFLOW: u32 = 75;
/// Error: cannot be done (fast).
pub const ENOTSUP: u32 = 95;
/// Error: the server is going away.
pub const ESHUTDOWN: u32 = 108;

/// Longest string in bytes that the protocol allows.
pub const MAX_STRING_BYTES: usize = 4096;
/// Longest read or write in bytes that is served.
pub const MAX_PAYLOAD_BYTES: u64 = 32 << 20;

/// Name of the context that tells holes and zeroes.
pub const CONTEXT_ALLOCATION: &str = "base:allocation";
/// Name of the context that tells which layer of a backing chain holds a range.
pub const CONTEXT_DEPTH: &str = "qemu:allocation-depth";
/// What stands before a bitmap's name in the name of its context.
pub const CONTEXT_BITMAP_PREFIX: &str = "qemu:dirty-bitmap:";

/// The port that is set aside for the protocol.
pub const DEFAULT_PORT: u16 = 10809;

/// The specification's word for an option, as messages name it.
pub fn option_name(option: u32) -> &'static str {
    match option {
        OPT_EXPORT_NAME => "export name",
        OPT_ABORT => "abort",
        OPT_LIST => "list",
        OPT_STARTTLS => "starttls",
        OPT_INFO => "info",
        OPT_GO => "go",
        OPT_STRUCTURED_REPLY => "structured reply",
        OPT_LIST_META_CONTEXT => "list meta context",
        OPT_SET_META_CONTEXT => "set meta context",
        OPT_EXTENDED_HEADERS => "extended headers",
        _ => "<unknown>",
    }
}

/// The `errno` that a number of the protocol means; what it does not define is a
/// request that makes no sense.
pub fn system_errno(error: u32) -> i32 {
    match error {
        EPERM => libc::EPERM,
        EIO => libc::EIO,
        ENOMEM => libc::ENOMEM,
        ENOSPC => libc::ENOSPC,
        EOVERFLOW => libc::EOVERFLOW,
        ENOTSUP => libc::ENOTSUP,
        ESHUTDOWN => libc::ESHUTDOWN,
        _ => libc::EINVAL,
    }
}

/// The protocol's number for an `errno`.
pub fn error_number(errno: i32) -> u32 {
    match errno {
        libc::EPERM | libc::EACCES | libc::EROFS => EPERM,
        libc::ENOMEM => ENOMEM,
        libc::EINVAL => EINVAL,
        libc::ENOSPC | libc::EDQUOT | libc::EFBIG => ENOSPC,
        libc::EOVERFLOW => EOVERFLOW,
        libc::ENOTSUP => ENOTSUP,
        libc::ESHUTDOWN => ESHUTDOWN,
        _ => EIO,
    }
}

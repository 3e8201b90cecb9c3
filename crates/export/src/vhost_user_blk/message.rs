//! Messages of the vhost-user protocol: bytes to values and back. No I/O.
//!
//! Numbers are in the byte order of the machine: both ends are on it. Whatever the bytes are,
//! decoding ends with a message or an error.

use vellum_io::{Error, ErrorKind, Result};

/// Bytes of a message's header.
pub(super) const HEADER_BYTES: usize = 12;
/// Most bytes of what follows a header.
pub(super) const MAX_PAYLOAD_BYTES: usize = 4096;
/// Most regions of a table of memory.
pub(super) const MAX_TABLE_REGIONS: usize = 8;
/// Bytes of a region's description.
const REGION_BYTES: usize = 32;
/// Most bytes of configuration space that one message moves.
pub(super) const MAX_CONFIG_BYTES: usize = 256;

const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const FLAG_REPLY: u32 = 1 << 2;
const FLAG_NEED_REPLY: u32 = 1 << 3;

/// Of a ring's addresses: writes to it are logged.
const RING_IS_LOGGED: u32 = 1;

/// The request by which a server tells its client that the configuration has changed.
const CONFIG_CHANGED: u32 = 2;

/// Bits of the protocol's own features.
pub(super) mod protocol_feature {
    /// Several queues.
    pub(in super::super) const MULTIPLE_QUEUES: u64 = 1 << 0;
    /// Bits for pages that were written come in memory of the client's.
    pub(in super::super) const LOG_MEMORY: u64 = 1 << 1;
    /// Requests without an answer of their own are acknowledged where that is asked for.
    pub(in super::super) const REPLY_ACK: u64 = 1 << 3;
    /// The server may send requests.
    pub(in super::super) const BACKEND_REQUESTS: u64 = 1 << 5;
    /// The configuration space is read and written by messages.
    pub(in super::super) const CONFIG: u64 = 1 << 9;
    /// Requests in flight are noted in memory that outlives the server.
    pub(in super::super) const IN_FLIGHT: u64 = 1 << 12;
    /// Regions of memory come and go one by one.
    pub(in super::super) const MEMORY_SLOTS: u64 = 1 << 15;
}

/// A region of a guest's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RegionDescription {
    /// Where the guest sees it.
    pub(super) guest_address: u64,
    /// Its length in bytes.
    pub(super) len_bytes: u64,
    /// Where the client sees it.
    pub(super) client_address: u64,
    /// Where it begins in its file.
    pub(super) offset_bytes: u64,
}

/// Where the parts of a queue are, as the client sees them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RingAddresses {
    /// The descriptor table.
    pub(super) descriptors: u64,
    /// The used ring.
    pub(super) used: u64,
    /// The available ring.
    pub(super) available: u64,
    /// Where the guest has the used ring, if its pages are to be told when they were written.
    pub(super) used_for_log: Option<u64>,
}

/// Memory with a bit for each page of the guest's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LogArea {
    /// Its length in bytes.
    pub(super) len_bytes: u64,
    /// Where it begins in its file.
    pub(super) offset_bytes: u64,
}

/// Memory that requests in flight are noted in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct InFlightArea {
    /// Its length in bytes.
    pub(super) len_bytes: u64,
    /// Where it begins in its file.
    pub(super) offset_bytes: u64,
    /// For so many queues.
    pub(super) queues: u16,
    /// Of so many entries each.
    pub(super) queue_size: u16,
}

/// A part of the configuration space.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ConfigPart {
    /// Where it begins.
    pub(super) offset_bytes: u32,
    /// Who asks, and why: handed back.
    pub(super) flags: u32,
    /// What is to be there, or room for what is.
    pub(super) bytes: Vec<u8>,
}

/// What a client asks for: the requests of the protocol, whose names stand beside those that differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Message {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    /// SET_MEM_TABLE
    SetMemoryTable(Vec<RegionDescription>),
    /// SET_LOG_BASE
    SetLog(LogArea),
    /// SET_LOG_FD: what is to be told of bits that were set.
    SetLogDescriptor,
    /// SET_VRING_NUM
    SetRingSize {
        queue: u32,
        size: u32,
    },
    /// SET_VRING_ADDR
    SetRingAddresses {
        queue: u32,
        addresses: RingAddresses,
    },
    /// SET_VRING_BASE
    SetRingBase {
        queue: u32,
        base: u32,
    },
    /// GET_VRING_BASE
    GetRingBase {
        queue: u32,
    },
    /// SET_VRING_KICK
    SetKick {
        queue: u32,
        has_descriptor: bool,
    },
    /// SET_VRING_CALL
    SetCall {
        queue: u32,
        has_descriptor: bool,
    },
    /// SET_VRING_ERR
    SetError {
        queue: u32,
        has_descriptor: bool,
    },
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    /// GET_QUEUE_NUM
    GetQueueCount,
    /// SET_VRING_ENABLE
    SetRingEnable {
        queue: u32,
        enable: bool,
    },
    /// SET_BACKEND_REQ_FD
    SetBackendChannel,
    GetConfig(ConfigPart),
    SetConfig(ConfigPart),
    /// GET_INFLIGHT_FD
    GetInFlight(InFlightArea),
    /// SET_INFLIGHT_FD
    SetInFlight(InFlightArea),
    ResetDevice,
    /// GET_MAX_MEM_SLOTS
    GetMemorySlots,
    /// ADD_MEM_REG
    AddRegion(RegionDescription),
    /// REM_MEM_REG
    RemoveRegion(RegionDescription),
}

/// What stands in front of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    request: u32,
    flags: u32,
    /// Bytes that follow.
    pub(super) payload_bytes: usize,
}

pub(super) fn broken(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Protocol, "vhost-user", message)
}

impl Header {
    /// Takes a header apart.
    pub(super) fn decode(bytes: [u8; HEADER_BYTES]) -> Result<Header> {
        let mut fields = Fields(&bytes);
        let (request, flags, size) = (fields.u32()?, fields.u32()?, fields.u32()?);
        if flags & VERSION_MASK != VERSION || flags & FLAG_REPLY != 0 {
            return Err(broken(format!(
                "request {request} has the flags {flags:#x}"
            )));
        }
        match usize::try_from(size) {
            Ok(payload_bytes) if payload_bytes <= MAX_PAYLOAD_BYTES => Ok(Header {
                request,
                flags,
                payload_bytes,
            }),
            _ => Err(broken(format!("request {request} has {size} bytes"))),
        }
    }

    /// Whether the client waits for an acknowledgement.
    pub(super) fn needs_reply(&self) -> bool {
        self.flags & FLAG_NEED_REPLY != 0
    }

    /// The answer to this request.
    pub(super) fn reply(&self, payload: &[u8]) -> Vec<u8> {
        encode(self.request, VERSION | FLAG_REPLY, payload)
    }
}

fn encode(request: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER_BYTES + payload.len());
    for field in [request, flags, payload.len() as u32] {
        bytes.extend(field.to_ne_bytes());
    }
    bytes.extend(payload);
    bytes
}

/// The server's request that tells of another configuration.
pub(super) fn config_changed() -> Vec<u8> {
    encode(CONFIG_CHANGED, VERSION, &[])
}

impl LogArea {
    /// As it stands in the answer, which every client waits for.
    pub(super) fn encode(&self) -> Vec<u8> {
        [
            self.len_bytes.to_ne_bytes(),
            self.offset_bytes.to_ne_bytes(),
        ]
        .concat()
    }
}

impl InFlightArea {
    /// As it stands in an answer.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(24);
        bytes.extend(self.len_bytes.to_ne_bytes());
        bytes.extend(self.offset_bytes.to_ne_bytes());
        bytes.extend(self.queues.to_ne_bytes());
        bytes.extend(self.queue_size.to_ne_bytes());
        // The structure is as long as a compiler makes it.
        bytes.extend([0; 4]);
        bytes
    }
}

impl ConfigPart {
    /// As it stands in an answer; without bytes it says that there is no such part.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(12 + self.bytes.len());
        for field in [self.offset_bytes, self.bytes.len() as u32, self.flags] {
            bytes.extend(field.to_ne_bytes());
        }
        bytes.extend(&self.bytes);
        bytes
    }
}

/// The state of a queue as it stands in an answer.
pub(super) fn encode_ring_state(queue: u32, number: u32) -> Vec<u8> {
    [queue.to_ne_bytes(), number.to_ne_bytes()].concat()
}

impl Message {
    /// Takes what follows a header apart.
    pub(super) fn decode(header: &Header, payload: &[u8]) -> Result<Message> {
        let mut fields = Fields(payload);
        let message = Message::take(header.request, &mut fields)?;
        if fields.0.is_empty() {
            return Ok(message);
        }
        let (request, len) = (header.request, payload.len());
        Err(broken(format!("request {request} has {len} bytes")))
    }

    fn take(request: u32, fields: &mut Fields<'_>) -> Result<Message> {
        Ok(match request {
            1 => Message::GetFeatures,
            2 => Message::SetFeatures(fields.u64()?),
            3 => Message::SetOwner,
            4 => Message::ResetOwner,
            5 => Message::SetMemoryTable(fields.table()?),
            6 => Message::SetLog(LogArea {
                len_bytes: fields.u64()?,
                offset_bytes: fields.u64()?,
            }),
            7 => Message::SetLogDescriptor,
            8 => {
                let (queue, size) = (fields.u32()?, fields.u32()?);
                Message::SetRingSize { queue, size }
            }
            9 => fields.ring_addresses()?,
            10 => {
                let (queue, base) = (fields.u32()?, fields.u32()?);
                Message::SetRingBase { queue, base }
            }
            11 => {
                let (queue, _) = (fields.u32()?, fields.u32()?);
                Message::GetRingBase { queue }
            }
            12 => {
                let (queue, has_descriptor) = fields.queue_and_descriptor()?;
                Message::SetKick {
                    queue,
                    has_descriptor,
                }
            }
            13 => {
                let (queue, has_descriptor) = fields.queue_and_descriptor()?;
                Message::SetCall {
                    queue,
                    has_descriptor,
                }
            }
            14 => {
                let (queue, has_descriptor) = fields.queue_and_descriptor()?;
                Message::SetError {
                    queue,
                    has_descriptor,
                }
            }
            15 => Message::GetProtocolFeatures,
            16 => Message::SetProtocolFeatures(fields.u64()?),
            17 => Message::GetQueueCount,
            18 => {
                let (queue, enable) = (fields.u32()?, fields.u32()? != 0);
                Message::SetRingEnable { queue, enable }
            }
            21 => Message::SetBackendChannel,
            24 => Message::GetConfig(fields.config()?),
            25 => Message::SetConfig(fields.config()?),
            31 => Message::GetInFlight(fields.in_flight()?),
            32 => Message::SetInFlight(fields.in_flight()?),
            34 => Message::ResetDevice,
            36 => Message::GetMemorySlots,
            37 => Message::AddRegion(fields.single_region()?),
            38 => Message::RemoveRegion(fields.single_region()?),
            _ => return Err(broken(format!("request {request} is not known"))),
        })
    }
}

/// Bytes that were not taken yet.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        match self.0.split_first_chunk() {
            Some((taken, rest)) => {
                self.0 = rest;
                Ok(*taken)
            }
            None => Err(broken("a message is too short")),
        }
    }

    fn u16(&mut self) -> Result<u16> {
        self.array().map(u16::from_ne_bytes)
    }

    fn u32(&mut self) -> Result<u32> {
        self.array().map(u32::from_ne_bytes)
    }

    fn u64(&mut self) -> Result<u64> {
        self.array().map(u64::from_ne_bytes)
    }

    fn region(&mut self) -> Result<RegionDescription> {
        Ok(RegionDescription {
            guest_address: self.u64()?,
            len_bytes: self.u64()?,
            client_address: self.u64()?,
            offset_bytes: self.u64()?,
        })
    }

    fn single_region(&mut self) -> Result<RegionDescription> {
        self.u64()?;
        self.region()
    }

    fn table(&mut self) -> Result<Vec<RegionDescription>> {
        let (count, _) = (self.u32()? as usize, self.u32()?);
        // Some send room for all regions, whatever their number.
        if count > MAX_TABLE_REGIONS || self.0.len() < count * REGION_BYTES {
            return Err(broken(format!("a table of {count} regions of memory")));
        }
        let regions = (0..count).map(|_| self.region()).collect();
        self.0 = &[];
        regions
    }

    fn ring_addresses(&mut self) -> Result<Message> {
        let (queue, flags) = (self.u32()?, self.u32()?);
        let mut addresses = RingAddresses {
            descriptors: self.u64()?,
            used: self.u64()?,
            available: self.u64()?,
            used_for_log: None,
        };
        let used = self.u64()?;
        addresses.used_for_log = (flags & RING_IS_LOGGED != 0).then_some(used);
        Ok(Message::SetRingAddresses { queue, addresses })
    }

    fn queue_and_descriptor(&mut self) -> Result<(u32, bool)> {
        let number = self.u64()?;
        Ok(((number & 0xff) as u32, number & 0x100 == 0))
    }

    fn config(&mut self) -> Result<ConfigPart> {
        let (offset_bytes, len, flags) = (self.u32()?, self.u32()? as usize, self.u32()?);
        if len > MAX_CONFIG_BYTES || len > self.0.len() {
            return Err(broken(format!("{len} bytes of configuration")));
        }
        let bytes = self.0[..len].to_vec();
        self.0 = &[];
        Ok(ConfigPart {
            offset_bytes,
            flags,
            bytes,
        })
    }

    fn in_flight(&mut self) -> Result<InFlightArea> {
        let area = InFlightArea {
            len_bytes: self.u64()?,
            offset_bytes: self.u64()?,
            queues: self.u16()?,
            queue_size: self.u16()?,
        };
        // With or without what a compiler puts behind it.
        if self.0.len() == 4 {
            self.0 = &[];
        }
        Ok(area)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(request: u32, flags: u32, size: u32) -> [u8; HEADER_BYTES] {
        let fields = [request, flags, size].map(u32::to_ne_bytes);
        fields.concat().try_into().expect("twelve bytes")
    }

    fn decode(request: u32, payload: &[u8]) -> Result<Message> {
        let header = Header::decode(header(request, 1, payload.len() as u32))?;
        Message::decode(&header, payload)
    }

    #[test]
    fn headers_of_other_versions_replies_and_long_ones_are_refused() {
        assert!(Header::decode(header(1, 9, 0)).is_ok_and(|header| header.needs_reply()));
        for (flags, size) in [(0, 0), (2, 0), (5, 0), (1, 4097), (1, u32::MAX)] {
            assert!(
                Header::decode(header(1, flags, size)).is_err(),
                "{flags} {size}"
            );
        }
    }

    #[test]
    fn messages_have_the_length_that_they_need() {
        assert_eq!(decode(1, &[]).expect("a message"), Message::GetFeatures);
        assert!(decode(1, &[0]).is_err());
        assert!(decode(2, &[0; 7]).is_err() && decode(2, &[0; 9]).is_err());
        assert!(decode(99, &[]).is_err());
        let kick = decode(12, &0x103_u64.to_ne_bytes()).expect("a message");
        let has_descriptor = false;
        assert_eq!(
            kick,
            Message::SetKick {
                queue: 3,
                has_descriptor
            }
        );
    }

    #[test]
    fn tables_and_configuration_claim_no_more_than_is_there() {
        let mut table = [2_u32.to_ne_bytes(), [0; 4]].concat();
        table.extend([1; 2 * REGION_BYTES]);
        let Ok(Message::SetMemoryTable(regions)) = decode(5, &table) else {
            panic!("a table")
        };
        assert_eq!(regions.len(), 2);
        assert!(decode(5, &table[..table.len() - 1]).is_err());
        table[0] = 9;
        assert!(decode(5, &table).is_err());
        let config = |len: u32| [0, len, 0].map(u32::to_ne_bytes).concat();
        assert!(decode(24, &config(0)).is_ok());
        assert!(decode(24, &config(1)).is_err());
        assert!(decode(24, &[config(300), vec![0; 300]].concat()).is_err());
    }

    #[test]
    fn no_bytes_do_harm() {
        let mut random = fastrand::Rng::with_seed(17);
        for _ in 0..20_000 {
            let request = random.u32(..45);
            let payload: Vec<u8> = (0..random.usize(..300)).map(|_| random.u8(..)).collect();
            let _ = decode(request, &payload);
        }
    }
}

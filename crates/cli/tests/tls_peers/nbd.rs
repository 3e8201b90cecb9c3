//! So much of NBD as hostile peers need.

use std::io::{self, Read, Write};

pub const OPTION_MAGIC: u64 = 0x4948_4156_454F_5054;
const INIT_MAGIC: u64 = 0x4e42_444d_4147_4943;
const REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;

pub const OPT_EXPORT_NAME: u32 = 1;
const OPT_ABORT: u32 = 2;
pub const OPT_STARTTLS: u32 = 5;
const OPT_INFO: u32 = 6;
pub const OPT_GO: u32 = 7;

pub const REP_ACK: u32 = 1;
const REP_INFO: u32 = 3;
pub const REP_ERR_UNSUP: u32 = 1 << 31 | 1;

const CMD_READ: u16 = 0;
const CMD_DISC: u16 = 2;

/// What a forger's disk is made of.
pub const FORGED: &[u8; 8] = b"FORGED! ";
/// The size of that disk.
pub const SIZE_BYTES: u64 = 64 << 10;

/// What a server says first, with fixed newstyle or without.
pub fn greeting(fixed: bool) -> Vec<u8> {
    let mut bytes = INIT_MAGIC.to_be_bytes().to_vec();
    bytes.extend(OPTION_MAGIC.to_be_bytes());
    bytes.extend(if fixed { 3_u16 } else { 2 }.to_be_bytes());
    bytes
}

pub fn option_reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = REPLY_MAGIC.to_be_bytes().to_vec();
    bytes.extend(option.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend(u32::try_from(data.len()).expect("short").to_be_bytes());
    bytes.extend(data);
    bytes
}

pub fn option(number: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
    bytes.extend(number.to_be_bytes());
    bytes.extend(u32::try_from(data.len()).expect("short").to_be_bytes());
    bytes.extend(data);
    bytes
}

pub fn bytes<const N: usize>(peer: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    peer.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn number(peer: &mut impl Read) -> io::Result<u32> {
    bytes(peer).map(u32::from_be_bytes)
}

/// Receives an option: its number.
pub fn next_option(peer: &mut impl Read) -> io::Result<u32> {
    if u64::from_be_bytes(bytes(peer)?) != OPTION_MAGIC {
        return Err(io::Error::other("no option"));
    }
    let option = number(peer)?;
    let len = number(peer)?;
    io::copy(&mut peer.take(u64::from(len)), &mut io::sink())?;
    Ok(option)
}

/// Serves the forged disk from the first option on. `limit`: the answers to reads end
/// after so many of their bytes.
pub fn serve(peer: &mut (impl Read + Write), limit: Option<usize>) -> io::Result<()> {
    loop {
        match next_option(peer)? {
            option @ (OPT_GO | OPT_INFO) => {
                let mut info = vec![0, 0];
                info.extend(SIZE_BYTES.to_be_bytes());
                info.extend([0, 1]);
                let mut said = option_reply(option, REP_INFO, &info);
                said.extend(option_reply(option, REP_ACK, &[]));
                peer.write_all(&said)?;
                if option == OPT_GO {
                    return transmit(peer, limit);
                }
            }
            OPT_EXPORT_NAME => {
                let mut said = SIZE_BYTES.to_be_bytes().to_vec();
                said.extend([0, 1]);
                peer.write_all(&said)?;
                return transmit(peer, limit);
            }
            OPT_ABORT => return peer.write_all(&option_reply(OPT_ABORT, REP_ACK, &[])),
            other => peer.write_all(&option_reply(other, REP_ERR_UNSUP, &[]))?,
        }
    }
}

fn transmit(peer: &mut (impl Read + Write), limit: Option<usize>) -> io::Result<()> {
    loop {
        if number(peer)? != REQUEST_MAGIC {
            return Err(io::Error::other("no request"));
        }
        let head: [u8; 4] = bytes(peer)?;
        let command = u16::from_be_bytes([head[2], head[3]]);
        let cookie: [u8; 8] = bytes(peer)?;
        let offset = u64::from_be_bytes(bytes(peer)?);
        let len = number(peer)? as usize;
        if command == CMD_DISC {
            return Ok(());
        }
        let mut said = SIMPLE_REPLY_MAGIC.to_be_bytes().to_vec();
        said.extend(if command == CMD_READ { 0_u32 } else { 22 }.to_be_bytes());
        said.extend(cookie);
        if command == CMD_READ {
            let from = usize::try_from(offset % 8).expect("small");
            said.extend(FORGED.iter().cycle().skip(from).take(len));
        }
        if let Some(limit) = limit {
            peer.write_all(&said[..said.len().min(limit)])?;
            return Ok(());
        }
        peer.write_all(&said)?;
    }
}

/// Takes a server's greeting and answers it.
pub fn greet(peer: &mut (impl Read + Write)) -> io::Result<()> {
    bytes::<18>(peer)?;
    peer.write_all(&3_u32.to_be_bytes())
}

/// Sends an option and takes the kind of the last answer to it.
pub fn ask(peer: &mut (impl Read + Write), number: u32, data: &[u8]) -> io::Result<u32> {
    peer.write_all(&option(number, data))?;
    answer(peer)
}

/// Takes the kind of the last answer to an option.
pub fn answer(peer: &mut impl Read) -> io::Result<u32> {
    loop {
        if u64::from_be_bytes(bytes(peer)?) != REPLY_MAGIC {
            return Err(io::Error::other("no answer"));
        }
        number(peer)?;
        let kind = number(peer)?;
        let len = number(peer)?;
        io::copy(&mut peer.take(u64::from(len)), &mut io::sink())?;
        if kind == REP_ACK || kind & 1 << 31 != 0 {
            return Ok(kind);
        }
    }
}

/// Chooses the default export and reads its first bytes.
pub fn read_disk(peer: &mut (impl Read + Write)) -> io::Result<[u8; 8]> {
    let kind = ask(peer, OPT_GO, &[0; 6])?;
    if kind != REP_ACK {
        return Err(io::Error::other(format!("refused with {kind:#x}")));
    }
    let mut request = REQUEST_MAGIC.to_be_bytes().to_vec();
    request.extend([0; 4]);
    request.extend(7_u64.to_be_bytes());
    request.extend(0_u64.to_be_bytes());
    request.extend(8_u32.to_be_bytes());
    peer.write_all(&request)?;
    let head: [u8; 16] = bytes(peer)?;
    if head[..4] != SIMPLE_REPLY_MAGIC.to_be_bytes() || head[4..8] != [0; 4] {
        return Err(io::Error::other("the read failed"));
    }
    bytes(peer)
}

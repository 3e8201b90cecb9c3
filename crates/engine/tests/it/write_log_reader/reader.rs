//! A reader of write logs by the text of FORMAT.md, section 7b: it shares no code with Vellum.

const BLOCK: usize = 4096;
const RING: usize = 2 * BLOCK;
const END_OF_DISK: u64 = (1 << 63) - 1;

/// Bytes that a guest range holds after a replay.
pub type Written = (usize, Vec<u8>);

fn number(bytes: &[u8], at: usize, width: usize) -> u64 {
    let bytes = bytes.get(at..at + width).unwrap_or(&[]);
    bytes
        .iter()
        .fold(0, |sum, byte| sum << 8 | u64::from(*byte))
}

/// Bit by bit.
pub fn crc32c(parts: &[&[u8]]) -> u64 {
    let mut crc = u32::MAX;
    for byte in parts.concat() {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = match crc & 1 {
                1 => (crc >> 1) ^ 0x82f6_3b78,
                _ => crc >> 1,
            };
        }
    }
    u64::from(!crc)
}

/// Whether the image has the incompatible bit.
pub fn is_marked(image: &[u8]) -> bool {
    number(image, 4, 4) >= 3 && number(image, 72, 8) >> 47 & 1 == 1
}

/// Identity and name of the log that the image's extension names.
pub fn extension(image: &[u8]) -> Result<([u8; 16], String), String> {
    let (id, name) = extension_bytes(image)?;
    Ok((id, String::from_utf8_lossy(name).into_owned()))
}

fn extension_bytes(image: &[u8]) -> Result<([u8; 16], &[u8]), String> {
    let mut at = number(image, 100, 4) as usize;
    let mut found = Err("no extension".to_owned());
    loop {
        let (kind, length) = (number(image, at, 4), number(image, at + 4, 4) as usize);
        if kind == 0 {
            return found;
        }
        let data = image.get(at + 8..at + 8 + length).ok_or("cut")?;
        if kind == 0x564c_4c4a {
            let (id, name) = data.split_first_chunk::<16>().ok_or("no identity")?;
            if !(1..=1023).contains(&name.len()) {
                return Err("length of the name".to_owned());
            }
            found = Ok((*id, name));
        }
        at += 8 + length.next_multiple_of(8);
    }
}

/// The bytes of a log that lies inside the image.
pub fn inside(image: &[u8]) -> Option<&[u8]> {
    let (_, name) = extension_bytes(image).ok()?;
    let is_vouched = number(image, 88, 8) >> 44 & 1 == 1;
    if name.len() != 24 || name[..8] != [0; 8] || !is_vouched {
        return None;
    }
    let (start, len) = (number(name, 8, 8) as usize, number(name, 16, 8) as usize);
    image.get(start..start + len)
}

#[derive(Debug, Clone, Copy)]
pub struct Superblock {
    pub id: [u8; 16],
    pub length: u64,
    pub generation: u64,
    pub start: u64,
    pub sequence: u64,
    pub batch: u64,
}

fn superblock(block: &[u8]) -> Result<Option<Superblock>, String> {
    let Some(raw) = block.get(..72) else {
        return Ok(None);
    };
    let crc = crc32c(&[&raw[..12], &raw[16..]]);
    if raw[..8] != *b"VLLMWLOG" || number(raw, 12, 4) != crc {
        return Ok(None);
    }
    if number(raw, 8, 4) != 1 {
        return Err("another version".to_owned());
    }
    let [length, generation, start, sequence, batch] =
        [32, 40, 48, 56, 64].map(|at| number(raw, at, 8));
    let places_hold = (18 * 4096..=1 << 30).contains(&length)
        && (8192..length).contains(&start)
        && (length | start) % 4096 == 0;
    if !places_hold || generation >> 48 != 0 || (sequence | batch) >> 63 != 0 {
        return Err("a superblock outside the limits".to_owned());
    }
    let id = *raw[16..].first_chunk().unwrap();
    Ok(Some(Superblock {
        id,
        length,
        generation,
        start,
        sequence,
        batch,
    }))
}

/// The superblock that counts.
pub fn newest(log: &[u8]) -> Result<Option<Superblock>, String> {
    let first = superblock(log.get(..BLOCK).unwrap_or(log))?;
    let second = superblock(log.get(BLOCK..RING).unwrap_or(&[]))?;
    Ok(match (first, second) {
        (Some(first), Some(second)) if second.generation > first.generation => Some(second),
        (first, second) => first.or(second),
    })
}

struct Record<'a> {
    id: &'a [u8],
    sequence: u64,
    batch: u64,
    generation: u64,
    offset: u64,
    content: Vec<u8>,
    is_last: bool,
    next: usize,
}

/// The whole record at `at` in the ring.
fn record(ring: &[u8], at: usize) -> Option<Record<'_>> {
    let head = ring.get(at..at + 64)?;
    let (offset, length) = (number(head, 40, 8), number(head, 48, 8));
    let end = offset.checked_add(length)?;
    if head[..4] != *b"VLRC" || !(1..=65536).contains(&length) || end > END_OF_DISK {
        return None;
    }
    let payload = match head[56] {
        1 => ring.get(at + 64..at + 64 + length as usize)?,
        2 | 3 => &[],
        _ => return None,
    };
    let content = match payload {
        [] => vec![0; length as usize],
        bytes => bytes.to_vec(),
    };
    let whole = crc32c(&[&head[..4], &head[8..], payload]) == number(head, 4, 4);
    whole.then_some(Record {
        id: &head[8..24],
        sequence: number(head, 24, 8),
        batch: number(head, 32, 8),
        generation: number(head, 58, 6),
        offset,
        content,
        is_last: head[57] != 0,
        next: at + (64 + payload.len()).next_multiple_of(8),
    })
}

/// What a replay writes, in this order; nothing where no log counts.
pub fn replay(image: &[u8], log: &[u8]) -> Result<Vec<Written>, String> {
    if !is_marked(image) {
        return Ok(Vec::new());
    }
    let (id, _) = extension(image)?;
    let superblock = newest(log)?.ok_or("no log")?;
    if superblock.id != id {
        return Err("another identity".to_owned());
    }
    let ring = log.get(RING..superblock.length as usize).ok_or("cut")?;
    let mut written = Vec::new();
    let (mut sequence, mut batch) = (superblock.sequence, superblock.batch);
    let mut at = superblock.start as usize - RING;
    let mut is_first = true;
    loop {
        let expected = |at| {
            record(ring, at).filter(|record| {
                record.id == id && record.sequence == sequence && record.batch == batch
            })
        };
        let found = match (expected(at), is_first) {
            (None, true) => expected(0),
            (found, _) => found,
        };
        let Some(found) = found else { break };
        if found.offset + found.content.len() as u64 > number(image, 24, 8) {
            return Err("beyond the end of the disk".to_owned());
        }
        written.push((found.offset as usize, found.content));
        sequence += 1;
        is_first = found.is_last;
        (at, batch) = match is_first {
            true => (found.next.next_multiple_of(BLOCK), batch + 1),
            false => (found.next, batch),
        };
    }
    let mut places = (0..ring.len()).step_by(BLOCK);
    let is_later = |found: &Record| found.batch > batch || found.generation > superblock.generation;
    let tells_of_a_loss =
        |at| record(ring, at).is_some_and(|found| found.id == id && is_later(&found));
    match places.any(tells_of_a_loss) {
        true => Err("damaged".to_owned()),
        false => Ok(written),
    }
}

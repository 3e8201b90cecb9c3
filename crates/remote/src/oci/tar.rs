//! Archives as layers have them: one file in a folder is written, and looked for.
//!
//! Invariants:
//! - No name in an archive becomes the name of a file here.
//! - Whatever the bytes are, memory is bounded by [`MOST_EXTRA_BYTES`] and a buffer.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;

use vellum_io::buffer::is_zero;

pub(super) const BLOCK_BYTES: usize = 512;
/// Names and attributes that do not fit a header.
const MOST_EXTRA_BYTES: u64 = 64 << 10;
/// The largest disk; more is a mistake, or a way to keep somebody busy.
const MOST_DISK_BYTES: u64 = 16 << 40;
/// Zeroes of this length are left out of the file.
const PIECE_BYTES: usize = 64 << 10;
/// The user and group that the disk belongs to where machines run it (KubeVirt's qemu).
const OWNER: u64 = 107;
/// Sizes from here on do not fit eleven octal digits.
const OCTAL_END: u64 = 1 << 33;

/// The file that was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) path: String,
    pub(super) len_bytes: u64,
}

fn invalid(message: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message.into())
}

/// Writes the disk of an archive into a file: the one with this path, or the first regular file in
/// `disk/`. `None`: there is none.
pub(super) fn extract(
    archive: &mut impl Read,
    wanted: Option<&str>,
    file: &File,
) -> io::Result<Option<Found>> {
    let (mut long_name, mut long_size) = (None, None);
    while let Some(entry) = read_header(archive)? {
        match entry.kind {
            b'L' => long_name = Some(read_extra(archive, &entry)?),
            b'x' => {
                for (key, value) in pax_records(&read_extra(archive, &entry)?)? {
                    match key.as_slice() {
                        b"path" => long_name = Some(value),
                        b"size" => long_size = Some(decimal(&value)?),
                        _ => {}
                    }
                }
            }
            kind => {
                let name = long_name.take().unwrap_or(entry.name);
                let len_bytes = long_size.take().unwrap_or(entry.len_bytes);
                let path = plain_path(&name);
                if matches!(kind, b'0' | 0 | b'7') && is_wanted(&path, wanted) {
                    if len_bytes > MOST_DISK_BYTES {
                        return Err(invalid(format!("'{path}' has {len_bytes} bytes")));
                    }
                    copy(archive, len_bytes, file)?;
                    return Ok(Some(Found { path, len_bytes }));
                }
                // Links and folders have no content, whatever their size says.
                let has_content = !(b'1'..=b'6').contains(&kind);
                skip(archive, if has_content { padded(len_bytes)? } else { 0 })?;
            }
        }
    }
    Ok(None)
}

struct Entry {
    name: Vec<u8>,
    len_bytes: u64,
    kind: u8,
}

/// The next header; `None` at the end.
fn read_header(archive: &mut impl Read) -> io::Result<Option<Entry>> {
    let mut raw = [0; BLOCK_BYTES];
    let mut len = 0;
    while len < BLOCK_BYTES {
        match archive.read(&mut raw[len..]) {
            // Some leave out the two blocks that end it.
            Ok(0) if len == 0 => return Ok(None),
            Ok(0) => return Err(invalid("the archive ends inside a header")),
            Ok(count) => len += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    if is_zero(&raw) {
        return Ok(None);
    }
    if number(&raw[148..156])? != checksum(&raw) {
        return Err(invalid("this is no archive, or it is damaged"));
    }
    let text = |range: std::ops::Range<usize>| {
        let raw = &raw[range];
        raw.split(|byte| *byte == 0).next().unwrap_or(raw).to_vec()
    };
    let mut name = text(0..100);
    if &raw[257..263] == b"ustar\0" && raw[345] != 0 {
        let prefix = text(345..500);
        name = [prefix.as_slice(), b"/", &name].concat();
    }
    Ok(Some(Entry {
        name,
        len_bytes: number(&raw[124..136])?,
        kind: raw[156],
    }))
}

/// The sum of a header's bytes, with blanks where it stands itself.
fn checksum(raw: &[u8; BLOCK_BYTES]) -> u64 {
    let sum = |bytes: &[u8]| bytes.iter().map(|byte| u64::from(*byte)).sum::<u64>();
    sum(&raw[..148]) + 8 * u64::from(b' ') + sum(&raw[156..])
}

/// A number in octal digits, or in binary where its first bit is set.
fn number(field: &[u8]) -> io::Result<u64> {
    let wrong = || invalid("a number in the archive is none");
    if let Some((first, rest)) = field.split_first()
        && first & 0x80 != 0
    {
        let (high, low) = rest.split_at(rest.len().saturating_sub(8));
        let is_small = first & 0x7f == 0 && is_zero(high);
        let low = low
            .iter()
            .fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte));
        return if is_small { Ok(low) } else { Err(wrong()) };
    }
    let text = std::str::from_utf8(field).map_err(|_| wrong())?;
    match text.trim_matches([' ', '\0']) {
        "" => Ok(0),
        digits => u64::from_str_radix(digits, 8).map_err(|_| wrong()),
    }
}

fn decimal(text: &[u8]) -> io::Result<u64> {
    let digits = std::str::from_utf8(text).ok();
    let number = digits.and_then(|digits| digits.parse().ok());
    number.ok_or_else(|| invalid("a number in the archive is none"))
}

fn padded(len_bytes: u64) -> io::Result<u64> {
    let padded = len_bytes.checked_next_multiple_of(BLOCK_BYTES as u64);
    padded.ok_or_else(|| invalid("a file in the archive is longer than any"))
}

fn skip(archive: &mut impl Read, len_bytes: u64) -> io::Result<()> {
    let skipped = io::copy(&mut archive.by_ref().take(len_bytes), &mut io::sink())?;
    match skipped == len_bytes {
        true => Ok(()),
        false => Err(invalid("the archive ends inside a file")),
    }
}

/// What belongs to the entry behind.
fn read_extra(archive: &mut impl Read, entry: &Entry) -> io::Result<Vec<u8>> {
    if entry.len_bytes > MOST_EXTRA_BYTES {
        return Err(invalid(
            "the attributes of a file in the archive are too long",
        ));
    }
    // 64 KiB at most.
    let mut bytes = vec![0; padded(entry.len_bytes)? as usize];
    archive.read_exact(&mut bytes)?;
    bytes.truncate(entry.len_bytes as usize);
    if entry.kind == b'L' {
        let end = bytes.iter().position(|byte| *byte == 0);
        bytes.truncate(end.unwrap_or(bytes.len()));
    }
    Ok(bytes)
}

/// `LENGTH KEY=VALUE\n`, one after the other.
fn pax_records(mut bytes: &[u8]) -> io::Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let wrong = || invalid("the attributes of a file in the archive are damaged");
    let mut records = Vec::new();
    while !bytes.is_empty() {
        let blank = bytes
            .iter()
            .position(|byte| *byte == b' ')
            .ok_or_else(wrong)?;
        let len = decimal(&bytes[..blank])? as usize;
        let record = bytes.get(blank + 1..len).ok_or_else(wrong)?;
        let (last, record) = record.split_last().ok_or_else(wrong)?;
        let equals = record.iter().position(|byte| *byte == b'=');
        let equals = equals.filter(|_| *last == b'\n').ok_or_else(wrong)?;
        records.push((record[..equals].to_vec(), record[equals + 1..].to_vec()));
        bytes = &bytes[len..];
    }
    Ok(records)
}

fn plain_path(name: &[u8]) -> String {
    let path = String::from_utf8_lossy(name);
    let path = path.trim_start_matches("./").trim_start_matches('/');
    path.to_owned()
}

fn is_wanted(path: &str, wanted: Option<&str>) -> bool {
    match wanted {
        Some(wanted) => path == wanted.trim_start_matches('/'),
        None => {
            let name = path.strip_prefix("disk/");
            // A name of the kind `.wh.` takes a file of a layer below away.
            name.is_some_and(|name| {
                !name.contains('/') && !name.starts_with('.') && !name.is_empty()
            })
        }
    }
}

fn copy(archive: &mut impl Read, len_bytes: u64, file: &File) -> io::Result<()> {
    let mut piece = vec![0; PIECE_BYTES];
    let mut at = 0;
    while at < len_bytes {
        let len = (len_bytes - at).min(PIECE_BYTES as u64) as usize;
        let piece = &mut piece[..len];
        archive
            .read_exact(piece)
            .map_err(|error| match error.kind() {
                io::ErrorKind::UnexpectedEof => invalid("the archive ends inside the disk"),
                _ => error,
            })?;
        if !is_zero(piece) {
            file.write_all_at(piece, at)?;
        }
        at += len as u64;
    }
    file.set_len(len_bytes)
}

/// What stands before a file in an archive that holds nothing else: its folder, and its header.
pub(super) fn before(name: &str, len_bytes: u64) -> Vec<u8> {
    let folder = header("disk/", b'5', 0o755, 0);
    let file = header(&format!("disk/{name}"), b'0', 0o440, len_bytes);
    [folder, file].concat()
}

/// What stands behind it.
pub(super) fn behind(len_bytes: u64) -> Vec<u8> {
    let rest = len_bytes % BLOCK_BYTES as u64;
    let padding = (BLOCK_BYTES as u64 - rest) % BLOCK_BYTES as u64;
    vec![0; padding as usize + 2 * BLOCK_BYTES]
}

fn header(path: &str, kind: u8, mode: u32, len_bytes: u64) -> [u8; BLOCK_BYTES] {
    let mut raw = [0; BLOCK_BYTES];
    let mut put = |at: usize, bytes: &[u8]| raw[at..at + bytes.len()].copy_from_slice(bytes);
    // Names are the program's own, and short.
    put(0, path.as_bytes());
    put(100, format!("{mode:07o}").as_bytes());
    put(108, format!("{OWNER:07o}").as_bytes());
    put(116, format!("{OWNER:07o}").as_bytes());
    match len_bytes {
        0..OCTAL_END => put(124, format!("{len_bytes:011o}").as_bytes()),
        _ => {
            put(124, &[0x80]);
            put(128, &len_bytes.to_be_bytes());
        }
    }
    put(136, b"00000000000");
    put(156, &[kind]);
    put(257, b"ustar\x0000");
    let sum = checksum(&raw);
    raw[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    raw
}

#[cfg(test)]
mod tests {
    use super::*;

    fn archive(name: &str, content: &[u8]) -> Vec<u8> {
        let len_bytes = content.len() as u64;
        [before(name, len_bytes), content.to_vec(), behind(len_bytes)].concat()
    }

    fn extracted(bytes: &[u8], wanted: Option<&str>) -> io::Result<Option<(Found, Vec<u8>)>> {
        let mut file = tempfile::tempfile()?;
        let found = extract(&mut &*bytes, wanted, &file)?;
        let mut content = Vec::new();
        file.read_to_end(&mut content)?;
        Ok(found.map(|found| (found, content)))
    }

    #[test]
    fn what_is_written_is_found() {
        let content: Vec<u8> = (0..200_000_u32).map(|at| (at / 70_000) as u8).collect();
        let archive = archive("disk.qcow2", &content);
        assert_eq!(archive.len() % BLOCK_BYTES, 0);
        for wanted in [None, Some("disk/disk.qcow2"), Some("/disk/disk.qcow2")] {
            let (found, read) = extracted(&archive, wanted).unwrap().unwrap();
            assert_eq!(found.path, "disk/disk.qcow2");
            assert!(read == content);
        }
        assert!(extracted(&archive, Some("disk/other")).unwrap().is_none());
        for end in [1, 511, 513, 1025, 100_000] {
            assert!(extracted(&archive[..end], None).is_err(), "{end}");
        }
    }

    #[test]
    fn damaged_archives_are_refused_or_hold_nothing() {
        let archive = archive("disk.img", &[7; 700]);
        for at in 0..1024 {
            for change in [1, 0x80, 0xff] {
                let mut damaged = archive.clone();
                damaged[at] ^= change;
                assert!(extracted(&damaged, None).is_err(), "{at}");
            }
        }
    }

    #[test]
    fn long_numbers_and_attributes_are_understood_or_refused() {
        assert_eq!(number(b"00000000017\0").unwrap(), 15);
        assert_eq!(number(b"            ").unwrap(), 0);
        let large = header("disk/x", b'0', 0o440, 1 << 40);
        assert_eq!(number(&large[124..136]).unwrap(), 1 << 40);
        assert!(number(&[0xff; 12]).is_err() && number(b"9").is_err());
        let records = pax_records(b"14 path=disk/a\n".as_slice());
        assert!(records.is_err(), "the length is wrong");
        let records = pax_records(b"15 path=disk/a\n17 size=12345678\n").unwrap();
        assert_eq!(records[0], (b"path".to_vec(), b"disk/a".to_vec()));
        assert_eq!(records.len(), 2);
        for wrong in [&b"99 a=b\n"[..], b"x", b"5 ab\n", b"0 a=b\n", b"6 a=bc\n"] {
            assert!(pax_records(wrong).is_err(), "{wrong:?}");
        }
        // A file that is longer than any, before the disk.
        let mut bytes = header("x", b'0', 0, u64::MAX).to_vec();
        bytes.extend(archive("a", b""));
        assert!(extracted(&bytes, None).is_err());
        let bytes = header("disk/x", b'0', 0, 1 << 60);
        assert!(extracted(&bytes, None).is_err());
    }
}

//! Archives as layers have them: one file in a folder is written, and looked for.
//!
//! Invariants:
//! - No name in an archive becomes the name of a file here.
//! - Whatever the bytes are, memory is bounded by [`MOST_EXTRA_BYTES`] and a buffer.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;

use vellum_io::buffer::is_zero;

use super::union::{Kind, Union, plain_path};

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

pub(super) fn invalid(message: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message.into())
}

/// Writes the disk of a layer's archive into an empty file: the wanted one, or the first regular file in `disk/`, as the
/// whole archive has it and higher layers let it show. `None`: there is none, and the file is empty.
pub(super) fn extract(
    archive: &mut impl Read,
    union: &mut Union,
    file: &File,
) -> io::Result<Option<Found>> {
    let mut found: Option<Found> = None;
    // Another file that could have been taken.
    let mut has_passed = false;
    let mut about_next = AboutNext::default();
    while let Some(entry) = read_header(archive)? {
        match entry.kind {
            b'L' => about_next.name = Some(read_extra(archive, &entry)?),
            b'x' => about_next.take(pax_records(&read_extra(archive, &entry)?)?)?,
            // The target of a link, and what is said of all entries.
            b'K' | b'g' => skip(archive, padded(entry.len_bytes)?)?,
            _ => {
                let entry = Member::of(entry, std::mem::take(&mut about_next))?;
                let is_candidate = union.is_wanted(&entry.path) && union.shows(&entry.path);
                let is_found = found.as_ref().is_some_and(|found| found.path == entry.path);
                union.note(&entry.path, entry.kind)?;
                if is_found {
                    // Of two entries of one name the last one counts.
                    found = None;
                    file.set_len(0)?;
                }
                let is_taken = found.is_none() && is_candidate && entry.kind == Kind::File;
                has_passed |= !is_taken && is_candidate && entry.kind == Kind::File;
                if is_taken {
                    found = Some(entry.copy_to(archive, file)?);
                } else {
                    skip(archive, entry.stored_bytes()?)?;
                }
            }
        }
    }
    match &found {
        None if has_passed => Err(invalid(
            "the layer has several files in 'disk/', and replaces the first one: name the path of the disk (--path)",
        )),
        Some(found) if union.is_behind_link(&found.path) => Err(invalid(format!(
            "a folder on the way to '{}' is a link: name the path that it leads to (--path)",
            found.path
        ))),
        _ => Ok(found),
    }
}

/// What entries before an entry say of it.
#[derive(Default)]
struct AboutNext {
    name: Option<Vec<u8>>,
    len_bytes: Option<u64>,
    /// It lies there without its holes.
    is_sparse: bool,
}

impl AboutNext {
    fn take(&mut self, records: Vec<(Vec<u8>, Vec<u8>)>) -> io::Result<()> {
        let mut real_name = None;
        for (key, value) in records {
            match key.as_slice() {
                b"path" => self.name = Some(value),
                b"size" => self.len_bytes = Some(decimal(&value)?),
                b"GNU.sparse.name" => real_name = Some(value),
                _ => {}
            }
            self.is_sparse |= key.starts_with(b"GNU.sparse.");
        }
        self.name = real_name.or(self.name.take());
        Ok(())
    }
}

/// An entry that is a file, a folder or something else in the image.
struct Member {
    path: String,
    kind: Kind,
    len_bytes: u64,
    is_sparse: bool,
}

impl Member {
    fn of(entry: Entry, about: AboutNext) -> io::Result<Member> {
        let kind = match entry.kind {
            b'0' | 0 | b'7' => Kind::File,
            b'5' => Kind::Folder,
            b'1'..=b'6' => Kind::Other,
            other => {
                let letter = char::from(other).escape_default();
                return Err(invalid(format!(
                    "the archive has an entry of type '{letter}', which is not read: make the layer without \
                     --sparse (tar)"
                )));
            }
        };
        Ok(Member {
            path: plain_path(&about.name.unwrap_or(entry.name))?,
            kind,
            len_bytes: about.len_bytes.unwrap_or(entry.len_bytes),
            is_sparse: about.is_sparse,
        })
    }

    /// What lies behind the header. Links and folders have no content, whatever their size says.
    fn stored_bytes(&self) -> io::Result<u64> {
        match self.kind {
            Kind::File => padded(self.len_bytes),
            Kind::Folder | Kind::Other => Ok(0),
        }
    }

    fn copy_to(self, archive: &mut impl Read, file: &File) -> io::Result<Found> {
        let Member {
            path, len_bytes, ..
        } = self;
        if self.is_sparse {
            return Err(invalid(format!(
                "'{path}' is stored without its holes, in a form that is not read: make the layer without \
                 --sparse (tar)"
            )));
        }
        if len_bytes > MOST_DISK_BYTES {
            return Err(invalid(format!("'{path}' has {len_bytes} bytes")));
        }
        copy(archive, len_bytes, file)?;
        skip(archive, padded(len_bytes)? - len_bytes)?;
        Ok(Found { path, len_bytes })
    }
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
    use std::io::{Seek, SeekFrom};

    use super::*;

    fn archive(name: &str, content: &[u8]) -> Vec<u8> {
        let len_bytes = content.len() as u64;
        [before(name, len_bytes), content.to_vec(), behind(len_bytes)].concat()
    }

    fn extracted(bytes: &[u8], wanted: Option<&str>) -> io::Result<Option<(Found, Vec<u8>)>> {
        let mut file = tempfile::tempfile()?;
        let found = extract(&mut &*bytes, &mut Union::new(wanted)?, &file)?;
        file.seek(SeekFrom::Start(0))?;
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

    /// Entries of an archive: path, kind, content.
    fn layer(entries: &[(&str, u8, &[u8])]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (path, kind, content) in entries {
            bytes.extend(header(path, *kind, 0o440, content.len() as u64));
            bytes.extend(*content);
            bytes.resize(bytes.len().next_multiple_of(BLOCK_BYTES), 0);
        }
        bytes.resize(bytes.len() + 2 * BLOCK_BYTES, 0);
        bytes
    }

    /// The disk of layers, from the lowest on.
    fn shown(layers: &[Vec<u8>], wanted: Option<&str>) -> io::Result<Option<Vec<u8>>> {
        let mut union = Union::new(wanted)?;
        for layer in layers.iter().rev() {
            let mut file = tempfile::tempfile()?;
            if extract(&mut layer.as_slice(), &mut union, &file)?.is_some() {
                let mut content = Vec::new();
                file.seek(SeekFrom::Start(0))?;
                file.read_to_end(&mut content)?;
                return Ok(Some(content));
            }
            union.next_layer();
        }
        Ok(None)
    }

    #[test]
    fn a_pull_shows_the_union_of_the_layers() {
        let (old, new) = ([1; 70_000], [2; 3000]);
        let base = || layer(&[("disk/", b'5', b""), ("disk/a", b'0', &old)]);
        let path = "disk/a";
        for wanted in [None, Some("disk/a")] {
            let over = |entries: &[(&str, u8, &[u8])]| shown(&[base(), layer(entries)], wanted);
            assert_eq!(over(&[("x", b'0', b"1")]).unwrap().unwrap(), old);
            assert_eq!(over(&[(path, b'0', &new)]).unwrap().unwrap(), new);
            // The last of two in a layer, also if it is shorter.
            let twice = over(&[(path, b'0', &old), (path, b'0', &new)]);
            assert_eq!(twice.unwrap().unwrap(), new);
            // What is taken away, and what takes its place.
            for entry in ["disk/.wh.a", ".wh.disk", "disk/.wh..wh..opq"] {
                assert_eq!(over(&[(entry, b'0', b"")]).unwrap(), None, "{entry}");
                let again = over(&[(entry, b'0', b""), (path, b'0', &new)]);
                assert_eq!(again.unwrap().unwrap(), new, "{entry}");
            }
            for (path, kind) in [(path, b'2'), (path, b'1'), (path, b'5'), ("disk", b'2')] {
                assert_eq!(over(&[(path, kind, b"")]).unwrap(), None, "{path} {kind}");
            }
            assert_eq!(
                over(&[(path, b'0', &new), (path, b'2', b"")]).unwrap(),
                None
            );
            let behind = over(&[("disk", b'2', b""), (path, b'0', &new)]);
            assert!(behind.unwrap_err().to_string().contains("is a link"));
        }
        let several = [("disk/a", b'0', &old[..]), ("disk/b", b'0', &new)];
        assert_eq!(shown(&[layer(&several)], None).unwrap().unwrap(), old);
        assert_eq!(
            shown(&[layer(&several)], Some("disk/b")).unwrap().unwrap(),
            new
        );
        let replaced = [several[0], several[1], ("disk/a", b'2', b"")];
        assert!(shown(&[layer(&replaced)], None).is_err());
    }

    #[test]
    fn files_without_their_holes_are_refused() {
        let records = |text: &str| -> Vec<u8> {
            let len = text.len() + 1 + 2 + 1;
            format!("{len} {text}\n").into_bytes()
        };
        for (record, name) in [
            ("GNU.sparse.size=4096", "disk/a"),
            ("GNU.sparse.name=disk/a", "GNUSparseFile.0/a"),
        ] {
            let base = layer(&[("disk/a", b'0', &[1; 512])]);
            let sparse = layer(&[("pax", b'x', &records(record)), (name, b'0', b"condensed")]);
            let error = shown(&[base, sparse], None).unwrap_err();
            assert!(error.to_string().contains("without its holes"), "{error}");
        }
        let old_form = layer(&[("disk/a", b'S', b"")]);
        assert!(
            shown(&[old_form], None)
                .unwrap_err()
                .to_string()
                .contains("type 'S'")
        );
        // Elsewhere it does not matter.
        let other = layer(&[
            ("pax", b'x', &records("GNU.sparse.size=4096")),
            ("lib/x", b'0', b"condensed"),
            ("disk/a", b'0', &[1; 512]),
        ]);
        assert_eq!(shown(&[other], None).unwrap().unwrap(), [1; 512]);
        // A long target of a link takes no name away.
        let linked = layer(&[
            ("././@LongLink", b'L', b"disk/a\0"),
            ("././@LongLink", b'K', b"target\0"),
            ("short", b'0', &[1; 512]),
        ]);
        assert_eq!(shown(&[linked], None).unwrap().unwrap(), [1; 512]);
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

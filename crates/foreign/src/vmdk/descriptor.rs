//! The descriptor: the text that says what a VMDK image is made of. Bytes in, values out; no I/O.
//!
//! Called where an image is opened (its extents, its parent), made, and where its identifier changes.
//!
//! Invariants:
//! - Text is hostile: no more than [`MAX_TEXT_BYTES`] are looked at, and what does not parse is an error.
//! - A change of the identifier leaves every other byte as it is, and moves none where the new one has
//!   as many digits as the old: then one sector changes, and no crash can tear the text.

use std::fmt::Write as _;
use std::ops::Range;

use vellum::{Error, ErrorKind, Result};

/// How much of a text is looked at, in bytes: QEMU's bound.
pub const MAX_TEXT_BYTES: usize = (1 << 20) - 1;

/// What a sparse extent keeps for a descriptor inside of it, in bytes, and where in any text QEMU
/// looks for identifiers.
pub const EMBEDDED_BYTES: usize = 20 * 512;

/// The parent's identifier in an image that has no parent.
pub const NO_PARENT_CID: u32 = 0xffff_ffff;

/// The longest name of a parent, in bytes.
const MAX_HINT_BYTES: usize = 4095;

/// The longest create type, in bytes.
const MAX_CREATE_TYPE_BYTES: usize = 127;

/// The longest name of an extent, in bytes.
const MAX_NAME_BYTES: usize = 511;

/// Create types of images whose extents other files hold, and that can be opened.
const SPLIT_TYPES: [&str; 6] = [
    "monolithicFlat",
    "vmfs",
    "vmfsSparse",
    "seSparse",
    "twoGbMaxExtentSparse",
    "twoGbMaxExtentFlat",
];

/// What an extent is, by its line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExtentType {
    /// `FLAT`: bytes as they are.
    Flat,
    /// `VMFS`: the same, from the beginning of the file.
    Vmfs,
    /// `SPARSE`: grains and tables, by the file's own header.
    Sparse,
    /// `VMFSSPARSE`: the same.
    VmfsSparse,
    /// `SESPARSE`: those of ESXi's newer snapshots.
    SeSparse,
}

impl ExtentType {
    const ALL: [ExtentType; 5] = [
        ExtentType::Flat,
        ExtentType::Vmfs,
        ExtentType::Sparse,
        ExtentType::VmfsSparse,
        ExtentType::SeSparse,
    ];

    /// As it stands in the line.
    pub fn name(self) -> &'static str {
        match self {
            ExtentType::Flat => "FLAT",
            ExtentType::Vmfs => "VMFS",
            ExtentType::Sparse => "SPARSE",
            ExtentType::VmfsSparse => "VMFSSPARSE",
            ExtentType::SeSparse => "SESPARSE",
        }
    }

    /// Whether the extent has no tables.
    pub fn is_flat(self) -> bool {
        matches!(self, ExtentType::Flat | ExtentType::Vmfs)
    }
}

/// A line of a descriptor that names an extent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExtentLine {
    /// Its part of the disk, in sectors of 512 bytes; never 0.
    pub sectors: u64,
    /// What it is.
    pub extent_type: ExtentType,
    /// The file's name, by the descriptor's folder if it is relative.
    pub name: String,
    /// Where in the file a flat extent begins, in sectors.
    pub offset_sectors: u64,
}

/// An identifier of so many digits is exchanged in its place, which a power cut does not tear. One of fewer is
/// made longer, with all that is behind it.
const LEAST_CID_DIGITS: usize = 4;

/// A descriptor that was parsed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Descriptor {
    text: Vec<u8>,
    create_type: Option<String>,
    cid: u32,
    cid_digits: Range<usize>,
    parent_cid: u32,
    parent_name: Option<String>,
    extents: Vec<ExtentLine>,
    is_own_extent: bool,
    /// Where in the file the text begins, if a header stands before it.
    embedded_at_bytes: Option<u64>,
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidImage, "open", message)
}

/// What QEMU says of an identifier that is not there: only the error number.
fn no_identifier() -> Error {
    invalid("Invalid argument")
}

impl Descriptor {
    /// Parses the descriptor of an image whose extents are other files: a file of its own.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidImage`] for what is no descriptor, [`ErrorKind::Unsupported`] for
    /// create types that cannot be opened.
    pub fn parse(bytes: &[u8]) -> Result<Descriptor> {
        let text = text_of(bytes, MAX_TEXT_BYTES);
        let create_type = match value_of(text, b"createType") {
            Some(value) if value.len() <= MAX_CREATE_TYPE_BYTES => {
                String::from_utf8_lossy(value).into_owned()
            }
            _ => return Err(invalid("invalid VMDK image descriptor")),
        };
        if !SPLIT_TYPES.contains(&create_type.as_str()) {
            let message = format!("Unsupported image type '{create_type}'");
            return Err(Error::new(ErrorKind::Unsupported, "open", message));
        }
        if text.len() == MAX_TEXT_BYTES && bytes.len() > MAX_TEXT_BYTES {
            return Err(invalid("VMDK description file too big"));
        }
        let extents = parse_extents(text)?;
        Descriptor::with_extents(text, extents)
    }

    /// Parses the descriptor inside of a sparse extent that is a whole image: its lines of
    /// extents mean nothing, and it may have no create type.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidImage`] for what is no descriptor.
    pub fn parse_embedded(bytes: &[u8]) -> Result<Descriptor> {
        let mut descriptor = Descriptor::with_extents(text_of(bytes, EMBEDDED_BYTES), Vec::new())?;
        descriptor.is_own_extent = true;
        Ok(descriptor)
    }

    fn with_extents(text: &[u8], extents: Vec<ExtentLine>) -> Result<Descriptor> {
        let head = text.get(..EMBEDDED_BYTES).unwrap_or(text);
        let parent_name = match value_of(head, b"parentFileNameHint") {
            None => None,
            Some(name) if name.len() > MAX_HINT_BYTES => return Err(no_identifier()),
            Some(name) => Some(String::from_utf8(name.to_vec()).map_err(|_| no_identifier())?),
        };
        let (cid, cid_digits) = identifier(head, b"CID").ok_or_else(no_identifier)?;
        let (parent_cid, _) = identifier(head, b"parentCID").ok_or_else(no_identifier)?;
        let create_type =
            value_of(text, b"createType").map(|value| String::from_utf8_lossy(value).into_owned());
        Ok(Descriptor {
            text: text.to_vec(),
            create_type,
            cid,
            cid_digits,
            parent_cid,
            parent_name,
            extents,
            is_own_extent: false,
            embedded_at_bytes: None,
        })
    }

    /// The same text inside of a file.
    pub(super) fn at(mut self, at_bytes: u64) -> Descriptor {
        self.embedded_at_bytes = Some(at_bytes);
        self
    }

    /// Where in its file the text begins, in bytes, if a header stands before it.
    pub fn embedded_at(&self) -> Option<u64> {
        self.embedded_at_bytes
    }

    /// Whether the file that has the descriptor is the whole image, and holds its grains.
    pub fn is_own_extent(&self) -> bool {
        self.is_own_extent
    }

    /// The text, without what pads it.
    pub fn text(&self) -> &[u8] {
        &self.text
    }

    /// What the text says of `createType`. Of an image in one sparse file the header decides.
    pub fn create_type(&self) -> Option<&str> {
        self.create_type.as_deref()
    }

    /// The identifier of the image's content.
    pub fn cid(&self) -> u32 {
        self.cid
    }

    /// The identifier that the parent had when this image was made; [`NO_PARENT_CID`] without one.
    pub fn parent_cid(&self) -> u32 {
        self.parent_cid
    }

    /// The parent's name (`parentFileNameHint`).
    pub fn parent_name(&self) -> Option<&str> {
        self.parent_name.as_deref()
    }

    /// The extents that other files hold, in the order of the disk.
    pub fn extents(&self) -> &[ExtentLine] {
        &self.extents
    }

    /// The value of an entry such as `ddb.adapterType`.
    pub fn value(&self, key: &str) -> Option<String> {
        value_of(&self.text, key.as_bytes())
            .map(|value| String::from_utf8_lossy(value).into_owned())
    }

    /// The same descriptor with another identifier, and which bytes of the text are not what they
    /// were. `random` is cut to as many digits as there are, if those are many enough.
    pub fn with_cid(&self, random: u32) -> (Descriptor, Range<usize>) {
        let digits = self.cid_digits.len();
        let keeps_length = digits >= LEAST_CID_DIGITS;
        let mask = match digits {
            LEAST_CID_DIGITS..8 => (1 << (4 * digits)) - 1,
            _ => u32::MAX,
        };
        let mut cid = random & mask;
        // Two that mean "none", and one that would not be a change.
        while cid >= 0xffff_fffe || cid == self.cid {
            cid = cid.wrapping_add(0x0123_4567) & mask;
        }
        let width = if keeps_length { digits } else { 8 };
        let new_digits = format!("{cid:0width$x}");
        let mut next = self.clone();
        next.text
            .splice(self.cid_digits.clone(), new_digits.bytes());
        next.cid = cid;
        next.cid_digits = self.cid_digits.start..self.cid_digits.start + width;
        let changed = if keeps_length {
            next.cid_digits.clone()
        } else {
            self.cid_digits.start..next.text.len()
        };
        (next, changed)
    }
}

/// What comes before the first zero byte, of at most `most_bytes`.
fn text_of(bytes: &[u8], most_bytes: usize) -> &[u8] {
    let bytes = bytes.get(..most_bytes).unwrap_or(bytes);
    bytes.split(|&byte| byte == 0).next().unwrap_or_default()
}

/// The lines of a text that are no comments, each with where it begins.
fn lines(text: &[u8]) -> impl Iterator<Item = (usize, &[u8])> {
    let mut start = 0;
    text.split(|&byte| byte == b'\n').filter_map(move |line| {
        let at = start;
        start += line.len() + 1;
        (!line.trim_ascii_start().starts_with(b"#")).then_some((at, line))
    })
}

/// What stands behind the `=` of the first line with a key, and where in the text it begins.
fn raw_value<'a>(text: &'a [u8], key: &[u8]) -> Option<(usize, &'a [u8])> {
    lines(text).find_map(|(start, line)| {
        let equals = line.iter().position(|&byte| byte == b'=')?;
        let (before, after) = line.split_at_checked(equals)?;
        let value = after.get(1..)?;
        (before.trim_ascii() == key).then(|| {
            let leading = value.len() - value.trim_ascii_start().len();
            (start + equals + 1 + leading, value.trim_ascii())
        })
    })
}

/// The value of a key, between quotes.
fn value_of<'a>(text: &'a [u8], key: &[u8]) -> Option<&'a [u8]> {
    let (_, value) = raw_value(text, key)?;
    let value = value.strip_prefix(b"\"")?;
    let end = value.iter().position(|&byte| byte == b'"')?;
    value.get(..end)
}

/// An identifier in hexadecimal digits, and where those are.
fn identifier(text: &[u8], key: &[u8]) -> Option<(u32, Range<usize>)> {
    let (start, value) = raw_value(text, key)?;
    let (start, value) = match value.strip_prefix(b"0x") {
        Some(digits) => (start + 2, digits),
        None => (start, value),
    };
    let count = value
        .iter()
        .take_while(|byte| byte.is_ascii_hexdigit())
        .count();
    let digits = std::str::from_utf8(value.get(..count)?).ok()?;
    let number = u32::from_str_radix(digits, 16).ok()?;
    Some((number, start..start + count))
}

/// All lines that name extents.
fn parse_extents(text: &[u8]) -> Result<Vec<ExtentLine>> {
    let mut extents = Vec::new();
    for (_, line) in lines(text) {
        if let Some(extent) = parse_extent(line)? {
            extents.push(extent);
        }
    }
    Ok(extents)
}

/// The next word of a line, and what follows it.
fn word(line: &[u8]) -> Option<(&[u8], &[u8])> {
    let line = line.trim_ascii_start();
    let end = line
        .iter()
        .position(u8::is_ascii_whitespace)
        .unwrap_or(line.len());
    (end > 0).then(|| line.split_at(end))
}

/// A whole word that is a number.
fn number(word: &[u8]) -> Option<i64> {
    std::str::from_utf8(word).ok()?.parse().ok()
}

/// The number that a text begins with, as C's `scanf` finds it.
fn leading_number(text: &[u8]) -> Option<i64> {
    let text = text.trim_ascii_start();
    let sign = usize::from(text.starts_with(b"-") || text.starts_with(b"+"));
    let digits = text.iter().skip(sign).take_while(|it| it.is_ascii_digit());
    number(text.get(..sign + digits.count())?)
}

/// What a line that names an extent says, whatever that is.
struct RawExtent<'a> {
    access: &'a [u8],
    sectors: i64,
    extent_type: &'a [u8],
    /// What stands in quotes, and behind them.
    name: Option<(&'a [u8], &'a [u8])>,
}

impl<'a> RawExtent<'a> {
    /// Takes a line apart; `None` if it is none of an extent.
    fn parse(line: &'a [u8]) -> Option<RawExtent<'a>> {
        let (access, rest) = word(line)?;
        if !matches!(access, b"RW" | b"RDONLY" | b"NOACCESS") {
            return None;
        }
        let (sectors, rest) = word(rest)?;
        let (extent_type, rest) = word(rest)?;
        let name = rest.trim_ascii_start().strip_prefix(b"\"");
        Some(RawExtent {
            access,
            sectors: number(sectors)?,
            extent_type,
            name: name.map(|name| {
                let end = name.iter().position(|&byte| byte == b'"');
                let (name, rest) = name.split_at(end.unwrap_or(name.len()));
                (name, rest.get(1..).unwrap_or_default())
            }),
        })
    }
}

/// One line, `None` if it names no extent: `RW 4192256 SPARSE "disk-s001.vmdk"`, and an offset in
/// sectors at the end of a flat one.
fn parse_extent(line: &[u8]) -> Result<Option<ExtentLine>> {
    let fail = || {
        let line = String::from_utf8_lossy(line.trim_ascii_end());
        invalid(format!("Invalid extent line: {line}"))
    };
    // Left out, as QEMU does it, it would move what comes behind it.
    let unsupported = |what: &str, name: &[u8]| {
        let name = String::from_utf8_lossy(name);
        let message = format!("Unsupported extent {what} '{name}'");
        Error::new(ErrorKind::Unsupported, "open", message)
    };
    let Some(raw) = RawExtent::parse(line).filter(|raw| raw.sectors > 0) else {
        return Ok(None);
    };
    let mut known = ExtentType::ALL.into_iter();
    let known = known.find(|known| known.name().as_bytes() == raw.extent_type);
    let offset = raw.name.and_then(|(_, rest)| leading_number(rest));
    let extent_type = known.ok_or_else(|| match offset {
        Some(_) => fail(),
        None => unsupported("type", raw.extent_type),
    })?;
    if raw.access != b"RW" {
        return Err(unsupported("access", raw.access));
    }
    let (name, _) = raw.name.ok_or_else(fail)?;
    let offset_sectors = match (extent_type, offset.map(u64::try_from)) {
        (ExtentType::Flat, Some(Ok(offset))) => offset,
        (ExtentType::Flat, _) | (_, Some(_)) => return Err(fail()),
        (_, None) => 0,
    };
    let sectors = u64::try_from(raw.sectors).map_err(|_| fail())?;
    let largest = i64::MAX as u64 / 512;
    let has_name = (1..=MAX_NAME_BYTES).contains(&name.len());
    if sectors > largest || offset_sectors > largest || !has_name {
        return Err(fail());
    }
    Ok(Some(ExtentLine {
        sectors,
        extent_type,
        name: String::from_utf8(name.to_vec()).map_err(|_| fail())?,
        offset_sectors,
    }))
}

/// What the descriptor of a new image says.
#[derive(Debug, Clone)]
pub(crate) struct NewDescriptor<'a> {
    pub cid: u32,
    pub parent_cid: u32,
    pub parent_name: Option<&'a str>,
    pub create_type: &'a str,
    pub extents: &'a [ExtentLine],
    pub hardware_version: &'a str,
    pub cylinders: u64,
    pub heads: u64,
    pub adapter: &'a str,
    pub tools_version: &'a str,
}

impl NewDescriptor<'_> {
    /// The text, as QEMU lays it out.
    pub fn print(&self) -> String {
        let mut text = String::from("# Disk DescriptorFile\nversion=1\n");
        let mut line = |line: std::fmt::Arguments<'_>| {
            // A string takes everything.
            let _ = text.write_fmt(line);
            text.push('\n');
        };
        line(format_args!("CID={:x}", self.cid));
        line(format_args!("parentCID={:x}", self.parent_cid));
        line(format_args!("createType=\"{}\"", self.create_type));
        match self.parent_name {
            Some(name) => line(format_args!("parentFileNameHint=\"{name}\"")),
            None => line(format_args!("")),
        }
        line(format_args!("# Extent description"));
        for extent in self.extents {
            let (sectors, name) = (extent.sectors, &extent.name);
            let extent_type = extent.extent_type.name();
            match extent.extent_type {
                ExtentType::Flat => line(format_args!(
                    "RW {sectors} {extent_type} \"{name}\" {}",
                    extent.offset_sectors
                )),
                _ => line(format_args!("RW {sectors} {extent_type} \"{name}\"")),
            }
        }
        line(format_args!("\n# The Disk Data Base\n#DDB\n"));
        let mut entry = |key: &str, value: &dyn std::fmt::Display| {
            line(format_args!("ddb.{key} = \"{value}\""));
        };
        entry("virtualHWVersion", &self.hardware_version);
        entry("geometry.cylinders", &self.cylinders);
        entry("geometry.heads", &self.heads);
        entry("geometry.sectors", &63);
        entry("adapterType", &self.adapter);
        entry("toolsVersion", &self.tools_version);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const FLAT: &str = "# Disk DescriptorFile\nversion=1\nCID=d7728c98\nparentCID=ffffffff\n\
        createType=\"monolithicFlat\"\n\n# Extent description\n\
        RW 10485760 FLAT \"disk-flat.vmdk\" 0\n\n# The Disk Data Base\n#DDB\n\n\
        ddb.virtualHWVersion = \"4\"\nddb.geometry.cylinders = \"10402\"\n\
        ddb.geometry.heads = \"16\"\nddb.geometry.sectors = \"63\"\n\
        ddb.adapterType = \"ide\"\nddb.toolsVersion = \"2147483647\"\n";

    fn message_of(text: &str) -> String {
        Descriptor::parse(text.as_bytes())
            .unwrap_err()
            .message()
            .to_owned()
    }

    #[test]
    fn reads_what_qemu_writes_and_writes_the_same() {
        let parsed = Descriptor::parse(FLAT.as_bytes()).unwrap();
        assert_eq!(parsed.cid(), 0xd772_8c98);
        assert_eq!(parsed.parent_cid(), NO_PARENT_CID);
        assert_eq!(parsed.create_type(), Some("monolithicFlat"));
        assert_eq!(parsed.value("ddb.adapterType").as_deref(), Some("ide"));
        let extent = &parsed.extents()[0];
        assert_eq!((extent.sectors, extent.offset_sectors), (10_485_760, 0));
        assert_eq!(extent.name, "disk-flat.vmdk");
        let printed = NewDescriptor {
            cid: parsed.cid(),
            parent_cid: parsed.parent_cid(),
            parent_name: None,
            create_type: "monolithicFlat",
            extents: parsed.extents(),
            hardware_version: "4",
            cylinders: 10402,
            heads: 16,
            adapter: "ide",
            tools_version: "2147483647",
        }
        .print();
        assert_eq!(printed, FLAT);
    }

    #[test]
    fn an_identifier_of_the_same_length_moves_nothing() {
        let parsed = Descriptor::parse(FLAT.as_bytes()).unwrap();
        let (next, changed) = parsed.with_cid(0x12);
        assert_eq!(changed.len(), 8);
        assert_eq!(next.text().len(), parsed.text().len());
        assert_eq!(next.cid(), 0x12);
        assert_eq!(Descriptor::parse(next.text()).unwrap(), next);

        for digits in ["d772", "d7728", "00d7728c98"] {
            let other = FLAT.replace("CID=d7728c98", &format!("CID={digits}"));
            let parsed = Descriptor::parse(other.as_bytes()).unwrap();
            for random in [0, 1, u32::MAX, parsed.cid()] {
                let (next, changed) = parsed.with_cid(random);
                assert_eq!(changed.len(), digits.len());
                assert_eq!(Descriptor::parse(next.text()).unwrap(), next);
                assert_ne!(next.cid(), parsed.cid());
            }
        }

        let short = FLAT.replace("CID=d7728c98", "CID=7");
        let parsed = Descriptor::parse(short.as_bytes()).unwrap();
        let (next, changed) = parsed.with_cid(u32::MAX);
        assert_eq!(changed.end, next.text().len());
        assert_eq!(Descriptor::parse(next.text()).unwrap(), next);
        assert_ne!(next.cid(), u32::MAX);
    }

    #[test]
    fn windows_line_ends_do_not_matter() {
        let text = FLAT.replace('\n', "\r\n");
        let parsed = Descriptor::parse(text.as_bytes()).unwrap();
        assert_eq!(parsed.extents()[0].name, "disk-flat.vmdk");
        assert_eq!(parsed.create_type(), Some("monolithicFlat"));
    }

    #[test]
    fn refuses_in_qemus_words() {
        let fails = [
            (
                "RW 12582912 VMFS \"dummy.vmdk\" 1",
                "Invalid extent line: RW 12582912 VMFS \"dummy.vmdk\" 1",
            ),
            ("RW 5 FLAT \"a\"", "Invalid extent line: RW 5 FLAT \"a\""),
            (
                "RW 5 FLAT \"a\" -1",
                "Invalid extent line: RW 5 FLAT \"a\" -1",
            ),
            (
                "RW 5 SPARSE \"a\" 7",
                "Invalid extent line: RW 5 SPARSE \"a\" 7",
            ),
            (
                "RDONLY 5 FLAT \"a\" 0",
                "Unsupported extent access 'RDONLY'",
            ),
            ("RW 5 ZERO", "Unsupported extent type 'ZERO'"),
            (
                "RW 5 flat \"a\" 0",
                "Invalid extent line: RW 5 flat \"a\" 0",
            ),
            ("RW 5 FLAT \"a 0", "Invalid extent line: RW 5 FLAT \"a 0"),
        ];
        for (line, message) in fails {
            let text = FLAT.replace("RW 10485760 FLAT \"disk-flat.vmdk\" 0", line);
            assert_eq!(message_of(&text), message);
        }
        let custom = FLAT.replace("monolithicFlat", "fullDevice");
        assert_eq!(message_of(&custom), "Unsupported image type 'fullDevice'");
        assert_eq!(message_of("hello"), "invalid VMDK image descriptor");
        assert_eq!(
            message_of(&FLAT.replace("\nCID", "\nSID")),
            "Invalid argument"
        );
    }

    proptest! {
        #[test]
        fn any_bytes_give_a_value_or_an_error(
            bytes in proptest::collection::vec(any::<u8>(), 0..2000),
            at in 0..FLAT.len(),
            random in any::<u32>(),
        ) {
            let _ = Descriptor::parse_embedded(&bytes);
            let mut text = FLAT.as_bytes().to_vec();
            let end = (at + bytes.len()).min(text.len());
            text[at..end].copy_from_slice(&bytes[..end - at]);
            if let Ok(parsed) = Descriptor::parse(&text) {
                let (next, _) = parsed.with_cid(random);
                prop_assert_eq!(Descriptor::parse(next.text()).unwrap().cid(), next.cid());
            }
        }
    }
}

//! Descriptors: the XML that says what a package holds (DMTF DSP0243). Pure.
//!
//! Elements are known by their local names: the namespace differs by version, and by who wrote it.

use crate::xml;
use roxmltree::{Document, Node, ParsingOptions};
use vellum::{Error, ErrorKind, Result};

/// Elements, attributes and texts of the largest descriptor that is read.
const MAX_NODES: u32 = 1 << 17;
/// Files and disks that a descriptor may have.
const MAX_ENTRIES: usize = 1 << 12;

/// What a descriptor says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Descriptor {
    /// Names of the virtual machines.
    pub machines: Vec<String>,
    /// The files that it refers to.
    pub files: Vec<FileReference>,
    /// The virtual disks.
    pub disks: Vec<VirtualDisk>,
}

/// A file that a descriptor refers to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FileReference {
    /// What disks know it by.
    pub id: String,
    /// Its name in the package.
    pub href: String,
    /// Its size.
    pub size_bytes: Option<u64>,
    /// How the file as a whole is compressed, if it is.
    pub compression: Option<String>,
    /// The bytes of the pieces that it is cut into, if it is.
    pub chunk_bytes: Option<u64>,
}

/// A virtual disk of a machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VirtualDisk {
    /// Its name in the descriptor.
    pub id: String,
    /// The size that the machine sees, where it is told as a number.
    pub capacity_bytes: Option<u64>,
    /// A URI that says which format its file has.
    pub format: Option<String>,
    /// [`FileReference::id`] of its file; none for a disk that is empty at first.
    pub file: Option<String>,
    /// The disk that it is a difference to.
    pub parent: Option<String>,
}

impl Descriptor {
    /// Takes a descriptor apart.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidImage`] for what is no descriptor, or has too much in it.
    pub fn decode(bytes: &[u8]) -> Result<Descriptor> {
        let text = std::str::from_utf8(bytes).map_err(|_| invalid("it is not in UTF-8"))?;
        let text = text.trim_start_matches('\u{feff}');
        if xml::has_many_attributes(text.as_bytes()) {
            return Err(invalid("an element of it has too many attributes"));
        }
        let options = ParsingOptions {
            // Types of documents bring entities, which grow.
            allow_dtd: false,
            nodes_limit: MAX_NODES,
            ..ParsingOptions::default()
        };
        let document = Document::parse_with_options(text, options)
            .map_err(|error| invalid(&error.to_string()))?;
        let root = document.root_element();
        if root.tag_name().name() != "Envelope" {
            return Err(invalid("it has no Envelope"));
        }
        let mut descriptor = Descriptor::default();
        for section in root.children() {
            match section.tag_name().name() {
                "References" => descriptor.files = all(section, "File", file)?,
                "DiskSection" => descriptor.disks = all(section, "Disk", disk)?,
                // Version 0.9 has all sections as this.
                "Section" if child(section, "Disk").is_some() => {
                    descriptor.disks = all(section, "Disk", disk)?;
                }
                "VirtualSystem" | "VirtualSystemCollection" | "Content" => {
                    let machines = machines(section);
                    descriptor.machines.extend(machines.take(MAX_ENTRIES));
                }
                _ => {}
            }
        }
        Ok(descriptor)
    }

    /// The file of a disk.
    pub fn file_of(&self, disk: &VirtualDisk) -> Option<&FileReference> {
        let id = disk.file.as_deref()?;
        self.files.iter().find(|file| file.id == id)
    }

    /// What is said of a member.
    pub fn file_named(&self, member: &str) -> Option<&FileReference> {
        self.files.iter().find(|file| file.href == member)
    }
}

fn invalid(why: &str) -> Error {
    // Characters of the descriptor may be in it.
    let why: String = why.chars().filter(|letter| !letter.is_control()).collect();
    let message = format!("the descriptor of the package cannot be read: {why}");
    Error::new(ErrorKind::InvalidImage, "open", message)
}

fn all<T>(section: Node<'_, '_>, name: &str, take: fn(Node<'_, '_>) -> T) -> Result<Vec<T>> {
    let entries = section
        .children()
        .filter(|node| node.tag_name().name() == name);
    let taken: Vec<T> = entries.take(MAX_ENTRIES + 1).map(take).collect();
    match taken.len() > MAX_ENTRIES {
        true => Err(invalid(&format!("it has more than {MAX_ENTRIES} entries"))),
        false => Ok(taken),
    }
}

fn child<'a, 'input>(node: Node<'a, 'input>, name: &str) -> Option<Node<'a, 'input>> {
    node.children()
        .find(|child| child.tag_name().name() == name)
}

/// An attribute of whatever namespace.
fn attribute(node: Node<'_, '_>, name: &str) -> Option<String> {
    let mut attributes = node.attributes();
    let found = attributes.find(|attribute| attribute.name() == name)?;
    Some(found.value().trim().to_owned()).filter(|value| !value.is_empty())
}

fn number(node: Node<'_, '_>, name: &str) -> Option<u64> {
    attribute(node, name)?.parse().ok()
}

fn file(node: Node<'_, '_>) -> FileReference {
    let compression = attribute(node, "compression").filter(|name| name != "identity");
    FileReference {
        id: attribute(node, "id").unwrap_or_default(),
        href: super::plain_name(&attribute(node, "href").unwrap_or_default()).to_owned(),
        size_bytes: number(node, "size"),
        compression,
        chunk_bytes: number(node, "chunkSize"),
    }
}

fn disk(node: Node<'_, '_>) -> VirtualDisk {
    let unit = attribute(node, "capacityAllocationUnits");
    let unit = unit.as_deref().map_or(Some(1), unit_bytes);
    let capacity = number(node, "capacity");
    VirtualDisk {
        id: attribute(node, "diskId").unwrap_or_default(),
        capacity_bytes: capacity
            .zip(unit)
            .and_then(|(count, unit)| count.checked_mul(unit)),
        format: attribute(node, "format"),
        file: attribute(node, "fileRef"),
        parent: attribute(node, "parentRef"),
    }
}

/// `byte * 2^20` and the like.
fn unit_bytes(text: &str) -> Option<u64> {
    let mut factors = text.split('*').map(str::trim);
    let first = match factors.next()?.to_ascii_lowercase().as_str() {
        "byte" | "bytes" => 1,
        "kilobytes" | "kilobyte" => 1 << 10,
        "megabytes" | "megabyte" => 1 << 20,
        "gigabytes" | "gigabyte" => 1 << 30,
        _ => return None,
    };
    factors.try_fold(first, |unit: u64, factor| {
        let factor = match factor.split_once('^') {
            Some((base, power)) => {
                let base: u64 = base.trim().parse().ok()?;
                base.checked_pow(power.trim().parse().ok()?)?
            }
            None => factor.parse().ok()?,
        };
        unit.checked_mul(factor)
    })
}

/// The names of the machines in a section, from the outside to the inside.
fn machines<'a>(section: Node<'a, '_>) -> impl Iterator<Item = String> + 'a {
    let systems = section
        .descendants()
        .filter(|node| matches!(node.tag_name().name(), "VirtualSystem" | "Content"));
    systems.filter_map(|system| {
        let name = child(system, "Name").and_then(|name| name.text().map(str::trim));
        let name = name.filter(|name| !name.is_empty()).map(str::to_owned);
        name.or_else(|| attribute(system, "id"))
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TEXT: &str = r#"<?xml version="1.0"?>
<Envelope xmlns="http://schemas.dmtf.org/ovf/envelope/1" xmlns:ovf="http://schemas.dmtf.org/ovf/envelope/1">
  <References>
    <File ovf:id="f1" ovf:href="./disk1.vmdk" ovf:size="77"/>
    <File ovf:id="f2" ovf:href="d2" ovf:compression="gzip" ovf:chunkSize="10"/>
  </References>
  <DiskSection><Info>disks</Info>
    <Disk ovf:diskId="v1" ovf:capacity="8" ovf:capacityAllocationUnits="byte * 2^30" ovf:fileRef="f1"
      ovf:format="http://www.vmware.com/interfaces/specifications/vmdk.html#streamOptimized"/>
    <Disk ovf:diskId="v2" ovf:capacity="${size}"/>
  </DiskSection>
  <VirtualSystem ovf:id="vm"><Name>A &amp; B</Name></VirtualSystem>
</Envelope>"#;

    #[test]
    fn a_descriptor_tells_its_disks() {
        let descriptor = Descriptor::decode(TEXT.as_bytes()).unwrap();
        assert_eq!(descriptor.machines, ["A & B"]);
        assert_eq!(descriptor.files[0].href, "disk1.vmdk");
        assert_eq!(descriptor.files[0].size_bytes, Some(77));
        assert_eq!(descriptor.files[1].compression.as_deref(), Some("gzip"));
        assert_eq!(descriptor.files[1].chunk_bytes, Some(10));
        let [first, second] = &descriptor.disks[..] else {
            panic!("{descriptor:?}");
        };
        assert_eq!(first.capacity_bytes, Some(8 << 30));
        assert_eq!(descriptor.file_of(first), descriptor.files.first());
        assert_eq!((second.capacity_bytes, &second.file), (None, &None));
    }

    #[test]
    fn units_are_products() {
        for (text, bytes) in [
            ("byte", Some(1)),
            ("byte * 2^20", Some(1 << 20)),
            ("byte*1024*1024", Some(1 << 20)),
            ("MegaBytes", Some(1 << 20)),
            ("byte * 2^99", None),
            ("fortnight", None),
        ] {
            assert_eq!(unit_bytes(text), bytes, "{text}");
        }
    }

    #[test]
    fn what_grows_or_nests_is_refused() {
        let bomb = "<!DOCTYPE a [<!ENTITY b \"cc\">]><Envelope>&b;</Envelope>";
        assert!(Descriptor::decode(bomb.as_bytes()).is_err());
        let deep = format!("<Envelope>{}", "<a>".repeat(300_000));
        assert!(Descriptor::decode(deep.as_bytes()).is_err());
        let deep = format!(
            "<Envelope>{}{}</Envelope>",
            "<VirtualSystem>".repeat(20_000),
            "</VirtualSystem>".repeat(20_000)
        );
        assert!(Descriptor::decode(deep.as_bytes()).is_ok());
        let many = format!(
            "<Envelope><References>{}</References></Envelope>",
            "<File/>".repeat(MAX_ENTRIES + 1)
        );
        assert!(Descriptor::decode(many.as_bytes()).is_err());
        let wide: String = (0..=xml::MAX_ATTRIBUTES)
            .map(|at| format!(" a{at}\n=\n''"))
            .collect();
        assert!(xml::has_many_attributes(format!("<a{wide}/>").as_bytes()));
        assert!(Descriptor::decode(format!("<Envelope{wide}/>").as_bytes()).is_err());
        // That is what the count relies on.
        assert!(Descriptor::decode(b"<Envelope a='<'/>").is_err());
        assert!(Descriptor::decode(b"<a/>").is_err() && Descriptor::decode(b"\xff").is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_give_a_value_or_an_error(
            noise in proptest::collection::vec(any::<u8>(), 0..16),
            at in 0..TEXT.len(),
        ) {
            let mut bytes = TEXT.as_bytes().to_vec();
            let end = (at + noise.len()).min(bytes.len());
            bytes.splice(at..end, noise.iter().copied());
            let _ = (Descriptor::decode(&bytes), Descriptor::decode(&noise));
        }
    }
}

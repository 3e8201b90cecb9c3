//! The lists of tables: an XML property list, or a resource fork. Whatever in them is no table is passed over later.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use roxmltree::{Document, ParsingOptions};
use vellum::{Error, ErrorKind, Result};

use crate::fields::be32;
use crate::xml;

/// Elements and texts of a property list; a disk with very many partitions has some thousands.
const MOST_NODES: u32 = 1 << 18;

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidImage, "open", message)
}

/// The content of all `data` elements of a property list.
///
/// # Errors
/// [`ErrorKind::InvalidImage`] for what is no XML, and data that is not in base 64.
pub(super) fn from_property_list(bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
    if xml::has_many_attributes(bytes) || xml::has_entities(bytes) {
        return Err(invalid(
            "the property list has what none of a disk image has",
        ));
    }
    let text = str::from_utf8(bytes).map_err(|_| invalid("the property list is no text"))?;
    let text = text.trim_end_matches(['\0', ' ', '\t', '\r', '\n']);
    let options = ParsingOptions {
        // Apple's own begin with one. Nothing else is opened for it, and it defines nothing.
        allow_dtd: true,
        nodes_limit: MOST_NODES,
        entity_resolver: None,
    };
    let parsed = Document::parse_with_options(text, options);
    let list = parsed.map_err(|error| invalid(format!("the property list is no XML: {error}")))?;
    let elements = list.descendants().filter(|node| node.has_tag_name("data"));
    let decoded = elements.map(|element| {
        let text = element.text().unwrap_or_default().bytes();
        let text: Vec<u8> = text.filter(|byte| !byte.is_ascii_whitespace()).collect();
        let data = STANDARD.decode(text);
        data.map_err(|_| invalid("the property list has data that is not in base 64"))
    });
    decoded.collect()
}

/// All resources of a resource fork.
///
/// # Errors
/// [`ErrorKind::InvalidImage`] for lengths that lead out of the fork.
pub(super) fn from_resource_fork(bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
    let broken = || invalid("the resource fork is damaged");
    let field = |at| be32(bytes, at).map(|value| value as usize);
    let start = field(0).ok_or_else(broken)?;
    let len = field(8).filter(|&len| len > 0).ok_or_else(broken)?;
    let end = start.checked_add(len).ok_or_else(broken)?;
    let mut rest = bytes.get(start..end).ok_or_else(broken)?;
    let mut resources = Vec::new();
    while !rest.is_empty() {
        let len = be32(rest, 0).map(|len| len as usize).ok_or_else(broken)?;
        let end = 4usize.checked_add(len).filter(|_| len > 0);
        let (resource, behind) = end
            .and_then(|end| rest.split_at_checked(end))
            .ok_or_else(broken)?;
        resources.push(resource.get(4..).unwrap_or_default().to_vec());
        rest = behind;
    }
    Ok(resources)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn data_of_a_property_list_is_found() {
        let list = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<!DOCTYPE plist PUBLIC \
                    \"-//Apple//DTD PLIST 1.0//EN\" \
                    \"http://www.apple.com/DTDs/PropertyList-1.0.dtd\">\n<plist version=\"1.0\">\
                    <dict><key>a</key><data>\n\t\taGVs\n\t\tbG8=\n</data><data/></dict></plist>\n\0";
        let data = from_property_list(list.as_bytes()).unwrap();
        assert_eq!(data, [b"hello".to_vec(), Vec::new()]);
        for broken in ["<plist><data>a</data></plist>", "<plist>", "\u{1}"] {
            assert!(from_property_list(broken.as_bytes()).is_err());
        }
        assert!(from_property_list(&[0xff]).is_err());
    }

    #[test]
    fn resources_are_found() {
        let mut fork = vec![0; 16];
        fork[3] = 16;
        fork[11] = 15;
        fork.extend([
            0, 0, 0, 5, b'h', b'e', b'l', b'l', b'o', 0, 0, 0, 2, b'y', b'o',
        ]);
        fork.extend([7; 10]);
        let resources = from_resource_fork(&fork).unwrap();
        assert_eq!(resources, [b"hello".to_vec(), b"yo".to_vec()]);
        fork[11] = 14;
        assert!(from_resource_fork(&fork).is_err());
        fork[11] = 99;
        assert!(from_resource_fork(&fork).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_give_a_list_or_an_error(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..100),
            start in 0u32..50,
            len in 0u32..60,
            text in "(<[a-z]{1,4}>|</data>|<data>|[A-Za-z=]|&[a-z];){0,30}",
        ) {
            let _ = from_property_list(&bytes);
            let _ = from_property_list(text.as_bytes());
            if bytes.len() > 12 {
                bytes[..4].copy_from_slice(&start.to_be_bytes());
                bytes[8..12].copy_from_slice(&len.to_be_bytes());
            }
            let _ = from_resource_fork(&bytes);
        }
    }
}

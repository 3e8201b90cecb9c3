//! The parent locator: by which identity and paths a differencing image knows its parent.

use vellum::{Error, ErrorKind, Result};

use super::guid::Guid;
use super::{invalid, le};
use crate::facts::BackingName;

/// Pairs of a locator; five are known.
const MAX_PAIRS: usize = 256;

/// How a differencing image names its parent. Paths are as Windows writes them, unless a
/// program elsewhere has made the image.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ParentLocator {
    /// What the parent's headers have to say ([`super::VhdxLayout::data_write_guid`]).
    pub linkage: Option<Guid>,
    /// What they may say instead, while the parent is being merged into.
    pub linkage2: Option<Guid>,
    /// From the folder of the image, which is tried first.
    pub relative_path: Option<String>,
    /// By the volume's identity.
    pub volume_path: Option<String>,
    /// From a drive or a server.
    pub absolute_win32_path: Option<String>,
}

impl ParentLocator {
    /// The paths, in the order in which they are to be tried.
    pub fn paths(&self) -> impl Iterator<Item = &str> {
        let paths = [
            &self.relative_path,
            &self.volume_path,
            &self.absolute_win32_path,
        ];
        paths.into_iter().filter_map(|path| path.as_deref())
    }

    /// The parent as a backing file of this system: its path from the folder of the image, if there is one, with
    /// slashes.
    pub fn backing_name(&self) -> Option<BackingName> {
        Some(BackingName::of_path(self.paths().next()?, "vhdx"))
    }

    /// Whether an image whose headers have this identity is the parent.
    pub fn is_parent(&self, data_write: Guid) -> bool {
        self.linkage == Some(data_write) || self.linkage2 == Some(data_write)
    }

    /// Reads the metadata item.
    pub(super) fn decode(item: &[u8]) -> Result<ParentLocator> {
        let kind = Guid::at(item, 0);
        let count =
            le::le16(item, 18).ok_or_else(|| invalid("the VHDX parent locator is too short"))?;
        if kind != Some(Guid::PARENT_IS_VHDX) {
            let message = "the VHDX image has a parent that is no VHDX image";
            return Err(Error::new(ErrorKind::Unsupported, "open", message));
        }
        if usize::from(count) > MAX_PAIRS {
            return Err(invalid("the VHDX parent locator has too many entries"));
        }
        let mut locator = ParentLocator::default();
        for index in 0..usize::from(count) {
            let (key, value) = decode_pair(item, 20 + 12 * index)
                .ok_or_else(|| invalid("an entry of the VHDX parent locator lies outside of it"))?;
            match key.as_str() {
                "parent_linkage" => locator.linkage = Guid::parse(&value),
                "parent_linkage2" => locator.linkage2 = Guid::parse(&value),
                "relative_path" => locator.relative_path = Some(value),
                "volume_path" => locator.volume_path = Some(value),
                "absolute_win32_path" => locator.absolute_win32_path = Some(value),
                _ => {}
            }
        }
        Ok(locator)
    }
}

fn decode_pair(item: &[u8], at: usize) -> Option<(String, String)> {
    let text = |offset_at: usize, len_at: usize| {
        let start = le::le32(item, offset_at)? as usize;
        let len = usize::from(le::le16(item, len_at)?);
        let bytes = item.get(start..start.checked_add(len)?)?;
        let units: Vec<u16> = bytes
            .chunks_exact(2)
            .map(|unit| u16::from_le_bytes([unit[0], unit[1]]))
            .collect();
        Some(String::from_utf16_lossy(&units))
    };
    Some((text(at, at + 8)?, text(at + 4, at + 10)?))
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The item of a locator with these pairs.
    pub(crate) fn encode(pairs: &[(&str, &str)]) -> Vec<u8> {
        let mut item = vec![0; 20 + 12 * pairs.len()];
        le::put(&mut item, 0, &Guid::PARENT_IS_VHDX.0);
        le::put(&mut item, 18, &(pairs.len() as u16).to_le_bytes());
        for (index, (key, value)) in pairs.iter().enumerate() {
            for (which, text) in [key, value].into_iter().enumerate() {
                let units: Vec<u8> = text.encode_utf16().flat_map(u16::to_le_bytes).collect();
                let at = 20 + 12 * index;
                let start = item.len() as u32;
                le::put(&mut item, at + 4 * which, &start.to_le_bytes());
                le::put(
                    &mut item,
                    at + 8 + 2 * which,
                    &(units.len() as u16).to_le_bytes(),
                );
                item.extend(units);
            }
        }
        item
    }

    #[test]
    fn paths_come_in_the_order_of_the_specification() {
        let item = encode(&[
            ("absolute_win32_path", r"\\?\d:\a\parent.vhdx"),
            ("parent_linkage", "{83ED0EC3-24C8-49A6-A959-5E4BF1288BFB}"),
            ("relative_path", r"..\a\parent.vhdx"),
            ("something", "else"),
        ]);
        let locator = ParentLocator::decode(&item).unwrap();
        let paths: Vec<_> = locator.paths().collect();
        assert_eq!(paths, [r"..\a\parent.vhdx", r"\\?\d:\a\parent.vhdx"]);
        let name = locator.backing_name().unwrap().name;
        assert_eq!(name, "../a/parent.vhdx");
        let linkage = Guid::parse("83ed0ec3-24c8-49a6-a959-5e4bf1288bfb").unwrap();
        assert!(locator.is_parent(linkage));
        assert!(!locator.is_parent(Guid::NIL));
    }

    #[test]
    fn a_parent_is_a_path_whatever_its_locator_says() {
        for (path, name) in [
            (r"nbd://host:10809/disk", "./nbd://host:10809/disk"),
            (r"http:\\host\disk", "./http://host/disk"),
            (r#"json:{"driver":"nbd"}"#, r#"./json:{"driver":"nbd"}"#),
            (r"d:\a\parent.vhdx", "./d:/a/parent.vhdx"),
            (r"a\b:c.vhdx", "a/b:c.vhdx"),
        ] {
            let locator = ParentLocator::decode(&encode(&[("relative_path", path)])).unwrap();
            assert_eq!(locator.backing_name().unwrap().name, name);
        }
    }

    #[test]
    fn entries_outside_of_the_item_are_refused() {
        let item = encode(&[("relative_path", "x")]);
        assert!(ParentLocator::decode(&item[..item.len() - 1]).is_err());
        assert!(ParentLocator::decode(&item[..10]).is_err());
        let mut other = item;
        other[0] ^= 1;
        let error = ParentLocator::decode(&other).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
    }

    proptest! {
        #[test]
        fn any_bytes_give_a_value_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut item = encode(&[("a", "b")]);
            item.splice(18.., bytes);
            let _ = ParentLocator::decode(&item);
        }
    }
}

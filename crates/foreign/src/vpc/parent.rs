//! [`Parent`]: by which identity and paths a differencing image knows its parent.

use vellum::{Result, Storage};

use super::header::{Header, Locator, text_of};
use crate::facts::BackingName;
use crate::fields;

/// The longest path that is read, in bytes.
const MAX_PATH_BYTES: u32 = 64 << 10;

/// How a differencing image names its parent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Parent {
    /// What the parent's footer has to have.
    pub id: [u8; 16],
    /// Its file name, without a folder.
    pub name: String,
    /// From the folder of the image, as Windows writes it.
    pub relative_path: Option<String>,
    /// From a drive or a server, as Windows writes it.
    pub absolute_path: Option<String>,
    /// A URL of a file, as Macintoshes have it.
    pub url: Option<String>,
}

impl Parent {
    pub(super) async fn read(file: &dyn Storage, header: &Header) -> Result<Parent> {
        let mut parent = Parent {
            id: header.parent_id,
            name: header.parent_name.clone(),
            ..Parent::default()
        };
        let file_bytes = file.len_bytes()?;
        for locator in &header.locators {
            let end = locator.offset_bytes.checked_add(locator.len_bytes.into());
            let is_there = end.is_some_and(|end| end <= file_bytes);
            if !is_there || locator.len_bytes > MAX_PATH_BYTES {
                continue;
            }
            let place = (locator.offset_bytes, locator.len_bytes as usize);
            let bytes = fields::read_at(file, place.0, place.1).await?;
            parent.take(locator, &bytes);
        }
        Ok(parent)
    }

    fn take(&mut self, locator: &Locator, bytes: &[u8]) {
        let utf16 = || {
            let units = bytes.chunks_exact(2);
            text_of(units.map(|unit| u16::from_le_bytes([unit[0], unit[1]])))
        };
        match &locator.platform {
            b"W2ru" => self.relative_path = Some(utf16()),
            b"W2ku" => self.absolute_path = Some(utf16()),
            b"MacX" => {
                let text = String::from_utf8_lossy(bytes);
                self.url = Some(text.trim_end_matches('\0').to_owned());
            }
            _ => {}
        }
    }

    /// The paths, in the order in which they are to be tried.
    pub fn paths(&self) -> impl Iterator<Item = &str> {
        let name = Some(&self.name).filter(|name| !name.is_empty());
        let url = self.url.as_deref().map(|url| {
            let path = url.strip_prefix("file://localhost");
            path.or_else(|| url.strip_prefix("file://")).unwrap_or(url)
        });
        [
            self.relative_path.as_deref(),
            self.absolute_path.as_deref(),
            url,
            name.map(String::as_str),
        ]
        .into_iter()
        .flatten()
        .filter(|path| !path.is_empty())
    }

    /// The parent as a backing file of this system: its path from the folder of the image, if there is one, with
    /// slashes.
    pub fn backing_name(&self) -> Option<BackingName> {
        Some(BackingName::of_path(self.paths().next()?, "vpc"))
    }
}

//! Who may trust a bitmap that is in use.
//!
//! The autoclear bit for crash-consistent bitmaps says: only programs that know it have changed the
//! image since, so bitmaps in use are crash-consistent. A bitmap that was in use before the
//! bit was set stays lost; the tables of such bitmaps are listed in an extension.
//!
//! Nor is a bitmap trusted that is not in use and has a longer table than its disk asks for: its
//! granularity or the disk's size may be damaged, and every bit may tell of something else.

use vellum_format::bitmap::{BitmapDirectoryEntry, BitmapFlags};
use vellum_format::extension::{Extension, kind};
use vellum_format::features::Autoclear;
use vellum_format::header::{Header, field};
use vellum_io::Result;

use crate::qcow2::image::Image;

/// Whether the content of a bitmap may be used.
pub(crate) fn is_consistent(header: &Header, entry: &BitmapDirectoryEntry) -> bool {
    if !entry.flags.contains(BitmapFlags::IN_USE) {
        return entry.fits(header.guest_size_bytes(), &header.geometry());
    }
    let listed = lost(header).chunks_exact(8).any(|table| {
        let table: [u8; 8] = table.try_into().unwrap_or_default();
        u64::from_be_bytes(table) == entry.table_offset.bytes()
    });
    header
        .autoclear
        .contains(Autoclear::CRASH_CONSISTENT_BITMAPS)
        && !listed
}

/// Whether there were bitmaps, and a program that does not know them has changed the
/// image since: it cleared the bit that vouches for their directory.
pub(super) fn are_lost(header: &Header) -> bool {
    let is_bitmaps = |extension: &Extension| matches!(extension, Extension::Bitmaps(_));
    header.bitmaps().is_none() && header.extensions.iter().any(is_bitmaps)
}

/// The tables of bitmaps that are not to be trusted, as the header lists them.
fn lost(header: &Header) -> &[u8] {
    let found = header.extensions.iter().rev().find_map(|extension| {
        let Extension::Unknown { kind, data } = extension else {
            return None;
        };
        (*kind == kind::LOST_BITMAPS).then_some(data.as_slice())
    });
    found.unwrap_or_default()
}

/// Lists those of `entries` that cannot be trusted while they are in use, with what the header
/// said until now about it.
pub(in crate::qcow2) fn list_lost(
    header: &Header,
    entries: &[BitmapDirectoryEntry],
) -> Option<Extension> {
    let tables: Vec<u8> = entries
        .iter()
        .filter(|entry| !is_consistent(header, entry))
        .flat_map(|entry| entry.table_offset.bytes().to_be_bytes())
        .collect();
    (!tables.is_empty()).then_some(Extension::Unknown {
        kind: kind::LOST_BITMAPS,
        data: tables,
    })
}

/// Has the header list the bitmaps that are not to be trusted.
pub(in crate::qcow2) fn set_lost(header: &mut Header, list: Option<Extension>) {
    header.remove_extension(kind::LOST_BITMAPS);
    header.extensions.extend(list);
}

impl Image {
    /// Says in the header, durably, that bitmaps in use are crash-consistent from now on.
    /// `entries`: the directory on disk.
    pub(super) async fn set_crash_consistent(
        &self,
        entries: &[BitmapDirectoryEntry],
    ) -> Result<()> {
        let header = self.header();
        let list = list_lost(&header, entries);
        let is_set = header
            .autoclear
            .contains(Autoclear::CRASH_CONSISTENT_BITMAPS);
        let listed = lost(&header);
        let same_list = match &list {
            Some(Extension::Unknown { data, .. }) => data == listed,
            _ => listed.is_empty(),
        };
        if is_set && same_list {
            return Ok(());
        }
        self.update_header(|header| {
            header.autoclear = header.autoclear.with(Autoclear::CRASH_CONSISTENT_BITMAPS);
            set_lost(header, list);
        })
        .await
    }

    /// Forgets a directory that nothing vouches for. Its clusters are leaked: whoever
    /// changed the image may have used them.
    pub(super) async fn drop_lost_bitmaps(&self) -> Result<()> {
        if !are_lost(&self.header()) {
            return Ok(());
        }
        self.update_header(|header| {
            header.remove_extension(kind::BITMAPS);
            header.remove_extension(kind::LOST_BITMAPS);
            header.autoclear = header
                .autoclear
                .without(Autoclear::CRASH_CONSISTENT_BITMAPS);
        })
        .await
    }

    /// Clears the bit: no bitmap that is in use is crash-consistent.
    pub(super) async fn clear_crash_consistent(&self) -> Result<()> {
        let header = self.header();
        if !header
            .autoclear
            .contains(Autoclear::CRASH_CONSISTENT_BITMAPS)
            && lost(&header).is_empty()
        {
            return Ok(());
        }
        if lost(&header).is_empty() {
            let without = header
                .autoclear
                .without(Autoclear::CRASH_CONSISTENT_BITMAPS);
            self.write_header_field(field::AUTOCLEAR_FEATURES, &without.bits().to_be_bytes())
                .await?;
            self.change_header(|header| header.autoclear = without);
            return Ok(());
        }
        self.update_header(|header| {
            header.autoclear = header
                .autoclear
                .without(Autoclear::CRASH_CONSISTENT_BITMAPS);
            set_lost(header, None);
        })
        .await
    }
}

//! New images, in QEMU's five kinds.
//!
//! Called by whoever makes images: [`CreateOptions::extent_names`] says which files there have to be, and
//! [`create`] fills them, all empty.
//!
//! Invariant: the descriptor is written last, behind a barrier. Whatever fails before leaves files that
//! nobody takes for an image.

use std::sync::Arc;

use vellum::{Error, ErrorKind, Result, Storage};
use vellum_storage::ZeroFlags;

use super::descriptor::{EMBEDDED_BYTES, ExtentLine, ExtentType, NO_PARENT_CID, NewDescriptor};
use super::header::{SECTOR_BYTES, SparseHeader};
use crate::fields::write_at;

/// The size of an extent of an image in pieces.
const PIECE_BYTES: u64 = 1 << 31;

/// Entries of a directory are written in pieces of so many.
const ENTRIES_AT_ONCE: u64 = 1 << 18;

/// More tables nobody opens.
const MAX_TABLES: u64 = 32 << 20;

/// Where the descriptor is in an image of one file.
const DESCRIPTOR_AT_BYTES: u64 = 512;

/// How an image is spread over files: the `subformat` option.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Subformat {
    /// One file that grows.
    #[default]
    MonolithicSparse,
    /// A descriptor, and one file of the disk's size.
    MonolithicFlat,
    /// A descriptor, and files that grow, one for every 2 GiB.
    TwoGbMaxExtentSparse,
    /// A descriptor, and files of 2 GiB.
    TwoGbMaxExtentFlat,
    /// One file of compressed grains, to be written once.
    StreamOptimized,
}

impl Subformat {
    const ALL: [Subformat; 5] = [
        Subformat::MonolithicSparse,
        Subformat::MonolithicFlat,
        Subformat::TwoGbMaxExtentSparse,
        Subformat::TwoGbMaxExtentFlat,
        Subformat::StreamOptimized,
    ];

    /// As QEMU and the descriptor call it.
    pub fn name(self) -> &'static str {
        match self {
            Subformat::MonolithicSparse => "monolithicSparse",
            Subformat::MonolithicFlat => "monolithicFlat",
            Subformat::TwoGbMaxExtentSparse => "twoGbMaxExtentSparse",
            Subformat::TwoGbMaxExtentFlat => "twoGbMaxExtentFlat",
            Subformat::StreamOptimized => "streamOptimized",
        }
    }

    /// The one of a name.
    pub fn named(name: &str) -> Option<Subformat> {
        Subformat::ALL.into_iter().find(|it| it.name() == name)
    }

    fn is_flat(self) -> bool {
        matches!(
            self,
            Subformat::MonolithicFlat | Subformat::TwoGbMaxExtentFlat
        )
    }

    fn is_split(self) -> bool {
        matches!(
            self,
            Subformat::TwoGbMaxExtentSparse | Subformat::TwoGbMaxExtentFlat
        )
    }

    /// One file holds descriptor and grains.
    fn is_one_file(self) -> bool {
        matches!(
            self,
            Subformat::MonolithicSparse | Subformat::StreamOptimized
        )
    }
}

/// What VMware is to put the disk at: the `adapter_type` option.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AdapterType {
    /// IDE.
    #[default]
    Ide,
    /// BusLogic SCSI.
    BusLogic,
    /// LSI Logic SCSI.
    LsiLogic,
    /// Old ESX.
    LegacyEsx,
}

impl AdapterType {
    const ALL: [AdapterType; 4] = [
        AdapterType::Ide,
        AdapterType::BusLogic,
        AdapterType::LsiLogic,
        AdapterType::LegacyEsx,
    ];

    /// As QEMU and the descriptor call it.
    pub fn name(self) -> &'static str {
        match self {
            AdapterType::Ide => "ide",
            AdapterType::BusLogic => "buslogic",
            AdapterType::LsiLogic => "lsilogic",
            AdapterType::LegacyEsx => "legacyESX",
        }
    }

    /// The one of a name.
    pub fn named(name: &str) -> Option<AdapterType> {
        AdapterType::ALL.into_iter().find(|it| it.name() == name)
    }

    /// Heads of the geometry that VMware gives such disks.
    fn heads(self) -> u64 {
        match self {
            AdapterType::Ide => 16,
            _ => 255,
        }
    }
}

vellum_io::with_setters! {
    /// What image to make: the `-o` options of `qemu-img create`, with its defaults.
    #[derive(Debug, Clone, PartialEq, Eq, Default)]
    pub struct CreateOptions {
        /// Virtual size; rounded up to whole sectors of 512 bytes.
        pub size_bytes: u64,
        /// `subformat`
        pub subformat: Subformat,
        /// `adapter_type`
        pub adapter_type: AdapterType,
        /// `hwversion`
        pub hardware_version: Option<String>,
        /// `toolsversion`
        pub tools_version: Option<String>,
        /// `compat6`: hardware of version 6.
        pub compat6: bool,
        /// `zeroed_grain`: grains of zeroes have an entry for it.
        pub zeroed_grain: bool,
        /// `backing_file`: the parent's name as it is to stand in the image.
        pub backing_file: Option<String>,
        /// The parent's identifier, where there is a parent.
        pub parent_cid: Option<u32>,
    }
}

fn refuse(kind: ErrorKind, message: impl Into<String>) -> Error {
    Error::new(kind, "create", message)
}

/// The last component of a name.
fn base_name(name: &str) -> &str {
    let trimmed = name.trim_end_matches('/');
    trimmed.rsplit('/').next().unwrap_or(trimmed)
}

impl CreateOptions {
    fn sectors(&self) -> u64 {
        self.size_bytes.div_ceil(SECTOR_BYTES)
    }

    /// Sizes of the extents that are files of their own, in sectors.
    fn pieces(&self) -> impl ExactSizeIterator<Item = u64> + use<> {
        let sectors = self.sectors();
        let piece = match (self.subformat.is_one_file(), self.subformat.is_split()) {
            (true, _) => 0,
            (_, true) => PIECE_BYTES / SECTOR_BYTES,
            (_, false) => sectors,
        };
        let count = if piece == 0 {
            0
        } else {
            sectors.div_ceil(piece)
        };
        // As many files nobody has.
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        (0..count).map(move |number| piece.min(sectors - u64::from(number) * piece))
    }

    /// Checks the options against each other, in QEMU's order and words.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] or [`ErrorKind::Unsupported`], with the first objection.
    pub fn validate(&self) -> Result<()> {
        if self.compat6 && self.hardware_version.is_some() {
            let message = "compat6 cannot be enabled with hwversion set";
            return Err(refuse(ErrorKind::InvalidArgument, message));
        }
        if self.subformat.is_flat() && self.backing_file.is_some() {
            let message = "Flat image can't have backing file";
            return Err(refuse(ErrorKind::Unsupported, message));
        }
        if self.subformat.is_flat() && self.zeroed_grain {
            let message = "Flat image can't enable zeroed grain";
            return Err(refuse(ErrorKind::Unsupported, message));
        }
        let largest = match self.subformat.is_flat() {
            true => i64::MAX as u64,
            false => MAX_TABLES << 25,
        };
        if self.size_bytes > largest {
            let message = "The image size is too large for file format 'vmdk'";
            return Err(refuse(ErrorKind::InvalidArgument, message).with_errno(27));
        }
        if self.backing_file.is_some() && self.parent_cid.is_none() {
            let message = "Failed to read parent CID";
            return Err(refuse(ErrorKind::InvalidArgument, message));
        }
        let texts = [
            &self.hardware_version,
            &self.tools_version,
            &self.backing_file,
        ];
        texts
            .into_iter()
            .flatten()
            .try_for_each(|text| check_text(text))
    }

    /// Names of the files beside the first one, in its folder, in the order of the disk.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] without a name.
    pub fn extent_names(&self, file_name: &str) -> Result<Vec<String>> {
        if file_name.is_empty() {
            return Err(refuse(ErrorKind::InvalidArgument, "No filename provided"));
        }
        let folder = ['/', '\\', ':']
            .iter()
            .find_map(|&end| file_name.rfind(end));
        let (folder, name) = file_name.split_at(folder.map_or(0, |at| at + 1));
        let (prefix, postfix) = name.split_at(name.rfind('.').unwrap_or(name.len()));
        let kind = if self.subformat.is_flat() { 'f' } else { 's' };
        let names = self
            .pieces()
            .enumerate()
            .map(|(number, _)| match self.subformat.is_split() {
                true => format!("{folder}{prefix}-{kind}{:03}{postfix}", number + 1),
                false => format!("{folder}{prefix}-flat{postfix}"),
            });
        Ok(names.collect())
    }

    fn extent_line(&self, sectors: u64, file: &dyn Storage) -> Result<ExtentLine> {
        let name = base_name(file.name()).to_owned();
        check_text(&name)?;
        Ok(ExtentLine {
            sectors,
            extent_type: match self.subformat.is_flat() {
                true => ExtentType::Flat,
                false => ExtentType::Sparse,
            },
            name,
            offset_sectors: 0,
        })
    }

    fn descriptor(&self, cid: u32, extents: &[ExtentLine]) -> String {
        let hardware_version = match (&self.hardware_version, self.compat6) {
            (_, true) => "6",
            (Some(version), false) => version,
            (None, false) => "4",
        };
        let heads = self.adapter_type.heads();
        let descriptor = NewDescriptor {
            cid,
            parent_cid: match self.backing_file {
                Some(_) => self.parent_cid.unwrap_or(NO_PARENT_CID),
                None => NO_PARENT_CID,
            },
            parent_name: self.backing_file.as_deref(),
            create_type: self.subformat.name(),
            extents,
            hardware_version,
            cylinders: self.sectors() / (63 * heads),
            heads,
            adapter: self.adapter_type.name(),
            tools_version: self.tools_version.as_deref().unwrap_or("2147483647"),
        };
        descriptor.print()
    }
}

/// What ends a line or a string would say something else in a descriptor than what is meant.
fn check_text(text: &str) -> Result<()> {
    match text.contains(|it: char| it == '"' || it.is_control()) {
        false => Ok(()),
        true => {
            let message = format!("A VMDK descriptor cannot hold the text {text:?}");
            Err(refuse(ErrorKind::InvalidArgument, message))
        }
    }
}

/// Makes an image of empty files: the one that is opened as the image, and those of
/// [`CreateOptions::extent_names`], in their order. Names in the descriptor are the files' own,
/// without folders.
///
/// # Errors
/// As [`CreateOptions::validate`]; [`ErrorKind::InvalidArgument`] for another number of files than the
/// image needs; what the storage says.
pub async fn create(
    file: &Arc<dyn Storage>,
    extents: &[Arc<dyn Storage>],
    options: &CreateOptions,
) -> Result<()> {
    options.validate()?;
    let pieces = options.pieces();
    if extents.len() < pieces.len() {
        let message = format!("Extent [{}] not specified", extents.len());
        return Err(refuse(ErrorKind::InvalidArgument, message));
    }
    if extents.len() > pieces.len() {
        let message = "List of extents contains unused extents";
        return Err(refuse(ErrorKind::InvalidArgument, message));
    }
    let mut lines = Vec::new();
    let is_one_file = options.subformat.is_one_file();
    if is_one_file {
        lines.push(options.extent_line(options.sectors(), &**file)?);
        make_extent(&**file, options.sectors(), options).await?;
    }
    for (extent, sectors) in extents.iter().zip(pieces) {
        lines.push(options.extent_line(sectors, &**extent)?);
        make_extent(&**extent, sectors, options).await?;
        extent.flush().await?;
    }
    let cid = getrandom::u32().map_err(|error| {
        let message = format!("no random number for the image's identity: {error}");
        refuse(ErrorKind::Io, message)
    })?;
    // The two largest ones mean that there is none.
    let text = options.descriptor(cid.min(0xffff_fffd), &lines);
    if is_one_file && text.len() > EMBEDDED_BYTES {
        let message = "the descriptor has no room for such long texts";
        return Err(refuse(ErrorKind::InvalidArgument, message));
    }
    file.flush().await?;
    let at_bytes = if is_one_file { DESCRIPTOR_AT_BYTES } else { 0 };
    write_at(&**file, at_bytes, text.as_bytes()).await?;
    if !is_one_file && file.capabilities().growable {
        file.truncate(text.len() as u64).await?;
    }
    file.flush().await
}

/// An extent without a descriptor.
async fn make_extent(file: &dyn Storage, sectors: u64, options: &CreateOptions) -> Result<()> {
    let is_growable = file.capabilities().growable;
    if options.subformat.is_flat() {
        return match is_growable {
            true => file.truncate(sectors * SECTOR_BYTES).await,
            false => Ok(()),
        };
    }
    let is_compressed = options.subformat == Subformat::StreamOptimized;
    let header = SparseHeader::new(sectors, is_compressed, options.zeroed_grain);
    let overhead_bytes = header.overhead_sectors * SECTOR_BYTES;
    let used_bytes = file.len_bytes()?;
    if used_bytes > 0 {
        let flags = ZeroFlags::default();
        let used_bytes = overhead_bytes.min(used_bytes);
        file.write_zeroes(0, used_bytes, flags).await?;
    }
    if is_growable {
        file.truncate(overhead_bytes).await?;
    }
    for at_sector in [header.redundant_sector, header.directory_sector] {
        write_directory(file, &header, at_sector).await?;
    }
    write_at(file, 0, &header.encode()).await
}

/// A directory whose tables, all zero, lie behind it.
async fn write_directory(file: &dyn Storage, header: &SparseHeader, at_sector: u64) -> Result<()> {
    let first_table = at_sector + header.new_directory_sectors();
    let count = header.new_tables();
    let mut from = 0;
    while from < count {
        let to = count.min(from + ENTRIES_AT_ONCE);
        // Tables are of 2 KiB.
        let sectors = (from..to).map(|number| first_table + number * 4);
        let entries = sectors.map(|sector| u32::try_from(sector).unwrap_or(0).to_le_bytes());
        let bytes: Vec<u8> = entries.flatten().collect();
        write_at(file, at_sector * SECTOR_BYTES + from * 4, &bytes).await?;
        from = to;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_have_qemus_names() {
        let names = |subformat, size_bytes, name| {
            let options = CreateOptions::default()
                .size_bytes(size_bytes)
                .subformat(subformat);
            options.extent_names(name).unwrap()
        };
        assert_eq!(
            names(Subformat::MonolithicSparse, 5 << 30, "a.vmdk"),
            [""; 0]
        );
        assert_eq!(
            names(Subformat::MonolithicFlat, 5 << 30, "d/a.vmdk"),
            ["d/a-flat.vmdk"]
        );
        assert_eq!(
            names(Subformat::TwoGbMaxExtentSparse, (4 << 30) + 1, "/d.e/a"),
            ["/d.e/a-s001", "/d.e/a-s002", "/d.e/a-s003"]
        );
        assert_eq!(names(Subformat::TwoGbMaxExtentFlat, 0, "a.b.vmdk"), [""; 0]);
        assert_eq!(
            names(Subformat::TwoGbMaxExtentFlat, 9, "a.b.vmdk"),
            ["a.b-f001.vmdk"]
        );
    }

    #[test]
    fn objects_in_qemus_words() {
        let message = |options: CreateOptions| options.validate().unwrap_err().message().to_owned();
        let flat = CreateOptions::default().subformat(Subformat::MonolithicFlat);
        assert_eq!(
            message(
                flat.clone()
                    .backing_file(Some("a".into()))
                    .parent_cid(Some(1))
            ),
            "Flat image can't have backing file"
        );
        assert_eq!(
            message(flat.zeroed_grain(true)),
            "Flat image can't enable zeroed grain"
        );
        let options = CreateOptions::default();
        assert_eq!(
            message(
                options
                    .clone()
                    .compat6(true)
                    .hardware_version(Some("7".into()))
            ),
            "compat6 cannot be enabled with hwversion set"
        );
        assert!(
            options
                .hardware_version(Some("4\"\nCID".into()))
                .validate()
                .is_err()
        );
    }
}

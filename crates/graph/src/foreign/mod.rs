//! Formats of other programs (`vellum-foreign`): how they are opened, made and checked by name.
//!
//! A new one is a file here and a line in `FORMATS`.
//!
//! Invariant: a file that an image names (a backing file, an extent) is opened by this crate, as far as
//! the policy allows it (rule 12); the formats themselves open nothing.

mod only_read;
mod opening;
mod parallels;
mod qcow;
mod qed;
mod vdi;
mod vhdx;
mod vmdk;
mod vpc;

use std::pin::Pin;
use std::sync::Arc;

use vellum::qcow2::MemoryBitmap;
use vellum::{BlockDevice, Error, ErrorKind, Result, Storage, target_of};
pub use vellum_foreign::{
    BackingName, CheckReport, CompressedWrites, Fact, Facts, Fix, ForeignImage,
};
use vellum_options::create_options::{CreateSettings, OptionDescription};

use crate::gate::FilePolicy;
pub use opening::Opening;

/// What opens, makes or checks an image.
pub type Pending<'a, T> = Pin<Box<dyn Future<Output = Result<T>> + 'a>>;

/// A format, as the rest of this crate knows it.
pub struct ForeignFormat {
    /// Its name, as `-f` has it.
    pub name: &'static str,
    /// Opens an image of it.
    pub open: fn(Opening) -> Pending<'static, Arc<dyn BlockDevice>>,
    /// What makes images of it; `None` for those that are only read.
    pub create: Option<Creation>,
    /// Looks at an image that nobody else changes.
    pub(crate) check: Option<Check>,
    /// Whether a check can mend what it finds.
    pub(crate) repairs: bool,
    /// Options of a node, beside its file and its backing file.
    pub(crate) options: &'static [&'static str],
    /// Whether clusters may be written compressed, in images of some kind.
    pub(crate) compresses: bool,
    /// Whether images have backing files.
    pub(crate) has_backing: bool,
}

/// A check, which may mend what it finds.
pub(crate) type Check =
    for<'a> fn(&'a Arc<dyn Storage>, Fix, &'a FilePolicy) -> Pending<'a, CheckReport>;

/// How images of a format are made.
pub struct Creation {
    /// The options of a new image.
    pub options: &'static [OptionDescription],
    /// Checks settings before anything is touched.
    pub validate: fn(&CreateSettings) -> Result<()>,
    /// Names of the files that an image of this name has beside the one that is called so.
    pub extents: fn(&CreateSettings, &str) -> Result<Vec<String>>,
    /// Makes an image in files that are empty.
    pub fill: for<'a> fn(New<'a>) -> Pending<'a, ()>,
    /// Options of `blockdev-create` and the settings that they are.
    pub qmp: &'static [QmpOption],
}

/// An image that is being made.
#[derive(Clone, Copy)]
pub struct New<'a> {
    /// The empty file that becomes the image.
    pub file: &'a Arc<dyn Storage>,
    /// The files of [`Creation::extents`].
    pub extents: &'a [Arc<dyn Storage>],
    /// The options of the new image, `size` among them.
    pub settings: &'a CreateSettings,
    /// Sizes that the format cannot have are refused, not rounded: `blockdev-create` wants that.
    pub exact: bool,
}

impl New<'_> {
    pub(crate) fn size_bytes(&self) -> u64 {
        self.settings.integer("size").unwrap_or(0)
    }
}

/// An option of `blockdev-create`.
pub struct QmpOption {
    /// Its name in QMP.
    pub key: &'static str,
    /// The option of `create -o` that it sets.
    pub setting: &'static str,
    /// What values it has.
    pub kind: QmpKind,
}

/// What values an option of `blockdev-create` has.
pub enum QmpKind {
    /// Any text.
    Text,
    /// A boolean.
    Switch,
    /// A number of bytes.
    Size,
    /// One of these words.
    Choice(&'static [&'static str]),
    /// The method's name, and what that needs beside in other settings of `encrypt.`.
    Encryption,
}

const fn qmp(key: &'static str, setting: &'static str, kind: QmpKind) -> QmpOption {
    QmpOption { key, setting, kind }
}

/// For formats whose images are one file.
fn no_extents(_: &CreateSettings, _: &str) -> Result<Vec<String>> {
    Ok(Vec::new())
}

/// That a setting has a value that it cannot have.
fn not_accepted(name: &str, value: &str) -> Error {
    let message = format!("Parameter '{name}' does not accept value '{value}'");
    Error::new(ErrorKind::InvalidArgument, "create", message)
}

impl std::fmt::Debug for Creation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Creation")
    }
}

impl std::fmt::Debug for ForeignFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ForeignFormat({})", self.name)
    }
}

impl PartialEq for ForeignFormat {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for ForeignFormat {}

/// All formats, sorted by name.
static FORMATS: &[ForeignFormat] = &[
    only_read::BOCHS,
    only_read::CLOOP,
    only_read::DMG,
    parallels::FORMAT,
    qcow::FORMAT,
    qed::FORMAT,
    vdi::FORMAT,
    vhdx::FORMAT,
    vmdk::FORMAT,
    vpc::FORMAT,
];

/// The format of a name.
pub fn find(name: &str) -> Option<&'static ForeignFormat> {
    FORMATS.iter().find(|format| format.name == name)
}

/// Options of a format's nodes, beside its file and its backing file.
pub(crate) fn node_options(name: &str) -> &'static [&'static str] {
    find(name).map_or(&[], |format| format.options)
}

/// Whether images of a format of this name, of some kind at least, take compressed writes.
pub fn compresses(name: &str) -> bool {
    find(name).is_some_and(|format| format.compresses)
}

/// What an image of one of these formats says of itself; `None` for any other device.
pub fn facts(device: &dyn BlockDevice) -> Option<Arc<Facts>> {
    ForeignImage::of(device).map(ForeignImage::facts)
}

/// Whether images of a format tell how large their clusters are, and whether they are dirty: QEMU's do not in
/// some formats.
pub fn tells_clusters(name: &str) -> bool {
    !matches!(name, "bochs" | "cloop" | "dmg" | "parallels")
}

/// Whether an image says that it is dirty, where images of its format, which is told by its name, say
/// that. QEMU's driver of `qed` has repaired the image by then, and never tells it.
pub fn told_dirty(name: &str, facts: &Facts) -> Option<bool> {
    tells_clusters(name).then_some(facts.is_dirty && name != "qed")
}

/// Whether images of a format may stand on others, by its name.
pub fn has_backing(name: &str) -> bool {
    find(name).is_some_and(|format| format.has_backing)
}

/// Has an image of these formats name another backing file, or none.
///
/// # Errors
/// [`ErrorKind::Unsupported`] if the device is none, or the format does not do that; else as
/// [`ForeignImage::set_backing_file`].
pub async fn set_backing_file(
    device: &dyn BlockDevice,
    backing: Option<vellum::qcow2::BackingName>,
) -> Result<()> {
    let Some(image) = ForeignImage::of(device) else {
        let message = "Operation not supported";
        return Err(Error::new(ErrorKind::Unsupported, "rebase", message));
    };
    let backing = backing.map(|backing| BackingName {
        name: backing.name,
        format: backing.format,
    });
    image.set_backing_file(backing).await
}

/// As [`ForeignImage::keep_identity`], of a device that may be any.
pub fn keep_identity(device: &dyn BlockDevice) {
    let target = target_of(device);
    if let Some(image) = ForeignImage::of(target.as_deref().unwrap_or(device)) {
        image.keep_identity();
    }
}

/// As [`ForeignImage::change_identity`], of a device that may be any.
///
/// # Errors
/// As there.
pub async fn change_identity(device: &dyn BlockDevice) -> Result<()> {
    let target = target_of(device);
    match ForeignImage::of(target.as_deref().unwrap_or(device)) {
        Some(image) => image.change_identity().await,
        None => Ok(()),
    }
}

/// The dirty bitmaps that an image of these formats holds. They record nothing.
pub fn stored_bitmaps(device: &dyn BlockDevice) -> Vec<Arc<MemoryBitmap>> {
    let facts = facts(device).unwrap_or_default();
    let kept = facts.bitmaps.iter().map(|bitmap| {
        let (size_bytes, granularity_bytes) = (device.size_bytes(), bitmap.granularity_bytes);
        let kept = MemoryBitmap::new(&bitmap.name, size_bytes, granularity_bytes, false);
        kept.set(&bitmap.dirty);
        kept
    });
    kept.collect()
}

/// Checks an image in a file; `None` if its format has nothing to be checked, or cannot mend anything
/// where that is asked for. Other files that it names are opened as far as `policy` allows.
///
/// # Errors
/// As opening the image, [`ErrorKind::Denied`] for a file that `policy` does not allow, and what the storage says.
pub async fn check(
    format: &str,
    file: &Arc<dyn Storage>,
    fix: Fix,
    policy: &FilePolicy,
) -> Result<Option<CheckReport>> {
    let Some(format) = find(format).filter(|format| format.repairs || fix == Fix::default()) else {
        return Ok(None);
    };
    match format.check {
        Some(check) => check(file, fix, policy).await.map(Some),
        None => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sorted() {
        assert!(FORMATS.is_sorted_by(|a, b| a.name < b.name));
        assert!(find("vdi").is_some() && find("qcow2").is_none());
    }
}

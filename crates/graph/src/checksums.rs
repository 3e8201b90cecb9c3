//! The checksums of a qcow2 image, as users ask for them: `checksums`, an option of our own.

use vellum::qcow2::checksums::{ChecksumOptions, are_checksums_of};
use vellum::qcow2::read_header;
use vellum::{Error, Result, Storage};
use vellum_options::{OpenFlags, Options};

use std::fs;
use std::io::Read;
use std::path::PathBuf;
use std::sync::Arc;

use vellum_format::checksums::{PAGE_BYTES, Superblock};
use vellum_storage::file::{FileOptions, FileStorage, Locks};

use crate::write_log::{OpenedFile, Place, open_or_make};

/// What the name of an image is made longer by for that of the file with its checksums.
const SUFFIX: &str = ".vsums";
/// So many files with checksums may lie beside files of one name.
const MOST_BESIDE: u32 = 9;

/// What the user says of checksums.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wanted {
    /// Nothing: as the image says.
    AsTheImage,
    GiveUp,
    Keep(Place),
}

/// Takes the option out of those of a node.
pub(crate) fn take(options: &mut Options) -> Result<Wanted> {
    let Some(value) = options.take("checksums") else {
        return Ok(Wanted::AsTheImage);
    };
    let place = Place::parse("checksums", value)?;
    Ok(place.map_or(Wanted::GiveUp, Wanted::Keep))
}

impl Wanted {
    /// What an image is opened with; `has_some`: it has checksums already.
    pub(crate) async fn open(
        self,
        image: &Arc<dyn Storage>,
        has_some: bool,
        flags: &OpenFlags,
    ) -> Result<(Option<ChecksumOptions>, Option<OpenedFile>)> {
        let place = match self {
            // Another program may be writing: its sums are in its memory.
            _ if flags.force_share && !flags.writable => {
                return Ok((Some(ChecksumOptions::GiveUp), None));
            }
            Wanted::AsTheImage => return Ok((None, None)),
            Wanted::GiveUp => return Ok((Some(ChecksumOptions::GiveUp), None)),
            // Those are where the image says.
            Wanted::Keep(Place::Beside) if has_some => return Ok((None, None)),
            Wanted::Keep(_) if !flags.writable && !has_some => return Ok((None, None)),
            Wanted::Keep(place) => place,
        };
        let path = match place {
            Place::Beside => free_beside(image).await?,
            Place::Path(_) => place.path(image, "checksums", SUFFIX)?,
        };
        let opened = open_or_make(image, &path, flags).await;
        let (storage, name, opened) = opened.map_err(|error: Error| {
            error.context("open", format!("Could not open the checksums '{path}'"))
        })?;
        let opened = opened.only_while_empty();
        Ok((Some(ChecksumOptions::Keep { storage, name }), Some(opened)))
    }
}

/// The names that checksums beside a file may have. The second and later ones are for an image whose first name is
/// taken: by the checksums of an image that it has replaced (QEMU's `create` and `convert` leave them), or of one that
/// was renamed and still needs them.
fn names_beside(first: &str) -> impl Iterator<Item = String> {
    let image = first.strip_suffix(SUFFIX).unwrap_or(first);
    let others = (2..=MOST_BESIDE).map(move |number| format!("{image}.{number}{SUFFIX}"));
    std::iter::once(first.to_owned()).chain(others)
}

/// Where the checksums of an image that has none are to lie beside it: the first name under which those of another
/// image do not lie.
async fn free_beside(image: &Arc<dyn Storage>) -> Result<String> {
    let first = Place::Beside.path(image, "checksums", SUFFIX)?;
    for path in names_beside(&first) {
        if !holds_checksums(&path) || are_own(image, &path).await {
            return Ok(path);
        }
    }
    // It is refused, with the reason.
    Ok(first)
}

/// Whether a file holds the checksums of some image.
fn holds_checksums(path: &str) -> bool {
    let mut page = Vec::new();
    let read = fs::File::open(path).and_then(|file| file.take(PAGE_BYTES).read_to_end(&mut page));
    // Of a version that is not known: somebody's all the same.
    read.is_ok() && !matches!(Superblock::decode(&page), Ok(None))
}

/// Whether a file holds the checksums of an image.
async fn are_own(image: &Arc<dyn Storage>, path: &str) -> bool {
    let (Ok(header), Ok(sums)) = (read_header(image).await, open_to_look(path)) else {
        return false;
    };
    are_checksums_of(&sums, &header).await.unwrap_or(false)
}

/// Opens a file without locks, to look at it.
fn open_to_look(path: &str) -> Result<Arc<dyn Storage>> {
    let options = FileOptions::default()
        .read_only(true)
        .locks(Locks::Unlocked);
    Ok(FileStorage::open(path, &options)?)
}

/// The checksums beside a local file that is an image, if they are its own: an image that is made under that name
/// does not need them any more, and could not have any there.
pub async fn own_beside(path: &str) -> Option<PathBuf> {
    if !fs::metadata(path).is_ok_and(|found| found.is_file()) {
        return None;
    }
    // The caller has locked the image by the time that it removes them.
    let image = open_to_look(path).ok()?;
    let first = format!("{}{SUFFIX}", fs::canonicalize(path).ok()?.to_str()?);
    for sums in names_beside(&first) {
        // By no link: what that leads to may be anywhere.
        let is_file = fs::symlink_metadata(&sums).is_ok_and(|found| found.is_file());
        if is_file && are_own(&image, &sums).await {
            return Some(sums.into());
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn sums_that_an_image_may_need_stay() {
        vellum_io::lane::block_on(async {
            let folder = tempfile::tempdir().unwrap();
            let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
            fs::write(path("disk"), b"").unwrap();
            let options = FileOptions::default().locks(Locks::Unlocked);
            let image: Arc<dyn Storage> = FileStorage::open(path("disk"), &options).unwrap();
            let flags = OpenFlags {
                writable: true,
                ..OpenFlags::default()
            };
            for (content, stays) in [("", false), ("sums", true)] {
                let wanted = Wanted::Keep(Place::Beside);
                let (_, opened) = wanted.open(&image, false, &flags).await.unwrap();
                fs::write(path("disk.vsums"), content).unwrap();
                drop(opened);
                assert_eq!(Path::new(&path("disk.vsums")).exists(), stays);
            }
        });
    }

    #[test]
    fn options_say_where_the_checksums_lie() {
        let taken = |text: &str| take(&mut Options::parse(text).unwrap());
        assert_eq!(taken("").unwrap(), Wanted::AsTheImage);
        assert_eq!(taken("checksums=off").unwrap(), Wanted::GiveUp);
        assert_eq!(taken("checksums=on").unwrap(), Wanted::Keep(Place::Beside));
        let path = Place::Path("a".to_owned());
        assert_eq!(taken("checksums=a").unwrap(), Wanted::Keep(path));
        let message = "Parameter 'checksums' expects 'on', 'off' or a path";
        assert_eq!(taken("checksums=").unwrap_err().message(), message);
    }
}

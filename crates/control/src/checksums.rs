//! The checksums of a qcow2 image, as users ask for them: `checksums`, an option of our own.

use vellum::qcow2::checksums::{ChecksumOptions, are_checksums_of};
use vellum::qcow2::read_header;
use vellum::{Error, Result, Storage};

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use vellum_storage::file::{FileOptions, FileStorage, Locks};

use crate::flags::OpenFlags;
use crate::options::Options;
use crate::write_log::{OpenedFile, Place, open_or_make};

/// What the name of an image is made longer by for that of the file with its checksums.
const SUFFIX: &str = ".vsums";

/// What the user says of checksums.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Wanted {
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
        let path = place.path(image, "checksums", SUFFIX)?;
        let opened = open_or_make(image, &path, flags).await;
        let (storage, name, opened) = opened.map_err(|error: Error| {
            error.context("open", format!("Could not open the checksums '{path}'"))
        })?;
        let opened = opened.only_while_empty();
        Ok((Some(ChecksumOptions::Keep { storage, name }), Some(opened)))
    }
}

/// The checksums beside a local file that is an image, if they are its own: who makes another image
/// of that name does not need them any more, and that one could not have any there.
pub(crate) async fn own_beside(path: &str) -> Option<PathBuf> {
    let sums = PathBuf::from(format!(
        "{}{SUFFIX}",
        fs::canonicalize(path).ok()?.to_str()?
    ));
    // By no link: what that leads to may be anywhere.
    let is_file = |path: &Path| fs::symlink_metadata(path).is_ok_and(|found| found.is_file());
    if !is_file(&sums) || !fs::metadata(path).is_ok_and(|found| found.is_file()) {
        return None;
    }
    let open = |path: &str| -> Option<Arc<dyn Storage>> {
        // Only looked at: who removes them has locked the image by then.
        let options = FileOptions::default()
            .read_only(true)
            .locks(Locks::Unlocked);
        Some(FileStorage::open(path, &options).ok()?)
    };
    let header = read_header(&open(path)?).await.ok()?;
    let opened = open(sums.to_str()?)?;
    let are_own = are_checksums_of(&opened, &header).await;
    are_own.is_ok_and(|are_own| are_own).then_some(sums)
}

#[cfg(test)]
mod tests {
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

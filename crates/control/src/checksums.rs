//! The checksums of a qcow2 image, as users ask for them: `checksums`, an option of our own.

use vellum::qcow2::checksums::ChecksumOptions;
use vellum::{Error, Result, Storage};

use std::sync::Arc;

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
        Ok((Some(ChecksumOptions::Keep { storage, name }), Some(opened)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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

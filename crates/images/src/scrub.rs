//! Compares an image's file with its checksums, for `vellum scrub` and for the daemon's job.

use vellum::qcow2::Qcow2;
use vellum::qcow2::checksums::ScrubReport;
use vellum::{Error, Result};
use vellum_jobs::job::JobControl;
use vellum_jobs::live::{CopyOutcome, in_steps};

/// Which damaged bytes are written anew, of those that the backing file has too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Repairs {
    /// None.
    None,
    /// Those that the disk has changed: none if another program may have written to the file.
    Damage,
    /// Also what another program may have written.
    All,
}

/// Scrubs an image, which may be in use, at the speed that `control` says: of the bytes that are
/// read, holes cost nothing. `progress` is told how many bytes of the file are done, and of how many.
///
/// `None`: it was cancelled. What has a checksum now keeps it.
///
/// # Errors
/// If the image has no checksums, or its file or theirs cannot be read or written.
pub async fn scrub(
    image: &Qcow2,
    repairs: Repairs,
    control: &JobControl,
    mut progress: impl FnMut(u64, u64),
) -> Result<Option<ScrubReport>> {
    let mut scrub = image.scrub()?;
    if repairs == Repairs::All {
        scrub.assume_unmodified();
    }
    progress(0, scrub.total_bytes()?);
    let step = async || {
        let before_bytes = scrub.read_bytes();
        if !scrub.step().await? {
            return Ok::<_, Error>(None);
        }
        let total_bytes = scrub.total_bytes()?;
        progress(scrub.done_bytes().min(total_bytes), total_bytes);
        Ok(Some(scrub.read_bytes() - before_bytes))
    };
    match in_steps(control, step).await? {
        CopyOutcome::GivenUp => Ok(None),
        CopyOutcome::All => scrub.finish(repairs != Repairs::None).await.map(Some),
    }
}

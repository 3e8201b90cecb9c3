//! Makes the file of an image as short as what is allocated in it, for `vellum compact` and for the
//! daemon's job.

use vellum::Result;
use vellum::qcow2::Qcow2;
use vellum::qcow2::compact::CompactionProgress;
use vellum_jobs::job::JobControl;
use vellum_jobs::live::{CopyOutcome, in_steps};

/// Compacts an image, which may be in use, at the speed that `control` says, of the bytes that are
/// moved. `progress` is told how many bytes of the disk were looked at, and how many there are, in all
/// passes.
///
/// Cancelled, it cuts off what is free at the end of the file by then.
///
/// # Errors
/// If the image may not be changed, its file cannot become shorter, or that cannot be read or written.
pub async fn compact(
    image: &Qcow2,
    control: &JobControl,
    mut progress: impl FnMut(u64, u64),
) -> Result<(CopyOutcome, CompactionProgress)> {
    let mut compaction = image.compact().await?;
    let step = async || {
        let moved_bytes = compaction.step().await?;
        let now = compaction.progress();
        progress(now.done_bytes, now.total_bytes);
        Ok::<_, vellum::Error>(moved_bytes)
    };
    let outcome = in_steps(control, step).await?;
    Ok((outcome, compaction.end().await?))
}

//! Makes the file of an image as short as what is allocated in it, for `vellum compact` and for the
//! daemon's job.

use vellum::Result;
use vellum::qcow2::Qcow2;
use vellum::qcow2::compact::CompactionProgress;
use vellum_jobs::job::JobControl;
use vellum_jobs::live::{CopyOutcome, in_steps};

/// A file that leaked clusters keep longer than this part of it is not as short as was promised.
const LEAKS_TOLD_FROM: u64 = 20;

/// What a compaction came to.
#[derive(Debug)]
pub struct Compacted {
    /// Whether it was done to its end.
    pub outcome: CopyOutcome,
    /// What was done.
    pub progress: CompactionProgress,
    /// What keeps the file long, and is not in use, as far as that is known.
    pub leaked_bytes: u64,
}

impl Compacted {
    /// What whoever wants a short file has to do, if leaked clusters keep it long.
    pub fn leaks_text(&self, cluster_bytes: u64) -> Option<String> {
        let Compacted {
            progress,
            leaked_bytes,
            ..
        } = self;
        (leaked_bytes.saturating_mul(LEAKS_TOLD_FROM) > progress.file_bytes).then(|| {
            format!(
                "{} leaked clusters ({leaked_bytes} of {} bytes) keep the file long. While nobody \
                 uses the image, 'vellum check -r leaks' gives them back; then compact it again",
                leaked_bytes / cluster_bytes.max(1),
                progress.file_bytes,
            )
        })
    }
}

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
) -> Result<Compacted> {
    let mut compaction = image.compact().await?;
    let step = async || {
        let moved_bytes = compaction.step().await?;
        let now = compaction.progress();
        progress(now.done_bytes, now.total_bytes);
        Ok::<_, vellum::Error>(moved_bytes)
    };
    let outcome = in_steps(control, step).await?;
    let leaked_bytes = match outcome {
        // Where that cannot be told, the file is as short as it can be made.
        CopyOutcome::All => compaction.leaked_bytes().await.unwrap_or(0),
        CopyOutcome::GivenUp => 0,
    };
    Ok(Compacted {
        outcome,
        progress: compaction.end().await?,
        leaked_bytes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leaks_are_told_from_where_they_keep_a_file_long() {
        let of = |leaked_bytes| {
            let compacted = Compacted {
                outcome: CopyOutcome::All,
                progress: CompactionProgress {
                    file_bytes: 100 << 16,
                    ..CompactionProgress::default()
                },
                leaked_bytes,
            };
            compacted.leaks_text(1 << 16)
        };
        assert_eq!(of(5 << 16), None);
        let text = of(6 << 16).expect("a text");
        assert!(text.starts_with("6 leaked clusters (393216 of 6553600 bytes)"));
    }
}

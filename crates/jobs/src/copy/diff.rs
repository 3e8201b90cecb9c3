//! The difference of a piece: what an image shows of it now beside what it
//! is going to show.

use std::sync::Arc;

use vellum::{BlockDevice, Buffer, Error};

use super::{CopyError, Step};

/// A piece of the two devices that is to be compared.
#[derive(Debug, Clone)]
pub(super) struct DiffRequest {
    /// What is shown now; `None`: zeroes.
    pub(super) old: Option<Arc<dyn BlockDevice>>,
    /// What is going to be shown.
    pub(super) shown: Arc<dyn BlockDevice>,
    /// Where the piece begins in both devices, in bytes: at a multiple of the unit, or
    /// inside one of which it is a part.
    pub(super) at_bytes: u64,
    /// Where it begins in the target, in bytes: for errors.
    pub(super) offset_bytes: u64,
    pub(super) len_bytes: u64,
    /// The grain, in bytes.
    pub(super) unit_bytes: u64,
}

/// What differs. Where nothing differs, neither bytes nor runs.
#[derive(Debug)]
pub(super) struct Diff {
    /// What is shown now, if that is not all zeroes.
    pub(super) old: Option<Buffer>,
    pub(super) runs: Vec<DiffRun>,
}

/// A piece of a buffer, and whether it differs from another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DiffRun {
    pub(super) len_bytes: usize,
    pub(super) differs: bool,
}

impl DiffRequest {
    pub(super) async fn run(self) -> Result<Diff, CopyError> {
        let read = |device: &Arc<dyn BlockDevice>| {
            device.read(self.at_bytes, Buffer::for_read(self.len_bytes as usize))
        };
        let failed = |step| {
            let offset_bytes = self.offset_bytes;
            move |cause: Error| CopyError {
                step,
                offset_bytes,
                cause,
            }
        };
        let shown = read(&self.shown);
        let old = match self.old.as_ref().map(read) {
            Some(old) => Some(old.await.map_err(failed(Step::Read))?),
            None => None,
        };
        let shown = shown.await.map_err(failed(Step::ReadShown))?;
        if is_same(old.as_deref(), &shown) {
            let runs = Vec::new();
            return Ok(Diff { old: None, runs });
        }
        let runs = differences(old.as_deref(), &shown, self.unit_bytes);
        Ok(Diff { old, runs })
    }
}

/// Whether two buffers of one length hold the same; without a first one there are zeroes.
fn is_same(old: Option<&[u8]>, new: &[u8]) -> bool {
    match old {
        Some(old) => old == new,
        None => vellum_io::buffer::is_zero(new),
    }
}

/// Compares two buffers of one length, which begin at a multiple of `unit_bytes`.
/// Without a first one there are zeroes.
fn differences(old: Option<&[u8]>, new: &[u8], unit_bytes: u64) -> Vec<DiffRun> {
    let unit = usize::try_from(unit_bytes).unwrap_or(usize::MAX).max(1);
    let mut runs: Vec<DiffRun> = Vec::new();
    let mut at = 0;
    for shown in new.chunks(unit) {
        let end = at + shown.len();
        let differs = !is_same(old.map(|old| &old[at..end]), shown);
        at = end;
        match runs.last_mut() {
            Some(last) if last.differs == differs => last.len_bytes += shown.len(),
            _ => runs.push(DiffRun {
                len_bytes: shown.len(),
                differs,
            }),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_told_by_units() {
        let old = [1, 1, 1, 1, 2, 2, 2, 2, 3, 3];
        let new = [1, 1, 1, 1, 2, 2, 2, 0, 3, 0];
        let run = |len_bytes, differs| DiffRun { len_bytes, differs };
        assert_eq!(
            differences(Some(&old), &new, 4),
            [run(4, false), run(6, true)]
        );
        assert_eq!(
            differences(Some(&old), &new, 2),
            [run(6, false), run(4, true)]
        );
        assert_eq!(
            differences(None, &[0, 0, 1, 0], 2),
            [run(2, false), run(2, true)]
        );
    }
}

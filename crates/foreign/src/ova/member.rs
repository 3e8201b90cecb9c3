//! [`MemberStorage`]: a member of a package, as a storage of its own.

use std::sync::Arc;

use vellum::{Buffer, Buffers, Error, ErrorKind, Io, Result, Storage};
use vellum_io::buffer::total_len;
use vellum_io::shared_memory::{self, SharedBuffer};
use vellum_io::spawn;
use vellum_storage::{BlockStatus, SourceVersion, StorageExtent};

use super::manifest::{Sum, Summing};
use super::package::Member;
use crate::fields::read_at;

/// How much is read at once to be summed.
const PIECE_BYTES: u64 = 1 << 20;

/// A member of a package: a window of its file, to be read.
#[derive(Debug)]
pub struct MemberStorage {
    file: Arc<dyn Storage>,
    name: String,
    member: Member,
    /// What the manifest says of it, one for each function.
    sums: Vec<Sum>,
    /// Why the manifest does not tell whether this is whole.
    doubt: Option<String>,
}

impl MemberStorage {
    /// The window of `file` that is `member`, which lies inside.
    pub(super) fn new(
        file: Arc<dyn Storage>,
        member: Member,
        sums: Vec<Sum>,
        doubt: Option<String>,
    ) -> Arc<Self> {
        Arc::new(MemberStorage {
            doubt,
            name: format!("{}#{}", file.name(), member.name),
            file,
            member,
            sums,
        })
    }

    /// The member of a package that a storage is, if it is one.
    pub fn of(storage: &dyn Storage) -> Option<&MemberStorage> {
        storage.transparent_storage()?.downcast_ref()
    }

    /// Which member it is.
    pub fn member(&self) -> &Member {
        &self.member
    }

    /// Whether the manifest has a sum of it.
    pub fn has_sum(&self) -> bool {
        !self.sums.is_empty()
    }

    /// Reads all of it, and compares it with what the manifest says.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidImage`] where it is something else, or there is a manifest that does not tell; what the
    /// storage says.
    pub async fn verify(&self) -> Result<()> {
        if let Some(doubt) = &self.doubt {
            let error = Error::new(ErrorKind::InvalidImage, "verify", doubt.clone());
            return Err(error.target(&self.name));
        }
        self.compare().await
    }

    /// As [`MemberStorage::verify`], with the sums that could be read.
    pub(super) async fn compare(&self) -> Result<()> {
        let sums = self.sums.iter();
        let mut summings: Vec<Summing> = sums.map(|sum| Summing::new(sum.algorithm)).collect();
        let mut at = 0;
        while at < self.member.size_bytes && !summings.is_empty() {
            let len = PIECE_BYTES.min(self.member.size_bytes - at);
            let piece = read_at(&*self.file, self.member.offset_bytes + at, len as usize).await?;
            summings.iter_mut().for_each(|summing| summing.add(&piece));
            at += len;
        }
        for (sum, summing) in self.sums.iter().zip(summings) {
            if summing.value() != sum.value {
                let message = format!(
                    "the manifest has another {} sum of '{}'",
                    sum.algorithm.name(),
                    self.member.name
                );
                let error = Error::new(ErrorKind::InvalidImage, "verify", message);
                return Err(error.target(&self.name));
            }
        }
        Ok(())
    }

    /// Where a range lies in the file; `None` if it is not wholly inside.
    fn place(&self, offset_bytes: u64, len_bytes: u64) -> Option<u64> {
        let end = offset_bytes.checked_add(len_bytes)?;
        (end <= self.member.size_bytes).then(|| self.member.offset_bytes + offset_bytes)
    }

    fn refuse<T>(&self, operation: &'static str) -> Io<T> {
        let message = "a member of a package is read-only: make an overlay on it ('create -b'), or \
                       convert it";
        let error = Error::new(ErrorKind::ReadOnly, operation, message);
        Io::ready(Err(error.target(&self.name)))
    }
}

/// Reads what may end behind the member, which reads as zeroes there.
async fn read_to_end(
    file: Arc<dyn Storage>,
    member: Member,
    mut at: u64,
    buffers: Buffers,
) -> Result<Buffers> {
    let mut filled = Buffers::new();
    for mut buffer in buffers {
        let inside = member
            .size_bytes
            .saturating_sub(at)
            .min(buffer.len() as u64);
        buffer.fill(0);
        if inside > 0 {
            let part = read_at(&*file, member.offset_bytes + at, inside as usize).await?;
            fill(&mut buffer, &part);
        }
        at = at.saturating_add(buffer.len() as u64);
        filled.push(buffer);
    }
    Ok(filled)
}

fn fill(buffer: &mut Buffer, part: &[u8]) {
    for (to, from) in buffer.iter_mut().zip(part) {
        *to = *from;
    }
}

impl Storage for MemberStorage {
    vellum_storage::read_only!();

    fn name(&self) -> &str {
        &self.name
    }

    fn version(&self) -> SourceVersion {
        let file = self.file.version().known();
        file.map(|file| format!("{file}#{}", self.member.offset_bytes))
            .into()
    }

    fn len_bytes(&self) -> Result<u64> {
        Ok(self.member.size_bytes)
    }

    fn read(&self, offset_bytes: u64, buffers: Buffers) -> Io<Buffers> {
        match self.place(offset_bytes, total_len(&buffers)) {
            Some(place_bytes) => self.file.read(place_bytes, buffers),
            None => {
                let (file, member) = (self.file.clone(), self.member.clone());
                Io::task(spawn(read_to_end(file, member, offset_bytes, buffers)))
            }
        }
    }

    fn read_into(&self, offset_bytes: u64, into: &[SharedBuffer]) -> Option<Io<()>> {
        let place_bytes = self.place(offset_bytes, shared_memory::total_len(into) as u64)?;
        self.file.read_into(place_bytes, into)
    }

    fn block_status(&self, offset_bytes: u64, len_bytes: u64) -> Io<StorageExtent> {
        let inside = self.member.size_bytes.saturating_sub(offset_bytes);
        match len_bytes.min(inside) {
            0 => Io::ready(Ok(StorageExtent {
                status: BlockStatus::Hole,
                len_bytes,
            })),
            asked => self
                .file
                .block_status(self.member.offset_bytes + offset_bytes, asked),
        }
    }

    fn allocated_bytes(&self) -> Result<Option<u64>> {
        Ok(Some(self.member.size_bytes))
    }

    fn close(&self) -> Io<()> {
        self.file.close()
    }

    fn transparent_storage(&self) -> Option<&dyn std::any::Any> {
        Some(self)
    }
}

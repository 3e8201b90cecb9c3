//! Compressed grains of an opened extent: read, put behind all others, and the end of the stream.
//!
//! Called by the layout. Streams are only continued: a grain that has a place keeps it.

use vellum::{Error, ErrorKind, Result, Storage};
use vellum_io::lane::compute;

use super::header::SECTOR_BYTES;
use super::marker::{END_OF_STREAM, GRAIN_MARKER_BYTES, GrainMarker, pack_grain, unpack};
use super::sesparse::Grain;
use super::sparse::Sparse;
use crate::fields::{read_at, write_at};

impl Sparse {
    /// The content of the grain that begins at a sector of the file. At most a whole grain.
    pub(super) async fn read_compressed(&self, file: &dyn Storage, sector: u64) -> Result<Vec<u8>> {
        let fail = |message| Error::new(ErrorKind::Corrupt, "read", message);
        let grain_bytes = usize::try_from(self.geometry.grain_bytes()).unwrap_or(0);
        let at_bytes = sector.saturating_mul(SECTOR_BYTES);
        // A stream is a bit longer than its content at worst: most are here as a whole.
        let mut bytes = read_at(file, at_bytes, grain_bytes + SECTOR_BYTES as usize).await?;
        let mut stream = 0..grain_bytes;
        if self.markers {
            let marker = GrainMarker::parse(&bytes);
            let stream_bytes = marker.stream_bytes as usize;
            if stream_bytes == 0 || stream_bytes > grain_bytes * 2 {
                return Err(fail("a compressed grain has an invalid length"));
            }
            stream = GRAIN_MARKER_BYTES..GRAIN_MARKER_BYTES + stream_bytes;
            if stream.end > bytes.len() {
                bytes = read_at(file, at_bytes, stream.end).await?;
            }
        }
        let (content, _bytes) = compute(move || {
            let content = unpack(bytes.get(stream).unwrap_or_default(), grain_bytes);
            // The buffer goes back to the lane, which keeps it for the next read.
            (content, bytes)
        })
        .await;
        content
    }

    /// Compresses the content of a grain, and puts it behind all those that came before it. Gives
    /// the entry that leads there.
    pub(super) async fn append_compressed(
        &self,
        file: &dyn Storage,
        guest_bytes: u64,
        content: &[u8],
    ) -> Result<u32> {
        if !self.markers {
            // As QEMU.
            let message = "Invalid argument";
            return Err(Error::new(ErrorKind::InvalidArgument, "write", message));
        }
        let turn = self.turns.take();
        let mut content = content.to_vec();
        // Where the disk ends in the last grain: VMware reads whole ones.
        let grain_bytes = usize::try_from(self.geometry.grain_bytes()).unwrap_or(0);
        content.resize(grain_bytes, 0);
        let packed = compute(move || pack_grain(guest_bytes / SECTOR_BYTES, &content)).await?;
        turn.wait().await;
        let sector = self.take_sectors(packed.len() as u64 / SECTOR_BYTES, 1)?;
        drop(turn);
        write_at(file, sector * SECTOR_BYTES, &packed).await?;
        u32::try_from(sector).map_err(|_| {
            let message = "the extent has no room for more grains";
            Error::new(ErrorKind::NoSpace, "write", message)
        })
    }

    /// Finds where a stream that is to be continued ends: what is at the end of the file may be the marker of
    /// its end, which nothing that follows is found behind.
    pub(super) async fn find_end(&self, file: &dyn Storage) -> Result<()> {
        let end_sector = self.end_sector();
        if !self.compressed || !self.markers || end_sector == 0 {
            return Ok(());
        }
        let tail = read_at(file, (end_sector - 1) * SECTOR_BYTES, END_OF_STREAM.len()).await?;
        if tail[..] != END_OF_STREAM[..] {
            return Ok(());
        }
        let Some(last) = self.last_grain(file).await? else {
            return Ok(());
        };
        let marker = read_at(file, last.saturating_mul(SECTOR_BYTES), GRAIN_MARKER_BYTES).await?;
        let stream_bytes = u64::from(GrainMarker::parse(&marker).stream_bytes);
        let sectors = (stream_bytes + GRAIN_MARKER_BYTES as u64).div_ceil(SECTOR_BYTES);
        // Anything else at the end stays there.
        if last.checked_add(sectors) == Some(end_sector - 1) {
            self.continue_at(end_sector - 1);
        }
        Ok(())
    }

    /// The sector of the grain that lies behind all others.
    async fn last_grain(&self, file: &dyn Storage) -> Result<Option<u64>> {
        let mut last = None;
        for at_bytes in self.all_tables() {
            let table = read_at(file, at_bytes, self.geometry.table_bytes()).await?;
            for index in 0..self.geometry.table_entries as usize {
                if let Some(Grain::Sector(sector)) = self.grain(&table, index) {
                    last = last.max(Some(sector));
                }
            }
        }
        Ok(last)
    }

    /// Writes the marker of the stream's end. What comes later is put over it.
    pub(super) async fn end_stream(&self, file: &dyn Storage) -> Result<()> {
        let at_bytes = self.end_sector().saturating_mul(SECTOR_BYTES);
        write_at(file, at_bytes, &END_OF_STREAM).await
    }
}

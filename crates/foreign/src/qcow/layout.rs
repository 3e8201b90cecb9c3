//! [`QcowLayout`]: where the clusters of a qcow image lie.

use std::sync::Arc;

use vellum::luks::GuestEncryption;
use vellum::{Error, ErrorKind, Result, Storage};
use vellum_io::lane::compute;

use super::Header;
use crate::facts::Facts;
use crate::fields::{read_at, write_at};
use crate::inflate::{Wrapper, deflate, inflate};
use crate::paged::{Patches, Table, Width};
use crate::two_level::{Shape, TwoLevel};
use crate::{Layout, NewBlock, Run};

/// Compressed clusters are made with a window of 4 KiB, which is all that readers have.
const WINDOW_BITS: u8 = 12;

/// Where the clusters of an image lie.
#[derive(Debug)]
pub struct QcowLayout {
    files: [Arc<dyn Storage>; 1],
    header: Header,
    facts: Facts,
    encryption: GuestEncryption,
    tables: TwoLevel,
}

/// Entries that a flush writes.
#[derive(Debug)]
pub struct QcowChanges(Patches);

impl QcowLayout {
    pub(super) fn new(
        file: Arc<dyn Storage>,
        header: Header,
        facts: Facts,
        encryption: GuestEncryption,
        end_bytes: u64,
    ) -> QcowLayout {
        let shape = Shape {
            width: Width::Be64,
            l1: Table {
                start_bytes: header.l1_offset_bytes,
                len: header.l1_len(),
            },
            leaf_len: 1 << header.l2_bits,
            cluster_bytes: header.cluster_bytes(),
            leaves_from_bytes: None,
        };
        QcowLayout {
            tables: TwoLevel::new(file.clone(), shape, end_bytes),
            files: [file],
            header,
            facts,
            encryption,
        }
    }
}

impl Layout for QcowLayout {
    type Changes = QcowChanges;

    fn format(&self) -> &'static str {
        "qcow"
    }

    fn files(&self) -> &[Arc<dyn Storage>] {
        &self.files
    }

    fn facts(&self) -> Facts {
        self.facts.clone()
    }

    fn encryption(&self) -> &GuestEncryption {
        &self.encryption
    }

    fn size_bytes(&self) -> u64 {
        self.header.size_bytes
    }

    fn block_bytes(&self) -> u64 {
        self.header.cluster_bytes()
    }

    fn lookup(&self, offset_bytes: u64, len_bytes: u64) -> Result<Option<Run>> {
        let place = |entry| self.header.place(entry);
        self.tables.lookup(offset_bytes, len_bytes, place)
    }

    async fn load(&self, offset_bytes: u64) -> Result<()> {
        self.tables.load(offset_bytes).await
    }

    async fn inflate(&self, offset_bytes: u64) -> Result<Vec<u8>> {
        let [file] = &self.files;
        let entry = self.tables.entry(offset_bytes).await?;
        let failed = || {
            Error::new(ErrorKind::Corrupt, "read", "a cluster does not decompress")
                .target(file.name())
                .at(offset_bytes)
        };
        let (at, len) = self.header.compressed(entry).ok_or_else(failed)?;
        let compressed = read_at(&**file, at, len).await?;
        let cluster_bytes = self.header.cluster_bytes() as usize;
        let cluster = compute(move || inflate(&compressed, cluster_bytes, Wrapper::None)).await;
        cluster.ok_or_else(failed)
    }

    async fn allocate(&self, offset_bytes: u64) -> Result<NewBlock> {
        let place = self.tables.allocate(offset_bytes).await?;
        Ok(NewBlock {
            file: 0,
            offset_bytes: place.start_bytes,
            // A new one lies behind all that the file ever had. Zeroes that are decrypted are none.
            reads_as_zeroes: place.is_new
                && self.files[0].capabilities().has_zero_init
                && !self.encryption.is_some(),
        })
    }

    fn give_back(&self, offset_bytes: u64, block: NewBlock) {
        self.tables.give_back(offset_bytes, block.offset_bytes);
    }

    fn link(&self, offset_bytes: u64, block: NewBlock) -> Result<()> {
        self.tables.link(offset_bytes, block.offset_bytes)
    }

    async fn write_compressed(&self, offset_bytes: u64, content: &[u8]) -> Result<Option<bool>> {
        if self.encryption.is_some() {
            // They would be stored as they are, for everybody to read.
            let message = "encrypted images have no compressed clusters";
            let error = Error::new(ErrorKind::Unsupported, "write compressed", message);
            return Err(error.target(self.files[0].name()));
        }
        let mut content = content.to_vec();
        content.resize(self.header.cluster_bytes() as usize, 0);
        let Some(compressed) = deflate(&content, WINDOW_BITS) else {
            return Ok(Some(false));
        };
        let len = compressed.len();
        let host = self.tables.reserve(len as u64, 1)?;
        let Some(entry) = self.header.compressed_entry(host, len) else {
            return Ok(Some(false));
        };
        write_at(&*self.files[0], host, &compressed).await?;
        self.tables.set(offset_bytes, entry).await?;
        Ok(Some(true))
    }

    fn can_clear(&self) -> bool {
        true
    }

    async fn clear(&self) -> Result<()> {
        self.tables.clear().await
    }

    fn take_changes(&self) -> Option<QcowChanges> {
        self.tables.take().map(QcowChanges)
    }

    fn changed_bytes(&self) -> u64 {
        self.tables.changed_bytes()
    }

    async fn write_changes(&self, changes: &QcowChanges) -> Result<()> {
        self.tables.write(&changes.0).await
    }

    async fn end_changes(&self) -> Result<()> {
        self.tables.fill_up().await
    }
}

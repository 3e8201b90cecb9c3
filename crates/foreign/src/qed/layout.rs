//! [`QedLayout`]: where the clusters of a QED image lie.

use std::sync::Arc;

use parking_lot::Mutex;
use vellum::{Error, ErrorKind, Result, Storage};

use super::Header;
use super::header::ZERO;
use crate::facts::{BackingName, Facts};
use crate::fields::{barrier, write_at};
use crate::paged::{Patches, Table, Width};
use crate::two_level::{Shape, TwoLevel};
use crate::{Layout, NewBlock, Run};

/// Where the clusters of an image lie.
#[derive(Debug)]
pub struct QedLayout {
    files: [Arc<dyn Storage>; 1],
    /// As it is on disk.
    header: Mutex<Header>,
    /// What of the header does not change.
    shape: Header,
    facts: Mutex<Facts>,
    tables: TwoLevel,
    /// Behind it nothing was ever written.
    len_bytes: u64,
}

/// Entries that a flush writes.
#[derive(Debug)]
pub struct QedChanges(Patches);

impl QedLayout {
    /// An image in a file of a length.
    pub(super) fn new(
        file: Arc<dyn Storage>,
        header: Header,
        facts: Facts,
        len_bytes: u64,
    ) -> QedLayout {
        let shape = Shape {
            width: Width::Le64,
            l1: Table {
                start_bytes: header.l1_offset_bytes,
                len: header.table_len(),
            },
            leaf_len: header.table_len(),
            cluster_bytes: header.cluster_bytes.into(),
            leaves_from_bytes: Some(header.header_bytes()),
        };
        let end_bytes = header.end_bytes(len_bytes);
        QedLayout {
            tables: TwoLevel::new(file.clone(), shape, end_bytes),
            files: [file],
            header: Mutex::new(header),
            shape: header,
            facts: Mutex::new(facts),
            len_bytes,
        }
    }

    /// Writes a changed header, which counts once it is durable.
    async fn write_header(&self, change: impl FnOnce(&mut Header)) -> Result<()> {
        let [file] = &self.files;
        let mut header = *self.header.lock();
        change(&mut header);
        write_at(&**file, 0, &header.encode()).await?;
        barrier(&**file).await?;
        *self.header.lock() = header;
        Ok(())
    }
}

impl Layout for QedLayout {
    type Changes = QedChanges;

    fn format(&self) -> &'static str {
        "qed"
    }

    fn files(&self) -> &[Arc<dyn Storage>] {
        &self.files
    }

    fn facts(&self) -> Facts {
        self.facts.lock().clone()
    }

    fn size_bytes(&self) -> u64 {
        self.header.lock().size_bytes
    }

    fn block_bytes(&self) -> u64 {
        self.shape.cluster_bytes.into()
    }

    fn lookup(&self, offset_bytes: u64, len_bytes: u64) -> Result<Option<Run>> {
        // The end as it is when the entry is: both may grow at any time.
        let place = |entry| self.shape.place(entry, self.tables.end_bytes());
        self.tables.lookup(offset_bytes, len_bytes, place)
    }

    async fn load(&self, offset_bytes: u64) -> Result<()> {
        self.tables.load(offset_bytes).await
    }

    async fn begin_changes(&self) -> Result<()> {
        self.write_header(|header| header.set_needs_check(true))
            .await
    }

    async fn allocate(&self, offset_bytes: u64) -> Result<NewBlock> {
        let place = self.tables.allocate(offset_bytes).await?;
        let has_zero_init = self.files[0].capabilities().has_zero_init;
        Ok(NewBlock {
            file: 0,
            offset_bytes: place.start_bytes,
            reads_as_zeroes: has_zero_init && place.is_new && place.start_bytes >= self.len_bytes,
        })
    }

    fn give_back(&self, offset_bytes: u64, block: NewBlock) {
        self.tables.give_back(offset_bytes, block.offset_bytes);
    }

    fn link(&self, offset_bytes: u64, block: NewBlock) -> Result<()> {
        self.tables.link(offset_bytes, block.offset_bytes)
    }

    async fn zero(&self, offset_bytes: u64, _shows_backing: bool, _unmap: bool) -> Result<bool> {
        match self.tables.entry(offset_bytes).await? {
            0 => self.tables.set(offset_bytes, ZERO).await.map(|()| true),
            ZERO => Ok(true),
            // Its space would be lost: there is no way to give it back.
            _ => Ok(false),
        }
    }

    fn take_changes(&self) -> Option<QedChanges> {
        self.tables.take().map(QedChanges)
    }

    fn changed_bytes(&self) -> u64 {
        self.tables.changed_bytes()
    }

    async fn write_changes(&self, changes: &QedChanges) -> Result<()> {
        self.tables.write(&changes.0).await
    }

    async fn end_changes(&self) -> Result<()> {
        self.tables.fill_up().await?;
        // What a repair at the opening could not mend is still to be told.
        let needs_check = self.shape.needs_check();
        self.write_header(|header| header.set_needs_check(needs_check))
            .await
    }

    fn can_set_backing_file(&self) -> bool {
        true
    }

    async fn set_backing_file(&self, backing: Option<&BackingName>) -> Result<()> {
        let mut header = *self.header.lock();
        let name = backing.map_or("", |backing| &backing.name);
        let Some(at) = header.place_for_name(name.len()) else {
            let message = "No space left in the file header";
            return Err(Error::new(ErrorKind::NoSpace, "rebase", message));
        };
        // Beside the old name, which the header leads to until it is written.
        let [file] = &self.files;
        write_at(&**file, at.into(), name.as_bytes()).await?;
        barrier(&**file).await?;
        header.forget_backing();
        if let Some(backing) = backing {
            let is_raw = backing.format.as_deref() == Some("raw");
            header.set_backing(at, name, is_raw);
        }
        self.write_header(|old| *old = header).await?;
        // What only says how to probe is not told, as when the image is opened.
        self.facts.lock().backing = backing.map(|backing| BackingName {
            name: backing.name.clone(),
            format: backing.format.clone().filter(|format| format == "raw"),
        });
        Ok(())
    }

    fn can_resize(&self) -> bool {
        true
    }

    fn check_size(&self, size_bytes: u64) -> Result<()> {
        let refused = |kind, message| Err(Error::new(kind, "resize", message));
        if !self.shape.may_have_size(size_bytes) {
            return refused(ErrorKind::InvalidArgument, "Invalid image size specified");
        }
        if size_bytes < self.size_bytes() {
            let message = "Shrinking images is currently not supported";
            return refused(ErrorKind::Unsupported, message);
        }
        Ok(())
    }

    async fn resize(&self, size_bytes: u64) -> Result<()> {
        self.write_header(|header| header.size_bytes = size_bytes)
            .await
    }
}

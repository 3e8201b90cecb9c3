//! [`Extent`]: a part of the disk and the file that holds it, opened.

use std::sync::Arc;

use vellum::{Result, Storage};

use super::descriptor::ExtentType;
use super::sparse::Sparse;
use super::tables::{Key, Tables};
use crate::fields::read_at;
use crate::layout::{Place, Run};

/// A part of the disk.
#[derive(Debug)]
pub(super) struct Extent {
    /// Which of the layout's files.
    pub file: usize,
    /// Where it begins in the guest's view.
    pub start_bytes: u64,
    pub len_bytes: u64,
    /// What its line says; `None` of an image in one file.
    pub extent_type: Option<ExtentType>,
    pub kind: Kind,
}

#[derive(Debug)]
pub(super) enum Kind {
    /// As it is, from an offset on.
    Flat {
        offset_bytes: u64,
    },
    Sparse(Box<Sparse>),
}

impl Extent {
    /// The run at an offset of the disk that is inside the extent.
    pub(super) fn lookup(
        &self,
        tables: &Tables,
        number: u32,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> Result<Option<Run>> {
        let inside_bytes = offset_bytes - self.start_bytes;
        let len_bytes = len_bytes.min(self.len_bytes - inside_bytes);
        match &self.kind {
            Kind::Flat { offset_bytes } => Ok(Some(Run {
                len_bytes,
                place: Place::Data {
                    file: self.file,
                    offset_bytes: offset_bytes.saturating_add(inside_bytes),
                },
            })),
            Kind::Sparse(sparse) => {
                sparse.lookup(tables, number, self.file, inside_bytes, len_bytes)
            }
        }
    }

    /// Has the table in memory that tells of an offset of the disk.
    pub(super) async fn load(
        &self,
        files: &[Arc<dyn Storage>],
        tables: &Tables,
        number: u32,
        offset_bytes: u64,
    ) -> Result<()> {
        let (Kind::Sparse(sparse), Some(file)) = (&self.kind, files.get(self.file)) else {
            return Ok(());
        };
        let inside_bytes = offset_bytes - self.start_bytes;
        let (table, _) = sparse.indices(inside_bytes);
        let at_bytes = sparse.table_bytes(table, inside_bytes)?;
        let key = Key {
            extent: number,
            table,
        };
        let loading = tables.loading(key);
        let bytes = read_at(&**file, at_bytes, sparse.geometry.table_bytes()).await?;
        loading.done((&*bytes).into());
        Ok(())
    }

    pub(super) fn is_flat(&self) -> bool {
        matches!(self.kind, Kind::Flat { .. })
    }

    pub(super) fn sparse(&self) -> Option<&Sparse> {
        match &self.kind {
            Kind::Flat { .. } => None,
            Kind::Sparse(sparse) => Some(sparse),
        }
    }

    /// What users are told as the cluster size.
    pub(super) fn cluster_size_bytes(&self) -> Option<u64> {
        self.sparse().map(|sparse| sparse.geometry.grain_bytes())
    }

    pub(super) fn is_compressed(&self) -> bool {
        self.sparse().is_some_and(|sparse| sparse.compressed)
    }
}

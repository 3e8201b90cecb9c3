//! [`Opening`]: an image on its way, and what its format asks for.

use std::sync::Arc;

use vellum::gate::{FileRequest, Gate};
use vellum::{BlockDevice, Error, ErrorKind, Result, Storage};
use vellum_foreign::BackingName;
use vellum_options::Options;

use super::ForeignFormat;
use crate::backing::{self, Named, Override};
use crate::gate::{FileGate, FilePolicy};
use crate::graph::OpenContext;
use crate::open::refuse_unknown;

/// An image of a foreign format on its way.
pub struct Opening {
    /// The format that it is taken for.
    pub format: &'static ForeignFormat,
    /// The file that holds it.
    pub file: Arc<dyn Storage>,
    /// What is left of the node's options.
    pub options: Options,
    /// Writes to it are allowed.
    pub writable: bool,
    /// How it is opened, and where.
    pub around: OpenContext,
}

impl Opening {
    pub(crate) fn read_only(&self) -> bool {
        !self.writable
    }

    /// Refuses to open an image for writing whose format is only read.
    pub(crate) fn only_reads(&self) -> Result<()> {
        if self.read_only() {
            return Ok(());
        }
        let message = format!(
            "Block node is read-only: '{}' images are only read",
            self.format.name
        );
        Err(Error::new(ErrorKind::ReadOnly, "open", message).target(self.file.name()))
    }

    /// Which files the image may name.
    pub(crate) fn policy(&self) -> FilePolicy {
        self.around.policy.of_image(&*self.file)
    }

    /// Refuses options that nobody has taken.
    pub(crate) fn no_more_options(&self) -> Result<()> {
        refuse_unknown(&self.options, self.format.name)
    }

    /// The backing file: the one that options say, or else the one that the image names. Refuses options
    /// that are left over.
    pub(crate) async fn backing(
        &mut self,
        named: Option<BackingName>,
    ) -> Result<Option<Arc<dyn BlockDevice>>> {
        let flags = &self.around.flags;
        let given = match self.format.has_backing {
            true => backing::take(&mut self.options, flags, &self.around.place).await?,
            false => Override::None,
        };
        self.no_more_options()?;
        let flags = &self.around.flags;
        match given {
            Override::None => Ok(None),
            Override::Node(device) => Ok(Some(device)),
            _ if flags.no_backing || flags.metadata_only || flags.no_data || flags.for_check => {
                Ok(None)
            }
            Override::Options(options) => {
                let named = named.map_or_else(Named::default, |named| Named {
                    name: Some(named.name),
                    format: named.format,
                });
                let image = self.file.name();
                backing::open_described(options, image, named, &self.around)
                    .await
                    .map(Some)
            }
            Override::FromImage => {
                let Some(named) = named else {
                    return Ok(None);
                };
                let around = OpenContext {
                    policy: self.policy(),
                    ..self.around.clone()
                };
                let gate = FileGate { around };
                let request = FileRequest {
                    image: self.file.name().to_owned(),
                    name: named.name,
                    format: named.format,
                    writable: false,
                };
                gate.open_backing(request).await.map(Some)
            }
        }
    }
}

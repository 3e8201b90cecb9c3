//! An image of a foreign format on its way, and what its format asks for.

use std::sync::Arc;

use vellum::gate::{FileRequest, Gate};
use vellum::{BlockDevice, Error, ErrorKind, Result};
use vellum_foreign::BackingName;

use crate::drivers::foreign::format::Opening;
use crate::drivers::foreign::table::find;
use crate::node::backing_name::Named;
use crate::node::errors::refuse_unknown_of_format;
use crate::node::file_node::unknown_driver;
use crate::node::file_policy::FilePolicy;
use crate::open::backing::{self, Override};
use crate::open::context::{FormatOpening, OpenContext};
use crate::open::gate::FileGate;

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
        refuse_unknown_of_format(&self.options, self.format.name)
    }

    /// The backing file: the one that options say, or else the one that the image names. Refuses options
    /// that are left over.
    pub(crate) async fn backing(
        &mut self,
        named: Option<BackingName>,
    ) -> Result<Option<Arc<dyn BlockDevice>>> {
        let given = match self.format.has_backing {
            true => backing::take(&mut self.options, &self.around).await?,
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

/// Opens an image of one of these formats.
pub(crate) async fn open(opening: FormatOpening) -> Result<Arc<dyn BlockDevice>> {
    let name = opening.format;
    let format = find(name).ok_or_else(|| unknown_driver(name))?;
    let opening = Opening {
        format,
        file: opening.file,
        options: opening.options,
        writable: opening.common.writable,
        around: opening.around,
    };
    (format.open)(opening).await
}

//! What subcommands make of the common options, and the layers of a disk.

use std::sync::Arc;

use vellum::BlockDevice;
use vellum_options::ImageSpec;

use super::command::{Failure, image_spec, one_name};
use crate::spec::CommonArgs;

impl CommonArgs {
    /// The image called `name`, with the format and in the form that the options say.
    pub fn image(&self, name: &str) -> Result<ImageSpec, Failure> {
        image_spec(name, self.image_opts, self.format.as_deref())
    }

    /// The image of a subcommand that takes one file name and nothing else.
    pub fn one_image(&self) -> Result<ImageSpec, Failure> {
        self.image(one_name(&self.operands)?)
    }
}

/// Returns a disk's layers, from the image down its backing files.
pub fn layers(top: &Arc<dyn BlockDevice>) -> impl Iterator<Item = Arc<dyn BlockDevice>> + use<> {
    std::iter::successors(Some(top.clone()), |layer| layer.backing())
}

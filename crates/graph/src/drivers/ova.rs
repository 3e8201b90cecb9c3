//! `ova`: a member of a package of a virtual machine, to be read.

use vellum::{Error, ErrorKind, Result};
use vellum_options::Options;
use vellum_options::ova_name::DRIVER;

use crate::node::driver::{DriverFacts, NamingKind};
use crate::node::errors::refuse_unknown;
use crate::node::file_node::CommonOptions;
use crate::node::opened::{NodeKind, OpenedNode};
use crate::node::origin::Role;
use crate::open::context::OpenContext;
use crate::open::node::child;
use crate::ova::Package;

/// The driver.
pub(super) const FACTS: DriverFacts = DriverFacts {
    options: &[&["filename", "member"]],

    ..DriverFacts::named("ova").with_naming(NamingKind::Protocol, &[&["member"]], &["file"])
};

pub(super) async fn open(
    mut options: Options,
    common: CommonOptions,
    around: OpenContext,
) -> Result<OpenedNode> {
    if common.writable {
        let message = "a member of a package cannot be changed: make an overlay on it ('create -b') and \
                       write to that, or convert it";
        return Err(Error::new(ErrorKind::ReadOnly, "open", message));
    }
    let member = options.take_text("member")?;
    if let Some(filename) = options.take_text("filename")? {
        options.set_text("file.filename", filename);
    }
    let file = child(&mut options, "file", Role::Protocol, &around).await?;
    refuse_unknown(&options, DRIVER)?;
    let package = Package::open(file.storage()).await?;
    let storage = package.storage(member.as_deref())?;
    Ok(OpenedNode {
        driver: FACTS,
        kind: NodeKind::Storage(storage),
        // What lies below has other places.
        filtered: None,
        ..file
    })
}

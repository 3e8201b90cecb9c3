//! `file`, `host_device`, `host_cdrom`: files and devices of the host.

use vellum::Result;
use vellum_options::Options;

use crate::node::driver::DriverFacts;
use crate::node::errors::refuse_unknown;
use crate::node::file_node::{self, CommonOptions};
use crate::node::opened::{NodeKind, OpenedNode};
use crate::open::context::OpenContext;

/// The driver.
pub(super) const FACTS: DriverFacts = DriverFacts {
    options: &[&["filename", "aio", "locking"]],
    changeable: &["x-check-cache-dropped"],
    ..DriverFacts::named("file")
};

pub(super) async fn open(
    driver: &'static str,
    mut options: Options,
    common: CommonOptions,
    around: OpenContext,
) -> Result<OpenedNode> {
    if let Some(files) = around.nodes.files() {
        let name = options.take_text("filename")?.unwrap_or_default();
        refuse_unknown(&options, driver)?;
        return Ok(OpenedNode {
            driver: FACTS.called(driver),
            writable: common.writable,
            kind: NodeKind::Storage(files.open(&name, common.writable)?),
            filtered: None,
            files: Vec::new(),
        });
    }
    options.set_text("driver", driver);
    let unlocked = file_node::open_unlocked(options, &around.flags, &around.place.kept)?;
    Ok(OpenedNode {
        // A device node opened as `file` is told as what it is.
        driver: FACTS.called(match unlocked.file.is_device() {
            true => "host_device",
            false => "file",
        }),
        writable: unlocked.is_writable(),
        kind: NodeKind::Storage(unlocked.file.clone()),
        filtered: None,
        files: vec![unlocked],
    })
}

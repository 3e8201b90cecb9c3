//! `repository`: a disk in a repository, to be read.

use vellum::Result;
use vellum_options::Options;
use vellum_repository::{Repository, RepositoryStorage};

use crate::node::driver::DriverFacts;
use crate::node::file_node::CommonOptions;
use crate::node::opened::OpenedNode;
use crate::open::context::OpenContext;
use crate::repository;

use super::object;

/// The driver.
pub(super) const FACTS: DriverFacts = DriverFacts {
    options: &[&["path", "tag", "number", "push"], object::OPTIONS],

    ..DriverFacts::named("repository")
};

pub(super) async fn open(
    mut options: Options,
    common: CommonOptions,
    _around: OpenContext,
) -> Result<OpenedNode> {
    if common.writable {
        return Err(repository::refuse_writes());
    }
    let push = repository::take_push(&mut options)?;
    let disk = repository::take_disk(&mut options)?;
    let objects = repository::take_objects(&mut options)?;
    let opened = Repository::open(objects).await?;
    let storage = RepositoryStorage::open(&opened, &disk).await?;
    if push.is_some_and(|push| push != storage.manifest().push) {
        return Err(repository::another_disk(&disk));
    }
    Ok(OpenedNode::remote(FACTS, storage))
}

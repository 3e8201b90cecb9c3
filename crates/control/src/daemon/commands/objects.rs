//! Commands that make objects and drop them.

use std::rc::Rc;

use crate::qmp::{Arguments, Failure, Outcome};
use crate::secret;

use super::{Daemon, done, failed};

pub(super) async fn add(daemon: Rc<Daemon>, arguments: Arguments) -> Outcome {
    let mut parts = daemon.parts.lock().await;
    let options = arguments.into_options()?;
    parts.add_object(options).map_err(failed)?;
    done()
}

pub(super) async fn del(daemon: Rc<Daemon>, mut arguments: Arguments) -> Outcome {
    let id = arguments.need_text("id")?;
    arguments.finish()?;
    let mut parts = daemon.parts.lock().await;
    let threads = parts.iothreads.len();
    parts.iothreads.retain(|other| *other != id);
    if parts.iothreads.len() < threads || secret::remove(&id) {
        return done();
    }
    Err(Failure::new(format!("object '{id}' not found")))
}

//! How the daemon listens for clients of HTTP and serves them.

use std::rc::Rc;

use vellum_io::JoinHandle;
use vellum_options::Options;

use crate::daemon::Daemon;
use crate::failure::Failure;

use super::listen::{self, Bound};
#[cfg(feature = "http")]
use super::{desk, server, service};

impl Daemon {
    /// Listens for clients of HTTP, as `--metrics` does; [`Daemon::start_http`] serves them.
    ///
    /// # Errors
    /// If others could reach it who need not prove anything, or the system refuses it.
    pub async fn add_metrics(&self, options: Options) -> Result<(), Failure> {
        let environment = self.parts.lock().await.environment.clone();
        let bound = listen::bind(options, &environment)?;
        self.doors.borrow_mut().push(bound);
        Ok(())
    }

    /// Serves HTTP where that was asked for. What is returned ends some time after the daemon has.
    ///
    /// # Errors
    /// If there can be no thread for it.
    pub fn start_http(self: &Rc<Self>) -> Result<Option<JoinHandle<()>>, Failure> {
        let bound = self.doors.take();
        match bound.is_empty() {
            true => Ok(None),
            false => start(self, bound).map(Some),
        }
    }
}

#[cfg(feature = "http")]
fn start(daemon: &Rc<Daemon>, bound: Vec<Bound>) -> Result<JoinHandle<()>, Failure> {
    let (service, questions) = service::Service::new(daemon.nodes.clone());
    let stop = vellum_export::nbd::Stop::new();
    let gone = server::start(bound, service, stop.clone())?;
    let daemon = daemon.clone();
    Ok(vellum_io::spawn(async move {
        desk::attend(daemon, questions).await;
        stop.request();
        // The thread has ended if it cannot tell so.
        let _ = gone.await;
    }))
}

/// Nothing listens in such a build.
#[cfg(not(feature = "http"))]
fn start(_daemon: &Rc<Daemon>, _bound: Vec<Bound>) -> Result<JoinHandle<()>, Failure> {
    Err(crate::failure::message(
        "HTTP requires a build with the feature 'http'",
    ))
}

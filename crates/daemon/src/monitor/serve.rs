//! A monitor: a socket, or standard input and output, whose clients speak QMP.

use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::{Either, select};
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use serde_json::Value;
use vellum_export::nbd::Stop;
use vellum_io::{JoinHandle, lane, spawn};
use vellum_options::Options;

use crate::chardev::{Chardev, Port};
use crate::commands::package;
use crate::daemon::Daemon;
use crate::events::Listener;
use crate::failure::{Failure, failure, message, need, refuse_rest};
use crate::qmp;

use super::outbox::Outbox;
use super::session::Session;

/// How long a client may take to fetch the last answers.
const FAREWELL: Duration = Duration::from_secs(1);

/// How long the next client waits for what the one before has left: what takes no longer is done in the
/// order in which it was asked for.
const PARTING: Duration = Duration::from_secs(1);

/// So much may be left to be carried out while the next client is served.
const MOST_LEFT: usize = 8;

/// A monitor as the options describe it.
#[derive(Debug)]
pub(crate) struct Description {
    pub(crate) chardev: String,
    pub(crate) pretty: bool,
}

impl Description {
    pub(crate) fn take(mut options: Options) -> Result<Self, Failure> {
        let chardev = need(&mut options, "chardev")?;
        options.take_text("id").map_err(failure)?;
        let mode = options.take_text("mode").map_err(failure)?;
        match mode.as_deref() {
            None | Some("control") => {}
            Some("readline") => return Err(message("Only QMP is supported")),
            Some(other) => {
                return Err(message(format!(
                    "Parameter 'mode' does not accept value '{other}'"
                )));
            }
        }
        let pretty = options.take_bool("pretty").map_err(failure)?;
        refuse_rest(&options)?;
        Ok(Description {
            chardev,
            pretty: pretty.unwrap_or(false),
        })
    }
}

/// Clients that have asked for commands hear what happens.
impl Listener for Outbox {
    fn hear(&self, event: &Value) {
        self.push(event);
    }
}

/// Starts a monitor; it ends some time after the daemon has.
pub(crate) fn start(daemon: Rc<Daemon>, chardev: Rc<Chardev>, pretty: bool) -> JoinHandle<()> {
    spawn(async move {
        let mut left = Left::default();
        loop {
            let connect = pin!(chardev.connect());
            match select(connect, pin!(daemon.ended.wait())).await {
                Either::Left((Some(port), _)) => left.serve(&daemon, port, pretty).await,
                Either::Left((None, _)) | Either::Right(_) => return left.at_most(0).await,
            }
            // A client that connects again waits for a while, unless the end comes.
            select(pin!(chardev.hung_up()), pin!(daemon.ended.wait())).await;
        }
    })
}

/// What clients that have hung up have left to be carried out.
#[derive(Default)]
pub(crate) struct Left(FuturesUnordered<JoinHandle<()>>);

impl Left {
    /// Serves one client until it has hung up, and what it has asked for is done or takes its time.
    async fn serve(&mut self, daemon: &Rc<Daemon>, port: Port, pretty: bool) {
        let gone = Stop::new();
        let serving = spawn({
            let (daemon, gone) = (daemon.clone(), gone.clone());
            async move { talk(&daemon, port, pretty, gone).await }
        });
        let parted = async {
            gone.wait().await;
            lane::sleep(PARTING).await;
        };
        if let Either::Right((_, serving)) = select(serving, pin!(parted)).await {
            self.0.push(serving);
        }
        self.at_most(MOST_LEFT).await;
    }

    /// Forgets what is done, and waits until no more than this is not.
    async fn at_most(&mut self, most: usize) {
        while let Some(Some(())) = self.0.next().now_or_never() {}
        while self.0.len() > most {
            self.0.next().await;
        }
    }
}

/// Serves one client to its end, or the daemon's. Once it has hung up, `gone` is requested.
pub(crate) async fn talk(daemon: &Rc<Daemon>, port: Port, pretty: bool, gone: Stop) {
    let outbox = Rc::new(Outbox::new(pretty));
    let sender = spawn(send(port.clone(), outbox.clone()));
    let session = Session::new(daemon.clone(), outbox.clone(), port.hears(), gone);
    outbox.push(&qmp::greeting(&package(), session.capabilities()));
    let too_long = pin!(async {
        daemon.ended.wait().await;
        lane::sleep(FAREWELL).await;
    });
    if let Either::Right(_) = select(pin!(session.serve(&port)), too_long).await {
        outbox.give_up();
    }
    daemon.events.leave(&outbox);
    outbox.complete();
    let farewell = pin!(lane::sleep(FAREWELL));
    if let Either::Right(_) = select(pin!(outbox.drained()), farewell).await {
        outbox.give_up();
    }
    port.hang_up();
    sender.await;
}

async fn send(port: Port, outbox: Rc<Outbox>) {
    while let Some(text) = outbox.next().await {
        match port.send(&text).await {
            true => outbox.sent(text.len()),
            false => return outbox.give_up(),
        }
    }
}

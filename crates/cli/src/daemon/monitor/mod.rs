//! `--monitor`: clients that ask for things by QMP and are told what happens.
//!
//! A monitor serves one client at a time. What the client sends is cut into requests
//! (`vellum_control::qmp`), which are carried out one by one, whichever monitor they come
//! from; answers and events go through an outbox.
//!
//! Invariant: a client that sends nonsense, does not listen or goes away harms nobody but
//! itself.

mod chardev;
mod outbox;

use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::{Either, select};
use serde_json::{Value, json};
use vellum_control::Options;
use vellum_control::daemon::{self as commands, Daemon, Listener, need, refuse_rest};
use vellum_control::qmp::{self, Class, Messages, Outcome, Request};
use vellum_io::lane::net;
use vellum_io::{JoinHandle, lane, spawn};

use crate::server::Failure;
pub(super) use chardev::{Chardev, Port, Source};
use outbox::Outbox;

/// How long a client may take to fetch the last answers.
const FAREWELL: Duration = Duration::from_secs(1);

/// A monitor as the options describe it.
#[derive(Debug)]
pub(super) struct Description {
    pub(super) chardev: String,
    pub(super) pretty: bool,
}

impl Description {
    pub(super) fn take(mut options: Options) -> Result<Self, Failure> {
        let chardev = need(&mut options, "chardev")?;
        options.take_text("id")?;
        let mode = options.take_text("mode")?;
        match mode.as_deref() {
            None | Some("control") => {}
            Some("readline") => return Err(Failure::message("Only QMP is supported")),
            Some(other) => {
                return Err(Failure::message(format!(
                    "Parameter 'mode' does not accept value '{other}'"
                )));
            }
        }
        let pretty = options.take_bool("pretty")?;
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
pub(super) fn start(daemon: Rc<Daemon>, source: Source, pretty: bool) -> JoinHandle<()> {
    spawn(async move {
        match &source {
            Source::Nobody => {}
            Source::One(port) => talk(&daemon, port.clone(), pretty).await,
            Source::Many {
                listener, first, ..
            } => {
                if let Some(port) = first {
                    talk(&daemon, port.clone(), pretty).await;
                }
                serve(&daemon, listener, pretty).await;
            }
        }
    })
}

/// Serves the clients that come, one after the other.
async fn serve(daemon: &Rc<Daemon>, listener: &net::Listener, pretty: bool) {
    loop {
        let accept = pin!(listener.accept());
        match select(accept, pin!(daemon.ended.wait())).await {
            Either::Left((Ok(stream), _)) => {
                talk(daemon, Port::Socket(stream), pretty).await;
            }
            // The cause (no file descriptors) will not go at once.
            Either::Left((Err(_), _)) => lane::sleep(FAREWELL).await,
            Either::Right(_) => return,
        }
    }
}

/// Serves one client to its end, or the daemon's.
async fn talk(daemon: &Rc<Daemon>, port: Port, pretty: bool) {
    let outbox = Rc::new(Outbox::new(pretty));
    let sender = spawn(send(port.clone(), outbox.clone()));
    let session = Session {
        daemon: daemon.clone(),
        outbox: outbox.clone(),
        negotiated: false,
    };
    outbox.push(&qmp::greeting(&commands::package()));
    let too_long = pin!(async {
        daemon.ended.wait().await;
        lane::sleep(FAREWELL).await;
    });
    if let Either::Right(_) = select(pin!(session.listen(&port)), too_long).await {
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

/// A client's session.
struct Session {
    daemon: Rc<Daemon>,
    outbox: Rc<Outbox>,
    /// Commands may come.
    negotiated: bool,
}

impl Session {
    /// Carries requests out until none comes any more.
    async fn listen(mut self, port: &Port) {
        let (daemon, outbox) = (self.daemon.clone(), self.outbox.clone());
        let mut messages = Messages::new();
        loop {
            let over = pin!(async {
                select(pin!(daemon.ended.wait()), pin!(outbox.lost())).await;
            });
            let Either::Left((Some(bytes), _)) = select(pin!(port.receive()), over).await else {
                return;
            };
            messages.push(&bytes);
            while let Some(message) = messages.next_message() {
                let (request, id) = match message {
                    Ok(message) => Request::parse(message),
                    Err(error) => (Err(error), None),
                };
                let outcome = match request {
                    Ok(request) => self.carry_out(request).await,
                    Err(error) => Err(error),
                };
                self.outbox.push(&qmp::answer(outcome, id));
                self.outbox.drained().await;
                if self.daemon.stop.is_requested() {
                    return;
                }
            }
        }
    }

    async fn carry_out(&mut self, request: Request) -> Outcome {
        let Request { command, arguments } = request;
        match (command.as_str(), self.negotiated) {
            ("qmp_capabilities", false) => {
                commands::check_capabilities(arguments)?;
                self.negotiated = true;
                self.daemon.events.join(self.outbox.clone());
                Ok(json!({}))
            }
            ("qmp_capabilities", true) => Err(qmp::Failure::of(
                Class::CommandNotFound,
                "Capabilities negotiation is already complete, command ignored",
            )),
            (_, false) => Err(qmp::Failure::of(
                Class::CommandNotFound,
                "Expecting capabilities negotiation with 'qmp_capabilities'",
            )),
            (name, true) => commands::carry_out(&self.daemon, name, arguments).await,
        }
    }
}

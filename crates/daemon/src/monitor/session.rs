//! [`Session`]: what one client asks for.
//!
//! What the client sends is cut into requests, which are carried out one by one in the order
//! in which they came, whichever monitor they come from. As long as a request is carried out, no
//! more is read, unless the client has enabled `oob`: then so many are kept in a queue, and those
//! that it sends by `exec-oob` overtake them.
//!
//! Invariant: no more than [`MAX_QUEUED`] requests are kept.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use event_listener::Event;
use futures_util::future::{Either, select};
use serde_json::{Value, json};
use vellum_export::nbd::Stop;
use vellum_io::lane;

use crate::chardev::Port;
use crate::commands;
use crate::daemon::Daemon;
use crate::qmp::{self, Class, Failure, Messages, Outcome, Request};

use super::outbox::Outbox;

/// QEMU's limit.
const MAX_QUEUED: usize = 8;

/// How often is looked whether a client that waits is still there.
const PAUSE: Duration = Duration::from_millis(100);

/// A request, or what is no request.
type Message = Result<Value, Failure>;

/// A client's session.
pub(super) struct Session {
    daemon: Rc<Daemon>,
    outbox: Rc<Outbox>,
    offers_oob: bool,
    /// The client has hung up.
    gone: Stop,
    /// Commands may come.
    negotiated: Cell<bool>,
    oob: Cell<bool>,
    /// What waits, and first what is being carried out.
    queue: RefCell<VecDeque<Message>>,
    /// Nothing more comes.
    over: Cell<bool>,
    changed: Event,
}

/// Why nothing more is received.
enum End {
    /// The client says no more.
    OfInput,
    /// It is gone, or the daemon ends.
    OfAll,
}

impl Session {
    pub(super) fn new(
        daemon: Rc<Daemon>,
        outbox: Rc<Outbox>,
        offers_oob: bool,
        gone: Stop,
    ) -> Self {
        Session {
            daemon,
            outbox,
            offers_oob,
            gone,
            negotiated: Cell::new(false),
            oob: Cell::new(false),
            queue: RefCell::default(),
            over: Cell::new(false),
            changed: Event::new(),
        }
    }

    /// What the client may enable.
    pub(super) fn capabilities(&self) -> &'static [&'static str] {
        match self.offers_oob {
            true => &["oob"],
            false => &[],
        }
    }

    /// Carries requests out until none comes any more.
    pub(super) async fn serve(self, port: &Port) {
        let working = pin!(self.work());
        let reading = pin!(self.read(port));
        if let Either::Right((end, working)) = select(working, reading).await {
            // What is being carried out goes on to its end, unless it waits for others.
            self.queue.borrow_mut().truncate(1);
            self.over.set(true);
            self.changed.notify(usize::MAX);
            if !port.is_connection() {
                return working.await;
            }
            let noticing = pin!(async {
                match end {
                    // It may read its answers.
                    End::OfInput => self.notice_end(port).await,
                    End::OfAll => self.gone.request(),
                }
            });
            if let Either::Right(((), working)) = select(working, noticing).await {
                working.await;
            }
        }
    }

    /// Takes requests in until the client or the daemon is gone.
    async fn read(&self, port: &Port) -> End {
        let mut messages = Messages::new();
        loop {
            let over = pin!(async {
                select(pin!(self.daemon.ended.wait()), pin!(self.outbox.lost())).await;
            });
            let bytes = match select(pin!(port.receive()), over).await {
                Either::Left((Some(bytes), _)) => bytes,
                Either::Left((None, _)) => return End::OfInput,
                Either::Right(_) => return End::OfAll,
            };
            messages.push(&bytes);
            while let Some(message) = messages.next_message() {
                match message {
                    Ok(message) if Request::is_out_of_band(&message) => {
                        self.dispatch(message).await;
                        self.outbox.caught_up().await;
                    }
                    message => self.put(message, port).await,
                }
            }
        }
    }

    /// Puts a request at the end of the queue, and waits until there is room for another.
    async fn put(&self, message: Message, port: &Port) {
        self.queue.borrow_mut().push_back(message);
        self.changed.notify(usize::MAX);
        loop {
            let changed = self.changed.listen();
            let most = if self.oob.get() { MAX_QUEUED } else { 1 };
            if self.queue.borrow().len() < most {
                return;
            }
            // Nothing is received meanwhile, so nothing else tells.
            match select(changed, pin!(self.notice_end(port))).await {
                Either::Left(_) => {}
                Either::Right(((), changed)) => changed.await,
            }
        }
    }

    /// Waits until the client has hung up.
    async fn notice_end(&self, port: &Port) {
        while !port.has_hung_up() {
            lane::sleep(PAUSE).await;
        }
        self.gone.request();
    }

    /// Carries out what is in the queue.
    async fn work(&self) {
        loop {
            let changed = self.changed.listen();
            let next = self.queue.borrow().front().cloned();
            match next {
                None if self.over.get() => return,
                None => changed.await,
                Some(message) => {
                    match message {
                        Ok(message) => {
                            let askers = &self.daemon.askers;
                            askers
                                .carry_out_for(&self.gone, self.dispatch(message))
                                .await;
                        }
                        Err(error) => self.outbox.answer(&qmp::answer(Err(error), None)),
                    }
                    if self.daemon.stop.is_requested() {
                        return self.outbox.drained().await;
                    }
                    self.outbox.caught_up().await;
                    self.queue.borrow_mut().pop_front();
                    self.changed.notify(usize::MAX);
                }
            }
        }
    }

    /// Carries a request out and answers it.
    async fn dispatch(&self, message: Value) {
        let (request, id) = Request::parse(message, self.oob.get());
        match request {
            Ok(request) if self.is_plain(&request) => {
                let Request {
                    command, arguments, ..
                } = request;
                let written = commands::write_out(&self.daemon, &command, arguments).await;
                self.outbox.answer_line(qmp::line(written, id));
            }
            Ok(request) => {
                let outcome = self.carry_out(request).await;
                self.outbox.answer(&qmp::answer(outcome, id));
            }
            Err(error) => self.outbox.answer(&qmp::answer(Err(error), id)),
        }
    }

    /// Whether the answer is that of a command as it is.
    fn is_plain(&self, request: &Request) -> bool {
        let is_own = request.command == "qmp_capabilities";
        self.negotiated.get() && !request.out_of_band && !is_own && !self.outbox.is_pretty()
    }

    async fn carry_out(&self, request: Request) -> Outcome {
        let Request {
            command,
            arguments,
            out_of_band,
        } = request;
        let is_known = commands::exists(&command);
        match (command.as_str(), self.negotiated.get()) {
            ("qmp_capabilities", false) => {
                let oob = commands::enabled_oob(arguments, self.offers_oob)?;
                self.oob.set(oob);
                self.negotiated.set(true);
                self.daemon.events.join(self.outbox.clone());
                Ok(json!({}))
            }
            // As all commands of QEMU's daemon.
            (name, _) if out_of_band && is_known => Err(Failure::new(format!(
                "The command {name} does not support OOB"
            ))),
            ("qmp_capabilities", true) => Err(Failure::of(
                Class::CommandNotFound,
                "Capabilities negotiation is already complete, command ignored",
            )),
            (_, false) => Err(Failure::of(
                Class::CommandNotFound,
                "Expecting capabilities negotiation with 'qmp_capabilities'",
            )),
            (name, true) => commands::carry_out(&self.daemon, name, arguments).await,
        }
    }
}

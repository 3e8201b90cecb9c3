//! `vellum daemon`, also known as `qemu-storage-daemon`: nodes, exports and monitors as
//! the command line describes them, until a signal or a monitor's client ends it.
//!
//! Without a monitor what the command line says is all there is, and nodes are wired for
//! good; with one they can be changed while they are used ([`Nodes::live`]). Options for
//! parts that do not exist are refused by name.
//!
//! Invariant: the end comes in one order, whatever caused it: exports, the server, jobs,
//! nodes, and last the monitors, whose clients hear of all that.

mod arguments;
mod commands;
mod export;
mod jobs;
mod monitor;
mod server;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::rc::Rc;

use futures_util::lock::Mutex;
use serde_json::json;
use vellum_control::{Nodes, Options, secret, tls};
use vellum_export::nbd::Stop;
use vellum_storage::{JoinHandle, lane, program, spawn};

use crate::nbd::daemon::{self, Ready, Side};
use crate::nbd::serve;
use crate::nbd::{Failure, os_text};
use crate::{hint, report};
use arguments::{Action, Arguments, Item, Part};
use export::Removal;
use jobs::Jobs;
use monitor::{Chardev, Events, Source};
use server::Server;

pub use arguments::{help, options};

fn message(text: impl Into<String>) -> Failure {
    Failure::Message(text.into())
}

/// Runs the tool and returns its exit code.
pub fn main(program: &str, args: Vec<OsString>) -> i32 {
    let done = Arguments::parse(args).and_then(|arguments| match arguments.action {
        Action::Help => {
            report::print(arguments::help(program));
            Ok(())
        }
        Action::Version => {
            report::print(crate::img::version(program));
            Ok(())
        }
        Action::Run => start(arguments),
    });
    match done {
        Ok(()) => 0,
        Err(failure) => {
            match failure {
                Failure::Message(text) => report::error(text),
                Failure::Usage(error) => {
                    report::error(&error);
                    hint::about_option(error, &options());
                }
                Failure::Told => {}
            }
            1
        }
    }
}

fn start(arguments: Arguments) -> Result<(), Failure> {
    let mut ready = None;
    if arguments.daemonize {
        match daemon::fork().map_err(|e| message(format!("Failed to fork: {}", os_text(&e))))? {
            Side::Parent(parent) => {
                return match parent.wait() {
                    true => Ok(()),
                    false => Err(Failure::Told),
                };
            }
            Side::Child(child) => ready = Some(child),
        }
    }
    let daemon = Daemon::new(&arguments);
    let signals = serve::catch_signals()?;
    lane::block_on(async {
        drop(spawn(serve::stop_on_signal(signals, daemon.stop.clone())));
        let run = run(&daemon, &arguments, ready).await;
        // Also after an error: what was opened must be left clean.
        let closed = daemon.shut_down().await;
        if let (Some(path), true) = (&arguments.pid_file, daemon.pid_file_written.get()) {
            // Somebody may have removed it already.
            let _ = std::fs::remove_file(path);
        }
        run?;
        closed.map_err(|error| message(report::error_text(&error)))
    })
}

async fn run(
    daemon: &Rc<Daemon>,
    arguments: &Arguments,
    ready: Option<Ready>,
) -> Result<(), Failure> {
    for item in &arguments.items {
        let mut parts = daemon.parts.lock().await;
        let made = parts.make(item, arguments.daemonize).await;
        made.map_err(|failure| match failure {
            Failure::Message(text) => message(format!("{item}: {text}")),
            other => other,
        })?;
    }
    if let Some(path) = &arguments.pid_file {
        serve::write_pid_file(path).map_err(|failure| match failure {
            Failure::Message(text) => message(format!("cannot create PID file: {text}")),
            other => other,
        })?;
        daemon.pid_file_written.set(true);
    }
    if let Some(ready) = ready {
        let told = ready.tell(false);
        told.map_err(|e| message(format!("Failed to daemonize: {}", os_text(&e))))?;
    }
    program::forget_start();
    let mut parts = daemon.parts.lock().await;
    if let Some(server) = &mut parts.server {
        server.start();
    }
    let sources = std::mem::take(&mut parts.monitors);
    drop(parts);
    for (source, pretty) in sources {
        let monitor = monitor::start(daemon.clone(), source, pretty);
        daemon.monitors.borrow_mut().push(monitor);
    }
    daemon.stop.wait().await;
    Ok(())
}

/// The running program.
#[derive(Debug)]
struct Daemon {
    /// What there is. Whoever changes it holds it.
    parts: Mutex<Parts>,
    jobs: Jobs,
    events: Events,
    /// Somebody wants the program to end.
    stop: Stop,
    /// Everything but the monitors has ended.
    ended: Stop,
    monitors: RefCell<Vec<JoinHandle<()>>>,
    pid_file_written: Cell<bool>,
}

impl Daemon {
    fn new(arguments: &Arguments) -> Rc<Daemon> {
        // Nobody else could change anything.
        let monitored = arguments
            .items
            .iter()
            .any(|item| item.part == Part::Monitor);
        let events = Events::default();
        let nodes = match monitored {
            true => Nodes::live(),
            false => Nodes::new(),
        };
        Rc::new(Daemon {
            parts: Mutex::new(Parts {
                nodes,
                events: events.clone(),
                ..Parts::default()
            }),
            jobs: Jobs::default(),
            events,
            stop: Stop::new(),
            ended: Stop::new(),
            monitors: RefCell::default(),
            pid_file_written: Cell::new(false),
        })
    }

    /// Ends everything in order: nobody uses what is closed.
    async fn shut_down(&self) -> vellum::Result<()> {
        self.parts.lock().await.end_server().await;
        // They hold the parts when they end.
        self.jobs.cancel_all().await;
        let parts = self.parts.lock().await;
        let closed = parts.nodes.clone().close().await;
        drop(parts);
        self.ended.request();
        let monitors = std::mem::take(&mut *self.monitors.borrow_mut());
        for monitor in monitors {
            monitor.await;
        }
        closed
    }
}

/// What there is.
#[derive(Debug, Default)]
struct Parts {
    nodes: Nodes,
    iothreads: Vec<String>,
    server: Option<Server>,
    exports: export::Set,
    /// Where clients of monitors come from, by id; `None` if a monitor has them already.
    chardevs: BTreeMap<String, Option<Source>>,
    /// Those that have not begun yet, and whether their answers take several lines.
    monitors: Vec<(Source, bool)>,
    events: Events,
}

/// `key=value,...` or `{...}`.
fn parse_options(text: &str, implied: Option<&str>) -> Result<Options, Failure> {
    let parsed = match text.starts_with('{') {
        true => Options::from_json(text),
        false => Options::parse_with_implied(text, implied),
    };
    parsed.map_err(failure)
}

fn failure(error: vellum::Error) -> Failure {
    message(report::error_text(&error))
}

/// Takes an option that must be there.
fn need(options: &mut Options, key: &str) -> Result<String, Failure> {
    let value = options.take_text(key).map_err(failure)?;
    value.ok_or_else(|| message(format!("Parameter '{key}' is missing")))
}

/// Refuses what nobody has taken.
fn refuse_rest(options: &Options) -> Result<(), Failure> {
    match options.keys().next() {
        None => Ok(()),
        Some(key) => {
            let key = key.split('.').next().unwrap_or(key);
            Err(message(format!("Parameter '{key}' is unexpected")))
        }
    }
}

impl Parts {
    async fn make(&mut self, item: &Item, in_background: bool) -> Result<(), Failure> {
        match item.part {
            Part::Blockdev => {
                let options = parse_options(&item.text, Some("driver"))?;
                self.nodes.add(options).await.map_err(failure)
            }
            Part::Object => self.add_object(parse_options(&item.text, Some("qom-type"))?),
            Part::NbdServer => {
                if self.server.is_some() {
                    return Err(message("NBD server already running"));
                }
                self.server = Some(server::listen(parse_options(&item.text, None)?)?);
                Ok(())
            }
            Part::Export => {
                let options = parse_options(&item.text, Some("type"))?;
                self.add_export(options).await
            }
            Part::Chardev => {
                let options = parse_options(&item.text, Some("backend"))?;
                self.add_chardev(options, in_background).await
            }
            Part::Monitor => self.add_monitor(parse_options(&item.text, Some("chardev"))?),
        }
    }

    async fn add_chardev(&mut self, options: Options, in_background: bool) -> Result<(), Failure> {
        let (id, chardev) = Chardev::take(options)?;
        if in_background && matches!(chardev, Chardev::Stdio) {
            return Err(message("cannot use stdio with -daemonize"));
        }
        if self.chardevs.contains_key(&id) {
            return Err(message(format!("Chardev with id '{id}' already exists")));
        }
        self.chardevs.insert(id, Some(chardev.open().await?));
        Ok(())
    }

    fn add_monitor(&mut self, options: Options) -> Result<(), Failure> {
        let wanted = monitor::Description::take(options)?;
        let id = wanted.chardev;
        let Some(chardev) = self.chardevs.get_mut(&id) else {
            return Err(message(format!("chardev \"{id}\" not found")));
        };
        match chardev.take() {
            Some(source) => {
                self.monitors.push((source, wanted.pretty));
                Ok(())
            }
            None => Err(message(format!("chardev '{id}' is already in use"))),
        }
    }

    async fn add_export(&mut self, options: Options) -> Result<(), Failure> {
        let wanted = export::Description::take(options, &self.iothreads)?;
        let Some(server) = &self.server else {
            return Err(message("NBD server not running"));
        };
        self.exports.add(wanted, &self.nodes, server).await
    }

    async fn remove_export(&mut self, id: &str, removal: Removal) -> Result<(), Failure> {
        let Some(server) = &self.server else {
            return Err(message(format!("Export '{id}' is not found")));
        };
        let exports = &mut self.exports;
        exports.remove(id, removal, &self.nodes, server).await?;
        self.events.tell("BLOCK_EXPORT_DELETED", json!({"id": id}));
        Ok(())
    }

    /// Ends all exports, and the server.
    async fn end_server(&mut self) {
        for id in self.exports.ids() {
            // Each is there, as long as nobody else changes anything.
            let _ = self.remove_export(&id, Removal::Hard).await;
        }
        if let Some(server) = self.server.take() {
            server.end().await;
        }
    }

    fn add_object(&mut self, mut options: Options) -> Result<(), Failure> {
        let kind = need(&mut options, "qom-type")?;
        if kind == "secret" {
            return secret::add(options).map_err(failure);
        }
        if tls::is_type(&kind) {
            return tls::add(&kind, options).map_err(failure);
        }
        if kind != "iothread" {
            return Err(message(match is_object_of_qemu(&kind) {
                true => format!("Objects of type '{kind}' are not part of this version"),
                false => format!("Parameter 'qom-type' does not accept value '{kind}'"),
            }));
        }
        let id = need(&mut options, "id")?;
        if self.iothreads.contains(&id) {
            return Err(message(format!(
                "attempt to add duplicate property '{id}' to object (type 'container')"
            )));
        }
        // Lanes have no knobs: a lane polls when it has something to poll for.
        for key in [
            "poll-max-ns",
            "poll-grow",
            "poll-shrink",
            "aio-max-batch",
            "thread-pool-min",
            "thread-pool-max",
        ] {
            options.take_size(key).map_err(failure)?;
        }
        refuse_rest(&options)?;
        self.iothreads.push(id);
        Ok(())
    }
}

fn is_object_of_qemu(kind: &str) -> bool {
    matches!(kind, "secret_keyring" | "throttle-group" | "main-loop")
        || kind.starts_with("tls-")
        || kind.starts_with("authz-")
}

//! `vellum daemon`, also known as `qemu-storage-daemon`: nodes and exports as the
//! command line describes them, until a signal ends it.
//!
//! There is no monitor: what the command line says is all there is. Options for
//! parts that do not exist are refused by name.

mod arguments;
mod export;
mod server;

use std::ffi::OsString;

use vellum_control::{Nodes, Options, secret, tls};
use vellum_export::nbd::{Exports, Listener, ServerOptions, Stop};
use vellum_storage::{lane, spawn};

use crate::nbd::daemon::{self, Ready, Side};
use crate::nbd::serve;
use crate::nbd::{Failure, os_text};
use crate::report;
use arguments::{Action, Arguments, Item, Part};

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
            report::print(arguments::version(program));
            Ok(())
        }
        Action::Run => start(arguments),
    });
    match done {
        Ok(()) => 0,
        Err(failure) => {
            match failure {
                Failure::Message(text) => report::error(text),
                Failure::Usage(error) => report::error(error),
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
    let stop = Stop::new();
    let signals = serve::catch_signals()?;
    lane::block_on(async {
        drop(spawn(serve::stop_on_signal(signals, stop.clone())));
        let mut parts = Parts::default();
        let run = run(&arguments, &mut parts, ready, &stop).await;
        // Also after an error: what was opened must be left clean.
        let closed = parts.nodes.close().await;
        if let (Some(path), true) = (&arguments.pid_file, parts.pid_file_written) {
            // Somebody may have removed it already.
            let _ = std::fs::remove_file(path);
        }
        run?;
        closed.map_err(|error| message(report::error_text(&error)))
    })
}

/// What the options have made so far.
#[derive(Debug, Default)]
struct Parts {
    nodes: Nodes,
    iothreads: Vec<String>,
    server: Option<Server>,
    exports: export::Set,
    pid_file_written: bool,
}

/// The NBD server, not yet serving.
#[derive(Debug)]
struct Server {
    listener: Listener,
    options: ServerOptions,
}

async fn run(
    arguments: &Arguments,
    parts: &mut Parts,
    ready: Option<Ready>,
    stop: &Stop,
) -> Result<(), Failure> {
    for item in &arguments.items {
        parts.make(item).await.map_err(|failure| match failure {
            Failure::Message(text) => message(format!("{item}: {text}")),
            other => other,
        })?;
    }
    if let Some(path) = &arguments.pid_file {
        serve::write_pid_file(path).map_err(|failure| match failure {
            Failure::Message(text) => message(format!("cannot create PID file: {text}")),
            other => other,
        })?;
        parts.pid_file_written = true;
    }
    if let Some(ready) = ready {
        let told = ready.tell(false);
        told.map_err(|e| message(format!("Failed to daemonize: {}", os_text(&e))))?;
    }
    match parts.server.take() {
        Some(Server { listener, options }) => {
            let exports = Exports::new(parts.exports.take());
            vellum_export::nbd::serve(vec![listener], exports, options, stop).await;
        }
        None => stop.wait().await,
    }
    Ok(())
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
    async fn make(&mut self, item: &Item) -> Result<(), Failure> {
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
                let export = export::Description::take(options, &self.iothreads)?;
                let Some(server) = &self.server else {
                    return Err(message("NBD server not running"));
                };
                let several = server.options.max_connections != 1;
                self.exports.add(export, &self.nodes, several).await
            }
            Part::Monitor => Err(message(
                "a monitor (QMP) is not part of this version; nodes and exports have to be given \
                 on the command line",
            )),
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

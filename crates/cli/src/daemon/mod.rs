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
mod monitor;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::rc::Rc;

use futures_util::lock::Mutex;
use vellum_control::daemon::{self, Daemon, ServerEnvironment};
use vellum_control::{Nodes, Options};
use vellum_io::{JoinHandle, lane, program, spawn};

use crate::server::{self, Failure, Process, Ready, daemonize};
use crate::version::version;
use crate::{hint, report};
use arguments::{Action, Arguments, Item, Part};
use monitor::{Chardev, Source};

pub use arguments::{help, options};

/// Runs the tool and returns its exit code.
pub fn main(program: &str, args: Vec<OsString>) -> i32 {
    let done = Arguments::parse(args).and_then(|arguments| match arguments.action {
        Action::Help => {
            report::print(arguments::help(program));
            Ok(())
        }
        Action::Version => {
            report::print(version(program));
            Ok(())
        }
        Action::Run => start(arguments),
    });
    match done {
        Ok(()) => 0,
        Err(failure) => {
            failure.report(&options());
            1
        }
    }
}

fn start(arguments: Arguments) -> Result<(), Failure> {
    let Process::Server(ready) = daemonize(arguments.daemonize)? else {
        return Ok(());
    };
    server::allow_many_files();
    let program = Program::new(&arguments);
    let signals = server::catch_signals()?;
    lane::block_on(async {
        let stop = program.daemon.stop.clone();
        drop(spawn(server::stop_on_signal(signals, stop)));
        let run = run(&program, &arguments, ready).await;
        // Also after an error: what was opened must be left clean.
        let closed = program.shut_down().await;
        if let (Some(path), true) = (&arguments.pid_file, program.pid_file_written.get()) {
            // Somebody may have removed it already.
            let _ = std::fs::remove_file(path);
        }
        run?;
        Ok(closed?)
    })
}

async fn run(
    program: &Program,
    arguments: &Arguments,
    ready: Option<Ready>,
) -> Result<(), Failure> {
    for item in &arguments.items {
        let stop = &program.daemon.stop;
        let made = program.make(item, arguments.daemonize);
        // Signals do not end the program by themselves any more.
        let Some(made) = stop.or_give_up(made).await else {
            return Ok(());
        };
        made.map_err(|failure| failure.with_prefix(item))?;
    }
    if let Some(path) = &arguments.pid_file {
        server::write_pid_file(path)
            .map_err(|failure| failure.with_prefix("cannot create PID file"))?;
        program.pid_file_written.set(true);
    }
    if let Some(ready) = ready {
        ready.notify_parent(false)?;
    }
    let has = |part| arguments.items.iter().any(|item| item.part == part);
    if !has(Part::Export) && !has(Part::Monitor) {
        hint::give("nothing is exported (--export) and nobody can change that (--monitor): Ctrl-C");
    }
    program::discard_startup_pages();
    program.daemon.forward_notices();
    program.daemon.parts.lock().await.start_server();
    let sources = std::mem::take(&mut program.sockets.lock().await.monitors);
    for (source, pretty) in sources {
        let monitor = monitor::start(program.daemon.clone(), source, pretty);
        program.monitors.borrow_mut().push(monitor);
    }
    program.daemon.stop.wait().await;
    Ok(())
}

/// The running program.
#[derive(Debug)]
struct Program {
    daemon: Rc<Daemon>,
    sockets: Mutex<Sockets>,
    monitors: RefCell<Vec<JoinHandle<()>>>,
    pid_file_written: Cell<bool>,
}

impl Program {
    fn new(arguments: &Arguments) -> Program {
        // Nobody else could change anything.
        let monitored = arguments
            .items
            .iter()
            .any(|item| item.part == Part::Monitor);
        let nodes = match monitored {
            true => Nodes::live(),
            false => Nodes::sharing(),
        };
        Program {
            daemon: Daemon::new(nodes, server_environment()),
            sockets: Mutex::default(),
            monitors: RefCell::default(),
            pid_file_written: Cell::new(false),
        }
    }

    /// Ends everything in order, and last the monitors.
    async fn shut_down(&self) -> vellum::Result<()> {
        let closed = self.daemon.shut_down().await;
        let monitors = std::mem::take(&mut *self.monitors.borrow_mut());
        for monitor in monitors {
            monitor.await;
        }
        closed
    }

    async fn make(&self, item: &Item, in_background: bool) -> Result<(), Failure> {
        let mut parts = self.daemon.parts.lock().await;
        match item.part {
            Part::Blockdev => {
                let options = parse_options(&item.text, Some("driver"))?;
                Ok(parts.nodes.add(options).await?)
            }
            Part::Object => Ok(parts.add_object(parse_options(&item.text, Some("qom-type"))?)?),
            Part::NbdServer => Ok(parts.add_server(parse_options(&item.text, None)?)?),
            Part::Export => {
                let options = parse_options(&item.text, Some("type"))?;
                Ok(parts.add_export(options).await?)
            }
            Part::Chardev => {
                let options = parse_options(&item.text, Some("backend"))?;
                let mut sockets = self.sockets.lock().await;
                sockets.add_chardev(options, in_background).await
            }
            Part::Monitor => {
                let options = parse_options(&item.text, Some("chardev"))?;
                self.sockets.lock().await.add_monitor(options)
            }
        }
    }
}

/// What the daemon listens with.
fn server_environment() -> ServerEnvironment {
    ServerEnvironment {
        listen_unix: |path| server::listen_unix(path).map_err(daemon_failure),
        listen_tcp: |host, port| server::listen_tcp(host, port).map_err(daemon_failure),
        log: Some(server::log(false)),
        lanes: None,
    }
}

fn daemon_failure(failure: Failure) -> daemon::Failure {
    match failure {
        Failure::Message(text) => daemon::Failure(text),
        other => daemon::Failure(format!("{other:?}")),
    }
}

/// Where clients of monitors come from.
#[derive(Debug, Default)]
struct Sockets {
    /// By id; `None` if a monitor has them already.
    chardevs: BTreeMap<String, Option<Source>>,
    /// Those that have not begun yet, and whether their answers take several lines.
    monitors: Vec<(Source, bool)>,
}

/// `key=value,...` or `{...}`.
fn parse_options(text: &str, implied: Option<&str>) -> Result<Options, Failure> {
    let parsed = match text.starts_with('{') {
        true => Options::from_json(text),
        false => Options::parse_with_implied(text, implied),
    };
    Ok(parsed?)
}

impl Sockets {
    async fn add_chardev(&mut self, options: Options, in_background: bool) -> Result<(), Failure> {
        let (id, chardev) = Chardev::take(options)?;
        if in_background && matches!(chardev, Chardev::Stdio) {
            return Err(Failure::message("cannot use stdio with -daemonize"));
        }
        if self.chardevs.contains_key(&id) {
            return Err(Failure::message(format!(
                "Chardev with id '{id}' already exists"
            )));
        }
        self.chardevs.insert(id, Some(chardev.open().await?));
        Ok(())
    }

    fn add_monitor(&mut self, options: Options) -> Result<(), Failure> {
        let wanted = monitor::Description::take(options)?;
        let id = wanted.chardev;
        let Some(chardev) = self.chardevs.get_mut(&id) else {
            return Err(Failure::message(format!("chardev \"{id}\" not found")));
        };
        match chardev.take() {
            Some(source) => {
                self.monitors.push((source, wanted.pretty));
                Ok(())
            }
            None => Err(Failure::message(format!(
                "chardev '{id}' is already in use"
            ))),
        }
    }
}

//! `vellum daemon`, and `qemu-storage-daemon`: the program around the daemon.

use std::cell::{Cell, RefCell};
use std::ffi::OsString;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::rc::Rc;

use vellum_daemon::{Daemon, Notice, ServerEnvironment};
use vellum_export::fuse;
use vellum_graph::Nodes;
use vellum_io::{JoinHandle, lane, program, spawn};
use vellum_options::Options;

use crate::server::{self, Failure, Process, Ready, daemonize};
use crate::{hint, report, trace};

use super::arguments::{Arguments, Item, Part, SPEC};
use super::config::{self, ConfigFile};
use super::state::{self, StateFile};
use super::{part_help, service};

/// Runs the tool and returns its exit code.
pub fn main(_program: &str, args: Vec<OsString>) -> i32 {
    let done = Arguments::parse(args).and_then(|arguments| match part_help::asked(&arguments)? {
        Some(text) => {
            report::print(text);
            Ok(())
        }
        None => start(arguments),
    });
    Failure::exit_code(done, &SPEC)
}

pub(crate) fn start(arguments: Arguments) -> Result<(), Failure> {
    // The first thing: a reload may be asked for at any time, and is done when the start is over.
    let reloading = match arguments.config {
        Some(_) => Some(server::catch_these(&[libc::SIGHUP])?),
        None => None,
    };
    server::keep_sockets().map_err(Failure::Message)?;
    if let Some(format) = arguments.log {
        trace::start_log(format);
    }
    // Before the user's terminal is left.
    let config = arguments.config.as_deref().map(ConfigFile::read);
    let config = config.transpose()?;
    let state = arguments.state.as_deref().map(StateFile::read);
    let state = state.transpose()?;
    if let (true, Some(config)) = (arguments.check, &config) {
        report::print(config.describe());
        return Ok(());
    }
    if state.is_some() && arguments.items.iter().any(|item| item.part == Part::Export) {
        // It would show its node again where a client has led it to an overlay since.
        let text =
            "--export and --state do not go together: have --config or a client make exports";
        return Err(Failure::message(text));
    }
    let Process::Server(ready) = daemonize(arguments.daemonize)? else {
        return Ok(());
    };
    server::allow_many_files();
    let ending = match config {
        None => server::catch_signals()?,
        Some(_) => server::catch_these(&[libc::SIGTERM, libc::SIGINT])?,
    };
    let program = Rc::new(Program::new(&arguments, config, state));
    lane::block_on(async {
        let stop = program.daemon.stop.clone();
        drop(spawn(server::stop_on_signal(ending, stop)));
        let run = run(&program, &arguments, (ready, reloading)).await;
        service::stopping();
        // Also after an error: what was opened must be left clean.
        let closed = program.shut_down().await;
        if let (Some(path), true) = (&arguments.pid_file, program.pid_file_written.get()) {
            // It may be gone already.
            let _ = std::fs::remove_file(path);
        }
        run?;
        Ok(closed?)
    })
}

pub(crate) async fn run(
    program: &Rc<Program>,
    arguments: &Arguments,
    (ready, reloading): (Option<Ready>, Option<UnixStream>),
) -> Result<(), Failure> {
    remove_dead_mounts(program, arguments);
    for item in &arguments.items {
        let stop = &program.daemon.stop;
        let made = program.make(item, arguments.daemonize);
        // Signals do not end the program by themselves any more.
        let Some(made) = stop.or_give_up(made).await else {
            return Ok(());
        };
        made.map_err(|failure| failure.with_prefix(item))?;
    }
    let brought = program.daemon.stop.or_give_up(state::bring_all(program));
    match brought.await {
        Some(brought) => brought?,
        None => return Ok(()),
    }
    // Before the start is announced: whoever measures its memory from then on sees what it keeps.
    program::discard_startup_pages();
    if let Some(path) = &arguments.pid_file {
        server::write_pid_file(path)
            .map_err(|failure| failure.with_prefix("cannot create PID file"))?;
        program.pid_file_written.set(true);
    }
    if let Some(ready) = ready {
        ready.notify_parent(false)?;
    }
    let has = |part| arguments.items.iter().any(|item| item.part == part);
    let is_reached = has(Part::Export) || has(Part::Monitor) || has(Part::Metrics);
    if !is_reached && program.config.is_none() {
        hint::give("nothing is exported (--export) and nobody can change that (--monitor): Ctrl-C");
    }
    program.daemon.forward_notices();
    program.daemon.parts.lock().await.start_server();
    program.begin_monitors();
    let http = program.daemon.start_http()?;
    program.monitors.borrow_mut().extend(http);
    service::keep_watchdog();
    let status = match &program.config {
        Some(config) => config.status().await,
        None => String::new(),
    };
    service::ready(&status);
    if let Some(signals) = reloading {
        config::reload_on_signal(program.clone(), signals);
    }
    program.daemon.stop.wait().await;
    Ok(())
}

/// Takes away what a daemon that was killed has left where exports are to be mounted: an image of which the
/// disk was mounted over itself is opened before its export is made.
fn remove_dead_mounts(program: &Program, arguments: &Arguments) {
    let exports = arguments
        .items
        .iter()
        .filter(|item| item.part == Part::Export);
    // Invalid options are reported when the export is created.
    let options = exports.filter_map(|item| parse_options(&item.text, Some("type")).ok());
    let named = options.filter_map(|options| options.get_text("mountpoint").map(str::to_owned));
    let configured = program.config.iter().flat_map(ConfigFile::mountpoints);
    for mountpoint in named.chain(configured) {
        fuse::remove_dead_mounts(Path::new(&mountpoint));
    }
}

/// The running program.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) daemon: Rc<Daemon>,
    monitors: RefCell<Vec<JoinHandle<()>>>,
    pid_file_written: Cell<bool>,
    /// The configuration file (`--config`), beside the command line.
    pub(super) config: Option<ConfigFile>,
    /// What was made at run time.
    pub(super) state: Option<StateFile>,
}

impl Program {
    fn new(arguments: &Arguments, config: Option<ConfigFile>, state: Option<StateFile>) -> Program {
        // Nobody else could change anything.
        let monitored = arguments
            .items
            .iter()
            .any(|item| matches!(item.part, Part::Monitor | Part::Metrics));
        let nodes = match monitored || config.is_some() || state.is_some() {
            true => Nodes::live(),
            false => Nodes::sharing(),
        };
        let nodes = match arguments.cache_budget_bytes {
            Some(bytes) => nodes.with_cache_budget(bytes),
            None => nodes,
        };
        Program {
            daemon: Daemon::new(nodes, server_environment()),
            monitors: RefCell::default(),
            pid_file_written: Cell::new(false),
            config,
            state,
        }
    }

    /// Starts the monitors that were added.
    pub(crate) fn begin_monitors(&self) {
        self.daemon.estimate_jobs();
        let begun = self.daemon.start_monitors();
        self.monitors.borrow_mut().extend(begun);
    }

    /// Ends everything in order, and last the monitors.
    async fn shut_down(&self) -> vellum::Result<()> {
        let closed = self.daemon.shut_down().await;
        let monitors = std::mem::take(&mut *self.monitors.borrow_mut());
        for monitor in monitors {
            monitor.await;
        }
        self.daemon.close_chardevs();
        closed
    }

    async fn make(&self, item: &Item, in_background: bool) -> Result<(), Failure> {
        let daemon = &self.daemon;
        let made = match item.part {
            Part::Blockdev => {
                let options = parse_options(&item.text, Some("driver"))?;
                daemon.add_node(options).await
            }
            Part::Object => {
                let options = parse_options(&item.text, Some("qom-type"))?;
                daemon.parts.lock().await.add_object(options)
            }
            Part::NbdServer => {
                let options = parse_options(&item.text, None)?;
                daemon.parts.lock().await.add_server(options)
            }
            Part::Export => {
                let options = parse_options(&item.text, Some("type"))?;
                daemon.parts.lock().await.add_export(options).await
            }
            // The text of a character device is never JSON.
            Part::Chardev => {
                let options = Options::parse_with_implied(&item.text, Some("backend"))?;
                daemon.add_chardev(options, in_background).await
            }
            Part::Trace => {
                if !trace::take_for_server(&item.text, &item.to_string())? {
                    daemon.stop.request();
                }
                return Ok(());
            }
            Part::Metrics => {
                let options = parse_options(&item.text, Some("address"))?;
                daemon.add_metrics(options).await
            }
            Part::Monitor => daemon.add_monitor(parse_options(&item.text, Some("chardev"))?),
        };
        Ok(made?)
    }
}

/// What the daemon listens with.
fn server_environment() -> ServerEnvironment {
    ServerEnvironment {
        listen_unix: |path| server::listen_unix(path).map_err(daemon_failure),
        listen_tcp: |address| server::listen_tcp(address).map_err(daemon_failure),
        handed_over: server::handed_unix,
        check_free: |path| server::check_free(path).map_err(vellum_daemon::Failure),
        tell: |notice| match notice {
            Notice::Info(text) => report::info(text),
            Notice::Error(text) => report::error(text),
            Notice::Line(text) => report::print(text + "\n"),
        },
        log: Some(server::log(false)),
        lanes: None,
    }
}

fn daemon_failure(failure: Failure) -> vellum_daemon::Failure {
    match failure {
        Failure::Message(text) => vellum_daemon::Failure(text),
        other => vellum_daemon::Failure(format!("{other:?}")),
    }
}

/// `key=value,...` or `{...}`.
pub(crate) fn parse_options(text: &str, implied: Option<&str>) -> Result<Options, Failure> {
    let parsed = match text.starts_with('{') {
        true => Options::from_json(text),
        false => Options::parse_with_implied(text, implied),
    };
    Ok(parsed?)
}

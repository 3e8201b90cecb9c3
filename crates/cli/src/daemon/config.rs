//! `--config FILE`: what the file says comes into force at the start, and its changes on SIGHUP.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use futures_util::lock::Mutex;
use vellum_daemon::config::{
    Applied, Config, InForce, Mistake, Monitor, OnError, PartKind, Parts, plan,
};
use vellum_io::spawn;
use vellum_options::{Options, Scalar};

use super::{Program, parse_options, service};
use crate::report;
use crate::server::{self, Failure};

/// The names of sockets that a service manager hands over.
const MONITOR_NAME: &str = "qmp";
const NBD_NAME: &str = "nbd";

/// A file that is in force.
#[derive(Debug)]
pub(super) struct ConfigFile {
    path: PathBuf,
    first: Config,
    in_force: Mutex<InForce>,
    monitors: RefCell<Vec<Monitor>>,
    /// What is not as the file wants it, and was told.
    mistakes: RefCell<Vec<String>>,
}

fn failure(mistake: &Mistake) -> Failure {
    Failure::message(mistake.to_string())
}

impl ConfigFile {
    /// Reads a file, for a start.
    ///
    /// # Errors
    /// As [`Config::read`].
    pub(super) fn read(path: &str) -> Result<ConfigFile, Failure> {
        let path = PathBuf::from(path);
        let first = Config::read(&path).map_err(|mistake| failure(&mistake))?;
        Ok(ConfigFile {
            path,
            first,
            in_force: Mutex::default(),
            monitors: RefCell::default(),
            mistakes: RefCell::default(),
        })
    }

    /// What would be asked for at a start, a line each.
    pub(super) fn describe(&self) -> String {
        let mut text = String::new();
        for monitor in &self.first.monitors {
            let path = &monitor.path;
            text += &format!("{}: a monitor at {path}\n", self.line(monitor.place.line));
        }
        for listener in &self.first.metrics {
            let (line, address) = (self.line(listener.place.line), &listener.address);
            text += &format!("{line}: HTTP at {address}\n");
        }
        for step in plan(&Parts::default(), &self.first.parts) {
            let line = step.place.map_or(0, |place| place.line);
            text += &format!("{}: {}\n", self.line(line), step.request);
        }
        text
    }

    fn line(&self, line: usize) -> String {
        format!("{}:{line}", self.path.display())
    }

    /// Whether what cannot be made is told, and the others are served.
    pub(super) fn reports(&self) -> bool {
        self.first.on_error == OnError::Report
    }

    /// What it says at the start.
    pub(super) fn parts(&self) -> &Parts {
        &self.first.parts
    }

    /// The files that exports are to be mounted over at the start.
    pub(super) fn mountpoints(&self) -> impl Iterator<Item = String> {
        let parts = self.parts();
        let exports = parts.keys().filter(|key| key.kind == PartKind::Export);
        exports.filter_map(|key| {
            let path = parts.get(key)?.arguments.get("mountpoint")?.as_str()?;
            Some(path.to_owned())
        })
    }

    /// The parts that are in force.
    pub(super) async fn parts_in_force(&self) -> Parts {
        self.in_force.lock().await.parts().clone()
    }

    /// Brings the file into force, but for its exports.
    ///
    /// # Errors
    /// If part of it could not be made, unless the file says that the others are served then.
    pub(super) async fn start(&self, program: &Program) -> Result<(), Failure> {
        self.add_monitors(program, &self.first).await?;
        program
            .daemon
            .watch_space(&self.first.space_warning_percent);
        let disks = self.first.parts.without(PartKind::Export);
        self.bring(program, &disks).await?;
        // Tokens and credentials are objects, which are there by now.
        for listener in &self.first.metrics {
            let options = parse_options(&listener.address, Some("address"))?;
            let added = program.daemon.add_metrics(options).await;
            let place = self.line(listener.place.line);
            added.map_err(|failure| Failure::from(failure).with_prefix(place))?;
        }
        Ok(())
    }

    /// Brings its exports into force.
    ///
    /// # Errors
    /// As [`ConfigFile::start`].
    pub(super) async fn start_exports(&self, program: &Program) -> Result<(), Failure> {
        let mut parts = self.first.parts.clone();
        parts.leave_out_missing(&self.parts_in_force().await);
        for refused in program.daemon.leave_out_lost(&mut parts) {
            self.tell(format!("{}: {refused}", self.path.display()));
        }
        self.bring(program, &parts).await?;
        self.take_left_sockets(program).await
    }

    async fn bring(&self, program: &Program, parts: &Parts) -> Result<(), Failure> {
        let mut in_force = self.in_force.lock().await;
        let applied = in_force
            .become_as(&program.daemon, parts, &self.path, &BTreeMap::new())
            .await;
        drop(in_force);
        if let (OnError::Stop, Some(first)) = (self.first.on_error, applied.mistakes.first()) {
            return Err(failure(first));
        }
        self.tell_all(&applied);
        Ok(())
    }

    /// Adds the monitors that are not there yet.
    async fn add_monitors(&self, program: &Program, config: &Config) -> Result<(), Failure> {
        for monitor in &config.monitors {
            let is_there = self
                .monitors
                .borrow()
                .iter()
                .any(|one| one.path == monitor.path);
            if is_there {
                continue;
            }
            let mut options = Options::new();
            options.set_text("path", monitor.path.as_str());
            let number = self.monitors.borrow().len();
            let added = add_monitor(program, &number.to_string(), options).await;
            let place = self.line(monitor.place.line);
            added.map_err(|failure| failure.with_prefix(place))?;
            self.monitors.borrow_mut().push(monitor.clone());
        }
        Ok(())
    }

    /// Uses sockets that were handed over under names that say what they are for, and says which
    /// nobody uses.
    async fn take_left_sockets(&self, program: &Program) -> Result<(), Failure> {
        for name in server::left_sockets() {
            let number = |name: &str| server::take_by_name(name).map(|fd| fd.to_string());
            match name.as_str() {
                MONITOR_NAME => {
                    let mut options = Options::new();
                    options.set_text("fd", number(&name).unwrap_or_default());
                    add_monitor(program, &name, options).await?;
                }
                NBD_NAME if program.daemon.parts.lock().await.exports().is_none() => {
                    let mut options = Options::new();
                    options.set_text("addr.type", "fd");
                    options.set_text("addr.str", number(&name).unwrap_or_default());
                    program.daemon.parts.lock().await.add_server(options)?;
                }
                _ => report::warning(format!(
                    "the socket '{name}' was handed over and nothing listens there: name its path in \
                     [daemon], or call it '{MONITOR_NAME}' or '{NBD_NAME}' (FileDescriptorName=)"
                )),
            }
        }
        Ok(())
    }

    /// Reads the file again and brings the difference into force.
    async fn reload(&self, program: &Program) {
        service::reloading();
        match Config::read(&self.path) {
            Err(mistake) => {
                report::error(&mistake);
                service::ready(&format!("not reloaded: {mistake}"));
            }
            Ok(config) => {
                self.become_as(program, &config).await;
                service::ready(&self.status().await);
            }
        }
        program.begin_monitors();
    }

    async fn become_as(&self, program: &Program, config: &Config) {
        self.mistakes.borrow_mut().clear();
        if let Err(Failure::Message(text)) = self.add_monitors(program, config).await {
            self.tell(text);
        }
        let addresses = |config: &Config| {
            let listeners = config.metrics.iter();
            listeners.map(|one| one.address.clone()).collect::<Vec<_>>()
        };
        if addresses(config) != addresses(&self.first) {
            let path = self.path.display();
            report::warning(format!(
                "{path}: where HTTP is served changes with the next start, not before"
            ));
        }
        for gone in self.gone_monitors(config) {
            let path = self.path.display();
            report::warning(format!(
                "{path}: the monitor at {gone} ends with the daemon, not before"
            ));
        }
        program.daemon.watch_space(&config.space_warning_percent);
        let applied = match program.daemon.has_lost() {
            true => self.become_with_lost(program, config).await,
            false => {
                let mut in_force = self.in_force.lock().await;
                let none = BTreeMap::new();
                in_force
                    .become_as(&program.daemon, &config.parts, &self.path, &none)
                    .await
            }
        };
        self.tell_all(&applied);
        let parts = self.parts_in_force().await;
        if let Err(error) = program.daemon.note_config(&parts).await {
            self.tell(report::error_text(&error));
        }
    }

    /// Tries what was lost of the state file once more, on the disks as the file has them by now, and
    /// brings its exports into force, as far as they show all that was written.
    async fn become_with_lost(&self, program: &Program, config: &Config) -> Applied {
        let daemon = &program.daemon;
        let remembered = daemon.shown_before_loss(&config.parts);
        let mut in_force = self.in_force.lock().await;
        let mut parts = config.parts.clone();
        daemon.leave_out_lost(&mut parts);
        // What cannot be made is told when it was tried again.
        let _ = in_force
            .become_as(daemon, &parts, &self.path, &remembered)
            .await;
        let lost = daemon.retry_lost(&config.parts).await;
        let mut parts = config.parts.clone();
        let refused = daemon.leave_out_lost(&mut parts);
        for text in lost.into_iter().chain(refused) {
            self.tell(format!("{}: {text}", self.path.display()));
        }
        in_force
            .become_as(daemon, &parts, &self.path, &remembered)
            .await
    }

    fn gone_monitors(&self, config: &Config) -> Vec<String> {
        let monitors = self.monitors.borrow();
        let gone = monitors.iter().filter(|one| {
            let mut wanted = config.monitors.iter();
            !wanted.any(|other| other.path == one.path)
        });
        gone.map(|one| one.path.clone()).collect()
    }

    /// Tells what is not as the file wants it.
    pub(super) fn tell(&self, text: String) {
        report::error(&text);
        self.mistakes.borrow_mut().push(text);
    }

    fn tell_all(&self, applied: &Applied) {
        for mistake in &applied.mistakes {
            self.tell(mistake.to_string());
        }
    }

    /// What is served, in a line.
    pub(super) async fn status(&self) -> String {
        let in_force = self.in_force.lock().await;
        let count = |kind| {
            in_force
                .parts()
                .keys()
                .filter(|key| key.kind == kind)
                .count()
        };
        let (disks, exports) = (count(PartKind::Disk), count(PartKind::Export));
        let served = format!("{disks} disks, {exports} exports");
        let mistakes = self.mistakes.borrow();
        match mistakes.first() {
            None => served,
            Some(first) => format!("{served}; {} not as wanted: {first}", mistakes.len()),
        }
    }
}

/// Reads the file again with each signal, until the program ends.
pub(super) fn reload_on_signal(program: std::rc::Rc<Program>, mut signals: UnixStream) {
    drop(spawn(async move {
        while server::next_signal(&mut signals).await {
            if program.daemon.stop.is_requested() {
                return;
            }
            if let Some(config) = &program.config {
                config.reload(&program).await;
            }
        }
    }));
}

async fn add_monitor(program: &Program, name: &str, mut socket: Options) -> Result<(), Failure> {
    let id = format!("config-monitor-{name}");
    socket.set_text("backend", "socket");
    socket.set_text("id", id.as_str());
    socket.set("server", Scalar::Bool(true));
    socket.set("wait", Scalar::Bool(false));
    program.daemon.add_chardev(socket, false).await?;
    let mut monitor = Options::new();
    monitor.set_text("chardev", id);
    Ok(program.daemon.add_monitor(monitor)?)
}

//! `vellum serve`: the command.

use std::ffi::OsString;
use std::pin::pin;
use std::sync::Arc;

use futures_util::future::select;
use vellum::BlockDevice;
use vellum_export::nbd::{self, Exports, ServerOptions, Stop};
use vellum_export::unflushed_logs::UnflushedLogs;
use vellum_export::{fuse, vhost_user_blk};
use vellum_graph::stderr;
use vellum_io::{JoinHandle, program, spawn};

use crate::report;
use crate::server::{Failure, Ready, absolute, announce, close, listen_unix, log, start};

use super::arguments::{Arguments, SPEC};
use super::lines::{Place, lines};

/// NBD clients served at once where nothing is said: as many as by the daemon.
const DEFAULT_CLIENTS: usize = 100;

/// Runs the tool and returns its exit code.
pub fn main(_program: &str, args: Vec<OsString>) -> i32 {
    let done = Arguments::parse(args).and_then(|arguments| {
        start(arguments.image.fork, async |ready, stop| {
            run(&arguments, ready, stop).await
        })
    });
    Failure::exit_code(done, &SPEC)
}

pub(crate) async fn run(
    arguments: &Arguments,
    ready: Option<Ready>,
    stop: &Stop,
) -> Result<(), Failure> {
    if let Some(file) = &arguments.fuse {
        fuse::remove_dead_mounts(&absolute(file)?);
    }
    // Signals do not end the program by themselves any more.
    let Some(device) = stop.or_give_up(arguments.image.open()).await else {
        return Ok(());
    };
    let device = device?;
    let mut served = Served::default();
    let begun = served.begin(arguments, &device).await;
    let begun = begun.and_then(|text| {
        if !arguments.image.common.quiet {
            report::print(text);
        }
        announce(arguments.image.pid_file.as_deref(), ready, || {
            "Ctrl-C ends it".to_owned()
        })
    });
    if begun.is_ok() {
        program::discard_startup_pages();
        served.wait(stop).await;
    }
    served.end().await;
    close(&*device, &arguments.image.name, begun).await
}

/// The ways in which the disk is to be had.
#[derive(Debug, Default)]
struct Served {
    nbd: Option<(Stop, JoinHandle<()>)>,
    vhost_user: Option<vhost_user_blk::Export>,
    fuse: Option<fuse::Export>,
    /// Of what the guest has not flushed: what users of another way make durable must outlive it.
    logs: UnflushedLogs,
}

impl Served {
    /// Begins all that are asked for; what users are told about them. What has begun when one
    /// fails is there to be ended.
    async fn begin(
        &mut self,
        arguments: &Arguments,
        device: &Arc<dyn BlockDevice>,
    ) -> Result<String, Failure> {
        let read_only = arguments.image.read_only || device.info().read_only;
        let flushed = match read_only {
            true => device.clone(),
            false => self.logs.flushed_with(device.clone()),
        };
        let mut text = String::new();
        if let Some(path) = &arguments.nbd {
            let socket = absolute(path)?;
            let socket = socket.to_string_lossy();
            self.begin_nbd(arguments, &flushed, &socket)?;
            let export = arguments.export_name.as_str();
            let socket = &*socket;
            text += &lines(Place::Nbd { socket, export }, read_only);
        }
        if let Some(path) = &arguments.vhost_user {
            let socket = absolute(path)?;
            let socket = socket.to_string_lossy();
            let options = vhost_user_blk::Options {
                logs: self.logs.clone(),
                ..vhost_user_options(arguments, read_only)
            };
            self.begin_vhost_user(device, &socket, &options)?;
            let (socket, queues) = (&*socket, options.queues);
            text += &lines(Place::VhostUser { socket, queues }, read_only);
        }
        if let Some(path) = &arguments.fuse {
            let path = absolute(path)?;
            let options = fuse::ExportOptions::default()
                .writable(!read_only)
                .allow_other(match arguments.allow_other {
                    true => fuse::AllowOther::On,
                    false => fuse::AllowOther::Off,
                });
            let export = fuse::Export::new(flushed, path.clone(), &options).await;
            self.fuse = Some(export.map_err(failed)?);
            let path = &*path.to_string_lossy();
            text += &lines(Place::File { path }, read_only);
        }
        Ok(text)
    }

    fn begin_nbd(
        &mut self,
        arguments: &Arguments,
        device: &Arc<dyn BlockDevice>,
        socket: &str,
    ) -> Result<(), Failure> {
        let listener = listen_unix(socket)?;
        let mut export = nbd::Export::new(arguments.export_name.clone(), device.clone());
        export.read_only |= arguments.image.read_only;
        let clients = arguments.shared.unwrap_or(DEFAULT_CLIENTS);
        export.multi_conn = clients != 1;
        let options = ServerOptions {
            max_connections: clients,
            persistent: true,
            log: Some(log(false)),
            ..ServerOptions::default()
        };
        let stop = Stop::new();
        let end = stop.clone();
        let serving = spawn(async move {
            nbd::serve(vec![listener], Exports::new([export]), options, &end).await;
        });
        self.nbd = Some((stop, serving));
        Ok(())
    }

    fn begin_vhost_user(
        &mut self,
        device: &Arc<dyn BlockDevice>,
        socket: &str,
        options: &vhost_user_blk::Options,
    ) -> Result<(), Failure> {
        let listener = listen_unix(socket)?;
        let log: vhost_user_blk::Log = Arc::new(stderr::print_line);
        let export = vhost_user_blk::Export::start(device.clone(), options, listener, Some(log));
        self.vhost_user = Some(export.map_err(failed)?);
        Ok(())
    }

    /// Until a signal; or, where the disk is but a file, until that is unmounted.
    async fn wait(&self, stop: &Stop) {
        match &self.fuse {
            Some(fuse) if self.nbd.is_none() && self.vhost_user.is_none() => {
                let unmounted = fuse.unmounted();
                select(pin!(stop.wait()), pin!(unmounted.wait())).await;
            }
            _ => stop.wait().await,
        }
    }

    /// Ends all; what clients have begun is complete on return.
    async fn end(self) {
        if let Some((stop, serving)) = self.nbd {
            stop.request();
            serving.await;
        }
        if let Some(export) = self.vhost_user {
            export.end().await;
        }
        if let Some(export) = self.fuse {
            export.end().await;
        }
    }
}

fn vhost_user_options(arguments: &Arguments, read_only: bool) -> vhost_user_blk::Options {
    let defaults = vhost_user_blk::Options::default();
    vhost_user_blk::Options {
        read_only,
        write_through: arguments.image.cache.writethrough,
        queues: arguments.queues.unwrap_or(defaults.queues),
        serial: arguments.serial.clone().unwrap_or(defaults.serial.clone()),
        ..defaults
    }
}

fn failed(error: vellum_io::Error) -> Failure {
    Failure::message(report::error_text(&error))
}

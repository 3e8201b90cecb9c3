//! `vellum serve`: the command.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;

use futures_util::future::select;
use vellum::BlockDevice;
use vellum_export::nbd::{self, Exports, ServerOptions, Stop};
use vellum_export::unflushed_logs::UnflushedLogs;
use vellum_export::{fuse, vhost_user_blk};
use vellum_graph::stderr;
use vellum_io::error::io_text;
use vellum_io::{JoinHandle, lane, program, spawn};
use vellum_options::OpenFlags;

use crate::manual::pages;
use crate::server::{
    Failure, Process, Ready, ServedImage, allow_many_files, catch_signals, close, daemonize,
    listen_unix, log, stop_on_signal, write_pid_file,
};
use crate::version::version;
use crate::{hint, report};

use super::arguments::{Action, Arguments, options};
use super::lines::{Place, lines};

/// NBD clients served at once where nothing is said: as many as by the daemon.
const DEFAULT_CLIENTS: usize = 100;

/// Runs the tool and returns its exit code.
pub fn main(program: &str, args: Vec<OsString>) -> i32 {
    let done = Arguments::parse(args).and_then(|arguments| match arguments.action {
        Action::Help => {
            report::print(help(program) + &pages::examples("serve"));
            Ok(())
        }
        Action::Version => {
            report::print(version(program));
            Ok(())
        }
        Action::Serve => start(&arguments),
    });
    Failure::exit_code(done, &options())
}

/// What `--help` prints.
pub fn help(program: &str) -> String {
    let call = report::call(program, "serve");
    format!(
        "Usage: {call} [OPTIONS] IMAGE
Serves the disk in an image in one or several ways at once, until a signal comes, and prints
what to type to use it.

  -h, --help                 print this text
  -V, --version              print the version

Where the disk is to be had (at least one):
      --nbd=SOCKET           for clients of the NBD protocol, at a unix socket
      --vhost-user=SOCKET    for a virtual machine monitor on this host, which shares the
                             guest's memory (QEMU, cloud-hypervisor, Firecracker)
      --fuse=FILE            as a regular file that exists already (its own content is
                             hidden meanwhile)

More about these:
  -x, --export-name=NAME     name of the NBD export (default: empty)
  -e, --shared=N             NBD clients served at once (default 100; 0: any number)
      --queues=N             queues of the vhost-user disk (default 1)
      --serial=TEXT          its serial number, as the guest sees it
      --allow-other          let other users use FILE, as far as its mode says

What to show:
  -r, --read-only            refuse writes
  -s, --snapshot             throw all changes away in the end
  -l, --load-snapshot=PARAM  show an internal snapshot: ID, NAME, or
                             snapshot.id=ID,snapshot.name=NAME

How to open the image:
  -f, --format=FORMAT        format of the image (raw, qcow2)
      --image-opts           IMAGE is a list of key=value options
      --object=TYPE,id=ID    define a secret
  -n, --nocache              the same as --cache=none
      --cache=MODE           none, writeback (default), writethrough, directsync, unsafe
      --aio=MODE             threads, native, io_uring
      --discard=MODE         ignore, unmap (default)
      --detect-zeroes=MODE   off, on, unmap

How to run:
  -q, --quiet                do not print what to type
      --fork                 go to the background once the disk is to be had
      --pid-file=PATH        write the process id to PATH
"
    )
}

fn start(arguments: &Arguments) -> Result<(), Failure> {
    let Process::Server(ready) = daemonize(arguments.fork)? else {
        return Ok(());
    };
    allow_many_files();
    let stop = Stop::new();
    let signals = catch_signals()?;
    lane::block_on(async {
        drop(spawn(stop_on_signal(signals, stop.clone())));
        run(arguments, ready, &stop).await
    })
}

pub(crate) async fn run(
    arguments: &Arguments,
    ready: Option<Ready>,
    stop: &Stop,
) -> Result<(), Failure> {
    if let Some(file) = &arguments.fuse {
        fuse::remove_dead_mounts(Path::new(&absolute(file)?));
    }
    // Signals do not end the program by themselves any more.
    let Some(device) = stop.or_give_up(open(arguments)).await else {
        return Ok(());
    };
    let device = device?;
    let mut served = Served::default();
    let begun = served.begin(arguments, &device).await;
    let begun = begun.and_then(|text| tell(arguments, &text, ready));
    if begun.is_ok() {
        program::discard_startup_pages();
        served.wait(stop).await;
    }
    served.end().await;
    close(&*device, &arguments.image, begun).await
}

async fn open(arguments: &Arguments) -> Result<Arc<dyn BlockDevice>, Failure> {
    let temporary = arguments.temporary && !arguments.read_only;
    let image = ServedImage {
        name: &arguments.image,
        format: arguments.format.as_deref(),
        image_opts: arguments.image_opts,
        flags: OpenFlags {
            writable: !arguments.read_only && !arguments.temporary,
            cache: arguments.cache,
            aio: arguments.aio,
            discard: !arguments.keep_space,
            detect_zeroes: arguments.detect_zeroes,
            ..OpenFlags::default()
        },
        temporary,
        snapshot: arguments.snapshot.as_deref(),
    };
    image.open().await
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
        let read_only = arguments.read_only || device.info().read_only;
        let flushed = match read_only {
            true => device.clone(),
            false => self.logs.flushed_with(device.clone()),
        };
        let mut text = String::new();
        if let Some(path) = &arguments.nbd {
            let socket = absolute(path)?;
            self.begin_nbd(arguments, &flushed, &socket)?;
            let export = arguments.export_name.as_str();
            let socket = socket.as_str();
            text += &lines(Place::Nbd { socket, export }, read_only);
        }
        if let Some(path) = &arguments.vhost_user {
            let socket = absolute(path)?;
            let options = vhost_user_blk::Options {
                logs: self.logs.clone(),
                ..vhost_user_options(arguments, read_only)
            };
            self.begin_vhost_user(device, &socket, &options)?;
            let (socket, queues) = (socket.as_str(), options.queues);
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
            let export = fuse::Export::new(flushed, PathBuf::from(&path), &options).await;
            self.fuse = Some(export.map_err(failed)?);
            text += &lines(Place::File { path: &path }, read_only);
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
        export.read_only |= arguments.read_only;
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
        write_through: arguments.cache.writethrough,
        queues: arguments.queues.unwrap_or(defaults.queues),
        serial: arguments.serial.clone().unwrap_or(defaults.serial.clone()),
        ..defaults
    }
}

fn failed(error: vellum_io::Error) -> Failure {
    Failure::message(report::error_text(&error))
}

/// A path that holds in any folder, as those who are told need it.
fn absolute(path: &str) -> Result<String, Failure> {
    let failed = |error| Failure::message(format!("Failed to stat '{path}': {}", io_text(&error)));
    let path = std::path::absolute(path).map_err(failed)?;
    Ok(path.to_string_lossy().into_owned())
}

/// Tells whoever waits that the disk is to be had, and how.
fn tell(arguments: &Arguments, text: &str, ready: Option<Ready>) -> Result<(), Failure> {
    if !arguments.quiet {
        report::print(text);
    }
    if let Some(path) = &arguments.pid_file {
        write_pid_file(path)?;
    }
    match ready {
        Some(ready) => ready.notify_parent(false),
        None => {
            hint::give("Ctrl-C ends it");
            Ok(())
        }
    }
}

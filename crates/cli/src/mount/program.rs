//! `vellum mount`: the command.

use std::ffi::OsString;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;

use futures_util::future::select;
use vellum::BlockDevice;
use vellum_export::fuse::{AllowOther, Export, ExportOptions, remove_dead_mounts};
use vellum_export::nbd::Stop;
use vellum_io::error::io_text;
use vellum_io::{lane, program, spawn};
use vellum_options::OpenFlags;

use crate::server::{
    Failure, Process, Ready, ServedImage, allow_many_files, catch_signals, close, daemonize,
    stop_on_signal, write_pid_file,
};
use crate::version::version;
use crate::{hint, report};

use super::arguments::{Action, Arguments, options};

/// Runs the tool and returns its exit code.
pub fn main(program: &str, args: Vec<OsString>) -> i32 {
    let done = Arguments::parse(args).and_then(|arguments| match arguments.action {
        Action::Help => {
            report::print(help(program));
            Ok(())
        }
        Action::Version => {
            report::print(version(program));
            Ok(())
        }
        Action::Mount => start(&arguments),
    });
    Failure::exit_code(done, &options())
}

/// What `--help` prints.
pub fn help(program: &str) -> String {
    let call = report::call(program, "mount");
    format!(
        "Usage: {call} [OPTIONS] IMAGE FILE
Shows the disk in an image as FILE, a regular file that exists already (its own content is
hidden meanwhile), until FILE is unmounted or a signal comes.  Needs /dev/fuse, and
fusermount3 for those who are not root.

  -h, --help                 print this text
  -V, --version              print the version

What to show, and to whom:
  -r, --read-only            refuse writes
      --growable             writes beyond the end make the disk longer, and its size may
                             be set
      --allow-other          let other users in, as far as the mode of FILE says
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
      --io-uring=MODE        have requests come over io_uring: on, off, auto (default:
                             where the kernel has that switched on)
      --fork                 go to the background once FILE is there
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

async fn run(arguments: &Arguments, ready: Option<Ready>, stop: &Stop) -> Result<(), Failure> {
    remove_dead_mounts(&absolute(&arguments.mountpoint)?);
    // Signals do not end the program by themselves any more.
    let Some(device) = stop.or_give_up(open(arguments)).await else {
        return Ok(());
    };
    let device = device?;
    let served = serve(arguments, device.clone(), ready, stop).await;
    close(&*device, &arguments.image, served).await
}

async fn open(arguments: &Arguments) -> Result<Arc<dyn BlockDevice>, Failure> {
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
        temporary: arguments.temporary && !arguments.read_only,
        snapshot: arguments.snapshot.as_deref(),
    };
    image.open().await
}

async fn serve(
    arguments: &Arguments,
    device: Arc<dyn BlockDevice>,
    ready: Option<Ready>,
    stop: &Stop,
) -> Result<(), Failure> {
    let failed = |error: vellum_io::Error| Failure::message(report::error_text(&error));
    let mountpoint = absolute(&arguments.mountpoint)?;
    let options = ExportOptions::default()
        .writable(!arguments.read_only && !device.info().read_only)
        .growable(arguments.growable)
        .allow_other(match arguments.allow_other {
            true => AllowOther::On,
            false => AllowOther::Off,
        })
        .transport(arguments.transport);
    let export = Export::new(device, mountpoint, &options).await;
    let export = export.map_err(failed)?;
    let begun = tell(arguments, ready);
    if begun.is_ok() {
        program::discard_startup_pages();
        let unmounted = export.unmounted();
        select(pin!(stop.wait()), pin!(unmounted.wait())).await;
    }
    export.end().await;
    begun
}

fn absolute(path: &str) -> Result<PathBuf, Failure> {
    let failed = |error| Failure::message(format!("Failed to stat '{path}': {}", io_text(&error)));
    std::path::absolute(path).map_err(failed)
}

/// Writes the pid file and notifies the parent process, or the user at a terminal, that the file
/// is mounted.
fn tell(arguments: &Arguments, ready: Option<Ready>) -> Result<(), Failure> {
    if let Some(path) = &arguments.pid_file {
        write_pid_file(path)?;
    }
    match ready {
        Some(ready) => ready.notify_parent(false),
        None => {
            hint::give(&format!(
                "the disk in '{}' is the file '{file}': Ctrl-C or 'umount {file}' ends it",
                arguments.image,
                file = arguments.mountpoint,
            ));
            Ok(())
        }
    }
}

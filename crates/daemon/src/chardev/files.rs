//! Character devices that are files: files, named pipes, terminals, standard streams.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::path::Path;
use std::rc::Rc;

use vellum_io::error::io_text;

use crate::failure::{Failure, message};

use super::port::Wire;
use super::settings::LogFile;

/// The rights of files that are made.
const MODE: u32 = 0o666;

fn cannot(verb: &str, path: &str, error: &io::Error) -> Failure {
    message(format!("Could not {verb} '{path}': {}", io_text(error)))
}

fn writes(append: bool) -> OpenOptions {
    let mut options = File::options();
    options.create(true).mode(MODE);
    match append {
        true => options.append(true),
        false => options.write(true).truncate(true),
    };
    options
}

/// The file that gets a copy of what is sent.
pub(super) fn log(log: &LogFile) -> Result<Rc<File>, Failure> {
    let opened = writes(log.append).open(&log.path);
    let file = opened.map_err(|error| cannot("create", &log.path, &error))?;
    Ok(Rc::new(file))
}

/// A file to write to, and perhaps one to read from.
pub(super) fn file(output: &str, input: Option<&str>, append: bool) -> Result<Wire, Failure> {
    let opened = writes(append).custom_flags(libc::O_NONBLOCK).open(output);
    let out = opened.map_err(|error| cannot("open", output, &error))?;
    let input = match input {
        None => None,
        Some(path) => {
            let opened = File::options()
                .read(true)
                .custom_flags(libc::O_NONBLOCK)
                .open(path);
            let file = opened.map_err(|error| cannot("open", path, &error))?;
            Some(Rc::new(file))
        }
    };
    Ok(Wire::Files {
        input,
        output: Rc::new(out),
    })
}

/// One file for both directions.
fn both(path: &str) -> io::Result<File> {
    // Never a terminal that the program is led by.
    File::options()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)
}

/// Two named pipes, `PATH.in` and `PATH.out`, or one for both directions.
pub(super) fn pipe(path: &str) -> Result<Wire, Failure> {
    let pair = (both(&format!("{path}.in")), both(&format!("{path}.out")));
    if let (Ok(input), Ok(output)) = pair {
        return Ok(Wire::Files {
            input: Some(Rc::new(input)),
            output: Rc::new(output),
        });
    }
    let file = both(path).map_err(|error| cannot("open", path, &error))?;
    Ok(two_ways(file))
}

/// A serial line.
pub(super) fn serial(path: &str) -> Result<Wire, Failure> {
    let file = both(path).map_err(|error| cannot("open", path, &error))?;
    // Something else than a terminal needs no setting.
    let _ = make_raw(&file);
    Ok(two_ways(file))
}

fn two_ways(file: File) -> Wire {
    let file = Rc::new(file);
    Wire::Files {
        input: Some(file.clone()),
        output: file,
    }
}

/// Standard input and output.
pub(super) fn stdio() -> Result<Wire, Failure> {
    let failed =
        |error: io::Error| message(format!("cannot use standard input: {}", io_text(&error)));
    let input = io::stdin().as_fd().try_clone_to_owned().map_err(failed)?;
    let output = io::stdout().as_fd().try_clone_to_owned().map_err(failed)?;
    Ok(Wire::Files {
        input: Some(Rc::new(input.into())),
        output: Rc::new(output.into()),
    })
}

/// Lets bytes through as they are, at 115200 bits a second as QEMU does.
fn make_raw(terminal: impl AsFd) -> io::Result<()> {
    use rustix::termios::{OptionalActions, speed, tcgetattr, tcsetattr};
    let mut settings = tcgetattr(&terminal)?;
    settings.make_raw();
    settings.set_speed(speed::B115200)?;
    tcsetattr(&terminal, OptionalActions::Now, &settings)?;
    Ok(())
}

/// A terminal whose other side somebody may open.
#[derive(Debug)]
pub(super) struct Pty {
    own: Rc<File>,
    /// Where the other side is.
    pub(super) path: String,
    link: Option<String>,
}

impl Pty {
    pub(super) fn open(link: Option<String>) -> Result<Self, Failure> {
        let failed =
            |error: io::Error| message(format!("Failed to create PTY: {}", io_text(&error)));
        let (own, other) = pair().map_err(failed)?;
        make_raw(&other).map_err(failed)?;
        let number = std::os::fd::AsRawFd::as_raw_fd(&other);
        let path = std::fs::read_link(format!("/proc/self/fd/{number}")).map_err(failed)?;
        rustix::io::ioctl_fionbio(&own, true).map_err(|errno| failed(errno.into()))?;
        let path = path.display().to_string();
        let mut pty = Pty {
            own: Rc::new(own.into()),
            path,
            link: None,
        };
        if let Some(link) = link {
            symlink(&pty.path, &link).map_err(|error| {
                message(format!("Failed to create PTY symlink: {}", io_text(&error)))
            })?;
            pty.link = Some(link);
        }
        Ok(pty)
    }

    /// Whether somebody has opened the other side.
    pub(super) fn is_open(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut polled = [PollFd::new(&*self.own, PollFlags::empty())];
        match poll(&mut polled, Some(&Timespec::default())) {
            Ok(_) => !polled[0].revents().contains(PollFlags::HUP),
            Err(_) => false,
        }
    }

    pub(super) fn wire(&self) -> Wire {
        Wire::Files {
            input: Some(self.own.clone()),
            output: self.own.clone(),
        }
    }
}

impl Drop for Pty {
    fn drop(&mut self) {
        let leads_here =
            |link: &Path| std::fs::read_link(link).is_ok_and(|to| to == Path::new(&self.path));
        if let Some(link) = &self.link
            && leads_here(Path::new(link))
        {
            // Somebody may have removed it already.
            let _ = std::fs::remove_file(link);
        }
    }
}

/// The two sides of a new terminal.
fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    use std::os::fd::FromRawFd;
    let (mut own, mut other) = (-1, -1);
    // SAFETY: both numbers are live locals; names and settings are not asked for.
    let made = unsafe {
        libc::openpty(
            &raw mut own,
            &raw mut other,
            std::ptr::null_mut(),
            std::ptr::null(),
            std::ptr::null(),
        )
    };
    if made != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has just opened them, and nobody else has them.
    let pair = unsafe { (OwnedFd::from_raw_fd(own), OwnedFd::from_raw_fd(other)) };
    for fd in [&pair.0, &pair.1] {
        rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::CLOEXEC)?;
    }
    Ok(pair)
}

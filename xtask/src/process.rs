//! Running other programs: errors that say what ran, and no process left behind.

use std::io::Write as _;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

/// How long a server has to close its image after it was asked to end.
const STOP_LIMIT: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A program of that name in PATH, or in the folders that only root's PATH has.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin"].map(PathBuf::from))
        .map(|folder| folder.join(name))
        .find(|candidate| is_executable(candidate))
}

/// A command for a program that `setup` has put in place.
pub fn program(name: &str) -> Result<Command> {
    let path = find_program(name)
        .with_context(|| format!("{name} is not installed; run `cargo xtask setup`"))?;
    Ok(Command::new(path))
}

fn is_executable(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    path.metadata()
        .is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
}

/// Runs a command that talks to the terminal itself; fails unless it exits with 0.
pub fn run(command: &mut Command) -> Result<()> {
    let status = spawn(command)?.wait()?;
    if !status.success() {
        bail!("{} ended with {status}", shown(command));
    }
    Ok(())
}

/// Starts a command that ends with this program.
pub fn spawn(command: &mut Command) -> Result<Child> {
    spawn_piped(command.stdin(Stdio::null()))
}

/// As [`spawn`], with the standard input that the command was given.
pub fn spawn_piped(command: &mut Command) -> Result<Child> {
    end_with_parent(command);
    command
        .spawn()
        .with_context(|| format!("cannot run {}", shown(command)))
}

/// Runs a command, fails unless it exits with 0, and returns what it printed.
pub fn output(command: &mut Command) -> Result<String> {
    let output = capture(command)?;
    if !output.status.success() {
        bail!(
            "{} ended with {}{}",
            shown(command),
            output.status,
            complaint(&output)
        );
    }
    String::from_utf8(output.stdout)
        .with_context(|| format!("{} printed something that is not text", shown(command)))
}

/// Runs a command and returns everything about its end, whatever it is.
pub fn capture(command: &mut Command) -> Result<Output> {
    end_with_parent(command);
    command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {}", shown(command)))
}

/// The last words of a failed command, for an error message.
fn complaint(output: &Output) -> String {
    let both = [&output.stdout[..], &output.stderr[..]].concat();
    let text = String::from_utf8_lossy(&both);
    let lines: Vec<&str> = text.lines().collect();
    let tail = &lines[lines.len().saturating_sub(12)..];
    tail.iter().map(|line| format!("\n    {line}")).collect()
}

/// The command as a person would type it.
pub fn shown(command: &Command) -> String {
    let name = Path::new(command.get_program())
        .file_name()
        .unwrap_or(command.get_program());
    std::iter::once(name)
        .chain(command.get_args())
        .map(|word| quoted(&word.to_string_lossy()))
        .collect::<Vec<_>>()
        .join(" ")
}

fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=+,./:%@".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// Has the kernel end the child when this program dies, however it dies.
fn end_with_parent(command: &mut Command) {
    let hook = || {
        // SAFETY: prctl with PR_SET_PDEATHSIG only sets a field of the calling process.
        let result = unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) };
        if result == 0 {
            Ok(())
        } else {
            Err(std::io::Error::last_os_error())
        }
    };
    // SAFETY: the hook makes one async-signal-safe system call and allocates nothing.
    unsafe { command.pre_exec(hook) };
}

/// A server that runs until it is stopped, and never longer than this value lives.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    shown: String,
    log: PathBuf,
}

impl Daemon {
    /// Starts a command whose output goes to `log`.
    pub fn start(command: &mut Command, log: &Path) -> Result<Self> {
        Self::start_with(command.stdin(Stdio::null()), log)
    }

    /// As [`Daemon::start`], of one that is told something on its standard input.
    pub fn start_listening(command: &mut Command, log: &Path) -> Result<Self> {
        Self::start_with(command.stdin(Stdio::piped()), log)
    }

    fn start_with(command: &mut Command, log: &Path) -> Result<Self> {
        let file = std::fs::File::create(log)
            .with_context(|| format!("cannot create {}", log.display()))?;
        let child = spawn_piped(command.stdout(file.try_clone()?).stderr(file))?;
        Ok(Self {
            child,
            shown: shown(command),
            log: log.to_owned(),
        })
    }

    /// Waits until the server accepts connections on a unix socket.
    pub fn wait_for_socket(&mut self, socket: &str, limit: Duration) -> Result<()> {
        self.wait_until(limit, || UnixStream::connect(socket).is_ok())
    }

    /// Waits until the server has written its pidfile, which it does once everything that its command line
    /// asks for is there. A monitor's socket accepts connections before that, and `qemu-storage-daemon`
    /// 10.0 then sometimes never answers, or crashes.
    pub fn wait_for_pidfile(&mut self, pidfile: &Path, limit: Duration) -> Result<()> {
        self.wait_for_file(pidfile, limit)
    }

    /// Waits until a file or socket exists. A server of one client at a time takes whoever connects for that
    /// client, so nobody connects to see whether it listens.
    pub fn wait_for_file(&mut self, path: &Path, limit: Duration) -> Result<()> {
        self.wait_until(limit, || path.exists())
    }

    fn wait_until(&mut self, limit: Duration, is_ready: impl Fn() -> bool) -> Result<()> {
        let deadline = Instant::now() + limit;
        while !is_ready() {
            if let Some(status) = self.child.try_wait()? {
                bail!("{} ended with {status}{}", self.shown, self.last_words());
            }
            if Instant::now() > deadline {
                bail!("{} does not start{}", self.shown, self.last_words());
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Tells the program a line on its standard input.
    pub fn say(&mut self, line: &str) -> Result<()> {
        let input = self.child.stdin.as_mut();
        let input = input.with_context(|| format!("{} does not listen", self.shown))?;
        writeln!(input, "{line}")?;
        Ok(input.flush()?)
    }

    /// The process's number.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Processor time of all its threads so far, in seconds.
    pub fn cpu_seconds(&self) -> Result<f64> {
        let mut clock = 0;
        // SAFETY: it writes a number to where the reference points.
        let failed = unsafe { libc::clock_getcpuclockid(self.pid().cast_signed(), &raw mut clock) };
        ensure!(failed == 0, "the server has no clock: error {failed}");
        let mut time = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: as above; the clock is that of a child that was not waited for.
        let failed = unsafe { libc::clock_gettime(clock, &raw mut time) };
        ensure!(failed == 0, "{}", std::io::Error::last_os_error());
        Ok(time.tv_sec as f64 + time.tv_nsec as f64 / 1e9)
    }

    /// Whether it is there no more.
    pub fn has_ended(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_some())
    }

    /// Ends it at once (SIGKILL); fails if it has ended before.
    pub fn kill(mut self) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            bail!("{} ended with {status}{}", self.shown, self.last_words());
        }
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// The most memory that the server has had in use so far, in bytes.
    pub fn peak_memory_bytes(&self) -> Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let kib = status
            .lines()
            .find_map(|line| line.strip_prefix("VmHWM:"))
            .and_then(|rest| rest.trim().strip_suffix("kB"))
            .and_then(|number| number.trim().parse::<u64>().ok())
            .context("/proc tells no VmHWM")?;
        Ok(kib * 1024)
    }

    /// Asks the server to end and fails unless it does so in time and with success.
    pub fn stop(self) -> Result<()> {
        self.signal(libc::SIGTERM);
        self.wait(STOP_LIMIT)
    }

    /// Waits until the program ends by itself and fails unless it does so in time and with success.
    pub fn wait(mut self, limit: Duration) -> Result<()> {
        let deadline = Instant::now() + limit;
        while Instant::now() < deadline {
            if let Some(status) = self.child.try_wait()? {
                if !status.success() {
                    bail!("{} ended with {status}{}", self.shown, self.last_words());
                }
                return Ok(());
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        bail!("{} did not end in {} s", self.shown, limit.as_secs())
    }

    fn signal(&self, signal: libc::c_int) {
        let pid = self.child.id().cast_signed();
        // SAFETY: kill has no memory effects; the pid is our unreaped child's, so it names no other process.
        unsafe { libc::kill(pid, signal) };
    }

    /// What it has said.
    pub fn last_words(&self) -> String {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        text.lines().map(|line| format!("\n    {line}")).collect()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // After a successful `stop` the child is reaped and both calls do nothing.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An absolute path that is short enough for a socket, however deep its folder
/// lies. It holds for this process and its children while this value lives.
#[derive(Debug)]
pub struct ShortPath {
    path: String,
    _folder: std::fs::File,
}

impl ShortPath {
    /// A name for `folder`/`name`.
    pub fn new(folder: &Path, name: &str) -> Result<Self> {
        let folder = std::fs::File::open(folder)?;
        let (process, descriptor) = (std::process::id(), folder.as_raw_fd());
        Ok(Self {
            path: format!("/proc/{process}/fd/{descriptor}/{name}"),
            _folder: folder,
        })
    }

    /// The name.
    pub fn path(&self) -> &str {
        &self.path
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_tells_the_command_and_its_last_words() {
        let error = output(Command::new("sh").args(["-c", "echo 'no such disk' >&2; exit 3"]))
            .expect_err("it exits with 3");
        let text = error.to_string();
        assert!(text.starts_with("sh -c 'echo '\\''no such disk"), "{text}");
        assert!(text.contains("exit status: 3"), "{text}");
        assert!(text.ends_with("\n    no such disk"), "{text}");
    }

    #[test]
    fn a_dropped_daemon_is_gone() -> Result<()> {
        let folder = tempfile::tempdir()?;
        let daemon = Daemon::start(
            Command::new("sleep").arg("60"),
            &folder.path().join("sleep.log"),
        )?;
        let proc_folder = PathBuf::from(format!("/proc/{}", daemon.child.id()));
        assert!(proc_folder.exists());
        drop(daemon);
        assert!(!proc_folder.exists());
        Ok(())
    }

    #[test]
    fn a_daemon_that_dies_early_is_reported_with_its_log() -> Result<()> {
        let folder = tempfile::tempdir()?;
        let mut daemon = Daemon::start(
            Command::new("sh").args(["-c", "echo broken; exit 1"]),
            &folder.path().join("log"),
        )?;
        let error = daemon
            .wait_for_socket("/nonexistent/socket", Duration::from_secs(10))
            .expect_err("nothing listens");
        assert!(error.to_string().ends_with("\n    broken"), "{error}");
        Ok(())
    }
}

//! The program `ssh`: how it is called, and what it has to say.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::NamedTempFile;
use vellum_io::{Error, ErrorKind, Result};

use super::options::{HostKeyCheck, SshOptions};

pub(super) const PROGRAM: &str = "ssh";
/// The program asks a server that is silent, and gives it up at the third time.
const ALIVE_SECONDS: u64 = 10;
/// So much of what the program has said is told.
const MOST_SAID_BYTES: u64 = 4096;

/// A program that has nothing to write to may still have something to say.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// A running `ssh`, with the subsystem of the server that speaks SFTP behind it.
#[derive(Debug)]
pub(super) struct Program {
    pub(super) child: Child,
    said: File,
    /// Lists the one key that is believed; while the program runs.
    _keys: Option<NamedTempFile>,
}

/// The program with what is the same for all its uses here.
pub(super) fn command(options: &SshOptions) -> Command {
    let mut command = Command::new(PROGRAM);
    let seconds = options.timeout.as_secs().max(1);
    let mut set = |option: String| {
        command.arg("-o").arg(option);
    };
    // It asks nobody anything: there may be no terminal, and the file behind it is an image.
    set("BatchMode=yes".to_owned());
    set(format!("ConnectTimeout={seconds}"));
    set(format!("ServerAliveInterval={ALIVE_SECONDS}"));
    set("ForwardX11=no".to_owned());
    set("ForwardAgent=no".to_owned());
    set("PermitLocalCommand=no".to_owned());
    set("ClearAllForwardings=yes".to_owned());
    set("ControlMaster=no".to_owned());
    if let Some(port) = options.port {
        command.arg("-p").arg(port.to_string());
    }
    if let Some(user) = &options.user {
        command.arg("-l").arg(user);
    }
    // A signal from the terminal is for us, who end it.
    command.process_group(0);
    command
}

/// Adds whom to believe: the keys in one file, and no others.
pub(super) fn believe(command: &mut Command, strict: &str, keys: &str) {
    for option in [
        format!("StrictHostKeyChecking={strict}"),
        format!("UserKnownHostsFile={keys}"),
        "GlobalKnownHostsFile=/dev/null".to_owned(),
        "VerifyHostKeyDNS=no".to_owned(),
        "UpdateHostKeys=no".to_owned(),
        // One that runs already may have believed somebody else.
        "ControlPath=none".to_owned(),
        // What would be said of keys that are new there.
        "LogLevel=ERROR".to_owned(),
    ] {
        command.arg("-o").arg(option);
    }
}

/// That there is no `ssh`.
pub(super) fn not_started(error: &std::io::Error) -> Error {
    let message = match error.kind() {
        std::io::ErrorKind::NotFound => {
            "files by ssh need the program 'ssh': install the package 'openssh-client'".to_owned()
        }
        _ => format!("cannot start 'ssh': {}", vellum_io::error::io_text(error)),
    };
    Error::new(ErrorKind::Unsupported, "open", message)
}

impl Program {
    /// Begins a session with the server.
    pub(super) fn start(options: &SshOptions, keys: Option<NamedTempFile>) -> Result<Program> {
        let mut command = command(options);
        match (&options.host_key_check, &keys) {
            (HostKeyCheck::None, _) => believe(&mut command, "no", "/dev/null"),
            (_, Some(keys)) => believe(&mut command, "yes", &keys.path().display().to_string()),
            (_, None) => {
                command.args(["-o", "StrictHostKeyChecking=yes"]);
            }
        }
        command.args(["-s", "--"]).arg(&options.host).arg("sftp");
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let program = Self::spawn(command, keys)?;
        let child = &program.child;
        for pipe in [
            child.stdin.as_ref().map(std::os::fd::AsFd::as_fd),
            child.stdout.as_ref().map(std::os::fd::AsFd::as_fd),
        ] {
            // Larger ones only spare turns.
            let _ = pipe.map(|pipe| rustix::pipe::fcntl_setpipe_size(pipe, 1 << 20));
        }
        Ok(program)
    }

    pub(super) fn spawn(mut command: Command, keys: Option<NamedTempFile>) -> Result<Program> {
        let said = tempfile::tempfile().map_err(|error| Error::from_io("open", &error))?;
        let errors = said
            .try_clone()
            .map_err(|error| Error::from_io("open", &error))?;
        let child = command.stderr(errors).spawn();
        Ok(Program {
            child: child.map_err(|error| not_started(&error))?,
            said,
            _keys: keys,
        })
    }

    /// Waits a little for the program to end, ends it, and says why it has ended, if it has said so.
    pub(super) fn end(&mut self) -> Option<Error> {
        let until = Instant::now() + LAST_WORDS;
        while !self.has_ended() && Instant::now() < until {
            std::thread::sleep(LAST_WORDS / 50);
        }
        explained(&self.kill())
    }

    pub(super) fn has_ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// Ends the program; what it has said.
    pub(super) fn kill(&mut self) -> String {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let mut said = String::new();
        let _ = self.said.seek(SeekFrom::Start(0));
        let _ = (&self.said).take(MOST_SAID_BYTES).read_to_string(&mut said);
        said
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What the program has said, and what users can do.
pub(super) fn explained(said: &str) -> Option<Error> {
    let lines: Vec<&str> = said
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect();
    // The reason stands at the end; before it there may be whatever the server greets with.
    let told = lines[lines.len().saturating_sub(2)..].join("; ");
    if told.is_empty() {
        return None;
    }
    let has = |part: &str| said.contains(part);
    let (kind, hint) = if has("REMOTE HOST IDENTIFICATION HAS CHANGED") {
        let hint = "the key of the host is another one than ssh knows: somebody may listen in";
        (ErrorKind::PermissionDenied, hint)
    } else if has("Host key verification failed") || has("host key is known") {
        let hint = "connect once with 'ssh' to note the key, or see the option 'host-key-check'";
        (ErrorKind::PermissionDenied, hint)
    } else if has("Permission denied") || has("Too many authentication failures") {
        let hint = "no password is asked for: give ssh a key ('ssh-add', or IdentityFile in its \
                    configuration)";
        (ErrorKind::PermissionDenied, hint)
    } else if has("subsystem request failed") {
        let hint = "the server has no SFTP: 'Subsystem sftp' in its sshd_config";
        (ErrorKind::Unsupported, hint)
    } else {
        (ErrorKind::Io, "")
    };
    let told: String = told.chars().filter(|letter| !letter.is_control()).collect();
    let message = match hint {
        "" => format!("ssh: {told}"),
        hint => format!("ssh: {told} ({hint})"),
    };
    Some(Error::new(kind, "open", message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ssh_says_is_told_with_what_to_do() {
        let error = explained("Welcome!\nssh: connect to host h port 22: Connection refused\n");
        assert!(
            error
                .unwrap()
                .message()
                .ends_with("port 22: Connection refused")
        );
        let error = explained("me@h: Permission denied (publickey).\r\n").unwrap();
        assert_eq!(error.kind(), ErrorKind::PermissionDenied);
        assert!(error.message().contains("ssh-add"), "{error}");
        assert!(explained(" \n").is_none());
    }
}

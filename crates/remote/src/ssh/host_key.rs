//! Hosts that are known by the hash of their key.
//!
//! `ssh` itself knows no such thing. So the host is first asked for its key, without showing it
//! anything; the key's hash is compared, and then `ssh` connects, believing that key alone: nobody
//! can take the host's place between the two.

use std::io::Read;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use base64::Engine;
use tempfile::NamedTempFile;
use vellum_io::{Error, ErrorKind, Result};

use super::options::{HashKind, SshOptions};
use super::program::{self, Program};

/// How often it is looked whether the program has ended.
const TURN: Duration = Duration::from_millis(10);

impl HashKind {
    fn name(self) -> &'static str {
        match self {
            HashKind::Md5 => "md5",
            HashKind::Sha1 => "sha1",
            HashKind::Sha256 => "sha256",
        }
    }

    fn digits(self) -> usize {
        match self {
            HashKind::Md5 => 32,
            HashKind::Sha1 => 40,
            HashKind::Sha256 => 64,
        }
    }
}

/// The key of the host in a file as `ssh` wants it, if it has the hash.
pub(super) fn fetch(options: &SshOptions, kind: HashKind, wanted: &str) -> Result<NamedTempFile> {
    let io = |error: std::io::Error| Error::from_io("open", &error);
    let keys = NamedTempFile::new().map_err(io)?;
    let path = keys.path().display().to_string();
    let mut command = program::command(options);
    program::believe(&mut command, "accept-new", &path);
    command.args([
        "-o",
        "PreferredAuthentications=none",
        "-o",
        "HashKnownHosts=no",
    ]);
    command.arg("--").arg(&options.host).arg("true");
    command.stdin(Stdio::null()).stdout(Stdio::null());
    let mut running = Program::spawn(command, None)?;
    let until = Instant::now() + options.timeout;
    while !running.has_ended() && Instant::now() < until {
        std::thread::sleep(TURN);
    }
    let said = running.kill();
    let mut noted = String::new();
    let _ = keys
        .reopen()
        .map_err(io)?
        .take(1 << 20)
        .read_to_string(&mut noted);
    if noted.trim().is_empty() {
        return Err(program::explained(&said).unwrap_or_else(|| {
            let message = "the host has shown no key in time (option 'timeout')";
            Error::new(ErrorKind::Io, "open", message)
        }));
    }
    let found = hashes(&path, kind)?;
    let wanted = plain(wanted);
    if wanted.len() != kind.digits() || !found.contains(&wanted) {
        let message = format!(
            "remote host key fingerprint '{}:{}' does not match host_key_check '{}:{wanted}'",
            kind.name(),
            found.join(" "),
            kind.name()
        );
        return Err(Error::new(ErrorKind::PermissionDenied, "open", message));
    }
    Ok(keys)
}

/// Lower-case digits without what may stand between them.
fn plain(hash: &str) -> String {
    let digits = hash.chars().filter(|&letter| letter != ':');
    digits.map(|letter| letter.to_ascii_lowercase()).collect()
}

/// The hashes of the keys in a file.
fn hashes(path: &str, kind: HashKind) -> Result<Vec<String>> {
    let done = Command::new("ssh-keygen")
        .args(["-l", "-E", kind.name(), "-f", path])
        .stdin(Stdio::null())
        .output();
    let done = done.map_err(|error| program::not_started(&error))?;
    let said = String::from_utf8_lossy(&done.stdout);
    // `256 SHA256:BASE64 HOST (ED25519)`
    let hashes = said.lines().filter_map(|line| {
        let (name, hash) = line.split_whitespace().nth(1)?.split_once(':')?;
        match name {
            "MD5" => Some(plain(hash)),
            _ => {
                let bytes = base64::engine::general_purpose::STANDARD_NO_PAD
                    .decode(hash)
                    .ok()?;
                Some(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
            }
        }
    });
    Ok(hashes.collect())
}

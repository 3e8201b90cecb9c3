//! The command line of `vellum ctl`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::action::{Action, Care, NewFile, Show, escaped};
use super::address::Address;
use crate::getopt::UsageError;
use crate::output::Output;
use crate::size;
use crate::spec::Spec;

/// Says where the daemon is, where `--connect` does not.
pub const VARIABLE: &str = "VELLUM_CTL";

pub const SPEC: Spec = Spec {
    name: "ctl",
    about: "Show and change what a running daemon serves",
    usage: "\
[OPTIONS] list|jobs|exports|nodes|stats|top|host
[OPTIONS] show|flush|commit|stream DISK
[OPTIONS] snapshot|mirror|backup DISK FILE
[OPTIONS] resize DISK SIZE
[OPTIONS] job pause|resume|complete|cancel|dismiss|finalize ID
[OPTIONS] job speed ID SIZE
[OPTIONS] unexport ID
[OPTIONS] qmp COMMAND [JSON]
",
    explains: "\
Shows and changes what a running `vellum daemon --metrics ADDRESS` serves: disks with their
layers, exports, jobs. It speaks the daemon's HTTP interface, of which /openapi.json has all;
what no command here does, 'qmp' does.
",
    arguments: &["  -h, --help
  -c, --connect ADDRESS     where the daemon listens: unix:PATH or [https://]HOST:PORT (VELLUM_CTL)
  --token-file FILE         a file with the token that the daemon asks for
  --tls DIR                 ca-cert.pem, client-cert.pem and client-key.pem for https:// (the system's trust)
  --output FORMAT           human or json: what the daemon has answered, for programs
  -f, --format FMT          the format of the new file (snapshot, mirror, backup)
  --sync full|top|none      what is copied (mirror, backup; full)
  --speed SIZE              most bytes a second (mirror, backup, commit, stream, compact, chain)
  --job-id ID               the job's name (mirror, backup, commit, stream, compact)
  --node-name NAME          the name of the new overlay (snapshot; that of its file)
  -b, --base NODE           the node of the image that is written to (commit; 'show' lists them)
  -i, --interval SECONDS    how often top looks (2)
  -n, --count NUMBER        how often top looks in all
  --force                   end an export that is in use (unexport)
  --max-layers N            so many images at most, with the lowest (chain)
  --max-overlay-bytes SIZE  so much at most in overlays of the disk's image (chain)
  --shrink                  give up what is behind a smaller size (resize)
  --timeout SECONDS         how long an answer is waited for (60; 0: for ever)
  --overwrite               give up what the new file holds (snapshot, mirror, backup)
  --wait                    wait until the job has ended, and fail as it does (backup, stream)
"],
    examples: "\
export VELLUM_CTL=unix:/run/vellum.sock
  where the daemon was told to listen: --metrics unix:/run/vellum.sock
vellum ctl list
  the disks that it serves
vellum ctl snapshot disk overlay.qcow2
  what is written from now on goes to a new image
vellum ctl backup disk /backup/disk.qcow2 --speed 50M
  a copy of the disk as it is now, at 50 MiB a second
vellum ctl backup disk /backup/disk.qcow2 --overwrite --wait
  the same every night, over the one of the night before; it fails if the job does
vellum ctl top -i 1
  what each disk is asked for, looked at every second
vellum ctl qmp query-block-jobs
  whatever QMP can tell
",
    ..Spec::EMPTY
};

/// The commands, with what they take and what they do.
pub const COMMANDS: &[(&str, &str, &str)] = &[
    ("list", "", "the disks"),
    (
        "show",
        "DISK",
        "a disk: its layers, exports, jobs and what was asked of it",
    ),
    (
        "snapshot",
        "DISK FILE",
        "put a new overlay on a disk; what it was stays below",
    ),
    ("resize", "DISK SIZE", "make a disk larger or smaller"),
    ("flush", "DISK", "make durable what was written to a disk"),
    (
        "mirror",
        "DISK FILE",
        "copy a disk, and go on with the copy once the job is completed",
    ),
    ("backup", "DISK FILE", "copy a disk as it is now"),
    (
        "commit",
        "DISK --base NODE",
        "write the layers above an image into that image",
    ),
    (
        "stream",
        "DISK",
        "copy what lies in layers below into the disk's own image",
    ),
    (
        "compact",
        "DISK",
        "make a disk's file as short as what is allocated in it",
    ),
    (
        "space",
        "[DISK]",
        "where the space of a disk goes, or what all of them take",
    ),
    (
        "chain",
        "DISK",
        "keep a disk's chain within --max-layers or --max-overlay-bytes; neither: as it is",
    ),
    (
        "chains",
        "",
        "what chains may be, and how it stands with them",
    ),
    ("jobs", "", "the jobs"),
    (
        "job",
        "pause|resume|complete|cancel|dismiss|finalize ID",
        "lead a job",
    ),
    (
        "job speed",
        "ID SIZE",
        "limit a job to so many bytes a second; 0: no limit",
    ),
    ("exports", "", "the exports"),
    ("unexport", "ID", "end an export"),
    ("nodes", "", "the nodes, with those that disks stand on"),
    ("stats", "", "what was asked of each disk so far"),
    ("top", "", "what is asked of each disk now, again and again"),
    (
        "host",
        "",
        "the daemon, and the file systems below the images",
    ),
    (
        "qmp",
        "COMMAND [JSON]",
        "any QMP command; JSON are its arguments",
    ),
];

/// What may be done with a job.
pub const JOB_ACTIONS: [&str; 6] = [
    "pause", "resume", "complete", "cancel", "dismiss", "finalize",
];

/// The command line, taken apart.
#[derive(Debug)]
pub struct Arguments {
    pub address: Option<Address>,
    pub token_file: Option<PathBuf>,
    pub tls: Option<PathBuf>,
    pub output: Output,
    pub interval: Duration,
    pub count: Option<u64>,
    pub timeout: Option<Duration>,
    pub action: Option<Action>,
}

/// What belongs to some commands only.
#[derive(Debug, Default)]
struct Extra {
    format: Option<String>,
    sync: Option<String>,
    speed: Option<u64>,
    job_id: Option<String>,
    node_name: Option<String>,
    base: Option<String>,
    force: bool,
    shrink: bool,
    max_layers: Option<u64>,
    max_overlay_bytes: Option<u64>,
    overwrite: bool,
    wait: bool,
}

const DEFAULT_INTERVAL: Duration = Duration::from_secs(2);
/// No command takes so long; what does is a job.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);

impl Arguments {
    /// Understands the command line, or says why not.
    pub fn parse(words: Vec<OsString>) -> Result<Arguments, UsageError> {
        let mut arguments = Arguments {
            address: None,
            token_file: None,
            tls: None,
            output: Output::default(),
            interval: DEFAULT_INTERVAL,
            count: None,
            timeout: Some(DEFAULT_TIMEOUT),
            action: None,
        };
        let mut extra = Extra::default();
        let common = SPEC.parse(words, |name, value| arguments.take(name, value, &mut extra))?;
        (arguments.output, extra.format) = (common.output, common.format);
        let words: Vec<&str> = common.operands.iter().map(String::as_str).collect();
        arguments.action = Some(action(&words, extra)?);
        Ok(arguments)
    }

    fn take(&mut self, name: &str, value: String, extra: &mut Extra) -> Result<(), UsageError> {
        match name {
            "connect" => self.address = Some(Address::parse(&value)?),
            "token-file" => self.token_file = Some(value.into()),
            "tls" => self.tls = Some(value.into()),
            "sync" => extra.sync = Some(value),
            "speed" => extra.speed = Some(bytes("--speed", &value)?),
            "job-id" => extra.job_id = Some(value),
            "node-name" => extra.node_name = Some(value),
            "base" => extra.base = Some(value),
            "interval" => self.interval = interval(&value)?,
            "count" => {
                let count = value.parse().ok().filter(|count| *count > 0);
                let why = || format!("--count is a number above 0, not '{value}'");
                self.count = Some(count.ok_or_else(why)?);
            }
            "force" => extra.force = true,
            "shrink" => extra.shrink = true,
            "max-layers" => {
                let count = value.parse().ok().filter(|count| *count > 0);
                let why = || format!("--max-layers is a number above 0, not '{value}'");
                extra.max_layers = Some(count.ok_or_else(why)?);
            }
            "max-overlay-bytes" => {
                extra.max_overlay_bytes = Some(bytes("--max-overlay-bytes", &value)?);
            }
            "timeout" => self.timeout = limit(&value)?,
            "overwrite" => extra.overwrite = true,
            "wait" => extra.wait = true,
            _ => return Err(UsageError::not_taken(name)),
        }
        Ok(())
    }
}

fn bytes(what: &str, text: &str) -> Result<u64, String> {
    size::parse(text).map_err(|_| format!("{what} is a size such as 10M, not '{text}'"))
}

fn interval(text: &str) -> Result<Duration, String> {
    let seconds: Option<f64> = text
        .parse()
        .ok()
        .filter(|seconds| (0.1..=3600.0).contains(seconds));
    let why = || format!("--interval is 0.1 to 3600 seconds, not '{text}'");
    Ok(Duration::from_secs_f64(seconds.ok_or_else(why)?))
}

fn limit(text: &str) -> Result<Option<Duration>, String> {
    let seconds: Option<f64> = text.parse().ok();
    let seconds = seconds.filter(|seconds| (0.0..=1e9).contains(seconds));
    let why = || format!("--timeout is a number of seconds, not '{text}'");
    let seconds = seconds.ok_or_else(why)?;
    Ok((seconds > 0.0).then(|| Duration::from_secs_f64(seconds)))
}

/// The name of an overlay's node, where none is said: that of its file without what is behind the
/// last dot.
fn named_after(file: &str) -> Option<String> {
    let stem = Path::new(file).file_stem()?.to_str()?;
    let is_allowed = |letter: char| letter.is_ascii_alphanumeric() || "-._".contains(letter);
    let is_name = stem.starts_with(|first: char| first.is_ascii_alphabetic());
    (is_name && stem.len() < 32 && stem.chars().all(is_allowed)).then(|| stem.to_owned())
}

/// What the words ask for.
fn action(words: &[&str], extra: Extra) -> Result<Action, String> {
    let action = match words {
        ["list"] => Action::get("/v1/disks", Show::Disks),
        ["show", disk] => Action::get(format!("/v1/disks/{}", escaped(disk)), Show::Disk),
        ["space"] => Action::get("/v1/disks", Show::SpaceOfAll),
        ["space", disk] => Action::get(format!("/v1/disks/{}/space", escaped(disk)), Show::Space),
        ["chains"] => Action::get("/v1/chains", Show::Chains),
        ["chain", disk] => {
            let mut body = json!({});
            for (key, value) in [
                ("max-layers", extra.max_layers),
                ("max-overlay-bytes", extra.max_overlay_bytes),
                ("speed", extra.speed),
            ] {
                if let Some(value) = value {
                    body[key] = json!(value);
                }
            }
            Action::change(disk, "chain", body)
        }
        ["jobs"] => Action::get("/v1/stats", Show::Jobs),
        ["exports"] => Action::get("/v1/exports", Show::Exports),
        ["nodes"] => Action::get("/v1/nodes", Show::Nodes),
        ["stats"] => Action::get("/v1/stats", Show::Stats),
        ["host"] => Action::get("/v1/host", Show::Host),
        ["top"] => Action::Top,
        ["snapshot", disk, file] => {
            let file = extra.new_file(file)?;
            let mut body = json!({"snapshot-file": file.name});
            set(&mut body, "format", &extra.format);
            let name = extra.node_name.or_else(|| named_after(&file.name));
            set(&mut body, "snapshot-node-name", &name);
            Action::change(disk, "snapshot", body).making(file)
        }
        ["resize", disk, size] => Action::resize(disk, bytes("SIZE", size)?, extra.shrink),
        ["flush", disk] => Action::change(disk, "flush", json!({})),
        [verb @ ("mirror" | "backup"), disk, file] => {
            let file = extra.new_file(file)?;
            let mut body = json!({"target": file.name});
            set(&mut body, "format", &extra.format);
            set(&mut body, "sync", &extra.sync);
            extra.job(disk, verb, body)?.making(file)
        }
        ["commit", disk] => {
            let base = extra.base.as_deref().ok_or_else(|| no_base(disk))?;
            extra.job(disk, "commit", json!({"base-node": base}))?
        }
        [verb @ ("stream" | "compact"), disk] => extra.job(disk, verb, json!({}))?,
        ["job", "speed", id, speed] => {
            let body = json!({"speed": bytes("SIZE", speed)?});
            Action::post(format!("/v1/jobs/{}/speed", escaped(id)), body)
        }
        ["job", verb, id] if JOB_ACTIONS.contains(verb) => {
            Action::post(format!("/v1/jobs/{}/{verb}", escaped(id)), json!({}))
        }
        ["unexport", id] => {
            let mode = if extra.force { "?mode=hard" } else { "" };
            Action::delete(format!("/v1/exports/{}{mode}", escaped(id)))
        }
        ["qmp", command] => qmp(command, "{}")?,
        ["qmp", command, arguments] => qmp(command, arguments)?,
        [] => return Err("Expecting a command: list, show, jobs, top and others".to_owned()),
        [first, ..] => return Err(expecting(first)),
    };
    Ok(action)
}

/// The refusal of a commit that does not say what it changes.
fn no_base(disk: &str) -> String {
    format!(
        "A commit changes the image that it writes into, and all that stand on that: name the image's \
         node with --base ('ctl show {disk}' lists the layers)"
    )
}

fn qmp(command: &str, arguments: &str) -> Result<Action, String> {
    let arguments: Map<String, Value> = serde_json::from_str(arguments)
        .map_err(|why| format!("The arguments of '{command}' are no JSON object: {why}"))?;
    let path = format!("/v1/qmp/{}", escaped(command));
    Ok(Action::Ask {
        method: "POST",
        path,
        body: Some(Value::Object(arguments)),
        show: Show::Json,
        care: Care::default(),
    })
}

/// What a command that was not understood takes.
fn expecting(first: &str) -> String {
    let known = COMMANDS
        .iter()
        .filter(|(name, ..)| name.split(' ').next() == Some(first));
    let calls: Vec<String> = known
        .map(|(name, takes, _)| format!("{name} {takes}").trim_end().to_owned())
        .collect();
    match calls.is_empty() {
        true => format!("'{first}' is no command of ctl"),
        false => format!("Expecting {}", calls.join(" or ")),
    }
}

impl Extra {
    /// What begins a job of a disk.
    fn job(&self, disk: &str, verb: &str, mut body: Value) -> Result<Action, String> {
        set(&mut body, "job-id", &self.job_id);
        if let Some(speed) = self.speed {
            body["speed"] = json!(speed);
        }
        if !self.wait {
            return Ok(Action::change(disk, verb, body));
        }
        if !matches!(verb, "backup" | "stream") {
            return Err(format!(
                "--wait is for jobs that end by themselves, which a {verb} need not: look for it with 'jobs'"
            ));
        }
        let id = self.job_id.clone().unwrap_or_else(|| job_name(verb, disk));
        body["job-id"] = json!(id);
        // Its result is kept until it has been asked for.
        body["auto-dismiss"] = json!(false);
        Ok(Action::change(disk, verb, body).waiting_for(id))
    }

    fn new_file(&self, file: &str) -> Result<NewFile, String> {
        Ok(NewFile {
            name: absolute(file)?,
            may_be_there: self.overwrite,
        })
    }
}

/// The name of a job that was given none, as the daemon has it.
fn job_name(verb: &str, disk: &str) -> String {
    let fits = |letter: char| letter.is_ascii_alphanumeric() || "-._".contains(letter);
    let letters = disk
        .chars()
        .map(|letter| if fits(letter) { letter } else { '_' });
    format!("{verb}-{}", letters.collect::<String>())
}

fn set(body: &mut Value, key: &str, value: &Option<String>) {
    if let Some(value) = value {
        body[key] = json!(value);
    }
}

/// A file as the daemon finds it, which may run in another folder.
fn absolute(file: &str) -> Result<String, String> {
    // Names that are no paths are as they are.
    if file.contains("://") || file.starts_with("json:") {
        return Ok(file.to_owned());
    }
    let path = std::path::absolute(file).map_err(|why| format!("'{file}' is no path: {why}"))?;
    let path = path.into_os_string().into_string();
    path.map_err(|_| format!("'{file}' lies in a folder whose name is not UTF-8"))
}

/// What `--help` prints.
pub fn help(program: &str) -> String {
    let commands = COMMANDS.iter().map(|(name, takes, about)| {
        let call = format!("{name} {takes}");
        format!(
            "  {}\n                            {about}\n",
            call.trim_end()
        )
    });
    format!(
        "Usage: {program} ctl [OPTIONS] COMMAND [ARGUMENTS]\n\n{}\nCommands:\n{}\nOptions:\n{}{}",
        SPEC.explains,
        commands.collect::<String>(),
        SPEC.arguments.concat(),
        SPEC.examples_text()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asks(line: &str) -> (String, String, Value) {
        let words = line.split_whitespace().map(OsString::from).collect();
        match Arguments::parse(words).expect(line).action {
            Some(Action::Ask {
                method, path, body, ..
            }) => (method.to_owned(), path, body.unwrap_or_default()),
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn commands_are_requests() {
        for (line, method, path, body) in [
            ("list", "GET", "/v1/disks", Value::Null),
            ("show #block1", "GET", "/v1/disks/%23block1", Value::Null),
            (
                "resize d 1M",
                "POST",
                "/v1/disks/d/resize",
                json!({"size": 1 << 20}),
            ),
            (
                "mirror d /t --speed 1k --job-id j -f raw --sync top",
                "POST",
                "/v1/disks/d/mirror",
                json!({"target": "/t", "format": "raw", "sync": "top", "job-id": "j", "speed": 1024}),
            ),
            (
                "snapshot d /o --node-name n",
                "POST",
                "/v1/disks/d/snapshot",
                json!({"snapshot-file": "/o", "snapshot-node-name": "n"}),
            ),
            (
                "snapshot d /images/monday.qcow2",
                "POST",
                "/v1/disks/d/snapshot",
                json!({"snapshot-file": "/images/monday.qcow2", "snapshot-node-name": "monday"}),
            ),
            (
                "snapshot d /9",
                "POST",
                "/v1/disks/d/snapshot",
                json!({"snapshot-file": "/9"}),
            ),
            (
                "backup #b /t --wait",
                "POST",
                "/v1/disks/%23b/backup",
                json!({"target": "/t", "job-id": "backup-_b", "auto-dismiss": false}),
            ),
            (
                "commit d --base golden --speed 1k",
                "POST",
                "/v1/disks/d/commit",
                json!({"base-node": "golden", "speed": 1024}),
            ),
            ("job pause j", "POST", "/v1/jobs/j/pause", json!({})),
            (
                "job speed j 0",
                "POST",
                "/v1/jobs/j/speed",
                json!({"speed": 0}),
            ),
            (
                "unexport e --force",
                "DELETE",
                "/v1/exports/e?mode=hard",
                Value::Null,
            ),
            ("qmp quit", "POST", "/v1/qmp/quit", json!({})),
            ("qmp x {\"a\":1}", "POST", "/v1/qmp/x", json!({"a": 1})),
        ] {
            assert_eq!(
                asks(line),
                (method.to_owned(), path.to_owned(), body),
                "{line}"
            );
        }
    }

    #[test]
    fn what_is_not_understood_is_told() {
        for (line, part) in [
            ("commit d", "--base"),
            ("", "a command"),
            ("resize d", "resize DISK SIZE"),
            ("job d", "job speed ID SIZE"),
            ("frobnicate", "frobnicate"),
            ("list more", "Expecting list"),
            ("resize d x", "SIZE is a size"),
            ("top -i 0", "--interval"),
            ("top -n 0", "--count"),
            ("qmp x [1]", "JSON object"),
            ("list --output=xml", "xml"),
            ("list --connect nowhere", "nowhere"),
            ("list --timeout x", "--timeout"),
            ("list --timeout -1", "--timeout"),
            ("mirror d /t --wait", "--wait"),
        ] {
            let words = line.split_whitespace().map(OsString::from).collect();
            let why = Arguments::parse(words).expect_err(line).to_string();
            assert!(why.contains(part), "{line}: {why}");
        }
    }
}

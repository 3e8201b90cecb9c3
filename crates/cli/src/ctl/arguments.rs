//! The command line of `vellum ctl`: options, help and usage errors. `run` parses it once; `manual` and
//! the completions read the same tables.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::action::{Action, Care, NewFile, Show, escaped};
use super::address::Address;
use crate::getopt::{OptionSpec, Parser, Shape, Takes, shapes};
use crate::manual::pages::examples;
use crate::output::Output;
use crate::size;

/// Says where the daemon is, where `--connect` does not.
pub const VARIABLE: &str = "VELLUM_CTL";

#[derive(Debug, Clone, Copy)]
enum Opt {
    Help,
    Connect,
    TokenFile,
    Tls,
    Output,
    Format,
    Sync,
    Speed,
    JobId,
    NodeName,
    Base,
    Interval,
    Count,
    Force,
    Shrink,
    MaxLayers,
    MaxOverlayBytes,
    Timeout,
    Overwrite,
    Wait,
}

const OPTIONS: &[OptionSpec<Opt>] = &[
    OptionSpec::new(Opt::Help, 'h', "help", Takes::Nothing),
    OptionSpec::new(Opt::Connect, 'c', "connect", Takes::Value),
    OptionSpec::long(Opt::TokenFile, "token-file", Takes::Value),
    OptionSpec::long(Opt::Tls, "tls", Takes::Value),
    OptionSpec::long(Opt::Output, "output", Takes::Value),
    OptionSpec::new(Opt::Format, 'f', "format", Takes::Value),
    OptionSpec::long(Opt::Sync, "sync", Takes::Value),
    OptionSpec::long(Opt::Speed, "speed", Takes::Value),
    OptionSpec::long(Opt::JobId, "job-id", Takes::Value),
    OptionSpec::long(Opt::NodeName, "node-name", Takes::Value),
    OptionSpec::new(Opt::Base, 'b', "base", Takes::Value),
    OptionSpec::new(Opt::Interval, 'i', "interval", Takes::Value),
    OptionSpec::new(Opt::Count, 'n', "count", Takes::Value),
    OptionSpec::long(Opt::Force, "force", Takes::Nothing),
    OptionSpec::long(Opt::Shrink, "shrink", Takes::Nothing),
    OptionSpec::long(Opt::MaxLayers, "max-layers", Takes::Value),
    OptionSpec::long(Opt::MaxOverlayBytes, "max-overlay-bytes", Takes::Value),
    OptionSpec::long(Opt::Timeout, "timeout", Takes::Value),
    OptionSpec::long(Opt::Overwrite, "overwrite", Takes::Nothing),
    OptionSpec::long(Opt::Wait, "wait", Takes::Nothing),
];

/// The options, as completions and manuals show them.
pub fn options() -> Vec<Shape> {
    shapes(OPTIONS)
}

/// What the options mean.
pub const HELP: &str = "\
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
";

/// What the tool is for, in its help and manual.
pub const EXPLAINS: &str = "\
Shows and changes what a running `vellum daemon --metrics ADDRESS` serves: disks with their
layers, exports, jobs. It speaks the daemon's HTTP interface, of which /openapi.json has all;
what no command here does, 'qmp' does.
";

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
    pub help: bool,
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
    pub fn parse(words: Vec<OsString>) -> Result<Arguments, String> {
        let mut arguments = Arguments {
            help: false,
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
        let mut parser = Parser::new(OPTIONS, words);
        while let Some((option, value)) = parser.next_option().map_err(|e| e.to_string())? {
            arguments.take(option, value.unwrap_or_default(), &mut extra)?;
        }
        if arguments.help {
            return Ok(arguments);
        }
        let operands = parser.operands();
        let words: Vec<&str> = operands.iter().map(String::as_str).collect();
        arguments.action = Some(action(&words, extra)?);
        Ok(arguments)
    }

    fn take(&mut self, option: Opt, value: String, extra: &mut Extra) -> Result<(), String> {
        match option {
            Opt::Help => self.help = true,
            Opt::Connect => self.address = Some(Address::parse(&value)?),
            Opt::TokenFile => self.token_file = Some(value.into()),
            Opt::Tls => self.tls = Some(value.into()),
            Opt::Output => self.output = Output::parse(&value).map_err(|e| e.to_string())?,
            Opt::Format => extra.format = Some(value),
            Opt::Sync => extra.sync = Some(value),
            Opt::Speed => extra.speed = Some(bytes("--speed", &value)?),
            Opt::JobId => extra.job_id = Some(value),
            Opt::NodeName => extra.node_name = Some(value),
            Opt::Base => extra.base = Some(value),
            Opt::Interval => self.interval = interval(&value)?,
            Opt::Count => {
                let count = value.parse().ok().filter(|count| *count > 0);
                let why = || format!("--count is a number above 0, not '{value}'");
                self.count = Some(count.ok_or_else(why)?);
            }
            Opt::Force => extra.force = true,
            Opt::Shrink => extra.shrink = true,
            Opt::MaxLayers => {
                let count = value.parse().ok().filter(|count| *count > 0);
                let why = || format!("--max-layers is a number above 0, not '{value}'");
                extra.max_layers = Some(count.ok_or_else(why)?);
            }
            Opt::MaxOverlayBytes => {
                extra.max_overlay_bytes = Some(bytes("--max-overlay-bytes", &value)?);
            }
            Opt::Timeout => self.timeout = limit(&value)?,
            Opt::Overwrite => extra.overwrite = true,
            Opt::Wait => extra.wait = true,
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
        "Usage: {program} ctl [OPTIONS] COMMAND [ARGUMENTS]\n\n{EXPLAINS}\nCommands:\n{}\n\
         Options:\n  -h, --help\n{HELP}{}",
        commands.collect::<String>(),
        examples("ctl")
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
            let why = Arguments::parse(words).expect_err(line);
            assert!(why.contains(part), "{line}: {why}");
        }
    }
}

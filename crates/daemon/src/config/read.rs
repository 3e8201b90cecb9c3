//! [`Config`]: the file as a whole, and its sections but those of disks.

use std::collections::BTreeSet;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use serde_json::{Map, Value, json};
use toml::de::DeTable;
use vellum_graph::throttle_groups;
use vellum_options::size;

use super::disk;
use super::parts::{Part, PartKey, PartKind, Parts};
use super::place::{Mistake, Place, Source};
use super::section::{Entry, Section, meant};

/// A file that is longer is none of ours.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// A monitor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Monitor {
    /// The unix socket that it listens on.
    pub path: String,
    /// Where it stands in the file.
    pub place: Place,
}

/// A place where HTTP is served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listener {
    /// What `--metrics` takes: an address, and options behind it.
    pub address: String,
    /// Where it stands in the file.
    pub place: Place,
}

/// What becomes of the start where a part cannot be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnError {
    /// The daemon ends.
    #[default]
    Stop,
    /// It is told, and the others are served.
    Report,
}

/// A configuration.
#[derive(Debug, Clone, Default)]
pub struct Config {
    /// All parts.
    pub parts: Parts,
    /// Where clients of QMP come.
    pub monitors: Vec<Monitor>,
    /// Where HTTP is served, as `--metrics` says it.
    pub metrics: Vec<Listener>,
    /// What becomes of the start where a part cannot be made.
    pub on_error: OnError,
    /// How full file systems may be before there is a warning, in percent.
    pub space_warning_percent: Vec<u32>,
}

impl Config {
    /// Reads a file.
    ///
    /// # Errors
    /// If it cannot be read, and for the first thing in it that is wrong.
    pub fn read(path: &Path) -> Result<Config, Mistake> {
        let failed = |text: String| Mistake {
            path: path.to_owned(),
            place: None,
            text,
        };
        let text = || {
            let mut text = String::new();
            // A pipe without a writer would keep its reader for ever.
            let mut options = std::fs::File::options();
            let options = options.read(true).custom_flags(libc::O_NONBLOCK);
            let file = options.open(path)?;
            let kind = file.metadata()?.file_type();
            if !kind.is_file() && !kind.is_dir() {
                let why = "it is no regular file, which a reload could read again";
                return Err(std::io::Error::other(why));
            }
            file.take(MAX_FILE_BYTES + 1).read_to_string(&mut text)?;
            Ok(text)
        };
        let text = text().map_err(|error: std::io::Error| {
            failed(format!(
                "cannot read it: {}",
                vellum_io::error::io_text(&error)
            ))
        })?;
        if text.len() as u64 > MAX_FILE_BYTES {
            return Err(failed("this is too long to be a configuration".to_owned()));
        }
        Config::parse(&text, path)
    }

    /// Reads the text of a file, whose relative paths begin at the folder of `path`.
    ///
    /// # Errors
    /// For the first thing that is wrong.
    pub fn parse(text: &str, path: &Path) -> Result<Config, Mistake> {
        let source = Source { path, text };
        let tree = DeTable::parse(text).map_err(|error| {
            let message = error.message().trim_end().replace('\n', ", ");
            source.wrong(&error.span().unwrap_or(0..0), message)
        })?;
        let mut top = Section::new(source, "the file", &(0..0), tree.get_ref());
        let mut config = Config::default();
        if let Some(daemon) = top.table("daemon", "[daemon]")? {
            config.take_daemon(daemon)?;
        }
        for secret in top.tables("secret")? {
            config.add(secret_part(secret)?, source)?;
        }
        if let Some(groups) = top.table("throttle", "[throttle]")? {
            config.take_throttles(groups)?;
        }
        let disks = top.tables("disk")?;
        let names = disk::names(&disks);
        for disk in disks {
            for part in disk::parts(disk, &names)? {
                config.check_needs(&part, source)?;
                config.add(part, source)?;
            }
        }
        top.finish(&[])?;
        match config.parts.circle() {
            None => Ok(config),
            Some(part) => {
                let text = format!("{} stands on itself", part.key);
                Err(source.mistake(part.place, text))
            }
        }
    }

    /// Puts a part in whose name nobody has.
    fn add(&mut self, part: Part, source: Source<'_>) -> Result<(), Mistake> {
        if let Some(other) = self.parts.get(&part.key) {
            let text = format!("{} is in line {} already", part.key, other.place.line);
            return Err(source.mistake(part.place, text));
        }
        self.parts.put(part);
        Ok(())
    }

    /// Refuses a disk whose limits are not there, and an export that nobody serves.
    fn check_needs(&self, part: &Part, source: Source<'_>) -> Result<(), Mistake> {
        for key in &part.needs {
            let text = match key.kind {
                _ if self.parts.get(key).is_some() => continue,
                PartKind::Throttle => {
                    let groups = self.parts.keys();
                    let groups = groups.filter(|key| key.kind == PartKind::Throttle);
                    let meant = meant(&key.name, groups.map(|key| key.name.as_str()));
                    format!("there is no [throttle.{}]{meant}", key.name)
                }
                PartKind::Server => {
                    "an export of type nbd needs a server: say 'nbd = { path = \"/run/...\" }' \
                     in [daemon]"
                        .to_owned()
                }
                // Disks may come in any order.
                _ => continue,
            };
            return Err(source.mistake(part.place, text));
        }
        Ok(())
    }

    fn take_daemon(&mut self, mut daemon: Section<'_>) -> Result<(), Mistake> {
        let source = daemon.source;
        for (path, place) in daemon.texts("monitors")? {
            let path = source.resolve(&path);
            if self.monitors.iter().any(|other| other.path == path) {
                let text = format!("there is a monitor at '{path}' already");
                return Err(source.mistake(place, text));
            }
            self.monitors.push(Monitor { path, place });
        }
        for (address, place) in daemon.texts("metrics")? {
            // Paths are those of the file's folder, here too.
            let address = match address.strip_prefix("unix:") {
                None => address,
                Some(rest) => {
                    let (path, options) = match rest.split_once(',') {
                        Some((path, options)) => (path, format!(",{options}")),
                        None => (rest, String::new()),
                    };
                    format!("unix:{}{options}", source.resolve(path))
                }
            };
            self.metrics.push(Listener { address, place });
        }
        for (text, place) in daemon.texts("space-warning")? {
            let number = text.trim_end_matches('%').parse().ok();
            let Some(percent) = number.filter(|percent| (1..=100).contains(percent)) else {
                let text = format!("'{text}' is no percentage from 1% to 100%");
                return Err(source.mistake(place, text));
            };
            self.space_warning_percent.push(percent);
        }
        let words = [("stop", OnError::Stop), ("report", OnError::Report)];
        self.on_error = daemon.word("on-error", &words)?.unwrap_or_default();
        if let Some(server) = daemon.table("nbd", "[daemon.nbd]")? {
            self.add(server_part(server)?, source)?;
        }
        daemon.finish(&[])
    }

    fn take_throttles(&mut self, mut groups: Section<'_>) -> Result<(), Mistake> {
        let source = groups.source;
        for Entry {
            key,
            key_span,
            value,
        } in groups.take_all()
        {
            let Some(table) = value.get_ref().as_table() else {
                let text = format!("a group of limits is a table: [throttle.{key}]");
                return Err(source.wrong(&value.span(), text));
            };
            let name = format!("[throttle.{key}]");
            let group = Section::new(source, name, &key_span, table);
            self.add(throttle_part(key, group)?, source)?;
        }
        Ok(())
    }
}

fn part(key: PartKey, arguments: Value, place: Place) -> Part {
    Part {
        key,
        arguments: match arguments {
            Value::Object(members) => members,
            _ => Map::new(),
        },
        needs: BTreeSet::new(),
        place,
    }
}

/// `nbd = { path = ... }`, or `{ host = ..., port = ... }`.
fn server_part(mut server: Section<'_>) -> Result<Part, Mistake> {
    let source = server.source;
    let (path, host) = (server.text("path")?, server.text("host")?);
    let port = match server.take("port") {
        None => None,
        Some(entry) => Some(match server.json(&entry)? {
            Value::String(text) => text,
            Value::Number(number) => number.to_string(),
            _ => return Err(source.wrong(&entry.value.span(), "a port is a number")),
        }),
    };
    let addr = match (path, host, port) {
        (Some((path, _)), None, None) => {
            json!({"type": "unix", "data": {"path": source.resolve(&path)}})
        }
        (None, host, Some(port)) => {
            // Anything else would be served to the network because somebody left a word out.
            let host = host.map_or_else(|| "127.0.0.1".to_owned(), |(host, _)| host);
            json!({"type": "inet", "data": {"host": host, "port": port}})
        }
        _ => {
            return Err(server.wrong(
                "the NBD server listens on 'path', a unix socket, or on 'host' and 'port'",
            ));
        }
    };
    let mut arguments = json!({"addr": addr});
    for key in ["max-connections", "handshake-max-seconds"] {
        if let Some(number) = server.number(key)? {
            arguments[key] = json!(number);
        }
    }
    for key in ["tls-creds", "tls-authz"] {
        if let Some((text, _)) = server.text(key)? {
            arguments[key] = json!(text);
        }
    }
    let place = server.place;
    server.finish(&[])?;
    Ok(part(PartKey::server(), arguments, place))
}

/// `[[secret]]`: what is secret stands in a file of its own.
fn secret_part(mut secret: Section<'_>) -> Result<Part, Mistake> {
    let source = secret.source;
    if let Some(entry) = secret.take("data") {
        let text = "a secret is given by 'file', which only the daemon's user can read";
        return Err(source.wrong(&entry.key_span, text));
    }
    let (name, place) = secret.need_text("name", "disks name it as 'key-secret'")?;
    let (file, _) = secret.need_text("file", "what is secret stands in a file of its own")?;
    let mut arguments = json!({"qom-type": "secret", "id": name, "file": source.resolve(&file)});
    for key in ["format", "keyid", "iv"] {
        if let Some((text, _)) = secret.text(key)? {
            arguments[key] = json!(text);
        }
    }
    secret.finish(&[])?;
    Ok(part(PartKey::new(PartKind::Secret, name), arguments, place))
}

/// `[throttle.NAME]`: QEMU's limits.
fn throttle_part(name: String, mut group: Section<'_>) -> Result<Part, Mistake> {
    let source = group.source;
    let mut limits = Map::new();
    for key in throttle_groups::limit_names() {
        let Some(entry) = group.take(&key) else {
            continue;
        };
        let number = match group.json(&entry)? {
            Value::String(text) => size::parse(&text).ok(),
            value => value.as_u64(),
        };
        let Some(number) = number.filter(|number| i64::try_from(*number).is_ok()) else {
            let text = format!("'{key}' is a number, or a text like \"100M\"");
            return Err(source.wrong(&entry.value.span(), text));
        };
        limits.insert(key, json!(number));
    }
    let place = group.place;
    group.finish(&[])?;
    let arguments = json!({"qom-type": throttle_groups::TYPE, "id": name, "limits": limits});
    Ok(part(
        PartKey::new(PartKind::Throttle, name),
        arguments,
        place,
    ))
}

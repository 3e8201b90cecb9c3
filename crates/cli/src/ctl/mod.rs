//! `vellum ctl`: shows and changes what a running daemon serves, over its HTTP interface.
//!
//! `arguments` makes a request of a command line, `client` asks it, over TLS as `secured` says, `tables` and `show` print the
//! answer, `top` looks again and again, `wait` waits for a job, and `names` are what completions know of the daemon.
//!
//! Invariant: what `--output=json` prints is what the daemon has answered, and nothing else.

mod address;
mod arguments;
#[cfg(feature = "http")]
mod client;
#[cfg(feature = "http")]
mod names;
#[cfg(feature = "http")]
mod secured;
#[cfg(feature = "http")]
mod show;
#[cfg(feature = "http")]
mod tables;
#[cfg(feature = "http")]
mod top;
#[cfg(feature = "http")]
mod wait;

use std::ffi::OsString;

use serde_json::{Value, json};

#[cfg(feature = "http")]
use crate::output::Output;
#[cfg(feature = "http")]
use crate::progress::Progress;
use crate::{hint, report};
use arguments::Arguments;

pub use arguments::{COMMANDS, EXPLAINS, HELP, JOB_ACTIONS, options};
#[cfg(feature = "http")]
pub use names::{Named, names};

/// What is to be done.
#[derive(Debug)]
pub enum Action {
    /// To ask once.
    Ask {
        method: &'static str,
        path: String,
        body: Option<Value>,
        show: Show,
        care: Care,
    },
    /// To ask again and again.
    Top,
}

/// What is looked at before something is asked, and after.
#[derive(Debug, Default)]
pub struct Care {
    /// The path of a disk, of which the size that is asked for must leave nothing out.
    keeps_all_of: Option<String>,
    /// A file that must not be there yet.
    makes: Option<String>,
    /// A job that is waited for.
    waits_for: Option<String>,
}

/// How an answer is shown to people.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Show {
    Disks,
    Disk,
    Jobs,
    Exports,
    Nodes,
    Stats,
    Host,
    Space,
    SpaceOfAll,
    Chains,
    /// Nothing: it is done.
    Done,
    /// As it came.
    Json,
}

impl Action {
    fn get(path: impl Into<String>, show: Show) -> Action {
        Action::Ask {
            method: "GET",
            path: path.into(),
            body: None,
            show,
            care: Care::default(),
        }
    }

    fn post(path: String, body: Value) -> Action {
        Action::Ask {
            method: "POST",
            path,
            body: Some(body),
            show: Show::Done,
            care: Care::default(),
        }
    }

    fn change(disk: &str, verb: &str, body: Value) -> Action {
        let disk = arguments::escaped(disk);
        Action::post(format!("/v1/disks/{disk}/{verb}"), body)
    }

    fn resize(disk: &str, size_bytes: u64, shrink: bool) -> Action {
        let path = format!("/v1/disks/{}", arguments::escaped(disk));
        Action::Ask {
            method: "POST",
            path: format!("{path}/resize"),
            body: Some(json!({"size": size_bytes})),
            show: Show::Done,
            care: Care {
                keeps_all_of: (!shrink).then_some(path),
                ..Care::default()
            },
        }
    }

    fn with_care(mut self, change: impl FnOnce(&mut Care)) -> Action {
        if let Action::Ask { care, .. } = &mut self {
            change(care);
        }
        self
    }

    /// It makes a file.
    fn making(self, file: arguments::NewFile) -> Action {
        let makes = (!file.may_be_there).then_some(file.name);
        self.with_care(|care| care.makes = makes)
    }

    /// It begins a job that is waited for.
    fn waiting_for(self, job: String) -> Action {
        self.with_care(|care| care.waits_for = Some(job))
    }

    fn delete(path: String) -> Action {
        Action::Ask {
            method: "DELETE",
            path,
            body: None,
            show: Show::Done,
            care: Care::default(),
        }
    }
}

/// Runs the tool and returns its exit code.
pub fn main(program: &str, args: Vec<OsString>) -> i32 {
    let arguments = match Arguments::parse(args) {
        Ok(arguments) => arguments,
        Err(message) => {
            report::error(&message);
            hint::about_option(message, &options());
            report::try_help();
            return 1;
        }
    };
    if arguments.help {
        report::print(arguments::help(program));
        return 0;
    }
    match run(program, arguments) {
        Ok(()) => 0,
        Err(message) => {
            report::error(message);
            1
        }
    }
}

#[cfg(not(feature = "http"))]
fn run(_program: &str, _arguments: Arguments) -> Result<(), String> {
    Err("ctl requires a build with the feature 'http'".to_owned())
}

#[cfg(feature = "http")]
fn run(program: &str, arguments: Arguments) -> Result<(), String> {
    let address = match arguments.address {
        Some(address) => address,
        None => from_environment()?,
    };
    let peer = client::Peer {
        address,
        token_file: arguments.token_file,
        tls: arguments.tls,
    };
    let client = client::Client::new(peer, arguments.timeout)?;
    match arguments.action {
        None => Ok(()),
        Some(Action::Top) => top::run(
            &client,
            arguments.interval,
            arguments.count,
            arguments.output,
        ),
        Some(Action::Ask {
            method,
            path,
            body,
            show,
            care,
        }) => {
            if let Some(disk) = care.keeps_all_of {
                refuse_smaller(&client, &disk, body.as_ref())?;
            }
            if let Some(file) = care.makes {
                refuse_existing(&file)?;
            }
            let value = ask(&client, method, &path, body.as_ref())?;
            if let Some(job) = care.waits_for {
                let progress = Progress::new(program, false, arguments.output == Output::Json, 0.0);
                wait::until_ended(&client, &job, progress)?;
            }
            show::print(&value, show, arguments.output);
            Ok(())
        }
    }
}

/// Refuses a file that is there, as far as that is seen from here: it would be written over.
#[cfg(feature = "http")]
fn refuse_existing(file: &str) -> Result<(), String> {
    match std::fs::symlink_metadata(file) {
        Ok(_) => Err(format!(
            "'{file}' is there already, and what it holds would be lost: say --overwrite if that is meant"
        )),
        Err(_) => Ok(()),
    }
}

/// Refuses a size that would cut off what a disk holds, as `resize` of images does.
#[cfg(feature = "http")]
fn refuse_smaller(client: &client::Client, disk: &str, body: Option<&Value>) -> Result<(), String> {
    let now = ask(client, "GET", disk, None)?["size-bytes"].as_u64();
    let wanted = body.and_then(|body| body["size"].as_u64());
    match now.zip(wanted) {
        Some((now, wanted)) if wanted < now => Err(format!(
            "The disk has {now} bytes, and what is behind byte {wanted} would be lost: say --shrink if \
             that is meant"
        )),
        _ => Ok(()),
    }
}

#[cfg(feature = "http")]
fn from_environment() -> Result<address::Address, String> {
    match std::env::var(arguments::VARIABLE) {
        Ok(text) if !text.is_empty() => {
            let address = address::Address::parse(&text);
            address.map_err(|why| format!("{}: {why}", arguments::VARIABLE))
        }
        _ => Err(format!(
            "Which daemon? Say --connect unix:PATH, or set {}: what `vellum daemon --metrics` was \
             given",
            arguments::VARIABLE
        )),
    }
}

/// Asks a daemon for JSON; what it refuses is an error.
#[cfg(feature = "http")]
fn ask(
    client: &client::Client,
    method: &str,
    path: &str,
    body: Option<&Value>,
) -> Result<Value, String> {
    let answer = client.ask(method, path, body)?;
    let value: Result<Value, _> = serde_json::from_slice(&answer.body);
    match (answer.status, value) {
        (200, Ok(value)) => Ok(value),
        (status, Ok(value)) => {
            let detail = value["detail"].as_str().unwrap_or("no reason was given");
            Err(match status {
                401 => format!("{detail}; say --token-file FILE"),
                _ => detail.to_owned(),
            })
        }
        (status, Err(_)) => Err(format!(
            "What has answered is no daemon of ours (status {status})"
        )),
    }
}

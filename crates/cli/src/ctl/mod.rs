//! `vellum ctl`: shows and changes what a running daemon serves, over its HTTP interface.
//!
//! `arguments` makes a request of a command line, `client` asks it, `tables` and `show` print the
//! answer, `top` looks again and again, and `names` are what completions know of the daemon.
//!
//! Invariant: what `--output=json` prints is what the daemon has answered, and nothing else.

mod address;
mod arguments;
#[cfg(feature = "http")]
mod client;
#[cfg(feature = "http")]
mod names;
#[cfg(feature = "http")]
mod show;
#[cfg(feature = "http")]
mod tables;
#[cfg(feature = "http")]
mod top;

use std::ffi::OsString;

use serde_json::{Value, json};

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
        /// The path of a disk, of which the size that is asked for must leave nothing out.
        keeps_all_of: Option<String>,
    },
    /// To ask again and again.
    Top,
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
            keeps_all_of: None,
        }
    }

    fn post(path: String, body: Value) -> Action {
        Action::Ask {
            method: "POST",
            path,
            body: Some(body),
            show: Show::Done,
            keeps_all_of: None,
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
            keeps_all_of: (!shrink).then_some(path),
        }
    }

    fn delete(path: String) -> Action {
        Action::Ask {
            method: "DELETE",
            path,
            body: None,
            show: Show::Done,
            keeps_all_of: None,
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
    match run(arguments) {
        Ok(()) => 0,
        Err(message) => {
            report::error(message);
            1
        }
    }
}

#[cfg(not(feature = "http"))]
fn run(_arguments: Arguments) -> Result<(), String> {
    Err("ctl requires a build with the feature 'http'".to_owned())
}

#[cfg(feature = "http")]
fn run(arguments: Arguments) -> Result<(), String> {
    let address = match arguments.address {
        Some(address) => address,
        None => from_environment()?,
    };
    let client = client::Client::new(address, arguments.token_file.as_deref())?;
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
            keeps_all_of,
        }) => {
            if let Some(disk) = keeps_all_of {
                refuse_smaller(&client, &disk, body.as_ref())?;
            }
            let value = ask(&client, method, &path, body.as_ref())?;
            show::print(&value, show, arguments.output);
            Ok(())
        }
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

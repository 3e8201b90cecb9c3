//! A call of `vellum ctl`: asks the daemon what the command line says, once it is sure that nothing is
//! lost by it, and prints the answer.

use std::ffi::OsString;

#[cfg(feature = "http")]
use serde_json::Value;

#[cfg(feature = "http")]
use super::action::Action;
#[cfg(feature = "http")]
use super::address::Address;
#[cfg(feature = "http")]
use super::arguments::VARIABLE;
use super::arguments::{Arguments, SPEC, help};
#[cfg(feature = "http")]
use super::client::{Client, Peer};
#[cfg(feature = "http")]
use super::{show, top, wait};
use crate::getopt::UsageError;
#[cfg(feature = "http")]
use crate::output::Output;
#[cfg(feature = "http")]
use crate::progress::Progress;
use crate::{report, spec};

/// Runs the tool and returns its exit code.
pub fn main(program: &str, args: Vec<OsString>) -> i32 {
    let parsed = Arguments::parse(args);
    if parsed
        .as_ref()
        .is_err_and(|error| *error == UsageError::Help)
    {
        report::print(help(program));
        return 0;
    }
    spec::run(&SPEC, parsed, |arguments| {
        run(program, arguments).map(|()| 0)
    })
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
    let peer = Peer {
        address,
        token_file: arguments.token_file,
        tls: arguments.tls,
    };
    let client = Client::new(peer, arguments.timeout)?;
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
            let value = client.ask_json(method, &path, body.as_ref())?;
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
fn refuse_smaller(client: &Client, disk: &str, body: Option<&Value>) -> Result<(), String> {
    let now = client.ask_json("GET", disk, None)?["size-bytes"].as_u64();
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
fn from_environment() -> Result<Address, String> {
    match std::env::var(VARIABLE) {
        Ok(text) if !text.is_empty() => {
            let address = Address::parse(&text);
            address.map_err(|why| format!("{VARIABLE}: {why}"))
        }
        _ => Err(format!(
            "Which daemon? Say --connect unix:PATH, or set {VARIABLE}: what `vellum daemon --metrics` was \
             given"
        )),
    }
}

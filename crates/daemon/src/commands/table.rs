//! The table of all commands, and how one is carried out.

use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;

use serde_json::{Value, json};
use tracing::trace;
use vellum_jobs::job::Verb::{Cancel, Complete, Dismiss, Finalize, Pause, Resume, SetSpeed};
use vellum_options::json;

use crate::daemon::Daemon;
use crate::effect::Effect::{self, BeginsJob, Nothing, Recorded, Unrecorded};
use crate::qmp::{self, Arguments, Class, Failure, Outcome, Written};
use crate::{chains, schema, space};

use super::amend::AmendRequest;
use super::backup::BackupRequest;
use super::bitmaps::{BitmapRef, Change, Kind};
use super::block_stats::{HistogramChange, WriteThreshold};
use super::chardevs::{RingRead, RingWrite};
use super::create::CreateRequest;
use super::exports::{ExportRemoval, OldExport};
use super::graph::{ChildChange, IothreadChange};
use super::job_verbs::JobKey::{BlockId, Device, Id};
use super::job_verbs::{JobChange, JobVerb};
use super::jobs::{CommitRequest, CompactRequest, ScrubRequest, StreamRequest};
use super::mirror::{DriveMirror, MirrorRequest};
use super::nodes::{Activity, Resize};
use super::objects::{NewObject, PropertyChange, PropertyRequest, TypesRequest};
use super::request::Request;
use super::snapshots::{BackingChange, InternalRemoval, InternalRequest, OverlayRequest};
use super::transaction::Transaction;
use super::{
    amend, backup, bitmaps, block_stats, chardevs, create, exports, graph, job_verbs, jobs, mirror,
    named_block_nodes, nodes, objects, reopen, snapshots, transaction,
};

type Running = Pin<Box<dyn Future<Output = Result<Answer, Failure>>>>;
type Row = (&'static str, Effect, fn(Rc<Daemon>, Arguments) -> Running);

/// What a command answers with.
enum Answer {
    Value(Value),
    /// The text of one line that QMP has for it: long answers are written straight as text.
    Text(String),
}

impl From<()> for Answer {
    fn from((): ()) -> Answer {
        Answer::Value(json!({}))
    }
}

impl From<Value> for Answer {
    fn from(value: Value) -> Answer {
        Answer::Value(value)
    }
}

impl From<String> for Answer {
    fn from(text: String) -> Answer {
        Answer::Text(text)
    }
}

/// Parses a request and carries it out.
fn run<R: 'static, A: Into<Answer>, F: Future<Output = Result<A, Failure>>>(
    daemon: Rc<Daemon>,
    arguments: Arguments,
    parse: impl FnOnce(Arguments) -> Result<R, Failure>,
    command: impl FnOnce(Rc<Daemon>, R) -> F + 'static,
) -> Running {
    let request = parse(arguments);
    Box::pin(async move { command(daemon, request?).await.map(A::into) })
}

/// Rows of a name, an effect, how the request is parsed, and the function that carries that out.
macro_rules! rows {
    ($($name:literal: $effect:ident, $parse:expr => $command:expr;)*) => {
        &[$(($name, $effect, |daemon, arguments| run(daemon, arguments, $parse, $command))),*]
    };
}

/// Every command; `qmp_capabilities` is the monitor's own.
const COMMANDS: &[Row] = rows! {
    "block-commit": BeginsJob, CommitRequest::take => jobs::commit;
    "block-dirty-bitmap-add": Unrecorded, |a| Change::take(Kind::Add, a) => bitmaps::change;
    "block-dirty-bitmap-clear": Unrecorded, |a| Change::take(Kind::Clear, a) => bitmaps::change;
    "block-dirty-bitmap-disable": Unrecorded, |a| Change::take(Kind::Disable, a) => bitmaps::change;
    "block-dirty-bitmap-enable": Unrecorded, |a| Change::take(Kind::Enable, a) => bitmaps::change;
    "block-dirty-bitmap-merge": Unrecorded, |a| Change::take(Kind::Merge, a) => bitmaps::change;
    "block-dirty-bitmap-remove": Unrecorded, |a| Change::take(Kind::Remove, a) => bitmaps::change;
    "block-export-add": Recorded, Arguments::into_options => exports::add;
    "block-export-del": Recorded, |a| ExportRemoval::take(a, "id") => exports::del;
    "block-job-cancel": Unrecorded, |a| JobVerb::take(a, Device, Cancel) => job_verbs::apply;
    "block-job-change": Recorded, JobChange::take => job_verbs::change;
    "block-job-complete": Unrecorded, |a| JobVerb::take(a, Device, Complete) => job_verbs::apply;
    "block-job-dismiss": Unrecorded, |a| JobVerb::take(a, BlockId, Dismiss) => job_verbs::apply;
    "block-job-finalize": Unrecorded, |a| JobVerb::take(a, BlockId, Finalize) => job_verbs::apply;
    "block-job-pause": Recorded, |a| JobVerb::take(a, Device, Pause) => job_verbs::apply;
    "block-job-resume": Recorded, |a| JobVerb::take(a, Device, Resume) => job_verbs::apply;
    "block-job-set-speed": Recorded, |a| JobVerb::take(a, Device, SetSpeed) => job_verbs::apply;
    "block-latency-histogram-set": Unrecorded, HistogramChange::take => block_stats::set_histogram;
    "block-set-write-threshold": Unrecorded, WriteThreshold::take => block_stats::set_write_threshold;
    "block-stream": BeginsJob, StreamRequest::take => jobs::stream;
    "block_resize": Unrecorded, Resize::take => nodes::resize;
    "blockdev-add": Recorded, nodes::take_options => nodes::add;
    "blockdev-backup": BeginsJob, BackupRequest::take => backup::begin;
    "blockdev-create": Unrecorded, CreateRequest::take => create::begin;
    "blockdev-del": Recorded, |a| a.only_text("node-name") => nodes::del;
    "blockdev-mirror": BeginsJob, MirrorRequest::take => mirror::blockdev_mirror;
    "blockdev-reopen": Recorded, reopen::take => reopen::reopen;
    "blockdev-set-active": Recorded, Activity::take => nodes::set_active;
    "blockdev-snapshot": Recorded, OverlayRequest::take => snapshots::overlay;
    "blockdev-snapshot-delete-internal-sync": Unrecorded, InternalRemoval::take => snapshots::delete_internal;
    "blockdev-snapshot-internal-sync": Unrecorded, InternalRequest::take => snapshots::internal;
    "blockdev-snapshot-sync": Recorded, OverlayRequest::take_new => snapshots::overlay;
    "change-backing-file": Recorded, BackingChange::take => snapshots::change_backing_file;
    "chardev-add": Unrecorded, chardevs::take => chardevs::add;
    "chardev-change": Unrecorded, chardevs::take => chardevs::change;
    "chardev-remove": Unrecorded, |a| a.only_text("id") => chardevs::remove;
    "chardev-send-break": Unrecorded, |a| a.only_text("id") => chardevs::send_break;
    "drive-backup": BeginsJob, BackupRequest::take_drive => backup::begin;
    "drive-mirror": BeginsJob, DriveMirror::take => mirror::drive_mirror;
    "job-cancel": Unrecorded, |a| JobVerb::take(a, Id, Cancel) => job_verbs::apply;
    "job-complete": Unrecorded, |a| JobVerb::take(a, Id, Complete) => job_verbs::apply;
    "job-dismiss": Unrecorded, |a| JobVerb::take(a, Id, Dismiss) => job_verbs::apply;
    "job-finalize": Unrecorded, |a| JobVerb::take(a, Id, Finalize) => job_verbs::apply;
    "job-pause": Recorded, |a| JobVerb::take(a, Id, Pause) => job_verbs::apply;
    "job-resume": Recorded, |a| JobVerb::take(a, Id, Resume) => job_verbs::apply;
    "nbd-server-add": Recorded, OldExport::take => exports::nbd_server_add;
    "nbd-server-remove": Recorded, |a| ExportRemoval::take(a, "name") => exports::del;
    "nbd-server-start": Recorded, exports::take_server => exports::nbd_server_start;
    "nbd-server-stop": Recorded, Arguments::finish => exports::nbd_server_stop;
    "object-add": Recorded, NewObject::take => objects::add;
    "object-del": Recorded, |a| a.only_text("id") => objects::del;
    "qom-get": Nothing, PropertyRequest::take => objects::get;
    "qom-list": Nothing, |a| a.only_text("path") => objects::list;
    "qom-list-properties": Nothing, |a| a.only_text("typename") => objects::list_properties;
    "qom-list-types": Nothing, TypesRequest::take => objects::list_types;
    "qom-set": Recorded, PropertyChange::take => objects::set;
    "query-block": Nothing, Arguments::finish => block_stats::query_block;
    "query-block-exports": Nothing, Arguments::finish => exports::query;
    "query-block-jobs": Nothing, Arguments::finish => job_verbs::query_block_jobs;
    "query-blockstats": Nothing, |a| a.only_switch("query-nodes") => block_stats::write;
    "query-chardev": Nothing, Arguments::finish => chardevs::query;
    "query-chardev-backends": Nothing, Arguments::finish => chardevs::query_backends;
    "query-commands": Nothing, Arguments::finish => query_commands;
    "query-jobs": Nothing, Arguments::finish => job_verbs::query_jobs;
    "query-named-block-nodes": Nothing, |a| a.only_switch("flat") => named_block_nodes::write;
    "query-qmp-schema": Nothing, Arguments::finish => query_schema;
    "query-version": Nothing, Arguments::finish => query_version;
    "quit": Unrecorded, Arguments::finish => quit;
    "ringbuf-read": Unrecorded, RingRead::take => chardevs::ring_read;
    "ringbuf-write": Unrecorded, RingWrite::take => chardevs::ring_write;
    "transaction": BeginsJob, Transaction::take => transaction::carry_out;
    "x-blockdev-amend": Recorded, AmendRequest::take => amend::begin;
    "x-blockdev-change": Recorded, ChildChange::take => graph::change;
    "x-blockdev-set-iothread": Recorded, IothreadChange::take => graph::set_iothread;
    "x-debug-block-dirty-bitmap-sha256": Nothing, BitmapRef::take => bitmaps::sha256;
    "x-debug-query-block-graph": Nothing, Arguments::finish => graph::query;
    "x-vellum-compact": BeginsJob, CompactRequest::take => jobs::compact;
    "x-vellum-flush": Unrecorded, |a| a.only_text("node-name") => nodes::flush;
    "x-vellum-query-chain-policies": Nothing, Arguments::finish => chains::query;
    "x-vellum-query-space": Nothing, |a| a.only_text("node-name") => space::query;
    "x-vellum-scrub": Recorded, ScrubRequest::take => jobs::scrub;
    "x-vellum-set-chain-policy": Recorded, chains::take => chains::set;
};

/// Commands whose arguments may be secrets: no trace shows these.
const KEEP_ARGUMENTS: [&str; 2] = ["object-add", "qom-set"];

fn find(name: &str) -> Option<&'static Row> {
    COMMANDS.iter().find(|(known, ..)| *known == name)
}

/// Carries a command out.
///
/// # Errors
/// What QMP answers: [`Class::CommandNotFound`] for an unknown name, else what the command
/// says.
pub async fn carry_out(daemon: &Rc<Daemon>, name: &str, arguments: Arguments) -> Outcome {
    match answer(daemon, name, arguments).await? {
        Answer::Value(value) => Ok(value),
        Answer::Text(text) => {
            let value = serde_json::from_str(&text);
            let value = value.map_err(|error| Failure::new(error.to_string()))?;
            Ok(json::as_added(value))
        }
    }
}

/// As [`carry_out`], with the answer as the text of one line that QMP has for it.
///
/// # Errors
/// As [`carry_out`].
pub(crate) async fn write_out(daemon: &Rc<Daemon>, name: &str, arguments: Arguments) -> Written {
    Ok(match answer(daemon, name, arguments).await? {
        Answer::Value(value) => json::compact(&value),
        Answer::Text(text) => text,
    })
}

async fn answer(daemon: &Rc<Daemon>, name: &str, arguments: Arguments) -> Result<Answer, Failure> {
    match KEEP_ARGUMENTS.contains(&name) {
        true => trace!(name: "handle_qmp_command", command = name),
        false => {
            trace!(name: "handle_qmp_command", command = name, arguments = arguments.as_json())
        }
    }
    let answer = match find(name) {
        Some((name, effect, command)) => {
            let job = (*effect == BeginsJob).then(|| (*name, arguments.to_value()));
            let command = command(daemon.clone(), arguments);
            settle(daemon, *effect, job, command).await
        }
        None => Err(Failure::of(
            Class::CommandNotFound,
            format!("The command {name} has not been found"),
        )),
    };
    trace_answer(name, &answer);
    answer
}

/// Carries out what the daemon itself asks for, as a command of that name is carried out for a client.
///
/// # Errors
/// As the command.
pub(crate) async fn change(
    daemon: &Rc<Daemon>,
    name: &str,
    command: impl Future<Output = Result<(), Failure>>,
) -> Result<(), Failure> {
    trace!(name: "handle_qmp_command", command = name);
    let outcome = settle(daemon, Effect::Recorded, None, command).await;
    trace_answer(name, &outcome);
    outcome
}

/// Completes a command: closes what it opened in vain, and has the state file say what it has done, with the
/// name and arguments of one that begins a job.
async fn settle<A>(
    daemon: &Rc<Daemon>,
    effect: Effect,
    job: Option<(&str, Value)>,
    command: impl Future<Output = Result<A, Failure>>,
) -> Result<A, Failure> {
    let answer = command.await;
    if effect != Effect::Nothing {
        daemon.stop.or_give_up(daemon.nodes.close_abandoned()).await;
    }
    match effect {
        Effect::Nothing | Effect::Unrecorded => answer,
        Effect::Recorded | Effect::BeginsJob => daemon.record(job, answer).await,
    }
}

fn trace_answer<T>(name: &str, answer: &Result<T, Failure>) {
    match answer {
        Ok(_) => trace!(name: "monitor_qmp_respond", command = name),
        Err(failure) => trace!(name: "monitor_qmp_respond", command = name, error = failure.text),
    }
}

/// Whether there is a command of this name.
pub(crate) fn exists(name: &str) -> bool {
    name == "qmp_capabilities" || find(name).is_some()
}

/// What a command changes, if there is one of this name.
pub(crate) fn effect(name: &str) -> Option<Effect> {
    find(name).map(|(_, effect, _)| *effect)
}

/// What this program is, beside the version of QEMU that it stands for.
pub fn package() -> String {
    format!("vellum {}", env!("CARGO_PKG_VERSION"))
}

/// Takes the arguments of `qmp_capabilities`: whether the client enables `oob`, where that is
/// offered.
///
/// # Errors
/// As QEMU refuses capabilities that it does not have, or does not offer.
pub fn enabled_oob(mut arguments: Arguments, offered: bool) -> Result<bool, Failure> {
    let wanted = arguments.array("enable")?.unwrap_or_default();
    arguments.finish()?;
    for name in &wanted {
        match name {
            Value::String(name) if name == "oob" && offered => {}
            Value::String(name) if name == "oob" => {
                return Err(Failure::new("Capability oob not available"));
            }
            Value::String(name) => {
                return Err(Failure::new(format!(
                    "Parameter 'null' does not accept value '{name}'"
                )));
            }
            _ => {
                return Err(Failure::new(
                    "Invalid parameter type for 'null', expected: string",
                ));
            }
        }
    }
    Ok(!wanted.is_empty())
}

async fn query_version(_: Rc<Daemon>, (): ()) -> Outcome {
    Ok(qmp::version(&package()))
}

async fn query_commands(_: Rc<Daemon>, (): ()) -> Outcome {
    let all = names().into_iter();
    Ok(all.map(|name| json!({"name": name})).collect())
}

/// The names of all commands.
pub(crate) fn names() -> Vec<&'static str> {
    let names = COMMANDS.iter().map(|(name, ..)| *name);
    names.chain(["qmp_capabilities"]).collect()
}

async fn query_schema(_: Rc<Daemon>, (): ()) -> Outcome {
    Ok(schema::introspect(&names()))
}

/// Ends the program; the answer comes when everything has ended.
async fn quit(daemon: Rc<Daemon>, (): ()) -> Result<(), Failure> {
    daemon.stop.request();
    daemon.ended.wait().await;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sorted() {
        assert!(COMMANDS.is_sorted_by(|a, b| a.0 < b.0));
    }
}

//! The table of all commands, and how one is carried out.

use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;

use serde_json::{Value, json};
use tracing::trace;
use vellum_jobs::job::Verb;
use vellum_options::json;

use crate::daemon::Daemon;
use crate::jobs::{compact, scrub};
use crate::qmp::{self, Arguments, Class, Failure, Outcome, Written};
use crate::{chains, schema, space};

use super::answers::done;
use super::bitmaps::Kind;
use super::jobs::JobKey;
use super::{
    amend, backup, bitmaps, block_stats, chardevs, create, exports, graph, jobs, mirror,
    named_block_nodes, nodes, objects, reopen, snapshots, transaction,
};

type Running = Pin<Box<dyn Future<Output = Outcome>>>;
type Command = fn(Rc<Daemon>, Arguments) -> Running;

/// Every command, by name; `qmp_capabilities` is the monitor's own.
const COMMANDS: &[(&str, Command)] = &[
    ("block-commit", |d, a| Box::pin(jobs::commit(d, a))),
    ("block-dirty-bitmap-add", |d, a| {
        Box::pin(bitmaps::change(d, a, Kind::Add))
    }),
    ("block-dirty-bitmap-clear", |d, a| {
        Box::pin(bitmaps::change(d, a, Kind::Clear))
    }),
    ("block-dirty-bitmap-disable", |d, a| {
        Box::pin(bitmaps::change(d, a, Kind::Disable))
    }),
    ("block-dirty-bitmap-enable", |d, a| {
        Box::pin(bitmaps::change(d, a, Kind::Enable))
    }),
    ("block-dirty-bitmap-merge", |d, a| {
        Box::pin(bitmaps::change(d, a, Kind::Merge))
    }),
    ("block-dirty-bitmap-remove", |d, a| {
        Box::pin(bitmaps::change(d, a, Kind::Remove))
    }),
    ("block-export-add", |d, a| Box::pin(exports::add(d, a))),
    ("block-export-del", |d, a| Box::pin(exports::del(d, a))),
    ("block-job-cancel", |d, a| {
        Box::pin(jobs::apply_verb(d, a, JobKey::Device, Verb::Cancel))
    }),
    ("block-job-change", |d, a| Box::pin(jobs::change(d, a))),
    ("block-job-complete", |d, a| {
        Box::pin(jobs::apply_verb(d, a, JobKey::Device, Verb::Complete))
    }),
    ("block-job-dismiss", |d, a| {
        Box::pin(jobs::apply_verb(d, a, JobKey::BlockId, Verb::Dismiss))
    }),
    ("block-job-finalize", |d, a| {
        Box::pin(jobs::apply_verb(d, a, JobKey::BlockId, Verb::Finalize))
    }),
    ("block-job-pause", |d, a| {
        Box::pin(jobs::apply_verb(d, a, JobKey::Device, Verb::Pause))
    }),
    ("block-job-resume", |d, a| {
        Box::pin(jobs::apply_verb(d, a, JobKey::Device, Verb::Resume))
    }),
    ("block-job-set-speed", |d, a| {
        Box::pin(jobs::apply_verb(d, a, JobKey::Device, Verb::SetSpeed))
    }),
    ("block-latency-histogram-set", |d, a| {
        Box::pin(block_stats::set_histogram(d, a))
    }),
    ("block-set-write-threshold", |d, a| {
        Box::pin(block_stats::set_write_threshold(d, a))
    }),
    ("block-stream", |d, a| Box::pin(jobs::stream(d, a))),
    ("block_resize", |d, a| Box::pin(nodes::resize(d, a))),
    ("blockdev-add", |d, a| Box::pin(nodes::add(d, a))),
    ("blockdev-backup", |d, a| {
        Box::pin(backup::blockdev_backup(d, a))
    }),
    ("blockdev-create", |d, a| Box::pin(create::begin(d, a))),
    ("blockdev-del", |d, a| Box::pin(nodes::del(d, a))),
    ("blockdev-mirror", |d, a| {
        Box::pin(mirror::blockdev_mirror(d, a))
    }),
    ("blockdev-reopen", |d, a| Box::pin(reopen::reopen(d, a))),
    ("blockdev-set-active", |d, a| {
        Box::pin(nodes::set_active(d, a))
    }),
    ("blockdev-snapshot", |d, a| {
        Box::pin(snapshots::overlay(d, a))
    }),
    ("blockdev-snapshot-delete-internal-sync", |d, a| {
        Box::pin(snapshots::delete_internal(d, a))
    }),
    ("blockdev-snapshot-internal-sync", |d, a| {
        Box::pin(snapshots::internal(d, a))
    }),
    ("blockdev-snapshot-sync", |d, a| {
        Box::pin(snapshots::new_overlay(d, a))
    }),
    ("change-backing-file", |d, a| {
        Box::pin(snapshots::change_backing_file(d, a))
    }),
    ("chardev-add", |d, a| Box::pin(chardevs::add(d, a))),
    ("chardev-change", |d, a| Box::pin(chardevs::change(d, a))),
    ("chardev-remove", |d, a| Box::pin(chardevs::remove(d, a))),
    ("chardev-send-break", |d, a| {
        Box::pin(chardevs::send_break(d, a))
    }),
    ("drive-backup", |d, a| Box::pin(backup::drive_backup(d, a))),
    ("drive-mirror", |d, a| Box::pin(mirror::drive_mirror(d, a))),
    ("job-cancel", |d, a| {
        Box::pin(jobs::apply_verb(d, a, JobKey::Id, Verb::Cancel))
    }),
    ("job-complete", |d, a| {
        Box::pin(jobs::apply_verb(d, a, JobKey::Id, Verb::Complete))
    }),
    ("job-dismiss", |d, a| {
        Box::pin(jobs::apply_verb(d, a, JobKey::Id, Verb::Dismiss))
    }),
    ("job-finalize", |d, a| {
        Box::pin(jobs::apply_verb(d, a, JobKey::Id, Verb::Finalize))
    }),
    ("job-pause", |d, a| {
        Box::pin(jobs::apply_verb(d, a, JobKey::Id, Verb::Pause))
    }),
    ("job-resume", |d, a| {
        Box::pin(jobs::apply_verb(d, a, JobKey::Id, Verb::Resume))
    }),
    ("nbd-server-add", |d, a| {
        Box::pin(exports::nbd_server_add(d, a))
    }),
    ("nbd-server-remove", |d, a| {
        Box::pin(exports::nbd_server_remove(d, a))
    }),
    ("nbd-server-start", |d, a| {
        Box::pin(exports::nbd_server_start(d, a))
    }),
    ("nbd-server-stop", |d, a| {
        Box::pin(exports::nbd_server_stop(d, a))
    }),
    ("object-add", |d, a| Box::pin(objects::add(d, a))),
    ("object-del", |d, a| Box::pin(objects::del(d, a))),
    ("qom-get", |d, a| Box::pin(objects::get(d, a))),
    ("qom-list", |d, a| Box::pin(objects::list(d, a))),
    ("qom-list-properties", |_, a| {
        Box::pin(objects::list_properties(a))
    }),
    ("qom-list-types", |_, a| Box::pin(objects::list_types(a))),
    ("qom-set", |d, a| Box::pin(objects::set(d, a))),
    ("query-block", |d, a| {
        Box::pin(block_stats::query_block(d, a))
    }),
    ("query-block-exports", |d, a| Box::pin(exports::query(d, a))),
    ("query-block-jobs", |d, a| {
        Box::pin(jobs::query_block_jobs(d, a))
    }),
    ("query-blockstats", |d, a| {
        Box::pin(async { read_back(block_stats::write(d, a).await) })
    }),
    ("query-chardev", |d, a| Box::pin(chardevs::query(d, a))),
    ("query-chardev-backends", |_, a| {
        Box::pin(chardevs::query_backends(a))
    }),
    ("query-commands", |_, a| Box::pin(query_commands(a))),
    ("query-jobs", |d, a| Box::pin(jobs::query_jobs(d, a))),
    ("query-named-block-nodes", |d, a| {
        Box::pin(async { read_back(named_block_nodes::write(d, a).await) })
    }),
    ("query-qmp-schema", |_, a| Box::pin(query_schema(a))),
    ("query-version", |_, a| Box::pin(query_version(a))),
    ("quit", |d, a| Box::pin(quit(d, a))),
    ("ringbuf-read", |d, a| Box::pin(chardevs::ring_read(d, a))),
    ("ringbuf-write", |d, a| Box::pin(chardevs::ring_write(d, a))),
    ("transaction", |d, a| Box::pin(transaction::carry_out(d, a))),
    ("x-blockdev-amend", |d, a| Box::pin(amend::begin(d, a))),
    ("x-blockdev-change", |d, a| Box::pin(graph::change(d, a))),
    ("x-blockdev-set-iothread", |d, a| {
        Box::pin(graph::set_iothread(d, a))
    }),
    ("x-debug-block-dirty-bitmap-sha256", |d, a| {
        Box::pin(bitmaps::sha256(d, a))
    }),
    ("x-debug-query-block-graph", |d, a| {
        Box::pin(graph::query(d, a))
    }),
    (compact::NAME, |d, a| Box::pin(jobs::compact(d, a))),
    ("x-vellum-flush", |d, a| Box::pin(nodes::flush(d, a))),
    ("x-vellum-query-chain-policies", |d, a| {
        Box::pin(chains::query(d, a))
    }),
    ("x-vellum-query-space", |d, a| Box::pin(space::query(d, a))),
    (scrub::NAME, |d, a| Box::pin(jobs::scrub(d, a))),
    ("x-vellum-set-chain-policy", |d, a| {
        Box::pin(chains::set(d, a))
    }),
];

/// Commands whose arguments may be secrets: no trace shows these.
const KEEP_ARGUMENTS: [&str; 2] = ["object-add", "qom-set"];

/// Carries a command out.
///
/// # Errors
/// What QMP answers: [`Class::CommandNotFound`] for an unknown name, else what the command
/// says.
pub async fn carry_out(daemon: &Rc<Daemon>, name: &str, arguments: Arguments) -> Outcome {
    match KEEP_ARGUMENTS.contains(&name) {
        true => trace!(name: "handle_qmp_command", command = name),
        false => {
            trace!(name: "handle_qmp_command", command = name, arguments = arguments.as_json())
        }
    }
    let outcome = match COMMANDS.iter().find(|(known, _)| *known == name) {
        Some((known, command)) => {
            let noted = daemon.state.prepare(known, &arguments);
            let outcome = command(daemon.clone(), arguments).await;
            if !only_looks(known) {
                // What was opened in vain.
                let closed = daemon.nodes.close_abandoned();
                daemon.stop.or_give_up(closed).await;
            }
            daemon.record(noted, outcome).await
        }
        None => Err(Failure::of(
            Class::CommandNotFound,
            format!("The command {name} has not been found"),
        )),
    };
    trace_answer(name, &outcome);
    outcome
}

fn trace_answer<T>(name: &str, answer: &Result<T, Failure>) {
    match answer {
        Ok(_) => trace!(name: "monitor_qmp_respond", command = name),
        Err(failure) => trace!(name: "monitor_qmp_respond", command = name, error = failure.text),
    }
}

type Writing = Pin<Box<dyn Future<Output = Written>>>;
type Writer = fn(Rc<Daemon>, Arguments) -> Writing;

/// Commands whose answers are so long that they are written straight as text.
const WRITERS: &[(&str, Writer)] = &[
    ("query-blockstats", |d, a| {
        Box::pin(block_stats::write(d, a))
    }),
    ("query-named-block-nodes", |d, a| {
        Box::pin(named_block_nodes::write(d, a))
    }),
];

/// As [`carry_out`], with the answer as the text of one line that QMP has for it.
///
/// # Errors
/// As [`carry_out`].
pub(crate) async fn write_out(daemon: &Rc<Daemon>, name: &str, arguments: Arguments) -> Written {
    let Some((_, write)) = WRITERS.iter().find(|(known, _)| *known == name) else {
        let value = carry_out(daemon, name, arguments).await?;
        return Ok(json::compact(&value));
    };
    trace!(name: "handle_qmp_command", command = name, arguments = arguments.as_json());
    let written = write(daemon.clone(), arguments).await;
    trace_answer(name, &written);
    written
}

/// What was written, as a value.
fn read_back(written: Written) -> Outcome {
    let value = serde_json::from_str(&written?);
    let value = value.map_err(|error| Failure::new(error.to_string()))?;
    Ok(json::as_added(value))
}

/// Whether there is a command of this name.
pub(crate) fn exists(name: &str) -> bool {
    name == "qmp_capabilities" || COMMANDS.iter().any(|(known, _)| *known == name)
}

/// Whether a command changes nothing, and may be given up anywhere.
pub(crate) fn only_looks(name: &str) -> bool {
    ["query-", "x-vellum-query-", "x-debug-query-"]
        .iter()
        .any(|start| name.starts_with(start))
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

async fn query_version(arguments: Arguments) -> Outcome {
    arguments.finish()?;
    Ok(qmp::version(&package()))
}

async fn query_commands(arguments: Arguments) -> Outcome {
    arguments.finish()?;
    let all = names().into_iter();
    Ok(all.map(|name| json!({"name": name})).collect())
}

/// The names of all commands.
pub(crate) fn names() -> Vec<&'static str> {
    let names = COMMANDS.iter().map(|(name, _)| *name);
    names.chain(["qmp_capabilities"]).collect()
}

async fn query_schema(arguments: Arguments) -> Outcome {
    arguments.finish()?;
    Ok(schema::introspect(&names()))
}

/// Ends the program; the answer comes when everything has ended.
async fn quit(daemon: Rc<Daemon>, arguments: Arguments) -> Outcome {
    arguments.finish()?;
    daemon.stop.request();
    daemon.ended.wait().await;
    done()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sorted() {
        assert!(COMMANDS.is_sorted_by(|a, b| a.0 < b.0));
    }
}

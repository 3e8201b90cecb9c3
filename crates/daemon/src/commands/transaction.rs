//! `transaction`: several changes at one moment, or none.
//!
//! Invariants:
//! - While actions are carried out no request runs on a disk that one of them is about, so
//!   that backups and bitmaps of several disks begin at one moment.
//! - Bitmaps are removed after all that may fail before, and those are had back of which the next one
//!   cannot be removed: until then they are in memory.
//! - Where one disk of a transaction shows another one, all between are held, and none of these for
//!   what those above ask of it: what is made durable there for a snapshot would wait for who is held
//!   up here. Where one stands on another by a way that the graph does not show, it is held first.

use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::{Either, select};
use vellum_graph::change::DrainedUsers;
use vellum_graph::live::Turns;
use vellum_graph::{Nodes, stderr};
use vellum_io::lane::sleep;

use crate::daemon::Daemon;
use crate::jobs::backup::Backup;
use crate::jobs::{self, Job, Work};
use crate::qmp::{Arguments, Failure};

use super::backup::BackupRequest;
use super::bitmaps::{BitmapUndo, Change, Kind};
use super::request::Request;
use super::snapshots::{InternalRequest, MadeInternal, MadeOverlay, OverlayRequest};

/// So long may requests to a disk take to end, at first, while another one is held up.
const PATIENCE: Duration = Duration::from_millis(500);

/// What a transaction consists of.
enum Action {
    Abort,
    Backup(Box<BackupRequest>),
    Bitmap(Change),
    Internal(InternalRequest),
    Overlay(OverlayRequest),
}

/// An action that has been carried out, and can be taken back.
enum CompletedAction {
    Backup(Rc<Job>, Box<Backup>),
    Bitmap(BitmapUndo),
    Internal(MadeInternal),
    Overlay(MadeOverlay),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Type {
    Abort,
    Backup,
    Bitmap(Kind),
    DriveBackup,
    Internal,
    NewOverlay,
    Overlay,
}

const TYPES: &[(&str, Type)] = &[
    ("abort", Type::Abort),
    ("block-dirty-bitmap-add", Type::Bitmap(Kind::Add)),
    ("block-dirty-bitmap-remove", Type::Bitmap(Kind::Remove)),
    ("block-dirty-bitmap-clear", Type::Bitmap(Kind::Clear)),
    ("block-dirty-bitmap-enable", Type::Bitmap(Kind::Enable)),
    ("block-dirty-bitmap-disable", Type::Bitmap(Kind::Disable)),
    ("block-dirty-bitmap-merge", Type::Bitmap(Kind::Merge)),
    ("blockdev-backup", Type::Backup),
    ("blockdev-snapshot", Type::Overlay),
    ("blockdev-snapshot-internal-sync", Type::Internal),
    ("blockdev-snapshot-sync", Type::NewOverlay),
    ("drive-backup", Type::DriveBackup),
];

/// The name of a type.
fn name_of(wanted: Type) -> &'static str {
    let found = TYPES.iter().find(|(_, kind)| *kind == wanted);
    found.map_or("", |(name, _)| name)
}

impl Action {
    fn take(mut arguments: Arguments) -> Result<Action, Failure> {
        let kind = arguments.need_choice("type", TYPES)?;
        let data = arguments.need_object("data")?;
        arguments.finish()?;
        Ok(match kind {
            Type::Abort => {
                data.finish()?;
                Action::Abort
            }
            Type::Backup => Action::Backup(Box::new(BackupRequest::take(data)?)),
            Type::DriveBackup => Action::Backup(Box::new(BackupRequest::take_drive(data)?)),
            Type::Bitmap(kind) => Action::Bitmap(Change::take(kind, data)?),
            Type::Internal => Action::Internal(InternalRequest::take(data)?),
            Type::NewOverlay => Action::Overlay(OverlayRequest::take_new(data)?),
            Type::Overlay => Action::Overlay(OverlayRequest::take(data)?),
        })
    }

    /// The name of an action that is no job.
    fn ungrouped(&self) -> Option<&'static str> {
        Some(name_of(match self {
            Action::Backup(_) => return None,
            Action::Abort => Type::Abort,
            Action::Bitmap(change) => Type::Bitmap(change.kind()),
            Action::Internal(_) => Type::Internal,
            Action::Overlay(asked) if asked.is_new() => Type::NewOverlay,
            Action::Overlay(_) => Type::Overlay,
        }))
    }

    /// Which disks it is about: whose users are held up.
    fn disk(&self) -> Option<&str> {
        match self {
            Action::Abort => None,
            Action::Backup(asked) => Some(asked.source()),
            Action::Bitmap(change) => Some(change.node()),
            Action::Internal(asked) => Some(asked.node()),
            Action::Overlay(asked) => Some(asked.node()),
        }
    }

    /// The nodes that have to answer while it is carried out.
    fn nodes(&self) -> Vec<String> {
        match self {
            Action::Overlay(asked) => asked.nodes(),
            Action::Bitmap(change) => change.nodes(),
            other => other.disk().into_iter().map(str::to_owned).collect(),
        }
    }

    /// Opens what is new, before what there is is held.
    async fn open(&mut self, nodes: &Nodes) -> Result<(), Failure> {
        match self {
            Action::Overlay(asked) => asked.open(nodes, Turns::Own).await,
            Action::Backup(asked) => asked.open(nodes, Turns::Own).await,
            Action::Abort | Action::Bitmap(_) | Action::Internal(_) => Ok(()),
        }
    }

    async fn make(self, daemon: &Daemon, nodes: &Nodes) -> Result<CompletedAction, Failure> {
        match self {
            Action::Internal(asked) => asked.make(nodes).await.map(CompletedAction::Internal),
            Action::Overlay(asked) => asked.make(daemon).await.map(CompletedAction::Overlay),
            Action::Abort => Err(Failure::new("Transaction aborted using Abort action")),
            Action::Bitmap(change) => change
                .make(daemon, nodes)
                .await
                .map(CompletedAction::Bitmap),
            Action::Backup(asked) => {
                let (job, backup) = asked.prepare(daemon, nodes).await?;
                Ok(CompletedAction::Backup(job, Box::new(backup)))
            }
        }
    }
}

impl CompletedAction {
    /// Takes an action back. A bitmap for which that fails keeps the change.
    ///
    /// # Errors
    /// What of it could not be taken back and matters to backups, or to whoever removes what was new.
    async fn undo(self, daemon: &Daemon, nodes: &Nodes) -> Result<(), Failure> {
        match self {
            CompletedAction::Internal(made) => made.undo(nodes).await,
            CompletedAction::Overlay(made) => made.undo(nodes).await?,
            CompletedAction::Bitmap(undo) => undo.run(nodes).await?,
            CompletedAction::Backup(job, backup) => {
                backup.leave().await;
                daemon.jobs.abandon(&job);
            }
        }
        Ok(())
    }
}

/// Takes back what was carried out, the last first; why, and what could not be.
async fn undo_all(
    made: Vec<CompletedAction>,
    daemon: &Daemon,
    nodes: &Nodes,
    why: Failure,
) -> Failure {
    let mut text = why.text;
    for action in made.into_iter().rev() {
        if let Err(failure) = action.undo(daemon, nodes).await {
            stderr::print_line(&format!("transaction: {}", failure.text));
            text += &format!("; {}", failure.text);
        }
    }
    Failure { text, ..why }
}

/// Holds up whoever uses the disks that actions are about.
async fn hold(actions: &[Action], nodes: &Nodes) -> Result<Vec<DrainedUsers>, Failure> {
    let mut targets: Vec<&str> = Vec::new();
    let mut disks: Vec<&str> = Vec::new();
    for action in actions {
        disks.extend(action.disk());
        if let Action::Backup(asked) = action {
            targets.extend(asked.target());
        }
    }
    disks.sort_unstable();
    disks.dedup();
    // The actions tell of those that are not there.
    disks.retain(|disk| nodes.contains(disk));
    let disks = with_those_between(&disks, nodes);
    // Requests to a target that stands on a disk end before those to the disk wait.
    targets.retain(|target| {
        let below = nodes.chain(target);
        nodes.contains(target) && below[1..].iter().any(|it| disks.contains(it))
    });
    let names = disks.iter().map(String::as_str);
    hold_all(targets.into_iter().chain(names).collect(), &disks, nodes).await
}

/// Disks, and those by which one of them shows another one.
fn with_those_between(disks: &[&str], nodes: &Nodes) -> Vec<String> {
    let mut all: Vec<String> = disks.iter().map(|disk| (*disk).to_owned()).collect();
    for disk in disks {
        let chain: Vec<String> = nodes.shown_chain(disk).collect();
        let lowest = chain
            .iter()
            .rposition(|node| disks.contains(&node.as_str()));
        all.extend(chain.into_iter().take(lowest.unwrap_or_default()));
    }
    all.sort_unstable();
    all.dedup();
    all
}

/// Holds up the users of several nodes, one after the other. Where requests to one of them do not
/// end while others are held, they may wait for these, by a way that the graph does not show: an
/// export of ours that is a node here. So that one is held first then.
async fn hold_all(
    mut names: Vec<&str>,
    disks: &[String],
    nodes: &Nodes,
) -> Result<Vec<DrainedUsers>, Failure> {
    let (mut patience, attempts) = (PATIENCE, 2 * names.len() + 1);
    for _ in 0..attempts {
        let mut held = Vec::with_capacity(names.len());
        let mut waiting = None;
        for (at, name) in names.iter().enumerate() {
            let drained = pin!(nodes.drain_among(name, disks));
            // Nobody waits for what is held, if nothing is.
            if at == 0 {
                held.push(drained.await?);
                continue;
            }
            match select(drained, pin!(sleep(patience))).await {
                Either::Left((drained, _)) => held.push(drained?),
                Either::Right(_) => {
                    waiting = Some(at);
                    break;
                }
            }
        }
        let Some(at) = waiting else {
            return Ok(held);
        };
        drop(held);
        let name = names.remove(at);
        names.insert(0, name);
        patience *= 2;
    }
    Err(Failure::new(format!(
        "Requests to the disks {names:?} do not end while others are held up"
    )))
}

/// Carries actions out, one after the other; of these that succeeded all are told, also
/// where one fails.
async fn make_all(
    actions: Vec<Action>,
    daemon: &Daemon,
    nodes: &Nodes,
    made: &mut Vec<CompletedAction>,
) -> Result<(), Failure> {
    let mut removals: Vec<(bool, Change)> = Vec::new();
    for action in actions {
        if let Action::Bitmap(change) = &action
            && change.kind() != Kind::Add
        {
            change.check_not_among(removals.iter().map(|(_, removal)| removal))?;
        }
        match action {
            Action::Bitmap(change) if change.kind() == Kind::Remove => {
                let is_final = !change.check_removal(daemon, nodes).await?;
                removals.push((is_final, change));
            }
            action => made.push(action.make(daemon, nodes).await?),
        }
    }
    removals.sort_by_key(|(is_final, _)| *is_final);
    for (_, removal) in removals {
        let removed = removal.make(daemon, nodes).await?;
        made.push(CompletedAction::Bitmap(removed));
    }
    Ok(())
}

/// Refuses actions whose end cannot depend on that of others.
fn check_grouped(actions: &[Action]) -> Result<(), Failure> {
    match actions.iter().find_map(Action::ungrouped) {
        None => Ok(()),
        Some(name) => Err(Failure::new(format!(
            "Action '{name}' does not support transaction property completion-mode = grouped"
        ))),
    }
}

/// `transaction`.
pub(super) struct Transaction {
    actions: Vec<Action>,
    is_grouped: bool,
}

impl Transaction {
    pub(super) fn take(mut arguments: Arguments) -> Result<Transaction, Failure> {
        let actions = arguments.need_objects("actions")?.into_iter();
        let actions = actions
            .map(Action::take)
            .collect::<Result<Vec<Action>, Failure>>()?;
        let mut is_grouped = false;
        if let Some(mut properties) = arguments.object("properties")? {
            let modes = [("individual", false), ("grouped", true)];
            is_grouped = properties
                .choice("completion-mode", &modes)?
                .unwrap_or(false);
            properties.finish()?;
        }
        arguments.finish()?;
        if is_grouped {
            check_grouped(&actions)?;
        }
        Ok(Transaction {
            actions,
            is_grouped,
        })
    }
}

pub(super) async fn carry_out(daemon: Rc<Daemon>, request: Transaction) -> Result<(), Failure> {
    let Transaction {
        mut actions,
        is_grouped,
    } = request;
    for action in &mut actions {
        daemon.open_beside(action.open(&daemon.nodes)).await?;
    }
    let names: Vec<String> = actions.iter().flat_map(Action::nodes).collect();
    daemon.wait_for_answers(&names).await?;
    let parts = daemon.parts.lock().await;
    let nodes = &parts.nodes;
    let held = hold(&actions, nodes).await?;
    let mut made = Vec::new();
    if let Err(failure) = make_all(actions, &daemon, nodes, &mut made).await {
        return Err(undo_all(made, &daemon, nodes, failure).await);
    }
    drop(held);
    if is_grouped {
        let jobs = made.iter().filter_map(|it| match it {
            CompletedAction::Backup(job, _) => Some(job),
            _ => None,
        });
        Job::group(&jobs.collect::<Vec<_>>());
    }
    // As in QEMU, the last one begins first.
    for it in made.into_iter().rev() {
        match it {
            CompletedAction::Backup(job, backup) => jobs::start(daemon.clone(), job, *backup),
            CompletedAction::Overlay(made) => made.settle(nodes).await,
            CompletedAction::Bitmap(made) => made.settle(),
            CompletedAction::Internal(_) => {}
        }
    }
    Ok(())
}

//! What a monitor does to the graph under the clients, at random.
//!
//! Invariant: whenever the daemon dies, [`Disk`] names the chain that must hold what clients
//! were promised, and, between the order to pivot and the news of it, the other one.

use std::time::Duration;

use serde_json::{Value, json};

use super::disk::{Disk, Layer, OnFull};
use super::load::Load;
use super::model::{GRANULE_BYTES, Model, Moment};
use super::monitor::{Monitor, Outcome, Silence};
use crate::random::Random;

/// How long a job may take while clients write; then it is cancelled.
pub const JOB_LIMIT: Duration = Duration::from_secs(4);
/// A job that was cancelled, or told to complete, and does not end has failed.
pub const END_LIMIT: Duration = Duration::from_secs(60);
const EXPORT: &str = "e";
const EXPORT_TRIES: usize = 500;
const EXPORT_PAUSE: Duration = Duration::from_millis(10);

/// What a monitor has done, unless the daemon says nothing any more.
pub type Done<T = ()> = std::result::Result<T, Silence>;

/// A backup that is complete, and the moment that it shows.
#[derive(Debug)]
pub struct Backup {
    /// Its image.
    pub layer: Layer,
    /// When it began.
    pub moment: Moment,
}

/// What was done about space.
#[derive(Debug, Default, Clone, Copy)]
pub struct Counts {
    /// Compactions that were begun.
    pub compactions: u64,
    /// Jobs of policies for chains.
    pub policy_jobs: u64,
    /// Of both, those that a kill has ended.
    pub cut: u64,
    /// How often there was no room.
    pub fills: u64,
    /// How often requests have met that.
    pub full: u64,
}

/// Who changes the graph.
pub struct Changes<'a> {
    /// The daemon.
    pub monitor: Monitor,
    /// Its images, which this changes.
    pub disk: &'a mut Disk,
    /// Its clients.
    pub load: &'a Load<'a>,
    /// What happens.
    pub random: Random,
    /// Backups that were completed.
    pub backups: Vec<Backup>,
    /// What was done, and with what result, for people.
    pub history: Vec<String>,
    /// What was done about space.
    pub counts: Counts,
    /// A compaction that goes on beside all else.
    pub beside: Option<String>,
    /// A compaction goes on, as far as is known.
    pub compacts: bool,
    /// A job of a policy does.
    pub keeps_short: bool,
    bitmaps: Vec<String>,
    jobs: u64,
    next_bitmap: u64,
}

impl<'a> Changes<'a> {
    /// Nothing done yet.
    pub fn new(monitor: Monitor, disk: &'a mut Disk, load: &'a Load<'a>, random: Random) -> Self {
        Changes {
            monitor,
            disk,
            load,
            random,
            backups: Vec::new(),
            history: Vec::new(),
            counts: Counts::default(),
            beside: None,
            compacts: false,
            keeps_short: false,
            bitmaps: Vec::new(),
            jobs: 0,
            next_bitmap: 0,
        }
    }

    /// Changes things until the daemon is dead, or hangs.
    pub fn run(&mut self) {
        let end = self.change();
        if matches!(end, Err(Silence::Gone)) {
            self.monitor.drain();
        }
        self.counts.full = self.monitor.full();
        self.counts.cut += u64::from(self.compacts) + u64::from(self.keeps_short);
        if let Err(Silence::Hangs(what)) = end {
            self.load.fail(format!("the daemon hangs: {what}"));
        }
    }

    fn change(&mut self) -> Done {
        if !self.disk.own.is_empty() {
            return self.operate();
        }
        if self.disk.has_policy {
            self.keep_short()?;
        } else if self.random.chance(60) {
            // Most servers do not live long.
            self.fill()?;
        }
        loop {
            std::thread::sleep(Duration::from_millis(self.random.below(60)));
            let long = self.disk.chain.len() > 3;
            let recorded = self.disk.log.is_some();
            let most = match self.disk.on_full {
                _ if recorded || !self.disk.is_ours => 100,
                None => 114,
                Some(_) => 150,
            };
            match self.random.below(most) {
                0..85 if recorded => self.bitmap()?,
                _ if recorded => self.remove_export()?,
                0..30 if !long => self.snapshot()?,
                0..40 => self.commit_active()?,
                40..48 => self.commit_middle()?,
                48..60 => self.stream()?,
                60..68 => self.backup()?,
                68..78 => self.bitmap()?,
                78..86 => self.reopen()?,
                86..89 => self.rename_backing()?,
                89..92 => self.snapshot_inside()?,
                92..94 => self.resize_in_use()?,
                100..114 => self.compact()?,
                114.. => self.fill()?,
                _ => self.remove_export()?,
            }
        }
    }

    /// Has this stand in the history.
    pub fn note(&mut self, what: impl Into<String>) {
        self.history.push(what.into());
    }

    /// Has the daemon carry a command out, and notes what came of it.
    pub fn ask(&mut self, name: &str, arguments: Value) -> Done<Outcome> {
        let outcome = self.monitor.ask(name, arguments.clone())?;
        let verdict = match &outcome {
            Ok(_) => "ok".to_owned(),
            Err(why) => why.clone(),
        };
        self.note(format!("{name} {arguments}: {verdict}"));
        Ok(outcome)
    }

    /// The node of the uppermost image.
    pub fn top(&self) -> String {
        self.disk.chain.last().map(Layer::node).unwrap_or_default()
    }

    fn size_bytes(&self) -> u64 {
        (self.load.model.granules() * GRANULE_BYTES) as u64
    }

    /// Adds a node for an image that stands on nothing as yet.
    fn add_node(&mut self, layer: &Layer) -> Done<bool> {
        let file = json!({"driver": "file", "filename": layer.file, "discard": "unmap"});
        let node = json!({
            "driver": layer.format, "node-name": layer.node(), "file": file,
            "discard": "unmap", "backing": null,
        });
        Ok(self.ask("blockdev-add", node)?.is_ok())
    }

    fn new_image(&mut self, below: Option<usize>) -> Option<Layer> {
        let below = below.and_then(|index| self.disk.chain.get(index));
        let made = self
            .disk
            .new_image(self.size_bytes(), below, &mut self.random);
        match made {
            Ok(layer) => {
                self.disk.files += 1;
                Some(layer)
            }
            Err(error) => {
                self.load
                    .fail(format!("an image cannot be made: {error:#}"));
                None
            }
        }
    }

    /// Puts an overlay on the disk.
    pub fn snapshot(&mut self) -> Done {
        let Some(layer) = self.new_image(Some(self.disk.chain.len() - 1)) else {
            return Ok(());
        };
        // Opened by the command itself, or before.
        let (command, arguments) = if self.random.chance(30) {
            let arguments = json!({
                "node-name": self.top(), "snapshot-file": layer.file, "mode": "existing",
                "snapshot-node-name": layer.node(), "format": layer.format,
            });
            ("blockdev-snapshot-sync", arguments)
        } else {
            if !self.add_node(&layer)? {
                return Ok(());
            }
            let arguments = json!({"node": self.top(), "overlay": layer.node()});
            ("blockdev-snapshot", arguments)
        };
        // Its header names what it stands on: read through it, the disk is right whether
        // users have been led there or not.
        self.disk.chain.push(layer.clone());
        if self.ask(command, arguments)?.is_err() {
            self.disk.chain.pop();
            let _ = self.ask("blockdev-del", json!({"node-name": layer.node()}))?;
        } else {
            self.bitmaps.clear();
        }
        Ok(())
    }

    /// Opens the top anew under its clients, alone or with the image below it.
    fn reopen(&mut self) -> Done {
        let height = self.disk.chain.len();
        let count = 1 + usize::from(height > 1 && self.random.chance(30));
        let mut all = Vec::new();
        for at in (height - count..height).rev() {
            let layer = &self.disk.chain[at];
            let zeroes = self.random.pick(&["off", "on", "unmap"]);
            let file = json!({"driver": "file", "filename": layer.file, "discard": "unmap"});
            let mut node = json!({
                "driver": layer.format, "node-name": layer.node(), "file": file,
                "discard": "unmap", "read-only": at + 1 < height, "detect-zeroes": zeroes,
            });
            if layer.format == "qcow2" {
                let below = at.checked_sub(1).map(|at| self.disk.chain[at].node());
                node["backing"] = json!(below);
            }
            all.push(node);
        }
        self.ask("blockdev-reopen", json!({"options": all}))
            .map(drop)
    }

    /// Writes into a header what the image stands on, in other words each time.
    fn rename_backing(&mut self) -> Done {
        let height = self.disk.chain.len();
        if height < 2 {
            return Ok(());
        }
        let at = self.random.between(1, height as u64 - 1) as usize;
        let below = &self.disk.chain[at - 1].file;
        let name = match self.random.chance(50) {
            true => below.clone(),
            false => format!("./{below}"),
        };
        let arguments = json!({
            "device": self.top(), "image-node-name": self.disk.chain[at].node(),
            "backing-file": name,
        });
        self.ask("change-backing-file", arguments).map(drop)
    }

    /// A snapshot inside the top, which goes again, mostly.
    fn snapshot_inside(&mut self) -> Done {
        self.jobs += 1;
        let name = format!("s{}-{}", self.disk.files, self.jobs);
        let arguments = json!({"device": self.top(), "name": name});
        let taken = self.ask("blockdev-snapshot-internal-sync", arguments.clone())?;
        if taken.is_ok() && self.random.chance(80) {
            return self
                .ask("blockdev-snapshot-delete-internal-sync", arguments)
                .map(drop);
        }
        Ok(())
    }

    /// The name of another job.
    pub fn new_job(&mut self) -> String {
        self.jobs += 1;
        format!("j{}", self.jobs)
    }

    /// Waits for the end of a job; whether it has done its work.
    fn end(&mut self, job: &str) -> Done<bool> {
        Ok(self.end_with(job)?.is_ok())
    }

    /// As [`Self::end`]; what was wrong.
    pub fn end_with(&mut self, job: &str) -> Done<std::result::Result<(), String>> {
        if let Some(end) = self.monitor.wait_end(job, JOB_LIMIT)? {
            self.note(format!("{job} ended: {end:?}"));
            return Ok(end);
        }
        let _ = self.ask("job-cancel", json!({"id": job}))?;
        match self.monitor.wait_end(job, END_LIMIT)? {
            Some(end) => {
                self.note(format!("{job} cancelled: {end:?}"));
                Ok(end)
            }
            None => Err(Silence::Hangs(format!("{job} does not end"))),
        }
    }

    /// Removes nodes that have left the chain, from the top down.
    pub fn forget(&mut self, layers: Vec<Layer>) -> Done {
        for layer in layers.into_iter().rev() {
            let _ = self.ask("blockdev-del", json!({"node-name": layer.node()}))?;
        }
        Ok(())
    }

    fn commit_active(&mut self) -> Done {
        let height = self.disk.chain.len();
        if height < 2 {
            return Ok(());
        }
        let base = self.random.below(height as u64 - 1) as usize;
        let job = self.new_job();
        let arguments = json!({
            "job-id": job, "device": self.top(), "base-node": self.disk.chain[base].node(),
        });
        if self.ask("block-commit", arguments)?.is_err() {
            return Ok(());
        }
        match self.monitor.wait_ready(&job, JOB_LIMIT)? {
            Some(true) if self.random.chance(80) => {}
            Some(false) => {
                self.end(&job)?;
                return Ok(());
            }
            ready => {
                self.note(format!("{job} ready: {ready:?}"));
                let _ = self.ask("job-cancel", json!({"id": job}))?;
                self.end(&job)?;
                return Ok(());
            }
        }
        self.disk.pivot = Some(base + 1);
        let answer = self.ask("job-complete", json!({"id": job}))?;
        let done = match self.monitor.wait_end(&job, END_LIMIT)? {
            Some(end) => end,
            None => return Err(Silence::Hangs(format!("{job} does not complete"))),
        };
        self.note(format!("{job} completed: {answer:?}, {done:?}"));
        self.disk.pivot = None;
        if done.is_ok() {
            let gone = self.disk.chain.split_off(base + 1);
            self.bitmaps.clear();
            self.forget(gone)?;
        }
        Ok(())
    }

    /// Two layers in the middle become one.
    fn commit_middle(&mut self) -> Done {
        let height = self.disk.chain.len();
        if height < 3 {
            return Ok(());
        }
        let upper = self.random.between(1, height as u64 - 2) as usize;
        let base = self.random.below(upper as u64) as usize;
        let job = self.new_job();
        let arguments = json!({
            "job-id": job, "device": self.top(), "top-node": self.disk.chain[upper].node(),
            "base-node": self.disk.chain[base].node(),
        });
        if self.ask("block-commit", arguments)?.is_ok() && self.end(&job)? {
            let gone = self.disk.chain.drain(base + 1..=upper).collect();
            self.forget(gone)?;
        }
        Ok(())
    }

    /// Has the top take in what lies below it, or a part.
    pub fn stream(&mut self) -> Done {
        let height = self.disk.chain.len();
        if height < 2 {
            return Ok(());
        }
        let job = self.new_job();
        let base = self.random.below(height as u64 - 1) as usize;
        let mut arguments = json!({"job-id": job, "device": self.top()});
        // What stays below, or everything goes.
        let stays = if self.random.chance(60) { 0 } else { base + 1 };
        if stays > 0 {
            arguments["base-node"] = json!(self.disk.chain[base].node());
        }
        if self.ask("block-stream", arguments)?.is_ok() && self.end(&job)? {
            let gone = self.disk.chain.drain(stays..height - 1).collect();
            self.forget(gone)?;
        }
        Ok(())
    }

    /// The disk is another one by now.
    pub fn forget_bitmaps(&mut self) {
        self.bitmaps.clear();
    }

    fn backup(&mut self) -> Done {
        if !self.backups.is_empty() {
            return Ok(());
        }
        let Some(layer) = self.new_image(None) else {
            return Ok(());
        };
        if !self.add_node(&layer)? {
            return Ok(());
        }
        let job = self.new_job();
        let backup = json!({
            "job-id": job, "device": self.top(), "target": layer.node(), "sync": "full",
        });
        let from = self.load.model.tick();
        if self.random.chance(20) {
            self.abort(&[json!({"type": "blockdev-backup", "data": backup})])?;
        }
        let begun = if self.random.chance(50) {
            let bitmap = self.new_bitmap();
            let actions = json!([
                {"type": "block-dirty-bitmap-add", "data": bitmap},
                {"type": "blockdev-backup", "data": backup},
            ]);
            self.ask("transaction", json!({"actions": actions}))?
        } else {
            self.ask("blockdev-backup", backup)?
        };
        let moment = Model::picture(from, self.load.model.tick());
        let done = begun.is_ok() && self.end(&job)?;
        let closed = self.ask("blockdev-del", json!({"node-name": layer.node()}))?;
        if done && closed.is_ok() {
            self.backups.push(Backup { layer, moment });
        }
        Ok(())
    }

    /// A transaction that does all this, or would if its end let it.
    fn abort(&mut self, actions: &[Value]) -> Done {
        let mut actions = actions.to_vec();
        actions.push(json!({"type": "abort", "data": {}}));
        let done = self.ask("transaction", json!({"actions": actions}))?;
        if done.is_ok() {
            self.load
                .fail("a transaction that must fail has not".to_owned());
        }
        Ok(())
    }

    fn new_bitmap(&mut self) -> Value {
        self.next_bitmap += 1;
        // Those of earlier rounds may still be there.
        let name = format!("b{}-{}", self.disk.files, self.next_bitmap);
        self.bitmaps.push(name.clone());
        json!({"node": self.top(), "name": name, "persistent": true})
    }

    /// Adds a bitmap to the top, or does something with one.
    pub fn bitmap(&mut self) -> Done {
        if self.bitmaps.is_empty() || self.bitmaps.len() < 4 && self.random.chance(50) {
            let bitmap = self.new_bitmap();
            if self.random.chance(25) {
                let add = json!({"type": "block-dirty-bitmap-add", "data": bitmap});
                self.abort(&[add])?;
            }
            return self.ask("block-dirty-bitmap-add", bitmap).map(drop);
        }
        let index = self.random.below(self.bitmaps.len() as u64) as usize;
        let command = self
            .random
            .pick(&["remove", "remove", "clear", "disable", "enable"]);
        let name = match command {
            "remove" => self.bitmaps.swap_remove(index),
            _ => self.bitmaps[index].clone(),
        };
        let arguments = json!({"node": self.top(), "name": name});
        let command = format!("block-dirty-bitmap-{command}");
        if self.random.chance(30) {
            // In one with others, which fails now and then.
            let action = json!({"type": command, "data": arguments});
            if self.random.chance(30) {
                self.abort(std::slice::from_ref(&action))?;
            }
            let bitmap = self.new_bitmap();
            let actions = json!([action, {"type": "block-dirty-bitmap-add", "data": bitmap}]);
            return self
                .ask("transaction", json!({"actions": actions}))
                .map(drop);
        }
        self.ask(&command, arguments).map(drop)
    }

    /// Takes the export or its server away from all clients; `false` if it was refused.
    fn hang_up(&mut self) -> Done<bool> {
        if self.random.chance(40) {
            // Clients are in its way, mostly.
            let del = json!({"id": EXPORT, "mode": "safe"});
            if self.ask("block-export-del", del)?.is_ok() {
                return Ok(true);
            }
        }
        if self.random.chance(60) {
            let del = json!({"id": EXPORT, "mode": "hard"});
            return Ok(self.ask("block-export-del", del)?.is_ok());
        }
        if self.ask("nbd-server-stop", json!({}))?.is_err() {
            return Ok(false);
        }
        let path = self.disk.folder.join("socket");
        let address = json!({"type": "unix", "data": {"path": path}});
        let server = json!({"addr": address, "max-connections": 0});
        if let Err(error) = self.ask("nbd-server-start", server)? {
            self.load
                .fail(format!("the server does not start again: {error}"));
        }
        Ok(true)
    }

    /// Hangs up on all clients, makes the disk larger now and then, and lets them in again.
    pub fn remove_export(&mut self) -> Done {
        if !self.hang_up()? {
            return Ok(());
        }
        if self.disk.log.is_none() && self.random.chance(30) {
            let granules = self.load.model.granules();
            let more = 8 * self.random.between(1, 4096) as usize;
            let size_bytes = ((granules + more) * GRANULE_BYTES) as u64;
            self.disk.old_size_bytes = Some(self.size_bytes());
            let resize = json!({"node-name": self.top(), "size": size_bytes});
            self.load.model.grow(granules + more);
            if self.ask("block_resize", resize)?.is_err() {
                self.load.model.shrink(granules);
            }
            self.disk.old_size_bytes = None;
        }
        let export = export(&self.top(), self.disk.on_full);
        for _ in 0..EXPORT_TRIES {
            if self.ask("block-export-add", export.clone())?.is_ok() {
                return Ok(());
            }
            // QEMU's daemon has done with the old one a little later than it says.
            std::thread::sleep(EXPORT_PAUSE);
        }
        self.load.fail("clients are not let in again".to_owned());
        Ok(())
    }

    /// What clients use keeps its size.
    fn resize_in_use(&mut self) -> Done {
        let size_bytes = self.size_bytes() + (1 << 20);
        let resize = json!({"node-name": self.top(), "size": size_bytes});
        if self.ask("block_resize", resize)?.is_ok() {
            self.load.fail("a disk grew under its clients".to_owned());
        }
        Ok(())
    }
}

/// The export of a node that all clients use.
pub fn export(node: &str, on_full: Option<OnFull>) -> Value {
    let mut export =
        json!({"type": "nbd", "id": EXPORT, "node-name": node, "name": "", "writable": true});
    match on_full {
        Some(OnFull::Wait) => export["on-full"] = json!("wait"),
        Some(OnFull::Fail) => export["on-full"] = json!("fail"),
        None => {}
    }
    export
}

//! What a monitor does about space, beside its other changes: files that become short, chains that a
//! policy keeps short, and a file system that is full for a while. These are commands of ours.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::changes::{Changes, Done, END_LIMIT, JOB_LIMIT};
use super::disk::{Layer, OnFull};
use super::monitor::Silence;

/// What takes all the room, in the disk's folder.
const FILLER: &str = "filler";
/// So little room is no room.
const PAGE_BYTES: u64 = 4096;
/// Of a disk that gets another one so that it needs room.
const MOST_LAYERS: usize = 5;
const LOOK_PAUSE: Duration = Duration::from_millis(20);
/// Policies are looked at every two seconds.
const POLICY_LIMIT: Duration = Duration::from_secs(8);
/// Errors of jobs that are none: leaks of kills before, a file system that was full, and cancels.
const ALLOWED: [&str; 4] = [
    "leaked clusters",
    "No space left",
    "cancelled",
    "Operation canceled",
];

/// Room that is taken, until this value goes.
struct Filler {
    file: File,
    path: PathBuf,
}

impl Filler {
    /// Takes all that there is.
    fn take(folder: &Path) -> std::io::Result<Filler> {
        let path = folder.join(FILLER);
        let file = File::create(&path)?;
        let filler = Filler { file, path };
        let mut end = 0;
        loop {
            let left = rustix::fs::statvfs(folder)?;
            let left_bytes = left.f_bavail * left.f_frsize;
            if left_bytes < PAGE_BYTES {
                return Ok(filler);
            }
            let mode = rustix::fs::FallocateFlags::empty();
            match rustix::fs::fallocate(&filler.file, mode, end, left_bytes) {
                Ok(()) => end += left_bytes,
                // Others were faster.
                Err(rustix::io::Errno::NOSPC) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl Drop for Filler {
    fn drop(&mut self) {
        // A program that is being started has the file open too for a moment. If one of these fails, all
        // that follows does.
        let _ = self.file.set_len(0);
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Whether a job may end so.
fn may_end(error: &str) -> bool {
    ALLOWED.iter().any(|allowed| error.contains(allowed))
}

impl Changes<'_> {
    /// Has the file of the top become short, while nothing else is changed or beside what comes next.
    pub fn compact(&mut self) -> Done {
        if self.look_beside()? {
            return Ok(());
        }
        let job = self.new_job();
        let waits = self.random.chance(60);
        let speed = self.random.pick(&[0, 0, 1 << 20, 4 << 20]);
        let arguments = json!({
            "job-id": job, "device": self.top(), "speed": speed, "auto-dismiss": waits,
        });
        if self.ask("x-vellum-compact", arguments)?.is_err() {
            return Ok(());
        }
        self.counts.compactions += 1;
        self.compacts = true;
        if !waits {
            self.beside = Some(job);
            return Ok(());
        }
        let end = self.end_with(&job)?;
        self.compacts = false;
        if let Err(error) = end {
            self.expect_allowed("a compaction", &error);
        }
        Ok(())
    }

    fn expect_allowed(&self, what: &str, error: &str) {
        if !may_end(error) {
            self.load.fail(format!("{what} failed: {error}"));
        }
    }

    /// All jobs that there are.
    pub fn jobs(&mut self) -> Done<Vec<Value>> {
        let jobs = self.monitor.ask("query-jobs", json!({}))?;
        let jobs = jobs.ok().and_then(|jobs| jobs.as_array().cloned());
        Ok(jobs.unwrap_or_default())
    }

    /// Whether a compaction goes on beside all else; one that has ended is looked at.
    fn look_beside(&mut self) -> Done<bool> {
        let Some(job) = self.beside.clone() else {
            return Ok(false);
        };
        let jobs = self.jobs()?;
        if let Some(found) = jobs.iter().find(|found| found["id"] == job.as_str()) {
            if found["status"] != "concluded" {
                return Ok(true);
            }
            if let Some(error) = found["error"].as_str() {
                self.expect_allowed("a compaction", error);
            }
            let _ = self.ask("job-dismiss", json!({"id": job}))?;
        }
        self.beside = None;
        self.compacts = false;
        Ok(false)
    }

    /// Bounds the chain, sees the policy's job to its end, and takes the policy away.
    ///
    /// While the policy may act, nothing else changes the chain: a person could not tell either where
    /// the disk is.
    pub fn keep_short(&mut self) -> Done {
        while self.disk.chain.len() < 3 {
            let before = self.disk.chain.len();
            self.snapshot()?;
            if self.disk.chain.len() == before {
                return Ok(());
            }
        }
        let height = self.disk.chain.len();
        let own = self.random.below(height as u64) as usize;
        let name = self.disk.chain[own].node();
        let mut policy = json!({
            "node-name": name, "speed": self.random.pick(&[0, 1 << 20, 4 << 20, 16 << 20]),
        });
        if self.random.chance(70) {
            policy["max-layers"] = json!(self.random.between(1, height as u64 - 1));
        }
        if policy.get("max-layers").is_none() || self.random.chance(20) {
            policy["max-overlay-bytes"] = json!(self.random.below(1 << 20));
        }
        // Users may be led to the policy's image at any time from now on.
        self.disk.pivot = Some(own + 1);
        if self.ask("x-vellum-set-chain-policy", policy)?.is_ok() {
            self.see_policy(&name)?;
        }
        self.follow()?;
        self.disk.pivot = None;
        Ok(())
    }

    /// Looks whether a policy has a job.
    fn look_at_policies(&mut self) -> Done {
        let is_policys = |job: &Value| {
            job["id"]
                .as_str()
                .is_some_and(|id| id.starts_with("chain-"))
        };
        let keeps = self.jobs()?.iter().any(is_policys);
        if keeps && !self.keeps_short {
            self.note("a policy has begun a job");
            self.counts.policy_jobs += 1;
        }
        self.keeps_short = keeps;
        Ok(())
    }

    /// Waits for the job of a policy and its end, and for that of the policy.
    fn see_policy(&mut self, name: &str) -> Done {
        let job = format!("chain-{name}");
        let begun = Instant::now();
        let mut seen = false;
        while begun.elapsed() < POLICY_LIMIT {
            self.look_at_policies()?;
            if seen && !self.keeps_short {
                break;
            }
            seen |= self.keeps_short;
            if self.random.chance(3) {
                self.compact()?;
            }
            std::thread::sleep(LOOK_PAUSE);
        }
        let told = self.ask("x-vellum-query-chain-policies", json!({}))?;
        self.note(format!("{told:?}"));
        let _ = self.ask("x-vellum-set-chain-policy", json!({"node-name": name}))?;
        let deadline = Instant::now() + END_LIMIT;
        self.look_at_policies()?;
        while self.keeps_short {
            self.look_at_policies()?;
            if Instant::now() > deadline {
                return Err(Silence::Hangs(format!("{job} does not end")));
            }
            std::thread::sleep(LOOK_PAUSE);
        }
        Ok(())
    }

    /// The files of the images that clients are shown, from the top down.
    fn shown(&mut self) -> Done<Vec<String>> {
        let exports = self.monitor.ask("query-block-exports", json!({}))?;
        let exports = exports.unwrap_or_default();
        let nodes = self.monitor.ask("query-named-block-nodes", json!({}))?;
        let nodes = nodes.unwrap_or_default();
        let top = &exports[0]["node-name"];
        let mut all = nodes.as_array().into_iter().flatten();
        let shown = all.find(|node| node["node-name"] == *top);
        let mut image = shown.map(|node| &node["image"]);
        let mut files = Vec::new();
        while let Some(name) = image.and_then(|image| image["filename"].as_str()) {
            let file = Path::new(name).file_name().unwrap_or_default();
            files.push(file.to_string_lossy().into_owned());
            image = image.map(|image| &image["backing-image"]);
        }
        Ok(files)
    }

    /// Finds out where a policy has led the clients, and forgets the nodes that have left the chain.
    fn follow(&mut self) -> Done {
        let files = self.shown()?;
        self.note(format!("clients are on {files:?}"));
        let all = std::mem::take(&mut self.disk.chain);
        let stays = |layer: &Layer| files.contains(&layer.file);
        let (chain, gone) = all.into_iter().partition(stays);
        self.disk.chain = chain;
        if self.disk.chain.len() != files.len() || self.disk.chain.is_empty() {
            self.load
                .fail(format!("no chain that there was: {files:?}"));
        }
        self.forget_bitmaps();
        self.forget(gone)
    }

    /// Takes the chain to be what clients are shown now; a moment later it may be another one.
    pub fn look_where_clients_are(&mut self) -> Done {
        self.look_at_policies()?;
        let files = self.shown()?;
        let layer = |file: String| Layer {
            format: if file.ends_with(".raw") {
                "raw"
            } else {
                "qcow2"
            },
            file,
            lazy: false,
        };
        if !files.is_empty() {
            self.disk.chain = files.into_iter().rev().map(layer).collect();
        }
        Ok(())
    }

    /// Takes all room for a while: alone, below a job, or below an export that goes.
    pub fn fill(&mut self) -> Done {
        let Some(on_full) = self.disk.on_full else {
            return Ok(());
        };
        if self.disk.chain.len() < MOST_LAYERS {
            // What has everything needs nothing.
            self.snapshot()?;
        }
        let filler = match Filler::take(&self.disk.folder) {
            Ok(filler) => filler,
            Err(error) => {
                self.load.fail(format!("no room can be taken: {error}"));
                return Ok(());
            }
        };
        self.counts.fills += 1;
        self.note(format!("full, clients are told to {on_full:?}"));
        match self.random.below(10) {
            0..3 => self.compact()?,
            3..5 => self.bitmap()?,
            5 if on_full == OnFull::Wait => self.remove_export()?,
            _ => {}
        }
        let pause = self
            .random
            .pick(&[20, 200, 200, JOB_LIMIT.as_millis() as u64 / 4]);
        std::thread::sleep(Duration::from_millis(self.random.below(pause)));
        drop(filler);
        self.note("there is room again");
        Ok(())
    }
}

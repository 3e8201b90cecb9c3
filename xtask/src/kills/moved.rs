//! A guest that moves: another machine takes over its memory while it writes (live migration), and
//! reaches the disk through another export of the same daemon.
//!
//! What the daemon writes to the guest's memory meanwhile must be in the log of dirty pages
//! (`VHOST_F_LOG_ALL`), or the guest reads something else afterwards.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::json;
use vellum_testing::Qmp;

use super::{DURABLE, GUEST_LIMIT, Kills, durable};
use crate::guest::{Disk, Running};
use crate::process::ShortPath;

const OTHER_SOCKET: &str = "other.sock";
/// Of a guest whose memory changes as fast as this emulated one's.
const MOVE_LIMIT: Duration = Duration::from_secs(120);
const START_LIMIT: Duration = Duration::from_secs(10);
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
const DOWNTIME_LIMIT_MS: u64 = 300;
/// Files that the guest makes durable between two moves, at least.
const FILES_BETWEEN: usize = 4;

/// A machine with the guest, or one that waits for it.
struct Machine {
    guest: Running,
    monitor: Qmp,
}

impl Kills<'_> {
    /// Moves a guest so often; what to say of it.
    pub(super) fn move_guest(&self, moves: usize) -> Result<String> {
        let other = ShortPath::new(self.folder, OTHER_SOCKET)?;
        let export = format!(
            "type=vhost-user-blk,id=other,node-name=disk,writable=on,num-queues={},addr.type=unix,addr.path={}",
            self.plan.queues,
            other.path()
        );
        let daemon = self.serve_as("writable=on", &["--export", &export])?;
        let sockets = [self.socket.path(), other.path()];
        let mut here = self.machine(0, sockets[0], false)?;
        here.guest.wait_for("GUEST: begins", 1, GUEST_LIMIT)?;
        let (mut files, mut longest_pause_ms) = (0, 0);
        for number in 1..=moves {
            // The last one's console may have ended in the middle of a line.
            here.guest.wait_for(DURABLE, FILES_BETWEEN, GUEST_LIMIT)?;
            let mut there = self.machine(number, sockets[number % 2], true)?;
            let pause_ms = move_to(&mut here.monitor, &mut there.monitor, number)
                .with_context(|| format!("move {number}"))?;
            longest_pause_ms = longest_pause_ms.max(pause_ms);
            files += durable(&here.guest.console()?).len();
            here.guest.kill()?;
            here = there;
        }
        here.guest
            .wait_for(DURABLE, FILES_BETWEEN, GUEST_LIMIT)
            .context("after the last move")?;
        here.guest.say("stop")?;
        files += durable(&here.guest.wait()?).len();
        daemon.stop()?;
        Ok(format!(
            "moved {moves} times with {files} files, and paused {longest_pause_ms} ms at most"
        ))
    }

    fn machine(&self, number: usize, socket: &str, waits: bool) -> Result<Machine> {
        let disk = Disk::VhostUser {
            socket,
            queues: self.plan.queues,
        };
        let monitor = format!("machine{number}.sock");
        let mut words = vec![
            "-qmp".to_owned(),
            format!("unix:{monitor},server=on,wait=off"),
        ];
        if waits {
            words.extend(["-incoming".to_owned(), "defer".to_owned()]);
        }
        let script = include_str!("../../guest/kills.sh");
        let log = format!("guest{number}.log");
        let (guest, words) = (self.guest, (&words[..], &log[..]));
        let guest = guest.start_as(self.folder, &disk, script, &[], words)?;
        let socket = ShortPath::new(self.folder, &monitor)?;
        let deadline = Instant::now() + START_LIMIT;
        let monitor = loop {
            match Qmp::try_connect(socket.path()) {
                Ok(monitor) => break monitor,
                Err(error) if Instant::now() > deadline => return Err(error.into()),
                Err(_) => std::thread::sleep(LOOK_INTERVAL),
            }
        };
        Ok(Machine { guest, monitor })
    }
}

/// Moves a guest, and tells for how long it paused, in ms.
fn move_to(here: &mut Qmp, there: &mut Qmp, number: usize) -> Result<u64> {
    let address = json!({"uri": format!("unix:move{number}.sock")});
    there.try_must("migrate-incoming", address.clone())?;
    let limits = json!({"max-bandwidth": 1_u64 << 30, "downtime-limit": DOWNTIME_LIMIT_MS});
    here.try_must("migrate-set-parameters", limits)?;
    here.try_must("migrate", address)?;
    let deadline = Instant::now() + MOVE_LIMIT;
    loop {
        let told = here.try_must("query-migrate", json!({}))?;
        match told["status"].as_str() {
            Some("completed") => return told["downtime"].as_u64().context("no downtime"),
            Some("failed" | "cancelled") => bail!("it failed: {told}"),
            _ if Instant::now() > deadline => bail!("it does not end: {told}"),
            _ => std::thread::sleep(LOOK_INTERVAL),
        }
    }
}

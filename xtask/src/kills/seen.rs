//! What the guest sees of its disk: blocks, queues, serial number, another size while it runs, and
//! that it is only read.

use anyhow::{Context, Result};
use serde_json::json;
use vellum_testing::Qmp;

use super::{DISK_BYTES, GUEST_LIMIT, Kills};
use crate::process::ShortPath;

const SECTOR_BYTES: u64 = 512;
/// As `disk.sh` expects it.
const LOOK: &str = "logical-block-size=4096,serial=the demo's";
const MONITOR: &str = "monitor.sock";

impl Kills<'_> {
    /// Boots twice on the disk: it becomes larger under the guest, then it is only read.
    pub fn look(&self) -> Result<()> {
        let monitor = format!("socket,id=monitor,path={MONITOR},server=on,wait=off");
        let words = ["--chardev", &monitor, "--monitor", "monitor"];
        let daemon = self.serve_as(&format!("writable=on,{LOOK}"), &words)?;
        let larger_bytes = 2 * DISK_BYTES;
        let wanted = format!("{} {}\n", self.plan.queues, larger_bytes / SECTOR_BYTES);
        let mut guest = self.start_guest(include_str!("../../guest/disk.sh"), &wanted)?;
        let seen = format!("GUEST: sees {}", DISK_BYTES / SECTOR_BYTES);
        guest.wait_for(&seen, 1, GUEST_LIMIT)?;
        self.resize(larger_bytes)?;
        guest.wait().context("a disk that becomes larger")?;
        daemon.stop()?;

        let daemon = self.serve_as(&format!("writable=off,{LOOK}"), &[])?;
        let wanted = format!("{} read-only\n", self.plan.queues);
        let guest = self.start_guest(include_str!("../../guest/disk.sh"), &wanted)?;
        guest.wait().context("a disk that is only read")?;
        daemon.stop()
    }

    /// Has the daemon change the size of the disk.
    fn resize(&self, size_bytes: u64) -> Result<()> {
        let socket = ShortPath::new(self.folder, MONITOR)?;
        let mut monitor = Qmp::try_connect(socket.path())?;
        let resize = json!({"node-name": "disk", "size": size_bytes});
        monitor.try_must("block_resize", resize)?;
        Ok(())
    }
}

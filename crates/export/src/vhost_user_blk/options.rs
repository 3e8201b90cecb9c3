//! How a device is exported, and which of that is possible.

use std::time::Duration;

use vellum_io::{Error, ErrorKind, Result};

use super::config::SERIAL_BYTES;
use crate::fair_depth::FairDepth;
use crate::room::WhenFull;
use crate::unflushed_logs::UnflushedLogs;

/// How a device is exported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Changes are refused.
    pub read_only: bool,
    /// What requests are a multiple of, in bytes: a power of two from 512 to 65,536.
    pub logical_block_bytes: u32,
    /// How many queues a client may set up: 1 to 64.
    pub queues: u16,
    /// Writes are durable when they are answered.
    pub write_through: bool,
    /// What the guest sees as the disk's serial number; at most 20 bytes.
    pub serial: String,
    /// How long a queue looks for requests at most before it sleeps. Within that it finds out by
    /// itself how long is worth it; zero: not at all.
    pub poll_limit: Duration,
    /// Exports that it must not keep waiting.
    pub fair_depth: FairDepth,
    /// What becomes of requests for which the device has no room.
    pub when_full: WhenFull,
    /// The logs of the exports of this program: of others of the same disk, too.
    pub logs: UnflushedLogs,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            read_only: true,
            logical_block_bytes: 512,
            queues: 1,
            write_through: false,
            serial: "vellum".to_owned(),
            poll_limit: Duration::from_micros(32),
            fair_depth: FairDepth::default(),
            when_full: WhenFull::Fail,
            logs: UnflushedLogs::default(),
        }
    }
}

impl Options {
    /// Most queues of an export.
    pub const MAX_QUEUES: u16 = 64;

    /// Refuses what no client could be offered.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for what is out of range.
    pub(super) fn check(&self) -> Result<()> {
        let refuse = |message: String| {
            let error = Error::new(ErrorKind::InvalidArgument, "export", message);
            Err(error.target("vhost-user-blk"))
        };
        let block_bytes = self.logical_block_bytes;
        if !block_bytes.is_power_of_two() || !(512..=65536).contains(&block_bytes) {
            return refuse(format!("a logical block of {block_bytes} bytes"));
        }
        if self.queues == 0 || self.queues > Self::MAX_QUEUES {
            return refuse(format!(
                "{} queues: 1 to {} are possible",
                self.queues,
                Self::MAX_QUEUES
            ));
        }
        if self.serial.len() > SERIAL_BYTES {
            return refuse(format!("a serial number of more than {SERIAL_BYTES} bytes"));
        }
        Ok(())
    }
}

//! What is asked of a server: 4 KiB at random places, and of which image.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;

use crate::process;
use crate::random::Random;

/// Length of a request in bytes.
pub const BLOCK_BYTES: u64 = 4096;
const MIB: u64 = 1 << 20;

/// How much is asked for at a time.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    /// Queues, connections or readers, each with a thread.
    pub clients: usize,
    /// Requests in flight of each.
    pub depth: usize,
    /// Writes, or reads.
    pub writes: bool,
    /// How long is measured.
    pub duration: Duration,
    /// Size of the disk in bytes.
    pub disk_bytes: u64,
}

/// Where images lie.
#[derive(Debug, Clone)]
pub struct Place {
    pub name: &'static str,
    pub folder: PathBuf,
    /// Around the page cache.
    pub is_direct: bool,
}

impl Place {
    /// Makes the images there: all of both is written.
    pub fn new(
        name: &'static str,
        folder: &Path,
        is_direct: bool,
        formats: &[String],
        disk_bytes: u64,
    ) -> Result<Self> {
        let raw = folder.join("raw");
        let mut random = Random::new(1);
        let mut bytes = vec![0; MIB as usize];
        let mut file = std::fs::File::create(&raw)?;
        for _ in 0..disk_bytes / MIB {
            random.fill(&mut bytes);
            std::io::Write::write_all(&mut file, &bytes)?;
        }
        file.sync_all()?;
        for format in formats.iter().filter(|format| *format != "raw") {
            let mut convert = process::program("qemu-img")?;
            convert.args(["convert", "-f", "raw", "-O", format]);
            process::output(convert.arg(&raw).arg(folder.join(format)))?;
            std::fs::File::open(folder.join(format))?.sync_all()?;
        }
        Ok(Place {
            name,
            folder: folder.to_owned(),
            is_direct,
        })
    }
}

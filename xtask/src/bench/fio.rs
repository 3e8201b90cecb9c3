//! fio as a client: of a file through the kernel, or of NBD through libnbd.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::load::{BLOCK_BYTES, Load};
use crate::process;

/// What fio came to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Counted {
    /// Requests that have ended.
    pub requests: u64,
    /// In so many seconds.
    pub seconds: f64,
}

/// Loads a file; one request at a time with plain calls, more of them with libaio.
pub fn load_file(file: &Path, load: &Load) -> Result<Counted> {
    let engine = if load.depth == 1 { "psync" } else { "libaio" };
    let target = format!("--filename={}", file.display());
    let words = [
        "--direct=1",
        "--allow_file_create=0",
        "--fallocate=none",
        &format!("--size={}", load.disk_bytes),
    ];
    play(engine, &target, &words, load)
}

/// Loads an export of NBD, through a connection for each client.
pub fn load_nbd(socket: &Path, name: &str, load: &Load) -> Result<Counted> {
    let uri = format!("--uri=nbd+unix:///{name}?socket={}", socket.display());
    play("nbd", &uri, &[], load)
}

fn play(engine: &str, target: &str, words: &[&str], load: &Load) -> Result<Counted> {
    let direction = if load.writes { "write" } else { "read" };
    let mut fio = process::program("fio")?;
    fio.args(["--name=bench", "--output-format=json", "--group_reporting"])
        .args(["--thread", "--norandommap", "--time_based"])
        // What is loaded is an option of the engine's, which therefore comes first.
        .args([&format!("--ioengine={engine}"), target])
        .args(words)
        .arg(format!("--rw=rand{direction}"))
        .arg(format!("--bs={BLOCK_BYTES}"))
        .arg(format!("--iodepth={}", load.depth))
        .arg(format!("--numjobs={}", load.clients))
        .arg(format!("--runtime={}ms", load.duration.as_millis()));
    let said = process::output(&mut fio)?;
    counted(&said, direction).with_context(|| format!("fio says: {said}"))
}

/// Reads what fio prints; notes may stand before it.
fn counted(said: &str, direction: &str) -> Result<Counted> {
    let start = said.find('{').context("no JSON")?;
    let report: Value = serde_json::from_str(&said[start..])?;
    let job = &report["jobs"][0];
    ensure!(job["error"] == 0, "an error: {}", job["error"]);
    let part = &job[direction];
    let requests = part["total_ios"].as_u64().context("no requests")?;
    let milliseconds = part["runtime"].as_f64().context("no time")?;
    ensure!(requests > 0 && milliseconds > 0.0, "no request has ended");
    Ok(Counted {
        requests,
        seconds: milliseconds / 1e3,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fio_counts_is_read() -> Result<()> {
        let said = r#"fio: a note
            {"jobs": [{"error": 0, "read": {"total_ios": 500, "runtime": 250}}]}"#;
        let expected = Counted {
            requests: 500,
            seconds: 0.25,
        };
        assert_eq!(counted(said, "read")?, expected);
        assert!(counted(said, "write").is_err());
        assert!(counted(&said.replace("\"error\": 0", "\"error\": 5"), "read").is_err());
        Ok(())
    }
}

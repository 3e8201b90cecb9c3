//! The real NBD clients: libnbd's tools, fio, qemu-img and qemu-io.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::stages::{Outcome, Stages, Watch};
use super::{
    BASE, Demo, FILE_SYSTEM, FILE_SYSTEM_BYTES, MIB, OVERLAY_BYTES, SCRATCH_BYTES,
    SCRATCH_OFFSET_BYTES, outside,
};
use crate::process;

/// Seconds that a timed fio job runs.
const FIO_SECONDS: u32 = 4;

impl Demo {
    /// Reads by every client before anything is written.
    pub(super) fn read_untouched(&self, stages: &mut Stages) -> Result<()> {
        stages.run("nbdinfo", Watch::Nothing, |_| {
            Ok(((), Outcome::Said(self.nbdinfo()?)))
        })?;
        self.copy_all(stages, "first.raw")?;
        stages.run("the copy is the file system", Watch::Nothing, |_| {
            // A shorter copy compares with the file system byte by byte.
            outside::cut(&self.folder.join("first.raw"), FILE_SYSTEM_BYTES)?;
            process::output(self.program("cmp")?.args(["first.raw", FILE_SYSTEM]))?;
            std::fs::remove_file(self.folder.join("first.raw"))?;
            std::fs::remove_file(self.folder.join(FILE_SYSTEM))?;
            Ok(((), Outcome::Said("identical".into())))
        })?;
        stages.run("qemu-img compare over NBD", Watch::Nothing, |_| {
            self.qemu_img(&["compare", "-f", "raw", "-F", "qcow2", &self.uri(), BASE])?;
            Ok(((), Outcome::Said("identical".into())))
        })?;
        for (title, depth) in [
            ("fio: random 4K reads, depth 1", 1),
            ("fio: random 4K reads, depth 32", 32),
        ] {
            let job = Job::timed("randread", "4k", depth);
            self.fio_stage(stages, title, &job)?;
        }
        self.fio_stage(
            stages,
            "fio: 1M reads in order, depth 4",
            &Job::timed("read", "1M", 4),
        )
    }

    /// Writes beyond the file system, each read back and verified by its client.
    pub(super) fn write_beyond(&self, stages: &mut Stages) -> Result<()> {
        let bytes = SCRATCH_BYTES / 4;
        self.fio_stage(
            stages,
            "fio: 4K random writes and verify, depth 32",
            &Job::verified("randwrite", "4k", 32, SCRATCH_OFFSET_BYTES, bytes),
        )?;
        self.fio_stage(
            stages,
            "fio: 1M writes in order and verify, depth 4",
            &Job::verified(
                "write",
                "1M",
                4,
                SCRATCH_OFFSET_BYTES + bytes,
                SCRATCH_BYTES - bytes,
            ),
        )?;
        stages.run("qemu-io: writes, zeroes, discards", Watch::Nothing, |_| {
            self.qemu_io()?;
            Ok(((), Outcome::Said("patterns read back".into())))
        })?;
        let copied = self.watch("copy.qcow2", FILE_SYSTEM_BYTES / 2);
        stages.run("qemu-img convert out of NBD", copied, |_| {
            self.qemu_img(&[
                "convert",
                "-f",
                "raw",
                "-O",
                "qcow2",
                &self.uri(),
                "copy.qcow2",
            ])?;
            let copied = self.folder.join("copy.qcow2");
            let bytes = outside::allocated_bytes(&copied)?;
            Ok(((), Outcome::Bytes(bytes, String::new())))
        })
    }

    /// Copies the whole disk to a raw file with nbdcopy.
    pub(super) fn copy_all(&self, stages: &mut Stages, file: &str) -> Result<()> {
        let watch = self.watch(file, FILE_SYSTEM_BYTES / 2);
        stages.run(&format!("nbdcopy to {file}"), watch, |_| {
            process::output(self.program("nbdcopy")?.args([&self.uri(), file]))?;
            let bytes = outside::allocated_bytes(&self.folder.join(file))?;
            Ok(((), Outcome::Bytes(bytes, String::new())))
        })
    }

    fn nbdinfo(&self) -> Result<String> {
        let text = process::output(self.program("nbdinfo")?.args(["--json", &self.uri()]))?;
        let json: Value = serde_json::from_str(&text)?;
        let export = &json["exports"][0];
        let size = export["export-size"].as_u64();
        ensure!(
            size == Some(OVERLAY_BYTES),
            "nbdinfo sees {size:?} bytes instead of {OVERLAY_BYTES}"
        );
        for ability in ["can_multi_conn", "can_trim", "can_zero", "can_flush"] {
            ensure!(export[ability] == true, "nbdinfo finds no {ability}");
        }
        let map =
            process::output(
                self.program("nbdinfo")?
                    .args(["--map", "--totals", &self.uri()]),
            )?;
        ensure!(map.contains("data"), "nbdinfo --map finds no data:\n{map}");
        Ok("size, flags and map as they should be".into())
    }

    fn qemu_io(&self) -> Result<()> {
        let start = SCRATCH_OFFSET_BYTES + SCRATCH_BYTES;
        let commands = [
            format!("write -P 0xa5 {start} 4M"),
            format!("aio_write -P 0x5a {} 12k", start + MIB + 512),
            "aio_flush".into(),
            format!("write -z -u {} 1M", start + 2 * MIB),
            format!("discard {} 64k", start + 3 * MIB),
            "flush".into(),
            format!("read -P 0xa5 {start} 1M"),
            format!("read -P 0x5a {} 12k", start + MIB + 512),
            format!("read -P 0 {} 1M", start + 2 * MIB),
            format!("read -P 0xa5 {} 512k", start + 3 * MIB + 512 * 1024),
        ];
        let mut command = self.program("qemu-io")?;
        command.args(["-f", "raw", "-d", "unmap"]);
        for text in &commands {
            command.args(["-c", text]);
        }
        let said = process::output(command.arg(self.uri()))?;
        ensure!(
            !said.contains("failed") && !said.contains("Pattern"),
            "qemu-io disagrees:\n{said}"
        );
        Ok(())
    }

    fn fio_stage(&self, stages: &mut Stages, title: &str, job: &Job) -> Result<()> {
        stages.run(title, Watch::Nothing, |_| {
            Ok(((), Outcome::Said(self.fio(job)?)))
        })
    }

    fn fio(&self, job: &Job) -> Result<String> {
        let mut command = self.program("fio")?;
        command
            .args(["--name=job", "--ioengine=nbd", "--output-format=json"])
            .arg(format!("--uri={}", self.uri()))
            .args(&job.arguments);
        let text = process::output(&mut command)?;
        let json: Value = text
            .find('{')
            .and_then(|start| serde_json::from_str(&text[start..]).ok())
            .with_context(|| format!("fio printed no JSON:\n{text}"))?;
        let result = &json["jobs"][0];
        ensure!(
            result["error"] == 0,
            "fio reports error {}",
            result["error"]
        );
        figures(&result[job.direction]).context("fio's JSON lacks its figures")
    }
}

/// Speed and latency of one direction of a finished fio job.
fn figures(direction: &Value) -> Option<String> {
    let iops = direction["iops"].as_f64()?;
    let bytes_per_s = direction["bw_bytes"].as_f64()?;
    let p99_ns = direction["clat_ns"]["percentile"]["99.000000"].as_f64()?;
    Some(format!(
        "{iops:.0} IOPS, {:.0} MiB/s, p99 {:.2} ms",
        bytes_per_s / MIB as f64,
        p99_ns / 1e6
    ))
}

/// One run of fio.
struct Job {
    arguments: Vec<String>,
    /// Which side of fio's result tells the speed.
    direction: &'static str,
}

impl Job {
    /// Reads the file system for a fixed time.
    fn timed(pattern: &str, block: &str, depth: u32) -> Self {
        let mut arguments = Self::common(pattern, block, depth, 0, FILE_SYSTEM_BYTES);
        arguments.push("--time_based".into());
        arguments.push(format!("--runtime={FIO_SECONDS}"));
        Self {
            arguments,
            direction: "read",
        }
    }

    /// Writes a range once, then reads it back and verifies it.
    fn verified(pattern: &str, block: &str, depth: u32, offset: u64, size: u64) -> Self {
        let mut arguments = Self::common(pattern, block, depth, offset, size);
        arguments.extend(
            [
                "--verify=crc32c",
                "--verify_fatal=1",
                "--verify_state_save=0",
            ]
            .map(str::to_owned),
        );
        Self {
            arguments,
            direction: "write",
        }
    }

    fn common(pattern: &str, block: &str, depth: u32, offset: u64, size: u64) -> Vec<String> {
        vec![
            format!("--rw={pattern}"),
            format!("--bs={block}"),
            format!("--iodepth={depth}"),
            format!("--offset={offset}"),
            format!("--size={size}"),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_come_from_fios_json() {
        let json = serde_json::json!({
            "iops": 12345.6, "bw_bytes": 52428800,
            "clat_ns": {"percentile": {"99.000000": 1_500_000}}
        });
        assert_eq!(
            figures(&json).as_deref(),
            Some("12346 IOPS, 50 MiB/s, p99 1.50 ms")
        );
        assert_eq!(figures(&Value::Null), None);
    }
}

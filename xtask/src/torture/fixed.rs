//! Disks whose image lies in a place of fixed length, exactly as long as `measure` calls fully
//! allocated.
//!
//! - ENOSPC is a failure, whatever clients write, discard and flush.
//! - The clusters that a kill leaks are counted before the image is opened for writing again. In half
//!   of the rounds the clients stop first and flush: then they are few.
//! - Opening the image for writing returns what was leaked.
//!
//! Images with lazy refcounts are marked dirty by a kill and repaired by the next program, so their
//! leaks are not counted. QEMU's programs, with `--real`, may return ENOSPC: their leaks add up, and they
//! fail some requests of several clusters.

use std::fmt;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Result, ensure};
use serde_json::json;

use super::disk::{Disk, Layer, OnFull, Programs, image_options};
use super::model::{GRANULE_BYTES, Model};
use super::round::{self, Life, Report, Server};
use crate::fixed_length::{Address, Kind, Place, fully_allocated_bytes};
use crate::process;
use crate::random::Random;

/// What a kill behind a flush may leak, with nothing in flight.
const MOST_LEAKED: u64 = 16;
/// The file behind the place.
const FILE: &str = "place";
/// One disk in so many is of fixed length, by its seed.
const ONE_IN: u64 = 6;

/// Whether the disk of a seed is of fixed length.
pub fn is_fixed(seed: u64) -> bool {
    seed % ONE_IN == ONE_IN - 1
}

/// Clusters that a kill has leaked.
#[derive(Debug, Clone, Copy)]
pub struct Leaked {
    /// Everything had been flushed, and nothing was in flight.
    pub is_quiet: bool,
    /// How many.
    pub clusters: u64,
}

/// What kills have leaked.
#[derive(Debug, Default)]
pub struct Leaks {
    quiet: Counts,
    busy: Counts,
}

#[derive(Debug, Default)]
struct Counts {
    kills: u64,
    sum: u64,
    most: u64,
}

impl Leaks {
    /// Takes in a kill.
    pub fn add(&mut self, leaked: Leaked) {
        let counts = match leaked.is_quiet {
            true => &mut self.quiet,
            false => &mut self.busy,
        };
        counts.kills += 1;
        counts.sum += leaked.clusters;
        counts.most = counts.most.max(leaked.clusters);
    }
}

impl fmt::Display for Leaks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "clusters leaked by kills behind a flush: {}; with requests in flight: {}",
            self.quiet, self.busy
        )
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mean = self.sum as f64 / self.kills.max(1) as f64;
        write!(
            f,
            "at most {}, {mean:.1} on average of {}",
            self.most, self.kills
        )
    }
}

/// A disk in a place of fixed length.
pub struct FixedDisk {
    disk: Disk,
    kind: Kind,
}

impl FixedDisk {
    /// Creates an empty image of the model's size.
    pub fn make(
        folder: &Path,
        (kind, is_real): (Kind, bool),
        model: &Model,
        random: &mut Random,
    ) -> Result<Self> {
        let (mut options, mut lazy) = image_options(random);
        if is_real && lazy {
            options.push_str(",lazy_refcounts=off");
            lazy = false;
        }
        let size_bytes = (model.granules() * GRANULE_BYTES) as u64;
        let len_bytes = fully_allocated_bytes(size_bytes, &options)?;
        std::fs::File::create(folder.join(FILE))?.set_len(len_bytes)?;
        let place = Place::open(kind, folder, FILE)?;
        let mut create = process::program("qemu-img")?;
        create.args(["create", "-q", "-f", "qcow2", "-o", &options]);
        create.arg(place.address.name()).arg(size_bytes.to_string());
        process::output(create.current_dir(folder))?;
        let layer = Layer {
            file: place.address.name(),
            format: "qcow2",
            lazy,
        };
        place.close()?;
        let mut disk = Disk::of_one(folder, layer);
        disk.on_full = is_real.then_some(OnFull::Fail);
        Ok(FixedDisk { disk, kind })
    }

    /// Serves the disk to clients, kills the server, and looks at what is left.
    pub fn play(
        &mut self,
        model: &Model,
        programs: &Programs,
        random: &mut Random,
    ) -> Result<Report> {
        let place = self.open()?;
        let command = command(&self.disk, &place.address, programs, random)?;
        let mut server = Server::start(command, &self.disk.folder)?;
        server.wait()?;
        let life = Life {
            time: round::lifetime(random),
            answers: 0,
            settles: random.chance(50),
        };
        let clients = random.between(1, 5);
        let served = (server, None);
        let (mut report, _) =
            round::torment(&mut self.disk, model, served, life, (clients, None), random);
        // What the dead server has sent is in the file once its place is closed.
        place.close()?;
        if report.failure.is_none() {
            let judged = self.judge(model, life.settles, &mut report, programs, random);
            report.failure = judged.err().map(|error| format!("{error:#}"));
        }
        Ok(report)
    }

    fn open(&mut self) -> Result<Place> {
        let place = Place::open(self.kind, &self.disk.folder, FILE)?;
        // A loop device may have another number each time.
        self.disk.chain[0].file = place.address.name();
        Ok(place)
    }

    fn judge(
        &mut self,
        model: &Model,
        is_quiet: bool,
        report: &mut Report,
        programs: &Programs,
        random: &mut Random,
    ) -> Result<()> {
        let place = self.open()?;
        let layer = self.disk.top()?.clone();
        if layer.lazy {
            // QEMU's repair may want to write behind the end.
            self.reopen(programs)?;
        } else {
            let clusters = self.leaks(programs, random)?;
            report.leaked = Some(Leaked { is_quiet, clusters });
            ensure!(
                programs.real || !is_quiet || clusters <= MOST_LEAKED,
                "a kill behind a flush, with nothing in flight, has leaked {clusters} clusters"
            );
            // Else the next server returns them, and what it leaves is seen then.
            if random.chance(75) {
                self.reopen(programs)?;
                let left = self.leaks(programs, random)?;
                ensure!(
                    programs.real || left == 0,
                    "of {clusters} leaked clusters {left} are left after the image was opened for writing"
                );
            }
        }
        round::judge(&mut self.disk, model, programs, random, &[])?;
        place.close()
    }

    /// Clusters that are leaked, as both programs count them.
    fn leaks(&self, programs: &Programs, random: &mut Random) -> Result<u64> {
        let layer = self.disk.top()?;
        let theirs = self.disk.check(layer, programs, random)?;
        if !programs.real {
            let mut check = Command::new(&programs.vellum);
            check.arg("img");
            let ours = self.disk.check_by(layer, programs, random, check)?;
            ensure!(
                ours == theirs,
                "qemu-img counts {theirs} leaked clusters, vellum {ours}"
            );
        }
        Ok(theirs)
    }

    fn reopen(&self, programs: &Programs) -> Result<()> {
        let mut open = programs.command("io", "qemu-io")?;
        open.args(["-f", "qcow2", "-c", "read -q 0 512"]);
        open.arg(&self.disk.top()?.file);
        process::output(open.current_dir(&self.disk.folder))?;
        Ok(())
    }
}

/// A server of the image, by itself or in a daemon.
fn command(
    disk: &Disk,
    address: &Address,
    programs: &Programs,
    random: &mut Random,
) -> Result<Command> {
    if random.chance(40) {
        return round::nbd_command(disk, programs, random);
    }
    let mut command = programs.command("daemon", "qemu-storage-daemon")?;
    let mut file = match address {
        Address::Socket(socket) => {
            let path = disk.folder.join(socket);
            json!({"driver": "nbd", "server": {"type": "unix", "path": path}})
        }
        Address::Device(device) => json!({"driver": "host_device", "filename": device}),
    };
    file["discard"] = json!("unmap");
    let node = json!({
        "driver": "qcow2", "node-name": "disk", "file": file, "discard": "unmap",
    });
    let socket = disk.folder.join("socket");
    let server = format!(
        "addr.type=unix,addr.path={},max-connections=0",
        socket.display()
    );
    let export = json!({
        "type": "nbd", "id": "x", "node-name": "disk", "name": "", "writable": true,
    });
    command
        .arg("--blockdev")
        .arg(node.to_string())
        .args(["--nbd-server", &server, "--export"])
        .arg(export.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    Ok(command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leaks_are_counted_by_what_was_in_flight() {
        let mut leaks = Leaks::default();
        for (is_quiet, clusters) in [(true, 4), (true, 1), (false, 90)] {
            leaks.add(Leaked { is_quiet, clusters });
        }
        assert_eq!(
            leaks.to_string(),
            "clusters leaked by kills behind a flush: at most 4, 2.5 on average of 2; with requests in \
             flight: at most 90, 90.0 on average of 1"
        );
    }
}

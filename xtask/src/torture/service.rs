//! A daemon as a service: a file says which disk it has, and a state file what has become of that. Whenever
//! it is killed, the next one must come back by itself with what clients were promised, with the policy
//! of the chain and with the jobs; nobody tells it where the disk is.

use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::changes::{Changes, Done};
use super::disk::{Disk, Layer, Programs};
use super::model::{GRANULE_BYTES, Model};
use super::monitor::Monitor;
use super::round::{Life, Report, Server, torment};
use crate::process;
use crate::random::Random;

const CONFIG: &str = "disks.toml";
const STATE: &str = "state.json";
/// More layers than these are for policies to take away.
const MOST_LAYERS: usize = 5;

/// Writes the file for a disk that was just made, with a policy for its chain or none.
pub fn configure(disk: &Disk, random: &mut Random) -> Result<()> {
    let mut text = "[daemon]\nnbd = { path = 'socket', max-connections = 0 }\n".to_owned();
    let mut below: Option<&Layer> = None;
    for layer in &disk.chain {
        let (name, file, format) = (layer.node(), &layer.file, layer.format);
        text += &format!("[[disk]]\nname = '{name}'\nimage = '{file}'\nformat = '{format}'\n");
        text += "discard = 'unmap'\n";
        if let Some(below) = below {
            text += &format!("options = {{ backing = '{}' }}\n", below.node());
        }
        match layer.file == disk.top()?.file {
            true if random.chance(60) => {
                let (most, speed) = (random.between(1, 4), random.pick(&["1M", "4M", "1G"]));
                text += &format!("chain = {{ max-layers = {most}, speed = '{speed}' }}\n");
            }
            true => {}
            false => text += "read-only = true\n",
        }
        below = Some(layer);
    }
    text += "[[disk.export]]\ntype = 'nbd'\nid = 'e'\nname = ''\nwritable = true\n";
    Ok(std::fs::write(disk.folder.join(CONFIG), text)?)
}

fn start(disk: &Disk, programs: &Programs) -> Result<(Server, Option<Monitor>)> {
    let mut command = Command::new(&programs.vellum);
    command
        .args(["daemon", "--config", CONFIG, "--state", STATE])
        .args(["--chardev", "stdio,id=m", "--monitor", "m"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    Server::start_with_monitor(command, disk)
}

/// Plays a round: a daemon under load, its end, and what the next one has.
pub fn play(
    disk: &mut Disk,
    model: &Model,
    programs: &Programs,
    random: &mut Random,
) -> Result<Report> {
    let served = start(disk, programs)?;
    // A policy is looked at after two seconds.
    let most_ms = random.pick(&[300, 1500, 4000, 6000]);
    let life = Life {
        time: Duration::from_millis(random.between(50, most_ms)),
        answers: 0,
        settles: false,
    };
    let clients = random.between(2, 5);
    let (mut report, _) = torment(disk, model, served, life, (clients, None), random);
    disk.pivot = None;
    if report.failure.is_none() {
        let judged = judge(disk, model, programs, random);
        report.failure = judged.err().map(|error| format!("{error:#}"));
        report.services = 1;
    }
    Ok(report)
}

/// Looks at all images, and at what the next daemon shows.
fn judge(disk: &mut Disk, model: &Model, programs: &Programs, random: &mut Random) -> Result<()> {
    for entry in std::fs::read_dir(&disk.folder)? {
        let file = entry?.file_name().to_string_lossy().into_owned();
        if file.starts_with('i') && file.ends_with(".qcow2") {
            let layer = Layer {
                file,
                format: "qcow2",
                lazy: true,
            };
            disk.check(&layer, programs, random)?;
        }
    }
    // It is killed as soon as that was read: jobs have begun anew by then.
    let (_server, _monitor) = start(disk, programs).context("the next daemon")?;
    let shown = Layer {
        file: "nbd+unix:///?socket=socket".to_owned(),
        format: "raw",
        lazy: false,
    };
    let content = disk.content(&shown, &mut process::program("qemu-img")?)?;
    let found = model.judge(&content, model.after_kill());
    let found = found.context("what the next daemon shows")?;
    ensure!(
        found.len() == model.granules(),
        "the next daemon shows {} bytes",
        found.len() * GRANULE_BYTES
    );
    model.restart(found);
    Ok(())
}

impl Changes<'_> {
    /// Does what the users of a service do, and leaves the rest to policies.
    pub fn operate(&mut self) -> Done {
        loop {
            std::thread::sleep(Duration::from_millis(self.random.below(60)));
            self.look_where_clients_are()?;
            let long = self.disk.chain.len() >= MOST_LAYERS;
            match self.random.below(100) {
                0..35 if !long => self.snapshot()?,
                0..60 => self.compact()?,
                60..70 => self.stream()?,
                70..82 => self.set_policy()?,
                82..92 => self.bitmap()?,
                _ => self.cancel_some_job()?,
            }
        }
    }

    /// Another policy for the disk of the file, or none.
    fn set_policy(&mut self) -> Done {
        let own = self.disk.own.clone();
        let mut policy = json!({"node-name": own});
        if self.random.chance(80) {
            policy["max-layers"] = json!(self.random.between(1, 4));
            policy["speed"] = json!(self.random.pick(&[1 << 20, 4 << 20, 1 << 30]));
        }
        self.ask("x-vellum-set-chain-policy", policy).map(drop)
    }

    fn cancel_some_job(&mut self) -> Done {
        let jobs = self.jobs()?;
        if let Some(job) = jobs.first() {
            self.ask("job-cancel", json!({"id": job["id"]}))?.ok();
        }
        Ok(())
    }
}

//! The images of a disk that is tortured: makes them, checks them, and reads them as a whole.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::model::{GRANULE_BYTES, Model};
use crate::process;
use crate::random::Random;

/// Locks of a killed server live as long as its last requests.
const LOCKS_LIMIT: Duration = Duration::from_secs(60);
const LOCKS_PAUSE: Duration = Duration::from_millis(20);

/// The programs of a run.
#[derive(Debug, Clone)]
pub struct Programs {
    /// What is tortured.
    pub vellum: PathBuf,
    /// QEMU's own daemon and server in its place: the torture itself is tried.
    pub real: bool,
}

impl Programs {
    /// Vellum's command `verb`, or QEMU's program in its place.
    pub fn command(&self, verb: &str, real: &str) -> Result<Command> {
        if self.real {
            return process::program(real);
        }
        let mut command = Command::new(&self.vellum);
        command.arg(verb);
        Ok(command)
    }
}

/// One image of a chain.
#[derive(Debug, Clone)]
pub struct Layer {
    /// Its file, in the disk's folder.
    pub file: String,
    /// `raw` or `qcow2`.
    pub format: &'static str,
    /// Its refcounts are repaired when it is opened.
    pub lazy: bool,
}

/// A disk: images, each on the one before.
#[derive(Debug)]
pub struct Disk {
    /// Where they lie.
    pub folder: PathBuf,
    /// From the bottom to the top.
    pub chain: Vec<Layer>,
    /// How many of the lower ones show the same, if users may have been led there.
    pub pivot: Option<usize>,
    /// The size before a change of which nobody knows whether it was made.
    pub old_size_bytes: Option<u64>,
    /// Files made so far.
    pub files: u64,
    /// Where changes of the top's file are recorded. Then nothing may exchange the top.
    pub log: Option<String>,
    /// Over which file the disk appears as one, too.
    pub mountpoint: Option<PathBuf>,
    /// The socket, in the same folder, at which a guest may come, and with how many queues.
    pub guest: Option<(String, usize)>,
    /// Its servers are of ours, and know our commands.
    pub is_ours: bool,
    /// The node that a file says the disk is, where its daemons are a service.
    pub own: String,
    /// The next server begins with a policy for the chain.
    pub has_policy: bool,
    /// What clients are told while its file system is full, if that may be; it is its own then.
    pub on_full: Option<OnFull>,
}

/// What becomes of a request that needs room where there is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnFull {
    /// It waits.
    Wait,
    /// It fails.
    Fail,
}

impl Layer {
    /// The name of its node.
    pub fn node(&self) -> String {
        format!("n-{}", self.file)
    }
}

/// Options of a new image, and whether it has lazy refcounts.
pub fn image_options(random: &mut Random) -> (String, bool) {
    let cluster_bits = random.pick(&[9, 12, 14, 15, 16, 16, 16, 17, 21]);
    let mut options = format!("cluster_size={}", 1_u64 << cluster_bits);
    if cluster_bits >= 14 && random.chance(30) {
        options += ",extended_l2=on";
    }
    let lazy = random.chance(15);
    if lazy {
        options += ",lazy_refcounts=on";
    }
    if random.chance(25) {
        let bits = random.pick(&[8, 32, 64]);
        options += &format!(",refcount_bits={bits}");
    }
    (options, lazy)
}

impl Disk {
    /// A disk of one image.
    pub fn of_one(folder: &Path, layer: Layer) -> Self {
        let mut disk = Disk::empty(folder);
        disk.chain.push(layer);
        disk
    }

    /// Makes a disk of a size, of up to two images, with the content that `model` says.
    pub fn make(folder: &Path, model: &Model, random: &mut Random) -> Result<Self> {
        let mut disk = Disk::empty(folder);
        let size_bytes = (model.granules() * GRANULE_BYTES) as u64;
        if random.chance(60) {
            disk.make_base(model, random)?;
        }
        if disk.chain.is_empty() || random.chance(85) {
            let layer = disk.new_image(size_bytes, disk.chain.last(), random)?;
            disk.chain.push(layer);
        }
        Ok(disk)
    }

    fn empty(folder: &Path) -> Self {
        Disk {
            folder: folder.to_owned(),
            chain: Vec::new(),
            pivot: None,
            old_size_bytes: None,
            files: 0,
            log: None,
            mountpoint: None,
            guest: None,
            is_ours: false,
            own: String::new(),
            has_policy: false,
            on_full: None,
        }
    }

    /// A raw base, or a compressed one, with something in it.
    fn make_base(&mut self, model: &Model, random: &mut Random) -> Result<()> {
        let granules = model.granules();
        let mut content = vec![0; granules];
        for _ in 0..random.between(1, 12) {
            let at = random.below(granules as u64) as usize;
            let end = granules.min(at + random.below(granules as u64 / 4) as usize);
            content[at..end].fill(model.next_version());
        }
        let bytes: Vec<u8> = (0..granules)
            .flat_map(|at| model.pattern(at..at + 1, content[at]))
            .collect();
        model.restart(content);
        let raw = self.new_file("raw");
        std::fs::write(self.folder.join(&raw), bytes)?;
        if random.chance(40) {
            self.chain.push(Layer {
                file: raw,
                format: "raw",
                lazy: false,
            });
            return Ok(());
        }
        let file = self.new_file("qcow2");
        let mut convert = process::program("qemu-img")?;
        convert.args(["convert", "-f", "raw", "-O", "qcow2"]);
        if random.chance(60) {
            convert.arg("-c");
        }
        convert.args([&raw, &file]).current_dir(&self.folder);
        process::output(&mut convert)?;
        std::fs::remove_file(self.folder.join(raw))?;
        self.chain.push(Layer {
            file,
            format: "qcow2",
            lazy: false,
        });
        Ok(())
    }

    fn new_file(&mut self, kind: &str) -> String {
        self.files += 1;
        format!("i{}.{kind}", self.files)
    }

    /// An empty image, on another one if there is one.
    pub fn new_image(
        &self,
        size_bytes: u64,
        below: Option<&Layer>,
        random: &mut Random,
    ) -> Result<Layer> {
        // Names are not used again, so what a killed round left is in nobody's way.
        let mut number = self.files + 1;
        let file = loop {
            let file = format!("i{number}.qcow2");
            if !self.folder.join(&file).exists() {
                break file;
            }
            number += 1;
        };
        let (mut options, lazy) = image_options(random);
        if below.is_none() && random.chance(20) {
            options += &format!(",data_file=d{number}.raw,data_file_raw=on");
        }
        let mut create = process::program("qemu-img")?;
        create.args(["create", "-q", "-f", "qcow2", "-o", &options]);
        if let Some(below) = below {
            create.args(["-b", &below.file, "-F", below.format]);
        }
        create.args([&file, &size_bytes.to_string()]);
        process::output(create.current_dir(&self.folder))?;
        Ok(Layer {
            file,
            format: "qcow2",
            lazy,
        })
    }

    /// The image that clients use.
    pub fn top(&self) -> Result<&Layer> {
        self.chain.last().context("a disk without images")
    }

    /// Removes the files that are no part of the chain any more.
    pub fn tidy(&self) -> Result<()> {
        for entry in std::fs::read_dir(&self.folder)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            // A data file goes with its image.
            let image = match name.strip_prefix('d') {
                Some(rest) => format!("i{}", rest.replace(".raw", ".qcow2")),
                None => name.clone(),
            };
            if image.starts_with('i') && self.chain.iter().all(|layer| layer.file != image) {
                std::fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }

    /// Has the real `qemu-img check` look at an image: leaks at worst. Returns how many clusters.
    pub fn check(&self, layer: &Layer, programs: &Programs, random: &mut Random) -> Result<u64> {
        self.check_by(layer, programs, random, process::program("qemu-img")?)
    }

    /// Has a program that takes `qemu-img`'s words look at an image: leaks at worst. Returns how many
    /// clusters.
    pub fn check_by(
        &self,
        layer: &Layer,
        programs: &Programs,
        random: &mut Random,
        mut check: Command,
    ) -> Result<u64> {
        if layer.format != "qcow2" {
            return Ok(0);
        }
        if layer.lazy {
            // Opening it for writing mends what its dirty bit tells of.
            let mut open = match random.chance(50) || programs.real {
                true => process::program("qemu-io")?,
                false => {
                    let mut open = Command::new(&programs.vellum);
                    open.arg("io");
                    open
                }
            };
            open.args(["-f", "qcow2", "-c", "read 0 512", &layer.file]);
            self.patiently(&mut open)?;
        }
        check.args(["check", "-f", "qcow2", &layer.file]);
        let said = self.run_unlocked(&mut check)?;
        ensure!(
            matches!(said.status.code(), Some(0 | 3)),
            "{}: {}{}",
            process::shown(&check),
            String::from_utf8_lossy(&said.stdout),
            String::from_utf8_lossy(&said.stderr)
        );
        let text = String::from_utf8_lossy(&said.stdout);
        let leaked = text
            .lines()
            .find_map(|line| line.split_once(" leaked clusters"));
        Ok(leaked
            .and_then(|(count, _)| count.parse().ok())
            .unwrap_or(0))
    }

    /// The whole content of a chain's top, read by a program.
    pub fn content(&self, layer: &Layer, converter: &mut Command) -> Result<Vec<u8>> {
        let target = self.folder.join("content");
        converter.args(["convert", "-f", layer.format, "-O", "raw", &layer.file]);
        converter.arg("content");
        self.patiently(converter)?;
        let content = std::fs::read(&target)?;
        std::fs::remove_file(target)?;
        Ok(content)
    }

    fn patiently(&self, command: &mut Command) -> Result<()> {
        let said = self.run_unlocked(command)?;
        if !said.status.success() {
            bail!(
                "{} ended with {}: {}",
                process::shown(command),
                said.status,
                String::from_utf8_lossy(&said.stderr)
            );
        }
        Ok(())
    }

    /// Runs a command again while a dead server's locks are in its way.
    fn run_unlocked(&self, command: &mut Command) -> Result<std::process::Output> {
        command.current_dir(&self.folder);
        let deadline = Instant::now() + LOCKS_LIMIT;
        loop {
            let said = process::capture(command)?;
            let locked = String::from_utf8_lossy(&said.stderr).contains("lock");
            if said.status.success() || !locked || Instant::now() > deadline {
                return Ok(said);
            }
            std::thread::sleep(LOCKS_PAUSE);
        }
    }
}

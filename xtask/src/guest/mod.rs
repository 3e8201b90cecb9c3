//! A small real Linux guest: Debian's cloud kernel and a busybox file system
//! in memory that sees the disk as /dev/vda, runs a script and powers off.
//!
//! It runs emulated (TCG), which works on every machine; that measures
//! correctness, not speed.

mod archive;
mod modules;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::{process, setup};
use archive::Archive;

const KERNEL_META_PACKAGE: &str = "linux-image-cloud-amd64";
const INIT: &str = include_str!("../../guest/init");
const BOOT_LIMIT: Duration = Duration::from_secs(300);
/// How often the console is looked at.
const CONSOLE_INTERVAL: Duration = Duration::from_millis(20);
const MEMORY: &str = "512M";
const KERNEL_COMMAND_LINE: &str = "console=ttyS0 quiet panic=-1 tsc=reliable no_timer_check \
                                   mitigations=off random.trust_cpu=on";

/// Where a guest has its disk from.
#[derive(Debug, Clone, Copy)]
pub enum Disk<'a> {
    /// QEMU opens it as this blockdev says (less its node name).
    Opened(&'a str),
    /// A server of vhost-user-blk, which may come back. The guest has as many processors as it
    /// has queues.
    VhostUser {
        /// Where it listens.
        socket: &'a str,
        /// Queues, which it must offer.
        queues: u16,
    },
}

/// A kernel and the part of its file system that is the same for every boot.
#[derive(Debug)]
pub struct Guest {
    kernel: PathBuf,
    base: PathBuf,
}

impl Guest {
    /// Makes the guest in `folder`, or takes the one that is there already.
    pub fn build(folder: &Path) -> Result<Self> {
        let guest = Self {
            kernel: folder.join("vmlinuz"),
            base: folder.join("base.cpio"),
        };
        // The base is written last: where it is, all of the guest is.
        if guest.base.exists() {
            return Ok(guest);
        }
        ensure!(
            cfg!(target_arch = "x86_64"),
            "the test guest is made for x86-64 machines only"
        );
        std::fs::create_dir_all(folder)?;
        let unpacked = tempfile::tempdir_in(folder)?;
        unpack_kernel_package(unpacked.path())?;
        std::fs::copy(
            only_entry(&unpacked.path().join("boot"), "vmlinuz-")?,
            &guest.kernel,
        )?;
        let mut base = Archive::default();
        modules::add(unpacked.path(), &mut base)?;
        add_program(&mut base, "busybox", "bin")?;
        add_program(&mut base, "e2fsck", "sbin")?;
        base.symlink("bin/sh", "busybox");
        for name in ["dev", "mnt", "proc", "sys", "tmp"] {
            base.folder(name);
        }
        std::fs::write(&guest.base, base.finish())?;
        Ok(guest)
    }

    /// Boots the guest on a disk, runs `script` there with `files` beside it, and
    /// returns what the console said. Fails unless the script exits with 0.
    pub fn run(
        &self,
        folder: &Path,
        disk: &Disk<'_>,
        script: &str,
        files: &[(&str, &[u8])],
    ) -> Result<String> {
        self.start(folder, disk, script, files)?.wait()
    }

    /// As [`Guest::run`], but it returns while the guest runs.
    pub fn start(
        &self,
        folder: &Path,
        disk: &Disk<'_>,
        script: &str,
        files: &[(&str, &[u8])],
    ) -> Result<Running> {
        self.start_as(folder, disk, script, files, (&[], "guest.log"))
    }

    /// As [`Guest::start`], with more words for QEMU, and a console of its own.
    pub fn start_as(
        &self,
        folder: &Path,
        disk: &Disk<'_>,
        script: &str,
        files: &[(&str, &[u8])],
        (words, log): (&[String], &str),
    ) -> Result<Running> {
        let initrd = folder.join("initrd");
        let mut own = Archive::default();
        own.file("init", 0o755, INIT.as_bytes());
        own.file("test.sh", 0o644, script.as_bytes());
        for (name, content) in files {
            own.file(name, 0o644, content);
        }
        let mut bytes = std::fs::read(&self.base)?;
        bytes.extend(own.finish());
        std::fs::write(&initrd, bytes)?;

        let log = folder.join(log);
        let mut command = self.qemu(&initrd, disk)?;
        command.args(words);
        let machine = process::Daemon::start_listening(command.current_dir(folder), &log)?;
        Ok(Running { machine, log })
    }

    fn qemu(&self, initrd: &Path, disk: &Disk<'_>) -> Result<Command> {
        let mut command = process::program("qemu-system-x86_64")?;
        let memory = format!("memory-backend-memfd,id=memory,size={MEMORY},share=on");
        command
            .args(["-M", "q35,memory-backend=memory", "-accel", "tcg"])
            .args(["-cpu", "max", "-m", MEMORY, "-object", &memory])
            .args(["-nodefaults", "-no-user-config", "-display", "none"])
            .args(["-no-reboot", "-serial", "stdio"])
            .arg("-kernel")
            .arg(&self.kernel)
            .arg("-initrd")
            .arg(initrd)
            .args(["-append", KERNEL_COMMAND_LINE]);
        match disk {
            Disk::Opened(blockdev) => command
                .args(["-blockdev", &format!("{blockdev},node-name=disk")])
                .args(["-device", "virtio-blk-pci,drive=disk"]),
            Disk::VhostUser { socket, queues } => command
                .args(["-smp", &queues.to_string(), "-chardev"])
                .arg(format!("socket,id=disk,path={socket},reconnect-ms=200"))
                .arg("-device")
                .arg(format!(
                    "vhost-user-blk-pci,chardev=disk,num-queues={queues}"
                )),
        };
        Ok(command)
    }
}

/// A guest that runs until its script has ended.
#[derive(Debug)]
pub struct Running {
    machine: process::Daemon,
    log: PathBuf,
}

impl Running {
    /// Types a line on the guest's console.
    pub fn say(&mut self, line: &str) -> Result<()> {
        self.machine.say(line)
    }

    /// Ends it at once.
    pub fn kill(self) -> Result<()> {
        self.machine.kill()
    }

    /// What the console has said so far.
    pub fn console(&self) -> Result<String> {
        Ok(String::from_utf8_lossy(&std::fs::read(&self.log)?).into_owned())
    }

    /// Waits until the console has said at least `count` lines that begin with `words`.
    pub fn wait_for(&mut self, words: &str, count: usize, limit: Duration) -> Result<()> {
        let deadline = Instant::now() + limit;
        loop {
            let console = self.console()?;
            let said = console.lines().filter(|line| line.starts_with(words));
            if said.count() >= count {
                return Ok(());
            }
            let has_ended = self.machine.has_ended()?;
            if has_ended || Instant::now() > deadline {
                let end = if has_ended { "has ended" } else { "hangs" };
                bail!("the guest {end} before it said '{words}' {count} times:\n{console}");
            }
            std::thread::sleep(CONSOLE_INTERVAL);
        }
    }

    /// Whether it is there no more.
    pub fn has_ended(&mut self) -> Result<bool> {
        self.machine.has_ended()
    }

    /// Waits for its end, and returns what the console said. Fails unless the script exits with 0.
    pub fn wait(self) -> Result<String> {
        self.wait_within(BOOT_LIMIT)
    }

    /// As [`Running::wait`], for so long.
    pub fn wait_within(self, limit: Duration) -> Result<String> {
        let Running { machine, log } = self;
        let ended = machine.wait(limit);
        let console = String::from_utf8_lossy(&std::fs::read(&log)?).into_owned();
        ended.with_context(|| format!("the guest's console:\n{console}"))?;
        if !console.contains("GUEST: exit 0") {
            bail!("the guest's test failed; its console:\n{console}");
        }
        Ok(console)
    }
}

/// Fetches the newest cloud kernel and unpacks it, without installing it.
fn unpack_kernel_package(folder: &Path) -> Result<()> {
    let package = match kernel_package()? {
        Some(package) => package,
        None => {
            setup::refresh_package_lists()?;
            kernel_package()?
                .with_context(|| format!("apt knows no package {KERNEL_META_PACKAGE}"))?
        }
    };
    process::output(
        process::program("apt-get")?
            .args(["-q", "-o", "APT::Sandbox::User=root", "download", &package])
            .current_dir(folder),
    )?;
    let file = only_entry(folder, &package)?;
    process::output(
        process::program("dpkg-deb")?
            .arg("-x")
            .args([&file, folder]),
    )?;
    Ok(())
}

/// The name of the package that the kernel's meta package stands for.
fn kernel_package() -> Result<Option<String>> {
    let output =
        process::capture(process::program("apt-cache")?.args(["depends", KERNEL_META_PACKAGE]))?;
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text
        .lines()
        .find_map(|line| line.trim().strip_prefix("Depends: "))
        .map(str::to_owned))
}

/// The entry of a folder whose name starts with `prefix`.
fn only_entry(folder: &Path, prefix: &str) -> Result<PathBuf> {
    std::fs::read_dir(folder)?
        .flatten()
        .find(|entry| entry.file_name().to_string_lossy().starts_with(prefix))
        .map(|entry| entry.path())
        .with_context(|| format!("{} holds no {prefix}*", folder.display()))
}

/// Puts a program of this machine into the archive, with its libraries.
fn add_program(archive: &mut Archive, name: &str, folder: &str) -> Result<()> {
    let path = process::find_program(name).with_context(|| format!("{name} is not installed"))?;
    archive.file(&format!("{folder}/{name}"), 0o755, &std::fs::read(&path)?);
    // ldd fails for a static program, which needs nothing.
    let output = process::capture(Command::new("ldd").arg(&path))?;
    for library in libraries(&String::from_utf8_lossy(&output.stdout)) {
        let inside = library.trim_start_matches('/');
        archive.file(inside, 0o755, &std::fs::read(library)?);
    }
    Ok(())
}

/// The paths in ldd's output.
fn libraries(text: &str) -> impl Iterator<Item = &str> {
    text.split_whitespace()
        .filter(|word| word.starts_with('/') && word.contains(".so"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn library_paths_are_found_in_what_ldd_prints() {
        let text = "\tlinux-vdso.so.1 (0x00007ffd)\n\
                    \tlibext2fs.so.2 => /lib/x86_64-linux-gnu/libext2fs.so.2 (0x00007f)\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        let found: Vec<&str> = libraries(text).collect();
        assert_eq!(
            found,
            [
                "/lib/x86_64-linux-gnu/libext2fs.so.2",
                "/lib64/ld-linux-x86-64.so.2"
            ]
        );
    }
}

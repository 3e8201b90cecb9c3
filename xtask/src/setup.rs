//! `cargo xtask setup`: installs the real programs that the demo and the tests use.
//!
//! Nothing is installed that is there already, so a second run only looks.

use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::{apt_mirror, process};

/// The oldest QEMU whose output the tests know.
const QEMU_MAJOR_MIN: u32 = 10;
const BACKPORTS_SUITE: &str = "bookworm-backports";
const BACKPORTS_FILE: &str = "/etc/apt/sources.list.d/vellum-backports.list";

/// One thing that has to be there.
struct Need {
    /// How to see that it is there.
    probe: Probe,
    /// The Debian package that brings it.
    package: &'static str,
}

enum Probe {
    /// A program in PATH.
    Program(&'static str),
    /// A QEMU program, new enough.
    Qemu(&'static str),
    /// A file at its place.
    File(&'static str),
    /// A library that pkg-config knows.
    Library(&'static str),
    /// A module of QEMU's.
    QemuModule(&'static str),
    /// A module of the system's own Python.
    PythonModule(&'static str),
}

const NEEDS: &[Need] = &[
    need(Probe::Qemu("qemu-img"), "qemu-utils"),
    need(Probe::Qemu("qemu-system-x86_64"), "qemu-system-x86"),
    need(Probe::Program("fio"), "fio"),
    need(Probe::Program("nbdcopy"), "libnbd-bin"),
    need(Probe::Program("nbdkit"), "nbdkit"),
    need(Probe::PythonModule("nbd"), "python3-libnbd"),
    need(Probe::Program("certtool"), "gnutls-bin"),
    need(Probe::Library("openssl"), "libssl-dev"),
    need(Probe::Program("pkg-config"), "pkg-config"),
    need(Probe::Program("mkfs.ext4"), "e2fsprogs"),
    need(Probe::Program("fusermount3"), "fuse3"),
    need(Probe::Program("mkfs.xfs"), "xfsprogs"),
    need(Probe::Program("mkfs.btrfs"), "btrfs-progs"),
    need(Probe::Program("busybox"), "busybox-static"),
    need(Probe::Program("xz"), "xz-utils"),
    need(Probe::Program("strace"), "strace"),
    need(Probe::Program("tc"), "iproute2"),
    need(Probe::Program("minisign"), "minisign"),
    // The daemon's units, and sockets that are handed over.
    need(Probe::Program("systemd-analyze"), "systemd"),
    need(Probe::Program("systemd-socket-activate"), "systemd"),
    // What checks the metrics of the daemon.
    need(Probe::Program("promtool"), "prometheus"),
    // Files on a web server, and QEMU's driver for them beside ours.
    need(Probe::Program("nginx"), "nginx-light"),
    need(Probe::Program("openssl"), "openssl"),
    need(Probe::QemuModule("block-curl.so"), "qemu-block-extra"),
    // Disks in a registry of containers.
    need(Probe::Program("docker-registry"), "docker-registry"),
    // A cluster of Ceph's, and a server of files by ssh.
    need(Probe::QemuModule("block-rbd.so"), "qemu-block-extra"),
    need(Probe::Program("ceph-mon"), "ceph-mon"),
    need(Probe::Program("ceph-osd"), "ceph-osd"),
    need(Probe::Program("rbd"), "ceph-common"),
    need(Probe::Program("ssh"), "openssh-client"),
    need(Probe::File("/usr/sbin/sshd"), "openssh-server"),
    // The suite of QEMU's own tests calls these.
    need(Probe::Program("python3"), "python3"),
    need(Probe::Program("bc"), "bc"),
    need(Probe::Program("bzip2"), "bzip2"),
    need(Probe::Program("certtool"), "gnutls-bin"),
    // The fuzz targets link with libFuzzer, which is C++.
    need(Probe::Program("c++"), "g++"),
];

/// Compiles the object store of the tests.
const GO: Need = need(Probe::Program("go"), "golang-go");
/// An object store that speaks S3, over a folder.
const OBJECT_STORE: &str = "github.com/versity/versitygw/cmd/versitygw@v1.8.0";

const fn need(probe: Probe, package: &'static str) -> Need {
    Need { probe, package }
}

impl Need {
    fn is_met(&self) -> bool {
        match self.probe {
            Probe::Program(name) => process::find_program(name).is_some(),
            Probe::Qemu(name) => qemu_major(name).is_some_and(|version| version >= QEMU_MAJOR_MIN),
            Probe::File(path) => std::path::Path::new(path).exists(),
            Probe::Library(name) => Command::new("pkg-config")
                .args(["--exists", name])
                .status()
                .is_ok_and(|status| status.success()),
            Probe::QemuModule(name) => has_qemu_module(name),
            Probe::PythonModule(name) => Command::new("/usr/bin/python3")
                .args(["-c", &format!("import {name}")])
                .output()
                .is_ok_and(|output| output.status.success()),
        }
    }

    fn is_qemu(&self) -> bool {
        matches!(self.probe, Probe::Qemu(_) | Probe::QemuModule(_))
    }
}

/// The task.
pub fn run(mut arguments: lexopt::Parser) -> Result<()> {
    crate::no_arguments(&mut arguments)?;
    ensure()?;
    println!("setup: everything is there");
    Ok(())
}

/// Installs what is missing; fails when something is missing still.
pub fn ensure() -> Result<()> {
    ensure_packages()?;
    ensure_object_store()
}

fn ensure_packages() -> Result<()> {
    let missing = missing();
    if missing.is_empty() {
        return Ok(());
    }
    println!("setup: installing {}", packages(&missing).join(" "));
    let apt = Apt::find(&missing)?;
    let (from_backports, plain): (Vec<&Need>, Vec<&Need>) =
        missing.into_iter().partition(|need| need.is_qemu());
    let backports = !from_backports.is_empty() && debian_codename() == "bookworm";
    if backports && !backports_are_listed() {
        apt.write_file(BACKPORTS_FILE, &backports_line(&apt_mirror::find()?))?;
    }
    apt.run(&["update"])?;
    apt.install(&plain, None)?;
    apt.install(&from_backports, backports.then_some(BACKPORTS_SUITE))?;

    let missing = self::missing();
    if !missing.is_empty() {
        bail!(
            "these packages were installed, yet what they should bring is not there or too old: {}",
            packages(&missing).join(" ")
        );
    }
    Ok(())
}

/// Builds the object store of the tests, which no package brings, below `target`.
fn ensure_object_store() -> Result<()> {
    let folder = crate::workspace::Workspace::locate()?
        .target
        .join("programs");
    if folder.join("versitygw").exists() {
        return Ok(());
    }
    println!("setup: building {OBJECT_STORE}");
    if process::find_program("go").is_none() {
        let backports = debian_codename() == "bookworm";
        let apt = Apt::find(&[&GO])?;
        apt.run(&["update"])?;
        apt.install(&[&GO], backports.then_some(BACKPORTS_SUITE))?;
    }
    std::fs::create_dir_all(&folder)?;
    // A compiler that is older than the program wants fetches a newer one.
    let mut command = Command::new("go");
    command
        .args(["install", OBJECT_STORE])
        .env("GOBIN", &folder)
        .env("GOTOOLCHAIN", "auto");
    process::run(&mut command).context("the object store of the tests cannot be built")
}

/// Fetches the lists of packages anew.
pub fn refresh_package_lists() -> Result<()> {
    Apt::find(&[])?.run(&["update"])
}

fn missing() -> Vec<&'static Need> {
    NEEDS.iter().filter(|need| !need.is_met()).collect()
}

fn packages(needs: &[&Need]) -> Vec<&'static str> {
    needs.iter().map(|need| need.package).collect()
}

fn qemu_major(program: &str) -> Option<u32> {
    let path = process::find_program(program)?;
    let text = process::output(Command::new(path).arg("--version")).ok()?;
    parse_qemu_major(&text)
}

/// Whether a module lies where QEMU looks for it: `/usr/lib/ARCHITECTURE-linux-gnu/qemu`.
fn has_qemu_module(name: &str) -> bool {
    let folders = std::fs::read_dir("/usr/lib")
        .into_iter()
        .flatten()
        .flatten();
    let mut modules = folders.map(|folder| folder.path().join("qemu").join(name));
    modules.any(|module| module.exists())
}

fn parse_qemu_major(text: &str) -> Option<u32> {
    let (_, rest) = text.split_once("version ")?;
    rest.split('.').next()?.parse().ok()
}

fn debian_codename() -> String {
    let text = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
    text.lines()
        .find_map(|line| line.strip_prefix("VERSION_CODENAME="))
        .unwrap_or_default()
        .trim_matches('"')
        .to_owned()
}

fn backports_are_listed() -> bool {
    let folder = std::fs::read_dir("/etc/apt/sources.list.d");
    let files = folder
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path());
    files
        .filter(|path| {
            path.extension()
                .is_some_and(|e| e == "list" || e == "sources")
        })
        .chain(std::iter::once("/etc/apt/sources.list".into()))
        .filter_map(|path| std::fs::read_to_string(path).ok())
        .any(|text| names_backports(&text))
}

fn backports_line(mirror: &str) -> String {
    format!("deb {mirror} {BACKPORTS_SUITE} main\n")
}

fn names_backports(sources: &str) -> bool {
    sources
        .lines()
        .filter(|line| !line.trim_start().starts_with('#'))
        .any(|line| line.split_whitespace().any(|word| word == BACKPORTS_SUITE))
}

/// apt-get as root, or through sudo.
struct Apt {
    sudo: bool,
}

impl Apt {
    fn find(missing: &[&Need]) -> Result<Self> {
        let wanted = packages(missing).join(" ");
        if process::find_program("apt-get").is_none() {
            bail!(
                "apt-get is not here, so install these yourself (named as in Debian, \
                 QEMU {QEMU_MAJOR_MIN} or newer): {wanted}"
            );
        }
        // SAFETY: geteuid cannot fail and touches no memory.
        let sudo = unsafe { libc::geteuid() } != 0;
        if sudo && process::find_program("sudo").is_none() {
            bail!("not root and no sudo here; as root, run: apt-get install {wanted}");
        }
        Ok(Self { sudo })
    }

    fn as_root(&self, words: &[&str]) -> Command {
        let mut command = Command::new(if self.sudo { "sudo" } else { "env" });
        if self.sudo {
            command.arg("env");
        }
        command.arg("DEBIAN_FRONTEND=noninteractive").args(words);
        command
    }

    fn run(&self, arguments: &[&str]) -> Result<()> {
        let lock_wait = ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=300"];
        let words = [&lock_wait[..], arguments].concat();
        process::run(&mut self.as_root(&words))
    }

    fn install(&self, needs: &[&Need], suite: Option<&str>) -> Result<()> {
        if needs.is_empty() {
            return Ok(());
        }
        let mut arguments = vec!["install", "-y", "--no-install-recommends"];
        if let Some(suite) = suite {
            arguments.extend(["-t", suite]);
        }
        arguments.extend(packages(needs));
        self.run(&arguments)
    }

    fn write_file(&self, path: &str, text: &str) -> Result<()> {
        println!("setup: adding {path}");
        let script = "printf %s \"$2\" > \"$1\"";
        process::run(&mut self.as_root(&["sh", "-c", script, "sh", path, text]))
            .with_context(|| format!("cannot write {path}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qemu_versions_are_understood() {
        let debian = "qemu-img version 10.0.2 (Debian 1:10.0.2+ds-2)\nCopyright (c) 2003-2025";
        assert_eq!(parse_qemu_major(debian), Some(10));
        assert_eq!(
            parse_qemu_major("QEMU emulator version 7.2.17 (Debian)"),
            Some(7)
        );
        assert_eq!(parse_qemu_major("something else"), None);
    }

    #[test]
    fn only_a_live_source_counts() {
        assert!(names_backports(&backports_line("http://x/debian")));
        assert!(names_backports(
            "Types: deb\nSuites: bookworm bookworm-backports\n"
        ));
        assert!(!names_backports("# deb http://x bookworm-backports main\n"));
        assert!(!names_backports("deb http://x bookworm main\n"));
    }
}

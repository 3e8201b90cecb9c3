//! Places of fixed length: a file behind a raw NBD export, or behind a loop device.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::process::{self, Daemon};

const START_LIMIT: Duration = Duration::from_secs(30);

/// What gives a file its fixed length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `qemu-nbd -f raw`, which needs no privileges.
    Nbd,
    /// `losetup`, which only root may use.
    Loop,
}

/// How tools reach the place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// A socket in the folder of the tools.
    Socket(String),
    /// A block device.
    Device(String),
}

impl Address {
    /// As a file name.
    pub fn name(&self) -> String {
        match self {
            Address::Socket(socket) => format!("nbd+unix:///?socket={socket}"),
            Address::Device(path) => path.clone(),
        }
    }

    /// As options of the protocol node below an image.
    pub fn options(&self) -> String {
        match self {
            Address::Socket(socket) => {
                format!("file.driver=nbd,file.server.type=unix,file.server.path={socket}")
            }
            Address::Device(path) => format!("file.driver=host_device,file.filename={path}"),
        }
    }
}

/// The length that `measure` calls fully allocated for an image with these options (`-o`, or `""`).
pub fn fully_allocated_bytes(disk_bytes: u64, options: &str) -> Result<u64> {
    let mut measure = process::program("qemu-img")?;
    measure.args(["measure", "--output=json", "-O", "qcow2"]);
    if !options.is_empty() {
        measure.args(["-o", options]);
    }
    let said = process::output(measure.args(["--size", &disk_bytes.to_string()]))?;
    let said: Value = serde_json::from_str(&said)?;
    let found = said["fully-allocated"].as_u64();
    found.context("no size is measured")
}

/// A place; its server or device goes with this value.
#[derive(Debug)]
pub struct Place {
    /// How tools reach it.
    pub address: Address,
    server: Option<Daemon>,
    device: Option<PathBuf>,
}

impl Place {
    /// Makes a file of the folder reachable, with the length that it has.
    pub fn open(kind: Kind, folder: &Path, file: &str) -> Result<Place> {
        match kind {
            Kind::Nbd => Place::serve(folder, file),
            Kind::Loop => Place::attach(folder, file),
        }
    }

    fn serve(folder: &Path, file: &str) -> Result<Place> {
        let socket = format!("{file}.sock");
        let path = folder.join(&socket);
        let mut command = process::program("qemu-nbd")?;
        // A socket of relative name is refused.
        command
            .args(["-f", "raw", "-t", "-e", "0", "--discard=unmap", "-k"])
            .arg(&path)
            .arg(file);
        let log = folder.join(format!("{file}.log"));
        let mut server = Daemon::start(command.current_dir(folder), &log)?;
        server.wait_for_socket(&path.to_string_lossy(), START_LIMIT)?;
        Ok(Place {
            address: Address::Socket(socket),
            server: Some(server),
            device: None,
        })
    }

    fn attach(folder: &Path, file: &str) -> Result<Place> {
        let mut command = process::program("losetup")?;
        let said = process::output(command.args(["-f", "--show"]).arg(folder.join(file)))?;
        let device = said.trim().to_owned();
        Ok(Place {
            address: Address::Device(device.clone()),
            server: None,
            device: Some(device.into()),
        })
    }

    /// The commands of a shell script that do the same.
    pub fn script(&self, file: &str) -> String {
        match &self.address {
            Address::Socket(socket) => format!(
                "qemu-nbd -f raw -t -e 0 --discard=unmap -k \"$PWD/{socket}\" {file} & sleep 1"
            ),
            Address::Device(device) => format!("losetup {device} {file}"),
        }
    }

    /// Closes it: whatever was in flight is in the file.
    pub fn close(mut self) -> Result<()> {
        if let Some(server) = self.server.take() {
            return server.stop();
        }
        self.detach().context("cannot detach the loop device")
    }

    fn detach(&mut self) -> Result<()> {
        let Some(device) = self.device.take() else {
            return Ok(());
        };
        let mut command: Command = process::program("losetup")?;
        process::output(command.arg("-d").arg(device))?;
        Ok(())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // A device that stays is seen in `losetup -a`.
        let _ = self.detach();
    }
}

//! The programs that the suite is told to test: links with QEMU's names.

use std::collections::BTreeSet;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result, bail};

use crate::process;

/// One of QEMU's programs that ours stand for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Program {
    Image,
    Io,
    Nbd,
    Daemon,
}

impl Program {
    pub(super) const ALL: [Self; 4] = [Self::Image, Self::Io, Self::Nbd, Self::Daemon];

    fn file_name(self) -> &'static str {
        match self {
            Self::Image => "qemu-img",
            Self::Io => "qemu-io",
            Self::Nbd => "qemu-nbd",
            Self::Daemon => "qemu-storage-daemon",
        }
    }

    /// The variable by which the suite is told where the program lies.
    fn variable(self) -> &'static str {
        match self {
            Self::Image => "QEMU_IMG_PROG",
            Self::Io => "QEMU_IO_PROG",
            Self::Nbd => "QEMU_NBD_PROG",
            Self::Daemon => "QSD_PROG",
        }
    }
}

impl FromStr for Program {
    type Err = anyhow::Error;

    fn from_str(name: &str) -> Result<Self> {
        Ok(match name {
            "img" => Self::Image,
            "io" => Self::Io,
            "nbd" => Self::Nbd,
            "qsd" => Self::Daemon,
            other => bail!("--real takes img, io, nbd and qsd, not '{other}'"),
        })
    }
}

/// The suite asks the emulator for lists before it runs a test. No test of ours starts
/// a machine, so the answers are all that is needed.
const EMULATOR: &str = r#"#!/bin/sh
case " $* " in
*" -machine help "* | *" -M help "*)
    echo "pc-none              A machine that cannot start (default)"
    echo "pc                   Another name (alias of pc-none)" ;;
*" -device help "*)
    for name in virtio-blk virtio-blk-pci virtio-scsi virtio-scsi-pci scsi-hd scsi-cd \
        ide-hd ide-cd floppy usb-storage nvme; do
        echo "name \"$name\", bus PCI"
    done ;;
*" format=help "*)
    formats="blkdebug blklogwrites blkverify compress copy-on-read file host_cdrom host_device"
    formats="$formats luks nbd null-aio null-co preallocate qcow2 raw throttle"
    formats="$formats bochs cloop dmg parallels qcow qed quorum snapshot-access vdi vhdx vmdk vpc"
    echo "Supported formats: $formats"
    echo "Supported formats (read-only): $formats" ;;
*" --version "* | *" -version "*) echo "QEMU emulator version 10.0.2" ;;
*) echo "no machine can be started here: $*" >&2; exit 97 ;;
esac
"#;

/// A folder of programs, and the variables that name them.
#[derive(Debug)]
pub struct Tools {
    folder: PathBuf,
    /// Pairs of a variable's name and the program's path.
    pub variables: Vec<(&'static str, PathBuf)>,
}

impl Tools {
    /// Makes `folder`, with links to `vellum` except for the programs in `real`, which are QEMU's.
    /// What stands for a machine is `machine`, or else says only what can be asked without one.
    pub fn lay_out(
        folder: &Path,
        vellum: &Path,
        real: &BTreeSet<Program>,
        machine: Option<&Path>,
    ) -> Result<Self> {
        std::fs::create_dir_all(folder)?;
        let mut variables = Vec::new();
        for program in Program::ALL {
            let name = program.file_name();
            let target = match real.contains(&program) {
                true => process::find_program(name)
                    .with_context(|| format!("{name} is not installed; run `cargo xtask setup`"))?,
                false => vellum.to_owned(),
            };
            let link = folder.join(name);
            symlink(&target, &link)?;
            variables.push((program.variable(), link));
        }
        let emulator = folder.join("qemu-system-x86_64");
        match machine {
            Some(machine) => symlink(std::path::absolute(machine)?, &emulator)?,
            None => {
                std::fs::write(&emulator, EMULATOR)?;
                std::fs::set_permissions(&emulator, PermissionsExt::from_mode(0o755))?;
            }
        }
        variables.push(("QEMU_PROG", emulator));
        let folder = folder.to_owned();
        Ok(Self { folder, variables })
    }

    /// Puts each one's programs in the place of the other one's.
    pub fn swap(&self, other: &Tools) -> Result<()> {
        let between = self.folder.with_extension("swapped");
        std::fs::rename(&self.folder, &between)?;
        std::fs::rename(&other.folder, &self.folder)?;
        std::fs::rename(&between, &other.folder)?;
        Ok(())
    }
}

//! A writer of cpio archives in the "newc" form, which Linux unpacks at boot.

use std::collections::BTreeSet;

const MAGIC: &str = "070701";
const TRAILER: &str = "TRAILER!!!";
const TYPE_FILE: u32 = 0o100_000;
const TYPE_FOLDER: u32 = 0o040_000;
const TYPE_SYMLINK: u32 = 0o120_000;
const ALIGNMENT_BYTES: usize = 4;

/// An archive being written. Parent folders are added by themselves.
#[derive(Debug, Default)]
pub struct Archive {
    bytes: Vec<u8>,
    entries: u32,
    folders: BTreeSet<String>,
}

impl Archive {
    /// Adds a regular file.
    pub fn file(&mut self, name: &str, permissions: u32, content: &[u8]) {
        self.parents_of(name);
        self.entry(name, TYPE_FILE | permissions, content);
    }

    /// Adds a symbolic link.
    pub fn symlink(&mut self, name: &str, target: &str) {
        self.parents_of(name);
        self.entry(name, TYPE_SYMLINK | 0o777, target.as_bytes());
    }

    /// Adds a folder, once.
    pub fn folder(&mut self, name: &str) {
        self.parents_of(name);
        if self.folders.insert(name.to_owned()) {
            self.entry(name, TYPE_FOLDER | 0o755, b"");
        }
    }

    /// The whole archive. Linux accepts several of them one after the other.
    pub fn finish(mut self) -> Vec<u8> {
        self.entry(TRAILER, 0, b"");
        self.bytes
    }

    fn parents_of(&mut self, name: &str) {
        if let Some((parent, _)) = name.rsplit_once('/') {
            self.folder(parent);
        }
    }

    fn entry(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.entries += 1;
        let len = |bytes: usize| u32::try_from(bytes).expect("an archive entry is below 4 GiB");
        let (inode, owner, group, links, time) = (self.entries, 0, 0, 1, 0);
        let (device_major, device_minor, node_major, node_minor, checksum) = (0, 0, 0, 0, 0);
        let fields = [
            inode,
            mode,
            owner,
            group,
            links,
            time,
            len(content.len()),
            device_major,
            device_minor,
            node_major,
            node_minor,
            len(name.len() + 1),
            checksum,
        ];
        self.bytes.extend_from_slice(MAGIC.as_bytes());
        for field in fields {
            self.bytes
                .extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        let padded = self.bytes.len().next_multiple_of(ALIGNMENT_BYTES);
        self.bytes.resize(padded, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn an_archive_lists_as_it_was_written() -> anyhow::Result<()> {
        let mut archive = Archive::default();
        archive.file("bin/tool", 0o755, b"12345");
        archive.symlink("bin/sh", "tool");
        archive.folder("dev");
        let bytes = archive.finish();
        assert_eq!(bytes.len() % ALIGNMENT_BYTES, 0);

        let Some(busybox) = crate::process::find_program("busybox") else {
            return Ok(()); // `cargo xtask setup` brings it; the guest cannot be made without it.
        };
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("archive");
        std::fs::write(&path, bytes)?;
        let output = Command::new(busybox)
            .args(["cpio", "-t"])
            .stdin(Stdio::from(std::fs::File::open(&path)?))
            .output()?;
        assert_eq!(
            String::from_utf8(output.stdout)?,
            "bin\nbin/tool\nbin/sh\ndev\n"
        );
        Ok(())
    }
}

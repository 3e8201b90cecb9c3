//! Images of other programs' formats: what they refer to, and what the check of the format finds. Of those
//! that Vellum does not read, nobody here vouches for the rest.
//!
//! Invariant: an image is opened and checked without what it refers to. Other files are told, never
//! opened, whatever two readers of the same bytes make of them.

use std::sync::Arc;

use vellum::luks::CryptMethod;
use vellum::{ErrorKind, Result, Storage};
use vellum_foreign::{vhdx, vpc};
use vellum_graph::foreign::{self, CheckReport, Facts, Fix, ForeignFormat, Opening};
use vellum_graph::node::file_policy::FilePolicy;
use vellum_graph::open::OpenContext;
use vellum_options::{OpenFlags, Options, error_text};

use super::qcow2::is_of_the_disk;
use super::reference::Role;
use super::{Audit, Checked, Level, MAX_TOLD, read};

const SECTOR_BYTES: u64 = 512;
/// The most of a VMDK descriptor that is read; real ones have one or two KiB.
const MAX_DESCRIPTOR_BYTES: u64 = 1 << 20;
/// The longest name of a backing file in any of these formats.
const MAX_NAME_BYTES: u64 = 4096;
/// References that are told one by one.
const MAX_REFERENCES: usize = 256;

impl Audit<'_> {
    pub(super) async fn foreign(&mut self, format: &'static str, head: &[u8]) -> Result<()> {
        match format {
            "vmdk" => self.vmdk(head).await?,
            "qcow" => self.named_at(be64(head, 8), be32(head, 16)).await?,
            "qed" => self.qed(head).await?,
            "vpc" => self.vpc(head).await?,
            "vhdx" => self.vhdx().await,
            "luks" => {
                self.report
                    .note("encrypted", "a LUKS volume: its content is not looked at");
                return Ok(());
            }
            _ => {}
        }
        match foreign::find(format) {
            Some(format) => self.sound(format).await,
            None => {
                let message = format!("Vellum cannot tell whether a {format} image is sound");
                self.report.reject("unsupported-format", message);
                Ok(())
            }
        }
    }

    /// Opens the image alone, and checks it.
    async fn sound(&mut self, format: &'static ForeignFormat) -> Result<()> {
        let work = self.in_time(examine(format, self.storage.clone())).await;
        let found = match work {
            None => {
                self.is_too_late();
                return Ok(());
            }
            Some(Err(error)) if format.name == "vhdx" && is_of_log(&error) => {
                let message = "the image has a log that has to be replayed, which changes what would \
                               be looked at: 'vellum check -r all' replays it";
                self.report.reject("log", message);
                return Ok(());
            }
            Some(Err(error)) if is_of_the_disk(&error) => return Err(error),
            Some(Err(error)) => {
                self.cannot_be_opened(&error);
                return Ok(());
            }
            Some(Ok(found)) => found,
        };
        self.check_size(found.size_bytes);
        if found.facts.is_encrypted {
            // Of these formats qcow alone knows encryption, and no other way.
            self.report.note_encryption(CryptMethod::Aes);
        }
        if found.facts.is_dirty {
            let message = "the image was not closed cleanly";
            self.report.warn("dirty", message);
        }
        if let Some(checked) = found.checked {
            self.judge_foreign(&checked);
        }
        Ok(())
    }

    fn cannot_be_opened(&mut self, error: &vellum::Error) {
        let names_parts = |reference: &super::Reference| reference.role == Role::Extent;
        match error.kind() {
            ErrorKind::Denied if self.report.references.iter().any(names_parts) => {
                let message = "the parts of the disk that lie in other files are not looked at";
                self.report.note("not-checked", message);
            }
            ErrorKind::Denied => self.report.reject("extent", error_text(error)),
            ErrorKind::Unsupported => {
                self.report.reject("unsupported-format", error_text(error));
            }
            _ => self.report.reject("inconsistent", error_text(error)),
        }
    }

    fn judge_foreign(&mut self, found: &CheckReport) {
        let (corruptions, errors) = (found.corruptions, found.check_errors);
        self.report.checked = Some(Checked {
            corruptions,
            leaks: found.leaks,
            errors,
        });
        if corruptions + errors > 0 {
            for message in found.messages.iter().take(MAX_TOLD) {
                self.report.reject("inconsistent", message.trim_end());
            }
            let message = format!("{corruptions} contradictions in the metadata, {errors} errors");
            self.report.reject("inconsistent", message);
        }
        if found.leaks > 0 {
            let message = format!("{} clusters take space and are not used", found.leaks);
            self.report.add(Level::Note, "leaks", message);
        }
    }

    /// A backing file's name by place and length, as qcow and QED have it.
    async fn named_at(&mut self, offset: Option<u64>, length: Option<u32>) -> Result<()> {
        let (Some(offset @ 1..), Some(length @ 1..)) = (offset, length) else {
            return Ok(());
        };
        let length = u64::from(length).min(MAX_NAME_BYTES);
        let name = read(&self.storage, offset.min(i64::MAX as u64 - length), length).await?;
        self.refer(Role::Backing, Some(&text(&name)), None, true);
        Ok(())
    }

    /// QED: little endian, and a feature bit that says whether the name is in force.
    async fn qed(&mut self, head: &[u8]) -> Result<()> {
        let features = le64(head, 16).unwrap_or(0);
        let offset = le32(head, 56).map(u64::from);
        let length = le32(head, 60);
        match features & 1 {
            0 => Ok(()),
            _ => self.named_at(offset, length).await,
        }
    }

    /// VHDX: the parent that would be opened. What cannot be read is found when the image is checked.
    async fn vhdx(&mut self) {
        let options = vhdx::OpenOptions::default().read_only(true);
        let parent = self
            .in_time(vhdx::parent(self.storage.clone(), options))
            .await;
        if let Some(Ok(Some(parent))) = parent {
            let named = parent.backing_name();
            let (name, format) = named.map(|named| (named.name, named.format)).unzip();
            self.refer(
                Role::Parent,
                name.as_deref(),
                format.flatten().as_deref(),
                true,
            );
        }
    }

    /// VHD: a differencing disk names its parent in UTF-16, and in locators of platforms, of which the first is
    /// opened.
    async fn vpc(&mut self, head: &[u8]) -> Result<()> {
        const DIFFERENCING: u32 = 4;
        if be32(head, 60) != Some(DIFFERENCING) {
            return Ok(());
        }
        let options = vpc::OpenOptions::default().read_only(true);
        let parent = self
            .in_time(vpc::parent(self.storage.clone(), options))
            .await;
        if let Some(Ok(Some(parent))) = parent
            && let Some(named) = parent.backing_name()
        {
            self.refer(
                Role::Parent,
                Some(&named.name),
                named.format.as_deref(),
                true,
            );
            return Ok(());
        }
        let offset = be64(head, 16).unwrap_or(0).min(i64::MAX as u64 - 2048);
        let header = read(&self.storage, offset, 1024).await?;
        let units: Vec<u16> = header[64..64 + 512]
            .chunks_exact(2)
            .map(|pair| u16::from_be_bytes([pair[0], pair[1]]))
            .take_while(|unit| *unit != 0)
            .collect();
        self.refer(
            Role::Parent,
            Some(&String::from_utf16_lossy(&units)),
            None,
            true,
        );
        Ok(())
    }

    /// VMDK: a text that names extents, by itself or inside of the first of them. That one names itself by
    /// the name that it had when it was made.
    async fn vmdk(&mut self, head: &[u8]) -> Result<()> {
        let holds_disk = head.starts_with(b"KDMV") && le64(head, 12) != Some(0);
        let (offset, length) = match head.get(..4) {
            Some(b"KDMV") => {
                let sectors = |at| le64(head, at).unwrap_or(0).saturating_mul(SECTOR_BYTES);
                (sectors(28), sectors(36))
            }
            Some(b"COWD") => (0, 0),
            _ => (0, self.report.file_length_bytes),
        };
        let length = length.min(MAX_DESCRIPTOR_BYTES);
        let descriptor = read(&self.storage, offset.min(i64::MAX as u64 - length), length).await?;
        let names = descriptor_names(&text(&descriptor));
        let extents = names.iter().filter(|(role, _)| *role == Role::Extent);
        let is_alone = holds_disk && extents.count() == 1;
        for (role, name) in names {
            let is_own = role == Role::Extent && is_alone && !name.contains(['/', '\\', ':']);
            if !is_own {
                self.refer(role, Some(&name), None, true);
            }
        }
        Ok(())
    }
}

/// Whether an image is not opened for the log that it has, as nothing may be written: reads of a file that
/// is open are not refused for permissions.
fn is_of_log(error: &vellum::Error) -> bool {
    error.kind() == ErrorKind::PermissionDenied
}

/// What is found by opening an image.
struct Found {
    size_bytes: u64,
    facts: Arc<Facts>,
    /// `None`: the format has nothing that could be checked.
    checked: Option<CheckReport>,
}

/// Opens an image that may open nothing else, and checks it.
async fn examine(format: &'static ForeignFormat, storage: Arc<dyn Storage>) -> Result<Found> {
    let opening = Opening {
        format,
        file: storage.clone(),
        options: Options::new(),
        writable: false,
        around: OpenContext::alone(
            OpenFlags {
                no_backing: true,
                for_check: true,
                metadata_only: true,
                ..OpenFlags::default()
            },
            FilePolicy::Nothing,
        ),
    };
    let device = (format.open)(opening).await?;
    let size_bytes = device.size_bytes();
    let facts = foreign::facts(&*device).unwrap_or_default();
    drop(device);
    let checked = foreign::check(format.name, &storage, Fix::default(), &FilePolicy::Nothing);
    Ok(Found {
        size_bytes,
        facts,
        checked: checked.await?,
    })
}

/// The files that a VMDK descriptor names.
fn descriptor_names(descriptor: &str) -> Vec<(Role, String)> {
    let quoted = |line: &str| {
        let (_, rest) = line.split_once('"')?;
        Some(rest.split('"').next().unwrap_or(rest).to_owned())
    };
    let reference = |line: &str| {
        let line = line.trim();
        let is_extent = ["RW ", "RDONLY ", "NOACCESS "]
            .iter()
            .any(|access| line.starts_with(access));
        let role = match is_extent {
            true => Role::Extent,
            false if line.starts_with("parentFileNameHint") => Role::Parent,
            false => return None,
        };
        Some((role, quoted(line)?))
    };
    descriptor
        .lines()
        .filter_map(reference)
        .take(MAX_REFERENCES)
        .collect()
}

/// Bytes up to the first NUL as text.
fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0);
    String::from_utf8_lossy(&bytes[..end.unwrap_or(bytes.len())]).into_owned()
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

fn be32(bytes: &[u8], at: usize) -> Option<u32> {
    array(bytes, at).map(u32::from_be_bytes)
}

fn be64(bytes: &[u8], at: usize) -> Option<u64> {
    array(bytes, at).map(u64::from_be_bytes)
}

fn le32(bytes: &[u8], at: usize) -> Option<u32> {
    array(bytes, at).map(u32::from_le_bytes)
}

fn le64(bytes: &[u8], at: usize) -> Option<u64> {
    array(bytes, at).map(u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_names_extents_and_parents() {
        let text = "# Disk DescriptorFile\nversion=1\ncreateType=\"monolithicFlat\"\n\
                    parentFileNameHint=\"/base.vmdk\"\nRW 2048 FLAT \"/etc/passwd\" 0\n\
                    # RW 1 FLAT \"comment\"\nRDONLY 1 SPARSE \"a\n";
        let names = descriptor_names(text);
        let expected = [
            (Role::Parent, "/base.vmdk"),
            (Role::Extent, "/etc/passwd"),
            (Role::Extent, "a"),
        ];
        assert_eq!(names, expected.map(|(role, name)| (role, name.to_owned())));
    }
}

//! What a qcow2 image says, and whether it agrees with itself.

use std::sync::Arc;

use parking_lot::Mutex;
use vellum::luks::LuksHeader;
use vellum::qcow2::check::{CheckOptions, FindingKind, check, cut_short};
use vellum::qcow2::checksums::name_of_checksums;
use vellum::qcow2::info::{ImageInfo, LiveLog, live_write_log};
use vellum::qcow2::{read_header, read_snapshots};
use vellum::{ErrorKind, Result};
use vellum_format::Header;
use vellum_format::crypto::CryptMethod;
use vellum_format::extension::{Extension, kind};
use vellum_format::features::{Autoclear, Compatible, Incompatible};
use vellum_format::snapshot::SnapshotEntry;
use vellum_options::error_text;

use super::reference::Role;
use super::{Audit, Checked, Facts, Level, MAX_TOLD, Permission};
use crate::minisign;

/// What a check may keep for each cluster of the file, and for each L1 entry, at worst.
const BYTES_PER_CLUSTER: u64 = 16;
const BYTES_PER_L1_ENTRY: u64 = 64;

impl Audit<'_> {
    pub(super) async fn qcow2(&mut self) -> Result<()> {
        let header = match read_header(&self.storage).await {
            Ok(header) => header,
            Err(error) if is_of_the_disk(&error) => return Err(error),
            Err(error) => {
                self.report.reject("header", error_text(&error));
                return Ok(());
            }
        };
        self.facts(&header);
        self.check_size(header.guest_size_bytes());
        self.references(&header);
        self.features(&header);
        if self.tables(&header).await? {
            self.check(&header).await?;
        }
        Ok(())
    }

    fn facts(&mut self, header: &Header) {
        self.report.facts = Some(Facts {
            version: header.version,
            virtual_size_bytes: header.guest_size_bytes(),
            cluster_size_bytes: header.geometry().cluster_size_bytes(),
            snapshots: header.snapshot_count.into(),
            bitmaps: header.bitmaps().map_or(0, |bitmaps| bitmaps.count.into()),
            encryption: match header.crypt_method {
                CryptMethod::None => None,
                CryptMethod::Aes => Some("aes"),
                CryptMethod::Luks => Some("luks"),
            },
            seal_content: None,
            seal_key: None,
        });
    }

    fn references(&mut self, header: &Header) {
        let format = header.backing_format();
        if let Some(name) = header.backing_file_text() {
            self.refer(Role::Backing, Some(&name), format.as_deref(), true);
            if format.is_none() {
                self.report.reject(
                    "backing-format",
                    "the format of the backing file is not named and would be probed; name it \
                     (rebase -u -b FILE -F FORMAT)",
                );
            }
        } else if format.is_some() {
            self.report.warn(
                "backing-format",
                "names the format of a backing file, and no such file",
            );
        }
        let external = header.incompatible.contains(Incompatible::EXTERNAL_DATA);
        let name = header.external_data_file().map(String::from_utf8_lossy);
        if external || name.is_some() {
            self.refer(Role::DataFile, name.as_deref(), Some("raw"), external);
        }
        if let Some(log) = live_write_log(header) {
            match log {
                LiveLog::File(name) => self.refer(Role::WriteLog, Some(&name), None, true),
                LiveLog::Inside => {
                    let message =
                        "the write log in it holds writes that are not in their place yet";
                    self.report.note("write-log", message);
                }
                LiveLog::Unknown => self.refer(Role::WriteLog, None, None, true),
            }
        } else if header.write_log().is_some() {
            let message = "the image names a write log, which nothing reads";
            self.report.note("write-log", message);
        }
        if let Some(name) = name_of_checksums(header) {
            self.refer(Role::Checksums, Some(&name), None, true);
        }
    }

    /// Marks and extensions.
    fn features(&mut self, header: &Header) {
        let report = &mut self.report;
        if header.incompatible.contains(Incompatible::CORRUPT) {
            report.reject("corrupt", "the image is marked as damaged");
        }
        if header.incompatible.contains(Incompatible::DIRTY) {
            report.warn(
                "dirty",
                "the image was not closed cleanly; opening it for writing repairs it first",
            );
        }
        let unknown = [
            (
                "compatible",
                header.compatible.unknown() != Compatible::empty(),
            ),
            (
                "autoclear",
                header.autoclear.unknown() != Autoclear::empty(),
            ),
        ];
        for (what, _) in unknown.iter().filter(|(_, unknown)| *unknown) {
            report.note(
                "unknown-features",
                format!("unknown {what} features are set"),
            );
        }
        if header.autoclear.contains(Autoclear::RAW_EXTERNAL_DATA) {
            report.note("data-file-raw", "the data file is a raw image of the disk");
        }
        for extension in &header.extensions {
            if let Extension::Unknown { kind, data } = extension
                && ![kind::SEAL, kind::WRITE_LOG, kind::CHECKSUMS].contains(kind)
            {
                let length = data.len();
                let message = format!("unknown header extension {kind:#010x} of {length} bytes");
                report.note("unknown-extension", message);
            }
        }
        if !header.unknown_header_tail.is_empty() {
            report.note("unknown-header", "the header has fields that are not known");
        }
        report.note_encryption(header.crypt_method);
    }

    /// Snapshots, bitmaps, key slots; whether a check can be afforded.
    async fn tables(&mut self, header: &Header) -> Result<bool> {
        let info = match ImageInfo::read(self.storage.clone()).await {
            Ok(info) => info,
            Err(error) if is_of_the_disk(&error) => return Err(error),
            Err(error) => {
                self.report.reject("metadata", error_text(&error));
                return Ok(false);
            }
        };
        if let Some(luks) = &info.luks {
            self.key_slots(luks);
        }
        self.seal(&info);
        for bitmap in info.bitmaps.iter().filter(|bitmap| !bitmap.consistent) {
            let message = format!("the bitmap '{}' is not to be trusted", bitmap.name);
            self.report.note("stale-bitmap", message);
        }
        let snapshots = read_snapshots(&self.storage, header).await?;
        self.snapshots(header, &snapshots);
        Ok(self.can_afford(header, &snapshots))
    }

    fn seal(&mut self, info: &ImageInfo) {
        if !info.sealed {
            return;
        }
        let Some(seal) = &info.seal else {
            let message = "the image says that it is sealed, and its seal is damaged";
            return self.report.warn("seal", message);
        };
        let root = seal.root.clone().unwrap_or_else(|| "nothing".to_owned());
        let key = seal.signature.as_deref().and_then(minisign::key_id);
        let signed = match &key {
            Some(key) => format!("says that key {key} has signed it"),
            None => "is not signed".to_owned(),
        };
        let message = format!(
            "the image is sealed, and the seal {signed}; 'vellum verify' compares them \
             (content {root})"
        );
        self.report.note("seal", message);
        if let Some(facts) = &mut self.report.facts {
            (facts.seal_content, facts.seal_key) = (Some(root), key);
        }
    }

    fn snapshots(&mut self, header: &Header, snapshots: &[SnapshotEntry]) {
        let geometry = header.geometry();
        let mut with_vm_state = 0;
        for snapshot in snapshots {
            if let Err(error) = snapshot.check_l1_table(&geometry) {
                let message = format!("snapshot '{}': {error}", snapshot.id_text());
                self.report.reject("snapshot", message);
                return;
            }
            with_vm_state += u64::from(snapshot.vm_state_size_bytes > 0);
        }
        if with_vm_state > 0 {
            self.report.warn(
                "vm-state",
                format!(
                    "{with_vm_state} snapshot(s) hold the state of a machine: loading one \
                     (loadvm) trusts whoever made it"
                ),
            );
        }
    }

    /// Whoever opens a volume derives keys for as long as its header says.
    fn key_slots(&mut self, header: &LuksHeader) {
        let most = self.policy.max_iterations;
        let slots = header.slots.iter().enumerate();
        for (index, slot) in slots.filter(|(_, slot)| slot.active && slot.iterations > most) {
            let rounds = slot.iterations;
            let message = format!("key slot {index} asks for {rounds} rounds of key derivation");
            self.report.reject("key-derivation", message);
        }
        if header.digest_iterations > most {
            let rounds = header.digest_iterations;
            let message = format!("the master key asks for {rounds} rounds of key derivation");
            self.report.reject("key-derivation", message);
        }
    }

    fn can_afford(&mut self, header: &Header, snapshots: &[SnapshotEntry]) -> bool {
        let clusters = header
            .geometry()
            .clusters_for(self.report.file_length_bytes);
        let entries = snapshots
            .iter()
            .map(|snapshot| u64::from(snapshot.l1_entries))
            .fold(u64::from(header.l1_entries), u64::saturating_add);
        let needed = clusters
            .saturating_mul(BYTES_PER_CLUSTER)
            .saturating_add(entries.saturating_mul(BYTES_PER_L1_ENTRY));
        let most = self.policy.max_memory_bytes;
        if needed > most {
            let message = format!(
                "checking the metadata may take {needed} bytes of memory, and {most} are allowed"
            );
            self.report
                .forbid("memory-limit", message, Permission::Memory);
        }
        needed <= most
    }

    async fn check(&mut self, header: &Header) -> Result<()> {
        let missing = self.in_time(cut_short(self.storage.clone())).await;
        if let Some(Ok(Some(found))) = missing {
            self.report.reject("cut-short", found.to_string());
        }
        let told = Arc::new(Mutex::new(Vec::new()));
        let sink = told.clone();
        let options = CheckOptions::default()
            .on_finding(Some(Arc::new(move |finding| {
                let mut told = sink.lock();
                if finding.kind != FindingKind::Leak && told.len() < MAX_TOLD {
                    told.push(finding.message.clone());
                }
            })))
            .on_progress(None);
        let work = self.in_time(check(self.storage.clone(), &options)).await;
        let told = std::mem::take(&mut *told.lock());
        for message in told {
            self.report.reject("inconsistent", message.trim_end());
        }
        let outcome = match work {
            None => {
                self.is_too_late();
                return Ok(());
            }
            Some(Err(error)) if is_of_the_disk(&error) => return Err(error),
            Some(Err(error)) => {
                self.report.reject("inconsistent", error_text(&error));
                return Ok(());
            }
            Some(Ok(outcome)) => outcome,
        };
        self.judge(
            header,
            outcome.leaks,
            outcome.corruptions,
            outcome.check_errors,
        );
        Ok(())
    }

    fn judge(&mut self, header: &Header, leaks: u64, corruptions: u64, errors: u64) {
        self.report.checked = Some(Checked {
            corruptions,
            leaks,
            errors,
        });
        if corruptions + errors > 0 {
            let message = format!("{corruptions} contradictions in the metadata, {errors} errors");
            self.report.reject("inconsistent", message);
        }
        if leaks > 0 {
            // Lost space is what a crash leaves behind, unless nothing was running.
            let bytes = leaks << header.cluster_bits;
            let message = format!("{leaks} clusters ({bytes} bytes) are counted and not used");
            self.report.add(Level::Note, "leaks", message);
        }
    }
}

/// Whether the disk failed, rather than what is on it.
pub(super) fn is_of_the_disk(error: &vellum::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::Io | ErrorKind::ChecksumMismatch | ErrorKind::PermissionDenied
    )
}

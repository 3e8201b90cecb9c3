//! Audit: what the `audit` target does with its bytes.

use std::sync::Arc;
use std::time::Duration;

use vellum_images::audit::{Form, Level, Policy, audit};
use vellum_storage::MemStorage;

use super::image::{run, unpack};

/// The first byte chooses the policy, the others are an image as [`unpack`] has it.
///
/// - An audit of any bytes ends, and takes no more memory than the fuzzer allows.
/// - Nothing writes to the image.
/// - A file whose content says qcow2 and that names another file is never safe unless
///   the policy allows such files.
/// - A verdict against an image has a reason that is told.
pub fn check_audit(data: &[u8]) {
    let Some((&choice, records)) = data.split_first() else {
        return;
    };
    let policy = Policy {
        format: match choice & 3 {
            1 => Some("raw".into()),
            2 => Some("qcow2".into()),
            _ => None,
        },
        allow_backing: choice & 4 != 0,
        allow_data_file: choice & 8 != 0,
        allow_protocols: choice & 16 != 0,
        within: (choice & 32 != 0).then(|| "/nowhere".into()),
        max_memory_bytes: 64 << 20,
        // The fuzzer has limits of its own; the verdict must not depend on the machine.
        max_time: Duration::from_secs(3600),
        ..Policy::default()
    };
    let image = unpack(records);
    let storage = Arc::new(MemStorage::with_bytes(image.clone()));
    run({
        let storage = storage.clone();
        async move {
            let report = audit(storage, &policy).await.expect("memory can be read");
            let has_reason = report
                .findings
                .iter()
                .any(|finding| finding.level == Level::Reject && !finding.message.is_empty());
            assert_eq!(report.is_safe(), !has_reason);
            for reference in &report.references {
                let allowed = policy.allow_backing || policy.allow_data_file;
                assert!(allowed || !report.is_safe(), "{reference:?}");
                // Only paths can be confined, and none of these lies in that folder.
                let confined = policy.within.is_some() && reference.form == Form::Path;
                assert!(!confined || !report.is_safe(), "{reference:?}");
            }
        }
    });
    assert!(storage.snapshot() == image, "the image was written to");
}

//! Failures of image and log at the same time.

use std::sync::Arc;

use vellum::ErrorKind;
use vellum::gate::DenyAll;
use vellum::qcow2::check::{CheckOptions, check};
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{Backing, OpenOptions, Qcow2, WriteLogOptions};
use vellum_io::lane::block_on;
use vellum_storage::MemStorage;

/// The header has no room for what it would say of the log.
#[test]
fn a_log_inside_that_is_never_named_gives_its_clusters_back() {
    block_on(async {
        let file = Arc::new(MemStorage::new());
        let options = CreateOptions::default()
            .size_bytes(1 << 20)
            .cluster_size_bytes(512)
            .backing_file(Some("b".repeat(350)))
            .backing_format(Some("raw".to_owned()));
        create(file.clone(), None, &options).await.expect("made");
        for _ in 0..3 {
            let log = WriteLogOptions::inside().len_bytes(WriteLogOptions::MIN_LEN_BYTES);
            let options = OpenOptions::default()
                .backing(Backing::None)
                .write_log(Some(log));
            let opened = Qcow2::open(file.clone(), Arc::new(DenyAll), options).await;
            assert_eq!(
                opened.expect_err("no room").kind(),
                ErrorKind::InvalidArgument
            );
            let report = check(file.clone(), &CheckOptions::default()).await;
            let report = report.expect("checked");
            assert_eq!((report.leaks, report.corruptions), (0, 0));
        }
    });
}

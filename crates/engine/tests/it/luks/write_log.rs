//! Encrypted images with a write log, as QEMU sees them.

use std::sync::Arc;

use vellum::BlockDevice;
use vellum::gate::DenyAll;
use vellum::io::lane;
use vellum::qcow2::{OpenOptions, Qcow2, WriteLogOptions};
use vellum::storage::MemStorage;

use crate::common::qemu;
use crate::luks::{bytes_of, image, sized, write};

#[test]
fn qemu_is_told_what_keeps_it_out_of_an_image_whose_log_holds_writes() {
    let folder = tempfile::tempdir().unwrap();
    let logs = [
        WriteLogOptions::new(Arc::new(MemStorage::new()), "disk.log"),
        WriteLogOptions::inside(),
    ];
    for log in logs {
        lane::block_on(async {
            let file = image(sized(1 << 20)).await;
            let options = OpenOptions::default()
                .passphrase(Some("secret".into()))
                .write_log(Some(log.len_bytes(WriteLogOptions::MIN_LEN_BYTES)));
            let device = Qcow2::open(file.clone(), Arc::new(DenyAll), options);
            let device = device.await.unwrap();
            write(&*device, 0, &[7; 512]).await;
            device.flush().await.unwrap();
            let killed = bytes_of(&file).await;
            device.close().await.unwrap();
            std::fs::write(folder.path().join("killed.qcow2"), killed).unwrap();
        });
        for words in [["info", "killed.qcow2"], ["check", "killed.qcow2"]] {
            let told = qemu("qemu-img", folder.path(), &words);
            let told = String::from_utf8_lossy(&told.stderr).into_owned();
            let refusal = "Unsupported qcow2 feature(s): Vellum's write log";
            assert!(told.contains(refusal), "{told}");
        }
    }
}

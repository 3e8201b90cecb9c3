//! Images of the formats that are written, in memory.

use std::sync::Arc;

use vellum::storage::MemStorage;
use vellum::{BlockDevice, Storage};
use vellum_foreign::{parallels, qcow, qed, vdi, vhdx, vmdk, vpc};

/// An empty image, of small blocks where the format lets one choose.
pub async fn create(format: &str, size_bytes: u64) -> Arc<MemStorage> {
    let memory = Arc::new(MemStorage::new());
    let file: Arc<dyn Storage> = memory.clone();
    let created = match format {
        "parallels" => {
            let options = parallels::CreateOptions::default().cluster_size_bytes(65536);
            parallels::create(&file, &options.size_bytes(size_bytes)).await
        }
        "qcow" => {
            let options = qcow::CreateOptions::default().size_bytes(size_bytes);
            qcow::create(&file, &options).await
        }
        "qed" => {
            let options = qed::CreateOptions::default()
                .cluster_size_bytes(4096)
                .table_size_clusters(1);
            qed::create(&file, &options.size_bytes(size_bytes)).await
        }
        "vdi" => {
            let options = vdi::CreateOptions::default().size_bytes(size_bytes);
            vdi::create(&file, &options).await
        }
        "vhdx" => {
            let options = vhdx::CreateOptions::default().block_size_bytes(1 << 20);
            vhdx::create(&file, &options.size_bytes(size_bytes)).await
        }
        "vmdk" => {
            let options = vmdk::CreateOptions::default().size_bytes(size_bytes);
            vmdk::create(&file, &[], &options).await
        }
        _ => {
            let options = vpc::CreateOptions::default().size_bytes(size_bytes);
            vpc::create(&file, &options).await
        }
    };
    created.unwrap();
    memory
}

/// Opens an image, to be written to.
pub async fn open(format: &str, file: Arc<dyn Storage>) -> Arc<dyn BlockDevice> {
    match format {
        "parallels" => parallels::open(file, false).await.unwrap() as Arc<dyn BlockDevice>,
        "qcow" => qcow::open(file, None, qcow::OpenOptions::default())
            .await
            .unwrap(),
        "qed" => qed::open(file, None, false).await.unwrap(),
        "vdi" => vdi::open(file, false).await.unwrap(),
        "vhdx" => vhdx::open(file, None, vhdx::OpenOptions::default())
            .await
            .unwrap(),
        "vmdk" => {
            let descriptor = vmdk::read_descriptor(&*file).await.unwrap();
            let options = vmdk::OpenOptions::default();
            vmdk::open(file, descriptor, Vec::new(), None, &options)
                .await
                .unwrap()
        }
        _ => vpc::open(file, None, vpc::OpenOptions::default())
            .await
            .unwrap(),
    }
}

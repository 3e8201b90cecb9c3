//! The formats: how each is made, opened and checked.

use std::sync::Arc;

use vellum::luks::Unlocking;
use vellum::{BlockDevice, Result, Storage};
use vellum_foreign::{BackingName, CheckReport, Fix, parallels, qcow, qed, vdi, vhdx, vmdk, vpc};

use super::ForeignFormat;
use crate::engine::PASSPHRASE;
use crate::image_engine::Files;
use crate::scenario::{Backing, ImageOptions};

/// All formats.
pub const FORMATS: &[ForeignFormat] = &[PARALLELS, QCOW, QED, VDI, VHDX, VMDK, VPC];

/// What an image calls its backing file; the simulator hands that over itself.
const BACKING_NAME: &str = "backing";
const MEND: Fix = Fix {
    leaks: true,
    corruptions: true,
};

fn backing_name(image: &ImageOptions) -> Option<String> {
    (image.backing != Backing::None).then(|| BACKING_NAME.to_owned())
}

const PARALLELS: ForeignFormat = ForeignFormat {
    name: "parallels",
    block_bits: &[12, 16, 20],
    has_backing: false,
    encrypts: false,
    on_devices: false,
    create: |file, image| {
        let options = parallels::CreateOptions::default()
            .size_bytes(image.size_bytes)
            .cluster_size_bytes(1 << image.cluster_bits);
        Box::pin(async move { parallels::create(&file, &options).await })
    },
    open: |files| {
        Box::pin(async move {
            let device = parallels::open(files.image, false).await?;
            Ok(device as Arc<dyn BlockDevice>)
        })
    },
    check: |file| Box::pin(async move { parallels::check(&file).await }),
    // That is what the mark is for.
    harmless: &["image was not closed correctly"],
};

const QCOW: ForeignFormat = ForeignFormat {
    name: "qcow",
    block_bits: &[9, 12],
    has_backing: true,
    encrypts: true,
    on_devices: false,
    create: |file, image| {
        let options = qcow::CreateOptions::default()
            .size_bytes(image.size_bytes)
            .backing_file(backing_name(&image))
            .is_encrypted(image.encrypted);
        Box::pin(async move { qcow::create(&file, &options).await })
    },
    open: |files| {
        Box::pin(async move {
            // The others need none, and do not look at it.
            let unlocking = Unlocking::default().passphrase(Some(PASSPHRASE.into()));
            let options = qcow::OpenOptions::default().unlocking(unlocking);
            let device = qcow::open(files.image, files.backing, options).await?;
            Ok(device as Arc<dyn BlockDevice>)
        })
    },
    check: |_| Box::pin(async { Ok(CheckReport::default()) }),
    harmless: &[],
};

const QED: ForeignFormat = ForeignFormat {
    name: "qed",
    block_bits: &[12, 13, 16],
    has_backing: true,
    encrypts: false,
    on_devices: false,
    create: |file, image| {
        let backing = backing_name(&image).map(|name| BackingName {
            name,
            format: Some("raw".to_owned()),
        });
        let options = qed::CreateOptions::default()
            .size_bytes(image.size_bytes)
            .cluster_size_bytes(1 << image.cluster_bits)
            .table_size_clusters(2)
            .backing(backing);
        Box::pin(async move { qed::create(&file, &options).await })
    },
    open: |files| {
        Box::pin(async move {
            let device = qed::open(files.image, files.backing, false).await?;
            Ok(device as Arc<dyn BlockDevice>)
        })
    },
    check: |file| Box::pin(async move { qed::check(&file).await }),
    harmless: &[],
};

const VDI: ForeignFormat = ForeignFormat {
    name: "vdi",
    block_bits: &[20],
    has_backing: false,
    encrypts: false,
    on_devices: true,
    create: |file, image| {
        let options = vdi::CreateOptions::default()
            .size_bytes(image.size_bytes)
            .is_static(image.size_bytes % 7 == 0);
        Box::pin(async move { vdi::create(&file, &options).await })
    },
    open: |files| {
        Box::pin(async move {
            let device = vdi::open(files.image, false).await?;
            Ok(device as Arc<dyn BlockDevice>)
        })
    },
    check: |file| Box::pin(async move { vdi::check(&*file).await }),
    harmless: &["allocated blocks mismatch"],
};

const VHDX: ForeignFormat = ForeignFormat {
    name: "vhdx",
    block_bits: &[20],
    has_backing: false,
    encrypts: false,
    on_devices: false,
    create: |file, image| {
        let options = vhdx::CreateOptions::default()
            .size_bytes(image.size_bytes)
            .block_size_bytes(1 << image.cluster_bits)
            .block_state_zero(!image.tiny_cache);
        Box::pin(async move { vhdx::create(&file, &options).await })
    },
    open: |files| {
        Box::pin(async move {
            let device = vhdx::open(files.image, None, vhdx::OpenOptions::default()).await?;
            Ok(device as Arc<dyn BlockDevice>)
        })
    },
    // What waits in the log is a part of the image.
    check: |file| Box::pin(async move { vhdx::check(&file, MEND).await }),
    harmless: &[],
};

const VMDK: ForeignFormat = ForeignFormat {
    name: "vmdk",
    block_bits: &[16],
    has_backing: true,
    encrypts: false,
    on_devices: false,
    create: |file, image| {
        let options = vmdk::CreateOptions::default()
            .size_bytes(image.size_bytes)
            .zeroed_grain(image.tiny_cache)
            .parent_cid(backing_name(&image).map(|_| PARENT_CID))
            .backing_file(backing_name(&image));
        Box::pin(async move { vmdk::create(&file, &[], &options).await })
    },
    open: |files| Box::pin(open_vmdk(files)),
    check: |file| Box::pin(check_vmdk(file)),
    harmless: &[],
};

const PARENT_CID: u32 = 7;

async fn open_vmdk(files: Files) -> Result<Arc<dyn BlockDevice>> {
    let descriptor = vmdk::read_descriptor(&*files.image).await?;
    let options = vmdk::OpenOptions::default()
        .parent_cid(files.backing.as_ref().map(|_| PARENT_CID))
        .tables_bytes(1);
    let extents = Vec::new();
    Ok(vmdk::open(files.image, descriptor, extents, files.backing, &options).await?)
}

async fn check_vmdk(file: Arc<dyn Storage>) -> Result<CheckReport> {
    let descriptor = vmdk::read_descriptor(&*file).await?;
    vmdk::check(file, descriptor, Vec::new()).await
}

const VPC: ForeignFormat = ForeignFormat {
    name: "vpc",
    block_bits: &[21],
    has_backing: false,
    encrypts: false,
    on_devices: false,
    create: |file, image| {
        let subformat = match image.size_bytes % 7 == 0 {
            true => vpc::Subformat::Fixed,
            false => vpc::Subformat::Dynamic,
        };
        let options = vpc::CreateOptions::default()
            .size_bytes(image.size_bytes)
            .subformat(subformat)
            .force_size(true);
        Box::pin(async move { vpc::create(&file, &options).await })
    },
    open: |files| {
        Box::pin(async move {
            let device = vpc::open(files.image, None, vpc::OpenOptions::default()).await?;
            Ok(device as Arc<dyn BlockDevice>)
        })
    },
    check: |_| Box::pin(async { Ok(CheckReport::default()) }),
    harmless: &[],
};

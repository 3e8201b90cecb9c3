//! VDI for the simulator.

use vellum::BlockDevice;
use vellum_foreign::vdi::{self, CreateOptions};

use crate::foreign::ForeignFormat;

pub(crate) const FORMAT: ForeignFormat = ForeignFormat {
    name: "vdi",
    block_bits: &[20],
    has_backing: false,
    on_devices: true,
    create: |file, image| {
        let options = CreateOptions::default()
            .size_bytes(image.size_bytes)
            .is_static(image.size_bytes % 7 == 0);
        Box::pin(async move { vdi::create(&file, &options).await })
    },
    open: |files| {
        Box::pin(async move {
            let device = vdi::open(files.image, false).await?;
            Ok(device as std::sync::Arc<dyn BlockDevice>)
        })
    },
    check: |file| Box::pin(async move { vdi::check(&*file).await }),
    harmless: &["allocated blocks mismatch"],
};

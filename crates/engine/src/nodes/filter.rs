//! [`Filter`]: a storage over a device, seen as that device again.
//!
//! Requests go through the storage; what lies where, and in which layer, the device
//! below knows best.

use std::sync::Arc;

use vellum_io::spawn;

use crate::{BlockDevice, Extent, Io, Raw, delegate};

/// A device with a filter in front of it.
#[derive(Debug)]
pub struct Filter {
    filtering: Arc<Raw>,
    below: Arc<dyn BlockDevice>,
}

impl Filter {
    /// Shows `filtering`, which stands on `below` and moves no byte.
    pub fn new(filtering: Arc<Raw>, below: Arc<dyn BlockDevice>) -> Arc<Self> {
        Arc::new(Filter { filtering, below })
    }
}

impl BlockDevice for Filter {
    delegate!(
        filtering: info, size_bytes, read, write, write_zeroes, discard, flush, truncate, resize,
        close, storage, allocated_bytes,
    );

    delegate!(below: identity);

    /// Past the filter: no byte that passes it changes, and what is copied is read through it afterwards.
    fn copy_up(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        self.below.copy_up(offset_bytes, len_bytes)
    }

    fn block_status(&self, offset_bytes: u64, len_bytes: u64, max_depth: u32) -> Io<Extent> {
        // The filter may have something against the question.
        let asked = self
            .filtering
            .block_status(offset_bytes, len_bytes, max_depth);
        let below = self.below.clone();
        Io::task(spawn(async move {
            let shown = asked.await?;
            match below.size_bytes().checked_sub(offset_bytes) {
                None | Some(0) => Ok(shown),
                Some(rest) => {
                    let len_bytes = len_bytes.min(rest);
                    below.block_status(offset_bytes, len_bytes, max_depth).await
                }
            }
        }))
    }
}

#[cfg(test)]
mod tests {
    use vellum_io::lane::block_on;
    use vellum_storage::MemStorage;
    use vellum_storage::nodes::debug::{DebugStorage, Debugger, Limits};

    use super::*;
    use crate::gate::DenyAll;
    use crate::nodes::DeviceStorage;
    use crate::qcow2::OpenOptions;
    use crate::qcow2::Qcow2;
    use crate::qcow2::create::{CreateOptions, create};
    use crate::{Buffer, ErrorKind, RawOptions, RequestFlags, Storage};

    #[test]
    fn what_a_device_holds_shows_through_a_filter() {
        let file: Arc<dyn Storage> = Arc::new(MemStorage::new());
        block_on(async {
            let options = CreateOptions {
                size_bytes: 1 << 20,
                ..CreateOptions::default()
            };
            create(file.clone(), None, &options).await.unwrap();
            let image = Qcow2::open(file, Arc::new(DenyAll), OpenOptions::default());
            let image: Arc<dyn BlockDevice> = image.await.unwrap();
            let ones = Buffer::copy_of(&[1; 65536]);
            image
                .write(65536, ones, RequestFlags::default())
                .await
                .unwrap();
            let debugger = Debugger::new(Vec::new(), |_| ());
            let below = DeviceStorage::new(image.clone());
            let debug = Arc::new(DebugStorage::new(below, debugger, Limits::default()));
            let raw = Raw::open_as("blkdebug", debug, RawOptions::default()).unwrap();
            let filter = Filter::new(raw, image.clone());
            assert_eq!(filter.info().format, "blkdebug");
            for (at, len_bytes) in [(1, 65535), (65536, 65536), (131_072, 917_504)] {
                let shown = filter.block_status(at, (1 << 20) - at, 0).await.unwrap();
                assert_eq!(
                    (shown.len_bytes, shown.kind.is_present()),
                    (len_bytes, at == 65536)
                );
                let own = image.block_status(at, (1 << 20) - at, 0).await.unwrap();
                assert_eq!(shown, own);
            }
            let beyond = filter.block_status(1 << 20, 1, 0).await.unwrap_err();
            assert_eq!(beyond.kind(), ErrorKind::OutOfRange);
            filter.close().await.unwrap();
        });
    }
}

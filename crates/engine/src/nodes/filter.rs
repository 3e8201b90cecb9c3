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
    may_refuse_status: bool,
}

impl Filter {
    /// Shows `filtering`, which stands on `below` and moves no byte. It may fail requests for the block
    /// status (fault injection), so it is asked too.
    pub fn new(filtering: Arc<Raw>, below: Arc<dyn BlockDevice>) -> Arc<Self> {
        Arc::new(Filter {
            filtering,
            below,
            may_refuse_status: true,
        })
    }

    /// As [`Filter::new`], of a filter that fails no request for the block status. Only `below` is asked:
    /// where filters are stacked, two questions at each of them would double with every one.
    pub fn passing_status(filtering: Arc<Raw>, below: Arc<dyn BlockDevice>) -> Arc<Self> {
        Arc::new(Filter {
            filtering,
            below,
            may_refuse_status: false,
        })
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
        let below = self.below.clone();
        let rest_bytes = below.size_bytes().checked_sub(offset_bytes);
        let end_bytes = offset_bytes.checked_add(len_bytes);
        let shown_bytes = below.size_bytes().min(self.size_bytes());
        let is_inside = end_bytes.is_some_and(|end| offset_bytes < end && end <= shown_bytes);
        if is_inside && !self.may_refuse_status {
            return below.block_status(offset_bytes, len_bytes, max_depth);
        }
        let asked = self
            .filtering
            .block_status(offset_bytes, len_bytes, max_depth);
        Io::task(spawn(async move {
            let shown = asked.await?;
            match rest_bytes {
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

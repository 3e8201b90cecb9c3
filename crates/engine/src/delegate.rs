//! [`delegate!`](crate::delegate!): what a device around another one does not change.

/// Delegates methods of [`BlockDevice`](crate::BlockDevice) to the device in a field of
/// `self`. Which these are is said one by one: a method that is left out
/// keeps the trait's default, which for some is the safe answer.
///
/// ```
/// use std::sync::Arc;
/// use vellum::{BlockDevice, Buffer, Error, ErrorKind, Io, RequestFlags, ZeroRequest};
///
/// /// A device that nobody writes to.
/// #[derive(Debug)]
/// struct Sealed {
///     inner: Arc<dyn BlockDevice>,
/// }
///
/// fn refused<T>() -> Io<T> {
///     Io::ready(Err(Error::new(ErrorKind::ReadOnly, "write", "sealed")))
/// }
///
/// impl BlockDevice for Sealed {
///     vellum::delegate!(inner: info, size_bytes, read, flush, block_status, close);
///
///     fn write(&self, _: u64, _: Buffer, _: RequestFlags) -> Io<Buffer> {
///         refused()
///     }
///     fn write_zeroes(&self, _: u64, _: u64, _: ZeroRequest) -> Io<()> {
///         refused()
///     }
///     fn discard(&self, _: u64, _: u64) -> Io<()> {
///         refused()
///     }
///     fn truncate(&self, _: u64) -> Io<()> {
///         refused()
///     }
/// }
/// ```
#[macro_export]
macro_rules! delegate {
    (@each $place:tt $($method:ident)+) => {
        $($crate::delegate!(@ $method $place);)+
    };
    (@ info [$($place:tt)+]) => {
        fn info(&self) -> $crate::DeviceInfo {
            self.$($place)+.info()
        }
    };
    (@ size_bytes [$($place:tt)+]) => {
        fn size_bytes(&self) -> u64 {
            self.$($place)+.size_bytes()
        }
    };
    (@ read [$($place:tt)+]) => {
        fn read(&self, offset_bytes: u64, buffer: $crate::Buffer) -> $crate::Io<$crate::Buffer> {
            self.$($place)+.read(offset_bytes, buffer)
        }
    };
    (@ write [$($place:tt)+]) => {
        fn write(
            &self,
            offset_bytes: u64,
            buffer: $crate::Buffer,
            flags: $crate::RequestFlags,
        ) -> $crate::Io<$crate::Buffer> {
            self.$($place)+.write(offset_bytes, buffer, flags)
        }
    };
    (@ read_into [$($place:tt)+]) => {
        fn read_into(
            &self,
            offset_bytes: u64,
            into: &[$crate::SharedBuffer],
        ) -> Option<$crate::Io<()>> {
            self.$($place)+.read_into(offset_bytes, into)
        }
    };
    (@ write_from [$($place:tt)+]) => {
        fn write_from(
            &self,
            offset_bytes: u64,
            from: &[$crate::SharedBuffer],
            flags: $crate::RequestFlags,
        ) -> Option<$crate::Io<()>> {
            self.$($place)+.write_from(offset_bytes, from, flags)
        }
    };
    (@ write_zeroes [$($place:tt)+]) => {
        fn write_zeroes(
            &self,
            offset_bytes: u64,
            len_bytes: u64,
            request: $crate::ZeroRequest,
        ) -> $crate::Io<()> {
            self.$($place)+.write_zeroes(offset_bytes, len_bytes, request)
        }
    };
    (@ write_compressed [$($place:tt)+]) => {
        fn write_compressed(
            &self,
            offset_bytes: u64,
            buffer: $crate::Buffer,
            flags: $crate::RequestFlags,
        ) -> $crate::Io<$crate::Buffer> {
            self.$($place)+.write_compressed(offset_bytes, buffer, flags)
        }
    };
    (@ copy_up [$($place:tt)+]) => {
        fn copy_up(&self, offset_bytes: u64, len_bytes: u64) -> $crate::Io<()> {
            self.$($place)+.copy_up(offset_bytes, len_bytes)
        }
    };
    (@ discard [$($place:tt)+]) => {
        fn discard(&self, offset_bytes: u64, len_bytes: u64) -> $crate::Io<()> {
            self.$($place)+.discard(offset_bytes, len_bytes)
        }
    };
    (@ flush [$($place:tt)+]) => {
        fn flush(&self) -> $crate::Io<()> {
            self.$($place)+.flush()
        }
    };
    (@ block_status [$($place:tt)+]) => {
        fn block_status(
            &self,
            offset_bytes: u64,
            len_bytes: u64,
            max_depth: u32,
        ) -> $crate::Io<$crate::Extent> {
            self.$($place)+.block_status(offset_bytes, len_bytes, max_depth)
        }
    };
    (@ truncate [$($place:tt)+]) => {
        fn truncate(&self, size_bytes: u64) -> $crate::Io<()> {
            self.$($place)+.truncate(size_bytes)
        }
    };
    (@ resize [$($place:tt)+]) => {
        fn resize(
            &self,
            size_bytes: u64,
            preallocation: $crate::Preallocation,
        ) -> $crate::Io<()> {
            self.$($place)+.resize(size_bytes, preallocation)
        }
    };
    (@ clear [$($place:tt)+]) => {
        fn clear(&self) -> $crate::Io<()> {
            self.$($place)+.clear()
        }
    };
    (@ close [$($place:tt)+]) => {
        fn close(&self) -> $crate::Io<()> {
            self.$($place)+.close()
        }
    };
    (@ backing [$($place:tt)+]) => {
        fn backing(&self) -> Option<std::sync::Arc<dyn $crate::BlockDevice>> {
            self.$($place)+.backing()
        }
    };
    (@ storage [$($place:tt)+]) => {
        fn storage(&self) -> Option<std::sync::Arc<dyn $crate::Storage>> {
            self.$($place)+.storage()
        }
    };
    (@ format_device [$($place:tt)+]) => {
        fn format_device(&self) -> Option<&dyn ::std::any::Any> {
            self.$($place)+.format_device()
        }
    };
    (@ identity [$($place:tt)+]) => {
        fn identity(&self) -> Option<$crate::DiskIdentity> {
            self.$($place)+.identity()
        }
    };
    (@ allocated_bytes [$($place:tt)+]) => {
        fn allocated_bytes(&self) -> $crate::Result<Option<u64>> {
            self.$($place)+.allocated_bytes()
        }
    };
    ($($field:tt).+: $($method:ident),+ $(,)?) => {
        $crate::delegate!(@each [$($field).+] $($method)+);
    };
}

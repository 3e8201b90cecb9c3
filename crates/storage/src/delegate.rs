//! [`delegate!`](crate::delegate!): what a storage around another one does not change.

/// Delegates methods of [`Storage`](crate::Storage) to the storage in a field of `self`:
/// `delegate!(inner: name, len_bytes, flush);`. A method that is left out keeps the trait's
/// default, if it has one.
///
/// `delegate!(self.change: write, discard);` has each request go through a method of `self`
/// first, which gets what to ask of the inner storage:
/// `fn change<T>(&self, start: impl FnOnce(&dyn Storage) -> Io<T>) -> Io<T>`.
#[macro_export]
macro_rules! delegate {
    (@each $inner:tt $($method:ident)+) => {
        $($crate::delegate!(@ $method $inner);)+
    };
    (@call $self:ident [self.$wrapper:ident] $method:ident($($argument:ident),*)) => {
        $self.$wrapper(|inner| inner.$method($($argument),*))
    };
    (@call $self:ident [$($field:tt)+] $method:ident($($argument:ident),*)) => {
        $self.$($field)+.$method($($argument),*)
    };
    (@ capabilities $inner:tt) => {
        fn capabilities(&self) -> $crate::Capabilities {
            $crate::delegate!(@call self $inner capabilities())
        }
    };
    (@ name $inner:tt) => {
        fn name(&self) -> &str {
            $crate::delegate!(@call self $inner name())
        }
    };
    (@ version $inner:tt) => {
        fn version(&self) -> $crate::SourceVersion {
            $crate::delegate!(@call self $inner version())
        }
    };
    (@ len_bytes $inner:tt) => {
        fn len_bytes(&self) -> ::vellum_io::Result<u64> {
            $crate::delegate!(@call self $inner len_bytes())
        }
    };
    (@ read $inner:tt) => {
        fn read(
            &self,
            offset_bytes: u64,
            buffers: ::vellum_io::Buffers,
        ) -> ::vellum_io::Io<::vellum_io::Buffers> {
            $crate::delegate!(@call self $inner read(offset_bytes, buffers))
        }
    };
    (@ write $inner:tt) => {
        fn write(
            &self,
            offset_bytes: u64,
            buffers: ::vellum_io::Buffers,
            flags: $crate::WriteFlags,
        ) -> ::vellum_io::Io<::vellum_io::Buffers> {
            $crate::delegate!(@call self $inner write(offset_bytes, buffers, flags))
        }
    };
    (@ read_into $inner:tt) => {
        fn read_into(
            &self,
            offset_bytes: u64,
            into: &[::vellum_io::shared_memory::SharedBuffer],
        ) -> Option<::vellum_io::Io<()>> {
            $crate::delegate!(@call self $inner read_into(offset_bytes, into))
        }
    };
    (@ write_from $inner:tt) => {
        fn write_from(
            &self,
            offset_bytes: u64,
            from: &[::vellum_io::shared_memory::SharedBuffer],
            flags: $crate::WriteFlags,
        ) -> Option<::vellum_io::Io<()>> {
            $crate::delegate!(@call self $inner write_from(offset_bytes, from, flags))
        }
    };
    (@ write_zeroes $inner:tt) => {
        fn write_zeroes(
            &self,
            offset_bytes: u64,
            len_bytes: u64,
            flags: $crate::ZeroFlags,
        ) -> ::vellum_io::Io<()> {
            $crate::delegate!(@call self $inner write_zeroes(offset_bytes, len_bytes, flags))
        }
    };
    (@ discard $inner:tt) => {
        fn discard(&self, offset_bytes: u64, len_bytes: u64) -> ::vellum_io::Io<()> {
            $crate::delegate!(@call self $inner discard(offset_bytes, len_bytes))
        }
    };
    (@ allocate $inner:tt) => {
        fn allocate(&self, offset_bytes: u64, len_bytes: u64) -> ::vellum_io::Io<()> {
            $crate::delegate!(@call self $inner allocate(offset_bytes, len_bytes))
        }
    };
    (@ flush $inner:tt) => {
        fn flush(&self) -> ::vellum_io::Io<()> {
            $crate::delegate!(@call self $inner flush())
        }
    };
    (@ truncate $inner:tt) => {
        fn truncate(&self, len_bytes: u64) -> ::vellum_io::Io<()> {
            $crate::delegate!(@call self $inner truncate(len_bytes))
        }
    };
    (@ block_status $inner:tt) => {
        fn block_status(
            &self,
            offset_bytes: u64,
            len_bytes: u64,
        ) -> ::vellum_io::Io<$crate::StorageExtent> {
            $crate::delegate!(@call self $inner block_status(offset_bytes, len_bytes))
        }
    };
    (@ allocated_bytes $inner:tt) => {
        fn allocated_bytes(&self) -> ::vellum_io::Result<Option<u64>> {
            $crate::delegate!(@call self $inner allocated_bytes())
        }
    };
    (@ free_bytes $inner:tt) => {
        fn free_bytes(&self) -> ::vellum_io::Io<Option<u64>> {
            $crate::delegate!(@call self $inner free_bytes())
        }
    };
    (@ modified_at $inner:tt) => {
        fn modified_at(&self) -> ::vellum_io::Result<Option<u64>> {
            $crate::delegate!(@call self $inner modified_at())
        }
    };
    (@ copy_range $inner:tt) => {
        fn copy_range(
            &self,
            source: &dyn $crate::Storage,
            from_bytes: u64,
            to_bytes: u64,
            len_bytes: u64,
        ) -> ::vellum_io::Io<()> {
            $crate::delegate!(@call self $inner copy_range(source, from_bytes, to_bytes, len_bytes))
        }
    };
    (@ may_clone_from $inner:tt) => {
        fn may_clone_from(&self, source: &dyn $crate::Storage) -> bool {
            $crate::delegate!(@call self $inner may_clone_from(source))
        }
    };
    (@ clone_range $inner:tt) => {
        fn clone_range(
            &self,
            source: &dyn $crate::Storage,
            from_bytes: u64,
            to_bytes: u64,
            len_bytes: u64,
        ) -> ::vellum_io::Io<()> {
            $crate::delegate!(@call self $inner clone_range(source, from_bytes, to_bytes, len_bytes))
        }
    };
    (@ disk $inner:tt) => {
        fn disk(&self) -> Option<$crate::DiskIdentity> {
            $crate::delegate!(@call self $inner disk())
        }
    };
    (@ close $inner:tt) => {
        fn close(&self) -> ::vellum_io::Io<()> {
            $crate::delegate!(@call self $inner close())
        }
    };
    (@ event_listener $inner:tt) => {
        fn event_listener(&self) -> Option<::std::sync::Arc<dyn $crate::event::EventListener>> {
            $crate::delegate!(@call self $inner event_listener())
        }
    };
    (@ transparent_storage $inner:tt) => {
        fn transparent_storage(&self) -> Option<&dyn ::std::any::Any> {
            $crate::delegate!(@call self $inner transparent_storage())
        }
    };
    (self.$wrapper:ident: $($method:ident),+ $(,)?) => {
        $crate::delegate!(@each [self.$wrapper] $($method)+);
    };
    ($($field:tt).+: $($method:ident),+ $(,)?) => {
        $crate::delegate!(@each [$($field).+] $($method)+);
    };
}

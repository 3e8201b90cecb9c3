//! [`pass_on!`](crate::pass_on): what a storage around another one does not change.

/// Passes methods of [`Storage`](crate::Storage) on to the storage in a field of `self`,
/// as they are: `pass_on!(inner: name, len_bytes, flush);`. A method that is left out keeps
/// the trait's default, if it has one.
#[macro_export]
macro_rules! pass_on {
    (@each $place:tt $($method:ident)+) => {
        $($crate::pass_on!(@ $method $place);)+
    };
    (@ capabilities [$($place:tt)+]) => {
        fn capabilities(&self) -> $crate::Capabilities {
            self.$($place)+.capabilities()
        }
    };
    (@ name [$($place:tt)+]) => {
        fn name(&self) -> &str {
            self.$($place)+.name()
        }
    };
    (@ len_bytes [$($place:tt)+]) => {
        fn len_bytes(&self) -> ::vellum_io::Result<u64> {
            self.$($place)+.len_bytes()
        }
    };
    (@ read [$($place:tt)+]) => {
        fn read(&self, offset_bytes: u64, buffers: ::vellum_io::Buffers) -> ::vellum_io::Io<::vellum_io::Buffers> {
            self.$($place)+.read(offset_bytes, buffers)
        }
    };
    (@ write [$($place:tt)+]) => {
        fn write(
            &self,
            offset_bytes: u64,
            buffers: ::vellum_io::Buffers,
            flags: $crate::WriteFlags,
        ) -> ::vellum_io::Io<::vellum_io::Buffers> {
            self.$($place)+.write(offset_bytes, buffers, flags)
        }
    };
    (@ write_zeroes [$($place:tt)+]) => {
        fn write_zeroes(
            &self,
            offset_bytes: u64,
            len_bytes: u64,
            flags: $crate::ZeroFlags,
        ) -> ::vellum_io::Io<()> {
            self.$($place)+.write_zeroes(offset_bytes, len_bytes, flags)
        }
    };
    (@ discard [$($place:tt)+]) => {
        fn discard(&self, offset_bytes: u64, len_bytes: u64) -> ::vellum_io::Io<()> {
            self.$($place)+.discard(offset_bytes, len_bytes)
        }
    };
    (@ allocate [$($place:tt)+]) => {
        fn allocate(&self, offset_bytes: u64, len_bytes: u64) -> ::vellum_io::Io<()> {
            self.$($place)+.allocate(offset_bytes, len_bytes)
        }
    };
    (@ flush [$($place:tt)+]) => {
        fn flush(&self) -> ::vellum_io::Io<()> {
            self.$($place)+.flush()
        }
    };
    (@ truncate [$($place:tt)+]) => {
        fn truncate(&self, len_bytes: u64) -> ::vellum_io::Io<()> {
            self.$($place)+.truncate(len_bytes)
        }
    };
    (@ block_status [$($place:tt)+]) => {
        fn block_status(
            &self,
            offset_bytes: u64,
            len_bytes: u64,
        ) -> ::vellum_io::Io<$crate::StorageExtent> {
            self.$($place)+.block_status(offset_bytes, len_bytes)
        }
    };
    (@ allocated_bytes [$($place:tt)+]) => {
        fn allocated_bytes(&self) -> ::vellum_io::Result<Option<u64>> {
            self.$($place)+.allocated_bytes()
        }
    };
    (@ may_clone_from [$($place:tt)+]) => {
        fn may_clone_from(&self, source: &dyn $crate::Storage) -> bool {
            self.$($place)+.may_clone_from(source)
        }
    };
    (@ close [$($place:tt)+]) => {
        fn close(&self) -> ::vellum_io::Io<()> {
            self.$($place)+.close()
        }
    };
    (@ debugger [$($place:tt)+]) => {
        fn debugger(&self) -> Option<std::sync::Arc<$crate::nodes::debug::Debugger>> {
            self.$($place)+.debugger()
        }
    };
    (@ as_file [$($place:tt)+]) => {
        fn as_file(&self) -> Option<&$crate::FileStorage> {
            self.$($place)+.as_file()
        }
    };
    ($($field:tt).+: $($method:ident),+ $(,)?) => {
        $crate::pass_on!(@each [$($field).+] $($method)+);
    };
}

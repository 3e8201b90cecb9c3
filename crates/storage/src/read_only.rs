//! [`read_only!`](crate::read_only!): what storages that cannot be written say to whoever wants to.

/// The methods of [`Storage`](crate::Storage) that change something, and what goes with them, for a
/// storage that is only read. It has a method that says why:
/// `fn refuse<T>(&self, operation: &'static str) -> Io<T>`.
#[macro_export]
macro_rules! read_only {
    () => {
        fn capabilities(&self) -> $crate::Capabilities {
            $crate::Capabilities {
                read_only: true,
                ..$crate::Capabilities::default()
            }
        }

        fn write(
            &self,
            _offset_bytes: u64,
            _buffers: ::vellum_io::Buffers,
            _flags: $crate::WriteFlags,
        ) -> ::vellum_io::Io<::vellum_io::Buffers> {
            self.refuse("write")
        }

        fn write_zeroes(
            &self,
            _offset_bytes: u64,
            _len_bytes: u64,
            _flags: $crate::ZeroFlags,
        ) -> ::vellum_io::Io<()> {
            self.refuse("write zeroes")
        }

        fn discard(&self, _offset_bytes: u64, _len_bytes: u64) -> ::vellum_io::Io<()> {
            self.refuse("discard")
        }

        fn flush(&self) -> ::vellum_io::Io<()> {
            ::vellum_io::Io::ready(Ok(()))
        }

        fn truncate(&self, _len_bytes: u64) -> ::vellum_io::Io<()> {
            self.refuse("truncate")
        }
    };
}

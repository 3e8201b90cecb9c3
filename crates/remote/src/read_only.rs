//! What all storages of this crate say to whoever wants to change them.

/// The methods of [`vellum_storage::Storage`] that change something, and what goes with them, for a
/// storage with a method `refuse`, which says why it may only be read.
macro_rules! read_only {
    () => {
        fn capabilities(&self) -> ::vellum_storage::Capabilities {
            ::vellum_storage::Capabilities {
                read_only: true,
                ..::vellum_storage::Capabilities::default()
            }
        }

        fn write(
            &self,
            _offset_bytes: u64,
            _buffers: ::vellum_io::Buffers,
            _flags: ::vellum_storage::WriteFlags,
        ) -> ::vellum_io::Io<::vellum_io::Buffers> {
            self.refuse("write")
        }

        fn write_zeroes(
            &self,
            _offset_bytes: u64,
            _len_bytes: u64,
            _flags: ::vellum_storage::ZeroFlags,
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
pub(crate) use read_only;

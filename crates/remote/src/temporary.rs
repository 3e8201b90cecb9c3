//! Temporary files whose bytes are used as those of the source, or of the target.

use std::fs::File;
use std::sync::Arc;

use crate::blocking;
use vellum_io::error::io_text;
use vellum_io::{Error, ErrorKind, Result};

/// Makes a temporary file durable before its bytes are trusted: a disk that takes bytes and loses them (a thin volume
/// that is full, say) reports that at a sync alone, and reads give zeroes or older bytes. `name`: what the file
/// is of.
pub(crate) async fn make_durable(file: &Arc<File>, name: &str) -> Result<()> {
    let file = file.clone();
    let synced = blocking::run_io(move || file.sync_all()).await;
    synced.map_err(|error| {
        let message = format!(
            "the temporary file in {} may have lost bytes: {}; set TMPDIR to a folder on a disk that is sound and has \
             room",
            std::env::temp_dir().display(),
            io_text(&error)
        );
        Error::new(ErrorKind::Io, "sync a temporary file", message).target(name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::Runtime;

    #[test]
    fn a_file_that_cannot_be_synced_is_not_trusted() {
        let runtime = Runtime::shared().unwrap();
        // Devices of characters know no sync.
        for (path, is_durable) in [("/dev/zero", false), ("/proc/self/exe", true)] {
            let file = Arc::new(File::open(path).unwrap());
            let synced = vellum_io::lane::block_on(
                runtime.run(async move { make_durable(&file, "s3://b/k").await }),
            );
            assert_eq!(synced.is_ok(), is_durable, "{path}: {synced:?}");
            if let Err(error) = synced {
                assert!(error.to_string().contains("TMPDIR"), "{error}");
            }
        }
    }
}

//! Files that hold secrets: what they hold is wiped from memory with what is read here.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use zeroize::Zeroizing;

/// The first piece, where a file does not say how long it is.
const FIRST_BYTES: usize = 4096;

/// What is longer is no secret: a device that never ends, say.
const MAX_BYTES: usize = 16 << 20;

/// Reads a whole file. Nothing of it stays in memory once the result is dropped: `Vec`s
/// that grow would leave copies behind.
///
/// # Errors
/// Of opening or reading it, and for one of more than 16 MiB.
pub fn read_file(path: &Path) -> io::Result<Zeroizing<Vec<u8>>> {
    let mut file = File::open(path)?;
    let said = usize::try_from(file.metadata()?.len()).unwrap_or(0);
    // One more, so that the end shows without growing.
    let mut bytes = Zeroizing::new(vec![0; said.clamp(FIRST_BYTES, 1 << 20) + 1]);
    let mut filled = 0;
    loop {
        if filled > MAX_BYTES {
            return Err(io::Error::other("it is too long to hold a secret"));
        }
        if filled == bytes.len() {
            let mut longer = Zeroizing::new(vec![0; 2 * filled]);
            longer[..filled].copy_from_slice(&bytes);
            bytes = longer;
        }
        match file.read(&mut bytes[filled..]) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    bytes.truncate(filled);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_read_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        for len in [0, 1, FIRST_BYTES, FIRST_BYTES + 1, 5 << 20] {
            let bytes: Vec<u8> = (0..len).map(|at| at as u8).collect();
            std::fs::write(&path, &bytes).unwrap();
            assert!(*read_file(&path).unwrap() == bytes, "{len}");
        }
        assert!(read_file(&folder.path().join("nothing")).is_err());
        assert!(read_file(folder.path()).is_err());
        assert!(read_file(Path::new("/dev/zero")).is_err());
    }
}

//! A page of HTML in one file, written to a path that was looked at before.

use std::io::{self, Read};
use std::path::Path;

use vellum_io::error::io_text;

/// How an HTML page begins.
const BEGINNING: &str = "<!DOCTYPE html>";

pub(crate) fn cannot(verb: &str, path: &Path, error: &io::Error) -> String {
    format!("Cannot {verb} '{}': {}", path.display(), io_text(error))
}

/// Refuses to overwrite anything but an HTML page or an empty file.
pub fn check_target(path: &Path) -> Result<(), String> {
    let shown = path.display();
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    if !parent.is_dir() {
        return Err(format!("No folder '{}' for the page", parent.display()));
    }
    let mut start = Vec::new();
    match std::fs::File::open(path) {
        Ok(_) if !path.is_file() => return Err(format!("'{shown}' is not a file")),
        Ok(file) => {
            let limit = BEGINNING.len() as u64;
            if let Err(error) = file.take(limit).read_to_end(&mut start) {
                return Err(cannot("read", path, &error));
            }
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(cannot("open", path, &error)),
    }
    match start.is_empty() || start.eq_ignore_ascii_case(BEGINNING.as_bytes()) {
        true => Ok(()),
        false => Err(format!(
            "'{shown}' exists and is no HTML page; it is left alone"
        )),
    }
}

/// Writes a page.
pub fn write(path: &Path, page: &str) -> Result<(), String> {
    std::fs::write(path, page).map_err(|error| cannot("write", path, &error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_replaces_only_pages() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        assert!(check_target(&path).is_ok(), "nothing there");
        for (content, fine) in [
            ("", true),
            ("<!doctype HTML><p>", true),
            ("QFI\u{fb}", false),
        ] {
            std::fs::write(&path, content).unwrap();
            assert_eq!(check_target(&path).is_ok(), fine, "{content}");
        }
        assert!(check_target(folder.path()).is_err(), "a folder");
        assert!(check_target(&folder.path().join("no/x")).is_err());
    }
}

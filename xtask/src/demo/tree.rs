//! The input of the demo: files of /usr that can be read, up to a limit of bytes.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::process;

/// Copying ends here, so that the file system has room and the demo stays short.
pub const LIMIT_BYTES: u64 = 1280 << 20;
/// The guest compares the sums of about so many files.
const SUMS_WANTED: usize = 300;
/// Larger files are left out of the sums: the guest is emulated, and slow.
const SUM_FILE_MAX_BYTES: u64 = 256 << 10;

/// A copied tree of files.
pub struct Tree {
    /// Regular files, as paths below the tree's root.
    pub files: Vec<PathBuf>,
    /// Their bytes together.
    pub bytes: u64,
    /// Lines of md5sum for some of the files.
    pub sums: String,
}

impl Tree {
    /// Copies files below `from` into a new folder. Files that cannot be read,
    /// and what is neither file, folder nor link, are left out.
    pub fn copy(from: &Path, to: &Path, on_bytes: &dyn Fn(u64)) -> Result<Self> {
        let mut tree = Self {
            files: Vec::new(),
            bytes: 0,
            sums: String::new(),
        };
        std::fs::create_dir(to)?;
        tree.copy_folder(from, to, Path::new(""), on_bytes)?;
        ensure!(
            !tree.files.is_empty(),
            "no file under {} can be read",
            from.display()
        );
        tree.sums = tree.some_sums(to)?;
        Ok(tree)
    }

    fn copy_folder(
        &mut self,
        from: &Path,
        to: &Path,
        below: &Path,
        on_bytes: &dyn Fn(u64),
    ) -> Result<()> {
        let Ok(entries) = std::fs::read_dir(from.join(below)) else {
            return Ok(()); // Not ours to read.
        };
        let mut names: Vec<_> = entries.flatten().map(|entry| entry.file_name()).collect();
        names.sort();
        for name in names {
            if self.bytes >= LIMIT_BYTES {
                break;
            }
            self.copy_entry(from, to, &below.join(name), on_bytes)?;
        }
        Ok(())
    }

    fn copy_entry(
        &mut self,
        from: &Path,
        to: &Path,
        below: &Path,
        on_bytes: &dyn Fn(u64),
    ) -> Result<()> {
        let (source, target) = (from.join(below), to.join(below));
        let Ok(found) = source.symlink_metadata() else {
            return Ok(());
        };
        let failed = || format!("cannot write {}", target.display());
        if found.is_symlink() {
            let link = std::fs::read_link(&source)?;
            std::os::unix::fs::symlink(link, &target).with_context(failed)?;
        } else if found.is_dir() {
            std::fs::create_dir(&target).with_context(failed)?;
            self.copy_folder(from, to, below, on_bytes)?;
        } else if found.is_file()
            && self.bytes + found.len() <= LIMIT_BYTES
            && std::fs::File::open(&source).is_ok()
        {
            std::fs::copy(&source, &target).with_context(failed)?;
            on_bytes(found.len());
            self.bytes += found.len();
            self.files.push(below.to_owned());
        }
        Ok(())
    }

    /// md5sum's lines for small files from all over the tree.
    fn some_sums(&self, root: &Path) -> Result<String> {
        let small: Vec<&PathBuf> = self
            .files
            .iter()
            .filter(|file| has_plain_name(file.as_os_str()))
            .filter(|file| {
                let len = root.join(file).metadata().map_or(0, |found| found.len());
                (1..=SUM_FILE_MAX_BYTES).contains(&len)
            })
            .collect();
        let step = small.len().div_ceil(SUMS_WANTED).max(1);
        process::output(
            Command::new("md5sum")
                .current_dir(root)
                .args(small.iter().step_by(step)),
        )
    }
}

/// Names with other characters are quoted by md5sum, in a way that busybox does not read.
fn has_plain_name(path: &OsStr) -> bool {
    path.to_str().is_some_and(|text| {
        text.chars()
            .all(|c| c.is_ascii_alphanumeric() || "/._+-@:".contains(c))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_entries_are_left_out_and_the_rest_is_copied() -> Result<()> {
        let folder = tempfile::tempdir()?;
        let (from, to) = (folder.path().join("from"), folder.path().join("to"));
        std::fs::create_dir_all(from.join("deep/er"))?;
        std::fs::write(from.join("deep/er/file"), b"12345")?;
        std::fs::write(from.join("odd name"), b"1")?;
        std::os::unix::fs::symlink("nowhere", from.join("link"))?;
        let _socket = std::os::unix::net::UnixListener::bind(from.join("socket"))?;

        let tree = Tree::copy(&from, &to, &|_| {})?;
        assert_eq!(tree.bytes, 6);
        assert_eq!(tree.files.len(), 2);
        assert!(to.join("link").is_symlink());
        assert!(!to.join("socket").exists());
        assert_eq!(
            tree.sums,
            "827ccb0eea8a706c4c34a16891f84e7b  deep/er/file\n"
        );
        Ok(())
    }
}

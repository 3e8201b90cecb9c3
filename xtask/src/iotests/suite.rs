//! QEMU's suite of tests: found in the cache, or fetched from Debian's source package.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::checksum::sha256;
use crate::{apt_mirror, process};

/// The version whose expected outputs our programs are measured by.
const VERSION: &str = "10.0.2";
/// The archive of that version, as Debian has repacked it.
const ARCHIVE_SHA256: &str = "0901da33844a331bf8b3602b9c1fbd178e60b737c8e3ade678255bd090c9b9f1";
/// The source package needs entries that few machines have, so apt gets its own list.
fn sources(mirror: &str) -> String {
    format!(
        "Types: deb-src\nURIs: {mirror}\nSuites: bookworm-backports trixie trixie-backports\n\
         Components: main\nSigned-By: /usr/share/keyrings/debian-archive-keyring.gpg\n"
    )
}

/// The parts of the source that the tests use.
const PARTS: &[&str] = &["*/tests/qemu-iotests", "*/python", "*/VERSION"];

/// An unpacked suite.
#[derive(Debug)]
pub struct Suite {
    /// The folder with `check` and the tests.
    pub folder: PathBuf,
}

impl Suite {
    /// The suite in `source` (an unpacked QEMU source), in the cache, or fetched into that.
    pub fn find_or_fetch(source: Option<&Path>) -> Result<Self> {
        if let Some(root) = source {
            let found = Self::at(&std::path::absolute(root)?);
            return found.with_context(|| format!("no suite in {}", root.display()));
        }
        let root = cache_folder()?.join(format!("qemu-{VERSION}"));
        if let Some(suite) = Self::at(&root) {
            return Ok(suite);
        }
        println!("iotests: fetching the source package of QEMU {VERSION}");
        fetch(&root)?;
        Self::at(&root).context("the source package holds no iotests")
    }

    fn at(root: &Path) -> Option<Self> {
        let folder = root.join("tests/qemu-iotests");
        let whole = folder.join("check").is_file() && root.join("python/qemu").is_dir();
        whole.then_some(Self { folder })
    }

    /// Where the program of a test lies, from the suite's folder.
    pub fn path_of(&self, test: &str) -> Result<PathBuf> {
        let numbered = test.len() == 3 && test.bytes().all(|byte| byte.is_ascii_digit());
        let path = match numbered {
            true => PathBuf::from(test),
            false => Path::new("tests").join(test),
        };
        ensure!(
            self.folder.join(&path).is_file(),
            "the suite has no test {test}"
        );
        Ok(path)
    }
}

fn cache_folder() -> Result<PathBuf> {
    let base = match std::env::var_os("XDG_CACHE_HOME") {
        Some(folder) if !folder.is_empty() => PathBuf::from(folder),
        _ => PathBuf::from(std::env::var_os("HOME").context("neither XDG_CACHE_HOME nor HOME")?)
            .join(".cache"),
    };
    Ok(base.join("vellum/iotests"))
}

fn fetch(root: &Path) -> Result<()> {
    let parent = root.parent().context("the cache folder has a parent")?;
    std::fs::create_dir_all(parent)?;
    let folder = tempfile::tempdir_in(parent)?;
    let apt = PrivateApt::new(folder.path())?;
    let archive = apt.download()?;
    let unpacked = folder.path().join("unpacked");
    std::fs::create_dir(&unpacked)?;
    process::run(
        Command::new("tar")
            .arg("-xf")
            .arg(&archive)
            .arg("-C")
            .arg(&unpacked)
            .args(["--strip-components=1", "--wildcards"])
            .arg("--no-wildcards-match-slash")
            .args(PARTS),
    )?;
    if root.exists() {
        std::fs::remove_dir_all(root)?;
    }
    std::fs::rename(&unpacked, root).with_context(|| format!("cannot make {}", root.display()))
}

/// apt-get with lists of its own: it needs neither root nor the machine's entries.
struct PrivateApt {
    folder: PathBuf,
    options: Vec<String>,
}

impl PrivateApt {
    fn new(folder: &Path) -> Result<Self> {
        let (list, lists, cache) = (
            folder.join("vellum.sources"),
            folder.join("lists"),
            folder.join("cache"),
        );
        std::fs::write(&list, sources(&apt_mirror::find()?))?;
        std::fs::create_dir_all(lists.join("partial"))?;
        std::fs::create_dir_all(cache.join("archives/partial"))?;
        let settings = [
            format!("Dir::Etc::SourceList={}", list.display()),
            "Dir::Etc::SourceParts=/dev/null".to_owned(),
            format!("Dir::State::Lists={}", lists.display()),
            format!("Dir::Cache={}", cache.display()),
            "APT::Sandbox::User=root".to_owned(),
        ];
        let options = settings.into_iter().flat_map(|s| ["-o".to_owned(), s]);
        Ok(Self {
            folder: folder.to_owned(),
            options: options.collect(),
        })
    }

    fn command(&self, name: &str) -> Result<Command> {
        let mut command = process::program(name)?;
        command.args(&self.options).current_dir(&self.folder);
        Ok(command)
    }

    /// The source without Debian's changes.
    fn download(&self) -> Result<PathBuf> {
        process::output(self.command("apt-get")?.arg("update"))?;
        let records = process::output(self.command("apt-cache")?.args(["showsrc", "qemu"]))?;
        let versions = versions(&records);
        let Some(version) = versions.iter().find(|v| upstream(v) == VERSION) else {
            bail!(
                "Debian has QEMU {}, not {VERSION}: unpack that source and give --source FOLDER",
                versions.join(", ")
            );
        };
        let what = format!("qemu={version}");
        let fetched =
            process::output(
                self.command("apt-get")?
                    .args(["source", "--download-only", &what]),
            );
        // A mirror may have lost Debian's own small files, of which nothing is needed.
        match self.archive()? {
            Some(archive) if sha256(&archive)? == ARCHIVE_SHA256 => Ok(archive),
            Some(archive) => bail!(
                "{} is not the archive that the list of tests was made for",
                archive.display()
            ),
            None => {
                fetched?;
                bail!("the source package has no original archive")
            }
        }
    }

    fn archive(&self) -> Result<Option<PathBuf>> {
        let files = std::fs::read_dir(&self.folder)?.flatten();
        Ok(files.map(|entry| entry.path()).find(|path| {
            let name = path.to_string_lossy();
            name.contains(".orig.tar.") && !name.ends_with(".asc")
        }))
    }
}

fn versions(records: &str) -> Vec<String> {
    let lines = records.lines();
    lines
        .filter_map(|line| line.strip_prefix("Version: "))
        .map(|version| version.trim().to_owned())
        .collect()
}

/// `1:10.0.2+ds-2~bpo12+1` without Debian's parts.
fn upstream(version: &str) -> &str {
    let version = version.split_once(':').map_or(version, |(_, rest)| rest);
    version.split(['+', '-', '~']).next().unwrap_or(version)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_upstream_version_is_found_in_a_record() {
        let records = "Package: qemu\nVersion: 1:10.0.2+ds-2~bpo12+1\n\nVersion: 1:7.2+dfsg-7\n";
        let versions = versions(records);
        assert_eq!(versions, ["1:10.0.2+ds-2~bpo12+1", "1:7.2+dfsg-7"]);
        assert_eq!(upstream(&versions[0]), "10.0.2");
        assert_eq!(upstream(&versions[1]), "7.2");
    }
}

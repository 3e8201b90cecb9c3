//! Picks the kernel modules that the guest needs, in the order to load them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::archive::Archive;
use crate::process;

/// What the guest needs; `crc32c_generic` is ext4's checksum, which no dependency names.
const WANTED: &[&str] = &["virtio_pci", "virtio_blk", "crc32c_generic", "ext4"];
const DEPENDS_KEY: &[u8] = b"\0depends=";

/// Adds the modules of an unpacked kernel package, and `modules/order` to load them by.
pub fn add(unpacked: &Path, archive: &mut Archive) -> Result<()> {
    let available = Available::find(unpacked)?;
    let mut loaded = Loaded::default();
    for name in WANTED {
        loaded.add(name, &available, archive)?;
    }
    archive.file("modules/order", 0o644, loaded.order.as_bytes());
    Ok(())
}

/// The modules of a kernel package: files by name, and what is built in.
struct Available {
    files: BTreeMap<String, PathBuf>,
    built_in: BTreeSet<String>,
}

impl Available {
    fn find(unpacked: &Path) -> Result<Self> {
        let mut found = Self {
            files: BTreeMap::new(),
            built_in: BTreeSet::new(),
        };
        found.walk(unpacked)?;
        Ok(found)
    }

    fn walk(&mut self, folder: &Path) -> Result<()> {
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() && !path.is_symlink() {
                self.walk(&path)?;
            } else if path.ends_with("modules.builtin") {
                let list = std::fs::read_to_string(&path)?;
                self.built_in.extend(list.lines().filter_map(module_name));
            } else if let Some(name) = module_name(&path.to_string_lossy()) {
                self.files.insert(name, path);
            }
        }
        Ok(())
    }
}

/// The name by which modules are asked for; `None` for other files.
fn module_name(path: &str) -> Option<String> {
    let file = path.rsplit('/').next()?;
    let stem = file.strip_suffix(".ko").or(file.strip_suffix(".ko.xz"))?;
    Some(stem.replace('-', "_"))
}

#[derive(Default)]
struct Loaded {
    names: BTreeSet<String>,
    order: String,
}

impl Loaded {
    /// Adds a module after the modules that it needs.
    fn add(&mut self, name: &str, available: &Available, archive: &mut Archive) -> Result<()> {
        if available.built_in.contains(name) || !self.names.insert(name.to_owned()) {
            return Ok(());
        }
        let path = available
            .files
            .get(name)
            .with_context(|| format!("the kernel package has no module {name}"))?;
        let content = read_module(path)?;
        for needed in dependencies(&content) {
            self.add(&needed, available, archive)?;
        }
        archive.file(&format!("modules/{name}.ko"), 0o644, &content);
        self.order.push_str(&format!("{name}.ko\n"));
        Ok(())
    }
}

fn read_module(path: &Path) -> Result<Vec<u8>> {
    if path.extension().is_none_or(|extension| extension != "xz") {
        return Ok(std::fs::read(path)?);
    }
    let output = process::capture(process::program("xz")?.arg("-dc").arg(path))?;
    anyhow::ensure!(output.status.success(), "cannot unpack {}", path.display());
    Ok(output.stdout)
}

/// The names in the `depends=` line of a module's description.
fn dependencies(module: &[u8]) -> Vec<String> {
    let Some(start) = module
        .windows(DEPENDS_KEY.len())
        .position(|window| window == DEPENDS_KEY)
    else {
        return Vec::new();
    };
    let value = &module[start + DEPENDS_KEY.len()..];
    let end = value.iter().position(|&byte| byte == 0);
    let text = String::from_utf8_lossy(&value[..end.unwrap_or(value.len())]);
    text.split(',')
        .filter(|name| !name.is_empty())
        .map(|name| name.replace('-', "_"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_stand_in_the_module_itself() {
        let module = b"ELF\0license=GPL\0depends=jbd2,crc16,mb-cache\0name=ext4\0";
        assert_eq!(dependencies(module), ["jbd2", "crc16", "mb_cache"]);
        assert!(dependencies(b"ELF\0depends=\0name=crc16\0").is_empty());
        assert!(dependencies(b"").is_empty());
    }

    #[test]
    fn module_names_are_file_names_with_underscores() {
        assert_eq!(
            module_name("kernel/crypto/crc32c-generic.ko.xz").as_deref(),
            Some("crc32c_generic")
        );
        assert_eq!(module_name("modules.order"), None);
    }
}

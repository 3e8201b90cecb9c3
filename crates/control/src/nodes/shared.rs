//! Backing files that several images stand on: opened once, with one set of caches and one
//! descriptor.
//!
//! Invariants:
//! - Only what is open for reading is shared, by those who ask for the same: the same file (by
//!   device and inode, not by name alone), options and flags.
//! - Nothing shared has a name, so nobody can exchange it, write it or remove it: nodes that can be
//!   changed while they are used ([`super::Nodes::live`]) share nothing.
//! - An image does not close what it stands on; it goes with the last image.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use vellum::BlockDevice;

use crate::filename;
use crate::flags::OpenFlags;
use crate::graph::OpenContext;
use crate::options::Options;

/// What must be the same for a backing file to be shared.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct BaseKey {
    device: u64,
    inode: u64,
    options: String,
    flags: String,
}

/// Options that say no more than which file it is, and of which format.
const PLAIN: [&str; 3] = ["driver", "file.driver", "file.filename"];

impl BaseKey {
    /// The key of a backing file that is described so; `None` if it is not to be shared.
    pub(crate) fn of(options: &Options, flags: &OpenFlags) -> Option<BaseKey> {
        let is_plain = options.keys().all(|key| PLAIN.contains(&key));
        if flags.writable || !is_plain {
            return None;
        }
        let name = options.get_text("file.filename")?;
        let file = std::fs::metadata(filename::local_path(name).ok()?).ok()?;
        file.is_file().then(|| BaseKey {
            device: file.dev(),
            inode: file.ino(),
            options: options.to_json().to_string(),
            flags: format!("{flags:?}"),
        })
    }
}

/// The backing files that images of a process stand on, by what they were opened as.
#[derive(Debug, Default)]
pub(super) struct SharedBases(Mutex<BTreeMap<BaseKey, Weak<dyn BlockDevice>>>);

impl super::Nodes {
    /// No nodes; those that will be cannot be changed while they are used, and share the backing
    /// files that nobody has named.
    pub fn sharing() -> Self {
        super::Nodes {
            bases: Some(Arc::default()),
            ..Self::default()
        }
    }

    /// The key under which a backing file may be shared, where backing files are.
    pub(crate) fn base_key(&self, options: &Options, around: &OpenContext) -> Option<BaseKey> {
        self.bases.as_ref()?;
        BaseKey::of(options, &around.flags)
    }

    /// A backing file that is open already.
    pub(crate) fn shared_base(&self, key: &BaseKey) -> Option<Arc<dyn BlockDevice>> {
        let bases = self.bases.as_ref()?.0.lock();
        bases.get(key)?.upgrade()
    }

    /// Lets others stand on a backing file.
    pub(crate) fn share_base(&self, key: BaseKey, device: &Arc<dyn BlockDevice>) {
        if let Some(bases) = &self.bases {
            let mut bases = bases.0.lock();
            bases.retain(|_, device| device.strong_count() > 0);
            bases.insert(key, Arc::downgrade(device));
        }
    }
}

#[cfg(test)]
mod tests {
    use vellum::Buffer;
    use vellum_io::lane::block_on;

    use super::super::Nodes;
    use super::*;
    use crate::create;

    /// A folder with `base`, full of one byte, and overlays of it.
    async fn folder(overlays: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        std::fs::write(path("base"), [7; 65536]).unwrap();
        for name in overlays {
            let mut settings = create::settings(&path(name), "qcow2").unwrap();
            settings.set("size", "65536").unwrap();
            settings.set("backing_file", &path("base")).unwrap();
            settings.set("backing_fmt", "raw").unwrap();
            create::make(&path(name), "qcow2", &settings).await.unwrap();
        }
        folder
    }

    async fn add(nodes: &Nodes, folder: &tempfile::TempDir, name: &str, more: &str) {
        let path = folder.path().join(name);
        let text = format!(
            "driver=qcow2,node-name={name},file.driver=file,file.filename={}{more}",
            path.display()
        );
        nodes.add(Options::parse(&text).unwrap()).await.unwrap();
    }

    fn base(nodes: &Nodes, name: &str) -> Arc<dyn BlockDevice> {
        nodes.device(name).unwrap().backing().unwrap()
    }

    #[test]
    fn overlays_share_what_they_only_read() {
        block_on(async {
            let folder = folder(&["a", "b", "c"]).await;
            let nodes = Nodes::sharing();
            add(&nodes, &folder, "a", "").await;
            add(&nodes, &folder, "b", "").await;
            add(&nodes, &folder, "c", ",cache.direct=on").await;
            assert!(Arc::ptr_eq(&base(&nodes, "a"), &base(&nodes, "b")));
            // Its backing file bypasses the page cache too.
            assert!(!Arc::ptr_eq(&base(&nodes, "a"), &base(&nodes, "c")));
            // One that goes takes nothing from the other.
            let device = nodes.device("b").unwrap();
            let ones = Buffer::copy_of(&[1; 512]);
            device.write(512, ones, Default::default()).await.unwrap();
            nodes.remove("a").await.unwrap();
            let read = device.read(0, Buffer::for_read(1024)).await.unwrap();
            assert_eq!((read[0], read[512]), (7, 1));
            drop(device);
            nodes.close().await.unwrap();
        });
    }

    #[test]
    fn another_file_under_the_same_name_is_another_one() {
        block_on(async {
            let folder = folder(&["a", "b"]).await;
            let nodes = Nodes::sharing();
            add(&nodes, &folder, "a", "").await;
            let path = folder.path().join("base");
            std::fs::rename(&path, folder.path().join("old")).unwrap();
            std::fs::write(&path, [8; 65536]).unwrap();
            add(&nodes, &folder, "b", "").await;
            for (name, byte) in [("a", 7), ("b", 8)] {
                let device = nodes.device(name).unwrap();
                let read = device.read(0, Buffer::for_read(512)).await.unwrap();
                assert_eq!(read[0], byte);
            }
            nodes.close().await.unwrap();
        });
    }

    #[test]
    fn what_is_shared_goes_with_the_last_image_and_live_nodes_share_nothing() {
        block_on(async {
            let folder = folder(&["a", "b"]).await;
            let nodes = Nodes::sharing();
            add(&nodes, &folder, "a", "").await;
            let base_of_a = Arc::downgrade(&base(&nodes, "a"));
            nodes.remove("a").await.unwrap();
            assert_eq!(base_of_a.strong_count(), 0);
            let live = Nodes::live();
            add(&live, &folder, "a", "").await;
            add(&live, &folder, "b", "").await;
            assert!(!Arc::ptr_eq(&base(&live, "a"), &base(&live, "b")));
            live.close().await.unwrap();
        });
    }
}

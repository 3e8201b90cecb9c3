//! Backing files that several images stand on: opened once, with one set of caches and one
//! descriptor.
//!
//! Where nodes can be changed while they are used ([`super::Nodes::live`]), the images stand on one
//! node, with links of their own; elsewhere on one device without a name.
//!
//! Invariants:
//! - Only what is open for reading is shared, by those who ask for the same: the same file (by
//!   device and inode, not by name alone), options and flags. What somebody has named is not.
//! - An image does not close what it stands on; it goes with the last image. A node belongs to
//!   one of the images, and to another one when that is removed.
//! - Whoever comes finds what the file shows: a node is shared until it, or what it stands on, is
//!   opened anew or exchanged.
//! - A change of one image's chain does not show in that of another one: what they share, and
//!   what that stands on, is neither made writable nor exchanged.

use std::sync::Arc;

use vellum::{BlockDevice, Result};
use vellum_options::{OpenFlags, Options};

use crate::live::bases::BaseKey;
use crate::live::nodes::Nodes;
use crate::live::state::GraphState;
use crate::live::uses::User;
use crate::node::errors::{MADE_UP, invalid};
use crate::node::place::NodePlace;

impl Nodes {
    /// Lets others stand on a backing file that was opened for the image at a place: the node of a name,
    /// where it has one.
    pub(crate) fn share(
        &self,
        place: &NodePlace,
        key: BaseKey,
        (name, device): (Option<String>, &Arc<dyn BlockDevice>),
    ) {
        if let Some(name) = name {
            let mut state = self.lock();
            let state = &mut *state;
            let own = place.opening_root();
            let own = own.and_then(|root| state.openings.shared_of(root));
            own.unwrap_or(&mut state.shared.0).insert(key, name);
        } else if let Some(bases) = &self.bases {
            let mut bases = bases.0.lock();
            bases.retain(|_, device| device.strong_count() > 0);
            bases.insert(key, Arc::downgrade(device));
        }
    }

    /// A backing file that is open already, for the image at a place.
    pub(crate) fn shared(
        &self,
        key: &BaseKey,
        flags: &OpenFlags,
        place: &NodePlace,
    ) -> Option<Arc<dyn BlockDevice>> {
        if let Some(bases) = &self.bases {
            return bases.0.lock().get(key)?.upgrade();
        }
        let name = {
            let mut state = self.lock();
            let own = place.opening_root();
            let own = own.and_then(|root| state.openings.shared_of(root)?.get(key).cloned());
            own.or_else(|| state.shared.0.get(key).cloned())?
        };
        // One that a job is changing is nobody else's.
        self.stand_on(place, &name, flags).ok()
    }

    /// The key under which a backing file may be shared, where backing files are.
    pub(crate) fn base_key(
        &self,
        options: &Options,
        flags: &OpenFlags,
        place: &NodePlace,
    ) -> Option<BaseKey> {
        match self.bases.is_some() || self.names_all(place) {
            true => BaseKey::of(options, flags, self.files.as_deref()),
            false => None,
        }
    }
}

impl GraphState {
    /// Has nobody new stand on shared nodes that are about to be others, or stand on such.
    pub(crate) fn stop_sharing(&mut self, changed: &[String]) {
        let uses = &self.uses;
        let is_over = |name: &String| {
            let mut below = Some(name);
            while let Some(node) = below {
                if changed.contains(node) {
                    return true;
                }
                below = uses.by_as(node, "backing").map(|one| &one.node);
            }
            false
        };
        self.shared.0.retain(|_, name| !is_over(name));
        for shared in self.openings.all_shared() {
            shared.retain(|_, name| !is_over(name));
        }
    }

    /// Refuses to change what the chains of several images, but one, have in common and nobody
    /// has named.
    pub(crate) fn check_not_shared(&self, name: &str, but: Option<&str>) -> Result<()> {
        let mut images: Vec<&str> = Vec::new();
        let mut nodes = vec![name];
        while let Some(node) = nodes.pop().filter(|node| node.starts_with(MADE_UP)) {
            for one in self.uses.of(node) {
                match &one.user {
                    User::Node(above) if but == Some(above) => {}
                    User::Node(above) if above.starts_with(MADE_UP) => nodes.push(above),
                    User::Node(above) if !images.contains(&&**above) => images.push(above),
                    _ => {}
                }
            }
        }
        match images[..] {
            [one, other, ..] => Err(invalid(format!(
                "Node '{name}' is busy: the backing chains of '{one}' and '{other}' share it. Open \
                 one of them with 'backing' naming a node of its own to change that"
            ))),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use Nodes;
    use vellum::Buffer;
    use vellum::qcow2::create::CreateOptions;
    use vellum_io::lane::block_on;

    use crate::testing::make_image;

    use super::*;

    /// A folder with `base`, full of one byte, and overlays of it.
    async fn folder(overlays: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        std::fs::write(path("base"), [7; 65536]).unwrap();
        let options = CreateOptions::default()
            .size_bytes(65536)
            .backing_file(Some(path("base")))
            .backing_format(Some("raw".to_owned()));
        for name in overlays {
            make_image(&path(name), &options).await;
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
    fn what_is_shared_goes_with_the_last_image() {
        block_on(async {
            let folder = folder(&["a", "b"]).await;
            let nodes = Nodes::sharing();
            add(&nodes, &folder, "a", "").await;
            let base_of_a = Arc::downgrade(&base(&nodes, "a"));
            nodes.remove("a").await.unwrap();
            assert_eq!(base_of_a.strong_count(), 0);
        });
    }

    async fn read(nodes: &Nodes, name: &str) -> u8 {
        let device = nodes.device(name).unwrap();
        device.read(0, Buffer::for_read(512)).await.unwrap()[0]
    }

    #[test]
    fn live_images_stand_on_one_node_that_belongs_to_one_that_is_there() {
        block_on(async {
            let folder = folder(&["a", "b", "c"]).await;
            let nodes = Nodes::live();
            for name in ["a", "b", "c"] {
                add(&nodes, &folder, name, "").await;
            }
            let base = nodes.backing_of("a").unwrap();
            assert_eq!(nodes.backing_of("b").as_ref(), Some(&base));
            for (gone, left) in [("a", "b"), ("c", "b")] {
                nodes.remove(gone).await.unwrap();
                assert!(nodes.contains(&base));
                assert_eq!(read(&nodes, left).await, 7);
            }
            nodes.remove("b").await.unwrap();
            assert!(nodes.is_empty(), "{nodes:?}");
            // What is gone is not found again.
            add(&nodes, &folder, "a", "").await;
            assert_eq!(read(&nodes, "a").await, 7);
            nodes.close().await.unwrap();
        });
    }

    #[test]
    fn what_live_images_share_is_not_changed_for_one_of_them() {
        block_on(async {
            let folder = folder(&["a", "b", "over"]).await;
            let nodes = Nodes::live();
            add(&nodes, &folder, "a", "").await;
            let base = nodes.backing_of("a").unwrap();
            add(&nodes, &folder, "b", "").await;
            add(&nodes, &folder, "over", ",backing=").await;
            let refused = |result: Result<()>| {
                let text = result.unwrap_err().to_string();
                assert!(text.contains("share it"), "{text}");
            };
            refused(nodes.set_writable(&base, true).await);
            refused(nodes.put_over(&base, "over").await);
            // Of one image alone everything can be changed.
            nodes.snapshot("a", "over").await.unwrap();
            nodes.remove("b").await.unwrap();
            nodes.set_writable(&base, true).await.unwrap();
            nodes.set_writable(&base, false).await.unwrap();
            nodes.close().await.unwrap();
        });
    }

    #[test]
    fn a_live_node_that_was_changed_is_not_shared_any_more() {
        block_on(async {
            let folder = folder(&["a", "b", "over"]).await;
            let nodes = Nodes::live();
            add(&nodes, &folder, "a", "").await;
            let base = nodes.backing_of("a").unwrap();
            add(&nodes, &folder, "over", ",backing=").await;
            let held = nodes.drain(&base).await.unwrap();
            nodes.redirect_to(held, "over").await.unwrap();
            let over = nodes.device("over").unwrap();
            let ones = Buffer::copy_of(&[1; 512]);
            over.write(0, ones, Default::default()).await.unwrap();
            drop(over);
            add(&nodes, &folder, "b", "").await;
            assert_ne!(nodes.backing_of("b").as_ref(), Some(&base));
            assert_eq!((read(&nodes, "a").await, read(&nodes, "b").await), (1, 7));
            nodes.close().await.unwrap();
        });
    }
}

//! What happens to nodes while they are used, on whichever lane: how far they are written, and
//! what somebody may want to hear of.
//!
//! Only live nodes are watched, and of these storages: what a format writes shows in its file.

use std::sync::{Arc, OnceLock};

use vellum::Result;
use vellum::nodes::QuorumReport;
use vellum_storage::nodes::watch::{WatchedStorage, WriteWatch};

use super::{Nodes, unknown};
use crate::graph::{NodeKind, OpenedNode};

/// Something that has happened to a node.
#[derive(Debug, Clone)]
pub enum NodeNotice {
    /// A write reaches beyond the threshold, which is gone now.
    WriteThreshold {
        /// The node.
        node: String,
        /// The threshold in bytes.
        threshold_bytes: u64,
        /// How far beyond it the write ends, in bytes.
        exceeded_bytes: u64,
    },
    /// Children of a quorum do not agree, or fail.
    Quorum {
        /// The node.
        node: String,
        /// What was found.
        report: QuorumReport,
    },
    /// The metadata of an image contradicts itself.
    Corrupted {
        /// The node.
        node: String,
        /// What is wrong.
        message: String,
        /// Where, in bytes of the image's file, if that is known.
        offset_bytes: Option<u64>,
        /// Nothing can be changed any more.
        is_fatal: bool,
    },
}

/// Receives notices, on the lane where something happens, which waits for it.
pub type NoticeSink = dyn Fn(NodeNotice) + Send + Sync;

/// Where notices go, once somebody wants them; clones share it.
#[derive(Clone, Default)]
pub(crate) struct Notices(Arc<OnceLock<Box<NoticeSink>>>);

impl std::fmt::Debug for Notices {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Notices({})", self.0.get().is_some())
    }
}

impl Notices {
    pub(crate) fn give(&self, notice: NodeNotice) {
        if let Some(sink) = self.0.get() {
            sink(notice);
        }
    }
}

impl Nodes {
    /// Has `sink` hear of what happens to these nodes from now on. The first sink stays.
    pub fn on_notice(&self, sink: impl Fn(NodeNotice) + Send + Sync + 'static) {
        let _ = self.notices.0.set(Box::new(sink));
    }

    pub(crate) fn notices(&self) -> &Notices {
        &self.notices
    }

    /// The node that is being opened under a name, with its writes watched if it is a storage.
    /// One that `is_renewed` keeps what was noted of it.
    pub(crate) fn watched(&self, name: &str, is_renewed: bool, opened: OpenedNode) -> OpenedNode {
        let NodeKind::Storage(storage) = &opened.kind else {
            return opened;
        };
        let watch = {
            let mut named = self.lock();
            let kept = named.watches.get(name).filter(|_| is_renewed).cloned();
            let watch = kept.unwrap_or_else(|| self.new_watch(name));
            named.forget_watches();
            named.watches.insert(name.to_owned(), watch.clone());
            watch
        };
        let storage = WatchedStorage::new(storage.clone(), watch);
        OpenedNode {
            kind: NodeKind::Storage(storage),
            ..opened
        }
    }

    fn new_watch(&self, name: &str) -> Arc<WriteWatch> {
        let (node, notices) = (name.to_owned(), self.notices.clone());
        WriteWatch::new(move |exceeded| {
            notices.give(NodeNotice::WriteThreshold {
                node: node.clone(),
                threshold_bytes: exceeded.threshold_bytes,
                exceeded_bytes: exceeded.exceeded_bytes,
            });
        })
    }

    /// What is noted of the writes to a node; `None` if it is of a format.
    ///
    /// # Errors
    /// If there is no such node.
    pub fn write_watch(&self, name: &str) -> Result<Option<Arc<WriteWatch>>> {
        let named = self.lock();
        match named.nodes.contains_key(name) {
            true => Ok(named.watches.get(name).cloned()),
            false => Err(unknown(name)),
        }
    }
}

impl super::NamedNode {
    /// Forgets the watches of nodes that are gone, now and then.
    fn forget_watches(&mut self) {
        if self.watches.len() > 2 * self.nodes.len() + 16 {
            let nodes = &self.nodes;
            self.watches.retain(|name, _| nodes.is_there(name));
        }
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;
    use vellum::{Buffer, RequestFlags};
    use vellum_io::lane::block_on;
    use vellum_options::Options;

    use super::*;
    use crate::nodes::testing::make_image;
    use vellum::qcow2::create::CreateOptions;

    #[test]
    fn a_write_to_the_file_of_an_image_exceeds_its_threshold() {
        block_on(async {
            let file = tempfile::NamedTempFile::new().unwrap();
            let path = file.path().to_str().unwrap();
            make_image(path, &CreateOptions::default().size_bytes(1 << 20)).await;
            let nodes = Nodes::live();
            let told = Arc::new(Mutex::new(Vec::new()));
            let sink = told.clone();
            nodes.on_notice(move |notice| sink.lock().push(notice));
            for text in [
                format!("driver=file,filename={path},node-name=f"),
                "driver=qcow2,file=f,node-name=d".to_owned(),
            ] {
                nodes.add(Options::parse(&text).unwrap()).await.unwrap();
            }
            assert!(nodes.write_watch("d").unwrap().is_none());
            assert!(nodes.write_watch("x").is_err());
            let watch = nodes.write_watch("f").unwrap().unwrap();
            watch.set_threshold_bytes(300 << 10);
            let device = nodes.device("d").unwrap();
            let data = Buffer::zeroed(1 << 19);
            let written = device.write(0, data, RequestFlags::default());
            written.await.unwrap();
            device.flush().await.unwrap();
            let heard = std::mem::take(&mut *told.lock());
            let [
                NodeNotice::WriteThreshold {
                    node,
                    exceeded_bytes,
                    ..
                },
            ] = &heard[..]
            else {
                panic!("{heard:?}");
            };
            assert_eq!((&**node, *exceeded_bytes > 0), ("f", true));
            assert!(watch.highest_written_bytes() > 512 << 10);
            drop(device);
            nodes.close().await.unwrap();
        });
    }
}

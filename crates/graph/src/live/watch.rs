//! How far storages are written: what a format writes shows in its file.

use std::sync::Arc;

use vellum::Result;
use vellum_storage::nodes::watch::{WatchedStorage, WriteWatch};

use crate::live::nodes::Nodes;
use crate::live::notices::NodeNotice;
use crate::live::state::GraphState;
use crate::node::errors::unknown;
use crate::node::opened::{NodeKind, OpenedNode};

impl Nodes {
    /// The node that is being opened under a name, with its writes watched if it is a storage.
    /// One that `is_reopened` keeps what was noted of it.
    pub(crate) fn watched(&self, name: &str, is_reopened: bool, opened: OpenedNode) -> OpenedNode {
        let NodeKind::Storage(storage) = &opened.kind else {
            return opened;
        };
        let watch = {
            let mut state = self.lock();
            let kept = state.watches.get(name).filter(|_| is_reopened).cloned();
            let watch = kept.unwrap_or_else(|| self.new_watch(name));
            state.forget_watches();
            state.watches.insert(name.to_owned(), watch.clone());
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
        let state = self.lock();
        match state.nodes.contains_key(name) {
            true => Ok(state.watches.get(name).cloned()),
            false => Err(unknown(name)),
        }
    }
}

impl GraphState {
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
    use vellum::qcow2::create::CreateOptions;
    use vellum::{Buffer, RequestFlags};
    use vellum_io::lane::block_on;
    use vellum_options::Options;

    use crate::testing::make_image;

    use super::*;

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

//! Servers of other programs that nodes stand on: whoever ends must not wait for ever for one
//! that does not answer, while other disks are not closed yet.
//!
//! Invariant: a server that takes or sends anything is waited for, however slow it is.
//!
//! One that is away is not waited for as long as a user's `reconnect-delay` says: that is for
//! guests that go on, and would keep the program from ending.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use vellum::{Buffer, Storage};
use vellum_io::lane;
use vellum_nbd::client::NbdStorage;

use crate::live::known_servers::Server;
use crate::live::nodes::Nodes;
use crate::node::opened::NodeKind;
use crate::node::place::NodePlace;

/// So much is read of a storage to hear whether it answers: what any block of a disk holds.
const PROBE_BYTES: usize = 512;

/// How often servers are looked at, as a part of the time that they have.
const LOOKS: u32 = 20;

/// So long is a server waited for that is away while users wait for it to come back, whatever
/// their `reconnect-delay` is: long enough for one that is being started again.
const AWAY_PATIENCE: Duration = Duration::from_secs(2);

/// A server that is waited for.
struct WaitedFor {
    server: Weak<NbdStorage>,
    progress: Option<u64>,
    since: Instant,
    /// Since when it is away.
    away: Option<Instant>,
}

impl WaitedFor {
    /// Gives the server up if nothing has moved for `patience`; `false` if nobody uses it.
    fn look(&mut self, patience: Duration) -> bool {
        let Some(server) = self.server.upgrade() else {
            return false;
        };
        if !server.is_away() {
            self.away = None;
        } else if lane::now().duration_since(*self.away.get_or_insert_with(lane::now))
            >= AWAY_PATIENCE.min(patience)
        {
            server.give_up();
        }
        let now = server.progress();
        if now.is_none() || now != self.progress {
            self.progress = now;
            self.since = lane::now();
        } else if lane::now().duration_since(self.since) >= patience {
            server.give_up();
        }
        true
    }
}

impl Nodes {
    /// Notes that a node, which is opened at a place, stands on a server.
    pub(crate) fn note_server(&self, server: &Arc<NbdStorage>, place: &NodePlace) {
        let mut servers = self.servers.0.lock();
        servers.retain(|one| one.storage.strong_count() > 0);
        servers.push(Server {
            storage: Arc::downgrade(server),
            opening: place.opening_root().map(str::to_owned),
        });
    }

    /// Notes that a node has been opened: others use its servers from now on.
    pub(crate) fn note_opened(&self, root: &str) {
        for server in self.servers.0.lock().iter_mut() {
            if server.opening.as_deref() == Some(root) {
                server.opening = None;
            }
        }
    }

    /// Gives up the servers of a node that is not to be opened any more.
    pub(crate) fn give_up_servers_of(&self, root: &str) {
        let servers = self.servers.0.lock();
        let own = servers.iter();
        let own = own.filter(|server| server.opening.as_deref() == Some(root));
        own.filter_map(|server| server.storage.upgrade())
            .for_each(|storage| storage.give_up());
    }

    /// Has all that stands on a server be made durable, at the same time: servers that do not
    /// answer are waited for together. What fails, fails again when the nodes are closed.
    pub async fn flush_over_servers(&self) {
        let roots = self.roots_over("nbd", |_| true);
        let devices: Vec<_> = {
            let state = self.lock();
            let device = |name: &String| state.nodes.get(name)?.device.clone();
            roots.iter().filter_map(device).collect()
        };
        join_all(devices.iter().map(|device| device.flush())).await;
    }

    /// Makes durable all that stands on no server of another program. What fails, fails again when the
    /// nodes are closed.
    pub async fn flush_local(&self) {
        let remote = self.roots_over("nbd", |_| true);
        let devices: Vec<_> = {
            let state = self.lock();
            let roots = state.nodes.roots().iter();
            let local = roots.filter(|root| !remote.contains(root));
            let device = |root: &String| state.nodes.get(root)?.device.clone();
            local.filter_map(device).collect()
        };
        let devices = devices.iter().filter(|device| !device.info().read_only);
        join_all(devices.map(|device| device.flush())).await;
    }

    /// Waits until all that some nodes stand on has answered once: for whoever will keep others waiting as long as
    /// these do not answer. What fails is told by what comes then, and so are nodes that are not there.
    pub async fn wait_for_answers(&self, names: &[String]) {
        for storage in self.lowest_below(names) {
            let probe = std::iter::once(Buffer::for_read(PROBE_BYTES));
            let _ = storage.read(0, probe.collect()).await;
        }
    }

    /// The storages that some nodes stand on, whatever is in between.
    fn lowest_below(&self, names: &[String]) -> Vec<Arc<dyn Storage>> {
        let state = self.lock();
        let mut below: Vec<&str> = names.iter().flat_map(|it| state.with_below(it)).collect();
        below.sort_unstable();
        below.dedup();
        let nodes = below.iter().filter_map(|name| state.nodes.get(*name));
        let storages = nodes.filter_map(|node| match &node.opened.kind {
            NodeKind::Storage(storage) => Some(storage.clone()),
            NodeKind::Device(_) => None,
        });
        storages.collect()
    }

    /// Gives up each server that leaves a request without an answer, and moves no byte, for
    /// `patience`, or is away for 2 s while requests wait for it to come back: the request fails,
    /// and so does what comes after it. Ends when no node stands on a server any more.
    pub async fn give_up_silent_servers(&self, patience: Duration) {
        let known = self.servers.0.lock().clone();
        let waited_for = |server: Server| WaitedFor {
            server: server.storage,
            progress: None,
            since: lane::now(),
            away: None,
        };
        let mut servers: Vec<WaitedFor> = known.into_iter().map(waited_for).collect();
        loop {
            servers.retain_mut(|one| one.look(patience));
            if servers.is_empty() {
                return;
            }
            lane::sleep((patience / LOOKS).min(AWAY_PATIENCE / 2)).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::future::{Either, select};
    use vellum::{Raw, RawOptions, RequestFlags};
    use vellum_export::nbd::{Export, Exports, Listener, ServerOptions, Stop, serve};
    use vellum_io::spawn;
    use vellum_options::Options;
    use vellum_storage::MemStorage;
    use vellum_storage::wrap::{DelayStorage, Matching, Operation};

    use super::*;

    const PATIENCE: Duration = Duration::from_millis(400);

    /// A node `n` on a server whose writes are told what to wait for.
    async fn node_on_server(folder: &tempfile::TempDir) -> (Nodes, Arc<DelayStorage>, Stop) {
        let slow = DelayStorage::new(Arc::new(MemStorage::with_bytes(vec![0; 1 << 20])));
        let device = Raw::open(slow.clone(), RawOptions::default()).unwrap();
        let path = folder.path().join("s");
        let listener = Listener::bind_unix(&path).unwrap();
        let (exports, stop) = (Exports::new([Export::new("", device)]), Stop::new());
        let end = stop.clone();
        drop(spawn(async move {
            serve(vec![listener], exports, ServerOptions::default(), &end).await;
        }));
        let nodes = Nodes::live();
        let node = format!(
            "driver=raw,node-name=n,file.driver=nbd,file.path={}",
            path.display()
        );
        nodes.add(Options::parse(&node).unwrap()).await.unwrap();
        (nodes, slow, stop)
    }

    async fn write_while_giving_up(nodes: &Nodes) -> vellum::Result<Buffer> {
        let device = nodes.device("n").unwrap();
        let write = device.write(0, Buffer::copy_of(&[7; 512]), RequestFlags::default());
        match select(pin!(write), pin!(nodes.give_up_silent_servers(PATIENCE))).await {
            Either::Left((written, _)) => written,
            Either::Right(_) => panic!("the server is in use"),
        }
    }

    #[test]
    fn one_that_does_not_answer_is_given_up() {
        let folder = tempfile::tempdir().unwrap();
        lane::block_on(async {
            let (nodes, slow, stop) = node_on_server(&folder).await;
            let held = slow.hold(Matching::operation(Operation::Write));
            let error = write_while_giving_up(&nodes).await.unwrap_err();
            assert!(held.has_arrived());
            assert!(error.to_string().contains("did not answer"), "{error}");
            held.release();
            // Whatever was begun there, the node is over.
            let again = write_while_giving_up(&nodes).await.unwrap_err();
            assert!(again.to_string().contains("did not answer"), "{again}");
            let _ = nodes.close().await;
            stop.request();
        });
    }

    #[test]
    fn one_that_answers_others_is_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        lane::block_on(async {
            let (nodes, slow, stop) = node_on_server(&folder).await;
            slow.delay(Matching::operation(Operation::Write), 3 * PATIENCE);
            let device = nodes.device("n").unwrap();
            let end = Stop::new();
            let reads = spawn({
                let (device, end) = (device.clone(), end.clone());
                async move {
                    while !end.is_requested() {
                        device.read(0, Buffer::for_read(512)).await.unwrap();
                        lane::sleep(PATIENCE / 8).await;
                    }
                }
            });
            write_while_giving_up(&nodes).await.unwrap();
            end.request();
            reads.await;
            nodes.close().await.unwrap();
            stop.request();
        });
    }
}

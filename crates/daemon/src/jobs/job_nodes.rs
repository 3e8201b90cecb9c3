//! The nodes that a job uses: joined before it begins, left as they were found when it is over.

use std::sync::Arc;

use vellum::BlockDevice;
use vellum_graph::Nodes;
use vellum_graph::drivers::facts;
use vellum_graph::live::{Changes, Keeps, RequiredAccess, User, unknown_node};
use vellum_graph::node::driver::DriverFacts;
use vellum_io::spawn;

use super::Settings;

/// The nodes that a job uses, while it does.
#[derive(Debug)]
pub(crate) struct JobNodes {
    pub(crate) nodes: Nodes,
    uses: Vec<(u64, String)>,
    /// Nodes that were made writable for the job.
    opened: Vec<String>,
    /// The filter that is listed among the nodes.
    filter: Option<String>,
    /// The node that was opened for the job, and goes with it unless somebody uses it then.
    owned: Option<String>,
}

impl JobNodes {
    /// Uses no node yet.
    pub(crate) fn new(nodes: &Nodes) -> Self {
        JobNodes {
            nodes: nodes.clone(),
            uses: Vec::new(),
            opened: Vec::new(),
            filter: None,
            owned: None,
        }
    }

    /// Uses a node, on which no other job works: neither would know what the other one does to it,
    /// whichever way each of them was led there. Only the image over what is committed may be one that
    /// a stream reads.
    pub(crate) fn join(
        &mut self,
        settings: &Settings,
        node: &str,
        role: &str,
        changes: Changes,
        keeps: Changes,
    ) -> vellum::Result<()> {
        let (id, kind) = (settings.id.clone(), settings.kind);
        let role = role.to_owned();
        let wanted = RequiredAccess {
            role,
            changes,
            keeps,
        };
        let user = User::Job { id, kind };
        self.nodes.check_no_other_job(node, &user, &wanted.role)?;
        let joined = self.nodes.join(user, node, wanted)?;
        self.uses.push((joined.id, node.to_owned()));
        Ok(())
    }

    /// The job's own way to a node that it uses, which leads to it also where the node, or one below it,
    /// is opened anew.
    ///
    /// # Errors
    /// If it does not use the node.
    pub(crate) fn way_to(&self, node: &str) -> vellum::Result<Arc<dyn BlockDevice>> {
        let mut uses = self.uses.iter();
        let found = uses.find(|(_, used)| used == node);
        let link = found.and_then(|(id, _)| self.nodes.link_of(*id));
        Ok(link.ok_or_else(|| unknown_node(node))?)
    }

    /// Has nobody change some of what lies below a node, but by that node.
    pub(crate) fn keep_below(&self, node: &str, keeps: Keeps) -> vellum::Result<()> {
        let mut uses = self.uses.iter().filter(|(_, used)| used == node);
        uses.try_for_each(|(id, _)| self.nodes.keep_below(*id, keeps))
    }

    /// Makes a node writable, for as long as the job needs it.
    pub(crate) async fn open(&mut self, node: &str) -> vellum::Result<()> {
        if self.nodes.device(node)?.info().read_only {
            self.nodes.set_writable(node, true).await?;
            self.opened.push(node.to_owned());
        }
        Ok(())
    }

    /// Closes a node when the job leaves it, unless somebody uses it then.
    pub(crate) fn own(&mut self, node: &str) {
        self.owned = Some(node.to_owned());
        self.nodes.note_of_job(node, true);
    }

    /// Passes on what was prepared with the nodes; if that failed, they are left.
    pub(crate) async fn or_leave<T>(&mut self, prepared: vellum::Result<T>) -> vellum::Result<T> {
        if prepared.is_err() {
            self.leave().await;
        }
        prepared
    }

    /// Keeps a node writable that was made so.
    pub(crate) fn keep_open(&mut self, node: &str) {
        self.opened.retain(|other| other != node);
    }

    /// Shows the filter in front of a node among the nodes, if it is to have a name, until the
    /// nodes are left.
    pub(crate) fn show_filter(
        &mut self,
        settings: &Settings,
        driver: &'static str,
        node: &str,
        device: Arc<dyn BlockDevice>,
    ) -> vellum::Result<()> {
        if let Some(name) = &settings.filter {
            // Filters that only jobs have are no drivers that a user could name.
            let driver = facts(driver).unwrap_or(DriverFacts::named(driver));
            self.nodes.show_filter(name, driver, node, device)?;
            self.filter = Some(name.clone());
        }
        Ok(())
    }

    fn forget_filter(&mut self) {
        if let Some(name) = self.filter.take() {
            self.nodes.forget_filter(&name);
        }
    }

    /// Leaves all nodes, as they were found but for those that were made writable: they stay so.
    /// The `target` is in use until `left` says that nothing is on its way there any more.
    pub(crate) fn leave_before(mut self, target: &str, left: impl Future<Output = ()> + 'static) {
        self.forget_filter();
        let (kept, others) = self.uses.drain(..).partition(|(_, node)| node == target);
        leave(&self.nodes, others);
        self.opened.clear();
        drop(spawn(async move {
            left.await;
            leave(&self.nodes, kept);
            self.close_owned().await;
        }));
    }

    /// Leaves all nodes as they were found. A node that cannot be opened read-only again
    /// stays writable, which nobody has to know.
    pub(crate) async fn leave(&mut self) {
        self.forget_filter();
        leave(&self.nodes, std::mem::take(&mut self.uses));
        for node in std::mem::take(&mut self.opened) {
            let _ = self.nodes.set_writable(&node, false).await;
        }
        self.close_owned().await;
    }

    async fn close_owned(&mut self) {
        if let Some(node) = self.owned.take() {
            self.nodes.note_of_job(&node, false);
            // It is used, or closed well enough: nobody is told of either.
            let _ = self.nodes.remove(&node).await;
        }
    }
}

fn leave(nodes: &Nodes, uses: Vec<(u64, String)>) {
    for (id, _) in uses {
        nodes.leave(id);
    }
}

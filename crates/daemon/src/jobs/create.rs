//! `blockdev-create`: a file is made, or an image in a node.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{Either, select};
use vellum::{Result, Storage};
use vellum_graph::foreign::{Creation, New};
use vellum_graph::live::{Changes, Nodes, RequiredAccess, User};
use vellum_graph::node::file_node::FileUse;
use vellum_graph::node::file_policy::FilePolicy;
use vellum_graph::node::origin::Role;
use vellum_graph::open::{OpenContext, open_node};
use vellum_images::create_in::{self, LuksFiles};
use vellum_images::created_elsewhere;
use vellum_io::lane;
use vellum_jobs::live::CopyOutcome;
use vellum_options::create_options::CreateSettings;
use vellum_options::{OpenFlags, Options};

use super::{Job, Work};

/// Where an image is made.
#[derive(Debug)]
pub(crate) enum Place {
    /// In the node of this name.
    Node(String),
    /// In a node of these options, for as long as that takes.
    Options(Options),
}

/// What is made.
#[derive(Debug)]
pub(crate) enum Made {
    /// A file of this name.
    File(String),
    /// A qcow2 image, and where its data lies, if that is elsewhere.
    Qcow2(Place, Option<Place>),
    /// A luks volume, and where its header lies, if that is elsewhere.
    Luks {
        file: Option<Place>,
        header: Option<Place>,
    },
    /// An image of another format, and where its other files lie.
    Foreign(Place, Vec<Place>, &'static Creation),
    /// What a node of these options shows.
    Elsewhere(Options),
}

/// A creation.
pub(crate) struct Create {
    pub(crate) nodes: Nodes,
    pub(crate) made: Made,
    pub(crate) settings: CreateSettings,
    /// The nodes that it uses, with the numbers of the uses.
    uses: Vec<(String, u64)>,
    /// What it has opened for itself.
    opened: Vec<Arc<dyn Storage>>,
}

impl Create {
    pub(crate) fn new(nodes: Nodes, made: Made, settings: CreateSettings) -> Create {
        Create {
            nodes,
            made,
            settings,
            uses: Vec::new(),
            opened: Vec::new(),
        }
    }

    /// A place as a storage, and what it is called.
    async fn open(&mut self, place: &Place) -> Result<(Arc<dyn Storage>, String)> {
        let storage = match place {
            Place::Node(name) => self.join(name)?,
            Place::Options(options) => {
                let flags = OpenFlags {
                    writable: true,
                    ..OpenFlags::default()
                };
                let around = OpenContext::alone(flags.clone(), FilePolicy::Any);
                let opened = open_node(options.clone(), Role::Protocol, &around).await?;
                let opened = opened.for_user(true)?;
                let storage = opened.into_storage(&flags, FileUse::Format).await?;
                self.opened.push(storage.clone());
                storage
            }
        };
        let name = storage.name().to_owned();
        Ok((storage, name))
    }

    fn join(&mut self, name: &str) -> Result<Arc<dyn Storage>> {
        let node = self.nodes.known(name)?.for_user(true)?;
        let writing = RequiredAccess {
            role: "root".to_owned(),
            changes: Changes::ALL,
            keeps: Changes::NONE,
        };
        // QEMU has a device of its own for it, which has no name.
        let joined = self
            .nodes
            .join(User::Export(String::new()), name, writing)?;
        self.uses.push((name.to_owned(), joined.id));
        Ok(node.storage())
    }

    async fn make(&mut self) -> Result<()> {
        match std::mem::replace(&mut self.made, Made::File(String::new())) {
            Made::File(path) => create_in::file(&path, &self.settings).await,
            Made::Elsewhere(location) => {
                let size_bytes = self.settings.integer("size").unwrap_or(0);
                let object_bytes = self.settings.integer("cluster_size");
                let made = created_elsewhere::create_node(location, size_bytes, object_bytes);
                let storage = made.await?;
                let flushed = storage.flush().await;
                storage.close().await.and(flushed)
            }
            Made::Foreign(place, extents, creation) => {
                (creation.validate)(&self.settings)?;
                let (file, _) = self.open(&place).await?;
                let mut files = Vec::new();
                for extent in &extents {
                    files.push(self.open(extent).await?.0);
                }
                let new = New {
                    file: &file,
                    extents: &files,
                    settings: &self.settings,
                    around: &OpenContext::alone(OpenFlags::default(), FilePolicy::Any),
                    exact: true,
                };
                (creation.fill)(new).await
            }
            Made::Luks { file, header } => {
                let mut files = LuksFiles::default();
                if let Some(place) = &file {
                    files.file = Some(self.open(place).await?.0);
                }
                if let Some(place) = &header {
                    files.header = Some(self.open(place).await?.0);
                }
                create_in::luks(files, &self.settings).await
            }
            Made::Qcow2(place, data) => {
                let (storage, _) = self.open(&place).await?;
                let data = match &data {
                    None => None,
                    Some(place) => {
                        let (data, name) = self.open(place).await?;
                        self.settings.set("data_file", &name)?;
                        Some(data)
                    }
                };
                create_in::qcow2(storage, data, &self.settings).await
            }
        }
    }
}

/// How long a creation goes on that was cancelled.
const PATIENCE: Duration = Duration::from_secs(1);

impl Work for Create {
    async fn run(&mut self, job: &Job) -> Result<CopyOutcome> {
        job.set_progress(0, 1);
        let made = {
            // A server may take as long as it likes to answer. What is nearly made is made: who sends all
            // commands at once, the end of the program too, finds the image.
            let cancelled = async {
                job.until(Job::is_cancelled).await;
                lane::sleep(PATIENCE).await;
            };
            match select(pin!(self.make()), pin!(cancelled)).await {
                Either::Left((made, _)) => made,
                Either::Right(_) => return Ok(CopyOutcome::GivenUp),
            }
        };
        job.set_progress(1, 1);
        made.map(|()| CopyOutcome::All)
    }

    async fn conclude(&mut self, _job: &Job) -> Result<()> {
        Ok(())
    }

    async fn leave(mut self) {
        for (name, id) in self.uses.drain(..) {
            self.nodes.leave(id);
            self.nodes.release_unused(&name);
        }
        for storage in self.opened.drain(..) {
            // It was flushed; what the image is worth does not depend on it.
            let _ = storage.close().await;
        }
    }
}

//! `block-stream`: an image is given what the layers below it hold.

use std::rc::Rc;

use vellum::nodes::CopyOnRead;
use vellum_graph::live::{BETWEEN, Changes, Keeps};
use vellum_jobs::live::{CopyOutcome, LiveStream};
use vellum_storage::mutants::{self, Mutant};

use super::failures::{Action, ErrorPolicies};
use super::job::PARALLEL;
use super::progress::ProgressReporter;
use super::{Job, JobNodes, Work};

/// A stream.
pub(crate) struct Stream {
    job_nodes: JobNodes,
    image: String,
    /// The layers that are brought up.
    between: Vec<String>,
    /// What the image stands on in the end.
    base: Option<String>,
    /// What it is to call that.
    backing_file: Option<String>,
    policies: ErrorPolicies,
    stream: LiveStream,
}

/// What a stream is about.
#[derive(Debug)]
pub(crate) struct Streamed {
    pub(crate) image: String,
    pub(crate) between: Vec<String>,
    pub(crate) base: Option<String>,
    pub(crate) backing_file: Option<String>,
    pub(crate) policies: ErrorPolicies,
}

impl Stream {
    /// Prepares a stream.
    pub(crate) async fn prepare(
        mut job_nodes: JobNodes,
        job: &Rc<Job>,
        what: Streamed,
    ) -> vellum::Result<Stream> {
        let prepared = Stream::try_prepare(&mut job_nodes, job, &what).await;
        let stream = job_nodes.or_leave(prepared).await?;
        Ok(Stream {
            job_nodes,
            image: what.image,
            between: what.between,
            base: what.base,
            backing_file: what.backing_file,
            policies: what.policies,
            stream,
        })
    }

    async fn try_prepare(
        job_nodes: &mut JobNodes,
        job: &Rc<Job>,
        what: &Streamed,
    ) -> vellum::Result<LiveStream> {
        // It changes what the image holds, and not what that shows.
        let none = Changes::NONE;
        job_nodes.join(&job.settings, &what.image, "main node", none, Changes::SIZE)?;
        for (at, node) in what.between.iter().enumerate() {
            job_nodes.join(&job.settings, node, BETWEEN, none, Changes::ALL)?;
            // A base stays what it is to those above, also where another job commits to it.
            let is_last = at + 1 == what.between.len() && what.base.is_some();
            job_nodes.keep_below(node, if is_last { Keeps::Files } else { Keeps::All })?;
        }
        job_nodes.open(&what.image).await?;
        let image = job_nodes.nodes.device(&what.image)?;
        let filter = CopyOnRead::fetching(image.clone());
        let front = filter.clone();
        job_nodes
            .nodes
            .insert_filter(&what.image, Some(front))
            .await?;
        let shown = filter.clone();
        job_nodes.show_filter(&job.settings, "copy-on-read", &what.image, shown)?;
        Ok(LiveStream {
            image,
            filter,
            layers: match what.base {
                Some(_) => {
                    let nodes = &job_nodes.nodes;
                    let layers = what.between.iter().filter(|node| !nodes.is_filter(node));
                    layers.count() as u32
                }
                // The last one that is named may be a filter, which has layers below it.
                None => job_nodes.nodes.layers_below(&what.image),
            },
            parallel: PARALLEL,
        })
    }
}

impl Work for Stream {
    async fn run(&mut self, job: &Job) -> vellum::Result<CopyOutcome> {
        if self.stream.layers == 0 {
            return Ok(CopyOutcome::All);
        }
        job.set_progress(0, self.stream.image.size_bytes());
        let mut reporter = ProgressReporter { job, exact: false };
        let (mut from_bytes, mut ignored) = (0, None);
        loop {
            let streamed = self.stream.run(from_bytes, &job.control, &mut reporter);
            let error = match (streamed.await, ignored.take()) {
                (Ok(CopyOutcome::All), Some(error)) => return Err(error),
                (Ok(CopyOutcome::All), None) => break,
                (Ok(CopyOutcome::GivenUp), _) => return Ok(CopyOutcome::GivenUp),
                (Err(error), before) => {
                    ignored = before;
                    error
                }
            };
            match job.meet(&error, self.policies) {
                Action::Report => return Err(error.cause),
                Action::Stop => job.wait_for_resume().await,
                // What is left out is missed in the end.
                Action::Ignore => {
                    from_bytes = self.stream.end_of_piece(error.offset_bytes);
                    ignored.get_or_insert(error.cause);
                }
            }
        }
        if !mutants::is(Mutant::RenameUnflushed) {
            self.stream.image.flush().await?;
        }
        Ok(CopyOutcome::All)
    }

    async fn draw_near(&mut self) -> vellum::Result<()> {
        // It is told on what it stands.
        let image = std::slice::from_ref(&self.image);
        self.job_nodes.nodes.wait_for_answers(image).await;
        Ok(())
    }

    async fn conclude(&mut self, _job: &Job) -> vellum::Result<()> {
        let nodes = &self.job_nodes.nodes;
        let file = self.backing_file.take();
        let lowest = self.between.last().unwrap_or(&self.image);
        // The layer that was named may be committed by now, and what is below be another one.
        let base = match self.base {
            Some(_) => nodes.shown_below(lowest),
            None => None,
        };
        nodes.rebase(&self.image, base.as_deref(), file).await?;
        nodes.also_overlay(lowest, &self.image)
    }

    async fn leave(mut self) {
        // There is nothing to do about it: the image goes on being filtered in vain.
        let _ = self.job_nodes.nodes.insert_filter(&self.image, None).await;
        drop(self.stream);
        self.job_nodes.leave().await;
        self.job_nodes.nodes.drop_unused(&self.between).await;
    }
}

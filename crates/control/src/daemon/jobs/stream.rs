//! `block-stream`: an image is given what the layers below it hold.

use std::rc::Rc;

use crate::nodes::Changes;
use vellum::nodes::CopyOnRead;
use vellum_jobs::live::{CopyOutcome, LiveStream};

use super::failures::{Action, ErrorPolicies};
use super::{Job, JobNodes, PARALLEL, ProgressReporter, Work};

/// A stream.
pub(in crate::daemon) struct Stream {
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
pub(in crate::daemon) struct Streamed {
    pub(in crate::daemon) image: String,
    pub(in crate::daemon) between: Vec<String>,
    pub(in crate::daemon) base: Option<String>,
    pub(in crate::daemon) backing_file: Option<String>,
    pub(in crate::daemon) policies: ErrorPolicies,
}

impl Stream {
    /// Prepares a stream.
    pub(in crate::daemon) async fn prepare(
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
        for node in &what.between {
            job_nodes.join(&job.settings, node, "intermediate node", none, Changes::ALL)?;
            job_nodes.keep_below(node, true)?;
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
                Some(_) => what.between.len() as u32,
                // The last one that is named may be a filter, which has layers below it.
                None => job_nodes.nodes.layers_below(&what.image),
            },
            parallel: PARALLEL,
        })
    }
}

impl Work for Stream {
    async fn run(&mut self, job: &Job) -> vellum::Result<CopyOutcome> {
        if self.between.is_empty() {
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
        self.stream.image.flush().await?;
        Ok(CopyOutcome::All)
    }

    async fn conclude(&mut self, _job: &Job) -> vellum::Result<()> {
        let (base, file) = (self.base.as_deref(), self.backing_file.take());
        self.job_nodes.nodes.rebase(&self.image, base, file).await
    }

    async fn leave(mut self) {
        // There is nothing to do about it: the image goes on being filtered in vain.
        let _ = self.job_nodes.nodes.insert_filter(&self.image, None).await;
        drop(self.stream);
        self.job_nodes.leave().await;
        self.job_nodes.nodes.drop_unused(&self.between).await;
    }
}

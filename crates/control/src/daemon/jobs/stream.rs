//! `block-stream`: an image is given what the layers below it hold.

use std::rc::Rc;

use crate::nodes::Changes;
use vellum::nodes::CopyOnRead;
use vellum_jobs::live::{Copied, LiveStream};

use super::{Job, PARALLEL, Stake, Teller, Work};

/// A stream.
pub(in crate::daemon) struct Stream {
    stake: Stake,
    image: String,
    /// The layers that are brought up.
    between: Vec<String>,
    /// What the image stands on in the end.
    base: Option<String>,
    /// What it is to call that.
    backing_file: Option<String>,
    stream: LiveStream,
}

/// What a stream is about.
#[derive(Debug)]
pub(in crate::daemon) struct Streamed {
    pub(in crate::daemon) image: String,
    pub(in crate::daemon) between: Vec<String>,
    pub(in crate::daemon) base: Option<String>,
    pub(in crate::daemon) backing_file: Option<String>,
}

impl Stream {
    /// Prepares a stream.
    pub(in crate::daemon) async fn prepare(
        mut stake: Stake,
        job: &Rc<Job>,
        what: Streamed,
    ) -> vellum::Result<Stream> {
        let prepared = Stream::try_prepare(&mut stake, job, &what).await;
        let stream = stake.or_leave(prepared).await?;
        Ok(Stream {
            stake,
            image: what.image,
            between: what.between,
            base: what.base,
            backing_file: what.backing_file,
            stream,
        })
    }

    async fn try_prepare(
        stake: &mut Stake,
        job: &Rc<Job>,
        what: &Streamed,
    ) -> vellum::Result<LiveStream> {
        // It changes what the image holds, and not what that shows.
        let none = Changes::NONE;
        stake.join(&job.settings, &what.image, "main node", none, Changes::SIZE)?;
        for node in &what.between {
            stake.join(&job.settings, node, "intermediate node", none, Changes::ALL)?;
        }
        stake.open(&what.image).await?;
        let image = stake.nodes.device(&what.image)?;
        let filter = CopyOnRead::fetching(image.clone());
        let front = filter.clone();
        stake.nodes.put_in_front(&what.image, Some(front)).await?;
        Ok(LiveStream {
            image,
            filter,
            layers: what.between.len() as u32,
            parallel: PARALLEL,
        })
    }
}

impl Work for Stream {
    async fn run(&mut self, job: &Job) -> vellum::Result<Copied> {
        if self.between.is_empty() {
            return Ok(Copied::All);
        }
        job.set_progress(0, self.stream.image.size_bytes());
        let mut teller = Teller { job, exact: false };
        self.stream.run(&job.reins, &mut teller).await
    }

    async fn conclude(&mut self, _job: &Job) -> vellum::Result<()> {
        let (base, file) = (self.base.as_deref(), self.backing_file.take());
        self.stake.nodes.rebase(&self.image, base, file).await
    }

    async fn leave(mut self) {
        // There is nothing to do about it: the image goes on being filtered in vain.
        let _ = self.stake.nodes.put_in_front(&self.image, None).await;
        drop(self.stream);
        self.stake.leave().await;
        self.stake.nodes.drop_unused(&self.between).await;
    }
}

//! Objects on their way to the store, a few at a time.

use std::collections::VecDeque;
use std::sync::Arc;

use vellum_io::executor::JoinHandle;
use vellum_io::{Result, spawn};

use crate::objects::Objects;

/// Objects on their way at once: of 16 MiB at most.
const MOST: usize = 8;

/// What was sent, and is being sent.
#[derive(Debug)]
pub(crate) struct Uploads {
    objects: Arc<dyn Objects>,
    running: VecDeque<JoinHandle<Result<()>>>,
    sent_bytes: u64,
}

impl Uploads {
    pub(crate) fn new(objects: Arc<dyn Objects>) -> Self {
        Uploads {
            objects,
            running: VecDeque::new(),
            sent_bytes: 0,
        }
    }

    /// Begins to send an object, when there are few enough.
    ///
    /// # Errors
    /// That of an earlier one.
    pub(crate) async fn send(&mut self, key: String, content: Vec<u8>) -> Result<()> {
        while self.running.len() >= MOST {
            self.wait_for_one().await?;
        }
        self.sent_bytes += content.len() as u64;
        let objects = self.objects.clone();
        let sent = async move { objects.put(&key, content).await };
        self.running.push_back(spawn(sent));
        Ok(())
    }

    async fn wait_for_one(&mut self) -> Result<()> {
        match self.running.pop_front() {
            Some(running) => running.await,
            None => Ok(()),
        }
    }

    /// Waits until all are there; says how many bytes they have.
    ///
    /// # Errors
    /// If one is not.
    pub(crate) async fn finish(&mut self) -> Result<u64> {
        while !self.running.is_empty() {
            self.wait_for_one().await?;
        }
        Ok(self.sent_bytes)
    }
}

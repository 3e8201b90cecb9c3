//! A place in an object store, as repositories want it.

use std::ops::Range;

use vellum::Result;
use vellum_io::Io;
use vellum_remote::{Bucket, ObjectOptions};
use vellum_repository::{ObjectInfo, Objects};

#[derive(Debug)]
pub(super) struct BucketObjects(Bucket);

impl BucketObjects {
    pub(super) fn new(options: &ObjectOptions) -> Result<Self> {
        Bucket::new(options).map(BucketObjects)
    }

    fn ask<T: 'static, F>(&self, key: &str, ask: impl FnOnce(Bucket, String) -> F) -> Io<T>
    where
        F: Future<Output = Result<T>> + 'static,
    {
        Io::start(ask(self.0.clone(), key.to_owned()))
    }
}

impl Objects for BucketObjects {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn get(&self, key: &str, limit_bytes: u64) -> Io<Vec<u8>> {
        self.ask(key, move |bucket, key| async move {
            bucket.get(&key, limit_bytes).await
        })
    }

    fn get_range(&self, key: &str, range: Range<u64>) -> Io<Vec<u8>> {
        self.ask(key, move |bucket, key| async move {
            bucket.get_range(&key, range).await
        })
    }

    fn put(&self, key: &str, content: Vec<u8>) -> Io<()> {
        self.ask(key, move |bucket, key| async move {
            bucket.put(&key, content).await
        })
    }

    fn put_new(&self, key: &str, content: Vec<u8>) -> Io<bool> {
        self.ask(key, move |bucket, key| async move {
            bucket.put_new(&key, content).await
        })
    }

    fn list(&self, prefix: &str) -> Io<Vec<ObjectInfo>> {
        self.ask(prefix, |bucket, prefix| async move {
            let listed = bucket.list(&prefix).await?.into_iter();
            let listed = listed.map(|object| ObjectInfo {
                key: object.key,
                len_bytes: object.len_bytes,
                changed_seconds: object.changed_seconds,
            });
            Ok(listed.collect())
        })
    }

    fn remove(&self, key: &str) -> Io<()> {
        self.ask(key, |bucket, key| async move { bucket.remove(&key).await })
    }
}

//! A storage whose requests a policy looks at first.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use vellum_io::buffer::total_len;
use vellum_io::{Buffers, Io};

use crate::{Storage, StorageExtent, WriteFlags, ZeroFlags, delegate};

/// What a request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    /// [`Storage::read`].
    Read,
    /// [`Storage::write`].
    Write,
    /// [`Storage::write_zeroes`].
    WriteZeroes,
    /// [`Storage::discard`].
    Discard,
    /// [`Storage::allocate`].
    Allocate,
    /// [`Storage::flush`].
    Flush,
    /// [`Storage::truncate`]; the new length is the call's offset.
    Truncate,
    /// [`Storage::block_status`].
    BlockStatus,
}

/// One request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call {
    /// What it does.
    pub operation: Operation,
    /// Where its range starts.
    pub offset_bytes: u64,
    /// How long its range is.
    pub len_bytes: u64,
    /// Durable on completion.
    pub fua: bool,
}

/// Which requests are meant.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Matching {
    operation: Option<Operation>,
    range: Option<Range<u64>>,
}

impl Matching {
    /// Every request.
    pub fn any() -> Self {
        Self::default()
    }

    /// Requests of one kind.
    pub fn operation(operation: Operation) -> Self {
        Matching {
            operation: Some(operation),
            range: None,
        }
    }

    /// Of these, only requests that touch a part of `range`.
    #[must_use]
    pub fn touching(mut self, range: Range<u64>) -> Self {
        self.range = Some(range);
        self
    }

    /// Whether `call` is meant.
    pub fn accepts(&self, call: &Call) -> bool {
        let kind = self
            .operation
            .is_none_or(|operation| operation == call.operation);
        let place = self.range.as_ref().is_none_or(|range| {
            call.offset_bytes < range.end && range.start < call.offset_bytes + call.len_bytes
        });
        kind && place
    }
}

/// What a wrapper does with requests. Tests may have policies of their own.
pub trait Policy: Send + Sync + fmt::Debug + 'static {
    /// Handles one request; `start` starts it on the storage below.
    fn handle<T: 'static>(&self, call: Call, start: impl FnOnce() -> Io<T> + 'static) -> Io<T>;

    /// As [`Storage::free_bytes`]; `None`, the default: what the storage below says.
    fn free_bytes(&self) -> Option<u64> {
        None
    }
}

/// A storage with a policy in front of its requests.
#[derive(Debug)]
pub struct Wrapped<P> {
    inner: Arc<dyn Storage>,
    pub(crate) policy: P,
}

impl<P: Policy + Default> Wrapped<P> {
    /// Wraps `inner`; at first every request passes.
    pub fn new(inner: Arc<dyn Storage>) -> Arc<Self> {
        Arc::new(Wrapped {
            inner,
            policy: P::default(),
        })
    }
}

impl<P: Policy> Wrapped<P> {
    fn handle<T: 'static>(
        &self,
        operation: Operation,
        range: (u64, u64),
        fua: bool,
        start: impl FnOnce(&dyn Storage) -> Io<T> + 'static,
    ) -> Io<T> {
        let call = Call {
            operation,
            offset_bytes: range.0,
            len_bytes: range.1,
            fua,
        };
        let inner = self.inner.clone();
        self.policy.handle(call, move || start(&*inner))
    }
}

impl<P: Policy> Storage for Wrapped<P> {
    delegate!(inner: capabilities, name, len_bytes, modified_at, allocated_bytes, close);

    fn free_bytes(&self) -> Io<Option<u64>> {
        match self.policy.free_bytes() {
            None => self.inner.free_bytes(),
            told => Io::ready(Ok(told)),
        }
    }

    fn read(&self, offset_bytes: u64, buffers: Buffers) -> Io<Buffers> {
        let range = (offset_bytes, total_len(&buffers));
        self.handle(Operation::Read, range, false, move |inner| {
            inner.read(offset_bytes, buffers)
        })
    }

    fn write(&self, offset_bytes: u64, buffers: Buffers, flags: WriteFlags) -> Io<Buffers> {
        let range = (offset_bytes, total_len(&buffers));
        self.handle(Operation::Write, range, flags.fua, move |inner| {
            inner.write(offset_bytes, buffers, flags)
        })
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, flags: ZeroFlags) -> Io<()> {
        let range = (offset_bytes, len_bytes);
        self.handle(Operation::WriteZeroes, range, flags.fua, move |inner| {
            inner.write_zeroes(offset_bytes, len_bytes, flags)
        })
    }

    fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        self.handle(
            Operation::Discard,
            (offset_bytes, len_bytes),
            false,
            move |inner| inner.discard(offset_bytes, len_bytes),
        )
    }

    fn allocate(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        self.handle(
            Operation::Allocate,
            (offset_bytes, len_bytes),
            false,
            move |inner| inner.allocate(offset_bytes, len_bytes),
        )
    }

    fn flush(&self) -> Io<()> {
        self.handle(Operation::Flush, (0, 0), false, |inner| inner.flush())
    }

    fn truncate(&self, len_bytes: u64) -> Io<()> {
        self.handle(Operation::Truncate, (len_bytes, 0), false, move |inner| {
            inner.truncate(len_bytes)
        })
    }

    fn block_status(&self, offset_bytes: u64, len_bytes: u64) -> Io<StorageExtent> {
        self.handle(
            Operation::BlockStatus,
            (offset_bytes, len_bytes),
            false,
            move |inner| inner.block_status(offset_bytes, len_bytes),
        )
    }
}

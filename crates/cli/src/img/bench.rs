//! `bench`: a number of equal requests, and the time they take.
//!
//! The requests are made by as many tasks of this thread's lane as may be in
//! flight. A task lives from flush to flush (or to the end), so that a request
//! costs what the device makes of it and next to nothing here.

use std::cell::{Cell, RefCell};
use std::ffi::OsString;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use vellum::{BlockDevice, Buffer, Error, RequestFlags};
use vellum_graph::open_device;
use vellum_io::error::errno_text;
use vellum_io::{JoinHandle, lane, spawn};
use vellum_options::{Aio, CacheMode, OpenFlags};

use super::command::{
    Command, Failure, MAX_BYTES, Outcome, Subcommand, fail, not_taken, number, one_name,
    open_failure, size,
};
use super::rows::{CACHE, FORMAT, IMAGE_OPTS, SHARE};
use crate::report;
use crate::spec::{CommonArgs, Spec};

pub static BENCH: Subcommand = Subcommand {
    spec: Spec {
        name: "bench",
        about: "Time requests on an image",
        usage: "\
[-f FMT | --image-opts] [-t CACHE] [-c COUNT] [-d DEPTH]
        [-o OFFSET] [-s BUFFER_SIZE] [-S STEP_SIZE] [-i AIO] [-n]
        [-w [--pattern PATTERN] [--flush-interval INTERVAL [--no-drain]]]",
        arguments: &[
            "-q, --quiet  accepted and ignored",
            FORMAT,
            IMAGE_OPTS,
            CACHE,
            "-c, --count COUNT  requests to make (75000)",
            "-s, --buffer-size BUFFER_SIZE  size of a request (4k)",
            "-d, --depth DEPTH  requests in flight (64)",
            "-o, --offset OFFSET  where the first request begins (0)",
            "-S, --step-size STEP_SIZE  from one request to the next (BUFFER_SIZE)",
            "-i, --aio AIO  threads, native or io_uring",
            "-n, --native  the same as --aio native",
            "-w, --write  write; without it the requests are reads",
            "--pattern PATTERN  the byte to write (0)",
            "--flush-interval FLUSH_INTERVAL  flush after so many requests (with -w)",
            "--no-drain  go on while a flush runs",
            SHARE,
        ],
        closing: "The benchmark that tells what to choose for an image is 'vellum bench'.\n",
        examples: "\
vellum img bench -c 10000 -d 32 disk.qcow2
  10,000 reads in order, 32 at a time
",
        ..Spec::EMPTY
    },
    run,
};

/// The largest number that C's `int` holds, which is what QEMU counts with.
const MAX_INT: u64 = i32::MAX as u64;

#[derive(Debug)]
struct Arguments {
    common: CommonArgs,
    cache: CacheMode,
    count: u64,
    buffer_bytes: u64,
    depth: u64,
    offset_bytes: u64,
    /// 0: the size of a request.
    step_bytes: u64,
    aio: Option<Aio>,
    write: bool,
    pattern: u8,
    /// 0: no flushes.
    flush_interval: u64,
    drain: bool,
}

impl Default for Arguments {
    fn default() -> Self {
        Arguments {
            common: CommonArgs::default(),
            cache: CacheMode::default(),
            count: 75_000,
            buffer_bytes: 4096,
            depth: 64,
            offset_bytes: 0,
            step_bytes: 0,
            aio: None,
            write: false,
            pattern: 0,
            flush_interval: 0,
            drain: true,
        }
    }
}

fn run(command: Command<'_>, args: Vec<OsString>) -> Outcome {
    let mut arguments = Arguments::default();
    // QEMU takes `-q` and prints the same.
    arguments.common = command.parse(args, |name, value| arguments.take(name, value))?;
    let name = one_name(&arguments.common.operands)?.to_owned();
    if !arguments.write && arguments.flush_interval > 0 {
        return fail("--flush-interval is only available in write tests");
    }
    if arguments.flush_interval > 0 && arguments.flush_interval < arguments.depth {
        return fail("Flush interval can't be smaller than depth");
    }
    lane::block_on(bench(arguments, &name))
}

impl Arguments {
    fn take(&mut self, name: &str, value: String) -> Result<(), Failure> {
        match name {
            "cache" => match CacheMode::parse(&value) {
                Some(mode) => self.cache = mode,
                None => return fail("Invalid cache mode"),
            },
            "count" => self.count = number("request count", &value, 1, MAX_INT)?,
            "buffer-size" => self.buffer_bytes = size("buffer size", &value, 1, MAX_INT)?,
            "depth" => self.depth = number("queue depth", &value, 1, MAX_INT)?,
            "offset" => self.offset_bytes = size("offset", &value, 0, MAX_BYTES)?,
            "step-size" => self.step_bytes = size("step size", &value, 0, MAX_INT)?,
            "aio" => match Aio::parse(&value) {
                Some(aio) => self.aio = Some(aio),
                None => return fail(format!("Invalid aio option: {value}")),
            },
            "native" => self.aio = Some(Aio::Native),
            "write" => self.write = true,
            "pattern" => {
                let pattern = number("pattern byte", &value, 0, u8::MAX.into())?;
                self.pattern = pattern as u8;
            }
            "flush-interval" => {
                self.flush_interval = number("flush interval", &value, 0, MAX_INT)?;
            }
            "no-drain" => self.drain = false,
            _ => return not_taken(name),
        }
        Ok(())
    }

    fn announce(&self) {
        report::print_line(format_args!(
            "Sending {} {} requests, {} bytes each, {} in parallel (starting at offset {}, step \
             size {})",
            self.count,
            if self.write { "write" } else { "read" },
            self.buffer_bytes,
            self.depth,
            self.offset_bytes,
            self.step_bytes
        ));
        if self.flush_interval > 0 {
            report::print_line(format_args!(
                "Sending flush every {} requests",
                self.flush_interval
            ));
        }
    }

    /// How many requests are made before the first drained flush. The queue is
    /// filled at once in the beginning, past a flush that would come before that.
    fn first_batch(&self) -> u64 {
        if self.flush_interval == 0 || !self.drain {
            return self.count;
        }
        let first = match self.count % self.flush_interval {
            0 => self.flush_interval,
            rest if rest < self.depth => rest + self.flush_interval,
            rest => rest,
        };
        first.min(self.count)
    }
}

async fn bench(mut arguments: Arguments, name: &str) -> Outcome {
    let spec = arguments.common.image(name)?;
    let flags = OpenFlags {
        writable: arguments.write,
        cache: arguments.cache,
        aio: arguments.aio,
        force_share: arguments.common.force_share,
        ..OpenFlags::default()
    };
    let opened = open_device(&spec, &flags).await;
    let device = opened.map_err(|error| open_failure(name, &error))?;
    if arguments.step_bytes == 0 {
        arguments.step_bytes = arguments.buffer_bytes;
    }
    arguments.announce();
    let run = Run::new(device.clone(), arguments);
    let start = Instant::now();
    let done = run.all().await;
    let taken = start.elapsed();
    run.late_flushes().await;
    let closed = device.close().await;
    if let Some(failure) = done.err().or(run.late_failure.take()) {
        return Err(failure);
    }
    report::print_line(format_args!(
        "Run completed in {:.3} seconds.",
        taken.as_secs_f64()
    ));
    closed?;
    Ok(0)
}

/// What the tasks share.
struct Run {
    device: Arc<dyn BlockDevice>,
    arguments: Arguments,
    size_bytes: u64,
    next_offset_bytes: Cell<u64>,
    /// Requests not yet made, in all and up to the next drained flush.
    left: Cell<u64>,
    left_in_batch: Cell<u64>,
    /// Flushes that nothing waits for.
    flushes: RefCell<Vec<JoinHandle<Result<(), Error>>>>,
    late_failure: Cell<Option<Failure>>,
}

fn request_failure(error: &Error) -> Failure {
    report::about_cause(error);
    Failure::Message(format!("Failed request: {}", errno_text(error.errno())))
}

impl Run {
    fn new(device: Arc<dyn BlockDevice>, arguments: Arguments) -> Rc<Run> {
        Rc::new(Run {
            size_bytes: device.size_bytes(),
            next_offset_bytes: Cell::new(arguments.offset_bytes),
            left: Cell::new(arguments.count),
            left_in_batch: Cell::new(0),
            flushes: RefCell::default(),
            late_failure: Cell::new(None),
            device,
            arguments,
        })
    }

    async fn all(self: &Rc<Self>) -> Result<(), Failure> {
        let mut batch = self.arguments.first_batch();
        while self.left.get() > 0 {
            self.left_in_batch.set(batch);
            self.batch(batch).await?;
            if self.arguments.flush_interval > 0 && self.arguments.drain {
                let flushed = self.device.flush().await;
                flushed.map_err(|error| {
                    Failure::Message(format!(
                        "Failed to issue flush request: {}",
                        errno_text(error.errno())
                    ))
                })?;
            }
            batch = self.arguments.flush_interval.min(self.left.get());
        }
        Ok(())
    }

    /// Makes the requests up to the next drained flush, or all.
    async fn batch(self: &Rc<Self>, count: u64) -> Result<(), Failure> {
        let tasks = self.arguments.depth.min(count);
        let tasks: Vec<_> = (0..tasks).map(|_| spawn(self.clone().requests())).collect();
        let mut result = Ok(());
        for task in tasks {
            // Those in flight end before the first failure is told.
            result = result.and(task.await);
        }
        result
    }

    /// Makes one request after another.
    async fn requests(self: Rc<Self>) -> Result<(), Failure> {
        let len_bytes = self.arguments.buffer_bytes as usize;
        let mut buffer = match self.arguments.write {
            true => {
                let mut buffer = Buffer::for_read(len_bytes);
                buffer.fill(self.arguments.pattern);
                buffer
            }
            false => Buffer::for_read(len_bytes),
        };
        while let Some(offset_bytes) = self.next_offset() {
            let end_bytes = offset_bytes.checked_add(self.arguments.buffer_bytes);
            if end_bytes.is_none_or(|end| end > self.size_bytes) {
                self.give_up();
                return fail("Failed request: Input/output error");
            }
            let io = match self.arguments.write {
                true => self
                    .device
                    .write(offset_bytes, buffer, RequestFlags::default()),
                false => self.device.read(offset_bytes, buffer),
            };
            buffer = io.await.map_err(|error| {
                self.give_up();
                request_failure(&error)
            })?;
            self.flush_without_draining();
        }
        Ok(())
    }

    fn next_offset(&self) -> Option<u64> {
        let in_batch = self.left_in_batch.get().checked_sub(1)?;
        self.left_in_batch.set(in_batch);
        self.left.set(self.left.get() - 1);
        let offset_bytes = self.next_offset_bytes.get();
        let next = offset_bytes.saturating_add(self.arguments.step_bytes);
        self.next_offset_bytes
            .set(next.checked_rem(self.size_bytes).unwrap_or(0));
        Some(offset_bytes)
    }

    /// Makes no more requests.
    fn give_up(&self) {
        self.left.set(0);
        self.left_in_batch.set(0);
    }

    fn flush_without_draining(&self) {
        let arguments = &self.arguments;
        if arguments.drain
            || arguments.flush_interval == 0
            || !self.left.get().is_multiple_of(arguments.flush_interval)
        {
            return;
        }
        let device = self.device.clone();
        let flush = spawn(async move { device.flush().await });
        self.flushes.borrow_mut().push(flush);
    }

    /// Waits for the flushes that nothing waited for.
    async fn late_flushes(&self) {
        for flush in self.flushes.take() {
            if let Err(error) = flush.await {
                self.late_failure.set(Some(request_failure(&error)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drained_flushes_come_where_qemus_do() {
        let first = |count, depth, flush_interval, drain| {
            Arguments {
                count,
                depth,
                flush_interval,
                drain,
                ..Arguments::default()
            }
            .first_batch()
        };
        assert_eq!(first(10, 4, 0, true), 10, "no flushes");
        assert_eq!(first(10, 4, 5, false), 10, "nothing is drained");
        assert_eq!(first(10, 4, 5, true), 5);
        assert_eq!(first(14, 4, 5, true), 4);
        assert_eq!(first(12, 4, 5, true), 7, "filling the queue passes it");
        assert_eq!(first(3, 4, 5, true), 3);
    }
}

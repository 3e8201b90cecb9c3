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
    Command, Failure, MAX_BYTES, Outcome, fail, image_spec, number, one_name, open_failure, size,
};
use super::help;
use crate::getopt::{OptionSpec, Shape, Takes, shapes};
use crate::report;

#[derive(Debug, Clone, Copy)]
enum Opt {
    Help,
    Quiet,
    Format,
    ImageOpts,
    Cache,
    Count,
    Size,
    Depth,
    Offset,
    Step,
    Aio,
    Native,
    Write,
    Pattern,
    FlushInterval,
    NoDrain,
    ForceShare,
}

const OPTIONS: &[OptionSpec<Opt>] = &[
    OptionSpec::new(Opt::Help, 'h', "help", Takes::Nothing),
    OptionSpec::new(Opt::Quiet, 'q', "quiet", Takes::Nothing),
    OptionSpec::new(Opt::Format, 'f', "format", Takes::Value),
    OptionSpec::long(Opt::ImageOpts, "image-opts", Takes::Nothing),
    OptionSpec::new(Opt::Cache, 't', "cache", Takes::Value),
    OptionSpec::new(Opt::Count, 'c', "count", Takes::Value),
    OptionSpec::new(Opt::Size, 's', "buffer-size", Takes::Value),
    OptionSpec::new(Opt::Depth, 'd', "depth", Takes::Value),
    OptionSpec::new(Opt::Offset, 'o', "offset", Takes::Value),
    OptionSpec::new(Opt::Step, 'S', "step-size", Takes::Value),
    OptionSpec::new(Opt::Aio, 'i', "aio", Takes::Value),
    OptionSpec::new(Opt::Native, 'n', "native", Takes::Nothing),
    OptionSpec::new(Opt::Write, 'w', "write", Takes::Nothing),
    OptionSpec::long(Opt::Pattern, "pattern", Takes::Value),
    OptionSpec::long(Opt::FlushInterval, "flush-interval", Takes::Value),
    OptionSpec::long(Opt::NoDrain, "no-drain", Takes::Nothing),
    OptionSpec::new(Opt::ForceShare, 'U', "force-share", Takes::Nothing),
];

/// The options, as completions and manuals show them.
pub fn options() -> Vec<Shape> {
    shapes(OPTIONS)
}

/// The largest number that C's `int` holds, which is what QEMU counts with.
const MAX_INT: u64 = i32::MAX as u64;

#[derive(Debug)]
struct Arguments {
    format: Option<String>,
    image_opts: bool,
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
    force_share: bool,
}

impl Default for Arguments {
    fn default() -> Self {
        Arguments {
            format: None,
            image_opts: false,
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
            force_share: false,
        }
    }
}

pub fn run(command: Command<'_>, args: Vec<OsString>) -> Outcome {
    let mut arguments = Arguments::default();
    let mut parser = command.parser(OPTIONS, args);
    while let Some((option, value)) = parser.next_option()? {
        if let Opt::Help = option {
            return help::subcommand(command);
        }
        arguments.take(option, value.unwrap_or_default())?;
    }
    let operands = parser.operands();
    let name = one_name(&operands)?;
    if !arguments.write && arguments.flush_interval > 0 {
        return fail("--flush-interval is only available in write tests");
    }
    if arguments.flush_interval > 0 && arguments.flush_interval < arguments.depth {
        return fail("Flush interval can't be smaller than depth");
    }
    lane::block_on(bench(arguments, name))
}

impl Arguments {
    fn take(&mut self, option: Opt, value: String) -> Result<(), Failure> {
        match option {
            // QEMU takes `-q` and prints the same.
            Opt::Help | Opt::Quiet => {}
            Opt::Format => self.format = Some(value),
            Opt::ImageOpts => self.image_opts = true,
            Opt::Cache => match CacheMode::parse(&value) {
                Some(mode) => self.cache = mode,
                None => return fail("Invalid cache mode"),
            },
            Opt::Count => self.count = number("request count", &value, 1, MAX_INT)?,
            Opt::Size => self.buffer_bytes = size("buffer size", &value, 1, MAX_INT)?,
            Opt::Depth => self.depth = number("queue depth", &value, 1, MAX_INT)?,
            Opt::Offset => self.offset_bytes = size("offset", &value, 0, MAX_BYTES)?,
            Opt::Step => self.step_bytes = size("step size", &value, 0, MAX_INT)?,
            Opt::Aio => match Aio::parse(&value) {
                Some(aio) => self.aio = Some(aio),
                None => return fail(format!("Invalid aio option: {value}")),
            },
            Opt::Native => self.aio = Some(Aio::Native),
            Opt::Write => self.write = true,
            Opt::Pattern => {
                let pattern = number("pattern byte", &value, 0, u8::MAX.into())?;
                self.pattern = pattern as u8;
            }
            Opt::FlushInterval => {
                self.flush_interval = number("flush interval", &value, 0, MAX_INT)?;
            }
            Opt::NoDrain => self.drain = false,
            Opt::ForceShare => self.force_share = true,
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
    let spec = image_spec(name, arguments.image_opts, arguments.format.as_deref())?;
    let flags = OpenFlags {
        writable: arguments.write,
        cache: arguments.cache,
        aio: arguments.aio,
        force_share: arguments.force_share,
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

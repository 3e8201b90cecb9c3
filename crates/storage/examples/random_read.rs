//! Measures random reads of a file, as `fio` with its io_uring engine does:
//!
//! ```text
//! random_read FILE [--depth N] [--seconds N] [--block-bytes N] [--buffered] [--threads]
//! ```
//!
//! Prints operations a second and the CPU time an operation.

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use vellum_io::lane::{self, Backend, LaneOptions};
use vellum_io::{Buffer, Buffers, Result, spawn};
use vellum_storage::{FileOptions, FileStorage, Storage};

struct Arguments {
    path: String,
    depth: u64,
    seconds: u64,
    block_bytes: u64,
    direct: bool,
    backend: Backend,
}

fn parse() -> Option<Arguments> {
    let mut parsed = Arguments {
        path: String::new(),
        depth: 32,
        seconds: 5,
        block_bytes: 4096,
        direct: true,
        backend: Backend::IoUring,
    };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--depth" => parsed.depth = arguments.next()?.parse().ok()?,
            "--seconds" => parsed.seconds = arguments.next()?.parse().ok()?,
            "--block-bytes" => parsed.block_bytes = arguments.next()?.parse().ok()?,
            "--buffered" => parsed.direct = false,
            "--threads" => parsed.backend = Backend::Threads,
            _ if parsed.path.is_empty() => parsed.path = argument,
            _ => return None,
        }
    }
    (!parsed.path.is_empty()).then_some(parsed)
}

/// Reads random blocks one after another until the time is over; returns how many.
async fn reader(
    file: std::sync::Arc<FileStorage>,
    blocks: u64,
    block_bytes: u64,
    mut random: fastrand::Rng,
    over: Rc<Cell<bool>>,
) -> Result<u64> {
    let mut count = 0;
    while !over.get() {
        let buffers = Buffers::from_buf([Buffer::for_read(block_bytes as usize)]);
        file.read(random.u64(..blocks) * block_bytes, buffers)
            .await?;
        count += 1;
    }
    Ok(count)
}

/// CPU time of this process so far.
fn cpu_time() -> Duration {
    // SAFETY: plain old data, for which zero bytes are a value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: a live local.
    unsafe { libc::getrusage(libc::RUSAGE_SELF, &mut usage) };
    let time = |t: libc::timeval| Duration::new(t.tv_sec as u64, t.tv_usec as u32 * 1000);
    time(usage.ru_utime) + time(usage.ru_stime)
}

fn main() -> Result<()> {
    let Some(arguments) = parse() else {
        eprintln!(
            "usage: random_read FILE [--depth N] [--seconds N] [--block-bytes N] [--buffered] [--threads]"
        );
        std::process::exit(2);
    };
    lane::install(&LaneOptions {
        backend: arguments.backend,
        ..LaneOptions::default()
    })?;
    let options = FileOptions::default()
        .read_only(true)
        .direct(arguments.direct);
    let file = FileStorage::open(&arguments.path, &options)?;
    let blocks = file.len_bytes()? / arguments.block_bytes;
    let (start, cpu) = (Instant::now(), cpu_time());
    let count = lane::block_on(async {
        let over = Rc::new(Cell::new(false));
        let readers: Vec<_> = (1..=arguments.depth)
            .map(|n| {
                spawn(reader(
                    file.clone(),
                    blocks,
                    arguments.block_bytes,
                    fastrand::Rng::with_seed(n),
                    over.clone(),
                ))
            })
            .collect();
        lane::sleep(Duration::from_secs(arguments.seconds)).await;
        over.set(true);
        let mut count = 0;
        for reader in readers {
            count += reader.await?;
        }
        Ok::<_, vellum_io::Error>(count)
    })?;
    let (time, cpu) = (start.elapsed(), cpu_time() - cpu);
    println!(
        "depth {}: {:.0} reads/s, {:.2} us CPU each",
        arguments.depth,
        count as f64 / time.as_secs_f64(),
        cpu.as_secs_f64() * 1e6 / count as f64
    );
    Ok(())
}

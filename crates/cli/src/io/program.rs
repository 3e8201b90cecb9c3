//! `vellum io`, and `qemu-io`: the command.

use std::ffi::OsString;

use vellum_io::lane::{self, Backend, LaneOptions};
use vellum_options::Aio;

use crate::report;

use super::{options, session};

/// Runs the tool; `program` is the name it was called by.
pub fn main(program: &str, arguments: Vec<OsString>) -> i32 {
    let options = match options::parse(program, arguments) {
        Ok(options) => options,
        Err(code) => return code,
    };
    if let Err(error) = install_lane(options.flags.aio) {
        return report::fail(&error);
    }
    lane::block_on(session::run(program, options))
}

/// Linux AIO is served by io_uring; only threads have to be asked for.
fn install_lane(aio: Option<Aio>) -> vellum::Result<()> {
    let backend = match aio {
        Some(Aio::Threads) => Backend::Threads,
        Some(Aio::Native | Aio::IoUring) | None => Backend::Auto,
    };
    lane::install(&LaneOptions {
        backend,
        ..LaneOptions::default()
    })
}

//! `break`, `remove_break`, `resume` and `wait_break`: breakpoints of the image's `blkdebug` node,
//! which suspend requests.

use std::sync::Arc;

use vellum_io::error::errno_text;
use vellum_storage::Event;
use vellum_storage::nodes::debug::{Debugger, HasDebugger};

use super::image::Image;
use super::outcome::{Failed, Outcome};
use crate::report;

/// Runs the command called `name`.
pub async fn run(image: &Image, name: &str, words: &[&str]) -> Outcome {
    let first = words.first().copied().unwrap_or_default();
    let debugger = debugger(image);
    let result = match name {
        "break" => set(debugger, first, words.get(1).copied().unwrap_or_default()),
        "remove_break" => found(debugger, |debugger| debugger.remove_breakpoints(first)),
        "resume" => found(debugger, |debugger| debugger.resume(first)),
        _ => {
            // QEMU waits for ever where nothing can be held.
            let Some(debugger) = debugger else {
                return refuse("wait for breakpoint", libc::ENOTSUP);
            };
            debugger.wait_suspended(first).await;
            return Ok(());
        }
    };
    let Err(errno) = result else {
        return Ok(());
    };
    match name {
        "break" => refuse("set breakpoint", errno),
        "remove_break" => refuse(&format!("remove breakpoint {first}"), errno),
        _ => refuse("resume request", errno),
    }
}

/// The debugger of the first node below the image that has one.
fn debugger(image: &Image) -> Option<Arc<Debugger>> {
    image.device().storage()?.debugger()
}

fn set(debugger: Option<Arc<Debugger>>, event: &str, tag: &str) -> Result<(), i32> {
    let debugger = debugger.ok_or(libc::ENOTSUP)?;
    let event = Event::parse(event).ok_or(libc::ENOENT)?;
    debugger.set_breakpoint(event, tag);
    Ok(())
}

fn found(debugger: Option<Arc<Debugger>>, act: impl FnOnce(&Debugger) -> bool) -> Result<(), i32> {
    match act(&*debugger.ok_or(libc::ENOTSUP)?) {
        true => Ok(()),
        false => Err(libc::ENOENT),
    }
}

fn refuse(what: &str, errno: i32) -> Outcome {
    report::print_line(format_args!("Could not {what}: {}", errno_text(errno)));
    Err(Failed)
}

//! `vellum inspect`: what is in this image, for a person.
//!
//! `gather` collects the facts (`growth` by comparing samples of an overlay with what lies
//! below it), `advice` draws conclusions from them, and `text`, `json` and `html` show both;
//! `picture` makes the map of few cells that these draw.
//!
//! Invariants:
//! - Images are opened for reading only.
//! - Memory does not grow with the image, but for a few bits for each cluster of the file.
//! - Advice follows from what was counted; what is estimated says so.

mod advice;
mod arguments;
mod gather;
mod growth;
mod html;
mod json;
mod picture;
mod text;

use std::ffi::OsString;

use vellum_io::lane;

use crate::output::Output;
use crate::{hint, report};
use arguments::Arguments;

pub use arguments::{EXPLAINS, HELP, options};

/// Runs the tool and returns its exit code.
pub fn main(program: &str, args: Vec<OsString>) -> i32 {
    let arguments = match Arguments::parse(args) {
        Ok(arguments) => arguments,
        Err(message) => {
            report::error(&message);
            hint::about_option(message, &options());
            report::eprint_line(&format!("Try '{program} inspect --help' for more info"));
            return 1;
        }
    };
    if arguments.help {
        report::print(arguments::help(program));
        return 0;
    }
    match run(program, &arguments) {
        Ok(()) => 0,
        Err(message) => {
            report::error(message);
            1
        }
    }
}

fn run(program: &str, arguments: &Arguments) -> Result<(), String> {
    if let Some(page) = &arguments.html {
        crate::html_page::check_target(page)?;
    }
    let facts = lane::block_on(gather::gather(program, arguments))?;
    let advice = advice::advise(&facts);
    if let Some(page) = &arguments.html {
        html::write(page, &facts, &advice)?;
    }
    match arguments.output {
        Output::Json => report::print_line(format_args!("{:#}", json::value(&facts, &advice))),
        Output::Human => report::print(text::page(&facts, &advice)),
    }
    Ok(())
}

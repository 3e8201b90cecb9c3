//! `vellum inspect`: the command.

use std::ffi::OsString;

use vellum_io::lane;

use crate::output::Output;
use crate::{hint, report};

use super::arguments::{self, Arguments, options};
use super::{advice, gather, html, json, text};

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

pub(crate) fn run(program: &str, arguments: &Arguments) -> Result<(), String> {
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

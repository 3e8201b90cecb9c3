//! `vellum inspect`: the command.

use std::ffi::OsString;

use vellum_io::lane;

use crate::output::Output;
use crate::{report, spec};

use super::arguments::{Arguments, SPEC};
use super::{advice, gather, html, json, text};

/// Runs the tool and returns its exit code.
pub fn main(program: &str, args: Vec<OsString>) -> i32 {
    spec::run(&SPEC, Arguments::parse(args), |arguments| {
        run(program, &arguments)
    })
}

pub(crate) fn run(program: &str, arguments: &Arguments) -> Result<i32, String> {
    if let Some(page) = &arguments.html {
        crate::html_page::check_target(page)?;
    }
    let facts = lane::block_on(gather::gather(program, arguments))?;
    let advice = advice::advise(&facts);
    if let Some(page) = &arguments.html {
        html::write(page, &facts, &advice)?;
    }
    match arguments.common.output {
        Output::Json => report::print_line(format_args!("{:#}", json::value(&facts, &advice))),
        Output::Human => report::print(text::page(&facts, &advice)),
    }
    Ok(0)
}

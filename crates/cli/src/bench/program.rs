//! `vellum bench`: the command, and what is measured in which order.

use std::ffi::OsString;
use std::io::Write;

use vellum_io::error::io_text;
use vellum_io::lane;

use crate::output::Output;
use crate::size::human;
use crate::{local, spec};

use super::arguments::{Arguments, SPEC, Topic};
use super::failure::Failure;
use super::progress::Progress;
use super::result::{About, Report};
use super::run::{Bench, Target};
use super::scratch::{Interrupt, Scratch};
use super::survey::Survey;
use super::{html, images, json, plan, reading, tables};

/// The exit code after Ctrl-C, as a shell has it.
const INTERRUPTED: i32 = 130;

/// Room beyond the images for what a file system needs of its own.
const SPARE_BYTES: u64 = 64 << 20;

/// Runs the tool and returns its exit code.
pub fn main(_program: &str, args: Vec<OsString>) -> i32 {
    spec::run(&SPEC, Arguments::parse(args), |arguments| {
        match run(&arguments) {
            Ok(()) => Ok(0),
            Err(Failure::Interrupted) => Ok(INTERRUPTED),
            Err(Failure::Message(message)) => Err(message),
        }
    })
}

fn run(arguments: &Arguments) -> Result<(), Failure> {
    if let Some(page) = &arguments.html {
        crate::html_page::check_target(page).map_err(Failure::Message)?;
    }
    let interrupt = Interrupt::catch()?;
    let result = lane::block_on(measure(arguments, interrupt))?;
    if let Some(page) = &arguments.html {
        html::write(page, &result)?;
    }
    match arguments.common.output {
        Output::Json => show(&json::text(&result)),
        Output::Human => show(&tables::ending(&result, arguments.html.as_deref())),
    }
}

/// Prints on standard output. A reader that has gone is an error like any other:
/// the folder has to be removed first.
pub(crate) fn show(text: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    let shown = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    shown.or_else(|error| Failure::message(format!("Cannot print: {}", io_text(&error))))
}

pub(crate) async fn measure(
    arguments: &Arguments,
    interrupt: Interrupt,
) -> Result<Report, Failure> {
    if let Some(message) = arguments.image.as_deref().and_then(local::refusal) {
        return Failure::message(message);
    }
    let (target, tables, about) = match &arguments.image {
        Some(name) => examine(arguments, name, &interrupt).await?,
        None => set_up(arguments).await?,
    };
    let live = arguments.common.output == Output::Human;
    if live {
        show(&tables::beginning(&about))?;
    }
    let rows = tables.iter().map(|table| table.rows.len()).sum::<usize>();
    let progress = Progress::new(arguments.common.quiet, rows * arguments.effort.rounds);
    let mut bench = Bench {
        target,
        effort: arguments.effort,
        interrupt,
    };
    bench.prepare(&tables, &progress).await?;
    progress.begin();
    let mut results = Vec::new();
    for table in tables {
        let measured = bench.measure(table, &progress).await?;
        if live {
            progress.hide(|| show(&tables::table(&measured)))?;
        }
        results.push(measured);
    }
    progress.end();
    let mut reading = reading::read(&results);
    match bench.target {
        Target::Made { scratch, .. } => scratch.remove()?,
        Target::Given(survey) => {
            let used = reading::used(survey.used_l2_bytes, survey.metadata.l2_bytes);
            reading.insert(0, used);
        }
    }
    Ok(Report {
        about,
        tables: results,
        reading,
    })
}

type Setting = (Target, Vec<plan::Table>, About);

pub(crate) fn about(arguments: &Arguments, size_bytes: u64, subject: String) -> About {
    let effort = &arguments.effort;
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    About {
        subject,
        image: arguments.image.clone(),
        directory: None,
        size_bytes,
        depth: effort.depth,
        topics: arguments.topics.clone(),
        seconds: match arguments.topics.as_slice() {
            [Topic::Journal] => effort.sustained.seconds,
            _ => effort.seconds,
        },
        rounds: effort.rounds,
        seed: effort.seed,
        cpus: std::thread::available_parallelism().map_or(1, usize::from),
        kernel: kernel.trim().to_owned(),
        direct: true,
        notes: Vec::new(),
    }
}

const NOT_DIRECT: &str = "The file system has no direct I/O: these figures are those of the \
                          host's page cache, not of a disk.";

async fn examine(
    arguments: &Arguments,
    name: &str,
    interrupt: &Interrupt,
) -> Result<Setting, Failure> {
    let survey = Survey::make(arguments, name, interrupt).await?;
    let subject = format!("{name} ({})", human(survey.size_bytes));
    let mut about = about(arguments, survey.size_bytes, subject);
    about.direct = survey.is_direct();
    about.notes.clone_from(&survey.notes);
    if !about.direct {
        about.notes.push(NOT_DIRECT.into());
    }
    let tables = plan::given(&arguments.topics, survey.metadata);
    Ok((Target::Given(Box::new(survey)), tables, about))
}

async fn set_up(arguments: &Arguments) -> Result<Setting, Failure> {
    let effort = &arguments.effort;
    let size_bytes = effort.size_bytes;
    let needed_bytes = plan::needed_bytes(&arguments.topics, effort) + SPARE_BYTES;
    let scratch = Scratch::new(&arguments.directory, needed_bytes)?;
    let probe = scratch.path("probe");
    images::make(&probe, "raw", 1 << 20, "").await?;
    let direct = images::can_be_direct(&probe).await;
    let directory = std::fs::canonicalize(&arguments.directory);
    let directory = directory.unwrap_or_else(|_| arguments.directory.clone());
    let directory = directory.display().to_string();
    let subject = format!("images of {} in {directory}", human(size_bytes));
    let mut about = about(arguments, size_bytes, subject);
    about.directory = Some(directory);
    about.direct = direct;
    if !direct {
        about.notes.push(NOT_DIRECT.into());
    }
    let target = Target::Made {
        scratch,
        full: None,
        direct,
    };
    Ok((target, plan::made(&arguments.topics, effort), about))
}

//! `receive`: applies a stream from standard input to a disk.

use std::ffi::OsString;
use std::fs::File;
use std::io::{IsTerminal, Read};
use std::os::fd::AsFd;
use std::sync::Arc;

use vellum::BlockDevice;
use vellum_format::stream::{Header, PRELUDE_BYTES};
use vellum_io::error::io_text;
use vellum_io::lane;
use vellum_jobs::transfer::{Input, ReceiveError, ReceiveOptions, receive};
use vellum_options::CacheMode;
use vellum_options::create_options::asks_for_help;

use super::super::command::{
    Command, Failure, Outcome, Subcommand, cache_mode, fail, install_bulk_lane, not_taken, number,
    one_name,
};
use super::super::create::{add_options, print_option_help};
use super::super::rows::{OBJECT, PROGRESS, QUIET};
use super::state::{State, partial};
use super::target::{TargetOptions, ready, refuse_in_use};
use super::{id_text, widen};
use crate::progress::Progress;
use crate::size::human;
use crate::spec::{CommonArgs, Spec};
use crate::{hint, local, report};

pub static RECEIVE: Subcommand = Subcommand {
    spec: Spec {
        name: "receive",
        about: "Apply what 'send' has written to a disk",
        usage: "\
[-O FMT] [-o OPTIONS] [-n] [--force] [-t CACHE] [-m NUM_COROUTINES] [-p] [-q]
        [--object OBJDEF] DISK < STREAM
        [--resume-token | --token] DISK",
        arguments: &[
            QUIET,
            PROGRESS,
            "-O, --target-format FMT  the format of DISK: qcow2 (the default) or raw; of one that \
             is there, what it is",
            "-o, --target-options OPTIONS  options to make DISK with, or 'help' to list them",
            "-n, --no-create  a whole disk goes into an image that is there, of the same size",
            "--force  replace DISK, give up what is half received, apply changes to whatever there \
             is",
            "-t, --target-cache CACHE  cache mode of DISK (writeback)",
            "-m, --parallel NUM_COROUTINES  pieces of 1 MiB to unpack and write side by side",
            "--resume-token  print what 'send --resume' needs to go on with a half received DISK",
            "--token  print which stream DISK holds, for 'send --base'",
            OBJECT,
            "DISK  the image, a file; half received it has another name",
        ],
        examples: "\
vellum receive disk.qcow2 < disk.stream
  a new disk, or the changes of one that is there
vellum receive -O raw disk.raw < disk.stream
  the same in another format
vellum receive --resume-token disk.qcow2
  what 'send --resume' needs after a stream was cut off
",
        ..Spec::EMPTY
    },
    run,
};

const MAX_PARALLEL: u64 = 64;

#[derive(Debug, Default)]
struct Arguments {
    common: CommonArgs,
    target: TargetOptions,
    parallel: Option<u64>,
    resume_token: bool,
    token: bool,
}

fn run(command: Command<'_>, args: Vec<OsString>) -> Outcome {
    let mut arguments = Arguments::default();
    let common = command.parse(args, |name, value| {
        let target = &mut arguments.target;
        match name {
            "target-format" => target.format = Some(value),
            "target-options" => add_options(&mut target.create_options, value)?,
            "no-create" => target.no_create = true,
            "target-cache" => target.cache = cache_mode("cache", &value)?,
            "parallel" => {
                let count = number("number of coroutines", &value, 1, MAX_PARALLEL)?;
                arguments.parallel = Some(count);
            }
            "force" => target.force = true,
            "resume-token" => arguments.resume_token = true,
            "token" => arguments.token = true,
            _ => return not_taken(name),
        }
        Ok(())
    })?;
    arguments.target.quiet = common.quiet;
    arguments.common = common;
    let target = &arguments.target;
    if target.create_options.as_deref().is_some_and(asks_for_help) {
        return print_option_help(target.format.as_deref().unwrap_or("qcow2"), None);
    }
    let disk = one_name(&arguments.common.operands)?.to_owned();
    if let Some(message) = local::refusal(&disk) {
        return fail(message);
    }
    if arguments.resume_token {
        return print_resume_token(&disk);
    }
    if arguments.token {
        return print_token(&disk);
    }
    if arguments.target.cache == CacheMode::UNSAFE {
        return fail("A disk is received durably: -t unsafe is not possible");
    }
    if std::io::stdin().is_terminal() {
        return fail("Standard input is a terminal; a stream comes from a pipe or a file");
    }
    install_bulk_lane(arguments.target.cache.direct)?;
    lane::block_on(receive_disk(command, &arguments, &disk))
}

fn print_resume_token(disk: &str) -> Outcome {
    let state = State::existing(disk)?;
    match state.and_then(|state| state.receiving) {
        Some(receiving) => {
            report::print_line(receiving.token()?);
            Ok(0)
        }
        None => fail(format!("Nothing of '{disk}' is half received")),
    }
}

fn print_token(disk: &str) -> Outcome {
    let state = State::existing(disk)?;
    match state.and_then(|state| state.received) {
        Some(received) => {
            report::print_line(id_text(received.id));
            Ok(0)
        }
        None => fail(format!("Nobody has noted what '{disk}' holds")),
    }
}

async fn receive_disk(command: Command<'_>, arguments: &Arguments, disk: &str) -> Outcome {
    // Before the note is taken: whoever sends may have to look at it first, for a token.
    let mut input = StandardInput::new()?;
    let header = input.header().await?;
    let mut state = State::claim(disk)?;
    let outcome = apply(command, arguments, disk, (&header, &mut input), &mut state).await;
    let receiving = state.receiving.clone();
    state.give_back();
    let Err(failure) = outcome else {
        return Ok(0);
    };
    match (failure, receiving) {
        (Failure::Message(why), Some(receiving)) => fail(format!(
            "{why}\n'{disk}' is half received, {} of {}, and is called '{}' until it is whole. To go \
             on: vellum send DISK --resume \"$(vellum receive --resume-token {disk})\" | vellum \
             receive {disk}",
            human(receiving.done_bytes),
            human(receiving.header.size_bytes),
            partial(disk)
        )),
        (failure, _) => Err(failure),
    }
}

async fn apply(
    command: Command<'_>,
    arguments: &Arguments,
    disk: &str,
    (header, input): (&Header, &mut StandardInput),
    state: &mut State,
) -> Result<(), Failure> {
    let target = ready(state, disk, header, &arguments.target).await?;
    let applied = apply_records(command, arguments, header, input, &target, state).await;
    let closed = target.close().await;
    applied?;
    closed.map_err(|error| {
        hint::about_space(disk, &error, None);
        writing(&error)
    })?;
    let id = header.id;
    // Somebody may have begun to use it meanwhile.
    refuse_in_use(disk).await?;
    state.finish().await?;
    if !arguments.common.quiet {
        report::info(format_args!("received, token {}", id_text(id)));
    }
    Ok(())
}

async fn apply_records(
    command: Command<'_>,
    arguments: &Arguments,
    header: &Header,
    input: &mut StandardInput,
    target: &Arc<dyn BlockDevice>,
    state: &mut State,
) -> Result<(), Failure> {
    let is_new = state.receiving.as_ref().is_some_and(|one| one.is_new);
    let default = 4 + 2 * lane::compute_threads() as u64;
    let options = ReceiveOptions {
        parallel: arguments.parallel.unwrap_or(default) as usize,
        target_is_zero: is_new && target.info().has_zero_init,
    };
    let common = &arguments.common;
    let mut progress = Progress::new(command.program, common.progress, common.quiet, 1.0);
    let durable = |done_bytes| state.advance(done_bytes);
    let show = |done_bytes| progress.show(done_bytes, header.size_bytes);
    let received = receive(header, input, target, &options, durable, show).await;
    progress.end();
    received.map_err(|error| match error {
        ReceiveError::Cut => Failure::Message("The stream ends before its end".into()),
        ReceiveError::Read(error) => reading(&error),
        ReceiveError::Damaged(error) => Failure::Message(format!("{error}")),
        ReceiveError::DamagedData { offset_bytes } => Failure::Message(format!(
            "The stream is damaged: what it brings for offset {offset_bytes} is not what was sent"
        )),
        ReceiveError::Write(error) => {
            hint::about_space(&target.info().name, &error, None);
            writing(&error)
        }
        ReceiveError::Told(failure) => failure,
    })
}

fn reading(error: &std::io::Error) -> Failure {
    let why = io_text(error);
    Failure::Message(format!("error while reading standard input: {why}"))
}

fn writing(error: &vellum::Error) -> Failure {
    let why = report::error_text(error);
    Failure::Message(format!("error while writing: {why}"))
}

/// Standard input, without the buffer of the standard library.
struct StandardInput(File);

impl StandardInput {
    fn new() -> Result<StandardInput, Failure> {
        let input = std::io::stdin().as_fd().try_clone_to_owned();
        let input = File::from(input.map_err(|error| reading(&error))?);
        widen(&input);
        Ok(StandardInput(input))
    }

    /// What the stream begins with.
    async fn header(&mut self) -> Result<Header, Failure> {
        let cut = || Failure::Message("The stream ends inside its header".into());
        let failed = |error: vellum_format::FormatError| Failure::Message(error.to_string());
        let mut prelude = [0; PRELUDE_BYTES];
        let len = self.fill(&mut prelude).await.map_err(|e| reading(&e))?;
        match len {
            0 => return fail("There is no stream: standard input is empty"),
            len if len < PRELUDE_BYTES => return Err(cut()),
            _ => {}
        }
        // A header of some hundred bytes, at most.
        let mut raw = vec![0; Header::len_bytes(&prelude).map_err(failed)?];
        let (first, rest) = raw.split_at_mut(PRELUDE_BYTES);
        first.copy_from_slice(&prelude);
        let len = self.fill(rest).await.map_err(|e| reading(&e))?;
        match len == rest.len() {
            true => Header::decode(&raw).map_err(failed),
            false => Err(cut()),
        }
    }
}

impl Input for StandardInput {
    type Error = std::io::Error;

    async fn fill(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let mut len = 0;
        while len < buffer.len() {
            let readable = lane::poll_readable(self.0.as_fd()).await;
            readable.map_err(|error| std::io::Error::from_raw_os_error(error.errno()))?;
            match self.0.read(&mut buffer[len..]) {
                Ok(0) => break,
                Ok(count) => len += count,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        Ok(len)
    }
}

//! A session: runs the commands of the command line, or those of standard input, with at most one
//! image open. `mod` calls [`run`] once; its result is the exit code.

use std::collections::VecDeque;
use std::io::Read as _;
use std::os::fd::AsFd as _;

use vellum_io::lane;

use super::aio::Started;
use super::arguments::{self, Words};
use super::commands::{self, Command, Needs, Verb};
use super::image::{self, Image, Reopening};
use super::options::SessionOptions;
use super::outcome::{Failed, Outcome};
use super::{breakpoint, info, space, transfer};
use crate::{hint, report};

/// What stays between commands.
pub struct Session {
    /// The open image.
    pub image: Option<Image>,
    /// Asynchronous requests that may still run.
    pub started: Started,
    /// Buffers are misaligned.
    pub misalign: bool,
    quit: bool,
}

/// Runs a whole session and returns the exit code.
pub async fn run(program: &str, options: SessionOptions) -> i32 {
    let mut session = Session {
        image: None,
        started: Started::default(),
        misalign: options.misalign,
        quit: false,
    };
    if let Some(spec) = options.image {
        match Image::open(spec, options.flags, options.temporary).await {
            Ok(image) => session.image = Some(image),
            Err(Failed) => return 1,
        }
    }
    let worked = match options.commands.is_empty() {
        true => session.run_input(program).await,
        false => session.run_all(&options.commands).await,
    };
    let closed = session.close().await;
    i32::from(worked.and(closed).is_err())
}

impl Session {
    async fn run_all(&mut self, lines: &[String]) -> Outcome {
        let mut result = Ok(());
        for line in lines {
            result = self.execute(line).await.and(result);
            if self.quit {
                break;
            }
        }
        result
    }

    async fn run_input(&mut self, program: &str) -> Outcome {
        let mut input = Input::default();
        let mut result = Ok(());
        while !self.quit {
            report::print(format_args!("{program}> "));
            let Some(line) = input.next_line().await else {
                break;
            };
            result = self.execute(&line).await.and(result);
        }
        result
    }

    /// Waits for everything that was started and closes the image.
    pub async fn close(&mut self) -> Outcome {
        self.started.wait().await;
        match self.image.take() {
            Some(image) => image.close().await,
            None => Ok(()),
        }
    }

    async fn execute(&mut self, line: &str) -> Outcome {
        let words: Vec<&str> = line.split(' ').filter(|word| !word.is_empty()).collect();
        let Some((&name, rest)) = words.split_first() else {
            return Ok(());
        };
        let Some(command) = commands::find(name) else {
            report::eprint_line(&format!("command \"{name}\" not found"));
            hint::about_word(name, commands::names());
            return Err(Failed);
        };
        self.check_image(command)?;
        command.check_words(name, rest.len())?;
        self.check_writable(command)?;
        self.perform(command, rest).await
    }

    fn check_image(&self, command: &Command) -> Outcome {
        if self.image.is_some() || command.needs == Needs::Nothing {
            return Ok(());
        }
        report::eprint_line("no file open, try 'help open'");
        Err(Failed)
    }

    fn check_writable(&self, command: &Command) -> Outcome {
        let read_only = self
            .image
            .as_ref()
            .is_some_and(|image| !image.is_writable());
        if read_only && command.needs == Needs::WritableImage {
            report::error("Block node is read-only");
            return Err(Failed);
        }
        Ok(())
    }

    async fn reopen(&mut self, words: &Words) -> Outcome {
        if !words.operands.is_empty() {
            return Err(words.usage());
        }
        let Some(image) = &self.image else {
            return Err(Failed);
        };
        let reopening = Reopening::new(image, words)?;
        self.close().await?;
        let (image, outcome) = reopening.open().await?;
        self.image = Some(image);
        outcome
    }

    async fn perform(&mut self, command: &'static Command, rest: &[&str]) -> Outcome {
        match command.verb {
            Verb::Help => return commands::help(rest.first().copied()),
            Verb::Quit => {
                self.quit = true;
                return Ok(());
            }
            Verb::Abort => std::process::abort(),
            Verb::Close => return self.close().await,
            Verb::AioFlush => {
                self.started.wait().await;
                return Ok(());
            }
            Verb::Sleep => return sleep(rest).await,
            Verb::Sigraise => return raise(rest),
            Verb::Open => {
                let words = Words::parse(command, rest)?;
                self.image = Some(image::open(&words, self.image.is_some()).await?);
                return Ok(());
            }
            Verb::Reopen => return self.reopen(&Words::parse(command, rest)?).await,
            _ => {}
        }
        let words = Words::parse(command, rest)?;
        // `check_image` has seen to it that there is one.
        let Some(image) = &self.image else {
            return Err(Failed);
        };
        let misalign = self.misalign;
        match command.verb {
            Verb::Read => transfer::read(image, &words, misalign).await,
            Verb::Readv => transfer::readv(image, &words, misalign).await,
            Verb::Write => transfer::write(image, &words, misalign).await,
            Verb::Writev => transfer::writev(image, &words, misalign).await,
            Verb::AioRead => self.started.read(image, &words, misalign),
            Verb::AioWrite => self.started.write(image, &words, misalign),
            Verb::Discard => space::discard(image, &words).await,
            Verb::Flush => space::flush(image).await,
            Verb::Truncate => space::truncate(image, &words).await,
            Verb::Length => space::length(image),
            Verb::Alloc => space::alloc(image, &words).await,
            Verb::Map => space::map(image).await,
            Verb::Info => info::print(image),
            Verb::Zone => zone(command.name, &words),
            _ => breakpoint::run(image, command.name, rest).await,
        }
    }
}

async fn sleep(rest: &[&str]) -> Outcome {
    let word = rest.first().copied().unwrap_or_default();
    let Ok(milliseconds) = crate::size::parse_plain(word) else {
        report::print_line(format_args!("{word} is not a valid number"));
        return Err(Failed);
    };
    lane::sleep(std::time::Duration::from_millis(milliseconds)).await;
    Ok(())
}

fn raise(rest: &[&str]) -> Outcome {
    let word = rest.first().copied().unwrap_or_default();
    let Some(signal) = i32::try_from(arguments::number(word)?)
        .ok()
        .filter(|&n| n <= 65)
    else {
        report::print_line(format_args!(
            "signal argument '{word}' is too large to be a valid signal"
        ));
        return Err(Failed);
    };
    // SAFETY: raising a signal touches no memory; an invalid one is refused.
    unsafe { libc::raise(signal) };
    Ok(())
}

/// No device here has zones; numbers are looked at all the same.
fn zone(name: &str, words: &Words) -> Outcome {
    match name {
        "zone_append" => drop(words.offset_and_lengths()?),
        _ => {
            for operand in &words.operands {
                arguments::number(operand)?;
            }
        }
    }
    let operation = name.replace('_', " ");
    report::print_line(format_args!("{operation} failed: Operation not supported"));
    Err(Failed)
}

/// Standard input by lines; the lane runs on while it waits.
#[derive(Default)]
struct Input {
    bytes: VecDeque<u8>,
    ended: bool,
}

impl Input {
    async fn next_line(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.bytes.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.bytes.drain(..=end).collect();
                return Some(String::from_utf8_lossy(&line[..end]).into_owned());
            }
            if self.ended {
                let rest: Vec<u8> = self.bytes.drain(..).collect();
                return (!rest.is_empty()).then(|| String::from_utf8_lossy(&rest).into_owned());
            }
            self.fill().await;
        }
    }

    async fn fill(&mut self) {
        let mut stdin = std::io::stdin();
        // Regular files cannot be waited for everywhere, and need not be.
        let _ = lane::poll_readable(stdin.as_fd()).await;
        let mut bytes = [0; 4096];
        match stdin.read(&mut bytes) {
            Ok(0) | Err(_) => self.ended = true,
            Ok(count) => self.bytes.extend(&bytes[..count]),
        }
    }
}

//! `aio_read`, `aio_write` and `aio_flush`: requests that run beside later commands.
//!
//! Invariant: a session waits for all of them before it closes the image.

use std::time::Instant;

use vellum::{RequestFlags, ZeroRequest};
use vellum_io::{JoinHandle, spawn};

use super::arguments::{self, Words};
use super::image::Image;
use super::outcome::{Failed, Outcome};
use super::print::Transfer;
use super::transfer::{DEFAULT_PATTERN, Inspection, failed};
use crate::report;

/// The asynchronous requests of a session.
#[derive(Default)]
pub struct Started {
    requests: Vec<JoinHandle<()>>,
}

impl Started {
    /// Waits for all of them.
    pub async fn wait(&mut self) {
        for request in self.requests.drain(..) {
            request.await;
        }
    }

    /// `aio_read`: starting it is success, whatever comes of it.
    pub fn read(&mut self, image: &Image, words: &Words, misalign: bool) -> Outcome {
        if words.has('i') {
            report::print_line("injecting invalid read request");
            return Ok(());
        }
        let (offset, lengths) = words.offset_and_lengths()?;
        let len = lengths.iter().sum();
        let inspection = Inspection::of(words, len)?;
        let buffer = arguments::filled(len, 0, misalign)?;
        let image = image.clone();
        let started = Instant::now();
        self.requests.push(spawn(async move {
            match image.read(offset, buffer).await {
                // A mismatch is printed; nobody waits for more.
                Ok(bytes) => drop(inspection.finish(&bytes, offset, started)),
                Err(error) => {
                    failed("readv", &error);
                }
            }
        }));
        Ok(())
    }

    /// `aio_write`
    pub fn write(&mut self, image: &Image, words: &Words, misalign: bool) -> Outcome {
        let pattern = words.pattern('P')?.unwrap_or(DEFAULT_PATTERN);
        if words.has('i') {
            report::print_line("injecting invalid write request");
            return Ok(());
        }
        check_options(words)?;
        let request = match words.has('z') {
            true => Request::zeroes(words)?,
            false => Request::data(words, pattern, misalign)?,
        };
        let (quiet, machine) = (words.has('q'), words.has('C'));
        let image = image.clone();
        self.requests.push(spawn(async move {
            let started = Instant::now();
            let (offset_bytes, len_bytes) = (request.offset_bytes, request.len_bytes);
            if let Err(error) = request.run(&image).await {
                failed("aio_write", &error);
                return;
            }
            let elapsed = started.elapsed();
            if !quiet {
                let verb = "wrote";
                Transfer {
                    verb,
                    offset_bytes,
                    len_bytes,
                    elapsed,
                    machine,
                }
                .print();
            }
        }));
        Ok(())
    }
}

fn check_options(words: &Words) -> Outcome {
    let operands = words.operands.len();
    if operands < 2 {
        return Err(words.usage());
    }
    let message = if words.has('z') && operands != 2 {
        "-z supports only a single length parameter"
    } else if words.has('u') && !words.has('z') {
        "-u requires -z to be specified"
    } else {
        return Ok(());
    };
    report::print_line(message);
    Err(Failed)
}

/// A write that is ready to be started.
struct Request {
    offset_bytes: u64,
    len_bytes: u64,
    fua: bool,
    content: Content,
}

enum Content {
    Data(vellum_io::Buffer),
    Zeroes { may_unmap: bool },
}

impl Request {
    fn data(words: &Words, pattern: u8, misalign: bool) -> Outcome<Request> {
        let (offset_bytes, lengths) = words.offset_and_lengths()?;
        let len_bytes = lengths.iter().sum();
        let content = Content::Data(arguments::filled(len_bytes, pattern, misalign)?);
        Ok(Request {
            offset_bytes,
            len_bytes,
            fua: words.has('f'),
            content,
        })
    }

    fn zeroes(words: &Words) -> Outcome<Request> {
        let (offset, length) = words.offset_and_length()?;
        let content = Content::Zeroes {
            may_unmap: words.has('u'),
        };
        Ok(Request {
            offset_bytes: arguments::number(offset)?,
            len_bytes: arguments::number(length)?,
            fua: words.has('f'),
            content,
        })
    }

    async fn run(self, image: &Image) -> vellum::Result<()> {
        let fua = self.fua;
        match self.content {
            Content::Data(buffer) => {
                image
                    .write(self.offset_bytes, buffer, RequestFlags::default().fua(fua))
                    .await
            }
            Content::Zeroes { may_unmap } => {
                let request = ZeroRequest::default()
                    .may_unmap(may_unmap)
                    .no_fallback(false)
                    .fua(fua);
                image
                    .write_zeroes(self.offset_bytes, self.len_bytes, request)
                    .await
            }
        }
    }
}

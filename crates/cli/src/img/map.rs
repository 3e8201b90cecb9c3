//! `map`: prints what every part of an image is and where it lies.

use std::ffi::OsString;
use std::fmt::Write;

use vellum::qcow2::AsQcow2;
use vellum::qcow2::info::live_write_log;
use vellum::{BlockDevice, Extent, ExtentKind};
use vellum_graph::open_device;
use vellum_io::lane;
use vellum_jobs::map::{MapEntry, map};
use vellum_options::{CacheMode, ImageSpec};

use super::command::{
    Command, Failure, MAX_BYTES, Outcome, Subcommand, not_taken, open_failure, reading, size,
};
use super::rows::{FILENAME, FORMAT, IMAGE_OPTS, OBJECT, OUTPUT, SHARE};
use crate::output::Output;
use crate::report;
use crate::spec::{CommonArgs, Spec};

pub static MAP: Subcommand = Subcommand {
    spec: Spec {
        name: "map",
        about: "Tell where the parts of an image lie",
        usage: "\
[-f FMT | --image-opts] [--object OBJDEF] [--output human|json]
        [--start-offset OFFSET] [--max-length LENGTH] [-U] FILENAME",
        arguments: &[
            FORMAT,
            IMAGE_OPTS,
            "-s, --start-offset OFFSET  where to begin",
            "-l, --max-length LENGTH  how far to go",
            OUTPUT,
            SHARE,
            OBJECT,
            FILENAME,
        ],
        examples: "\
vellum map disk.qcow2
  which parts hold data, and in which file
vellum map --output=json overlay.qcow2
  for a program, with zeroes and depth
",
        ..Spec::EMPTY
    },
    run,
};

#[derive(Debug, Default)]
struct Arguments {
    common: CommonArgs,
    start_bytes: u64,
    length_bytes: Option<u64>,
}

fn run(command: Command<'_>, args: Vec<OsString>) -> Outcome {
    let mut arguments = Arguments::default();
    arguments.common = command.parse(args, |name, value| {
        match name {
            "start-offset" => arguments.start_bytes = size("start offset", &value, 0, MAX_BYTES)?,
            "max-length" => {
                arguments.length_bytes = Some(size("max length", &value, 0, MAX_BYTES)?);
            }
            _ => return not_taken(name),
        }
        Ok(())
    })?;
    let spec = arguments.common.one_image()?;
    lane::block_on(print_map(&spec, &arguments))
}

async fn print_map(spec: &ImageSpec, arguments: &Arguments) -> Outcome {
    let flags = reading(CacheMode::default(), arguments.common.force_share);
    let device = open_device(spec, &flags)
        .await
        .map_err(|e| open_failure(&spec.name, &e))?;
    let start = arguments.start_bytes;
    let mut end = device.size_bytes();
    if let Some(length) = arguments.length_bytes {
        end = end.min(start.saturating_add(length));
    }
    let mut printer = Printer {
        output: arguments.common.output,
        text: String::new(),
        unmappable: false,
    };
    printer.begin();
    let mut count = 0_u64;
    let mapped = map(&device, start, end, |entry| {
        printer.entry(&entry, count == 0);
        printer.print_if_long();
        count += 1;
    });
    if let Err(error) = mapped.await {
        report::print(&printer.text);
        return Err(Failure::Message(format!(
            "Failed to read image metadata: {}",
            error.message()
        )));
    }
    if count == 0 {
        printer.nothing(start);
    }
    printer.end();
    if printer.unmappable {
        report::error(why_unmappable(&*device));
    }
    report::print(&printer.text);
    Ok(i32::from(printer.unmappable))
}

/// QEMU's words, and ours where a write log is.
fn why_unmappable(device: &dyn BlockDevice) -> &'static str {
    let header = device.as_qcow2().map(|image| image.header());
    match header.and_then(|header| live_write_log(&header)) {
        Some(_) => {
            "File contains external, encrypted or compressed clusters, or writes that only its write \
             log holds (vellum check -r log brings them into the image)."
        }
        None => "File contains external, encrypted or compressed clusters.",
    }
}

/// Text that is printed at once.
const PRINT_BYTES: usize = 64 << 10;

/// Collects the text and prints it in pieces: of a scattered image it is long.
struct Printer {
    output: Output,
    text: String,
    /// The human format met data that lies nowhere it could name.
    unmappable: bool,
}

impl Printer {
    fn begin(&mut self) {
        match self.output {
            Output::Human => {
                let head = ("Offset", "Length", "Mapped to", "File");
                // Writing to a string cannot fail.
                let _ = writeln!(
                    self.text,
                    "{:<16}{:<16}{:<16}{}",
                    head.0, head.1, head.2, head.3
                );
            }
            Output::Json => self.text.push('['),
        }
    }

    fn print_if_long(&mut self) {
        if self.text.len() >= PRINT_BYTES {
            report::print(&self.text);
            self.text.clear();
        }
    }

    fn entry(&mut self, entry: &MapEntry, first: bool) {
        match self.output {
            Output::Human => self.human(entry),
            Output::Json => self.json(entry, first),
        }
    }

    fn human(&mut self, entry: &MapEntry) {
        let extent = &entry.extent;
        if self.unmappable || !extent.kind.needs_reading() {
            return;
        }
        let Some(host) = &extent.host else {
            self.unmappable = true;
            return;
        };
        let _ = writeln!(
            self.text,
            "{:<16}{:<16}{:<16}{}",
            hexadecimal(entry.start_bytes),
            hexadecimal(extent.len_bytes),
            hexadecimal(host.offset_bytes),
            host.storage
        );
    }

    fn json(&mut self, entry: &MapEntry, first: bool) {
        if !first {
            self.text.push_str(",\n");
        }
        let extent = &entry.extent;
        let _ = write!(
            self.text,
            "{{ \"start\": {}, \"length\": {}, \"depth\": {}, \"present\": {}, \"zero\": {}, \
             \"data\": {}, \"compressed\": {}",
            entry.start_bytes,
            extent.len_bytes,
            extent.depth,
            extent.kind.is_present(),
            extent.kind.is_zero(),
            extent.kind.is_data(),
            extent.kind.is_compressed()
        );
        if let Some(host) = &extent.host {
            let _ = write!(self.text, ", \"offset\": {}", host.offset_bytes);
        }
        self.text.push('}');
    }

    /// A range without any entries is shown as one empty entry.
    fn nothing(&mut self, start_bytes: u64) {
        let extent = Extent::new(0, ExtentKind::Absent);
        self.entry(
            &MapEntry {
                start_bytes,
                extent,
            },
            true,
        );
    }

    fn end(&mut self) {
        if self.output == Output::Json {
            self.text.push_str("]\n");
        }
    }
}

/// C's `%#x`: zero has no prefix.
fn hexadecimal(value: u64) -> String {
    match value {
        0 => "0".to_owned(),
        value => format!("{value:#x}"),
    }
}

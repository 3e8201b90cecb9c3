//! Formats numbers and reports as `qemu-io` does, which scripts parse. No I/O on images.

use std::fmt::Write as _;
use std::time::Duration;

use crate::report;

const UNITS: [(u32, &str); 6] = [
    (60, "EiB"),
    (50, "PiB"),
    (40, "TiB"),
    (30, "GiB"),
    (20, "MiB"),
    (10, "KiB"),
];

/// A number of bytes with three decimals and a unit, whole numbers without
/// decimals: `"64 KiB"`, `"1.500 MiB"`, `"20 bytes"`.
pub fn byte_text(bytes: f64) -> String {
    let unit = UNITS
        .iter()
        .map(|&(shift, name)| (2_f64.powi(shift.cast_signed()), name))
        .find(|&(size, _)| bytes >= size);
    let (mut number, name) = match unit {
        Some((size, name)) => (format!("{:.3}", bytes / size), name),
        None => (format!("{bytes:.6}"), "bytes"),
    };
    if let Some(point) = number.find(".000") {
        number.truncate(point);
    }
    format!("{number} {name}")
}

/// What a finished transfer reports.
#[derive(Debug, Clone, Copy)]
pub struct Transfer {
    /// `"read"`, `"wrote"` or `"discard"`.
    pub verb: &'static str,
    /// Where it began.
    pub offset_bytes: u64,
    /// How long it was.
    pub len_bytes: u64,
    /// How long it took.
    pub elapsed: Duration,
    /// One line for machines (`-C`) instead of two for people.
    pub machine: bool,
}

impl Transfer {
    /// Prints the report.
    pub fn print(&self) {
        report::print(self.text());
    }

    fn text(&self) -> String {
        let seconds = self.elapsed.as_secs_f64();
        let rate = self.len_bytes as f64 / seconds;
        let operations = 1.0 / seconds;
        let time = time_text(self.elapsed, self.machine);
        if self.machine {
            return format!("{},1,{time},{rate:.3},{operations:.3}\n", self.len_bytes);
        }
        format!(
            "{} {}/{} bytes at offset {}\n{}, 1 ops; {time} ({}/sec and {operations:.4} ops/sec)\n",
            self.verb,
            self.len_bytes,
            self.len_bytes,
            self.offset_bytes,
            byte_text(self.len_bytes as f64),
            byte_text(rate),
        )
    }
}

/// `"00.25 sec"`, or hours, minutes and seconds where the time is longer or
/// `always_long`.
fn time_text(elapsed: Duration, always_long: bool) -> String {
    let seconds = elapsed.as_secs();
    let fraction = f64::from(elapsed.subsec_nanos()) / 1e9;
    if !always_long && seconds == 0 {
        return format!("{fraction:05.2} sec");
    }
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    format!(
        "{hours}:{minutes:02}:{:05.2}",
        (seconds % 60) as f64 + fraction
    )
}

/// Prints bytes in rows of sixteen, as numbers and as letters.
pub fn dump(bytes: &[u8], offset_bytes: u64) {
    let mut text = String::new();
    for (row, offset) in bytes.chunks(16).zip((offset_bytes..).step_by(16)) {
        dump_row(&mut text, row, offset);
    }
    report::print(text);
}

fn dump_row(text: &mut String, row: &[u8], offset_bytes: u64) {
    // Writing to a string cannot fail.
    let _ = write!(text, "{offset_bytes:08x}:  ");
    for byte in row {
        let _ = write!(text, "{byte:02x} ");
    }
    text.push(' ');
    text.extend(row.iter().map(|&byte| match byte.is_ascii_alphanumeric() {
        true => char::from(byte),
        false => '.',
    }));
    text.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_take_the_largest_unit() {
        let cases = [
            (0.0, "0 bytes"),
            (20.0, "20 bytes"),
            (99.5, "99.500000 bytes"),
            (1024.0, "1 KiB"),
            (1536.0, "1.500 KiB"),
            (65536.0, "64 KiB"),
            (2_031_616.0, "1.938 MiB"),
            (f64::INFINITY, "inf EiB"),
        ];
        for (bytes, text) in cases {
            assert_eq!(byte_text(bytes), text);
        }
    }

    #[test]
    fn reports_look_as_scripts_expect() {
        let mut transfer = Transfer {
            verb: "wrote",
            offset_bytes: 512,
            len_bytes: 65536,
            elapsed: Duration::from_millis(500),
            machine: false,
        };
        assert_eq!(
            transfer.text(),
            "wrote 65536/65536 bytes at offset 512\n\
             64 KiB, 1 ops; 00.50 sec (128 KiB/sec and 2.0000 ops/sec)\n"
        );
        transfer.machine = true;
        assert_eq!(transfer.text(), "65536,1,0:00:00.50,131072.000,2.000\n");
        assert_eq!(time_text(Duration::from_secs(3725), false), "1:02:05.00");
    }

    #[test]
    fn dump_shows_letters_and_dots() {
        let mut text = String::new();
        dump_row(&mut text, b"aZ9 \xcd", 512);
        assert_eq!(text, "00000200:  61 5a 39 20 cd  aZ9..\n");
    }
}

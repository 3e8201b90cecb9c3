//! The words of one command: options, offsets, lengths and patterns, with the errors of `qemu-io`.
//! All commands parse theirs here.

use std::ffi::OsString;
use std::io::Read;

use vellum_io::Buffer;

use super::commands::Command;
use super::outcome::{Failed, Outcome};
use crate::getopt::{Parser, letters};
use crate::report;
use crate::size::{self, SizeError};

/// The most bytes that one request may carry.
pub const MAX_REQUEST_BYTES: u64 = 2_147_483_136;

const SECTOR_BYTES: u64 = 512;
/// How far `-m` moves a buffer away from its alignment.
const MISALIGNMENT_BYTES: usize = 16;

/// The options of a command in the order in which they were given, and its operands.
#[derive(Debug)]
pub struct Words {
    command: &'static Command,
    /// The letters with their values.
    pub options: Vec<(char, String)>,
    /// Everything else.
    pub operands: Vec<String>,
}

impl Words {
    /// Sorts the words after a command's name.
    pub fn parse(command: &'static Command, words: &[&str]) -> Outcome<Words> {
        let mut parser = Parser::new(
            letters(command.options),
            words.iter().map(OsString::from).collect(),
        );
        let mut options = Vec::new();
        loop {
            match parser.next_option() {
                Ok(Some((letter, value))) => {
                    options.extend(letter.chars().next().map(|letter| (letter, value)))
                }
                Ok(None) => break,
                Err(error) => {
                    report::eprint_line(&format!("{}: {error}", command.name));
                    return Err(command.usage());
                }
            }
        }
        let operands = parser.operands();
        Ok(Words {
            command,
            options,
            operands,
        })
    }

    /// Whether a letter was given.
    pub fn has(&self, letter: char) -> bool {
        self.options.iter().any(|(found, _)| *found == letter)
    }

    /// The last value of a letter.
    pub fn value(&self, letter: char) -> Option<&str> {
        let mut found = self
            .options
            .iter()
            .rev()
            .filter(|(found, _)| *found == letter);
        found.next().map(|(_, value)| value.as_str())
    }

    /// The value of a letter as a number.
    pub fn number(&self, letter: char) -> Outcome<Option<u64>> {
        self.value(letter).map(number).transpose()
    }

    /// The value of a letter as a pattern byte.
    pub fn pattern(&self, letter: char) -> Outcome<Option<u8>> {
        self.value(letter).map(pattern).transpose()
    }

    /// Shows how the command is to be called.
    pub fn usage(&self) -> Failed {
        self.command.usage()
    }

    /// The two operands that a plain request has.
    pub fn offset_and_length(&self) -> Outcome<(&str, &str)> {
        match self.operands.as_slice() {
            [offset, length] => Ok((offset, length)),
            _ => Err(self.usage()),
        }
    }

    /// The offset and the lengths that a vectored request has.
    pub fn offset_and_lengths(&self) -> Outcome<(u64, Vec<u64>)> {
        let [offset, lengths @ ..] = self.operands.as_slice() else {
            return Err(self.usage());
        };
        if lengths.is_empty() {
            return Err(self.usage());
        }
        Ok((number(offset)?, vector(lengths)?))
    }
}

/// A number of bytes, with a suffix or without.
pub fn number(text: &str) -> Outcome<u64> {
    let negative = text.trim_start().strip_prefix('-').map(size::parse);
    let parsed = match negative {
        Some(Ok(0)) => Ok(0),
        Some(Ok(_)) => Err(SizeError::Range),
        Some(Err(error)) => Err(error),
        None => size::parse(text),
    };
    let error = match parsed {
        Ok(bytes) if i64::try_from(bytes).is_ok() => return Ok(bytes),
        Ok(_) | Err(SizeError::Range) => "argument too large",
        Err(SizeError::Invalid) => "non-numeric argument, or extraneous/unrecognized suffix",
    };
    report::print_line(format_args!("Parsing error: {error} -- {text}"));
    Err(Failed)
}

/// A byte: decimal, `0x` hexadecimal or `0` octal.
fn pattern(text: &str) -> Outcome<u8> {
    let digits = text.strip_prefix('+').unwrap_or(text);
    let parsed = if let Some(digits) = digits.strip_prefix("0x").or(digits.strip_prefix("0X")) {
        u8::from_str_radix(digits, 16)
    } else if digits.len() > 1 && digits.starts_with('0') {
        u8::from_str_radix(digits, 8)
    } else {
        digits.parse()
    };
    parsed.map_err(|_| {
        report::print_line(format_args!("{text} is not a valid pattern byte"));
        Failed
    })
}

/// The lengths of a vectored request, which together must fit one request.
fn vector(words: &[String]) -> Outcome<Vec<u64>> {
    let mut total_bytes = 0;
    let mut lengths = Vec::with_capacity(words.len());
    for word in words {
        let len_bytes = number(word)?;
        if len_bytes > MAX_REQUEST_BYTES {
            report::print_line(format_args!(
                "Argument '{word}' exceeds maximum size {MAX_REQUEST_BYTES}"
            ));
            return Err(Failed);
        }
        total_bytes += len_bytes;
        if total_bytes > MAX_REQUEST_BYTES {
            report::print_line(format_args!(
                "The total number of bytes exceed the maximum size {MAX_REQUEST_BYTES}"
            ));
            return Err(Failed);
        }
        lengths.push(len_bytes);
    }
    Ok(lengths)
}

/// Refuses a value that is not a whole number of sectors.
pub fn require_sectors(value: u64, name: &str) -> Outcome {
    if value.is_multiple_of(SECTOR_BYTES) {
        return Ok(());
    }
    report::print_line(format_args!(
        "{value} is not a sector-aligned value for '{name}'"
    ));
    Err(Failed)
}

/// A buffer full of one byte; `misaligned` makes direct I/O copy it.
pub fn filled(len_bytes: u64, byte: u8, misaligned: bool) -> Outcome<Buffer> {
    // Callers have checked the length against `MAX_REQUEST_BYTES`.
    let len = usize::try_from(len_bytes).map_err(|_| Failed)?;
    let mut buffer = match misaligned {
        false => Buffer::zeroed(len),
        true => {
            let mut whole = Buffer::zeroed(len + MISALIGNMENT_BYTES);
            drop(whole.split_to(MISALIGNMENT_BYTES));
            whole
        }
    };
    if byte != 0 {
        buffer.fill(byte);
    }
    Ok(buffer)
}

/// A buffer full of a file's bytes, over and over.
pub fn filled_from(len_bytes: u64, path: &str, misaligned: bool) -> Outcome<Buffer> {
    let complain = |text: String| {
        report::eprint_line(&format!("{path}: {text}"));
        Failed
    };
    let mut content = Vec::new();
    // Some, such as /dev/urandom, have no end.
    let read =
        std::fs::File::open(path).and_then(|file| file.take(len_bytes).read_to_end(&mut content));
    read.map_err(|error| {
        let text = error.raw_os_error().map(vellum_io::error::errno_text);
        complain(text.unwrap_or_else(|| error.to_string()))
    })?;
    if content.is_empty() {
        return Err(complain("file is empty".into()));
    }
    let mut buffer = filled(len_bytes, 0, misaligned)?;
    for piece in buffer.chunks_mut(content.len()) {
        piece.copy_from_slice(&content[..piece.len()]);
    }
    Ok(buffer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_sizes_below_two_to_the_63() {
        assert_eq!(number("4k"), Ok(4096));
        assert_eq!(number("0x200"), Ok(512));
        for wrong in ["", "x", "1x", "0.5", "-1", "8E", "99E"] {
            assert_eq!(number(wrong), Err(Failed), "{wrong}");
        }
    }

    #[test]
    fn patterns_are_bytes_in_three_bases() {
        let cases = [
            ("0", 0),
            ("255", 255),
            ("0xcd", 0xcd),
            ("017", 15),
            ("+1", 1),
        ];
        for (text, byte) in cases {
            assert_eq!(pattern(text), Ok(byte));
        }
        for wrong in ["256", "0x", "-1", "x", "08"] {
            assert_eq!(pattern(wrong), Err(Failed), "{wrong}");
        }
    }

    #[test]
    fn misaligned_buffers_are_full_and_misaligned() {
        let buffer = filled(100, 7, true).unwrap();
        assert_eq!(buffer.len(), 100);
        assert_eq!(buffer.as_ptr() as usize % 4096, MISALIGNMENT_BYTES);
        assert!(buffer.iter().all(|&byte| byte == 7));
    }
}

//! What streams say of themselves, as text.

use std::fs::File;

use vellum_format::stream::{Header, StreamId};

use crate::img::command::{Failure, fail};

/// Pieces on their way between two programs: fewer turns than with the 64 KiB that pipes have.
const PIPE_BYTES: usize = 1 << 20;

/// Widens a pipe, if it is one and may be so wide.
pub(crate) fn widen(pipe: &File) {
    // It only takes longer otherwise.
    let _ = rustix::pipe::fcntl_setpipe_size(pipe, PIPE_BYTES);
}

/// The name that people see of a stream.
pub(crate) fn id_text(id: StreamId) -> String {
    to_hex(&id.0)
}

pub(crate) fn parse_id(text: &str) -> Result<StreamId, Failure> {
    let bytes = from_hex(text).and_then(|bytes| <[u8; 16]>::try_from(bytes).ok());
    match bytes {
        Some(bytes) if bytes != [0; 16] => Ok(StreamId(bytes)),
        _ => fail(format!(
            "'{text}' is no token of a stream: it has 32 hexadecimal digits, and 'vellum receive \
             --token DISK' prints it"
        )),
    }
}

/// A header as text: what goes on where it begins.
pub(crate) fn header_text(header: &Header) -> Result<String, Failure> {
    match header.encode() {
        Ok(raw) => Ok(to_hex(&raw)),
        Err(error) => fail(error.to_string()),
    }
}

pub(crate) fn parse_header(text: &str) -> Option<Header> {
    Header::decode(&from_hex(text)?).ok()
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digits = text.trim().as_bytes();
    let digit = |byte: u8| char::from(byte).to_digit(16).map(|digit| digit as u8);
    let pairs = digits.chunks(2).map(|pair| match pair {
        [high, low] => Some(digit(*high)? << 4 | digit(*low)?),
        _ => None,
    });
    pairs.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_digits() {
        assert_eq!(from_hex(&to_hex(&[0, 7, 255])), Some(vec![0, 7, 255]));
        for wrong in ["0", "0g", "+1", "ä"] {
            assert_eq!(from_hex(wrong), None, "{wrong}");
        }
        assert!(parse_id(&"0".repeat(32)).is_err() && parse_id("00").is_err());
        assert!(parse_id(&"1".repeat(32)).is_ok());
    }
}

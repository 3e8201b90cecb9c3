//! Sizes as people write them: `64k`, `1.5G`, `0x1000`.

use std::fmt;

/// Why a text is no size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SizeError {
    /// It does not look like a size.
    Invalid,
    /// It does not fit into 64 bits.
    Range,
}

impl fmt::Display for SizeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SizeError::Invalid => "not a size",
            SizeError::Range => "the size is too large",
        })
    }
}

impl std::error::Error for SizeError {}

/// The number of bytes in a whole text; without a suffix it counts bytes.
///
/// # Errors
/// As [`parse_prefix`], and [`SizeError::Invalid`] if more follows.
pub fn parse(text: &str) -> Result<u64, SizeError> {
    parse_with_unit(text, 1)
}

/// The number of bytes in a whole text; without a suffix it counts `unit_bytes`.
///
/// # Errors
/// As [`parse`].
pub fn parse_with_unit(text: &str, unit_bytes: u64) -> Result<u64, SizeError> {
    match parse_prefix(text, unit_bytes)? {
        (bytes, "") => Ok(bytes),
        _ => Err(SizeError::Invalid),
    }
}

/// The number of bytes that `text` begins with, and what follows it.
///
/// # Errors
/// [`SizeError::Invalid`] without a number at the start, [`SizeError::Range`] beyond 64 bits.
pub fn parse_prefix(text: &str, unit_bytes: u64) -> Result<(u64, &str), SizeError> {
    let text = text.trim_start();
    let text = text.strip_prefix('+').unwrap_or(text);
    if let Some(digits) = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        return parse_hexadecimal(digits);
    }
    let (whole, rest) = split_digits(text);
    let (fraction, rest) = match rest.strip_prefix('.') {
        Some(rest) => split_digits(rest),
        None => ("", rest),
    };
    if whole.is_empty() && fraction.is_empty() {
        return Err(SizeError::Invalid);
    }
    let (scale_bytes, rest) = match rest.chars().next().and_then(suffix) {
        Some(scale) => (scale, &rest[1..]),
        None => (unit_bytes, rest),
    };
    let fraction: f64 = match fraction {
        "" => 0.0,
        digits => format!("0.{digits}")
            .parse()
            .map_err(|_| SizeError::Invalid)?,
    };
    if fraction > 0.0 && scale_bytes == 1 {
        return Err(SizeError::Invalid);
    }
    let whole: u64 = match whole {
        "" => 0,
        digits => digits.parse().map_err(|_| SizeError::Range)?,
    };
    let bytes = whole.checked_mul(scale_bytes).ok_or(SizeError::Range)?;
    // The fraction is below 1, so its share is below `scale_bytes`.
    let share = (fraction * scale_bytes as f64) as u64;
    Ok((bytes.checked_add(share).ok_or(SizeError::Range)?, rest))
}

/// Hexadecimal numbers take neither a fraction nor a suffix (`0x1b` and `0x1e`
/// would be ambiguous).
fn parse_hexadecimal(digits: &str) -> Result<(u64, &str), SizeError> {
    let end = digits
        .find(|c: char| !c.is_ascii_hexdigit())
        .unwrap_or(digits.len());
    let (number, rest) = digits.split_at(end);
    if number.is_empty() || rest.starts_with('.') || rest.chars().next().and_then(suffix).is_some()
    {
        return Err(SizeError::Invalid);
    }
    Ok((
        u64::from_str_radix(number, 16).map_err(|_| SizeError::Range)?,
        rest,
    ))
}

fn split_digits(text: &str) -> (&str, &str) {
    text.split_at(
        text.find(|c: char| !c.is_ascii_digit())
            .unwrap_or(text.len()),
    )
}

fn suffix(letter: char) -> Option<u64> {
    let power = match letter.to_ascii_lowercase() {
        'b' => 0,
        'k' => 1,
        'm' => 2,
        'g' => 3,
        't' => 4,
        'p' => 5,
        'e' => 6,
        _ => return None,
    };
    Some(1 << (10 * power))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_qemu_reads() {
        let cases = [
            ("0", 0),
            ("512", 512),
            ("1k", 1024),
            ("1.5G", 3 << 29),
            (".5M", 1 << 19),
            ("1.", 1),
            ("0x1000", 4096),
            ("7E", 7 << 60),
            (" 3b", 3),
        ];
        for (text, bytes) in cases {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
        assert_eq!(parse_with_unit("3", 512), Ok(1536));
        assert_eq!(parse_prefix("4k:8", 1), Ok((4096, ":8")));
    }

    #[test]
    fn refuses_the_rest() {
        for text in ["", "-1", "k", "1.5", "1kk", "0x1k", "1 k", "abc", "."] {
            assert_eq!(parse(text), Err(SizeError::Invalid), "{text}");
        }
        assert_eq!(parse("16E"), Err(SizeError::Range));
        assert_eq!(parse("99999999999999999999"), Err(SizeError::Range));
    }
}

//! Sizes as QEMU reads and prints them: `1.5G` in, `1.5 GiB` out.
//!
//! Parsing lives in `vellum-options`, because options have sizes too; here are
//! the printed forms.

pub use vellum_options::size::{SizeError, parse};

/// A number without a suffix: decimal, hexadecimal or octal, as C writes them.
pub fn parse_plain(text: &str) -> Result<u64, SizeError> {
    let text = text.trim_start();
    let text = text.strip_prefix('+').unwrap_or(text);
    let (digits, radix) = match text.strip_prefix("0x").or(text.strip_prefix("0X")) {
        Some(digits) => (digits, 16),
        None if text.len() > 1 && text.starts_with('0') => (&text[1..], 8),
        None => (text, 10),
    };
    if digits.is_empty() || !digits.chars().all(|digit| digit.is_digit(radix)) {
        return Err(SizeError::Invalid);
    }
    u64::from_str_radix(digits, radix).map_err(|_| SizeError::Range)
}

const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

/// Three significant digits and a unit, switching units at 1000 as QEMU does:
/// `"64 KiB"`, `"0.977 KiB"`.
pub fn human(bytes: u64) -> String {
    let mut unit = 0;
    let mut divisor = 1.0_f64;
    // `bytes / (1000 / 1024)` has to reach the next power of 1024.
    while unit + 1 < UNITS.len() && bytes as f64 / (1000.0 / 1024.0) >= divisor * 1024.0 {
        divisor *= 1024.0;
        unit += 1;
    }
    format!("{} {}", general(bytes as f64 / divisor, 3), UNITS[unit])
}

/// C's `%.{digits}g`.
pub fn general(value: f64, digits: usize) -> String {
    let digits = digits.max(1);
    let scientific = format!("{value:.*e}", digits - 1);
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let strip = |text: &str| match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text.to_owned(),
    };
    if exponent < -4 || exponent >= digits as i32 {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{}e{sign}{:02}", strip(mantissa), exponent.abs());
    }
    let decimals = usize::try_from(digits as i32 - 1 - exponent).unwrap_or(0);
    strip(&format!("{value:.decimals$}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prints_as_qemu_does() {
        let cases = [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "0.977 KiB"),
            (1024, "1 KiB"),
            (65536, "64 KiB"),
            (196_616, "192 KiB"),
            (1 << 20, "1 MiB"),
            (1_600_000_000, "1.49 GiB"),
            (u64::MAX, "16 EiB"),
        ];
        for (bytes, text) in cases {
            assert_eq!(human(bytes), text);
        }
    }

    #[test]
    fn plain_numbers_are_those_of_c() {
        for (text, number) in [("10", 10), ("0", 0), ("0x1f", 31), ("017", 15), (" +5", 5)] {
            assert_eq!(parse_plain(text), Ok(number), "{text}");
        }
        for text in ["", "x", "1k", "08", "0x", "-1", "1.5"] {
            assert_eq!(parse_plain(text), Err(SizeError::Invalid), "{text}");
        }
    }

    #[test]
    fn general_is_c_percent_g() {
        assert_eq!(general(1234.0, 3), "1.23e+03");
        assert_eq!(general(0.0001, 3), "0.0001");
        assert_eq!(general(0.00001, 3), "1e-05");
        assert_eq!(general(100.0, 6), "100");
        assert_eq!(general(0.0, 3), "0");
    }
}

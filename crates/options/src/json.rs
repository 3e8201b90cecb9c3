//! JSON as QEMU prints it.
//!
//! QEMU's objects are hash tables, and their members come out in the order of
//! the table's buckets. Scripts compare that text, so the order is reproduced.

use std::fmt::Write;

use serde_json::{Map, Value};

const BUCKETS: u32 = 512;

/// The bucket that QEMU's dictionary keeps a key in.
pub fn bucket(key: &str) -> u32 {
    let start = 0x238f_13af_u32.wrapping_mul(key.len() as u32);
    let sum = key.bytes().enumerate().fold(start, |sum, (index, byte)| {
        sum.wrapping_add(u32::from(byte) << (index * 5 % 24))
    });
    sum.wrapping_mul(1_103_515_243).wrapping_add(12345) % BUCKETS
}

/// The members of an object in the order in which QEMU prints them.
pub fn ordered(object: &Map<String, Value>) -> Vec<(&str, &Value)> {
    // Within a bucket the member that was added last comes first.
    let mut members: Vec<_> = object
        .iter()
        .map(|(key, value)| (key.as_str(), value))
        .rev()
        .collect();
    members.sort_by_key(|(key, _)| bucket(key));
    members
}

/// A value that was read from text in QEMU's order, so that it is printed in that order once more: of
/// the members of a bucket the last one comes first.
pub fn as_added(value: Value) -> Value {
    match value {
        Value::Object(members) => {
            let members = members.into_iter().rev();
            Value::Object(members.map(|(key, one)| (key, as_added(one))).collect())
        }
        Value::Array(items) => items.into_iter().map(as_added).collect(),
        other => other,
    }
}

/// A value over several lines, indented by four spaces a level.
pub fn pretty(value: &Value) -> String {
    let mut text = String::new();
    write_value(&mut text, value, Some(0));
    text
}

/// A value on one line.
pub fn compact(value: &Value) -> String {
    let mut text = String::new();
    write_value(&mut text, value, None);
    text
}

fn write_value(text: &mut String, value: &Value, level: Option<usize>) {
    match value {
        Value::Object(object) => {
            let members = ordered(object);
            write_items(
                text,
                ('{', '}'),
                level,
                &members,
                |text, (key, value), level| {
                    write_string(text, key);
                    text.push_str(": ");
                    write_value(text, value, level);
                },
            );
        }
        Value::Array(items) => {
            let items: Vec<_> = items.iter().collect();
            write_items(text, ('[', ']'), level, &items, |text, item, level| {
                write_value(text, item, level);
            });
        }
        Value::String(string) => write_string(text, string),
        Value::Number(number) if number.is_f64() => {
            text.push_str(&float(number.as_f64().unwrap_or_default()));
        }
        // Writing to a string cannot fail.
        other => drop(write!(text, "{other}")),
    }
}

/// The digits that the most precise of QEMU's floats have.
const FLOAT_DIGITS: i32 = 17;

/// A float as C's `%.17g` prints it.
fn float(number: f64) -> String {
    let trimmed = |digits: &str| match digits.contains('.') {
        true => digits
            .trim_end_matches('0')
            .trim_end_matches('.')
            .to_owned(),
        false => digits.to_owned(),
    };
    let scientific = format!("{number:.*e}", FLOAT_DIGITS as usize - 1);
    let Some((digits, exponent)) = scientific.split_once('e') else {
        return scientific;
    };
    let exponent: i32 = exponent.parse().unwrap_or_default();
    if (-4..FLOAT_DIGITS).contains(&exponent) {
        let decimals = (FLOAT_DIGITS - 1 - exponent) as usize;
        return trimmed(&format!("{number:.decimals$}"));
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{}e{sign}{:02}", trimmed(digits), exponent.unsigned_abs())
}

fn write_items<T>(
    text: &mut String,
    brackets: (char, char),
    level: Option<usize>,
    items: &[T],
    write_item: impl Fn(&mut String, &T, Option<usize>),
) {
    let inner = level.map(|level| level + 1);
    let new_line = |text: &mut String, level: Option<usize>| {
        if let Some(level) = level {
            text.push('\n');
            text.push_str(&"    ".repeat(level));
        }
    };
    text.push(brackets.0);
    for (index, item) in items.iter().enumerate() {
        match (index, level) {
            (0, _) => {}
            (_, Some(_)) => text.push(','),
            (_, None) => text.push_str(", "),
        }
        new_line(text, inner);
        write_item(text, item, inner);
    }
    new_line(text, level);
    text.push(brackets.1);
}

/// Whether a string is written as it is.
pub fn is_plain(string: &str) -> bool {
    let mut bytes = string.bytes();
    bytes.all(|byte| matches!(byte, b' '..=b'~') && byte != b'"' && byte != b'\\')
}

/// Writes a string with its quotes.
pub fn write_string(text: &mut String, string: &str) {
    text.push('"');
    // Nearly all are plain.
    if is_plain(string) {
        text.push_str(string);
        text.push('"');
        return;
    }
    for letter in string.chars() {
        match letter {
            '"' => text.push_str("\\\""),
            '\\' => text.push_str("\\\\"),
            '\u{8}' => text.push_str("\\b"),
            '\u{c}' => text.push_str("\\f"),
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            ' '..='~' => text.push(letter),
            _ => {
                let mut units = [0; 2];
                for unit in letter.encode_utf16(&mut units) {
                    // Writing to a string cannot fail.
                    let _ = write!(text, "\\u{unit:04X}");
                }
            }
        }
    }
    text.push('"');
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn floats_are_printed_as_by_c() {
        for (number, text) in [
            (0.0, "0"),
            (-0.0, "-0"),
            (100.0, "100"),
            (0.1, "0.10000000000000001"),
            (1.5, "1.5"),
            (1e-4, "0.0001"),
            (1e-5, "1.0000000000000001e-05"),
            (1e16, "10000000000000000"),
            (1e17, "1e+17"),
            (1e21, "1e+21"),
            (18_446_744_073_709_551_616.0, "1.8446744073709552e+19"),
            (-9_223_372_036_854_775_809.0, "-9.2233720368547758e+18"),
            (5e-324, "4.9406564584124654e-324"),
        ] {
            assert_eq!(compact(&serde_json::json!(number)), text);
        }
    }

    #[test]
    fn members_come_in_qemus_order() {
        let value = json!({
            "filename": "x", "format": "raw", "virtual-size": 1, "actual-size": 2,
            "children": [], "dirty-flag": false,
        });
        let Value::Object(object) = &value else {
            panic!()
        };
        let keys: Vec<_> = ordered(object).into_iter().map(|(key, _)| key).collect();
        let expected = [
            "children",
            "virtual-size",
            "filename",
            "format",
            "actual-size",
            "dirty-flag",
        ];
        assert_eq!(keys, expected);
    }

    #[test]
    fn layout_is_qemus() {
        let value = json!({"data": {}, "flags": [], "name": "a\"\u{e9}"});
        assert_eq!(
            pretty(&json!([value])),
            "[\n    {\n        \"flags\": [\n        ],\n        \"name\": \"a\\\"\\u00E9\",\n        \
             \"data\": {\n        }\n    }\n]"
        );
        let one_line = json!({"driver": "raw", "offset": "512", "size": "1024"});
        assert_eq!(
            compact(&one_line),
            r#"{"offset": "512", "driver": "raw", "size": "1024"}"#
        );
    }
}

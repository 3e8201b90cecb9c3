//! A JSON value out of a text, with QEMU's words for what is wrong. [`super::Messages`] asks.
//!
//! Invariants:
//! - No object has a key twice: of two that are the same a client means one, and nobody knows
//!   which.
//! - However deep a text nests, no more of the stack is needed: what is open is in a list.

use serde_json::{Map, Value};

/// A list or an object whose end was not met yet.
enum Open {
    List(Vec<Value>),
    /// With the key of the value that comes next.
    Object(Map<String, Value>, String),
}

/// What `serde_json` says of a number that is well formed and too large.
const TOO_LARGE: &str = "number out of range";

const SPACE: [char; 4] = [' ', '\t', '\r', '\n'];

enum Token {
    /// One of `{}[]:,`.
    Mark(u8),
    /// A value without others inside.
    Scalar(Value),
    End,
}

/// The value that a text is, or what is wrong with it.
pub(super) fn parse(text: &str) -> Result<Value, String> {
    let mut tokens = Tokens(text);
    let mut open = Vec::new();
    loop {
        let mut value = match tokens.next()? {
            Token::Scalar(value) => value,
            Token::Mark(b'[') if tokens.skip(b']') => Value::Array(Vec::new()),
            Token::Mark(b'[') => {
                open.push(Open::List(Vec::new()));
                continue;
            }
            Token::Mark(b'{') if tokens.skip(b'}') => Value::Object(Map::new()),
            Token::Mark(b'{') => {
                open.push(Open::Object(Map::new(), tokens.key()?));
                continue;
            }
            Token::Mark(_) | Token::End => return Err("expecting value".to_owned()),
        };
        // What is open may end with its last value, and is then the last value of another.
        loop {
            match open.pop() {
                None => return tokens.end().map(|()| value),
                Some(Open::List(mut values)) => {
                    values.push(value);
                    match tokens.next()? {
                        Token::Mark(b',') => {
                            open.push(Open::List(values));
                            break;
                        }
                        Token::Mark(b']') => value = Value::Array(values),
                        _ => return Err("expected separator in list".to_owned()),
                    }
                }
                Some(Open::Object(mut members, key)) => {
                    if members.insert(key, value).is_some() {
                        return Err("duplicate key".to_owned());
                    }
                    match tokens.next()? {
                        Token::Mark(b',') => {
                            open.push(Open::Object(members, tokens.key()?));
                            break;
                        }
                        Token::Mark(b'}') => value = Value::Object(members),
                        _ => return Err("expected separator in dict".to_owned()),
                    }
                }
            }
        }
    }
}

/// What remains of a text.
struct Tokens<'a>(&'a str);

impl Tokens<'_> {
    fn next(&mut self) -> Result<Token, String> {
        self.0 = self.0.trim_start_matches(SPACE);
        match self.0.bytes().next() {
            None => Ok(Token::End),
            Some(mark @ (b'{' | b'}' | b'[' | b']' | b':' | b',')) => {
                self.0 = &self.0[1..];
                Ok(Token::Mark(mark))
            }
            Some(b'"') => self.string().map(|text| Token::Scalar(text.into())),
            Some(_) => self.word().map(Token::Scalar),
        }
    }

    /// Goes over a mark, if it comes next.
    fn skip(&mut self, mark: u8) -> bool {
        let rest = self.0.trim_start_matches(SPACE);
        let is_next = rest.as_bytes().first() == Some(&mark);
        if is_next {
            self.0 = &rest[1..];
        }
        is_next
    }

    fn key(&mut self) -> Result<String, String> {
        let Token::Scalar(Value::String(key)) = self.next()? else {
            return Err("key is not a string in object".to_owned());
        };
        match self.next()? {
            Token::Mark(b':') => Ok(key),
            _ => Err("missing : in object pair".to_owned()),
        }
    }

    /// The text that begins with the quote that comes next.
    fn string(&mut self) -> Result<String, String> {
        let mut is_escaped = false;
        let ends = |&(_, &byte): &(usize, &u8)| {
            let ends = byte == b'"' && !is_escaped;
            is_escaped = byte == b'\\' && !is_escaped;
            ends
        };
        let end = self.0.as_bytes().iter().enumerate().skip(1).find(ends);
        let Some((end, _)) = end else {
            return Err("unterminated string".to_owned());
        };
        let (string, rest) = self.0.split_at(end + 1);
        self.0 = rest;
        serde_json::from_str(string).map_err(|_| match string.bytes().any(|byte| byte < b' ') {
            true => "control character in string".to_owned(),
            false => "invalid escape sequence in string".to_owned(),
        })
    }

    fn word(&mut self) -> Result<Value, String> {
        let ends = |letter| SPACE.contains(&letter) || "{}[]:,\"".contains(letter);
        let end = self.0.find(ends);
        let (word, rest) = self.0.split_at(end.unwrap_or(self.0.len()));
        self.0 = rest;
        // An integer, which has no sign then.
        if word == "-0" {
            return Ok(0.into());
        }
        let error = match serde_json::from_str(word) {
            Ok(value) => return Ok(value),
            Err(error) => error,
        };
        // One beyond all that a number can be is one, and the largest: QEMU has it infinite, and says
        // what is no JSON where it repeats that.
        if error.to_string().starts_with(TOO_LARGE) && is_number(word) {
            let largest = if word.starts_with('-') {
                f64::MIN
            } else {
                f64::MAX
            };
            return Ok(largest.into());
        }
        Err({
            match word.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
                true => format!("invalid keyword '{word}'"),
                false => format!("stray '{word}'"),
            }
        })
    }

    /// Nothing comes after the value.
    fn end(&mut self) -> Result<(), String> {
        match self.next()? {
            Token::End => Ok(()),
            _ => Err("expecting value".to_owned()),
        }
    }
}

/// Whether a word is a number by the grammar of JSON.
fn is_number(word: &str) -> bool {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let word = word.strip_prefix('-').unwrap_or(word);
    let (rest, exponent) = match word.split_once(['e', 'E']) {
        Some((rest, exponent)) => (rest, exponent.strip_prefix(['+', '-']).unwrap_or(exponent)),
        None => (word, "0"),
    };
    let (whole, fraction) = rest.split_once('.').unwrap_or((rest, "0"));
    let is_whole = digits(whole) && (whole == "0" || !whole.starts_with('0'));
    is_whole && digits(fraction) && digits(exponent)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_number_beyond_all_is_the_largest() {
        for (text, wanted) in [
            ("1E400", f64::MAX),
            ("-1e+400", f64::MIN),
            ("12.5e99999999999", f64::MAX),
            ("1E-400", 0.0),
        ] {
            assert_eq!(parse(text), Ok(wanted.into()), "{text}");
        }
        let nines = "9".repeat(400);
        assert_eq!(parse(&nines), Ok(f64::MAX.into()));
        for text in ["1E400x", "1E", "1E400E1", "01E400", "--1E400", "1E4.00"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn values_are_what_they_are_elsewhere() {
        for text in [
            r#"{"a": [1, -2, 1.5, true, null, "\u00e9"], "b": {"a": {}}, "c": [[], {}]}"#,
            "18446744073709551615",
            "[]",
            " { \"a\\\"\\\\\" : [ ] } ",
        ] {
            let expected: Value = serde_json::from_str(text).expect(text);
            assert_eq!(parse(text), Ok(expected), "{text}");
        }
        assert_eq!(parse("[-0]"), Ok(serde_json::json!([0])));
    }

    /// The words are those of QEMU 10.0.2.
    #[test]
    fn what_is_wrong_is_said_as_qemu_says_it() {
        for (text, why) in [
            (r#"{"a": 1 "b": 2}"#, "expected separator in dict"),
            (r#"{"a" 1}"#, "missing : in object pair"),
            ("[1 2]", "expected separator in list"),
            ("{1: 2}", "key is not a string in object"),
            (r#"{"a": }"#, "expecting value"),
            ("[1,]", "expecting value"),
            ("[1,,2]", "expecting value"),
            (r#"{"a": tru}"#, "invalid keyword 'tru'"),
            (r#"{"a": 1, "a": 2}"#, "duplicate key"),
            (r#"[{"b": {"a": 1, "c": 2, "a": 3}}]"#, "duplicate key"),
            (r#"{"a": "\q"}"#, "invalid escape sequence in string"),
        ] {
            assert_eq!(parse(text), Err(why.to_owned()), "{text}");
        }
        for text in [
            "",
            "[",
            "[1",
            "{\"a\"",
            "[}",
            "\"a",
            "[1]]",
            "1 2",
            "- 1",
            "[\u{a0}1]",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn what_serde_takes_is_taken_and_nothing_else(
            bytes in proptest::collection::vec(
                proptest::sample::select(b"{}[]\"\\:, 1a-".to_vec()), 0..12,
            ),
        ) {
            let text = String::from_utf8(bytes).expect("ASCII");
            match serde_json::from_str::<Value>(&text) {
                // Which has taken the last of two that are the same.
                Ok(value) => prop_assert!(
                    parse(&text) == Ok(value) || parse(&text) == Err("duplicate key".to_owned())
                ),
                Err(_) => prop_assert!(parse(&text).is_err(), "{text}"),
            }
        }
    }
}

//! [`Messages`]: JSON values out of a stream of bytes that comes in any pieces.
//!
//! Only braces, brackets and strings are looked at to find where a value ends, each byte
//! once; the value is then parsed as a whole.
//!
//! Invariants:
//! - No more than [`MAX_MESSAGE_BYTES`] and what was pushed last are kept.
//! - How the stream was cut into pieces makes no difference.

use serde_json::Value;
use vellum_options::options::double_quoted;

use super::{Failure, value};

/// Longer messages are refused.
pub const MAX_MESSAGE_BYTES: usize = 8 << 20;
/// More braces and brackets are not open at once, as in QEMU.
const MAX_NESTING: u32 = 1024;

/// What is known of the value that is being received.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum State {
    /// It has not begun.
    #[default]
    Between,
    /// A word or number outside of any braces.
    Word,
    /// Between braces or brackets, so many of which are open.
    Inside { braces: u32, brackets: u32 },
    /// In a string, inside of so many.
    Text {
        quote: u8,
        escaped: bool,
        braces: u32,
        brackets: u32,
    },
    /// Too long or too deep: the rest of the line is left out.
    Skipping,
}

/// What a byte does to the value.
enum Step {
    Goes(State),
    /// The value ends with this byte.
    Ends,
    /// The value ended before this byte.
    EndedBefore,
    /// Here no value can be.
    Bad,
}

/// Cuts a stream into values.
#[derive(Debug, Default)]
pub struct Messages {
    bytes: Vec<u8>,
    /// Where the value begins.
    start: usize,
    /// How far its bytes were looked at.
    seen: usize,
    state: State,
}

impl Messages {
    /// Nothing received yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes in what was received. Ask for messages before there is more.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.start);
        self.seen -= self.start;
        self.start = 0;
        self.bytes.extend_from_slice(bytes);
    }

    /// The next value, or what is wrong with it; `None` until more is received.
    pub fn next_message(&mut self) -> Option<Result<Value, Failure>> {
        while let Some(&byte) = self.bytes.get(self.seen) {
            match self.state.after(byte) {
                Step::Goes(state) => {
                    self.seen += 1;
                    self.state = state;
                }
                Step::Ends => {
                    self.seen += 1;
                    return Some(self.take());
                }
                Step::EndedBefore => return Some(self.take()),
                Step::Bad => {
                    self.seen += 1;
                    self.begin(State::Between);
                    return Some(Err(Failure::new("JSON parse error, expecting value")));
                }
            }
            if matches!(self.state, State::Between | State::Skipping) {
                self.start = self.seen;
            } else if self.seen - self.start > MAX_MESSAGE_BYTES {
                self.begin(State::Skipping);
                return Some(Err(Failure::new("JSON token size limit exceeded")));
            } else if self.state.nesting() > MAX_NESTING {
                self.begin(State::Skipping);
                return Some(Err(Failure::new("JSON nesting depth limit exceeded")));
            }
        }
        None
    }

    /// Forgets what was looked at.
    fn begin(&mut self, state: State) {
        self.start = self.seen;
        self.state = state;
    }

    fn take(&mut self) -> Result<Value, Failure> {
        let value = parse(&self.bytes[self.start..self.seen]);
        self.begin(State::Between);
        value
    }
}

fn parse(bytes: &[u8]) -> Result<Value, Failure> {
    let failed = |why: &str| Failure::new(format!("JSON parse error, {why}"));
    let text = std::str::from_utf8(bytes)
        .map_err(|_| failed("invalid UTF-8 sequence in string"))?
        .trim();
    value::parse(&double_quoted(text)).map_err(|why| failed(&why))
}

impl State {
    /// So many braces and brackets are open.
    fn nesting(self) -> u32 {
        match self {
            State::Inside { braces, brackets } => braces + brackets,
            _ => 0,
        }
    }

    fn after(self, byte: u8) -> Step {
        match self {
            State::Skipping if byte == b'\n' => Step::Goes(State::Between),
            State::Skipping => Step::Goes(self),
            State::Between => match byte {
                b' ' | b'\t' | b'\r' | b'\n' => Step::Goes(State::Between),
                b'{' | b'[' | b'}' | b']' | b'"' | b'\'' => State::inside(0, 0, byte),
                b',' | b':' => Step::Bad,
                _ => Step::Goes(State::Word),
            },
            State::Word => match byte {
                b' ' | b'\t' | b'\r' | b'\n' | b'{' | b'[' | b'}' | b']' | b'"' | b'\'' => {
                    Step::EndedBefore
                }
                _ => Step::Goes(self),
            },
            State::Inside { braces, brackets } => State::inside(braces, brackets, byte),
            State::Text {
                quote,
                escaped,
                braces,
                brackets,
            } => {
                let ends = byte == quote && !escaped;
                if ends && braces == 0 && brackets == 0 {
                    return Step::Ends;
                }
                Step::Goes(match ends {
                    true => State::Inside { braces, brackets },
                    false => State::Text {
                        quote,
                        escaped: byte == b'\\' && !escaped,
                        braces,
                        brackets,
                    },
                })
            }
        }
    }

    /// What a byte outside of strings does, with so many braces and brackets open.
    fn inside(braces: u32, brackets: u32, byte: u8) -> Step {
        let (braces, brackets) = match byte {
            b'{' => (Some(braces + 1), Some(brackets)),
            b'[' => (Some(braces), Some(brackets + 1)),
            b'}' => (braces.checked_sub(1), Some(brackets)),
            b']' => (Some(braces), brackets.checked_sub(1)),
            b'"' | b'\'' => {
                return Step::Goes(State::Text {
                    quote: byte,
                    escaped: false,
                    braces,
                    brackets,
                });
            }
            _ => (Some(braces), Some(brackets)),
        };
        match (braces, brackets) {
            (Some(0), Some(0)) => Step::Ends,
            (Some(braces), Some(brackets)) => Step::Goes(State::Inside { braces, brackets }),
            _ => Step::Bad,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    /// All messages of a stream that comes in pieces of the given lengths.
    fn cut(bytes: &[u8], lengths: impl IntoIterator<Item = usize>) -> Vec<Result<Value, String>> {
        let mut messages = Messages::new();
        let mut found = Vec::new();
        let mut rest = bytes;
        let mut lengths = lengths.into_iter();
        while !rest.is_empty() {
            let len = lengths.next().unwrap_or(usize::MAX).clamp(1, rest.len());
            messages.push(&rest[..len]);
            rest = &rest[len..];
            while let Some(message) = messages.next_message() {
                found.push(message.map_err(|failure| failure.text));
            }
            assert!(messages.bytes.len() <= MAX_MESSAGE_BYTES + len);
        }
        found
    }

    #[test]
    fn values_are_found_and_nonsense_is_survived() {
        let text = r#" {"a": "}\"{"} {'b': 'it\'s'}[1]
            3 "x" hello } {] {"c" 1} ,{"d":
            [{}]}"#;
        let found = cut(text.as_bytes(), []);
        let good: Vec<_> = found.iter().flatten().cloned().collect();
        assert_eq!(
            good,
            [
                json!({"a": "}\"{"}),
                json!({"b": "it's"}),
                json!([1]),
                json!(3),
                json!("x"),
                json!({"d": [{}]}),
            ]
        );
        let bad: Vec<_> = found.into_iter().filter_map(Result::err).collect();
        let expecting = "JSON parse error, expecting value";
        assert_eq!(bad[0], "JSON parse error, invalid keyword 'hello'");
        assert_eq!(bad[1..3], [expecting, expecting]);
        assert_eq!(bad[3], "JSON parse error, missing : in object pair");
        assert_eq!(bad[4..], [expecting]);
    }

    #[test]
    fn an_endless_message_is_refused_and_the_next_line_understood() {
        let mut text = b"{\"a\": \"".to_vec();
        text.resize(MAX_MESSAGE_BYTES + (1 << 20), b'x');
        text.extend(b"\"}\n{\"b\": 1}");
        let found = cut(&text, std::iter::repeat(4096));
        let expected = [
            Err("JSON token size limit exceeded".to_owned()),
            Ok(json!({"b": 1})),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn values_nest_as_deep_as_in_qemu_and_no_deeper() {
        let nested = |depth: usize| "[".repeat(depth) + &"]".repeat(depth) + "\n";
        let found = cut(nested(1024).as_bytes(), []);
        let [Ok(value)] = &found[..] else {
            panic!("{found:?}");
        };
        assert_eq!(value.to_string(), nested(1024).trim_end());
        for depth in [1025, 100_000] {
            let found = cut((nested(depth) + "[1]").as_bytes(), []);
            let error = "JSON nesting depth limit exceeded".to_owned();
            assert_eq!(found, [Err(error), Ok(json!([1]))]);
        }
    }

    proptest! {
        #[test]
        fn any_bytes_in_any_pieces_give_the_same(
            bytes in proptest::collection::vec(
                prop_oneof![
                    proptest::sample::select(b"{}[]\"'\\:, \n1ae".to_vec()), any::<u8>()
                ],
                0..200,
            ),
            lengths in proptest::collection::vec(1_usize..20, 0..100),
        ) {
            prop_assert_eq!(cut(&bytes, []), cut(&bytes, lengths));
        }

        #[test]
        fn values_come_out_as_they_went_in(
            texts in proptest::collection::vec("[^\u{0}]{0,20}", 1..6),
            lengths in proptest::collection::vec(1_usize..20, 0..100),
        ) {
            let values: Vec<Value> = texts.iter().map(|text| json!({"k": [text, {text: 1}]})).collect();
            let stream: String = values.iter().map(Value::to_string).collect();
            let found = cut(stream.as_bytes(), lengths);
            prop_assert_eq!(found, values.into_iter().map(Ok).collect::<Vec<_>>());
        }
    }
}

//! [`JsonText`]: long answers, written straight as text. A list of a thousand disks as values takes an
//! allocation for each member, and several times the time.
//!
//! What stands in several places is written once, and repeated from where it was written.
//!
//! Invariant: what is written between `{` and `}`, or `[` and `]`, is separated by whoever begins the
//! next part; nobody writes a comma.

use std::ops::Range;

use crate::json;

/// The most digits that a number has.
const MAX_DIGITS: usize = 20;

/// Text that is being written.
#[derive(Debug)]
pub struct JsonText {
    text: String,
    between: &'static str,
    after_key: &'static str,
}

impl JsonText {
    /// Without spaces.
    pub fn dense() -> JsonText {
        JsonText {
            text: String::new(),
            between: ",",
            after_key: ":",
        }
    }

    /// As QMP has it. The members of an object have to come in the order of [`json::compact`].
    pub fn of_qmp() -> JsonText {
        JsonText {
            text: String::new(),
            between: ", ",
            after_key: ": ",
        }
    }

    /// All that was written.
    pub fn into_text(self) -> String {
        self.text
    }

    /// Begins an object or a list; what comes next is in it.
    pub fn begin(&mut self, bracket: char) -> &mut Self {
        self.separate();
        self.text.push(bracket);
        self
    }

    /// Ends it.
    pub fn end(&mut self, bracket: char) -> &mut Self {
        self.text.push(bracket);
        self
    }

    /// Begins a member; its value comes next.
    pub fn key(&mut self, key: &'static str) -> &mut Self {
        debug_assert!(json::is_plain(key), "'{key}' is written as it is");
        self.separate();
        self.text.push('"');
        self.text.push_str(key);
        self.text.push('"');
        self.text.push_str(self.after_key);
        self
    }

    /// A string.
    pub fn string(&mut self, value: &str) -> &mut Self {
        self.separate();
        json::write_string(&mut self.text, value);
        self
    }

    /// A number.
    pub fn number(&mut self, value: u64) -> &mut Self {
        self.separate();
        push_number(&mut self.text, value);
        self
    }

    /// `true` or `false`.
    pub fn switch(&mut self, value: bool) -> &mut Self {
        self.raw(if value { "true" } else { "false" })
    }

    /// A value that is text already.
    pub fn raw(&mut self, value: &str) -> &mut Self {
        self.separate();
        self.text.push_str(value);
        self
    }

    /// A member that is a number.
    pub fn number_of(&mut self, key: &'static str, value: u64) -> &mut Self {
        self.key(key).number(value)
    }

    /// A member that is text.
    pub fn string_of(&mut self, key: &'static str, value: &str) -> &mut Self {
        self.key(key).string(value)
    }

    /// Where the value that comes next begins, for [`JsonText::since`].
    pub fn next_value(&mut self) -> usize {
        self.separate();
        self.text.len()
    }

    /// The place of what was written since [`JsonText::next_value`].
    pub fn since(&self, begin: usize) -> Range<usize> {
        begin..self.text.len()
    }

    /// Writes a value once more that stands at a place already.
    pub fn repeat(&mut self, place: Range<usize>) -> &mut Self {
        self.separate();
        self.text.extend_from_within(place);
        self
    }

    fn separate(&mut self) {
        // Within strings no quote is at the end, so these are brackets, and what follows a key or a value.
        match self.text.as_bytes().last() {
            None | Some(b'{' | b'[' | b':' | b' ' | b',') => {}
            Some(_) => self.text.push_str(self.between),
        }
    }
}

/// Writes a number; what formats all kinds of them takes several times as long.
fn push_number(text: &mut String, value: u64) {
    let (mut digits, mut begin, mut rest) = ([0; MAX_DIGITS], MAX_DIGITS, value);
    loop {
        begin -= 1;
        digits[begin] = b'0' + (rest % 10) as u8;
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    text.push_str(str::from_utf8(&digits[begin..]).unwrap_or_default());
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn what_is_written_is_json() {
        for mut text in [JsonText::dense(), JsonText::of_qmp()] {
            text.begin('{').number_of("a", 0).number_of("b", u64::MAX);
            text.key("c").begin('[').string("x: ").string("[");
            text.begin('[')
                .end(']')
                .begin('{')
                .end('}')
                .switch(true)
                .end(']');
            text.string_of("d", "\"{\u{e4}\n")
                .key("e")
                .raw("null")
                .end('}');
            let told: Value = serde_json::from_str(&text.into_text()).expect("JSON");
            let expected = json!({"a": 0, "b": u64::MAX, "c": ["x: ", "[", [], {}, true],
                "d": "\"{\u{e4}\n", "e": null});
            assert_eq!(told, expected);
        }
    }

    #[test]
    fn what_stands_somewhere_is_repeated() {
        for mut text in [JsonText::dense(), JsonText::of_qmp()] {
            text.begin('[').string("x");
            let begin = text.next_value();
            text.begin('{').number_of("a", 1_234_567_890).end('}');
            let place = text.since(begin);
            text.begin('{').key("b").repeat(place.clone()).end('}');
            text.repeat(place).end(']');
            let told: Value = serde_json::from_str(&text.into_text()).expect("JSON");
            let one = json!({"a": 1_234_567_890});
            assert_eq!(told, json!(["x", one, {"b": one}, one]));
        }
    }
}

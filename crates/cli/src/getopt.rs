//! A look-alike of glibc's `getopt_long`.
//!
//! Options and operands may be mixed (operands are kept for [`Parser::operands`]),
//! long options may be abbreviated, short ones bundled, and the messages are
//! glibc's, because people and scripts know them.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fmt;

/// One option of a command: how it is written, and what it means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OptionSpec {
    /// What the parser returns for it: the long name, or the letter of an option without one.
    pub id: &'static str,
    /// The letter after one dash.
    pub short: Option<char>,
    /// The name after two dashes.
    pub long: Option<&'static str>,
    /// The word that stands for its value; `None`: it takes none.
    pub value: Option<&'static str>,
    /// What it means, on one line.
    pub about: String,
}

impl OptionSpec {
    /// How it is written, with dashes.
    pub fn names(&self) -> impl Iterator<Item = String> {
        let short = self.short.map(|letter| format!("-{letter}"));
        let long = self.long.map(|name| format!("--{name}"));
        short.into_iter().chain(long)
    }
}

/// The options of C's `getopt`: letters, each followed by a colon if it takes a value.
pub fn letters(text: &'static str) -> Vec<OptionSpec> {
    let letters = text.char_indices().filter(|(_, letter)| *letter != ':');
    let option = |(at, letter): (usize, char)| OptionSpec {
        id: &text[at..at + letter.len_utf8()],
        short: Some(letter),
        long: None,
        value: text[at + letter.len_utf8()..]
            .starts_with(':')
            .then_some("VALUE"),
        about: String::new(),
    };
    letters.map(option).collect()
}

/// Why a command line is not carried out: what is wrong with it, in glibc's words where glibc would find it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UsageError {
    /// Nothing: the help is asked for.
    Help,
    /// Nothing: the version is asked for.
    Version,
    /// A letter that is no option.
    InvalidShort(char),
    /// A long name that is no option (with its dashes).
    Unrecognized(String),
    /// A long abbreviation that fits several options.
    Ambiguous(String, Vec<&'static str>),
    /// A letter without its value.
    ShortNeedsValue(char),
    /// A long option without its value.
    LongNeedsValue(&'static str),
    /// A long option with a value that it does not take.
    TakesNoValue(&'static str),
    /// A word that is not UTF-8.
    NotUnicode(OsString),
    /// A value that cannot be, or words that contradict each other.
    Wrong(String),
    /// An object that cannot be made; `--help` would be of no use.
    Object(String),
}

impl UsageError {
    /// An option that the specification lists and no code takes.
    pub fn not_taken(name: &str) -> UsageError {
        debug_assert!(false, "no code takes --{name}");
        UsageError::Wrong(format!("--{name} has no effect here"))
    }
}

impl From<String> for UsageError {
    fn from(message: String) -> Self {
        UsageError::Wrong(message)
    }
}

impl From<&str> for UsageError {
    fn from(message: &str) -> Self {
        UsageError::Wrong(message.to_owned())
    }
}

impl fmt::Display for UsageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            UsageError::Help | UsageError::Version => f.write_str("nothing is to be done"),
            UsageError::InvalidShort(letter) => write!(f, "invalid option -- '{letter}'"),
            UsageError::Unrecognized(word) => write!(f, "unrecognized option '{word}'"),
            UsageError::Ambiguous(word, names) => {
                write!(f, "option '{word}' is ambiguous; possibilities:")?;
                names.iter().try_for_each(|name| write!(f, " '--{name}'"))
            }
            UsageError::ShortNeedsValue(letter) => {
                write!(f, "option requires an argument -- '{letter}'")
            }
            UsageError::LongNeedsValue(name) => write!(f, "option '--{name}' requires an argument"),
            UsageError::TakesNoValue(name) => {
                write!(f, "option '--{name}' doesn't allow an argument")
            }
            UsageError::NotUnicode(word) => {
                write!(
                    f,
                    "the argument '{}' is not valid UTF-8",
                    word.to_string_lossy()
                )
            }
            UsageError::Wrong(message) | UsageError::Object(message) => f.write_str(message),
        }
    }
}

impl std::error::Error for UsageError {}

/// An option that was found, by its [`OptionSpec::id`], with its value; the empty text if it takes none.
pub type Found = (&'static str, String);

/// Walks over a command line (without the program's name).
#[derive(Debug)]
pub struct Parser {
    options: Vec<OptionSpec>,
    words: VecDeque<OsString>,
    operands: Vec<String>,
    /// The rest of a bundle of letters such as `-rp`.
    bundle: String,
    stop_at_operand: bool,
}

impl Parser {
    /// A parser that lets options and operands mix.
    pub fn new(options: Vec<OptionSpec>, words: Vec<OsString>) -> Self {
        Parser {
            options,
            words: words.into(),
            operands: Vec::new(),
            bundle: String::new(),
            stop_at_operand: false,
        }
    }

    /// A parser that takes everything from the first operand on as operands
    /// (glibc's `+`).
    pub fn until_operand(options: Vec<OptionSpec>, words: Vec<OsString>) -> Self {
        Parser {
            stop_at_operand: true,
            ..Parser::new(options, words)
        }
    }

    /// The next option, or `None` when only operands are left.
    pub fn next_option(&mut self) -> Result<Option<Found>, UsageError> {
        if !self.bundle.is_empty() {
            return self.letter().map(Some);
        }
        while let Some(word) = self.next_word()? {
            if word == "--" {
                break;
            }
            if let Some(long) = word.strip_prefix("--") {
                return self.long(long, &word).map(Some);
            }
            match word.strip_prefix('-') {
                Some(letters) if !letters.is_empty() => {
                    self.bundle = letters.to_owned();
                    return self.letter().map(Some);
                }
                _ => self.operands.push(word),
            }
            if self.stop_at_operand {
                break;
            }
        }
        while let Some(word) = self.next_word()? {
            self.operands.push(word);
        }
        Ok(None)
    }

    /// The operands, once [`Parser::next_option`] has returned `None`.
    pub fn operands(self) -> Vec<String> {
        self.operands
    }

    fn next_word(&mut self) -> Result<Option<String>, UsageError> {
        let word = self.words.pop_front().map(OsString::into_string);
        word.transpose().map_err(UsageError::NotUnicode)
    }

    fn letter(&mut self) -> Result<Found, UsageError> {
        let mut letters = self.bundle.chars();
        let letter = letters.next().unwrap_or('-');
        let rest = letters.as_str().to_owned();
        let spec = self.options.iter().find(|spec| spec.short == Some(letter));
        let Some(spec) = spec else {
            self.bundle = rest;
            return Err(UsageError::InvalidShort(letter));
        };
        let id = spec.id;
        if spec.value.is_none() {
            self.bundle = rest;
            return Ok((id, String::new()));
        }
        self.bundle.clear();
        if !rest.is_empty() {
            return Ok((id, rest));
        }
        let value = self.next_word()?;
        Ok((id, value.ok_or(UsageError::ShortNeedsValue(letter))?))
    }

    fn long(&mut self, text: &str, word: &str) -> Result<Found, UsageError> {
        let (name, value) = match text.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (text, None),
        };
        let (spec, name) = self.find_long(name, word)?;
        let id = spec.id;
        match (spec.value, value) {
            (None, Some(_)) => Err(UsageError::TakesNoValue(name)),
            (None, None) => Ok((id, String::new())),
            (Some(_), Some(value)) => Ok((id, value)),
            (Some(_), None) => {
                let value = self.next_word()?;
                Ok((id, value.ok_or(UsageError::LongNeedsValue(name))?))
            }
        }
    }

    /// The option named `name` or the only one that begins with it.
    fn find_long(&self, name: &str, word: &str) -> Result<(&OptionSpec, &'static str), UsageError> {
        let named = || {
            self.options
                .iter()
                .filter_map(|spec| Some((spec, spec.long?)))
        };
        if let Some(exact) = named().find(|(_, long)| *long == name) {
            return Ok(exact);
        }
        let fitting: Vec<_> = named().filter(|(_, long)| long.starts_with(name)).collect();
        match fitting.as_slice() {
            [] => Err(UsageError::Unrecognized(word.to_owned())),
            [only] => Ok(*only),
            several => Err(UsageError::Ambiguous(
                word.to_owned(),
                several.iter().map(|(_, long)| *long).collect(),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::option_rows::options_in;

    const OPTIONS: &str = "-f, --format FMT\n-p, --progress\n--force\n-T, --trace PATTERN\n";

    fn parse(words: &[&str]) -> (Vec<Result<Found, String>>, Vec<String>) {
        let words = words.iter().map(OsString::from).collect();
        let mut parser = Parser::new(options_in(OPTIONS), words);
        let mut found = Vec::new();
        loop {
            match parser.next_option() {
                Ok(Some(option)) => found.push(Ok(option)),
                Ok(None) => return (found, parser.operands()),
                Err(error) => found.push(Err(error.to_string())),
            }
        }
    }

    fn found<const N: usize>(options: [(&'static str, &str); N]) -> [Result<Found, String>; N] {
        options.map(|(id, value)| Ok((id, value.to_owned())))
    }

    #[test]
    fn options_and_operands_mix_and_bundle() {
        let (options, operands) = parse(&["a", "-pfraw", "b", "--format", "x", "--", "-p"]);
        let expected = [("progress", ""), ("format", "raw"), ("format", "x")];
        assert_eq!(options, found(expected));
        assert_eq!(operands, ["a", "b", "-p"]);
    }

    #[test]
    fn long_names_may_be_abbreviated() {
        let (options, _) = parse(&["--form=raw", "--prog", "--trace", "-T", "-Tx"]);
        let expected = [
            ("format", "raw"),
            ("progress", ""),
            ("trace", "-T"),
            ("trace", "x"),
        ];
        assert_eq!(options, found(expected));
    }

    #[test]
    fn letters_are_those_of_getopt() {
        let words = ["-vP", "7", "x"].iter().map(OsString::from).collect();
        let mut parser = Parser::new(letters("qP:v"), words);
        assert_eq!(parser.next_option(), Ok(Some(("v", String::new()))));
        assert_eq!(parser.next_option(), Ok(Some(("P", "7".to_owned()))));
        assert_eq!(parser.next_option(), Ok(None));
    }

    #[test]
    fn errors_speak_as_glibc_does() {
        let (found, _) = parse(&["-x", "--nope=1", "--fo", "--progress=3", "--format"]);
        let texts: Vec<_> = found.into_iter().map(Result::unwrap_err).collect();
        assert_eq!(
            texts,
            [
                "invalid option -- 'x'",
                "unrecognized option '--nope=1'",
                "option '--fo' is ambiguous; possibilities: '--format' '--force'",
                "option '--progress' doesn't allow an argument",
                "option '--format' requires an argument",
            ]
        );
        assert_eq!(
            parse(&["-f"]).0,
            [Err("option requires an argument -- 'f'".into())]
        );
    }

    #[test]
    fn a_stopping_parser_leaves_the_rest_alone() {
        let words = ["-p", "create", "-f", "x"].iter().map(OsString::from);
        let mut parser = Parser::until_operand(options_in(OPTIONS), words.collect());
        let progress = ("progress", String::new());
        assert_eq!(parser.next_option(), Ok(Some(progress)));
        assert_eq!(parser.next_option(), Ok(None));
        assert_eq!(parser.operands(), ["create", "-f", "x"]);
    }
}

//! A look-alike of glibc's `getopt_long`.
//!
//! Options and operands may be mixed (operands are kept for [`Parser::operands`]),
//! long options may be abbreviated, short ones bundled, and the messages are
//! glibc's, because people and scripts know them.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fmt;

/// Whether an option takes a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Takes {
    /// Never.
    Nothing,
    /// Always: in the same word or in the next.
    Value,
    /// Only in the same word (`-T[x]`, `--name[=x]`).
    Maybe,
}

/// One option of a tool; `T` is the tool's own name for it.
#[derive(Debug, Clone, Copy)]
pub struct OptionSpec<T> {
    /// What the parser returns for it.
    pub id: T,
    /// The letter after one dash.
    pub short: Option<char>,
    /// The name after two dashes.
    pub long: Option<&'static str>,
    /// Whether it takes a value.
    pub takes: Takes,
}

impl<T> OptionSpec<T> {
    /// An option with a letter and a long name.
    pub const fn new(id: T, short: char, long: &'static str, takes: Takes) -> Self {
        OptionSpec {
            id,
            short: Some(short),
            long: Some(long),
            takes,
        }
    }

    /// An option with a letter only.
    pub const fn short(id: T, short: char, takes: Takes) -> Self {
        OptionSpec {
            id,
            short: Some(short),
            long: None,
            takes,
        }
    }

    /// An option with a long name only.
    pub const fn long(id: T, long: &'static str, takes: Takes) -> Self {
        OptionSpec {
            id,
            short: None,
            long: Some(long),
            takes,
        }
    }
}

/// How an option is written, whatever it means: what completions and manuals need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// The letter after one dash.
    pub short: Option<char>,
    /// The name after two dashes.
    pub long: Option<&'static str>,
    /// Whether it takes a value.
    pub takes: Takes,
}

/// The shapes of a tool's options.
pub fn shapes<T>(options: &'static [OptionSpec<T>]) -> Vec<Shape> {
    let shape = |spec: &OptionSpec<T>| Shape {
        short: spec.short,
        long: spec.long,
        takes: spec.takes,
    };
    options.iter().map(shape).collect()
}

/// What is wrong with a command line, in glibc's words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UsageError {
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
}

impl fmt::Display for UsageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
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
        }
    }
}

impl std::error::Error for UsageError {}

/// An option that was found, with its value.
pub type Found<T> = (T, Option<String>);

/// Walks over a command line (without the program's name).
#[derive(Debug)]
pub struct Parser<T: 'static> {
    options: &'static [OptionSpec<T>],
    words: VecDeque<OsString>,
    operands: Vec<String>,
    /// The rest of a bundle of letters such as `-rp`.
    bundle: String,
    stop_at_operand: bool,
}

impl<T: Copy> Parser<T> {
    /// A parser that lets options and operands mix.
    pub fn new(options: &'static [OptionSpec<T>], words: Vec<OsString>) -> Self {
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
    pub fn until_operand(options: &'static [OptionSpec<T>], words: Vec<OsString>) -> Self {
        Parser {
            stop_at_operand: true,
            ..Parser::new(options, words)
        }
    }

    /// The next option, or `None` when only operands are left.
    pub fn next_option(&mut self) -> Result<Option<Found<T>>, UsageError> {
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

    fn letter(&mut self) -> Result<Found<T>, UsageError> {
        let mut letters = self.bundle.chars();
        let letter = letters.next().unwrap_or('-');
        let rest = letters.as_str().to_owned();
        let spec = self.options.iter().find(|spec| spec.short == Some(letter));
        let spec = *spec.ok_or_else(|| {
            self.bundle.clone_from(&rest);
            UsageError::InvalidShort(letter)
        })?;
        match spec.takes {
            Takes::Nothing => {
                self.bundle = rest;
                return Ok((spec.id, None));
            }
            _ => self.bundle.clear(),
        }
        if !rest.is_empty() {
            return Ok((spec.id, Some(rest)));
        }
        if spec.takes == Takes::Maybe {
            return Ok((spec.id, None));
        }
        let value = self
            .next_word()?
            .ok_or(UsageError::ShortNeedsValue(letter))?;
        Ok((spec.id, Some(value)))
    }

    fn long(&mut self, text: &str, word: &str) -> Result<Found<T>, UsageError> {
        let (name, value) = match text.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (text, None),
        };
        let (spec, name) = self.find_long(name, word)?;
        match (spec.takes, value) {
            (Takes::Nothing, Some(_)) => Err(UsageError::TakesNoValue(name)),
            (Takes::Value, None) => {
                let value = self.next_word()?.ok_or(UsageError::LongNeedsValue(name))?;
                Ok((spec.id, Some(value)))
            }
            (_, value) => Ok((spec.id, value)),
        }
    }

    /// The option named `name` or the only one that begins with it.
    fn find_long(
        &self,
        name: &str,
        word: &str,
    ) -> Result<(OptionSpec<T>, &'static str), UsageError> {
        let named = || {
            self.options
                .iter()
                .filter_map(|spec| Some((*spec, spec.long?)))
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

    const OPTIONS: &[OptionSpec<char>] = &[
        OptionSpec::new('f', 'f', "format", Takes::Value),
        OptionSpec::new('p', 'p', "progress", Takes::Nothing),
        OptionSpec::long('F', "force", Takes::Nothing),
        OptionSpec::new('T', 'T', "trace", Takes::Maybe),
    ];

    fn parse(words: &[&str]) -> (Vec<Result<Found<char>, String>>, Vec<String>) {
        let mut parser = Parser::new(OPTIONS, words.iter().map(OsString::from).collect());
        let mut found = Vec::new();
        loop {
            match parser.next_option() {
                Ok(Some(option)) => found.push(Ok(option)),
                Ok(None) => return (found, parser.operands()),
                Err(error) => found.push(Err(error.to_string())),
            }
        }
    }

    #[test]
    fn options_and_operands_mix_and_bundle() {
        let (found, operands) = parse(&["a", "-pfraw", "b", "--format", "x", "--", "-p"]);
        let expected = [
            ('p', None),
            ('f', Some("raw".into())),
            ('f', Some("x".into())),
        ];
        assert_eq!(found, expected.map(Ok));
        assert_eq!(operands, ["a", "b", "-p"]);
    }

    #[test]
    fn long_names_may_be_abbreviated() {
        let (found, _) = parse(&["--form=raw", "--prog", "--trace", "-T", "-Tx"]);
        let expected = [
            ('f', Some("raw".into())),
            ('p', None),
            ('T', None),
            ('T', None),
            ('T', Some("x".into())),
        ];
        assert_eq!(found, expected.map(Ok));
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
        let words = ["-p", "create", "-f", "x"]
            .iter()
            .map(OsString::from)
            .collect();
        let mut parser = Parser::until_operand(OPTIONS, words);
        assert_eq!(parser.next_option(), Ok(Some(('p', None))));
        assert_eq!(parser.next_option(), Ok(None));
        assert_eq!(parser.operands(), ["create", "-f", "x"]);
    }
}

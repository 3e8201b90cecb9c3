//! [`Section`]: a table of the file, of which one key after the other is taken.
//!
//! Invariant: what nobody has taken is a mistake, told with the key that was probably meant.

use std::collections::BTreeSet;
use std::ops::Range;

use serde_json::{Map, Number, Value};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::place::{Mistake, Place, Source};

/// A value with its place.
#[derive(Debug, Clone)]
pub(super) struct Entry<'a> {
    pub(super) key: String,
    pub(super) key_span: Range<usize>,
    pub(super) value: &'a Spanned<DeValue<'a>>,
}

/// A table, or what is left of it.
#[derive(Debug)]
pub(super) struct Section<'a> {
    pub(super) source: Source<'a>,
    /// How messages call it: `[daemon]`, `disk 'a'`.
    pub(super) name: String,
    /// Where it begins.
    pub(super) place: Place,
    left: Vec<Entry<'a>>,
    /// The keys that were asked for.
    known: BTreeSet<String>,
}

impl<'a> Section<'a> {
    pub(super) fn new(
        source: Source<'a>,
        name: impl Into<String>,
        span: &Range<usize>,
        table: &'a DeTable<'a>,
    ) -> Section<'a> {
        let entry = |(key, value): (&'a Spanned<_>, &'a Spanned<DeValue<'a>>)| Entry {
            key: key_text(key),
            key_span: key.span(),
            value,
        };
        Section {
            source,
            name: name.into(),
            place: source.place(span.start),
            left: table.iter().map(entry).collect(),
            known: BTreeSet::new(),
        }
    }

    /// What stands under a key.
    pub(super) fn take(&mut self, key: &str) -> Option<Entry<'a>> {
        self.known.insert(key.to_owned());
        let at = self.left.iter().position(|entry| entry.key == key)?;
        Some(self.left.remove(at))
    }

    /// A text that nobody has taken yet.
    pub(super) fn peek_text(&self, key: &str) -> Option<String> {
        let entry = self.left.iter().find(|entry| entry.key == key)?;
        entry.value.get_ref().as_str().map(str::to_owned)
    }

    /// Everything that is left, whatever it is called.
    pub(super) fn take_all(&mut self) -> Vec<Entry<'a>> {
        std::mem::take(&mut self.left)
    }

    /// What is wrong with the section as a whole.
    pub(super) fn wrong(&self, text: impl Into<String>) -> Mistake {
        self.source.mistake(self.place, text)
    }

    fn wrong_type(&self, entry: &Entry<'_>, expected: &str) -> Mistake {
        let found = entry.value.get_ref().type_str();
        self.source.wrong(
            &entry.value.span(),
            format!(
                "'{}' of {} is {expected}, not {found}",
                entry.key, self.name
            ),
        )
    }

    /// A text, if it is there, with its place.
    pub(super) fn text(&mut self, key: &str) -> Result<Option<(String, Place)>, Mistake> {
        let Some(entry) = self.take(key) else {
            return Ok(None);
        };
        match entry.value.get_ref().as_str() {
            Some(text) => Ok(Some((
                text.to_owned(),
                self.source.place(entry.value.span().start),
            ))),
            None => Err(self.wrong_type(&entry, "a text")),
        }
    }

    /// A text that must be there.
    pub(super) fn need_text(&mut self, key: &str, why: &str) -> Result<(String, Place), Mistake> {
        match self.text(key)? {
            Some(found) => Ok(found),
            None => Err(self.wrong(format!("'{key}' is missing in {}: {why}", self.name))),
        }
    }

    /// A switch, if it is there.
    pub(super) fn switch(&mut self, key: &str) -> Result<Option<bool>, Mistake> {
        let Some(entry) = self.take(key) else {
            return Ok(None);
        };
        match entry.value.get_ref().as_bool() {
            Some(value) => Ok(Some(value)),
            None => Err(self.wrong_type(&entry, "true or false")),
        }
    }

    /// A whole number of 0 or more, if it is there.
    pub(super) fn number(&mut self, key: &str) -> Result<Option<u64>, Mistake> {
        let Some(entry) = self.take(key) else {
            return Ok(None);
        };
        match self.json(&entry)?.as_u64() {
            Some(number) => Ok(Some(number)),
            None => Err(self.wrong_type(&entry, "a whole number of 0 or more")),
        }
    }

    /// One of some words, if it is there.
    pub(super) fn word<T: Copy>(
        &mut self,
        key: &str,
        words: &[(&str, T)],
    ) -> Result<Option<T>, Mistake> {
        let Some((text, place)) = self.text(key)? else {
            return Ok(None);
        };
        match words.iter().find(|(word, _)| *word == text) {
            Some((_, value)) => Ok(Some(*value)),
            None => {
                let all: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
                let meant = meant(&text, all.iter().copied());
                let all = all.join(", ");
                Err(self.source.mistake(
                    place,
                    format!(
                        "'{key}' of {} is one of {all}, not '{text}'{meant}",
                        self.name
                    ),
                ))
            }
        }
    }

    /// Texts, if there are some, with their places.
    pub(super) fn texts(&mut self, key: &str) -> Result<Vec<(String, Place)>, Mistake> {
        let Some(entry) = self.take(key) else {
            return Ok(Vec::new());
        };
        let expected = "a list of texts";
        let Some(items) = entry.value.get_ref().as_array() else {
            return Err(self.wrong_type(&entry, expected));
        };
        let mut texts = Vec::new();
        for item in items.iter() {
            match item.get_ref().as_str() {
                Some(text) => texts.push((text.to_owned(), self.source.place(item.span().start))),
                None => return Err(self.wrong_type(&entry, expected)),
            }
        }
        Ok(texts)
    }

    /// A table, if it is there.
    pub(super) fn table(&mut self, key: &str, name: &str) -> Result<Option<Section<'a>>, Mistake> {
        let Some(entry) = self.take(key) else {
            return Ok(None);
        };
        match entry.value.get_ref().as_table() {
            Some(table) => Ok(Some(Section::new(
                self.source,
                name,
                &entry.key_span,
                table,
            ))),
            None => Err(self.wrong_type(&entry, "a table")),
        }
    }

    /// Tables, as many as there are.
    pub(super) fn tables(&mut self, key: &str) -> Result<Vec<Section<'a>>, Mistake> {
        let Some(entry) = self.take(key) else {
            return Ok(Vec::new());
        };
        let expected = format!("a list of tables ([[{key}]])");
        let Some(items) = entry.value.get_ref().as_array() else {
            return Err(self.wrong_type(&entry, &expected));
        };
        let mut tables = Vec::new();
        for item in items.iter() {
            let Some(table) = item.get_ref().as_table() else {
                return Err(self.wrong_type(&entry, &expected));
            };
            let name = format!("[[{key}]]");
            tables.push(Section::new(self.source, name, &item.span(), table));
        }
        Ok(tables)
    }

    /// What stands under a key, as JSON.
    pub(super) fn json(&self, entry: &Entry<'_>) -> Result<Value, Mistake> {
        to_json(self.source, entry.value)
    }

    /// Refuses what is left; `more` are keys that were not asked for one by one.
    pub(super) fn finish(self, more: &[String]) -> Result<(), Mistake> {
        let Some(entry) = self.left.first() else {
            return Ok(());
        };
        let known = self.known.iter().chain(more).map(String::as_str);
        let meant = meant(&entry.key, known);
        Err(self.source.wrong(
            &entry.key_span,
            format!("{} has no key '{}'{meant}", self.name, entry.key),
        ))
    }
}

fn key_text(key: &Spanned<std::borrow::Cow<'_, str>>) -> String {
    key.get_ref().clone().into_owned()
}

/// `; did you mean 'x'?` if a word is like one that is known.
pub(super) fn meant<'k>(word: &str, known: impl IntoIterator<Item = &'k str>) -> String {
    match vellum_options::similar::closest(word, known) {
        Some(other) => format!("; did you mean '{other}'?"),
        None => String::new(),
    }
}

/// A value as JSON. Times are none of it.
pub(super) fn to_json(source: Source<'_>, value: &Spanned<DeValue<'_>>) -> Result<Value, Mistake> {
    let wrong = |text: &str| Err(source.wrong(&value.span(), text));
    Ok(match value.get_ref() {
        DeValue::String(text) => Value::String(text.clone().into_owned()),
        DeValue::Boolean(value) => Value::Bool(*value),
        DeValue::Integer(number) => {
            let (digits, radix) = (number.as_str(), number.radix());
            let signed = i64::from_str_radix(digits, radix).map(Number::from);
            match signed.or_else(|_| u64::from_str_radix(digits, radix).map(Number::from)) {
                Ok(number) => Value::Number(number),
                Err(_) => return wrong("this number is too large"),
            }
        }
        DeValue::Float(number) => {
            let parsed = number.as_str().parse().ok().and_then(Number::from_f64);
            match parsed {
                Some(number) => Value::Number(number),
                None => return wrong("this is no number that can be passed on"),
            }
        }
        DeValue::Datetime(_) => return wrong("nothing here is a time; put texts in quotes"),
        DeValue::Array(items) => {
            let items = items.iter().map(|item| to_json(source, item));
            Value::Array(items.collect::<Result<_, _>>()?)
        }
        DeValue::Table(table) => {
            let mut members = Map::new();
            for (key, value) in table.iter() {
                members.insert(key_text(key), to_json(source, value)?);
            }
            Value::Object(members)
        }
    })
}

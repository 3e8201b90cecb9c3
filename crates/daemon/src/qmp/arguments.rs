//! [`Arguments`]: what a command is given, taken out one by one.

use serde_json::{Map, Value};
use vellum_options::Options;

use super::Failure;

/// The arguments of a command that nobody has taken yet.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Arguments {
    members: Map<String, Value>,
    /// What messages write before their names: `addr.` of those of an object `addr`.
    prefix: String,
}

impl Arguments {
    /// All that nobody has taken yet, as JSON.
    pub(crate) fn as_json(&self) -> String {
        Value::Object(self.members.clone()).to_string()
    }

    /// All of them.
    pub fn new(members: Map<String, Value>) -> Self {
        Arguments {
            members,
            prefix: String::new(),
        }
    }

    fn wrong_type(&self, key: &str, expected: &str) -> Failure {
        let prefix = &self.prefix;
        Failure::new(format!(
            "Invalid parameter type for '{prefix}{key}', expected: {expected}"
        ))
    }

    fn missing(&self, key: &str) -> Failure {
        Failure::new(format!("Parameter '{}{key}' is missing", self.prefix))
    }

    /// A text, if it is there.
    ///
    /// # Errors
    /// If it is something else.
    pub fn text(&mut self, key: &str) -> Result<Option<String>, Failure> {
        match self.members.remove(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(self.wrong_type(key, "string")),
        }
    }

    /// A text that must be there.
    ///
    /// # Errors
    /// If it is not, or something else.
    pub fn need_text(&mut self, key: &str) -> Result<String, Failure> {
        self.text(key)?.ok_or_else(|| self.missing(key))
    }

    /// A switch, if it is there.
    ///
    /// # Errors
    /// If it is something else.
    pub fn switch(&mut self, key: &str) -> Result<Option<bool>, Failure> {
        match self.members.remove(key) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(value)),
            Some(_) => Err(self.wrong_type(key, "boolean")),
        }
    }

    /// Whether a switch is there, and on.
    ///
    /// # Errors
    /// If it is something else.
    pub(crate) fn is_on(&mut self, key: &str) -> Result<bool, Failure> {
        Ok(self.switch(key)?.unwrap_or(false))
    }

    /// A whole number, if it is there.
    ///
    /// # Errors
    /// If it is something else.
    pub fn number(&mut self, key: &str) -> Result<Option<i64>, Failure> {
        match self.members.remove(key) {
            None => Ok(None),
            Some(Value::Number(number)) => match number.as_i64() {
                Some(number) => Ok(Some(number)),
                None => Err(self.wrong_type(key, "integer")),
            },
            Some(_) => Err(self.wrong_type(key, "integer")),
        }
    }

    /// A switch that must be there.
    ///
    /// # Errors
    /// If it is not, or something else.
    pub fn need_switch(&mut self, key: &str) -> Result<bool, Failure> {
        self.switch(key)?.ok_or_else(|| self.missing(key))
    }

    /// A whole number that must be there.
    ///
    /// # Errors
    /// If it is not, or something else.
    pub fn need_number(&mut self, key: &str) -> Result<i64, Failure> {
        self.number(key)?.ok_or_else(|| self.missing(key))
    }

    /// One of some names, if it is there.
    ///
    /// # Errors
    /// If it is something else.
    pub fn choice<T: Copy>(
        &mut self,
        key: &str,
        choices: &[(&str, T)],
    ) -> Result<Option<T>, Failure> {
        let Some(word) = self.text(key)? else {
            return Ok(None);
        };
        match choices.iter().find(|(name, _)| *name == word) {
            Some((_, choice)) => Ok(Some(*choice)),
            None => Err(Failure::new(format!(
                "Parameter '{key}' does not accept value '{word}'"
            ))),
        }
    }

    /// One of some names; it must be there.
    ///
    /// # Errors
    /// If it is not, or something else.
    pub fn need_choice<T: Copy>(&mut self, key: &str, choices: &[(&str, T)]) -> Result<T, Failure> {
        let choice = self.choice(key, choices)?;
        choice.ok_or_else(|| self.missing(key))
    }

    /// A number of bytes, if it is there; one below 0 counts modulo 2^64, as in QEMU.
    ///
    /// # Errors
    /// If it is something else.
    pub fn size(&mut self, key: &str) -> Result<Option<u64>, Failure> {
        let bytes = |number: serde_json::Number| {
            let negative = number.as_i64().map(|number| number as u64);
            number.as_u64().or(negative)
        };
        match self.members.remove(key) {
            None => Ok(None),
            Some(Value::Number(number)) if bytes(number.clone()).is_some() => Ok(bytes(number)),
            Some(_) => Err(Failure::new(format!(
                "Parameter '{}{key}' expects uint64",
                self.prefix
            ))),
        }
    }

    /// A number of bytes that must be there.
    ///
    /// # Errors
    /// If it is not, or something else.
    pub fn need_size(&mut self, key: &str) -> Result<u64, Failure> {
        self.size(key)?.ok_or_else(|| self.missing(key))
    }

    /// Anything, if it is there.
    pub fn any(&mut self, key: &str) -> Option<Value> {
        self.members.remove(key)
    }

    /// Anything; it must be there.
    ///
    /// # Errors
    /// If it is not.
    pub fn need_any(&mut self, key: &str) -> Result<Value, Failure> {
        self.any(key).ok_or_else(|| self.missing(key))
    }

    /// An array, if it is there.
    ///
    /// # Errors
    /// If it is something else.
    pub fn array(&mut self, key: &str) -> Result<Option<Vec<Value>>, Failure> {
        match self.members.remove(key) {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(_) => Err(self.wrong_type(key, "array")),
        }
    }

    /// An array that must be there.
    ///
    /// # Errors
    /// If it is not, or something else.
    pub fn need_array(&mut self, key: &str) -> Result<Vec<Value>, Failure> {
        self.array(key)?.ok_or_else(|| self.missing(key))
    }

    /// An object, if it is there.
    ///
    /// # Errors
    /// If it is something else.
    pub fn object(&mut self, key: &str) -> Result<Option<Arguments>, Failure> {
        match self.members.remove(key) {
            None => Ok(None),
            Some(Value::Object(members)) => Ok(Some(Arguments {
                members,
                prefix: format!("{}{key}.", self.prefix),
            })),
            Some(_) => Err(self.wrong_type(key, "object")),
        }
    }

    /// An object that must be there.
    ///
    /// # Errors
    /// If it is not, or something else.
    pub fn need_object(&mut self, key: &str) -> Result<Arguments, Failure> {
        self.object(key)?.ok_or_else(|| self.missing(key))
    }

    /// An array of objects that must be there.
    ///
    /// # Errors
    /// If it is not, or one of them is something else.
    pub fn need_objects(&mut self, key: &str) -> Result<Vec<Arguments>, Failure> {
        let items = self.need_array(key)?;
        let object = |(index, item)| match item {
            Value::Object(members) => Ok(Arguments {
                members,
                prefix: format!("{}{key}[{index}].", self.prefix),
            }),
            _ => Err(self.wrong_type(&format!("{key}[{index}]"), "object")),
        };
        items.into_iter().enumerate().map(object).collect()
    }

    /// The text that is the only argument of a command.
    ///
    /// # Errors
    /// If it is not there, or something else is.
    pub(crate) fn only_text(mut self, key: &str) -> Result<String, Failure> {
        let text = self.need_text(key)?;
        self.finish().map(|()| text)
    }

    /// The switch that is the only argument of a command; off, if it is not there.
    ///
    /// # Errors
    /// If something else is there.
    pub(crate) fn only_switch(mut self, key: &str) -> Result<bool, Failure> {
        let is_on = self.is_on(key)?;
        self.finish().map(|()| is_on)
    }

    /// Ends the taking.
    ///
    /// # Errors
    /// If something is left that the command does not know.
    pub fn finish(self) -> Result<(), Failure> {
        match self.members.keys().next() {
            None => Ok(()),
            Some(key) => Err(Failure::new(format!(
                "Parameter '{}{key}' is unexpected",
                self.prefix
            ))),
        }
    }

    /// All that is left, as it came.
    pub fn to_value(&self) -> Value {
        Value::Object(self.members.clone())
    }

    /// All that is left, as the options of a command line.
    ///
    /// # Errors
    /// As [`Options::from_object`].
    pub fn into_options(self) -> Result<Options, Failure> {
        Ok(Options::from_object(self.members)?)
    }
}

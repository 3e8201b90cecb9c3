//! [`Arguments`]: what a command is given, taken out one by one.

use serde_json::{Map, Value};

use super::Failure;
use crate::options::Options;

/// The arguments of a command that nobody has taken yet.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Arguments(Map<String, Value>);

fn wrong_type(key: &str, expected: &str) -> Failure {
    Failure::new(format!(
        "Invalid parameter type for '{key}', expected: {expected}"
    ))
}

fn missing(key: &str) -> Failure {
    Failure::new(format!("Parameter '{key}' is missing"))
}

impl Arguments {
    /// All of them.
    pub fn new(members: Map<String, Value>) -> Self {
        Arguments(members)
    }

    /// A text, if it is there.
    ///
    /// # Errors
    /// If it is something else.
    pub fn text(&mut self, key: &str) -> Result<Option<String>, Failure> {
        match self.0.remove(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(wrong_type(key, "string")),
        }
    }

    /// A text that must be there.
    ///
    /// # Errors
    /// If it is not, or something else.
    pub fn need_text(&mut self, key: &str) -> Result<String, Failure> {
        self.text(key)?.ok_or_else(|| missing(key))
    }

    /// A switch, if it is there.
    ///
    /// # Errors
    /// If it is something else.
    pub fn switch(&mut self, key: &str) -> Result<Option<bool>, Failure> {
        match self.0.remove(key) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(value)),
            Some(_) => Err(wrong_type(key, "boolean")),
        }
    }

    /// A whole number, if it is there.
    ///
    /// # Errors
    /// If it is something else.
    pub fn number(&mut self, key: &str) -> Result<Option<i64>, Failure> {
        match self.0.remove(key) {
            None => Ok(None),
            Some(Value::Number(number)) => match number.as_i64() {
                Some(number) => Ok(Some(number)),
                None => Err(wrong_type(key, "integer")),
            },
            Some(_) => Err(wrong_type(key, "integer")),
        }
    }

    /// A whole number that must be there.
    ///
    /// # Errors
    /// If it is not, or something else.
    pub fn need_number(&mut self, key: &str) -> Result<i64, Failure> {
        self.number(key)?.ok_or_else(|| missing(key))
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

    /// An array, if it is there.
    ///
    /// # Errors
    /// If it is something else.
    pub fn array(&mut self, key: &str) -> Result<Option<Vec<Value>>, Failure> {
        match self.0.remove(key) {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(_) => Err(wrong_type(key, "array")),
        }
    }

    /// An array that must be there.
    ///
    /// # Errors
    /// If it is not, or something else.
    pub fn need_array(&mut self, key: &str) -> Result<Vec<Value>, Failure> {
        self.array(key)?.ok_or_else(|| missing(key))
    }

    /// An object that must be there.
    ///
    /// # Errors
    /// If it is not, or something else.
    pub fn need_object(&mut self, key: &str) -> Result<Arguments, Failure> {
        match self.0.remove(key) {
            None => Err(missing(key)),
            Some(Value::Object(members)) => Ok(Arguments(members)),
            Some(_) => Err(wrong_type(key, "object")),
        }
    }

    /// Ends the taking.
    ///
    /// # Errors
    /// If something is left that the command does not know.
    pub fn finish(self) -> Result<(), Failure> {
        match self.0.keys().next() {
            None => Ok(()),
            Some(key) => Err(Failure::new(format!("Parameter '{key}' is unexpected"))),
        }
    }

    /// All that is left, as the options of a command line.
    pub fn into_options(self) -> Options {
        Options::from_object(self.0)
    }
}

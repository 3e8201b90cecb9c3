//! JSON whose objects have each key once: of two that are the same a client means one, and
//! nobody knows which.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

/// What a text with a key twice is refused for.
pub(super) const DUPLICATE_KEY: &str = "duplicate key";

/// A value in which no object has a key twice.
pub(super) struct UniqueKeys(pub(super) Value);

impl<'de> Deserialize<'de> for UniqueKeys {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyValue).map(UniqueKeys)
    }
}

struct AnyValue;

impl<'de> Visitor<'de> for AnyValue {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut all: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(UniqueKeys(value)) = all.next_element()? {
            values.push(value);
        }
        Ok(values.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut all: A) -> Result<Value, A::Error> {
        let mut members = Map::new();
        while let Some((key, UniqueKeys(value))) = all.next_entry::<String, _>()? {
            if members.insert(key, value).is_some() {
                return Err(A::Error::custom(DUPLICATE_KEY));
            }
        }
        Ok(members.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_what_they_are_elsewhere_unless_a_key_is_there_twice() {
        for text in [
            r#"{"a": [1, -2, 1.5, true, null, "\u00e9"], "b": {"a": {}}}"#,
            "18446744073709551615",
            "[]",
        ] {
            let UniqueKeys(value) = serde_json::from_str(text).expect(text);
            assert_eq!(value, serde_json::from_str::<Value>(text).expect(text));
        }
        for text in [
            r#"{"a": 1, "a": 1}"#,
            r#"[{"b": {"a": 1, "c": 2, "a": 3}}]"#,
        ] {
            let error = serde_json::from_str::<UniqueKeys>(text).err().expect(text);
            assert!(error.to_string().starts_with(DUPLICATE_KEY), "{error}");
        }
    }
}

//! The schema of QMP, as tables of text describe it.

use std::collections::{BTreeMap, VecDeque};

use serde_json::{Map, Value, json};
use vellum_graph::driver_names;

use super::parse::{Declaration, Kind, Member, Word, declarations};

pub(crate) const COMMANDS: &str = include_str!("commands.txt");

const EVENTS: &str = include_str!("events.txt");

pub(crate) const TYPES: &str = include_str!("types.txt");

/// The enumeration whose values are the names of drivers.
const DRIVER: &str = "BlockdevAddOptionsDriver";

/// Types that JSON has.
const BUILTIN: [(&str, &str); 6] = [
    ("any", "value"),
    ("bool", "boolean"),
    ("int", "int"),
    ("null", "null"),
    ("number", "number"),
    ("str", "string"),
];

/// All declarations, and those entries that are told already.
pub(crate) struct Schema {
    types: BTreeMap<String, Declaration>,
    /// The numbers of types.
    numbers: BTreeMap<String, usize>,
    /// Types that are to be told.
    next: VecDeque<String>,
}

/// Whether an event is declared.
pub(crate) fn has_event(name: &str) -> bool {
    declarations(EVENTS).iter().any(|one| one.name == name)
}

/// The schema of these commands.
pub(crate) fn introspect(commands: &[&str]) -> Value {
    let types = declarations(TYPES);
    let mut schema = Schema {
        types: types
            .into_iter()
            .map(|one| (one.name.clone(), one))
            .collect(),
        numbers: BTreeMap::new(),
        next: VecDeque::new(),
    };
    let mut entries = Vec::new();
    for declared in declarations(COMMANDS) {
        if commands.contains(&declared.name.as_str()) {
            entries.push(schema.call(declared, true));
        }
    }
    for declared in declarations(EVENTS) {
        entries.push(schema.call(declared, false));
    }
    while let Some(name) = schema.next.pop_front() {
        entries.push(schema.entry(&name));
    }
    Value::Array(entries)
}

impl Schema {
    /// A command or an event.
    fn call(&mut self, declared: Declaration, is_command: bool) -> Value {
        let Declaration {
            name,
            features,
            kind,
        } = declared;
        let Kind::Call { argument, result } = kind else {
            return Value::Null;
        };
        let argument = match argument {
            Ok(type_name) => type_name,
            // Members of its own are a type without a name; empty ones are all the same.
            Err(members) => {
                let own = match members.is_empty() {
                    true => "Empty".to_owned(),
                    false => format!("{name}:arguments"),
                };
                self.types.entry(own.clone()).or_insert(Declaration {
                    name: own.clone(),
                    features: Vec::new(),
                    kind: Kind::Object { members, tag: None },
                });
                own
            }
        };
        let mut entry = entry(&name, if is_command { "command" } else { "event" });
        entry.insert("arg-type".into(), self.number(&argument).into());
        if is_command {
            let result = result.unwrap_or_else(|| "Empty".to_owned());
            entry.insert("ret-type".into(), self.number(&result).into());
        }
        add_features(&mut entry, &features);
        Value::Object(entry)
    }

    /// What stands for a type, which is told later.
    fn number(&mut self, type_name: &str) -> String {
        if let Some(inner) = type_name.strip_prefix('[') {
            let inner = self.number(inner.trim_end_matches(']'));
            let list = format!("[{inner}]");
            if !self.numbers.contains_key(&list) {
                self.numbers.insert(list.clone(), 0);
                self.next.push_back(list.clone());
            }
            return list;
        }
        let is_builtin = BUILTIN.iter().any(|(name, _)| *name == type_name);
        if let Some(number) = self.numbers.get(type_name) {
            return match is_builtin {
                true => type_name.to_owned(),
                false => number.to_string(),
            };
        }
        let number = self.numbers.len();
        self.numbers.insert(type_name.to_owned(), number);
        self.next.push_back(type_name.to_owned());
        match is_builtin {
            true => type_name.to_owned(),
            false => number.to_string(),
        }
    }

    fn entry(&mut self, type_name: &str) -> Value {
        if let Some(inner) = type_name.strip_prefix('[') {
            let mut list = entry(type_name, "array");
            list.insert("element-type".into(), inner.trim_end_matches(']').into());
            return Value::Object(list);
        }
        if let Some((name, json_type)) = BUILTIN.iter().find(|(name, _)| *name == type_name) {
            let mut builtin = entry(name, "builtin");
            builtin.insert("json-type".into(), (*json_type).into());
            return Value::Object(builtin);
        }
        let number = self.number(type_name);
        let Declaration { features, kind, .. } = self.types[type_name].clone();
        let mut told = match kind {
            Kind::Enum(words) => enumeration(&number, type_name, &words),
            Kind::Alternate(types) => {
                let members = types.iter().map(|one| json!({"type": self.number(one)}));
                let members: Vec<Value> = members.collect();
                let mut alternate = entry(&number, "alternate");
                alternate.insert("members".into(), members.into());
                alternate
            }
            Kind::Object { members, tag } => self.object(&number, &members, tag),
            Kind::Call { .. } => Map::new(),
        };
        add_features(&mut told, &features);
        Value::Object(told)
    }

    fn object(
        &mut self,
        number: &str,
        members: &[Member],
        tag: Option<(String, Vec<(String, String)>)>,
    ) -> Map<String, Value> {
        let mut object = entry(number, "object");
        let told = members.iter().map(|member| {
            let type_name = self.number(&member.type_name);
            let mut told = Map::from_iter([
                ("name".to_owned(), json!(member.name)),
                ("type".to_owned(), json!(type_name)),
            ]);
            if member.is_optional {
                told.insert("default".into(), Value::Null);
            }
            add_features(&mut told, &member.features);
            Value::Object(told)
        });
        object.insert("members".into(), told.collect());
        let Some((tag, variants)) = tag else {
            return object;
        };
        // Every value has a variant; most have no members.
        let by = members.iter().find(|member| member.name == tag);
        let by = by.map(|member| member.type_name.as_str());
        let values = match by.and_then(|by| Some((by, &self.types.get(by)?.kind))) {
            Some((by, Kind::Enum(words))) => values(by, words),
            _ => Vec::new(),
        };
        let told = values.into_iter().map(|value| {
            let variant = variants.iter().find(|(known, _)| *known == value);
            let type_name = variant.map_or("Empty", |(_, type_name)| type_name);
            json!({"case": value, "type": self.number(type_name)})
        });
        let told: Vec<Value> = told.collect();
        object.insert("tag".into(), tag.into());
        object.insert("variants".into(), told.into());
        object
    }
}

fn entry(name: &str, meta_type: &str) -> Map<String, Value> {
    Map::from_iter([
        ("name".to_owned(), json!(name)),
        ("meta-type".to_owned(), json!(meta_type)),
    ])
}

fn add_features(entry: &mut Map<String, Value>, features: &[String]) {
    if !features.is_empty() {
        entry.insert("features".into(), json!(features));
    }
}

/// The values of an enumeration that there are.
pub(super) fn values(type_name: &str, words: &[Word]) -> Vec<String> {
    let drivers = driver_names();
    let is_there = |word: &&Word| type_name != DRIVER || drivers.contains(&word.text.as_str());
    let there = words.iter().filter(is_there);
    there.map(|word| word.text.clone()).collect()
}

pub(crate) fn enumeration(number: &str, type_name: &str, words: &[Word]) -> Map<String, Value> {
    let values = values(type_name, words);
    let members = words.iter().filter(|word| values.contains(&word.text));
    let members = members.map(|word| {
        let mut member = Map::from_iter([("name".to_owned(), json!(word.text))]);
        add_features(&mut member, &word.features);
        Value::Object(member)
    });
    let members: Vec<Value> = members.collect();
    let mut told = entry(number, "enum");
    told.insert("members".into(), members.into());
    told.insert("values".into(), json!(values));
    told
}

#[cfg(test)]
mod tests {
    use crate::commands::names;

    use super::*;

    #[test]
    fn every_command_is_declared() {
        let declared = declarations(COMMANDS);
        for name in names() {
            let is_declared = declared.iter().any(|one| one.name == name);
            assert!(is_declared, "{name} is missing in commands.txt");
        }
    }

    #[test]
    fn every_type_that_is_named_is_declared_and_told_once() {
        let schema = introspect(&names());
        let entries = schema.as_array().unwrap();
        let mut told: Vec<&str> = Vec::new();
        for entry in entries {
            let name = entry["name"].as_str().unwrap();
            assert!(!told.contains(&name), "{name} is told twice");
            told.push(name);
        }
        let check = |named: &Value| {
            let named = named.as_str().unwrap();
            assert!(told.contains(&named), "{named} is not told");
        };
        let none = Vec::new();
        for entry in entries {
            for key in ["arg-type", "ret-type", "element-type"] {
                if let Some(named) = entry.get(key) {
                    check(named);
                }
            }
            for key in ["members", "variants"] {
                for one in entry[key].as_array().unwrap_or(&none) {
                    if let Some(named) = one.get("type") {
                        check(named);
                    }
                }
            }
        }
    }

    #[test]
    fn every_driver_is_declared() {
        let types = declarations(TYPES);
        let drivers = types.iter().find(|one| one.name == DRIVER).unwrap();
        let Kind::Enum(words) = &drivers.kind else {
            panic!("{drivers:?}");
        };
        for driver in driver_names() {
            let declared = words.iter().any(|word| word.text == driver);
            assert!(declared, "{driver} is missing in types.txt");
        }
    }
}

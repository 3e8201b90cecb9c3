//! `query-qmp-schema`: every entry is compared with the real daemon's.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use crate::place::{NAME, Place};

/// Entries by name.
type Entries = BTreeMap<String, Value>;

fn entries(schema: Value) -> Entries {
    let all = schema.as_array().expect("a schema").clone();
    let named = all.into_iter().map(|entry| {
        let name = entry["name"].as_str().expect("a name");
        (name.to_owned(), entry)
    });
    named.collect()
}

/// Two schemas, and what was found to differ.
struct Comparison {
    ours: Entries,
    theirs: Entries,
    seen: BTreeSet<(String, String)>,
    found: BTreeSet<String>,
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

impl Comparison {
    fn note(&mut self, path: &str, what: &str) {
        self.found.insert(format!("{path} {what}"));
    }

    /// Commands and events, and all that they lead to.
    fn run(&mut self) {
        let calls = |entries: &Entries| {
            let is_call = |entry: &&Value| {
                let meta_type = text(&entry["meta-type"]);
                meta_type == "command" || meta_type == "event"
            };
            let names = entries.values().filter(is_call);
            let names = names.map(|entry| text(&entry["name"]).to_owned());
            names.collect::<BTreeSet<_>>()
        };
        let (ours, theirs) = (calls(&self.ours), calls(&self.theirs));
        for name in ours.union(&theirs) {
            match (ours.contains(name), theirs.contains(name)) {
                (true, true) => {}
                (true, false) => {
                    self.note(name, "is ours");
                    continue;
                }
                _ => {
                    self.note(name, "is theirs");
                    continue;
                }
            }
            let (our, their) = (self.ours[name].clone(), self.theirs[name].clone());
            self.features(name, &our, &their);
            self.types(name, text(&our["arg-type"]), text(&their["arg-type"]));
            let results = (text(&our["ret-type"]), text(&their["ret-type"]));
            self.types(&format!("{name}->"), results.0, results.1);
        }
    }

    fn features(&mut self, path: &str, our: &Value, their: &Value) {
        if our["features"] != their["features"] {
            let what = format!("features {} {}", our["features"], their["features"]);
            self.note(path, &what);
        }
    }

    fn types(&mut self, path: &str, our: &str, their: &str) {
        if !self.seen.insert((our.to_owned(), their.to_owned())) || our.is_empty() {
            return;
        }
        let (our, their) = (self.ours[our].clone(), self.theirs[their].clone());
        if our["meta-type"] != their["meta-type"] || our["json-type"] != their["json-type"] {
            return self.note(path, "is of another type");
        }
        self.features(path, &our, &their);
        match text(&our["meta-type"]) {
            "array" => {
                let elements = (text(&our["element-type"]), text(&their["element-type"]));
                self.types(&format!("{path}[]"), elements.0, elements.1);
            }
            "enum" => self.values(path, &our, &their),
            "object" => {
                self.members(path, &our, &their);
                self.variants(path, &our, &their);
            }
            "alternate" => self.alternates(path, &our, &their),
            _ => {}
        }
    }

    fn values(&mut self, path: &str, our: &Value, their: &Value) {
        let values = |one: &Value| {
            let all = list(&one["members"]).iter();
            let named = all.map(|value| (text(&value["name"]).to_owned(), value.clone()));
            named.collect::<BTreeMap<_, _>>()
        };
        let (ours, theirs) = (values(our), values(their));
        for (value, our) in &ours {
            match theirs.get(value) {
                None => self.note(path, &format!("= ours {value}")),
                Some(their) => self.features(&format!("{path} = {value}"), our, their),
            }
        }
        for value in theirs.keys().filter(|value| !ours.contains_key(*value)) {
            self.note(path, &format!("= theirs {value}"));
        }
    }

    fn members(&mut self, path: &str, our: &Value, their: &Value) {
        let named = |one: &Value| {
            let all = list(&one["members"]).iter();
            let named = all.map(|member| (text(&member["name"]).to_owned(), member.clone()));
            named.collect::<BTreeMap<_, _>>()
        };
        let (ours, theirs) = (named(our), named(their));
        for (name, member) in &ours {
            let path = format!("{path}.{name}");
            let Some(other) = theirs.get(name) else {
                self.note(&path, "is ours");
                continue;
            };
            if member.get("default") != other.get("default") {
                self.note(&path, "is optional on one side");
            }
            self.features(&path, member, other);
            self.types(&path, text(&member["type"]), text(&other["type"]));
        }
        for name in theirs.keys().filter(|name| !ours.contains_key(*name)) {
            self.note(&format!("{path}.{name}"), "is theirs");
        }
    }

    fn variants(&mut self, path: &str, our: &Value, their: &Value) {
        if our["tag"] != their["tag"] {
            self.note(path, "has another tag");
        }
        // Values of one side only were told with the tag.
        for variant in list(&our["variants"]) {
            let same = |other: &&Value| other["case"] == variant["case"];
            if let Some(other) = list(&their["variants"]).iter().find(same) {
                let path = format!("{path}<{}>", text(&variant["case"]));
                self.types(&path, text(&variant["type"]), text(&other["type"]));
            }
        }
    }

    fn alternates(&mut self, path: &str, our: &Value, their: &Value) {
        let by_kind = |entries: &Entries, one: &Value| {
            let all = list(&one["members"]).iter();
            let typed = all.map(|member| {
                let name = text(&member["type"]);
                let entry = &entries[name];
                let kind = format!("{}{}", entry["meta-type"], entry["json-type"]);
                (kind, name.to_owned())
            });
            typed.collect::<BTreeMap<_, _>>()
        };
        let (ours, theirs) = (by_kind(&self.ours, our), by_kind(&self.theirs, their));
        if ours.keys().ne(theirs.keys()) {
            return self.note(path, "takes other types");
        }
        for (kind, name) in &ours {
            self.types(path, name, &theirs[kind]);
        }
    }
}

/// What differs, and why: a difference, in which `{}` stands for each of the names in turn, and the reason.
const REASONS: &[(&str, &[&str], &str)] = include!("schema_differences.rs");

#[test]
fn every_entry_is_the_real_daemons_or_has_a_reason() {
    let place = Place::new();
    let mut ours = place.ours("");
    let mut theirs = place.start(NAME.as_ref(), "");
    let mut comparison = Comparison {
        ours: entries(ours.must("query-qmp-schema", json!({}))),
        theirs: entries(theirs.must("query-qmp-schema", json!({}))),
        seen: BTreeSet::new(),
        found: BTreeSet::new(),
    };
    comparison.run();
    let explained = REASONS.iter().flat_map(|(difference, names, _)| {
        let each = names.iter().map(|name| difference.replace("{}", name));
        let whole = names.is_empty().then(|| (*difference).to_owned());
        each.chain(whole)
    });
    let explained: BTreeSet<String> = explained.collect();
    let unexplained: Vec<_> = comparison.found.difference(&explained).collect();
    assert!(unexplained.is_empty(), "{unexplained:#?}");
    let unneeded: Vec<_> = explained.difference(&comparison.found).collect();
    assert!(unneeded.is_empty(), "no such difference: {unneeded:#?}");
    ours.end();
    theirs.end();
}

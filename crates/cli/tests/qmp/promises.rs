//! What `query-qmp-schema` promises is taken: every member of every type that commands take is
//! sent, and none is refused as unexpected.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use crate::place::{Daemon, Place};

/// A text that names nothing, but for the one node that there is.
const NAME: &str = "zz";
/// How many types are gone through within a command's own.
const MOST_DEPTH: usize = 2;
/// How many types are filled in within another: some contain themselves.
const MOST_FILLED: usize = 6;
/// Commands that end what the others need; and `blockdev-reopen`, which has the options of all
/// nodes for its type, but takes of a node only those that can be changed.
const LEFT_OUT: [&str; 3] = ["quit", "qmp_capabilities", "blockdev-reopen"];

/// Puts the value of a type where a command takes it.
type Wrap<'a> = &'a dyn Fn(Value) -> Value;

struct Walk {
    daemon: Daemon,
    types: BTreeMap<String, Value>,
    /// Members, with their types, of which a command was sent all that is within: what is below one node is
    /// taken as below any other.
    gone_through: BTreeSet<[String; 3]>,
    asked: usize,
    refused: Vec<String>,
}

fn list(of: &Value) -> Vec<Value> {
    of.as_array().cloned().unwrap_or_default()
}

fn text(of: &Value) -> String {
    of.as_str().unwrap_or_default().to_owned()
}

fn with(value: &Value, name: &str, member: Value) -> Value {
    let mut value = value.clone();
    value[name] = member;
    value
}

impl Walk {
    /// The least value of a type.
    fn least(&self, type_name: &str, depth: usize) -> Value {
        let described = &self.types[type_name];
        match &*text(&described["meta-type"]) {
            "builtin" => match &*text(&described["json-type"]) {
                "string" => json!(NAME),
                "int" => json!(512),
                "number" => json!(1.5),
                "boolean" => json!(false),
                "null" => Value::Null,
                _ => json!(1),
            },
            "enum" => described["members"][0]["name"].clone(),
            "array" => json!([]),
            "alternate" => {
                let all = list(&described["members"]);
                let is_text = |one: &&Value| {
                    let named = &self.types[&text(&one["type"])];
                    named["json-type"] == "string" || named["meta-type"] == "enum"
                };
                let chosen = all.iter().find(is_text).unwrap_or(&all[0]);
                self.least(&text(&chosen["type"]), depth + 1)
            }
            _ if depth > MOST_FILLED => json!({}),
            _ => {
                let first = list(&described["variants"]).first().cloned();
                self.least_of(described, first.as_ref(), depth)
            }
        }
    }

    /// The least value of an object, of that variant.
    fn least_of(&self, described: &Value, variant: Option<&Value>, depth: usize) -> Value {
        let mut object = Map::new();
        let mut fill = |members: &Value| {
            for member in list(members) {
                if member.get("default").is_none() {
                    let value = self.least(&text(&member["type"]), depth + 1);
                    object.insert(text(&member["name"]), value);
                }
            }
        };
        fill(&described["members"]);
        if let Some(variant) = variant {
            fill(&self.types[&text(&variant["type"])]["members"]);
            object.insert(text(&described["tag"]), variant["case"].clone());
        }
        object.into()
    }

    /// Sends each member of a type, and of those within it.
    fn go_through(&mut self, command: &str, wrap: Wrap<'_>, type_name: &str, depth: usize) {
        let described = self.types[type_name].clone();
        match &*text(&described["meta-type"]) {
            "array" => {
                let element = text(&described["element-type"]);
                let within = |value: Value| wrap(json!([value]));
                return self.go_through(command, &within, &element, depth);
            }
            "alternate" => {
                for one in list(&described["members"]) {
                    self.go_through(command, wrap, &text(&one["type"]), depth);
                }
                return;
            }
            "object" => {}
            _ => return,
        }
        let variants = list(&described["variants"]);
        let least = self.least_of(&described, variants.first(), 0);
        self.send_members(command, wrap, &least, &described["members"], depth);
        for variant in &variants {
            let least = self.least_of(&described, Some(variant), 0);
            let members = self.types[&text(&variant["type"])]["members"].clone();
            self.send_members(command, wrap, &least, &members, depth);
        }
    }

    fn send_members(
        &mut self,
        command: &str,
        wrap: Wrap<'_>,
        least: &Value,
        members: &Value,
        depth: usize,
    ) {
        for member in list(members) {
            let (name, type_name) = (text(&member["name"]), text(&member["type"]));
            // A tag says which members there are.
            if least.get(&name).is_none() {
                let value = self.least(&type_name, 0);
                self.send(command, wrap(with(least, &name, value)));
            }
            let place = [command.to_owned(), name.clone(), type_name.clone()];
            if depth < MOST_DEPTH && self.gone_through.insert(place) {
                let within = |value: Value| wrap(with(least, &name, value));
                self.go_through(command, &within, &type_name, depth + 1);
            }
        }
    }

    fn send(&mut self, command: &str, arguments: Value) {
        self.asked += 1;
        let answer = self.daemon.ask(command, arguments.clone());
        let why = text(&answer["error"]["desc"]);
        if why.contains("is unexpected") {
            self.refused.push(format!("{command} {arguments}: {why}"));
        }
    }
}

#[test]
fn every_member_of_the_schema_is_taken() {
    let place = Place::new();
    let mut daemon = place.ours("");
    let node = json!({"driver": "null-co", "node-name": NAME, "size": 1 << 20});
    daemon.must("blockdev-add", node);
    let entries = list(&daemon.must("query-qmp-schema", json!({})));
    let named = entries.into_iter().map(|one| (text(&one["name"]), one));
    let mut walk = Walk {
        daemon,
        types: named.collect(),
        gone_through: BTreeSet::new(),
        asked: 0,
        refused: Vec::new(),
    };
    let is_command = |one: &&Value| one["meta-type"] == "command";
    let commands: Vec<Value> = walk.types.values().filter(is_command).cloned().collect();
    for command in commands {
        let (name, argument) = (text(&command["name"]), text(&command["arg-type"]));
        if LEFT_OUT.contains(&&*name) {
            continue;
        }
        walk.go_through(&name, &|value| value, &argument, 0);
    }
    assert!(walk.refused.is_empty(), "{:#?}", walk.refused);
    assert!(walk.asked > 900, "only {} asked", walk.asked);
    walk.daemon.end();
}

//! Objects and their types, as the real daemon tells them.

use serde_json::{Value, json};

use crate::place::Step::{self, Ask};
use crate::place::{NAME, Place, same};

fn new(kind: &str, id: &str) -> Step {
    Ask("object-add", json!({"qom-type": kind, "id": id}))
}

fn get(path: &str, property: &str) -> Step {
    Ask("qom-get", json!({"path": path, "property": property}))
}

#[test]
fn objects_are_made_listed_and_deleted_alike() {
    let list = |path: &str| Ask("qom-list", json!({"path": path}));
    let del = |id: &str| Ask("object-del", json!({"id": id}));
    let set = |property: &str, value: Value| {
        let arguments = json!({"path": "t", "property": property, "value": value});
        Ask("qom-set", arguments)
    };
    let authorizer = json!({"qom-type": "authz-simple", "id": "az", "identity": "x"});
    same(
        &["--object", "iothread,id=t,poll-grow=2"],
        &[
            new("main-loop", "ml"),
            new("main-loop", "ml2"),
            new("main-loop", "ml"),
            new("thread-context", "tc"),
            new("secret_keyring", "sk"),
            new("nosuch", "x"),
            Ask("object-add", authorizer.clone()),
            Ask("object-add", authorizer),
            list("/"),
            list("/objects"),
            list("/objects/ml"),
            list("/objects/tc"),
            list("/objects/t"),
            list("/chardevs"),
            list("/chardevs/m"),
            list("/backend"),
            list("/no"),
            get("/", "type"),
            get("/chardevs/m", "type"),
            get("/objects/ml", "aio-max-batch"),
            get("ml", "type"),
            get("t", "poll-max-ns"),
            get("t", "poll-grow"),
            get("t", "no"),
            set("poll-grow", json!(7)),
            get("t", "poll-grow"),
            set("no", json!(7)),
            del("ml"),
            del("tc"),
            del("az"),
            del("az"),
            del("t"),
        ],
    );
}

#[test]
fn types_have_the_same_parents_and_properties() {
    let place = Place::new();
    let mut ours = place.ours("");
    let mut theirs = place.start(NAME.as_ref(), "");
    let arguments = json!({"abstract": true});
    let types = ours.must("qom-list-types", arguments.clone());
    let known = theirs.must("qom-list-types", arguments);
    let known = known.as_array().expect("types");
    for one in types.as_array().expect("types") {
        // QEMU does not say so itself of some that nobody can make.
        let parent = |other: &&Value| other["name"] == one["name"];
        let other = known.iter().find(parent);
        let other = other.unwrap_or_else(|| panic!("{one} is not known"));
        assert_eq!(one["parent"], other["parent"], "{one}");
        // Sockets and others have properties that are QEMU's own.
        let name = one["name"].as_str().expect("a name");
        if name.starts_with("chardev") || one.get("abstract").is_some() {
            continue;
        }
        let asked = json!({"typename": name});
        let sorted = |answer: Value| {
            let mut all: Vec<String> = answer
                .as_array()
                .expect("properties")
                .iter()
                .map(Value::to_string)
                .collect();
            all.sort();
            all
        };
        let properties = sorted(ours.must("qom-list-properties", asked.clone()));
        let expected = sorted(theirs.must("qom-list-properties", asked));
        assert_eq!(properties, expected, "{name}");
    }
    ours.end();
    theirs.end();
}

#[test]
fn types_are_found_by_what_they_implement() {
    same(
        &[],
        &[
            Ask("qom-list-properties", json!({"typename": "nosuch"})),
            Ask("qom-list-types", json!({"implements": "nosuch"})),
            Ask("qom-list-types", json!({"implements": "event-loop-base"})),
            Ask(
                "qom-list-types",
                json!({"implements": "event-loop-base", "abstract": true}),
            ),
            Ask("qom-list-types", json!({"implements": "authz"})),
            Ask("qom-list-types", json!({"implements": "iothread"})),
        ],
    );
}

//! `docs/grafana-dashboard.json`: it is what Grafana loads, and asks for nothing that is not there.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::client::Served;
use crate::grafana::{DASHBOARD, PANELS};
use crate::metrics::{busy, scrape};
use crate::place::{PATIENCE, Place};

fn dashboard() -> Value {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let text = std::fs::read_to_string(docs.join("grafana-dashboard.json")).expect("a file");
    serde_json::from_str(&text).expect("JSON")
}

/// The names of metrics in a query.
pub fn named(query: &str) -> impl Iterator<Item = &str> {
    let words = query.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
    words.filter(|word| word.starts_with("vellum_"))
}

/// The names of all samples that a daemon tells.
fn told(served: &Served) -> BTreeSet<String> {
    let text = scrape(served);
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let names = lines.filter_map(|line| line.split(['{', ' ']).next());
    names.map(str::to_owned).collect()
}

/// The names of all samples that there are: those of several daemons.
pub fn told_by_daemons() -> BTreeSet<String> {
    let served = busy();
    let mut all = told(&served);
    served.daemon.kill();
    all.extend(told_with_a_log_and_warnings());
    all
}

/// Of a daemon whose disk has a write log, on a file system that is fuller than it should be.
fn told_with_a_log_and_warnings() -> BTreeSet<String> {
    let place = Place::new();
    let text = "[daemon]\nspace-warning = ['1%']\n[[disk]]\nname = 'w'\nimage = 'o'\n\
                format = 'qcow2'\noptions = { journal = true }\n";
    place.write("disks.toml", text);
    let daemon = place.ours("--config disks.toml --metrics unix:ctl");
    let served = Served {
        place,
        daemon,
        port: 0,
    };
    let begin = Instant::now();
    let mut all = told(&served);
    // File systems are looked at beside all else.
    while !all.contains("vellum_filesystem_warning_percent") && begin.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(50));
        all = told(&served);
    }
    served.daemon.end();
    all
}

/// Variables of Grafana's own, in the place of spans of time.
const SPANS: [&str; 2] = ["$__rate_interval", "$__range"];

fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().expect(key)
}

/// The queries of all panels.
fn queries(dashboard: &Value) -> Vec<&str> {
    let panels = list(dashboard, "panels").iter();
    let targets = panels.flat_map(|panel| list(panel, "targets"));
    let queries = targets.map(|target| target["expr"].as_str().expect("a query"));
    queries.collect()
}

#[test]
fn every_query_names_metrics_that_are_told() {
    let dashboard = dashboard();
    let mut queries = queries(&dashboard);
    let variables = list(&dashboard["templating"], "list").iter();
    queries.extend(variables.filter_map(|variable| variable["query"].as_str()));
    let told = told_by_daemons();
    let mut asked = 0;
    for name in queries.iter().flat_map(|query| named(query)) {
        assert!(told.contains(name), "{name} is not among {told:?}");
        asked += 1;
    }
    assert!(asked > 20, "{asked}");
}

#[test]
fn every_query_is_one_for_prometheus() {
    let dashboard = dashboard();
    let variables = list(&dashboard["templating"], "list").iter();
    let known: Vec<String> = variables
        .map(|variable| format!("${}", variable["name"].as_str().expect("a name")))
        .chain(SPANS.map(str::to_owned))
        .collect();
    let mut rules = Vec::new();
    for (number, query) in queries(&dashboard).into_iter().enumerate() {
        let used = query.split('$').skip(1).map(|rest| {
            let end = rest.find(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
            format!("${}", &rest[..end.unwrap_or(rest.len())])
        });
        for variable in used {
            assert!(known.contains(&variable), "{variable} of {query}");
        }
        let expr = SPANS
            .iter()
            .fold(query.to_owned(), |expr, span| expr.replace(span, "5m"));
        rules.push(json!({"record": format!("query:{number}"), "expr": expr}));
    }
    let place = Place::new();
    // YAML has JSON in it.
    let text = json!({"groups": [{"name": "dashboard", "rules": rules}]}).to_string();
    place.write("rules.yml", text);
    let said = place.must("promtool", "check rules rules.yml");
    assert!(
        said.contains(&format!("{} rules found", rules.len())),
        "{said}"
    );
}

/// What is wrong with a dashboard.
fn judge(dashboard: &Value) -> Result<(), String> {
    let mut frame = dashboard.clone();
    let panels = frame.as_object_mut().and_then(|it| it.remove("panels"));
    DASHBOARD.check(&frame, "dashboard")?;
    let panels = panels.unwrap_or_default();
    let mut ids = BTreeSet::new();
    let mut places = BTreeSet::new();
    for panel in panels.as_array().ok_or("no panels")? {
        let shape = PANELS.iter().find(|(kind, _)| panel["type"] == *kind);
        let (kind, shape) = shape.ok_or_else(|| format!("a panel of type {}", panel["type"]))?;
        shape.check(panel, kind)?;
        if !ids.insert(panel["id"].to_string()) {
            return Err(format!("two panels {}", panel["id"]));
        }
        let number = |key: &str| panel["gridPos"][key].as_u64().unwrap_or_default();
        let (columns, rows) = (number("x")..number("x") + number("w"), number("y"));
        if columns.end > 24 {
            return Err(format!("panel {} sticks out", panel["id"]));
        }
        for column in columns {
            if !(rows..rows + number("h")).all(|row| places.insert((column, row))) {
                return Err(format!("panel {} lies over another one", panel["id"]));
            }
        }
        let targets = list(panel, "targets");
        let marks = targets.iter().map(|target| target["refId"].to_string());
        if targets.is_empty() || marks.collect::<BTreeSet<_>>().len() < targets.len() {
            return Err(format!(
                "panel {} has no queries, or two as one",
                panel["id"]
            ));
        }
    }
    Ok(())
}

#[test]
fn it_is_what_grafana_takes_and_every_panel_has_a_place_of_its_own() {
    assert_eq!(judge(&dashboard()), Ok(()));
}

#[test]
fn what_grafana_does_not_take_is_noticed() {
    let changes: [(&str, Value, &str); 12] = [
        ("/id", json!(7), "has 'id'"),
        ("/time", json!({"from": "now-1h"}), "has no 'to'"),
        ("/schemaVersion", json!("39"), "schemaVersion is"),
        ("/templating/list/0/type", json!("database"), "type is"),
        ("/panels/0/type", json!("graph"), "a panel of type"),
        ("/panels/0/titel", json!("Disks"), "has 'titel'"),
        ("/panels/0/title", json!(""), "title is"),
        ("/panels/1/id", json!(1), "two panels"),
        ("/panels/1/gridPos/x", json!(0), "lies over"),
        ("/panels/1/gridPos/w", json!(25), "w is"),
        (
            "/panels/0/targets/0/datasource/uid",
            json!("mine"),
            "uid is",
        ),
        ("/panels/0/targets", json!([]), "has no queries"),
    ];
    for (place, value, expected) in changes {
        let mut changed = dashboard();
        let (above, key) = place.rsplit_once('/').expect("a place");
        let above = changed.pointer_mut(above).expect("it is there");
        above[key] = value;
        let why = judge(&changed).expect_err(place);
        assert!(why.contains(expected), "{place}: {why}");
    }
}

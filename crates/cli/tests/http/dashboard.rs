//! `docs/grafana-dashboard.json`: it is what Grafana loads, and asks for nothing that is not there.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::client::Served;
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
    std::fs::write(place.path("disks.toml"), text).expect("a file");
    let daemon = place.ours(&["--config", "disks.toml", "--metrics", "unix:ctl"]);
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

#[test]
fn every_query_names_metrics_that_are_told() {
    let dashboard = dashboard();
    let mut queries: Vec<&str> = Vec::new();
    for panel in dashboard["panels"].as_array().expect("panels") {
        for target in panel["targets"].as_array().expect("targets") {
            queries.push(target["expr"].as_str().expect("a query"));
        }
    }
    for variable in dashboard["templating"]["list"]
        .as_array()
        .expect("variables")
    {
        queries.extend(variable["definition"].as_str());
    }
    let told = told_by_daemons();
    let mut asked = 0;
    for name in queries.iter().flat_map(|query| named(query)) {
        assert!(told.contains(name), "{name} is not among {told:?}");
        asked += 1;
    }
    assert!(asked > 20, "{asked}");
}

#[test]
fn every_panel_is_what_grafana_knows_and_in_a_place_of_its_own() {
    let dashboard = dashboard();
    assert!(dashboard["schemaVersion"].as_u64() >= Some(36));
    assert!(
        dashboard.get("id").is_none(),
        "Grafana numbers it when it is loaded"
    );
    let mut ids = BTreeSet::new();
    let mut places = BTreeSet::new();
    for panel in dashboard["panels"].as_array().expect("panels") {
        let kind = panel["type"].as_str().expect("a type");
        assert!(["stat", "timeseries"].contains(&kind), "{kind}");
        assert!(ids.insert(panel["id"].as_u64().expect("a number")));
        for key in ["title", "description"] {
            assert!(
                panel[key].as_str().is_some_and(|text| !text.is_empty()),
                "{panel}"
            );
        }
        let number = |key: &str| panel["gridPos"][key].as_u64().expect(key);
        let (x, y) = (number("x"), number("y"));
        assert!(x + number("w") <= 24, "{panel}");
        for column in x..x + number("w") {
            for row in y..y + number("h") {
                assert!(
                    places.insert((column, row)),
                    "{panel} lies over another one"
                );
            }
        }
        let targets = panel["targets"].as_array().expect("targets");
        let marks: BTreeSet<&str> = targets
            .iter()
            .map(|target| target["refId"].as_str().expect("a mark"))
            .collect();
        assert_eq!(marks.len(), targets.len());
        for target in targets {
            assert_eq!(target["datasource"]["uid"], "${datasource}");
        }
    }
}

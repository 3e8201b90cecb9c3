//! `docs/vellum-alerts.yml`: Prometheus takes the rules, they ask for nothing that is not there, and fire
//! for what they are about and nothing else.

use std::path::{Path, PathBuf};

use crate::dashboard::{named, told_by_daemons};
use crate::place::Place;

fn rules() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/vellum-alerts.yml")
}

/// A host on which things go wrong after ten minutes, and stay as they are. `exported_job` is what
/// Prometheus makes of a label that its own one hides.
const HOST: &str = r#"
  - interval: 1m
    input_series:
      - {series: 'up{job="vellum",instance="h"}', values: '1x9 0x40'}
      - {series: 'vellum_uptime_seconds{instance="h"}', values: '0+60x40'}
      - {series: 'vellum_export_requests_waiting_for_space{instance="h",export="e",node="full"}', values: '0x9 3x40'}
      - {series: 'vellum_export_requests_in_flight{instance="h",export="e",node="full"}', values: '0x9 3x40'}
      - {series: 'vellum_export_requests_total{instance="h",export="e",node="full",operation="read"}', values: '0x40'}
      - {series: 'vellum_export_requests_in_flight{instance="h",export="f",node="silent"}', values: '2x40'}
      - {series: 'vellum_export_requests_total{instance="h",export="f",node="silent",operation="read"}', values: '0+10x10 100x40'}
      - {series: 'vellum_export_requests_in_flight{instance="h",export="g",node="busy"}', values: '2x40'}
      - {series: 'vellum_export_requests_total{instance="h",export="g",node="busy",operation="read"}', values: '0+10x40'}
      - {series: 'vellum_export_failed_requests_total{instance="h",export="e",node="full",operation="write"}', values: '0x11 1x40'}
      - {series: 'vellum_filesystem_warning_percent{instance="h",folder="/a"}', values: '0x9 85x40'}
      - {series: 'vellum_filesystem_size_bytes{instance="h",folder="/a"}', values: '1000x40'}
      - {series: 'vellum_filesystem_available_bytes{instance="h",folder="/a"}', values: '900x9 40x40'}
      - {series: 'vellum_filesystem_size_bytes{instance="h",folder="/b"}', values: '100000x40'}
      - {series: 'vellum_filesystem_available_bytes{instance="h",folder="/b"}', values: '30000-100x40'}
      - {series: 'vellum_job_info{instance="h",exported_job="stuck",type="mirror",status="running"}', values: '1x40'}
      - {series: 'vellum_job_done_bytes{instance="h",exported_job="stuck",type="mirror"}', values: '0+10x10 100x40'}
      - {series: 'vellum_job_info{instance="h",exported_job="goes-on",type="mirror",status="running"}', values: '1x40'}
      - {series: 'vellum_job_done_bytes{instance="h",exported_job="goes-on",type="mirror"}', values: '0+10x40'}
      - {series: 'vellum_node_write_log_capacity_bytes{instance="h",node="w"}', values: '100x40'}
      - {series: 'vellum_node_write_log_bytes{instance="h",node="w"}', values: '10x9 95x40'}
"#;

/// What fires when: minutes, and each alert with what it is about.
const FIRING: [(u32, &[(&str, &str)]); 3] = [
    (9, &[]),
    (
        16,
        &[
            ("VellumDown", r#"job="vellum""#),
            ("VellumFileSystemNearlyFull", r#"folder="/a""#),
            ("VellumRequestsFail", r#"node="full", operation="write""#),
            ("VellumRequestsStandStill", r#"node="silent""#),
            ("VellumRequestsWaitForRoom", r#"node="full""#),
            ("VellumSpaceWarning", r#"folder="/a""#),
        ],
    ),
    (
        40,
        &[
            ("VellumDown", r#"job="vellum""#),
            ("VellumFileSystemFullSoon", r#"folder="/a""#),
            ("VellumFileSystemFullSoon", r#"folder="/b""#),
            ("VellumFileSystemNearlyFull", r#"folder="/a""#),
            ("VellumJobStandsStill", r#"exported_job="stuck""#),
            ("VellumRequestsStandStill", r#"node="silent""#),
            ("VellumRequestsWaitForRoom", r#"node="full""#),
            ("VellumSpaceWarning", r#"folder="/a""#),
            ("VellumWriteLogNearlyFull", r#"node="w""#),
        ],
    ),
];

#[test]
fn promtool_takes_the_rules_and_they_fire_for_what_they_are_about() {
    let place = Place::new();
    let path = rules().display().to_string();
    let said = place.must("promtool", &["check", "rules", &path]);
    assert!(said.contains("rules found"), "{said}");
    let mut tests = format!("rule_files: [{path}]\nevaluation_interval: 1m\ntests:{HOST}");
    tests += "    promql_expr_test:\n";
    let firing = "sum without (severity, alertstate) (ALERTS{alertstate=\\\"firing\\\"})";
    for (minutes, alerts) in FIRING {
        tests += &format!("      - expr: \"{firing}\"\n        eval_time: {minutes}m\n");
        tests += "        exp_samples:\n";
        for (name, labels) in alerts {
            let labels = format!(r#"{{alertname="{name}", instance="h", {labels}}}"#);
            tests += &format!("          - {{labels: '{labels}', value: 1}}\n");
        }
    }
    place.write("tests.yml", tests);
    place.must("promtool", "test rules tests.yml");
}

#[test]
fn every_rule_names_metrics_that_are_told() {
    let text = std::fs::read_to_string(rules()).expect("a file");
    let told = told_by_daemons();
    let mut asked = 0;
    for line in text.lines().filter(|line| !line.contains("alert:")) {
        for name in named(line) {
            assert!(told.contains(name), "{name} is not among {told:?}");
            asked += 1;
        }
    }
    assert!(asked > 10, "{asked}");
}

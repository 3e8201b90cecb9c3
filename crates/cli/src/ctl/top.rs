//! `ctl top`: what is asked of each disk now. On a terminal again and again, elsewhere once.

use std::collections::HashMap;
use std::io::{IsTerminal, Write};
use std::time::Duration;

use serde_json::{Value, json};

use super::client::Client;
use super::show::jobs;
use super::tables::{Column, duration, items, lines, number, text};
use crate::output::Output;
use crate::report;
use crate::size::human;

/// Clears the terminal, and goes to its upper left corner.
const CLEAR: &str = "\x1b[2J\x1b[H";

/// Looks as often as it is wanted; once where that is not said and nobody sits there.
///
/// # Errors
/// What a person should read.
pub fn run(
    client: &Client,
    interval: Duration,
    count: Option<u64>,
    output: Output,
) -> Result<(), String> {
    let is_seen = std::io::stdout().is_terminal() && output == Output::Human;
    let count = count.unwrap_or(if is_seen { u64::MAX } else { 1 });
    let mut before = look(client)?;
    for _ in 0..count {
        std::thread::sleep(interval);
        let now = look(client)?;
        let rates = rates(&before, &now);
        if output == Output::Json {
            report::print_line(json!(rates.iter().map(Rate::to_json).collect::<Vec<_>>()));
        } else {
            if is_seen {
                report::print(CLEAR);
            }
            print(&rates, &now);
        }
        let _ = std::io::stdout().flush();
        before = now;
    }
    Ok(())
}

fn look(client: &Client) -> Result<Value, String> {
    client.ask_json("GET", "/v1/stats", None)
}

/// What was asked of a disk in a second.
#[derive(Debug, Default, PartialEq)]
struct Rate {
    disk: String,
    reads: f64,
    read_bytes: f64,
    read_time_ns: u64,
    writes: f64,
    written_bytes: f64,
    write_time_ns: u64,
    in_flight: u64,
    hit_percent: Option<f64>,
}

impl Rate {
    fn to_json(&self) -> Value {
        json!({
            "node-name": self.disk,
            "read-requests-per-second": self.reads,
            "read-bytes-per-second": self.read_bytes,
            "read-mean-time-ns": self.read_time_ns,
            "write-requests-per-second": self.writes,
            "write-bytes-per-second": self.written_bytes,
            "write-mean-time-ns": self.write_time_ns,
            "in-flight": self.in_flight,
            "cache-hit-percent": self.hit_percent,
        })
    }

    /// What is between two looks at a disk.
    fn between(before: &Value, now: &Value, seconds: f64) -> Rate {
        // A disk that was exported anew begins at zero.
        let grown = |key: &str| number(now, key).saturating_sub(number(before, key));
        let mean =
            |time: &str, requests: &str| grown(time).checked_div(grown(requests)).unwrap_or(0);
        let (hits, misses) = (grown("cache-hits"), grown("cache-misses"));
        let looks = hits + misses;
        Rate {
            disk: text(now, "node-name"),
            reads: grown("read-requests") as f64 / seconds,
            read_bytes: grown("read-bytes") as f64 / seconds,
            read_time_ns: mean("read-time-ns", "read-requests"),
            writes: grown("write-requests") as f64 / seconds,
            written_bytes: grown("write-bytes") as f64 / seconds,
            write_time_ns: mean("write-time-ns", "write-requests"),
            in_flight: number(now, "in-flight"),
            hit_percent: (looks > 0).then(|| hits as f64 * 100.0 / looks as f64),
        }
    }
}

/// The rates of all disks, those that are asked most first.
fn rates(before: &Value, now: &Value) -> Vec<Rate> {
    let known = items(&before["disks"]).map(|disk| (text(disk, "node-name"), disk));
    let known: HashMap<String, &Value> = known.collect();
    let time_ns = number(now, "uptime-ns").saturating_sub(number(before, "uptime-ns"));
    let seconds = (time_ns as f64 / 1e9).max(1e-3);
    let rate = |disk: &Value| {
        let before = known.get(&text(disk, "node-name"));
        Rate::between(before.copied().unwrap_or(disk), disk, seconds)
    };
    let mut rates: Vec<Rate> = items(&now["disks"]).map(rate).collect();
    let busy = |rate: &Rate| rate.reads + rate.writes;
    rates.sort_by(|one, two| busy(two).total_cmp(&busy(one)));
    rates
}

fn print(rates: &[Rate], now: &Value) {
    let columns: [Column<'_>; 9] = [
        ("disk", false),
        ("reads/s", true),
        ("read/s", true),
        ("mean time", true),
        ("writes/s", true),
        ("written/s", true),
        ("mean time", true),
        ("in flight", true),
        ("cached", true),
    ];
    let time = |time_ns: u64| match time_ns {
        0 => String::new(),
        time_ns => duration(time_ns),
    };
    let rows = rates.iter().map(|rate| {
        vec![
            rate.disk.clone(),
            format!("{:.0}", rate.reads),
            human(rate.read_bytes as u64),
            time(rate.read_time_ns),
            format!("{:.0}", rate.writes),
            human(rate.written_bytes as u64),
            time(rate.write_time_ns),
            rate.in_flight.to_string(),
            rate.hit_percent
                .map_or_else(String::new, |percent| format!("{percent:.0} %")),
        ]
    });
    let mut all = lines(&columns, rows);
    if items(&now["jobs"]).next().is_some() {
        all.push(String::new());
        all.extend(jobs(&now["jobs"]));
    }
    for line in all {
        report::print_line(line);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(uptime_ns: u64, reads: u64, time_ns: u64, hits: u64) -> Value {
        json!({"uptime-ns": uptime_ns, "disks": [
            {"node-name": "idle"},
            {"node-name": "d", "read-requests": reads, "read-bytes": reads * 512,
             "read-time-ns": time_ns, "cache-hits": hits, "cache-misses": 10, "in-flight": 3},
        ]})
    }

    #[test]
    fn rates_are_of_the_daemons_own_time() {
        let (before, now) = (
            look(1_000_000_000, 100, 1000, 30),
            look(3_000_000_000, 300, 5000, 60),
        );
        let rates = rates(&before, &now);
        assert_eq!(rates[0].disk, "d", "who is busy comes first");
        assert_eq!((rates[0].reads, rates[0].read_bytes), (100.0, 51_200.0));
        assert_eq!((rates[0].read_time_ns, rates[0].in_flight), (20, 3));
        assert_eq!(rates[0].hit_percent, Some(100.0));
        assert_eq!(
            rates[1],
            Rate {
                disk: "idle".to_owned(),
                ..Rate::default()
            }
        );
    }

    #[test]
    fn a_disk_that_began_anew_has_no_negative_rates() {
        let rates = rates(&look(1, 500, 9000, 30), &look(2, 100, 1000, 0));
        assert!(
            rates
                .iter()
                .all(|rate| rate.reads == 0.0 && rate.read_time_ns == 0)
        );
    }
}

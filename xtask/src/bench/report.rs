//! What was measured, as a table and as JSON.

use std::fmt::Write as _;
use std::path::PathBuf;

use serde_json::{Value, json};

use super::load::{Load, Place};
use super::server::Program;

/// Of one row with one program, in one round.
#[derive(Debug, Clone, Copy)]
pub struct Measured {
    /// Requests a second.
    pub per_second: f64,
    /// The server's processor time for each, in microseconds.
    pub cpu_us: f64,
}

/// A load on an image in a place.
pub struct Row {
    pub place: Place,
    pub format: String,
    pub load: Load,
    /// By program, in the order of the rounds; none where a program cannot serve this.
    measured: Vec<Vec<Measured>>,
}

impl Row {
    /// Nothing is measured yet.
    pub fn new(place: Place, format: &str, load: Load, programs: usize) -> Self {
        Row {
            place,
            format: format.to_owned(),
            load,
            measured: vec![Vec::new(); programs],
        }
    }

    /// What it is about.
    pub fn title(&self) -> String {
        let Load { clients, depth, .. } = self.load;
        let kind = if self.load.writes { "writes" } else { "reads" };
        let (place, format) = (self.place.name, &self.format);
        format!("{place}, {format}, {kind}, {clients} x {depth}")
    }

    /// Where the image lies.
    pub fn image(&self) -> PathBuf {
        self.place.folder.join(&self.format)
    }

    /// Takes in what a program came to.
    pub fn add(&mut self, program: usize, measured: Measured) {
        self.measured[program].push(measured);
    }

    /// What was measured last.
    pub fn line(&self) -> String {
        let mut line = self.title();
        for one in self.measured.iter().filter_map(|of_one| of_one.last()) {
            let (thousands, cpu_us) = (one.per_second / 1e3, one.cpu_us);
            let _ = write!(line, "; {thousands:.1}k at {cpu_us:.2} us");
        }
        line
    }

    fn median(&self, program: usize, value: fn(&Measured) -> f64) -> Option<f64> {
        let values: Vec<f64> = self.measured[program].iter().map(value).collect();
        (!values.is_empty()).then(|| median(values))
    }

    /// What of the speed of another program the first one has.
    fn ratio(&self, other: usize) -> Option<f64> {
        let speed = |program| self.median(program, |one| one.per_second);
        Some(speed(0)? / speed(other)?)
    }
}

/// The middle one, or the mean of the two in the middle.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let half = values.len() / 2;
    match values.len() % 2 {
        0 => f64::midpoint(values[half - 1], values[half]),
        _ => values[half],
    }
}

/// The medians of all rows. The first program is beside our other one, and beside the fastest of
/// QEMU's.
pub fn table(rows: &[Row], programs: &[Program], clients: &str) -> String {
    let qemu: Vec<usize> = (0..programs.len())
        .filter(|index| programs[*index].is_qemu())
        .collect();
    let mut head = format!("| place, image, requests of 4 KiB, {clients} x depth |");
    let mut rule = String::from("| --- |");
    for program in programs {
        let _ = write!(head, " {program}, k/s | µs CPU |");
        rule.push_str(" ---: | ---: |");
    }
    let before = (1..programs.len()).find(|index| !programs[*index].is_qemu());
    if let Some(before) = before {
        let _ = write!(head, " of {} |", programs[before]);
        rule.push_str(" ---: |");
    }
    head.push_str(" of QEMU's fastest |");
    rule.push_str(" ---: |");
    let mut text = format!("{head}\n{rule}\n");
    for row in rows {
        let _ = write!(text, "| {} |", row.title());
        for index in 0..programs.len() {
            let thousands = row.median(index, |one| one.per_second / 1e3);
            let _ = write!(text, " {} |", cell(thousands, 1));
            let _ = write!(text, " {} |", cell(row.median(index, |one| one.cpu_us), 1));
        }
        if let Some(index) = before {
            let _ = write!(text, " {} |", cell(row.ratio(index), 2));
        }
        let ratios = qemu.iter().filter_map(|index| row.ratio(*index));
        let _ = write!(text, " {} |", cell(ratios.reduce(f64::min), 2));
        text.push('\n');
    }
    text
}

/// Empty where nothing was measured.
fn cell(value: Option<f64>, digits: usize) -> String {
    value.map_or(String::new(), |value| format!("{value:.digits$}"))
}

/// All that was measured, round by round.
pub fn json(rows: &[Row], programs: &[Program]) -> Value {
    let row = |row: &Row| {
        let measured = row.measured.iter().zip(programs);
        let measured = measured.flat_map(|(of_one, program)| {
            of_one.iter().enumerate().map(move |(round, one)| {
                json!({
                    "program": program.to_string(),
                    "round": round + 1,
                    "per-second": one.per_second,
                    "cpu-us": one.cpu_us,
                })
            })
        });
        json!({
            "place": row.place.name,
            "format": row.format,
            "writes": row.load.writes,
            "clients": row.load.clients,
            "depth": row.load.depth,
            "measured": measured.collect::<Vec<_>>(),
        })
    };
    Value::Array(rows.iter().map(row).collect())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::server::Aio;
    use super::*;

    fn measured(per_second: f64) -> Measured {
        Measured {
            per_second,
            cpu_us: 2.0,
        }
    }

    #[test]
    fn medians_do_not_mind_the_order() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 3.0, 2.0]), 2.5);
    }

    #[test]
    fn a_row_stands_beside_the_fastest_of_those_that_can_serve_it() {
        let place = Place {
            name: "tmpfs",
            folder: PathBuf::new(),
            is_direct: false,
        };
        let load = Load {
            clients: 1,
            depth: 8,
            writes: false,
            duration: Duration::from_secs(1),
            disk_bytes: 0,
        };
        let vellum = Program::Vellum {
            name: "vellum",
            path: PathBuf::new(),
            more: "",
            words: &[],
        };
        let daemon = Program::StorageDaemon(Aio::IoUring);
        let programs = [
            vellum,
            daemon,
            Program::Nbd(Aio::IoUring),
            Program::Nbd(Aio::Native),
        ];
        let mut row = Row::new(place, "raw", load, programs.len());
        row.add(0, measured(6000.0));
        row.add(1, measured(3000.0));
        row.add(2, measured(4000.0));
        let rows = [row];
        let text = table(&rows, &programs, "connections");
        let last = text.lines().last().unwrap_or_default();
        let expected = "| tmpfs, raw, reads, 1 x 8 | 6.0 | 2.0 | 3.0 | 2.0 | 4.0 | 2.0 |  |  \
                        | 1.50 |";
        assert_eq!(last, expected);
        let told = json(&rows, &programs);
        assert_eq!(told[0]["measured"][1]["program"], "qsd io_uring");
        assert_eq!(told[0]["measured"].as_array().map(Vec::len), Some(3));
    }
}

//! What was measured, as a table.

use std::fmt::Write as _;

use super::Place;
use super::client::Load;
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
    pub format: &'static str,
    pub load: Load,
    /// By program, in the order of the rounds.
    measured: Vec<Vec<Measured>>,
}

impl Row {
    /// Nothing is measured yet.
    pub fn new(place: Place, format: &'static str, load: Load) -> Self {
        Row {
            place,
            format,
            load,
            measured: Vec::new(),
        }
    }

    /// What it is about.
    pub fn title(&self) -> String {
        let Load { queues, depth, .. } = self.load;
        let kind = if self.load.writes { "writes" } else { "reads" };
        let (place, format) = (self.place.name, self.format);
        format!("{place}, {format}, {kind}, {queues} x {depth}")
    }

    /// Takes in what a program came to.
    pub fn add(&mut self, program: usize, measured: Measured) {
        if self.measured.len() <= program {
            self.measured.resize(program + 1, Vec::new());
        }
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

    fn median(&self, program: usize, value: fn(&Measured) -> f64) -> f64 {
        median(self.measured[program].iter().map(value).collect())
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let half = values.len() / 2;
    match values.len() % 2 {
        0 => f64::midpoint(values[half - 1], values[half]),
        _ => values[half],
    }
}

/// The medians of all rows. The first program is beside each of the others.
pub fn table(rows: &[Row], programs: &[Program]) -> String {
    let name = |index: usize| match &programs[index] {
        Program::Vellum(_) if index == 0 => "vellum",
        Program::Vellum(_) => "before",
        Program::Qemu => "QEMU",
    };
    let mut head = String::from("| place, image, requests of 4 KiB, queues x depth |");
    let mut rule = String::from("| --- |");
    for index in 0..programs.len() {
        let _ = write!(head, " {0}, k/s | {0}, µs CPU |", name(index));
        rule.push_str(" ---: | ---: |");
    }
    for index in 1..programs.len() {
        let _ = write!(head, " of {}'s |", name(index));
        rule.push_str(" ---: |");
    }
    let mut text = format!("{head}\n{rule}\n");
    for row in rows {
        let _ = write!(text, "| {} |", row.title());
        for index in 0..programs.len() {
            let per_second = row.median(index, |one| one.per_second) / 1e3;
            let cpu_us = row.median(index, |one| one.cpu_us);
            let _ = write!(text, " {per_second:.1} | {cpu_us:.1} |");
        }
        for index in 1..programs.len() {
            let own = row.median(0, |one| one.per_second);
            let _ = write!(
                text,
                " {:.2} |",
                own / row.median(index, |one| one.per_second)
            );
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_do_not_mind_the_order() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 3.0, 2.0]), 2.5);
    }
}

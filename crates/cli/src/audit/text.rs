//! The answer of `vellum audit` for people.

use std::fmt::Write;

use vellum_images::audit::{Level, Report};

use super::arguments::option_for;
use crate::size::human;
use crate::style::{Colour, Style};
use crate::terminal::harmless;

/// The report as text; coloured where standard output is a terminal.
pub fn report(image: &str, found: &Report) -> String {
    let style = Style::for_output();
    let mut text = String::new();
    let verdict = match found.is_safe() {
        true => style.bold(Colour::Green, "safe"),
        false => style.bold(Colour::Red, "rejected"),
    };
    // Writing to a string cannot fail.
    let _ = writeln!(text, "{}: {verdict}", harmless(image));
    let _ = writeln!(text, "  {}", summary(found));
    let width = found.findings.iter().map(|f| f.code.len()).max();
    let mut findings: Vec<_> = found.findings.iter().collect();
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.level));
    for finding in findings {
        let colour = match finding.level {
            Level::Reject => Colour::Red,
            Level::Warning => Colour::Yellow,
            Level::Note => Colour::Blue,
        };
        let level = style.colour(colour, &format!("{:<7}", finding.level.name()));
        let allowed = finding
            .permission
            .map(|permission| format!(" (allowed by {})", option_for(permission)));
        let _ = writeln!(
            text,
            "  {level}  {:<width$}  {}{}",
            finding.code,
            harmless(&finding.message),
            allowed.unwrap_or_default(),
            width = width.unwrap_or(0)
        );
    }
    text
}

fn summary(found: &Report) -> String {
    let mut text = format!("{}, {} long", found.format, human(found.file_length_bytes));
    if let Some(facts) = &found.facts {
        let _ = write!(
            text,
            ", a disk of {}, {} snapshots, {} bitmaps",
            human(facts.virtual_size_bytes),
            facts.snapshots,
            facts.bitmaps
        );
        if let Some(method) = facts.encryption {
            let _ = write!(text, ", encrypted ({method})");
        }
    }
    match &found.checked {
        Some(_) => text.push_str("; metadata checked"),
        None if found.facts.is_some() => text.push_str("; metadata not checked"),
        None => {}
    }
    text
}

//! Reads the files of the table.

use std::iter::Peekable;

/// Command lines that share a pair of folders.
#[derive(Debug)]
pub struct Section {
    /// The file that it stands in.
    pub file: &'static str,
    /// Where it begins.
    pub place: String,
    /// Its name.
    pub name: String,
    /// What happens in it.
    pub steps: Vec<Step>,
}

/// One thing that happens in a section.
#[derive(Debug)]
pub enum Step {
    /// The real tools prepare both folders.
    Prepare(String),
    /// A real `qemu-io` keeps an image open.
    Hold(String),
    /// Both tools run, and are compared.
    Compare(Case),
}

/// A command line to compare.
#[derive(Debug)]
pub struct Case {
    /// Its line in the file.
    pub line: usize,
    /// What the shell runs.
    pub command: String,
    /// How it differs on purpose.
    pub mark: Option<Mark>,
}

/// A difference on purpose.
#[derive(Debug)]
pub struct Mark {
    /// Why.
    pub reason: String,
    /// The lines that differ, each with its `-` or `+`.
    pub lines: Vec<String>,
}

/// Reads one file; a line that makes no sense ends the program.
pub fn parse(file: &'static str, text: &str) -> Vec<Section> {
    let mut sections: Vec<Section> = Vec::new();
    let mut lines = text.lines().zip(1..).peekable();
    while let Some((first, number)) = lines.next() {
        let place = format!("{file}:{number}");
        let line = continued(first, &mut lines);
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(name) = line.strip_prefix('[') {
            let name = name.strip_suffix(']').unwrap_or_else(|| bad(&place));
            sections.push(Section {
                file,
                place,
                name: name.to_owned(),
                steps: Vec::new(),
            });
            continue;
        }
        let steps = match sections.last_mut() {
            Some(section) => &mut section.steps,
            None => bad(&place),
        };
        let (mark, rest) = line.split_once(' ').unwrap_or((&line, ""));
        match mark {
            "%" => steps.push(Step::Prepare(rest.to_owned())),
            "@" => steps.push(Step::Hold(rest.to_owned())),
            "$" => steps.push(Step::Compare(Case {
                line: number,
                command: rest.to_owned(),
                mark: None,
            })),
            "!" | "-" | "+" => amend(steps, mark, rest).unwrap_or_else(|| bad(&place)),
            _ => bad(&place),
        }
    }
    sections
}

/// A line with those that continue it.
fn continued<'a>(
    first: &str,
    lines: &mut Peekable<impl Iterator<Item = (&'a str, usize)>>,
) -> String {
    let mut line = first.to_owned();
    while let Some(head) = line.strip_suffix('\\') {
        let next = lines.next().map_or("", |(next, _)| next.trim_start());
        line = format!("{head}{next}");
    }
    line
}

/// Adds to the mark of the command line above.
fn amend(steps: &mut [Step], mark: &str, rest: &str) -> Option<()> {
    let Some(Step::Compare(case)) = steps.last_mut() else {
        return None;
    };
    match mark {
        "!" if case.mark.is_none() => {
            case.mark = Some(Mark {
                reason: rest.to_owned(),
                lines: Vec::new(),
            });
        }
        "!" => return None,
        _ => case.mark.as_mut()?.lines.push(format!("{mark} {rest}")),
    }
    Some(())
}

fn bad<T>(place: &str) -> T {
    panic!("{place}: this line makes no sense here")
}

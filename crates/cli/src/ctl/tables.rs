//! Tables of what a daemon tells. Names come from it, and are made harmless for terminals.

use comfy_table::{CellAlignment, Table, presets};
use serde_json::Value;

use crate::size::human;
use crate::terminal::harmless;

/// A column: its heading, and whether it holds numbers.
pub type Column<'a> = (&'a str, bool);

/// Lines of a table with a heading.
pub fn lines(columns: &[Column<'_>], rows: impl IntoIterator<Item = Vec<String>>) -> Vec<String> {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header(columns.iter().map(|(heading, _)| *heading));
    for row in rows {
        table.add_row(row.iter().map(|cell| harmless(cell)));
    }
    for (column, (_, is_number)) in table.column_iter_mut().zip(columns) {
        if *is_number {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let lines = table.lines();
    lines.map(|line| line.trim_end().to_owned()).collect()
}

/// A text of an object; empty where it has none.
pub fn text(value: &Value, key: &str) -> String {
    match &value[key] {
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        other => other.to_string(),
    }
}

/// A number of an object; 0 where it has none.
pub fn number(value: &Value, key: &str) -> u64 {
    value[key].as_u64().unwrap_or_default()
}

/// A number of bytes for people; empty where there is none.
pub fn bytes(value: &Value, key: &str) -> String {
    value[key].as_u64().map_or_else(String::new, human)
}

/// The members of an array.
pub fn items(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// Nanoseconds as people read them.
pub fn duration(time_ns: u64) -> String {
    let (number, unit) = match time_ns {
        0..1_000_000 => (time_ns as f64 / 1e3, "µs"),
        1_000_000..1_000_000_000 => (time_ns as f64 / 1e6, "ms"),
        _ => (time_ns as f64 / 1e9, "s"),
    };
    format!("{} {unit}", crate::size::general(number, 3))
}

/// How far a job is.
pub fn percent(done: u64, total: u64) -> String {
    match total {
        0 => String::new(),
        total => format!("{:.1} %", done as f64 * 100.0 / total as f64),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn tables_are_plain_and_harmless() {
        let rows = [
            vec!["a".to_owned(), "10".to_owned()],
            vec!["b\x1b[2J".to_owned(), "5".to_owned()],
        ];
        let lines = lines(&[("disk", false), ("requests", true)], rows);
        assert_eq!(lines.len(), 3);
        assert!(lines[0].trim_start().starts_with("disk"));
        assert!(
            lines[1].ends_with("10") && !lines[2].contains('\x1b'),
            "{lines:?}"
        );
    }

    #[test]
    fn numbers_are_for_people() {
        assert_eq!(duration(1500), "1.5 µs");
        assert_eq!(duration(2_000_000), "2 ms");
        assert_eq!(duration(3_000_000_000), "3 s");
        assert_eq!(percent(1, 4), "25.0 %");
        assert_eq!(percent(0, 0), "");
        let value = json!({"a": 1024, "b": true});
        assert_eq!(
            (bytes(&value, "a"), text(&value, "b")),
            ("1 KiB".to_owned(), "true".to_owned())
        );
        assert_eq!(
            (bytes(&value, "c"), text(&value, "c")),
            (String::new(), String::new())
        );
    }
}

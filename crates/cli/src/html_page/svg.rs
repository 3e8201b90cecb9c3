//! Pictures of pages as SVG. Colours and fonts are the page's (classes). Pure.

use std::fmt::Write;

/// A square of a [`grid`].
#[derive(Debug, Clone, PartialEq)]
pub struct Square {
    /// The class that colours it.
    pub class: &'static str,
    /// From 0 to 1: how strong the colour is.
    pub strength: f64,
    /// What a pointer over it shows.
    pub title: String,
}

/// Side of a square, and the gap between two.
const SIDE: f64 = 9.0;
const GAP: f64 = 1.5;

/// Squares in rows of `columns`; `label` tells what it is to who cannot see it.
pub fn grid(squares: &[Square], columns: usize, label: &str) -> String {
    let step = SIDE + GAP;
    let rows = squares.len().div_ceil(columns.max(1)).max(1);
    let (width, height) = (columns as f64 * step - GAP, rows as f64 * step - GAP);
    let mut svg = format!(
        r#"<svg viewBox="0 0 {width} {height}" role="img" aria-label="{}">"#,
        escape(label)
    );
    for (index, square) in squares.iter().enumerate() {
        let (row, column) = (index / columns, index % columns);
        // A trace of something is to be seen too.
        let strength = match square.strength {
            none if none <= 0.0 => 1.0,
            some => 0.25 + 0.75 * some,
        };
        // Writing to a string cannot fail.
        let _ = write!(
            svg,
            r#"<rect class="{}" x="{}" y="{}" width="{SIDE}" height="{SIDE}" rx="1.5""#,
            square.class,
            column as f64 * step,
            row as f64 * step,
        );
        if strength < 0.995 {
            let _ = write!(svg, r#" fill-opacity="{strength:.2}""#);
        }
        let _ = write!(svg, "><title>{}</title></rect>", escape(&square.title));
    }
    svg.push_str("</svg>");
    svg
}

/// Text as it stands in a page.
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            other => escaped.push(other),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn squares_stand_in_rows() {
        let square = |strength| Square {
            class: "data",
            strength,
            title: "a<b".into(),
        };
        let svg = grid(&[square(1.0), square(0.0), square(0.5)], 2, "x\"y");
        assert!(svg.contains(r#"viewBox="0 0 19.5 19.5""#), "{svg}");
        assert!(svg.contains("x&quot;y") && svg.contains("a&lt;b"));
        assert_eq!(svg.matches("fill-opacity").count(), 1);
    }
}

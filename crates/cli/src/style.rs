//! Colours and bold text on a terminal; plain text in a pipe or file.
//!
//! `NO_COLOR` (any value but an empty one) and `TERM=dumb` turn them off.

use std::io::IsTerminal;

/// A colour of the terminal's own palette, so that its theme decides how it looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Colour {
    Red,
    Green,
    Yellow,
    Blue,
    Magenta,
    Cyan,
    /// For less important text.
    Grey,
}

impl Colour {
    fn code(self) -> u8 {
        match self {
            Colour::Red => 31,
            Colour::Green => 32,
            Colour::Yellow => 33,
            Colour::Blue => 34,
            Colour::Magenta => 35,
            Colour::Cyan => 36,
            Colour::Grey => 90,
        }
    }
}

/// Adds colours to text, or leaves it as it is where they are not wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Style {
    on: bool,
}

impl Style {
    /// For text on standard output.
    pub fn for_output() -> Style {
        Style {
            on: std::io::stdout().is_terminal() && wanted(),
        }
    }

    /// For text on standard error.
    pub fn for_errors() -> Style {
        Style {
            on: std::io::stderr().is_terminal() && wanted(),
        }
    }

    /// With colours, or without.
    #[cfg(test)]
    pub fn new(on: bool) -> Style {
        Style { on }
    }

    /// Text in a colour.
    pub fn colour(self, colour: Colour, text: &str) -> String {
        self.code(&colour.code().to_string(), text)
    }

    /// Text in a colour, and bold.
    pub fn bold(self, colour: Colour, text: &str) -> String {
        self.code(&format!("1;{}", colour.code()), text)
    }

    /// A heading.
    pub fn heading(self, text: &str) -> String {
        self.code("1", text)
    }

    fn code(self, code: &str, text: &str) -> String {
        match self.on && !text.is_empty() {
            true => format!("\x1b[{code}m{text}\x1b[0m"),
            false => text.to_owned(),
        }
    }
}

fn wanted() -> bool {
    let set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    !set("NO_COLOR") && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_as_it_was_without_colours() {
        assert_eq!(Style::new(false).bold(Colour::Red, "x"), "x");
        assert_eq!(
            Style::new(true).colour(Colour::Red, "x"),
            "\x1b[31mx\x1b[0m"
        );
        assert_eq!(Style::new(true).heading(""), "");
    }
}

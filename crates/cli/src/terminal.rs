//! The width of the terminal, and text made safe for it: without control characters.

use std::io::IsTerminal;

/// The width where there is no terminal.
const DEFAULT_COLUMNS: usize = 80;

/// Columns of standard output; 80 where it is no terminal.
pub fn output_columns() -> usize {
    let out = std::io::stdout();
    if !out.is_terminal() {
        return DEFAULT_COLUMNS;
    }
    match rustix::termios::tcgetwinsize(out) {
        Ok(size) if size.ws_col > 0 => size.ws_col.into(),
        _ => DEFAULT_COLUMNS,
    }
}

/// Text from an image without what would steer a terminal: control characters, and those
/// that turn the direction of what follows.
pub fn harmless(text: &str) -> String {
    let steers = |letter: char| {
        letter.is_control()
            || ('\u{202a}'..='\u{202e}').contains(&letter)
            || ('\u{2066}'..='\u{2069}').contains(&letter)
    };
    let shown = |letter| if steers(letter) { '\u{fffd}' } else { letter };
    text.chars().map(shown).collect()
}

/// The same for text of several lines.
pub fn harmless_lines(text: &str) -> String {
    let lines: Vec<String> = text.split('\n').map(harmless).collect();
    lines.join("\n")
}

/// Lines of at most `columns` letters, broken between words.
pub fn wrap(text: &str, columns: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= columns => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// A name as a word of a command line.
pub fn quoted(name: &str) -> String {
    let plain = |letter: char| letter.is_ascii_alphanumeric() || "._-/+:=@%,".contains(letter);
    match !name.is_empty() && name.chars().all(plain) {
        true => name.to_owned(),
        false => format!("'{}'", name.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_break_between_words() {
        assert_eq!(wrap("one two  three", 7), ["one two", "three"]);
        assert_eq!(wrap("overlong x", 3), ["overlong", "x"]);
        assert!(wrap("", 3).is_empty());
    }

    #[test]
    fn nothing_steers_the_terminal() {
        assert_eq!(harmless("a\x1b[2Jb\u{202e}"), "a\u{fffd}[2Jb\u{fffd}");
        assert_eq!(
            harmless_lines("a\x1b[2J\nb\r\n"),
            "a\u{fffd}[2J\nb\u{fffd}\n"
        );
    }
}

//! The description of a command and the lookup by name. The commands themselves stand in the
//! [table](super::command_table).

use super::command_table::COMMANDS;
use super::outcome::Failed;
use crate::{hint, report};

/// What a command needs before it may run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Needs {
    /// Nothing.
    Nothing,
    /// An open image.
    Image,
    /// An open image that may be written.
    WritableImage,
}

/// What a command does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    /// `abort`
    Abort,
    /// `aio_flush`
    AioFlush,
    /// `aio_read`
    AioRead,
    /// `aio_write`
    AioWrite,
    /// `alloc`
    Alloc,
    /// `break`, `remove_break`, `resume`, `wait_break`
    Breakpoint,
    /// `close`
    Close,
    /// `discard`
    Discard,
    /// `flush`
    Flush,
    /// `help`
    Help,
    /// `info`
    Info,
    /// `length`
    Length,
    /// `map`
    Map,
    /// `open`
    Open,
    /// `quit`
    Quit,
    /// `read`
    Read,
    /// `readv`
    Readv,
    /// `reopen`
    Reopen,
    /// `sigraise`
    Sigraise,
    /// `sleep`
    Sleep,
    /// `truncate`
    Truncate,
    /// `write`
    Write,
    /// `writev`
    Writev,
    /// `zone_…`
    Zone,
}

/// One command.
#[derive(Debug)]
pub struct Command {
    /// Its name.
    pub name: &'static str,
    /// Its short name.
    pub alias: Option<&'static str>,
    /// What it does.
    pub verb: Verb,
    /// What it needs.
    pub needs: Needs,
    /// The fewest words after the name, and the most.
    pub words: (usize, Option<usize>),
    /// Its options, as `getopt` has them.
    pub options: &'static str,
    /// How its arguments are shown.
    pub synopsis: Option<&'static str>,
    /// What it does, in a few words.
    pub summary: &'static str,
    /// What else there is to know.
    pub help: &'static str,
}

/// A command that takes and needs nothing. The table adds to it what else it has.
pub const fn command(name: &'static str, verb: Verb, summary: &'static str) -> Command {
    Command {
        name,
        alias: None,
        verb,
        needs: Needs::Nothing,
        words: (0, Some(0)),
        options: "",
        synopsis: None,
        summary,
        help: "",
    }
}

impl Command {
    pub const fn alias(mut self, alias: &'static str) -> Command {
        self.alias = Some(alias);
        self
    }

    pub const fn needs(mut self, needs: Needs) -> Command {
        self.needs = needs;
        self
    }

    pub const fn words(mut self, least: usize, most: Option<usize>) -> Command {
        self.words = (least, most);
        self
    }

    pub const fn options(mut self, options: &'static str) -> Command {
        self.options = options;
        self
    }

    pub const fn synopsis(mut self, synopsis: &'static str) -> Command {
        self.synopsis = Some(synopsis);
        self
    }

    pub const fn help(mut self, help: &'static str) -> Command {
        self.help = help;
        self
    }

    /// Shows on one line how the command is called, after a wrong call.
    pub fn usage(&self) -> Failed {
        let synopsis = self.synopsis.unwrap_or("");
        report::print_line(format_args!("{} {synopsis} -- {}", self.name, self.summary));
        Failed
    }

    /// Checks how many words follow the name.
    pub fn check_words(&self, called: &str, count: usize) -> Result<(), Failed> {
        let (least, most) = self.words;
        if count >= least && most.is_none_or(|most| count <= most) {
            return Ok(());
        }
        let expected = match most {
            None => format!("at least {least}"),
            Some(most) if most == least => format!("{least}"),
            Some(most) => format!("between {least} and {most}"),
        };
        report::eprint_line(&format!(
            "bad argument count {count} to {called}, expected {expected} arguments"
        ));
        Err(Failed)
    }

    fn line(&self, called: &str) -> String {
        match self.synopsis {
            Some(synopsis) => format!("{called} {synopsis} -- {}\n", self.summary),
            None => format!("{called} -- {}\n", self.summary),
        }
    }
}

/// The command of a name or a short name.
pub fn find(name: &str) -> Option<&'static Command> {
    COMMANDS
        .iter()
        .find(|command| command.name == name || command.alias == Some(name))
}

/// The names of all commands.
pub fn names() -> impl Iterator<Item = &'static str> {
    COMMANDS.iter().map(|command| command.name)
}

/// Tells about one command, or all.
pub fn help(name: Option<&str>) -> Result<(), Failed> {
    let Some(name) = name else {
        let lines: String = COMMANDS
            .iter()
            .map(|command| command.line(command.name))
            .collect();
        report::print(format_args!(
            "{lines}\nUse 'help commandname' for extended help.\n"
        ));
        return Ok(());
    };
    let Some(command) = find(name) else {
        report::print_line(format_args!("command {name} not found"));
        hint::about_word(name, names());
        return Err(Failed);
    };
    let mut text = command.line(name);
    text.push_str(command.help);
    report::print(text);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sorted_and_names_are_unique() {
        assert!(COMMANDS.is_sorted_by(|a, b| a.name < b.name));
        let aliases = COMMANDS.iter().filter_map(|command| command.alias);
        for alias in aliases {
            let fitting = COMMANDS
                .iter()
                .filter(|c| c.name == alias || c.alias == Some(alias));
            assert_eq!(fitting.count(), 1, "{alias}");
        }
    }

    #[test]
    fn word_counts_are_checked() {
        let length = find("l").unwrap();
        assert_eq!(length.check_words("l", 0), Ok(()));
        assert_eq!(length.check_words("l", 1), Err(Failed));
        assert_eq!(find("read").unwrap().check_words("read", 9), Ok(()));
    }
}

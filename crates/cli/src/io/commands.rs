//! The table of commands: names, arguments and help.

use super::Failed;
use crate::getopt::{OptionSpec, Takes};
use crate::report;

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
    /// Its options.
    pub options: &'static [OptionSpec<char>],
    /// How its arguments are shown.
    pub synopsis: Option<&'static str>,
    /// What it does, in a few words.
    pub summary: &'static str,
    /// What else there is to know.
    pub help: &'static str,
}

const fn flag(letter: char) -> OptionSpec<char> {
    OptionSpec::short(letter, letter, Takes::Nothing)
}

const fn value(letter: char) -> OptionSpec<char> {
    OptionSpec::short(letter, letter, Takes::Value)
}

const fn command(
    name: &'static str,
    verb: Verb,
    needs: Needs,
    words: (usize, Option<usize>),
    summary: &'static str,
) -> Command {
    Command {
        name,
        alias: None,
        verb,
        needs,
        words,
        options: &[],
        synopsis: None,
        summary,
        help: "",
    }
}

/// Every command, by name.
pub static COMMANDS: &[Command] = &[
    command(
        "abort",
        Verb::Abort,
        Needs::Nothing,
        (0, Some(0)),
        "ends the program by abort()",
    ),
    command(
        "aio_flush",
        Verb::AioFlush,
        Needs::Image,
        (0, Some(0)),
        "waits for all asynchronous requests",
    ),
    Command {
        options: &[
            flag('C'),
            value('P'),
            flag('i'),
            flag('q'),
            flag('r'),
            flag('v'),
        ],
        synopsis: Some("[-Ciqrv] [-P pattern] off len [len..]"),
        help: READ_HELP,
        ..command(
            "aio_read",
            Verb::AioRead,
            Needs::Image,
            (2, None),
            "starts a read",
        )
    },
    Command {
        options: &[
            flag('C'),
            flag('f'),
            flag('i'),
            flag('q'),
            flag('r'),
            value('P'),
            flag('u'),
            flag('z'),
        ],
        synopsis: Some("[-Cfiqruz] [-P pattern] off len [len..]"),
        help: WRITE_HELP,
        ..command(
            "aio_write",
            Verb::AioWrite,
            Needs::WritableImage,
            (2, None),
            "starts a write",
        )
    },
    Command {
        alias: Some("a"),
        synopsis: Some("offset [count]"),
        ..command(
            "alloc",
            Verb::Alloc,
            Needs::Image,
            (1, Some(2)),
            "counts the bytes of a range that the image itself holds",
        )
    },
    Command {
        synopsis: Some("event tag"),
        ..command(
            "break",
            Verb::Breakpoint,
            Needs::Image,
            (2, Some(2)),
            "stops the next request that reaches an event",
        )
    },
    Command {
        alias: Some("c"),
        ..command(
            "close",
            Verb::Close,
            Needs::Image,
            (0, Some(0)),
            "closes the image",
        )
    },
    Command {
        alias: Some("d"),
        options: &[flag('C'), flag('q')],
        synopsis: Some("[-Cq] off len"),
        help: " -C, -- report in a form for machines\n -q, -- report nothing\n",
        ..command(
            "discard",
            Verb::Discard,
            Needs::WritableImage,
            (2, None),
            "gives the space of a range back",
        )
    },
    Command {
        alias: Some("f"),
        ..command(
            "flush",
            Verb::Flush,
            Needs::Image,
            (0, Some(0)),
            "makes everything written durable",
        )
    },
    Command {
        alias: Some("?"),
        synopsis: Some("[command]"),
        ..command(
            "help",
            Verb::Help,
            Needs::Nothing,
            (0, Some(1)),
            "tells about one command or all of them",
        )
    },
    Command {
        alias: Some("i"),
        ..command(
            "info",
            Verb::Info,
            Needs::Image,
            (0, Some(0)),
            "tells about the image",
        )
    },
    Command {
        alias: Some("l"),
        ..command(
            "length",
            Verb::Length,
            Needs::Image,
            (0, Some(0)),
            "tells the image's size",
        )
    },
    Command {
        synopsis: Some(""),
        ..command(
            "map",
            Verb::Map,
            Needs::Image,
            (0, Some(0)),
            "lists the ranges that the image itself holds",
        )
    },
    Command {
        alias: Some("o"),
        options: &[
            flag('s'),
            flag('C'),
            flag('n'),
            flag('r'),
            flag('k'),
            value('i'),
            value('t'),
            value('d'),
            value('o'),
            flag('U'),
        ],
        synopsis: Some("[-rsCnkU] [-t cache] [-d discard] [-o options] [path]"),
        help: OPEN_HELP,
        ..command(
            "open",
            Verb::Open,
            Needs::Nothing,
            (1, None),
            "opens an image",
        )
    },
    Command {
        alias: Some("q"),
        ..command(
            "quit",
            Verb::Quit,
            Needs::Nothing,
            (0, None),
            "ends the program",
        )
    },
    Command {
        alias: Some("r"),
        options: &[
            flag('b'),
            flag('C'),
            value('l'),
            flag('p'),
            value('P'),
            flag('q'),
            flag('r'),
            value('s'),
            flag('v'),
        ],
        synopsis: Some("[-abCqrv] [-P pattern [-s off] [-l len]] off len"),
        help: READ_HELP,
        ..command("read", Verb::Read, Needs::Image, (2, None), "reads a range")
    },
    Command {
        options: &[flag('C'), value('P'), flag('q'), flag('r'), flag('v')],
        synopsis: Some("[-Cqrv] [-P pattern] off len [len..]"),
        help: READ_HELP,
        ..command(
            "readv",
            Verb::Readv,
            Needs::Image,
            (2, None),
            "reads into several buffers",
        )
    },
    Command {
        synopsis: Some("tag"),
        ..command(
            "remove_break",
            Verb::Breakpoint,
            Needs::Image,
            (1, Some(1)),
            "takes a breakpoint away",
        )
    },
    Command {
        options: &[value('c'), value('o'), flag('r'), flag('w')],
        synopsis: Some("[(-r|-w)] [-c cache] [-o options]"),
        help: " -r, -- read-only\n -w, -- writable\n -c, -- another cache mode\n -o, -- other options of the driver\n",
        ..command(
            "reopen",
            Verb::Reopen,
            Needs::Image,
            (0, None),
            "opens the image anew",
        )
    },
    Command {
        synopsis: Some("tag"),
        ..command(
            "resume",
            Verb::Breakpoint,
            Needs::Image,
            (1, Some(1)),
            "lets a stopped request go on",
        )
    },
    Command {
        synopsis: Some("signal"),
        ..command(
            "sigraise",
            Verb::Sigraise,
            Needs::Nothing,
            (1, Some(1)),
            "sends the program a signal by its number",
        )
    },
    command(
        "sleep",
        Verb::Sleep,
        Needs::Nothing,
        (1, Some(1)),
        "waits some milliseconds",
    ),
    Command {
        alias: Some("t"),
        options: &[value('m')],
        synopsis: Some("[-m prealloc_mode] off"),
        ..command(
            "truncate",
            Verb::Truncate,
            Needs::WritableImage,
            (1, Some(3)),
            "sets the image's size",
        )
    },
    Command {
        synopsis: Some("tag"),
        ..command(
            "wait_break",
            Verb::Breakpoint,
            Needs::Image,
            (1, Some(1)),
            "waits until a request is stopped",
        )
    },
    Command {
        alias: Some("w"),
        options: &[
            flag('b'),
            flag('c'),
            flag('C'),
            flag('f'),
            flag('n'),
            flag('p'),
            value('P'),
            flag('q'),
            flag('r'),
            value('s'),
            flag('u'),
            flag('z'),
        ],
        synopsis: Some("[-bcCfnqruz] [-P pattern | -s source_file] off len"),
        help: WRITE_HELP,
        ..command(
            "write",
            Verb::Write,
            Needs::WritableImage,
            (2, None),
            "writes a range",
        )
    },
    Command {
        options: &[flag('C'), flag('f'), flag('q'), flag('r'), value('P')],
        synopsis: Some("[-Cfqr] [-P pattern] off len [len..]"),
        help: WRITE_HELP,
        ..command(
            "writev",
            Verb::Writev,
            Needs::WritableImage,
            (2, None),
            "writes from several buffers",
        )
    },
    Command {
        synopsis: Some("offset len [len..]"),
        ..zone("zone_append", (3, Some(4)), "appends to a zone")
    },
    zone("zone_close", (2, Some(2)), "closes zones"),
    zone("zone_finish", (2, Some(2)), "finishes zones"),
    zone("zone_open", (2, Some(2)), "opens zones"),
    Command {
        synopsis: Some("offset number"),
        ..zone("zone_report", (2, Some(2)), "lists zones")
    },
    zone("zone_reset", (2, Some(2)), "sets zones back to empty"),
];

const fn zone(name: &'static str, words: (usize, Option<usize>), summary: &'static str) -> Command {
    Command {
        synopsis: Some("offset len"),
        ..command(name, Verb::Zone, Needs::Image, words, summary)
    }
}

const READ_HELP: &str = "\
 -b, -- read the VM state
 -C, -- report in a form for machines
 -i, -- do not read, count an invalid request
 -P, -- the byte that everything read must be
 -s, -- where the checked part begins (with -P)
 -l, -- how long the checked part is (with -P)
 -q, -- report nothing
 -r, -- register the buffer
 -v, -- show the bytes
";

const WRITE_HELP: &str = "\
 -b, -- write the VM state
 -c, -- write compressed clusters
 -C, -- report in a form for machines
 -f, -- durable when it returns
 -i, -- do not write, count an invalid request
 -n, -- with -z: fail rather than write zeroes out
 -P, -- the byte to write instead of 0xcd
 -s, -- the file whose bytes are written, over and over
 -q, -- report nothing
 -r, -- register the buffer
 -u, -- with -z: space may be given back
 -z, -- write zeroes without a buffer
";

const OPEN_HELP: &str = "\
 -r, -- read-only
 -s, -- keep changes in a temporary overlay
 -C, -- copy what is read from the backing file
 -n, -- bypass the page cache, as -t none
 -U, -- take no locks
 -k, -- as -i native
 -i, -- how requests run: threads, native or io_uring
 -t, -- the cache mode
 -d, -- the discard mode
 -o, -- options of the driver
";

impl Command {
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
        return Err(Failed);
    };
    let mut text = command.line(name);
    if !command.help.is_empty() {
        text.push_str(&format!("\n{}\n", command.help));
    }
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

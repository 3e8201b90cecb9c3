//! The table of commands: name, arguments, options and summary of each. `session` looks commands up
//! in it, and `help` prints it.

use super::commands::{Command, Needs, Verb};
use super::help_texts;

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
        options: "",
        synopsis: None,
        summary,
        help: "",
    }
}

const fn zone(
    name: &'static str,
    alias: &'static str,
    words: (usize, Option<usize>),
    summary: &'static str,
) -> Command {
    Command {
        alias: Some(alias),
        synopsis: Some("offset len"),
        ..command(name, Verb::Zone, Needs::Image, words, summary)
    }
}

/// Every command, by name.
pub static COMMANDS: &[Command] = &[
    command(
        "abort",
        Verb::Abort,
        Needs::Nothing,
        (0, Some(0)),
        "simulate a program crash using abort(3)",
    ),
    command(
        "aio_flush",
        Verb::AioFlush,
        Needs::Image,
        (0, Some(0)),
        "completes all outstanding aio requests",
    ),
    Command {
        options: "CP:iqrv",
        synopsis: Some("[-Ciqrv] [-P pattern] off len [len..]"),
        help: help_texts::AIO_READ,
        ..command(
            "aio_read",
            Verb::AioRead,
            Needs::Image,
            (2, None),
            "asynchronously reads a number of bytes",
        )
    },
    Command {
        options: "CfiqrP:uz",
        synopsis: Some("[-Cfiqruz] [-P pattern] off len [len..]"),
        help: help_texts::AIO_WRITE,
        ..command(
            "aio_write",
            Verb::AioWrite,
            Needs::WritableImage,
            (2, None),
            "asynchronously writes a number of bytes",
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
            "checks if offset is allocated in the file",
        )
    },
    Command {
        synopsis: Some("event tag"),
        ..command(
            "break",
            Verb::Breakpoint,
            Needs::Image,
            (2, Some(2)),
            "sets a breakpoint on event and tags the stopped request as tag",
        )
    },
    Command {
        alias: Some("c"),
        ..command(
            "close",
            Verb::Close,
            Needs::Image,
            (0, Some(0)),
            "close the current open file",
        )
    },
    Command {
        alias: Some("d"),
        options: "Cq",
        synopsis: Some("[-Cq] off len"),
        help: help_texts::DISCARD,
        ..command(
            "discard",
            Verb::Discard,
            Needs::WritableImage,
            (2, None),
            "discards a number of bytes at a specified offset",
        )
    },
    Command {
        alias: Some("f"),
        ..command(
            "flush",
            Verb::Flush,
            Needs::Image,
            (0, Some(0)),
            "flush all in-core file state to disk",
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
            "help for one or all commands",
        )
    },
    Command {
        alias: Some("i"),
        ..command(
            "info",
            Verb::Info,
            Needs::Image,
            (0, Some(0)),
            "prints information about the current file",
        )
    },
    Command {
        alias: Some("l"),
        ..command(
            "length",
            Verb::Length,
            Needs::Image,
            (0, Some(0)),
            "gets the length of the current file",
        )
    },
    Command {
        synopsis: Some(""),
        ..command(
            "map",
            Verb::Map,
            Needs::Image,
            (0, Some(0)),
            "prints the allocated areas of a file",
        )
    },
    Command {
        alias: Some("o"),
        options: "sCnrki:t:d:o:U",
        synopsis: Some("[-rsCnkU] [-t cache] [-d discard] [-o options] [path]"),
        help: help_texts::OPEN,
        ..command(
            "open",
            Verb::Open,
            Needs::Nothing,
            (1, None),
            "open the file specified by path",
        )
    },
    Command {
        alias: Some("q"),
        ..command(
            "quit",
            Verb::Quit,
            Needs::Nothing,
            (0, None),
            "exit the program",
        )
    },
    Command {
        alias: Some("r"),
        options: "bCl:pP:qrs:v",
        synopsis: Some("[-abCqrv] [-P pattern [-s off] [-l len]] off len"),
        help: help_texts::READ,
        ..command(
            "read",
            Verb::Read,
            Needs::Image,
            (2, None),
            "reads a number of bytes at a specified offset",
        )
    },
    Command {
        options: "CP:qrv",
        synopsis: Some("[-Cqrv] [-P pattern] off len [len..]"),
        help: help_texts::READV,
        ..command(
            "readv",
            Verb::Readv,
            Needs::Image,
            (2, None),
            "reads a number of bytes at a specified offset",
        )
    },
    Command {
        synopsis: Some("tag"),
        ..command(
            "remove_break",
            Verb::Breakpoint,
            Needs::Image,
            (1, Some(1)),
            "remove a breakpoint by tag",
        )
    },
    Command {
        options: "c:o:rw",
        synopsis: Some("[(-r|-w)] [-c cache] [-o options]"),
        help: help_texts::REOPEN,
        ..command(
            "reopen",
            Verb::Reopen,
            Needs::Image,
            (0, None),
            "reopens an image with new options",
        )
    },
    Command {
        synopsis: Some("tag"),
        ..command(
            "resume",
            Verb::Breakpoint,
            Needs::Image,
            (1, Some(1)),
            "resumes the request tagged as tag",
        )
    },
    Command {
        synopsis: Some("signal"),
        help: help_texts::SIGRAISE,
        ..command(
            "sigraise",
            Verb::Sigraise,
            Needs::Nothing,
            (1, Some(1)),
            "raises a signal",
        )
    },
    command(
        "sleep",
        Verb::Sleep,
        Needs::Nothing,
        (1, Some(1)),
        "waits for the given value in milliseconds",
    ),
    Command {
        alias: Some("t"),
        options: "m:",
        synopsis: Some("[-m prealloc_mode] off"),
        ..command(
            "truncate",
            Verb::Truncate,
            Needs::WritableImage,
            (1, Some(3)),
            "truncates the current file at the given offset",
        )
    },
    Command {
        synopsis: Some("tag"),
        ..command(
            "wait_break",
            Verb::Breakpoint,
            Needs::Image,
            (1, Some(1)),
            "waits for the suspension of a request",
        )
    },
    Command {
        alias: Some("w"),
        options: "bcCfnpP:qrs:uz",
        synopsis: Some("[-bcCfnqruz] [-P pattern | -s source_file] off len"),
        help: help_texts::WRITE,
        ..command(
            "write",
            Verb::Write,
            Needs::WritableImage,
            (2, None),
            "writes a number of bytes at a specified offset",
        )
    },
    Command {
        options: "CfqrP:",
        synopsis: Some("[-Cfqr] [-P pattern] off len [len..]"),
        help: help_texts::WRITEV,
        ..command(
            "writev",
            Verb::Writev,
            Needs::WritableImage,
            (2, None),
            "writes a number of bytes at a specified offset",
        )
    },
    Command {
        synopsis: Some("offset len [len..]"),
        ..zone(
            "zone_append",
            "zap",
            (3, Some(4)),
            "append write a number of bytes at a specified offset",
        )
    },
    zone(
        "zone_close",
        "zc",
        (2, Some(2)),
        "close a range of zones in zone block device",
    ),
    zone(
        "zone_finish",
        "zf",
        (2, Some(2)),
        "finish a range of zones in zone block device",
    ),
    zone(
        "zone_open",
        "zo",
        (2, Some(2)),
        "explicit open a range of zones in zone block device",
    ),
    Command {
        synopsis: Some("offset number"),
        ..zone(
            "zone_report",
            "zrp",
            (2, Some(2)),
            "report zone information",
        )
    },
    zone(
        "zone_reset",
        "zrs",
        (2, Some(2)),
        "reset a zone write pointer in zone block device",
    ),
];

//! The table of commands: name, arguments, options and summary of each. `session` looks commands up
//! in it, and `help` prints it.

use super::commands::{Command, Needs, Verb, command};
use super::help_texts;

/// Every command, by name.
pub static COMMANDS: &[Command] = &[
    command(
        "abort",
        Verb::Abort,
        "simulate a program crash using abort(3)",
    ),
    command(
        "aio_flush",
        Verb::AioFlush,
        "completes all outstanding aio requests",
    )
    .needs(Needs::Image),
    command(
        "aio_read",
        Verb::AioRead,
        "asynchronously reads a number of bytes",
    )
    .needs(Needs::Image)
    .words(2, None)
    .options("CP:iqrv")
    .synopsis("[-Ciqrv] [-P pattern] off len [len..]")
    .help(help_texts::AIO_READ),
    command(
        "aio_write",
        Verb::AioWrite,
        "asynchronously writes a number of bytes",
    )
    .needs(Needs::WritableImage)
    .words(2, None)
    .options("CfiqrP:uz")
    .synopsis("[-Cfiqruz] [-P pattern] off len [len..]")
    .help(help_texts::AIO_WRITE),
    command(
        "alloc",
        Verb::Alloc,
        "checks if offset is allocated in the file",
    )
    .alias("a")
    .needs(Needs::Image)
    .words(1, Some(2))
    .synopsis("offset [count]"),
    command(
        "break",
        Verb::Breakpoint,
        "sets a breakpoint on event and tags the stopped request as tag",
    )
    .needs(Needs::Image)
    .words(2, Some(2))
    .synopsis("event tag"),
    command("close", Verb::Close, "close the current open file")
        .alias("c")
        .needs(Needs::Image),
    command(
        "discard",
        Verb::Discard,
        "discards a number of bytes at a specified offset",
    )
    .alias("d")
    .needs(Needs::WritableImage)
    .words(2, None)
    .options("Cq")
    .synopsis("[-Cq] off len")
    .help(help_texts::DISCARD),
    command("flush", Verb::Flush, "flush all in-core file state to disk")
        .alias("f")
        .needs(Needs::Image),
    command("help", Verb::Help, "help for one or all commands")
        .alias("?")
        .words(0, Some(1))
        .synopsis("[command]"),
    command(
        "info",
        Verb::Info,
        "prints information about the current file",
    )
    .alias("i")
    .needs(Needs::Image),
    command(
        "length",
        Verb::Length,
        "gets the length of the current file",
    )
    .alias("l")
    .needs(Needs::Image),
    command("map", Verb::Map, "prints the allocated areas of a file")
        .needs(Needs::Image)
        .synopsis(""),
    command("open", Verb::Open, "open the file specified by path")
        .alias("o")
        .words(1, None)
        .options("sCnrki:t:d:o:U")
        .synopsis("[-rsCnkU] [-t cache] [-d discard] [-o options] [path]")
        .help(help_texts::OPEN),
    command("quit", Verb::Quit, "exit the program")
        .alias("q")
        .words(0, None),
    command(
        "read",
        Verb::Read,
        "reads a number of bytes at a specified offset",
    )
    .alias("r")
    .needs(Needs::Image)
    .words(2, None)
    .options("bCl:pP:qrs:v")
    .synopsis("[-abCqrv] [-P pattern [-s off] [-l len]] off len")
    .help(help_texts::READ),
    command(
        "readv",
        Verb::Readv,
        "reads a number of bytes at a specified offset",
    )
    .needs(Needs::Image)
    .words(2, None)
    .options("CP:qrv")
    .synopsis("[-Cqrv] [-P pattern] off len [len..]")
    .help(help_texts::READV),
    command(
        "remove_break",
        Verb::Breakpoint,
        "remove a breakpoint by tag",
    )
    .needs(Needs::Image)
    .words(1, Some(1))
    .synopsis("tag"),
    command("reopen", Verb::Reopen, "reopens an image with new options")
        .needs(Needs::Image)
        .words(0, None)
        .options("c:o:rw")
        .synopsis("[(-r|-w)] [-c cache] [-o options]")
        .help(help_texts::REOPEN),
    command(
        "resume",
        Verb::Breakpoint,
        "resumes the request tagged as tag",
    )
    .needs(Needs::Image)
    .words(1, Some(1))
    .synopsis("tag"),
    command("sigraise", Verb::Sigraise, "raises a signal")
        .words(1, Some(1))
        .synopsis("signal")
        .help(help_texts::SIGRAISE),
    command(
        "sleep",
        Verb::Sleep,
        "waits for the given value in milliseconds",
    )
    .words(1, Some(1)),
    command(
        "truncate",
        Verb::Truncate,
        "truncates the current file at the given offset",
    )
    .alias("t")
    .needs(Needs::WritableImage)
    .words(1, Some(3))
    .options("m:")
    .synopsis("[-m prealloc_mode] off"),
    command(
        "wait_break",
        Verb::Breakpoint,
        "waits for the suspension of a request",
    )
    .needs(Needs::Image)
    .words(1, Some(1))
    .synopsis("tag"),
    command(
        "write",
        Verb::Write,
        "writes a number of bytes at a specified offset",
    )
    .alias("w")
    .needs(Needs::WritableImage)
    .words(2, None)
    .options("bcCfnpP:qrs:uz")
    .synopsis("[-bcCfnqruz] [-P pattern | -s source_file] off len")
    .help(help_texts::WRITE),
    command(
        "writev",
        Verb::Writev,
        "writes a number of bytes at a specified offset",
    )
    .needs(Needs::WritableImage)
    .words(2, None)
    .options("CfqrP:")
    .synopsis("[-Cfqr] [-P pattern] off len [len..]")
    .help(help_texts::WRITEV),
    command(
        "zone_append",
        Verb::Zone,
        "append write a number of bytes at a specified offset",
    )
    .alias("zap")
    .needs(Needs::Image)
    .words(3, Some(4))
    .synopsis("offset len [len..]"),
    command(
        "zone_close",
        Verb::Zone,
        "close a range of zones in zone block device",
    )
    .alias("zc")
    .needs(Needs::Image)
    .words(2, Some(2))
    .synopsis("offset len"),
    command(
        "zone_finish",
        Verb::Zone,
        "finish a range of zones in zone block device",
    )
    .alias("zf")
    .needs(Needs::Image)
    .words(2, Some(2))
    .synopsis("offset len"),
    command(
        "zone_open",
        Verb::Zone,
        "explicit open a range of zones in zone block device",
    )
    .alias("zo")
    .needs(Needs::Image)
    .words(2, Some(2))
    .synopsis("offset len"),
    command("zone_report", Verb::Zone, "report zone information")
        .alias("zrp")
        .needs(Needs::Image)
        .words(2, Some(2))
        .synopsis("offset number"),
    command(
        "zone_reset",
        Verb::Zone,
        "reset a zone write pointer in zone block device",
    )
    .alias("zrs")
    .needs(Needs::Image)
    .words(2, Some(2))
    .synopsis("offset len"),
];

//! Arguments that the help of several subcommands tells of.

/// An argument and what it does.
pub type Argument = (&'static str, &'static str);

pub const FORMAT: Argument = ("-f, --format FMT", "the format of FILENAME");
pub const IMAGE_OPTS: Argument = (
    "--image-opts",
    "FILENAME is a list of options, not a name (excludes --format)",
);
pub const OBJECT: Argument = ("--object OBJDEF", "an object, such as a secret with a key");
pub const QUIET: Argument = ("-q, --quiet", "print errors only");
pub const PROGRESS: Argument = ("-p, --progress", "show how far it is");
pub const CACHE: Argument = ("-t, --cache CACHE", "cache mode of FILENAME (writeback)");
pub const SHARE: Argument = ("-U, --force-share", "others may write meanwhile");
pub const OUTPUT: Argument = (
    "--output human|json",
    "for people (the default) or for programs",
);
pub const FILENAME: Argument = ("FILENAME", "the image, or its options with --image-opts");

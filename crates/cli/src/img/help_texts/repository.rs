//! What `--help` tells of `push`, `pull`, `open` and `repo`.

use super::{Argument, FORMAT, IMAGE_OPTS, OBJECT, PROGRESS, QUIET, Text};

const REPOSITORY: Argument = (
    "REPOSITORY",
    "a folder, or s3://BUCKET/PREFIX (gs://, az://), or json:{\"driver\": \"repository\", ...}",
);

pub const PUSH: Text = Text {
    usage: "\
[-f FMT | --image-opts] [--bitmap NAME | --since TAG[@NUMBER] | --full] [--track]
        [--level LEVEL] [--take-over] [-T CACHE_MODE] [-U] [-p] [-q] [--output OUTPUT]
        [--object OBJDEF] DISK REPOSITORY[:TAG]",
    arguments: &[
        QUIET,
        PROGRESS,
        FORMAT,
        IMAGE_OPTS,
        (
            "--track",
            "leave a bitmap in the image that notes what changes from now on",
        ),
        (
            "--since TAG[@NUMBER]",
            "read what has changed since then, as the bitmap of that push tells, and fail if there \
             is none",
        ),
        (
            "--bitmap NAME",
            "read what this bitmap says has changed since the newest disk of the tag",
        ),
        ("--full", "read everything, although a bitmap is there"),
        ("--level LEVEL", "of zstd, 1 to 19 (3)"),
        (
            "--take-over",
            "go on for another push to the tag, which is known to have been killed",
        ),
        ("-T, --cache CACHE_MODE", "cache mode of DISK (writeback)"),
        ("-U, --force-share", "others may write meanwhile"),
        (
            "--output human|json",
            "for people (the default) or for programs",
        ),
        OBJECT,
        (
            "DISK",
            "what is pushed: any image or disk that is not written to meanwhile",
        ),
        REPOSITORY,
        ("TAG", "the disk's name there (latest)"),
    ],
    closing: "",
};

pub const PULL: Text = Text {
    usage: "\
[-O FMT] [-o OPTIONS] [-c] [-n] [-p] [-q] [--object OBJDEF]
        REPOSITORY[:TAG[@NUMBER]] FILENAME",
    arguments: &[
        QUIET,
        PROGRESS,
        (
            "-O, --target-format FMT",
            "the format of FILENAME (qcow2; raw for .raw and .img)",
        ),
        ("-o, --target-options OPTIONS", "options of that format"),
        ("-c, --compress", "compress what is written"),
        (
            "-n, --no-create",
            "FILENAME is there: overwrite what it holds",
        ),
        OBJECT,
        REPOSITORY,
        (
            "TAG[@NUMBER]",
            "the disk's name (latest), and which one of them (the newest)",
        ),
        (
            "FILENAME",
            "the file to make; it appears when it is complete",
        ),
    ],
    closing: "",
};

pub const OPEN: Text = Text {
    usage: "\
[--cache FOLDER [--limit SIZE] [--prefetch]] [-o OPTIONS] [-q]
        [--object OBJDEF] REPOSITORY[:TAG[@NUMBER]] OVERLAY",
    arguments: &[
        QUIET,
        (
            "--cache FOLDER",
            "keep what was read in this folder, which is this user's alone, for all disks",
        ),
        ("--limit SIZE", "what the folder takes at most"),
        ("--prefetch", "bring everything there in the background"),
        ("-o, --options OPTIONS", "options of the overlay"),
        OBJECT,
        REPOSITORY,
        (
            "TAG[@NUMBER]",
            "the disk's name (latest), and which one of them (the newest)",
        ),
        (
            "OVERLAY",
            "the qcow2 image to make, whose backing file the disk is",
        ),
    ],
    closing: "",
};

pub const REPO: Text = Text {
    usage: "\
list|verify|prune|remove|gc [--read-data] [--keep COUNT]
        [--keep-within TIME] [--stale-after TIME] [--dry-run] [--break-lock]
        [-p] [-q] [--output OUTPUT] [--object OBJDEF] REPOSITORY[:TAG]",
    arguments: &[
        QUIET,
        PROGRESS,
        ("list", "what disks there are"),
        (
            "verify",
            "whether all that disks lead to is there; exit code 2 if not",
        ),
        ("--read-data", "verify: read and compare all of it"),
        (
            "prune",
            "remove all disks (of TAG) but those that the options keep, and the newest of each tag",
        ),
        ("--keep COUNT", "prune: the newest COUNT of each tag stay"),
        (
            "--keep-within TIME",
            "prune: what is younger stays (30d, 12h)",
        ),
        ("remove", "remove TAG with all of its disks"),
        ("gc", "remove objects that no disk leads to any more"),
        (
            "--stale-after TIME",
            "gc: pushes without a sign of life for so long are given up (24h)",
        ),
        ("--dry-run", "prune, remove, gc: say what would go"),
        (
            "--break-lock",
            "another prune, remove or gc is known to have been killed",
        ),
        (
            "--output human|json",
            "for people (the default) or for programs",
        ),
        OBJECT,
        REPOSITORY,
    ],
    closing: "",
};

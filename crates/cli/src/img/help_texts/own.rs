//! The helps of subcommands that QEMU's program does not have.

use super::{FILENAME, FORMAT, IMAGE_OPTS, OBJECT, OUTPUT, PROGRESS, QUIET, SHARE, Text};

pub(super) const RECEIVE: Text = Text {
    usage: "\
[-O FMT] [-o OPTIONS] [-n] [--force] [-t CACHE] [-m NUM_COROUTINES] [-p] [-q]
        [--object OBJDEF] DISK < STREAM
        [--resume-token | --token] DISK",
    arguments: &[
        QUIET,
        PROGRESS,
        (
            "-O, --target-format FMT",
            "the format of DISK: qcow2 (the default) or raw; of one that is there, what it is",
        ),
        (
            "-o, --target-options OPTIONS",
            "options to make DISK with, or 'help' to list them",
        ),
        (
            "-n, --no-create",
            "a whole disk goes into an image that is there, of the same size",
        ),
        (
            "--force",
            "replace DISK, give up what is half received, apply changes to whatever there is",
        ),
        ("-t, --target-cache CACHE", "cache mode of DISK (writeback)"),
        (
            "-m, --parallel NUM_COROUTINES",
            "pieces of 1 MiB to unpack and write side by side",
        ),
        (
            "--resume-token",
            "print what 'send --resume' needs to go on with a half received DISK",
        ),
        (
            "--token",
            "print which stream DISK holds, for 'send --base'",
        ),
        OBJECT,
        (
            "DISK",
            "the image, a file; half received it has another name",
        ),
    ],
    closing: "",
};

pub(super) const COMPACT: Text = Text {
    usage: "\
[-f FMT | --image-opts] [-r RATE] [-t CACHE] [--output FMT] [-p] [-q]
        [--object OBJDEF] FILENAME",
    arguments: &[
        QUIET,
        PROGRESS,
        FORMAT,
        IMAGE_OPTS,
        OUTPUT,
        ("-t, --cache CACHE", "cache mode of FILENAME (writeback)"),
        ("-r, --rate RATE", "move so many bytes in a second at most"),
        OBJECT,
        FILENAME,
    ],
    closing: "",
};

pub(super) const SCRUB: Text = Text {
    usage: "\
[-f FMT | --image-opts] [--repair [--force] | --read-only] [-r RATE]
        [-T CACHE_MODE] [--output FMT] [-p] [-q] [--object OBJDEF] FILENAME",
    arguments: &[
        QUIET,
        PROGRESS,
        FORMAT,
        IMAGE_OPTS,
        OUTPUT,
        (
            "-T, --cache CACHE_MODE",
            "cache mode of FILENAME (writeback)",
        ),
        ("-r, --rate RATE", "read so many bytes in a second at most"),
        (
            "--repair",
            "write what has changed on disk anew if the backing file has it",
        ),
        (
            "--force",
            "also where another program may have written, and what it wrote is newer",
        ),
        (
            "--read-only",
            "change nothing: what has no checksum gets none",
        ),
        OBJECT,
        FILENAME,
    ],
    closing: "",
};

pub(super) const SEAL: Text = Text {
    usage: "\
[-f FMT | --image-opts] [--key FILE [--password-secret ID]]
        [--manifest FILE | --unseal] [-T CACHE_MODE] [-p] [-q]
        [--object OBJDEF] FILENAME",
    arguments: &[
        QUIET,
        PROGRESS,
        FORMAT,
        IMAGE_OPTS,
        (
            "-T, --cache CACHE_MODE",
            "cache mode of FILENAME (writeback)",
        ),
        ("--key FILE", "sign with this secret key of minisign"),
        (
            "--password-secret ID",
            "the secret object that holds the key's password",
        ),
        (
            "--manifest FILE",
            "write the hashes of all that a guest sees into FILE; FILENAME stays as it is",
        ),
        (
            "--unseal",
            "give the seal up, so that the image can be changed",
        ),
        OBJECT,
        FILENAME,
    ],
    closing: "",
};

pub(super) const SEND: Text = Text {
    usage: "\
[-f FMT | --image-opts] [--since BITMAP [--base TOKEN] | -l SNAPSHOT | --resume TOKEN]
        [-o FILE] [--level LEVEL] [-r RATE] [-m NUM_COROUTINES] [-T CACHE_MODE] [-U] [-p] [-q]
        [--object OBJDEF] FILENAME > STREAM",
    arguments: &[
        QUIET,
        (
            "-p, --progress",
            "show how far it is (with -o; else a bar on a terminal)",
        ),
        FORMAT,
        IMAGE_OPTS,
        (
            "--since, --bitmap BITMAP",
            "send only what this bitmap of FILENAME calls dirty, instead of the whole disk",
        ),
        (
            "--base TOKEN",
            "the stream that the receiver must have: what changed since is in BITMAP",
        ),
        (
            "--resume TOKEN",
            "go on with a stream that was cut off, with what 'receive --resume-token' prints",
        ),
        (
            "-l, --snapshot SNAPSHOT",
            "send an internal snapshot, by its ID or TAG",
        ),
        (
            "-o, --file FILE",
            "write the stream into a new file, not to standard output",
        ),
        (
            "--level LEVEL",
            "level of zstd from 1 to 22 (1); 0 compresses nothing",
        ),
        (
            "-r, --rate RATE",
            "write so many bytes of the stream in a second at most",
        ),
        (
            "-m, --parallel NUM_COROUTINES",
            "pieces of 1 MiB to read and compress side by side",
        ),
        (
            "-T, --cache CACHE_MODE",
            "cache mode of FILENAME (writeback)",
        ),
        SHARE,
        OBJECT,
        FILENAME,
    ],
    closing: "The token of the stream is told at its end; 'vellum receive --token' tells it as well.\n",
};

pub(super) const VERIFY: Text = Text {
    usage: "\
[-f FMT | --image-opts] [--manifest FILE] [--public-key FILE]
        [--statement FILE] [-T CACHE_MODE] [-p] [-q] [-U]
        [--output human|json] [--object OBJDEF] FILENAME",
    arguments: &[
        QUIET,
        PROGRESS,
        FORMAT,
        IMAGE_OPTS,
        (
            "-T, --cache CACHE_MODE",
            "cache mode of FILENAME (writeback)",
        ),
        SHARE,
        OUTPUT,
        (
            "--manifest FILE",
            "compare with this file of hashes instead of the seal in FILENAME",
        ),
        (
            "--public-key FILE",
            "the seal must be signed with the key of this file of minisign",
        ),
        (
            "--statement FILE",
            "write what is signed into FILE, and the signature into FILE.minisig",
        ),
        OBJECT,
        FILENAME,
    ],
    closing: "Exit codes: 0 as it was sealed, 1 it could not be verified, 2 it differs.\n",
};

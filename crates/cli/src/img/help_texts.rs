//! What `--help` tells of each subcommand: how it is called, in QEMU's notation (which
//! scripts search), and what its arguments mean.

mod own;
mod repository;

/// The help of a subcommand.
#[derive(Debug)]
pub struct Text {
    /// What follows the subcommand's name; lines after the first are indented by eight.
    pub usage: &'static str,
    /// Arguments as they are written, and what they do.
    pub arguments: &'static [Argument],
    /// What else there is to know.
    pub closing: &'static str,
}

/// An argument and what it does.
pub type Argument = (&'static str, &'static str);

const FORMAT: Argument = ("-f, --format FMT", "the format of FILENAME");
const IMAGE_OPTS: Argument = (
    "--image-opts",
    "FILENAME is a list of options, not a name (excludes --format)",
);
const OBJECT: Argument = ("--object OBJDEF", "an object, such as a secret with a key");
const QUIET: Argument = ("-q, --quiet", "print errors only");
const PROGRESS: Argument = ("-p, --progress", "show how far it is");
const CACHE: Argument = ("-t, --cache CACHE", "cache mode of FILENAME (writeback)");
const SHARE: Argument = ("-U, --force-share", "others may write meanwhile");
const OUTPUT: Argument = (
    "--output human|json",
    "for people (the default) or for programs",
);
const FILENAME: Argument = ("FILENAME", "the image, or its options with --image-opts");

/// The help of the subcommand called `name`.
pub fn of(name: &str) -> Option<&'static Text> {
    let found = TEXTS.iter().find(|(known, _)| *known == name);
    found.map(|(_, text)| text)
}

static TEXTS: &[(&str, Text)] = &[
    ("amend", AMEND),
    ("bench", BENCH),
    ("bitmap", BITMAP),
    ("check", CHECK),
    ("commit", COMMIT),
    ("compact", own::COMPACT),
    ("compare", COMPARE),
    ("convert", CONVERT),
    ("create", CREATE),
    ("dd", DD),
    ("info", INFO),
    ("map", MAP),
    ("measure", MEASURE),
    ("open", repository::OPEN),
    ("pull", repository::PULL),
    ("push", repository::PUSH),
    ("rebase", REBASE),
    ("receive", own::RECEIVE),
    ("repo", repository::REPO),
    ("resize", RESIZE),
    ("scrub", own::SCRUB),
    ("seal", own::SEAL),
    ("send", own::SEND),
    ("snapshot", SNAPSHOT),
    ("verify", own::VERIFY),
];

const AMEND: Text = Text {
    usage: "\
[-f FMT | --image-opts] [-t CACHE] [--force] [-p] [-q]
        [--object OBJDEF] -o OPTIONS FILENAME",
    arguments: &[
        QUIET,
        PROGRESS,
        FORMAT,
        IMAGE_OPTS,
        CACHE,
        (
            "-o, --options OPTIONS",
            "what to change; '-o help' lists it",
        ),
        ("--force", "do what may lose access to the data"),
        OBJECT,
        FILENAME,
    ],
    closing: "",
};

const BENCH: Text = Text {
    usage: "\
[-f FMT | --image-opts] [-t CACHE] [-c COUNT] [-d DEPTH]
        [-o OFFSET] [-s BUFFER_SIZE] [-S STEP_SIZE] [-i AIO] [-n]
        [-w [--pattern PATTERN] [--flush-interval INTERVAL [--no-drain]]]",
    arguments: &[
        ("-q, --quiet", "accepted and ignored"),
        FORMAT,
        IMAGE_OPTS,
        CACHE,
        ("-c, --count COUNT", "requests to make (75000)"),
        ("-s, --buffer-size BUFFER_SIZE", "size of a request (4k)"),
        ("-d, --depth DEPTH", "requests in flight (64)"),
        ("-o, --offset OFFSET", "where the first request begins (0)"),
        (
            "-S, --step-size STEP_SIZE",
            "from one request to the next (BUFFER_SIZE)",
        ),
        ("-i, --aio AIO", "threads, native or io_uring"),
        ("-n, --native", "the same as --aio native"),
        ("-w, --write", "write; without it the requests are reads"),
        ("--pattern PATTERN", "the byte to write (0)"),
        (
            "--flush-interval FLUSH_INTERVAL",
            "flush after so many requests (with -w)",
        ),
        ("--no-drain", "go on while a flush runs"),
        SHARE,
    ],
    closing: "The benchmark that tells what to choose for an image is 'vellum bench'.\n",
};

const BITMAP: Text = Text {
    usage: "\
( --merge SOURCE | --add | --remove | --clear |
                --enable | --disable ).. [-f FMT | --image-opts]
        [ -b SRC_FILENAME [-F SOURCE_FMT]] [-g SIZE[KMGTPE]] [--object OBJDEF]
        FILENAME BITMAP",
    arguments: &[
        FORMAT,
        IMAGE_OPTS,
        ("--add", "make BITMAP, which records writes from now on"),
        (
            " -g, --granularity SIZE[KMGTPE]",
            "bytes that a bit of it stands for (the cluster size, 4k to 64k)",
        ),
        ("--remove", "remove BITMAP"),
        ("--clear", "forget what BITMAP has recorded"),
        ("--enable, --disable", "have BITMAP record writes, or not"),
        (
            "--merge SOURCE",
            "add what the bitmap SOURCE has recorded to BITMAP",
        ),
        (
            " -b, --source-file SRC_FILENAME",
            "the image that has SOURCE (FILENAME)",
        ),
        (" -F, --source-format SRC_FMT", "the format of SRC_FILENAME"),
        OBJECT,
        FILENAME,
    ],
    closing: "What is asked for is done in the order of the command line.\n",
};

const CHECK: Text = Text {
    usage: "\
[-f FMT | --image-opts] [-T CACHE_MODE] [-r leaks|all|log|drop-log]
        [-U] [--output human|json] [--object OBJDEF] FILENAME",
    arguments: &[
        QUIET,
        FORMAT,
        IMAGE_OPTS,
        (
            "-T, --cache CACHE_MODE",
            "cache mode of FILENAME (writeback)",
        ),
        SHARE,
        OUTPUT,
        (
            "-r, --repair leaks|all|log|drop-log",
            "repair what is lost only, or everything, or bring back what the write log\nholds, as the \
             other two do first, or give that up (excludes --force-share)",
        ),
        OBJECT,
        FILENAME,
    ],
    closing: "Exit codes: 0 sound, 1 the check failed, 2 damaged, 3 leaks only, 63 nothing to check.\n",
};

const COMMIT: Text = Text {
    usage: "\
[-f FMT | --image-opts] [-t CACHE_MODE] [-b BASE_IMG] [-d]
        [-r RATE] [--object OBJDEF] FILENAME",
    arguments: &[
        QUIET,
        PROGRESS,
        FORMAT,
        IMAGE_OPTS,
        (
            "-t, --cache CACHE_MODE",
            "cache mode of FILENAME (writeback)",
        ),
        ("-d, --drop", "do not empty FILENAME afterwards"),
        (
            "-b, --base BASE_IMG",
            "the image of the chain to commit to, instead of the backing file (implies --drop)",
        ),
        ("-r, --rate RATE", "bytes a second at most"),
        OBJECT,
        FILENAME,
    ],
    closing: "
Called vellum, --base must be given, since other images may stand on the file that is changed. If
it is the backing file of FILENAME, the image is emptied unless there is --drop.
",
};

const COMPARE: Text = Text {
    usage: "\
[--image-opts | [-f FMT] [-F FMT]] [-s]
        [-T CACHE] [-U] [--object OBJDEF] FILENAME1 FILENAME2",
    arguments: &[
        QUIET,
        PROGRESS,
        ("-f, --a-format FMT", "the format of FILENAME1"),
        ("-F, --b-format FMT", "the format of FILENAME2"),
        (
            "--image-opts",
            "both names are lists of options (excludes --a-format and --b-format)",
        ),
        ("-s, --strict", "sizes and allocation have to agree too"),
        ("-T, --cache CACHE_MODE", "cache mode of both (writeback)"),
        SHARE,
        OBJECT,
        ("FILENAME1, FILENAME2", "the images"),
    ],
    closing: "Exit codes: 0 the same, 1 different, 2 and more: the comparison failed.\n",
};

const CONVERT: Text = Text {
    usage: "\
[-f SRC_FMT|--image-opts] [-T SRC_CACHE] [--bitmaps [--skip-broken-bitmaps]]
        [-o TGT_OPTS|--target-image-opts] [-t TGT_CACHE] [-n]
        [-B BACKING_FILENAME [-F BACKING_FMT]]
        SRC_FILENAME [SRC_FILENAME2 [...]] TGT_FILENAME",
    arguments: &[
        QUIET,
        PROGRESS,
        ("-f, --source-format SRC_FMT", "the format of the sources"),
        (
            "--source-image-opts",
            "the sources are lists of options (excludes --source-format)",
        ),
        ("--image-opts", "the same"),
        (
            "-l, --source-snapshot SNAPSHOT_PARAMS",
            "copy this snapshot of the source",
        ),
        (
            "-T, --source-cache SRC_CACHE",
            "cache mode of the sources (writeback)",
        ),
        (
            "-O, --target-format TGT_FMT",
            "the format of the target (raw)",
        ),
        (
            "--target-image-opts",
            "the target is a list of options (with -n; excludes --target-format)",
        ),
        (
            "-o, --target-options TGT_OPTS",
            "options of the target's format; '-o help' lists them",
        ),
        ("-c, --compress", "compress the target (qcow2)"),
        (
            "-t, --target-cache TGT_CACHE",
            "cache mode of the target (unsafe)",
        ),
        (
            "-B, --backing BACKING_FILENAME",
            "the target's backing file",
        ),
        (
            "-F, --backing-format BACKING_FMT",
            "the format of BACKING_FILENAME",
        ),
        ("-n, --no-create", "write into a target that exists"),
        (
            "--target-is-zero",
            "the target reads as zeroes already (with -n)",
        ),
        (
            "-S, --sparse-size SPARSE_SIZE",
            "runs of zeroes from this length on are not written (4k)",
        ),
        ("--bitmaps", "copy the bitmaps too"),
        (
            "--skip-broken-bitmaps",
            "leave out those whose content is lost (with --bitmaps)",
        ),
        SHARE,
        ("-r, --rate RATE", "bytes a second at most"),
        (
            "-m, --parallel NUM_COROUTINES",
            "requests in flight, 1 to 16 (8)",
        ),
        (
            "-C, --copy-range-offloading",
            "let the host copy where it can",
        ),
        ("--salvage", "take what cannot be read as zeroes"),
        ("-W, --oob-writes", "write in any order"),
        ("--level LEVEL", "how hard -c tries, 1 to 22; zlib knows 12"),
        ("--window 4k|32k", "how far -c with zlib looks back (32k)"),
        (
            "--journal",
            "keep a journal beside the target, and go on where an interrupted copy with\n\
             the same arguments has ended",
        ),
        (
            "--reproducible",
            "the same content and options give the same bytes, whatever the machine does",
        ),
        (
            "--accept-missing",
            "copy zeroes for what a source lacks whose file was cut short",
        ),
        OBJECT,
        ("SRC_FILENAME", "a source"),
        ("TGT_FILENAME", "the target"),
    ],
    closing: "\
Called vellum, a target '-' is standard output (qcow2 or raw), and a source '-' standard
input (raw, or any format if it is a file).
",
};

const CREATE: Text = Text {
    usage: "\
[-f FMT] [-o FMT_OPTS] [-b BACKING_FILENAME [-F BACKING_FMT]]
        [--object OBJDEF] [-u] FILENAME [SIZE[bkKMGTPE]]",
    arguments: &[
        QUIET,
        ("-f, --format FMT", "the format of the image (raw)"),
        (
            "-o, --options FMT_OPTS",
            "options of the format; '-o help' lists them",
        ),
        ("-b, --backing BACKING_FILENAME", "the backing file"),
        (
            "-F, --backing-format BACKING_FMT",
            "the format of BACKING_FILENAME",
        ),
        ("-u, --backing-unsafe", "do not look at the backing file"),
        OBJECT,
        ("FILENAME", "the new image; what is there is lost"),
        (
            "SIZE",
            "bytes, or with a suffix k, M, G, T, P or E (powers of 1024);\n\
             the backing file's size if there is one",
        ),
    ],
    closing: "",
};

const DD: Text = Text {
    usage: "\
[-f FMT|--image-opts] [-O OUTPUT_FMT] [-U]
        [bs=BLOCK_SIZE] [count=BLOCKS] [skip=BLOCKS] if=INPUT of=OUTPUT",
    arguments: &[
        ("-f, --format FMT", "the format of INPUT"),
        (
            "--image-opts",
            "INPUT is a list of options, not a name (excludes --format)",
        ),
        (
            "-O, --output-format OUTPUT_FMT",
            "the format of OUTPUT (raw)",
        ),
        SHARE,
        OBJECT,
        ("bs=BLOCK_SIZE[kKMGTP]", "the size of a block (512)"),
        ("count=COUNT", "blocks to copy (all)"),
        ("skip=COUNT", "blocks of INPUT to leave out"),
        ("if=INPUT", "the image to read"),
        ("of=OUTPUT", "the image to make"),
    ],
    closing: "",
};

const INFO: Text = Text {
    usage: "\
[-f FMT | --image-opts] [-b] [-U] [--object OBJDEF]
        [--output human|json] FILENAME",
    arguments: &[
        FORMAT,
        IMAGE_OPTS,
        ("-b, --backing-chain", "tell about the backing files too"),
        SHARE,
        OBJECT,
        OUTPUT,
        FILENAME,
    ],
    closing: "",
};

const MAP: Text = Text {
    usage: "\
[-f FMT | --image-opts] [--object OBJDEF] [--output human|json]
        [--start-offset OFFSET] [--max-length LENGTH] [-U] FILENAME",
    arguments: &[
        FORMAT,
        IMAGE_OPTS,
        ("-s, --start-offset OFFSET", "where to begin"),
        ("-l, --max-length LENGTH", "how far to go"),
        OUTPUT,
        SHARE,
        OBJECT,
        FILENAME,
    ],
    closing: "",
};

const MEASURE: Text = Text {
    usage: "\
[-f FMT|--image-opts] [-o OPTIONS] [-O OUTPUT_FMT]
       [--output OFMT] [--object OBJDEF] [-l SNAPSHOT_PARAM]
       (--size SIZE | FILENAME)",
    arguments: &[
        ("-O, --target-format FMT", "the format of the copy (raw)"),
        ("-o, --options OPTIONS", "options of that format"),
        ("-s, --size SIZE", "an image of this size, without content"),
        ("FILENAME", "the image that would be copied"),
        FORMAT,
        IMAGE_OPTS,
        ("-l, --snapshot SNAPSHOT", "its state in this snapshot"),
        OUTPUT,
        SHARE,
        OBJECT,
    ],
    closing: "",
};

const REBASE: Text = Text {
    usage: "\
[-f FMT | --image-opts] [-t CACHE] [-q] [-U] [-p]
        [-b BACKING_FILENAME [-F BACKING_FMT] [-T BACKING_CACHE]] [-u]
        [--object OBJDEF] [-c] FILENAME",
    arguments: &[
        QUIET,
        PROGRESS,
        FORMAT,
        IMAGE_OPTS,
        CACHE,
        (
            "-b, --backing BACKING_FILENAME|\"\"",
            "the new backing file, or none",
        ),
        (
            "-F, --backing-format BACKING_FMT",
            "the format of BACKING_FILENAME",
        ),
        (
            "-T, --backing-cache CACHE",
            "cache mode of the backing files (writeback)",
        ),
        (
            "-u, --backing-unsafe",
            "change the name only; nothing is read or copied",
        ),
        ("-c, --compress", "compress what is copied"),
        SHARE,
        OBJECT,
        FILENAME,
    ],
    closing: "",
};

const RESIZE: Text = Text {
    usage: "\
[-f FMT | --image-opts] [--preallocation PREALLOC] [--shrink]
        [--object OBJECTDEF] [-q] FILENAME [+-]SIZE[bkKMGTPE]",
    arguments: &[
        QUIET,
        FORMAT,
        IMAGE_OPTS,
        (
            "--shrink",
            "let the image become smaller; what lies beyond its end is lost",
        ),
        (
            "--preallocation PREALLOC",
            "how new space is made: off, metadata, falloc or full (off)",
        ),
        OBJECT,
        FILENAME,
        (
            "[+-]SIZE[bkKMGTPE]",
            "the new size, or what is added to or taken from the old one",
        ),
    ],
    closing: "",
};

const SNAPSHOT: Text = Text {
    usage: "\
[-f FMT | --image-opts] [-l | -a|-c|-d SNAPSHOT]
        [-U] [--object OBJDEF] FILENAME",
    arguments: &[
        ("-q, --quiet", "accepted and ignored"),
        FORMAT,
        IMAGE_OPTS,
        ("-U, --force-share", "others may write meanwhile (with -l)"),
        OBJECT,
        ("Operation, one of:", ""),
        (
            "  -l, --list",
            "  list the snapshots of FILENAME (the default)",
        ),
        (
            "  -c, --create SNAPSHOT",
            "  take a snapshot with this name",
        ),
        ("  -a, --apply SNAPSHOT", "  make the disk what it was"),
        ("  -d, --delete SNAPSHOT", "  delete a snapshot"),
        ("FILENAME", "the image, or its options with --image-opts"),
    ],
    closing: "-a takes the ID or the TAG of a snapshot, -d the TAG.\n",
};

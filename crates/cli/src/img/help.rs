//! `--help` and `--version`.

use super::command::{Command, Outcome};
use super::{SUBCOMMANDS, Subcommand};
use crate::report;

/// The version of QEMU whose tools are matched. Programs that call `qemu-img`
/// look at this number to know what it can do.
pub(crate) const QEMU_VERSION: &str = "10.0.2";

/// What `--version` prints.
pub fn version(program: &str) -> String {
    let own = env!("CARGO_PKG_VERSION");
    if program.starts_with("qemu-") {
        format!("{program} version {QEMU_VERSION} (vellum {own})\n")
    } else {
        format!("{program} {own}\n")
    }
}

/// What the options before a subcommand mean.
pub const OPTIONS_HELP: &str = "\
  -h, --help           print this help
  -V, --version        print the version
  -T, --trace TRACE    accepted and ignored
";

/// Prints the help of the whole tool.
pub fn tool(program: &str) {
    let mut text = version(program);
    text.push_str(&format!(
        "Usage: {program} [OPTIONS] SUBCOMMAND [--help | ARGUMENTS]\n\nOptions:\n  {OPTIONS_HELP}\n\
         Subcommands:\n"
    ));
    for subcommand in SUBCOMMANDS {
        // The short name is that of a tool of our own; see below.
        let name = match subcommand.name {
            "bench" if !program.starts_with("qemu-") => "img bench",
            name => name,
        };
        text.push_str(&format!("  {name:<10} {}\n", subcommand.about));
    }
    if !program.starts_with("qemu-") {
        text.push_str(
            "\nOther tools:\n  \
             audit         Tell whether an image that nobody vouches for is safe to open\n  \
             bench         Show what the choices of an image cost on this machine\n  \
             completions   Print completions for bash, zsh or fish\n  \
             daemon        Serve the images that options describe (qemu-storage-daemon)\n  \
             inspect       Show what is in an image, and what could be better\n  \
             install-links Make links by the names of QEMU's programs\n  \
             io            Read and write single requests (qemu-io)\n  \
             man           Write manual pages into a folder\n  \
             nbd           Serve an image over NBD (qemu-nbd)\n",
        );
    }
    text.push_str("\nSupported image formats: qcow2 raw\n");
    report::print(text);
}

/// Prints the help of a subcommand.
pub fn subcommand(command: Command<'_>) -> Outcome {
    let about = SUBCOMMANDS.iter().find(|other| other.name == command.name);
    let about = about.map_or("", |Subcommand { about, .. }| about);
    let (usage, options) = text(command.name);
    report::print(format_args!(
        "{about}.  Usage:\n\n  {} {} {usage}\n\nArguments:\n  -h, --help\n  {options}",
        command.program, command.name
    ));
    Ok(0)
}

/// What the options of a subcommand mean.
pub fn options_of(name: &str) -> &'static str {
    text(name).1
}

/// The arguments of a subcommand and what its options mean.
fn text(name: &str) -> (&'static str, &'static str) {
    match name {
        "amend" => ("[OPTIONS] -o LIST FILENAME", AMEND),
        "bench" => ("[OPTIONS] FILENAME", BENCH),
        "bitmap" => (
            "(--add | --remove | --clear | --enable | --disable | --merge SOURCE)... [OPTIONS] FILENAME BITMAP",
            BITMAP,
        ),
        "check" => ("[OPTIONS] FILENAME", CHECK),
        "commit" => ("[OPTIONS] FILENAME", COMMIT),
        "compare" => ("[OPTIONS] FILENAME1 FILENAME2", COMPARE),
        "convert" => ("[OPTIONS] SOURCE [SOURCE...] TARGET", CONVERT),
        "create" => ("[OPTIONS] FILENAME [SIZE]", CREATE),
        "dd" => (
            "[OPTIONS] if=INPUT of=OUTPUT [bs=SIZE] [count=BLOCKS] [skip=BLOCKS]",
            DD,
        ),
        "info" => ("[OPTIONS] FILENAME", INFO),
        "map" => ("[OPTIONS] FILENAME", MAP),
        "measure" => ("[OPTIONS] (--size SIZE | FILENAME)", MEASURE),
        "rebase" => ("[OPTIONS] FILENAME", REBASE),
        "resize" => ("[OPTIONS] FILENAME [+|-]SIZE", RESIZE),
        "snapshot" => ("[OPTIONS] [-l | -a|-c|-d SNAPSHOT] FILENAME", SNAPSHOT),
        _ => ("", ""),
    }
}

const AMEND: &str = "\
  -q, --quiet               print errors only
  -p, --progress            show the progress
  -f, --format FMT          the format of the image
  --image-opts              FILENAME is a list of options
  -o, --options LIST        what to change; '-o help' lists the options
  -t, --cache MODE          cache mode (writeback)
  --force                   do what may lose access to the data
  --object DEFINITION       an object such as a secret
";

const BENCH: &str = "\
  -q, --quiet               accepted and ignored
  -f, --format FMT          the format of the image
  --image-opts              FILENAME is a list of options
  -t, --cache MODE          cache mode (writeback)
  -c, --count COUNT         requests to make (75000)
  -s, --buffer-size SIZE    size of a request (4k)
  -d, --depth DEPTH         requests in flight (64)
  -o, --offset OFFSET       where the first request begins (0)
  -S, --step-size SIZE      from one request to the next (the size of a request)
  -i, --aio MODE            threads, native or io_uring
  -n, --native              the same as --aio native
  -w, --write               write; without it the requests are reads
  --pattern BYTE            what to write (0)
  --flush-interval COUNT    flush after so many requests (with -w)
  --no-drain                go on while a flush runs
  -U, --force-share         share the image with writers
The benchmark that tells what to choose for an image is 'vellum bench'.
";

const BITMAP: &str = "\
  -f, --format FMT          the format of the image
  --image-opts              FILENAME is a list of options
  --add                     make BITMAP, which records writes from now on
  -g, --granularity SIZE    bytes that a bit of it stands for (the cluster size, 4k to 64k)
  --remove                  remove BITMAP
  --clear                   forget what BITMAP has recorded
  --enable, --disable       have BITMAP record writes, or not
  --merge SOURCE            add what the bitmap SOURCE has recorded to BITMAP
  -b, --source-file FILE    the image that has SOURCE (FILENAME)
  -F, --source-format FMT   the format of FILE
  --object DEFINITION       an object such as a secret
What is asked for is done in the order of the command line.
";

const CHECK: &str = "\
  -q, --quiet               print errors only
  -f, --format FMT          the format of the image
  --image-opts              FILENAME is a list of options
  -T, --cache MODE          cache mode (writeback)
  -r, --repair leaks|all    repair lost clusters only, or everything
  -U, --force-share         share the image with writers
  --output human|json       how to print the result
  --object DEFINITION       an object such as a secret
Exit codes: 0 sound, 1 the check failed, 2 damaged, 3 leaks only, 63 nothing to check.
";

const COMMIT: &str = "\
  -q, --quiet               print errors only
  -p, --progress            show the progress
  -f, --format FMT          the format of the image
  --image-opts              FILENAME is a list of options
  -t, --cache MODE          cache mode (writeback)
  -b, --base BASE           the image of the chain to commit to instead of the backing
                            file; implies --drop
  -d, --drop                do not empty FILENAME afterwards
  -r, --rate RATE           bytes a second at most
  --object DEFINITION       an object such as a secret
";

const COMPARE: &str = "\
  -q, --quiet               print errors only
  -p, --progress            show the progress
  -f, --a-format FMT        the format of FILENAME1
  -F, --b-format FMT        the format of FILENAME2
  --image-opts              both names are lists of options
  -s, --strict              sizes and allocation have to agree too
  -T, --cache MODE          cache mode (writeback)
  -U, --force-share         share the images with writers
  --object DEFINITION       an object such as a secret
Exit codes: 0 the same, 1 different, 2 and more: the comparison failed.
";

const CONVERT: &str = "\
  -q, --quiet               print errors only
  -p, --progress            show the progress
  -f, --source-format FMT   the format of the sources
  --image-opts              the sources are lists of options
  -l, --source-snapshot SNAPSHOT  the source as it was when this snapshot was taken
  -T, --source-cache MODE   cache mode of the sources (writeback)
  -O, --target-format FMT   the format of the target (raw)
  --target-image-opts       the target is a list of options (with -n)
  -o, --target-options LIST options of the target; '-o help' lists them
  -t, --target-cache MODE   cache mode of the target (unsafe)
  -c, --compress            compress the data
  -B, --backing FILENAME    the target's backing file
  -F, --backing-format FMT  the backing file's format
  -n, --no-create           write into a target that exists
  --target-is-zero          the target reads as zeroes (with -n)
  -S, --sparse-size SIZE    runs of zeroes from this length on are not written (4k)
  -m, --parallel N          requests in flight, 1 to 16 (8)
  -W, --oob-writes          write in any order
  --level N                 how hard to compress (with -c)
  --window 4k|32k           how far back compressed data may refer (with -c)
  --journal                 keep a journal beside the target, and go on where an
                            interrupted copy with the same arguments has ended
  --bitmaps                 copy the bitmaps too
  --skip-broken-bitmaps     leave out those whose content is lost (with --bitmaps)
  -r, --rate RATE           bytes a second at most
  -C, --copy-range-offloading  let the host copy where it can
  --salvage                 take what cannot be read as zeroes
  -U, --force-share         share the sources with writers
  --object DEFINITION       an object such as a secret
Called vellum, a target '-' is standard output (qcow2 or raw), and a source '-' standard
input (raw, or any format if it is a file).
";

const CREATE: &str = "\
  -q, --quiet               print errors only
  -f, --format FMT          the format of the image (raw)
  -o, --options LIST        options of the format; '-o help' lists them
  -b, --backing FILENAME    the backing file
  -F, --backing-format FMT  the backing file's format
  -u, --backing-unsafe      do not look at the backing file
  --object DEFINITION       an object such as a secret
  SIZE                      size with an optional suffix b, k, M, G, T, P or E; the
                            backing file's size if there is one
";

const DD: &str = "\
  -f, --format FMT          the format of INPUT
  --image-opts              INPUT is a list of options
  -O, --output-format FMT   the format of OUTPUT (raw)
  -U, --force-share         share the input with writers
  --object DEFINITION       an object such as a secret
  bs=SIZE                   the size of a block (512)
  count=BLOCKS              blocks to copy
  skip=BLOCKS               blocks of the input to leave out
";

const INFO: &str = "\
  -f, --format FMT          the format of the image
  --image-opts              FILENAME is a list of options
  -b, --backing-chain       tell about the backing files too
  -U, --force-share         share the image with writers
  --output human|json       how to print
  --object DEFINITION       an object such as a secret
";

const MAP: &str = "\
  -f, --format FMT          the format of the image
  --image-opts              FILENAME is a list of options
  -s, --start-offset OFFSET where to begin
  -l, --max-length LENGTH   how far to go
  -U, --force-share         share the image with writers
  --output human|json       how to print
  --object DEFINITION       an object such as a secret
";

const MEASURE: &str = "\
  -O, --target-format FMT   the format of the copy (raw)
  -o OPTIONS                options of the copy
  -s, --size SIZE           an image of this size, without content
  -l, --snapshot SNAPSHOT   the image as it was when this snapshot was taken
  -f, --format FMT          the format of FILENAME
  --image-opts              FILENAME is a list of options
  -U, --force-share         share the image with writers
  --output human|json       how to print
  --object DEFINITION       an object such as a secret
";

const REBASE: &str = "\
  -q, --quiet               print errors only
  -p, --progress            show the progress
  -f, --format FMT          the format of the image
  --image-opts              FILENAME is a list of options
  -t, --cache MODE          cache mode (writeback)
  -b, --backing FILENAME    the new backing file; an empty name for none
  -F, --backing-format FMT  its format
  -T, --backing-cache MODE  cache mode of the backing files (writeback)
  -u, --backing-unsafe      change the name only; nothing is read or copied
  -c, --compress            compress what is copied
  -U, --force-share         share the backing files with writers
  --object DEFINITION       an object such as a secret
";

const RESIZE: &str = "\
  -q, --quiet               print errors only
  -f, --format FMT          the format of the image
  --image-opts              FILENAME is a list of options
  --preallocation MODE      how new space is made: off, metadata, falloc or full (off)
  --shrink                  let the image become smaller; what lies beyond its end is lost
  --object DEFINITION       an object such as a secret
  [+|-]SIZE                 the new size, or what is added to or taken from the old one
";

const SNAPSHOT: &str = "\
  -q, --quiet               accepted and ignored
  -f, --format FMT          the format of the image
  --image-opts              FILENAME is a list of options
  -U, --force-share         share the image with writers (with -l)
  --object DEFINITION       an object such as a secret
  -l, --list                list the snapshots (the default)
  -c, --create SNAPSHOT     take a snapshot with this name
  -a, --apply SNAPSHOT      make the disk what it was
  -d, --delete SNAPSHOT     delete a snapshot
-a takes the ID or the TAG of a snapshot, -d the TAG.
";

//! Pages of what serves disks for long, and of what leads it.

use super::{FAILED, Page, USUAL};

pub(super) const CTL: Page = Page {
    usage: &[
        "[OPTIONS] list|jobs|exports|nodes|stats|top|host",
        "[OPTIONS] show|flush|commit|stream DISK",
        "[OPTIONS] snapshot|mirror|backup DISK FILE",
        "[OPTIONS] resize DISK SIZE",
        "[OPTIONS] job pause|resume|complete|cancel|dismiss|finalize ID",
        "[OPTIONS] job speed ID SIZE",
        "[OPTIONS] unexport ID",
        "[OPTIONS] qmp COMMAND [JSON]",
    ],
    examples: &[
        (
            "export VELLUM_CTL=unix:/run/vellum.sock",
            "where the daemon was told to listen: --metrics unix:/run/vellum.sock",
        ),
        ("vellum ctl list", "the disks that it serves"),
        (
            "vellum ctl snapshot disk overlay.qcow2",
            "what is written from now on goes to a new image",
        ),
        (
            "vellum ctl backup disk /backup/disk.qcow2 --speed 50M",
            "a copy of the disk as it is now, at 50 MiB a second",
        ),
        (
            "vellum ctl backup disk /backup/disk.qcow2 --overwrite --wait",
            "the same every night, over the one of the night before; it fails if the job does",
        ),
        (
            "vellum ctl top -i 1",
            "what each disk is asked for, looked at every second",
        ),
        ("vellum ctl qmp query-block-jobs", "whatever QMP can tell"),
    ],
    exits: USUAL,
};

pub(super) const DAEMON: Page = Page {
    usage: &["[OPTIONS]"],
    examples: &[
        (
            "vellum daemon --blockdev driver=file,node-name=file,filename=disk.qcow2 --blockdev \
             driver=qcow2,node-name=disk,file=file --nbd-server \
             addr.type=unix,addr.path=/run/disk.sock --export \
             nbd,id=one,node-name=disk,writable=on",
            "a disk behind a socket",
        ),
        (
            "vellum daemon --config disks.toml --check",
            "what a file of disks would do, with the line of each request",
        ),
        (
            "vellum daemon --config disks.toml --state state.json --log json",
            "the disks of a file, and what clients make besides; SIGHUP reads the file again",
        ),
        (
            "vellum daemon --metrics unix:/run/disks.sock --metrics localhost:9100 ...",
            "commands over the socket, metrics for Prometheus over the port",
        ),
    ],
    exits: &[("0", "ended by a signal or a client"), FAILED],
};

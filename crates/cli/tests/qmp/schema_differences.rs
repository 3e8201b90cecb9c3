&[
    (
        "VSERPORT_CHANGE is theirs",
        "only machines have serial ports; QEMU's daemon never emits it",
    ),
    (
        "block-latency-histogram-set is ours",
        "exports are counted here; QEMU's daemon has no device to set it for",
    ),
    ("x-vellum-scrub is ours", "our own job"),
    ("X_VELLUM_SCRUB_DAMAGE is ours", "its event"),
    ("BLOCK_JOB_CANCELLED.type = ours", "its type of jobs"),
    ("block-export-add.type = theirs {\"name\":\"vduse-blk\"", "refused by name"),
    (
        "block-export-add<vhost-user-blk>.addr.type = theirs",
        "addresses of type vsock are refused by name",
    ),
    ("block-export-add<fuse>.io-uring is ours", "beyond QEMU's"),
    ("block-export-add<vhost-user-blk>.poll-max-ns is ours", "beyond QEMU's"),
    ("block-export-add<vhost-user-blk>.serial is ours", "beyond QEMU's"),
    ("blockdev-backup.x-vellum-fleecing is ours", "beyond QEMU's"),
    ("drive-backup.x-vellum-fleecing is ours", "beyond QEMU's"),
    ("query-block-jobs->[].x-vellum-held-ms is ours", "beyond QEMU's"),
    ("blockdev-add.driver = theirs", "drivers that are not there"),
    ("blockdev-add<http>.bearer-token-secret is ours", "beyond QEMU's"),
    ("blockdev-add<http>.keep-size is ours", "beyond QEMU's"),
    ("blockdev-add<https>.", "options beyond QEMU's"),
    ("blockdev-add<ssh>.timeout is ours", "beyond QEMU's"),
    (
        "blockdev-add.driver = ours",
        "files on other machines, caches of them, and members of packages",
    ),
    ("blockdev-add<qcow2>", "options beyond QEMU's"),
    (
        "chardev-add.backend.type = theirs",
        "types that are refused by name, or that QEMU's daemon does not have either",
    ),
    (
        "object-add.qom-type = theirs",
        "objects that are refused by name, or that QEMU's daemon does not have either; authz-listfile is made as authz-list-file",
    ),
    (
        "query-block->[].inserted.image.format-specific.type = theirs",
        "formats that are not there",
    ),
]

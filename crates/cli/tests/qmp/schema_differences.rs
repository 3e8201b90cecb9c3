&[
    (
        "VSERPORT_CHANGE is theirs",
        &[],
        "only machines have serial ports; QEMU's daemon never emits it",
    ),
    (
        "block-latency-histogram-set is ours",
        &[],
        "exports are counted here; QEMU's daemon has no device to set it for",
    ),
    (
        "x-vellum-flush is ours",
        &[],
        "a disk may be flushed without a client of its export",
    ),
    (
        "x-vellum-{} is ours",
        &["compact", "scrub"],
        "our own jobs",
    ),
    (
        "BLOCK_JOB_CANCELLED.type = ours x-vellum-{}",
        &["compact", "scrub"],
        "the types of these jobs",
    ),
    (
        "X_VELLUM_SCRUB_DAMAGE is ours",
        &[],
        "the event of the latter",
    ),
    (
        "x-vellum-{} is ours",
        &["query-chain-policies", "set-chain-policy"],
        "disks keep their chains short by themselves",
    ),
    (
        "x-vellum-query-space is ours",
        &[],
        "where the space of a disk goes",
    ),
    (
        "X_VELLUM_SPACE_WARNING is ours",
        &[],
        "a file system will be full",
    ),
    (
        "X_VELLUM_IO_RESUMED is ours",
        &[],
        "requests that waited for room go on",
    ),
    (
        "block-export-add.type = theirs vduse-blk",
        &[],
        "refused by name",
    ),
    (
        "block-export-add<vhost-user-blk>.addr.type = theirs vsock",
        &[],
        "addresses of this type are refused by name",
    ),
    (
        "block-export-add.on-full is ours",
        &[],
        "QEMU leaves that to machines",
    ),
    (
        "block-export-add<fuse>.io-uring is ours",
        &[],
        "FUSE over io_uring, which QEMU's daemon has not",
    ),
    (
        "block-export-add<vhost-user-blk>.poll-max-ns is ours",
        &[],
        "QEMU has it for I/O threads alone",
    ),
    (
        "block-export-add<vhost-user-blk>.serial is ours",
        &[],
        "QEMU's disks behind vhost-user have one serial number, all the same",
    ),
    (
        "{}.x-vellum-fleecing is ours",
        &["blockdev-backup", "drive-backup"],
        "a slow target does not slow the guest",
    ),
    (
        "{}->[].x-vellum-seconds-left is ours",
        &["query-block-jobs", "query-jobs"],
        "an estimate",
    ),
    (
        "query-block-jobs->[].x-vellum-held-ms is ours",
        &[],
        "how long the switch has held the guest",
    ),
    (
        "blockdev-add.driver = theirs {}",
        &["blkreplay", "replication", "vvfat"],
        "for machines that are replayed, replicated or given a host's folder; refused by name",
    ),
    (
        "blockdev-add.driver = theirs {}",
        &["ftp", "ftps", "gluster", "iscsi", "nfs", "nvme"],
        "refused by name",
    ),
    (
        "blockdev-add.driver = ours {}",
        &["s3", "gs", "az"],
        "objects in stores",
    ),
    (
        "blockdev-add.driver = ours {}",
        &["cache", "repository"],
        "what lies elsewhere, kept on this host; disks in a repository",
    ),
    (
        "blockdev-add.driver = ours ova",
        &[],
        "members of packages",
    ),
    (
        "blockdev-add<http>.{} is ours",
        &["bearer-token-secret", "header", "header-secret", "keep-size"],
        "who asks, with tokens and header fields; what is kept in memory",
    ),
    (
        "blockdev-add<https>.{} is ours",
        &["bearer-token-secret", "header", "header-secret", "keep-size", "tls-ca-file", "tls-cert-file", "tls-key-file"],
        "the same, and certificates",
    ),
    (
        "blockdev-add<ssh>.timeout is ours",
        &[],
        "when a silent server is given up",
    ),
    (
        "blockdev-add<parallels>.{} is ours",
        &["prealloc-mode", "prealloc-size"],
        "QEMU has them only without QMP",
    ),
    (
        "blockdev-add<qcow2>.{} is ours",
        &["chain-index-size", "data-cache-size", "decompressed-cache-size"],
        "caches that QEMU has not",
    ),
    (
        "blockdev-add<qcow2>.{} is ours",
        &["journal", "journal-size"],
        "a write log",
    ),
    (
        "blockdev-add<qcow2>.{} is ours",
        &["checksums", "unseal", "verify"],
        "checksums and seals",
    ),
    (
        "blockdev-add<qcow2>.{} is ours",
        &["compression-level", "compression-window"],
        "how much is compressed, and how many clusters at once",
    ),
    (
        "blockdev-add<qcow2>.bitmap-step-size is ours",
        &[],
        "how far bitmaps on disk run ahead of writes",
    ),
    (
        "blockdev-add<{}>.backing is ours",
        &["vhdx", "vpc"],
        "differencing images",
    ),
    (
        "blockdev-add<vpc>.force_size_calc is ours",
        &[],
        "QEMU has it only without QMP",
    ),
    (
        "chardev-add.backend.type = theirs {}",
        &["hub", "mux", "testdev"],
        "refused by name",
    ),
    (
        "chardev-add.backend.type = theirs {}",
        &["braille", "dbus", "msmouse", "parallel", "qemu-vdagent", "spiceport", "spicevmc", "vc", "wctablet"],
        "for machines, not for disks",
    ),
    (
        "object-add.qom-type = theirs authz-listfile",
        &[],
        "it is authz-list-file here, as in QEMU's tools",
    ),
    (
        "object-add.qom-type = theirs {}",
        &["authz-pam", "pr-manager-helper", "tls-cipher-suites"],
        "refused by name",
    ),
    (
        "object-add.qom-type = theirs {}",
        &["x-remote-object", "x-vfio-user-server", "acpi-generic-initiator", "acpi-generic-port", "can-bus", "can-host-socketcan", "colo-compare", "cryptodev-backend", "cryptodev-backend-builtin", "cryptodev-backend-lkcf", "cryptodev-vhost-user", "dbus-vmstate", "filter-buffer", "filter-dump", "filter-mirror", "filter-redirector", "filter-replay", "filter-rewriter", "input-barrier", "input-linux", "iommufd", "memory-backend-epc", "memory-backend-file", "memory-backend-memfd", "memory-backend-ram", "memory-backend-shm", "pef-guest", "qtest", "rng-builtin", "rng-egd", "rng-random", "s390-pv-guest", "sev-guest", "sev-snp-guest"],
        "for machines, not for disks",
    ),
    (
        "query-block->[].inserted.image.format-specific.type = theirs rbd",
        &[],
        "how librbd decrypts an image, which QEMU tells; here only the options say it",
    ),
]

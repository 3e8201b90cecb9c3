//! Examples of the tools that bring disks elsewhere: repositories and streams.

use super::{DONE, Example, FAILED, Page};

pub(super) const OPEN: &[Example] = &[
    (
        "vellum open --cache /var/cache/vellum s3://backups/site:vm1 vm.qcow2",
        "a disk that can be used at once, and reads what it needs",
    ),
    (
        "vellum open /mnt/backups:vm1@3 old.qcow2",
        "the third one that was pushed, from a folder",
    ),
];

pub(super) const PULL: &[Example] = &[
    (
        "vellum pull s3://backups/site:vm1 disk.qcow2",
        "the newest one",
    ),
    (
        "vellum pull -O raw s3://backups/site:vm1@3 disk.raw",
        "the third one, as a raw image",
    ),
];

pub(super) const PUSH: &[Example] = &[
    (
        "vellum push --track disk.qcow2 s3://backups/site:vm1",
        "all of it at first, and after that what has changed",
    ),
    (
        "vellum push disk.raw /mnt/backups:vm1",
        "into a folder; what is there already is not stored again",
    ),
    (
        "vellum push --bitmap daily disk.qcow2 /mnt/backups:vm1",
        "what a bitmap of your own says has changed since the newest one there",
    ),
];

pub(super) const REPO: Page = Page {
    usage: &[],
    examples: &[
        ("vellum repo list s3://backups/site", "what is there"),
        (
            "vellum repo verify --read-data s3://backups/site",
            "whether all of it is there, and what was pushed",
        ),
        (
            "vellum repo prune --keep 7 s3://backups/site",
            "of each tag the newest seven stay",
        ),
        (
            "vellum repo gc s3://backups/site",
            "what no disk needs any more goes",
        ),
    ],
    exits: &[
        DONE,
        FAILED,
        ("2", "something is missing or damaged (list, verify)"),
    ],
};

pub(super) const RECEIVE: &[Example] = &[
    (
        "vellum receive disk.qcow2 < disk.stream",
        "a new disk, or the changes of one that is there",
    ),
    (
        "vellum receive -O raw disk.raw < disk.stream",
        "the same in another format",
    ),
    (
        "vellum receive --resume-token disk.qcow2",
        "what 'send --resume' needs after a stream was cut off",
    ),
];

pub(super) const SEND: &[Example] = &[
    (
        "vellum send disk.qcow2 | ssh host vellum receive disk.qcow2",
        "a copy of the disk on another machine",
    ),
    (
        "vellum send disk.qcow2 --since monday | ssh host vellum receive disk.qcow2",
        "what the bitmap 'monday' calls dirty",
    ),
    (
        "vellum send -o disk.stream disk.qcow2",
        "a file to be received later",
    ),
];

//! What manuals tell of each tool beside its options: how it is called, examples, and exit
//! codes. Helps under our own name show the examples too.

mod elsewhere;
mod running;

/// A command line and what it does.
pub type Example = (&'static str, &'static str);
/// An exit code and what it means.
pub type Exit = (&'static str, &'static str);

/// What is told of a tool.
#[derive(Debug, Clone, Copy)]
pub struct Page {
    /// What follows the tool's name, if the image tool's help does not say it.
    pub usage: &'static [&'static str],
    pub examples: &'static [Example],
    pub exits: &'static [Exit],
}

const DONE: Exit = ("0", "done");
const FAILED: Exit = ("1", "an error, which is told");
const USUAL: &[Exit] = &[DONE, FAILED];

const fn page(examples: &'static [Example]) -> Page {
    Page {
        usage: &[],
        examples,
        exits: USUAL,
    }
}

/// The page of the tool called `name`: a subcommand of `vellum`, `img bench`, or `vellum`.
pub fn of(name: &str) -> Option<&'static Page> {
    let found = PAGES.iter().find(|(known, _)| *known == name);
    found.map(|(_, page)| page)
}

/// The examples of a tool as a help shows them; nothing for a tool without a page.
pub fn examples(name: &str) -> String {
    let lines = of(name).map_or(&[][..], |page| page.examples);
    let lines = lines
        .iter()
        .map(|(line, about)| format!("  {line}\n     {about}\n"));
    match lines.len() {
        0 => String::new(),
        _ => format!("\nExamples:\n{}", lines.collect::<String>()),
    }
}

static PAGES: &[(&str, Page)] = &[
    ("vellum", VELLUM),
    ("amend", page(AMEND)),
    ("audit", AUDIT),
    ("bench", BENCH),
    ("bitmap", page(BITMAP)),
    ("check", CHECK),
    ("commit", page(COMMIT)),
    ("compare", COMPARE),
    ("compact", page(COMPACT)),
    ("completions", COMPLETIONS),
    ("convert", page(CONVERT)),
    ("create", page(CREATE)),
    ("ctl", running::CTL),
    ("daemon", running::DAEMON),
    ("dd", page(DD)),
    ("img bench", page(IMG_BENCH)),
    ("info", page(INFO)),
    ("inspect", INSPECT),
    ("install-links", INSTALL_LINKS),
    ("io", IO),
    ("man", MAN),
    ("map", page(MAP)),
    ("measure", page(MEASURE)),
    ("mount", MOUNT),
    ("nbd", NBD),
    ("oci", OCI),
    ("open", page(elsewhere::OPEN)),
    ("pull", page(elsewhere::PULL)),
    ("push", page(elsewhere::PUSH)),
    ("rebase", page(REBASE)),
    ("receive", page(elsewhere::RECEIVE)),
    ("repo", elsewhere::REPO),
    ("resize", page(RESIZE)),
    ("scrub", SCRUB),
    ("seal", page(SEAL)),
    ("send", page(elsewhere::SEND)),
    ("serve", SERVE),
    ("snapshot", page(SNAPSHOT)),
    ("verify", VERIFY),
];

const VELLUM: Page = Page {
    usage: &[
        "[-h] [-V] COMMAND [--help | OPTIONS]",
        "help [COMMAND | config]",
    ],
    examples: &[
        ("vellum create -f qcow2 disk.qcow2 20G", "a new disk"),
        ("vellum info disk.qcow2", "what it is"),
        ("vellum help convert", "how to copy it"),
    ],
    exits: &[
        DONE,
        FAILED,
        (
            "2 and more",
            "see the page of the command: check, compare, audit, verify",
        ),
    ],
};

const AMEND: &[Example] = &[
    ("vellum amend -o help -f qcow2", "what can be changed"),
    (
        "vellum amend -o compat=1.1 disk.qcow2",
        "make an image of version 2 one of version 3",
    ),
];

const AUDIT: Page = Page {
    usage: &["[OPTIONS] FILENAME..."],
    examples: &[
        (
            "vellum audit -f qcow2 upload.qcow2",
            "an upload that is declared as qcow2",
        ),
        (
            "vellum audit --allow-backing --within /srv/images overlay.qcow2",
            "its backing file may be any below that folder",
        ),
        (
            "vellum audit --output=json *.qcow2",
            "several, for a program",
        ),
    ],
    exits: &[
        ("0", "safe"),
        (
            "1",
            "an image could not be read, or the command line not be understood",
        ),
        ("2", "rejected; of several images the highest code counts"),
    ],
};

const BENCH: Page = Page {
    usage: &["[OPTIONS]", "[OPTIONS] IMAGE"],
    examples: &[
        (
            "vellum bench --dir /srv/images",
            "images made in the folder that matters",
        ),
        (
            "vellum bench --html page.html disk.qcow2",
            "reads of an image, with plots",
        ),
        (
            "vellum bench --full --tables=writes",
            "longer, and one table only",
        ),
        (
            "vellum bench --journal --dir /srv/images --html page.html",
            "what a write log brings there, over time",
        ),
    ],
    exits: &[
        DONE,
        FAILED,
        ("130", "ended by Ctrl-C; what was made is removed"),
    ],
};

const BITMAP: &[Example] = &[
    (
        "vellum bitmap --add disk.qcow2 daily",
        "record writes from now on",
    ),
    (
        "vellum bitmap --merge monday disk.qcow2 week",
        "add what one recorded to another",
    ),
    ("vellum bitmap --remove disk.qcow2 daily", "remove it"),
];

const CHECK: Page = Page {
    usage: &[],
    examples: &[
        ("vellum check disk.qcow2", "look only"),
        ("vellum check -r leaks disk.qcow2", "give lost space back"),
        (
            "vellum check -r all disk.qcow2",
            "repair what can be repaired; keep a copy before",
        ),
        (
            "vellum check -r log disk.qcow2",
            "bring back what the write log holds after a crash",
        ),
        (
            "vellum check -r drop-log disk.qcow2",
            "do without the writes in a write log that is lost",
        ),
    ],
    exits: &[
        ("0", "nothing is wrong, or everything was repaired"),
        ("1", "the check could not be done to its end"),
        ("2", "there is damage"),
        ("3", "clusters are lost, which costs space and nothing else"),
        ("63", "images of this format cannot be checked"),
    ],
};

const COMMIT: &[Example] = &[
    (
        "vellum commit overlay.qcow2",
        "write an overlay into its backing file, and empty it",
    ),
    (
        "vellum commit -b base.qcow2 overlay.qcow2",
        "into one further below; the overlay stays as it is",
    ),
];

const COMPARE: Page = Page {
    usage: &[],
    examples: &[
        (
            "vellum compare disk.raw disk.qcow2",
            "do both show the same?",
        ),
        (
            "vellum compare -s -f qcow2 -F qcow2 a.qcow2 b.qcow2",
            "same sizes and allocation too",
        ),
    ],
    exits: &[
        ("0", "the images are the same"),
        ("1", "they differ"),
        ("2", "one could not be opened"),
        ("3", "where data lies could not be found out"),
        ("4", "one could not be read"),
    ],
};

const COMPLETIONS: Page = Page {
    usage: &["bash|zsh|fish [PROGRAM]"],
    examples: &[
        ("source <(vellum completions bash)", "in ~/.bashrc"),
        (
            "vellum completions zsh > ~/.zfunc/_vellum",
            "in a folder of $fpath",
        ),
        (
            "vellum completions fish > ~/.config/fish/completions/vellum.fish",
            "once",
        ),
    ],
    exits: USUAL,
};

const CONVERT: &[Example] = &[
    (
        "vellum convert -p -O qcow2 disk.raw disk.qcow2",
        "a raw image to a qcow2 one, with a progress bar",
    ),
    (
        "vellum convert -c -O qcow2 disk.qcow2 small.qcow2",
        "compressed",
    ),
    (
        "vellum convert -O qcow2 overlay.qcow2 whole.qcow2",
        "a chain as one image",
    ),
    (
        "vellum convert --journal -O qcow2 huge.raw huge.qcow2",
        "killed? the same line again goes on",
    ),
    (
        "vellum convert -O qcow2 disk.raw - | ssh host 'cat > disk.qcow2'",
        "into a pipe",
    ),
];

const CREATE: &[Example] = &[
    (
        "vellum create -f qcow2 disk.qcow2 20G",
        "an empty disk, which grows as it is written",
    ),
    (
        "vellum create -f qcow2 -b disk.qcow2 -F qcow2 overlay.qcow2",
        "an overlay: changes go there, the backing file stays as it is",
    ),
    ("vellum create -f qcow2 -o help", "what -o takes"),
];

const DD: &[Example] = &[(
    "vellum dd -O raw bs=1M count=1 if=disk.qcow2 of=first.raw",
    "the first MiB of a disk",
)];

const IMG_BENCH: &[Example] = &[(
    "vellum img bench -c 10000 -d 32 disk.qcow2",
    "10,000 reads in order, 32 at a time",
)];

const INFO: &[Example] = &[
    (
        "vellum info disk.qcow2",
        "format, size, what it takes, snapshots",
    ),
    (
        "vellum info --backing-chain overlay.qcow2",
        "all images that it stands on; a broken chain as far as it goes, and how to mend it",
    ),
    (
        "vellum info -U --output=json disk.qcow2",
        "for a program, while a machine uses it",
    ),
];

const INSPECT: Page = Page {
    usage: &["[OPTIONS] FILENAME"],
    examples: &[
        (
            "vellum inspect disk.qcow2",
            "what is in it, and what could be better",
        ),
        (
            "vellum inspect --html page.html disk.qcow2",
            "the same with pictures",
        ),
    ],
    exits: USUAL,
};

const INSTALL_LINKS: Page = Page {
    usage: &["FOLDER"],
    examples: &[(
        "vellum install-links ~/.local/bin",
        "qemu-img is vellum there",
    )],
    exits: USUAL,
};

const IO: Page = Page {
    usage: &["[OPTIONS]... [-c STRING]... [FILE]"],
    examples: &[
        (
            "vellum io -c 'write -P 0x5a 0 1M' -c flush disk.qcow2",
            "a MiB of one byte, durably",
        ),
        ("vellum io -c help", "all commands"),
    ],
    exits: USUAL,
};

const MAN: Page = Page {
    usage: &["FOLDER"],
    examples: &[(
        "vellum man ~/.local/share/man/man1",
        "then: man vellum-convert",
    )],
    exits: USUAL,
};

const MAP: &[Example] = &[
    (
        "vellum map disk.qcow2",
        "which parts hold data, and in which file",
    ),
    (
        "vellum map --output=json overlay.qcow2",
        "for a program, with zeroes and depth",
    ),
];

const MEASURE: &[Example] = &[
    ("vellum measure -O qcow2 disk.raw", "what a copy would take"),
    (
        "vellum measure -O qcow2 --size 1T",
        "what an empty disk would",
    ),
];

const MOUNT: Page = Page {
    usage: &["[OPTIONS] IMAGE FILE"],
    examples: &[
        (
            "vellum mount --fork disk.qcow2 disk",
            "the disk in an image as the file 'disk', which must exist; 'umount disk' ends it",
        ),
        (
            "vellum mount -r -l before-upgrade disk.qcow2 disk",
            "as it was at a snapshot",
        ),
    ],
    exits: &[("0", "unmounted, or ended by a signal"), FAILED],
};

const NBD: Page = Page {
    usage: &["[OPTIONS] IMAGE", "--list [OPTIONS]"],
    examples: &[
        (
            "vellum nbd -k /run/user/1000/disk.sock -t -e 8 disk.qcow2",
            "for up to 8 clients at a time, until it is ended",
        ),
        (
            "vellum nbd -r -b 127.0.0.1 -p 10809 disk.qcow2",
            "for one client, read-only",
        ),
        (
            "vellum nbd --list -k /run/user/1000/disk.sock",
            "what a server has",
        ),
    ],
    exits: USUAL,
};

const SERVE: Page = Page {
    usage: &["[OPTIONS] IMAGE"],
    examples: &[
        (
            "vellum serve --vhost-user vm.sock --queues 4 disk.qcow2",
            "for a virtual machine with four processors",
        ),
        (
            "vellum serve -r --nbd disk.sock --fuse disk disk.qcow2",
            "for many readers, and as the file 'disk', which must exist",
        ),
        (
            "vellum serve --fork --pid-file vm.pid --nbd vm.sock -l before-upgrade disk.qcow2",
            "as it was at a snapshot, in the background; kill $(cat vm.pid) ends it",
        ),
    ],
    exits: &[("0", "ended by a signal, or unmounted"), FAILED],
};

const OCI: Page = Page {
    usage: &[
        "push [OPTIONS] DISK REGISTRY/NAME:TAG",
        "pull [OPTIONS] REGISTRY/NAME:TAG DISK",
    ],
    examples: &[
        (
            "vellum oci push disk.qcow2 registry.example.org/vms/debian:13",
            "an image for KubeVirt's containerDisk",
        ),
        (
            "vellum oci pull quay.io/containerdisks/fedora:latest disk.qcow2",
            "the disk of one",
        ),
    ],
    exits: USUAL,
};

const REBASE: &[Example] = &[
    (
        "vellum rebase -b new.qcow2 -F qcow2 overlay.qcow2",
        "another backing file; what it lacks is copied into the overlay",
    ),
    (
        "vellum rebase -u -b /new/place/base.qcow2 -F qcow2 overlay.qcow2",
        "the same one at another place: only the name is changed",
    ),
    (
        "vellum rebase -b '' overlay.qcow2",
        "none: the image stands alone then",
    ),
];

const RESIZE: &[Example] = &[
    ("vellum resize disk.qcow2 +10G", "larger by so much"),
    (
        "vellum resize --shrink disk.qcow2 5G",
        "smaller: what lies beyond is lost, so shrink its file systems before",
    ),
];

const COMPACT: &[Example] = &[
    (
        "vellum compact disk.qcow2",
        "move what lies at its end into gaps, and cut the file there",
    ),
    (
        "vellum ctl compact disk",
        "the same of a disk that a daemon serves, while its guest goes on",
    ),
];

const SCRUB: Page = Page {
    usage: &[],
    examples: &[
        (
            "vellum scrub --image-opts driver=qcow2,file.filename=disk.qcow2,checksums=on",
            "begin to keep checksums, of all that is there",
        ),
        (
            "vellum scrub disk.qcow2",
            "name what has changed on disk since",
        ),
        (
            "vellum scrub --repair overlay.qcow2",
            "and write anew what the backing file has as well",
        ),
    ],
    exits: &[
        ("0", "nothing has changed on disk, or it is repaired"),
        (
            "1",
            "it could not be scrubbed, perhaps because it has no checksums",
        ),
        ("2", "bytes have changed on disk"),
    ],
};

const SEAL: &[Example] = &[
    (
        "vellum seal base.qcow2",
        "whatever changes from now on is found",
    ),
    (
        "vellum seal --key minisign.key base.qcow2",
        "the same, signed: nobody else can seal it like this",
    ),
    (
        "vellum seal --manifest disk.manifest -f raw disk.raw",
        "the hashes of a disk of any format in a file beside it",
    ),
    ("vellum seal --unseal base.qcow2", "let it be changed again"),
];

const VERIFY: Page = Page {
    usage: &[],
    examples: &[
        (
            "vellum verify base.qcow2",
            "name what differs from the seal",
        ),
        (
            "vellum verify --public-key minisign.pub base.qcow2",
            "and see who has sealed it",
        ),
        (
            "vellum verify --manifest disk.manifest copy.qcow2",
            "compare a copy in another format",
        ),
    ],
    exits: &[
        ("0", "everything is as it was sealed"),
        (
            "1",
            "it could not be verified, perhaps because it is not sealed",
        ),
        ("2", "something differs, or the signature is not the key's"),
    ],
};

const SNAPSHOT: &[Example] = &[
    ("vellum snapshot -c before-upgrade disk.qcow2", "take one"),
    ("vellum snapshot -l disk.qcow2", "list them"),
    (
        "vellum snapshot -a before-upgrade disk.qcow2",
        "go back: what was written since is lost",
    ),
    (
        "vellum snapshot -d before-upgrade disk.qcow2",
        "delete it: there is no way back to it any more",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manual::{read, tools};

    /// Every example is one that the tool's parser takes.
    #[test]
    fn every_tool_has_examples_with_options_that_exist() {
        let programs = tools::programs();
        let vellum = &programs[0];
        for tool in &vellum.subcommands {
            let page = of(&tool.name).unwrap_or_else(|| panic!("{} has no page", tool.name));
            assert!(!page.examples.is_empty() && !page.exits.is_empty());
            for (line, _) in page.examples {
                let plain = line.split('|').next().unwrap_or_default();
                for word in plain.split_whitespace().filter(|word| word.len() > 1) {
                    let name = word.split('=').next().unwrap_or_default();
                    let known = tool
                        .options
                        .iter()
                        .any(|s| read::names(s).iter().any(|n| n == name));
                    let is_option = word.starts_with('-') && !plain.contains("'write");
                    assert!(!is_option || known, "{line}: {word}");
                }
            }
        }
        assert!(of("img bench").is_some() && of("vellum").is_some());
    }
}

//! The daemon as a service: units, the user it runs as, and a file of disks to begin with.

use std::path::Path;

use anyhow::Result;

use super::{make_parent, write};
use crate::workspace::Workspace;

/// What lies where, from `packaging/`.
const FILES: [(&str, &str); 5] = [
    ("vellum.service", "usr/lib/systemd/system/vellum.service"),
    ("vellum.socket", "usr/lib/systemd/system/vellum.socket"),
    ("vellum.sysusers", "usr/lib/sysusers.d/vellum.conf"),
    ("disks.toml", "etc/vellum/disks.toml"),
    (
        "notify-reload.conf",
        "usr/share/doc/vellum/examples/notify-reload.conf",
    ),
];

/// Files that are the administrator's once they are there.
pub(super) const CONFFILES: &str = "/etc/vellum/disks.toml\n";

/// Done once the package is there. Nothing is started, since there are no disks yet, and nothing is
/// started anew: when clients can do without the daemon for a moment is the administrator's to say.
pub(super) const AFTER_INSTALL: &str = "\
    if command -v systemd-sysusers >/dev/null; then
        systemd-sysusers vellum.conf
        # Afterwards it is the administrator's.
        if [ -z \"$2\" ]; then
            chown root:vellum /etc/vellum/disks.toml
            chmod 640 /etc/vellum/disks.toml
        fi
    fi
    if [ -d /run/systemd/system ]; then
        systemctl daemon-reload
    fi
";

/// Done before the package goes.
pub(super) const BEFORE_REMOVAL: &str = "\
    if [ -d /run/systemd/system ]; then
        systemctl disable --now vellum.service vellum.socket
    fi
";

/// Puts the files into the package.
pub(super) fn install(workspace: &Workspace, tree: &Path) -> Result<()> {
    for (name, place) in FILES {
        let text = std::fs::read_to_string(workspace.root.join("packaging").join(name))?;
        let path = tree.join(place);
        make_parent(&path)?;
        write(&path, &text)?;
    }
    let guide = std::fs::read_to_string(workspace.root.join("docs/OPERATIONS.md"))?;
    write(&tree.join("usr/share/doc/vellum/OPERATIONS.md"), &guide)
}

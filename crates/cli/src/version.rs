//! What `--version` prints.

use crate::report;

/// The version of QEMU whose tools are matched. Programs that call `qemu-img`
/// look at this number to know what it can do.
const QEMU_VERSION: &str = "10.0.2";

const COPYRIGHT: &str = "Copyright (c) 2026 The Vellum contributors; this is not QEMU's program";

/// The version of a tool called `program`, with the version of QEMU that it stands in for if it
/// has a name of QEMU's.
pub fn version(program: &str) -> String {
    let own = env!("CARGO_PKG_VERSION");
    match report::is_own_name(program) {
        true => format!("{program} {own}\n"),
        false => format!("{program} version {QEMU_VERSION} (vellum {own})\n{COPYRIGHT}\n"),
    }
}

//! The formats of other programs by name, and what is asked of them by that.

use std::sync::Arc;

use vellum::{Result, Storage};
use vellum_foreign::{CheckReport, Fix};

use crate::drivers::foreign::format::ForeignFormat;
use crate::node::file_policy::FilePolicy;

use super::{only_read, parallels, qcow, qed, vdi, vhdx, vmdk, vpc};

/// All formats, sorted by name.
static FORMATS: &[ForeignFormat] = &[
    only_read::BOCHS,
    only_read::CLOOP,
    only_read::DMG,
    parallels::FORMAT,
    qcow::FORMAT,
    qed::FORMAT,
    vdi::FORMAT,
    vhdx::FORMAT,
    vmdk::FORMAT,
    vpc::FORMAT,
];

/// The format of a name.
pub fn find(name: &str) -> Option<&'static ForeignFormat> {
    FORMATS.iter().find(|format| format.name == name)
}

/// Whether images of a format of this name, of some kind at least, take compressed writes.
pub fn compresses(name: &str) -> bool {
    find(name).is_some_and(|format| format.compresses)
}

/// Whether images of a format may stand on others, by its name.
pub fn has_backing(name: &str) -> bool {
    find(name).is_some_and(|format| format.has_backing)
}

/// Checks an image in a file; `None` if its format has nothing to be checked, or cannot mend anything
/// where that is asked for. Other files that it names are opened as far as `policy` allows.
///
/// # Errors
/// As opening the image, [`ErrorKind::Denied`](vellum::ErrorKind::Denied) for a file that `policy` does not allow, and what the storage says.
pub async fn check(
    format: &str,
    file: &Arc<dyn Storage>,
    fix: Fix,
    policy: &FilePolicy,
) -> Result<Option<CheckReport>> {
    let Some(format) = find(format).filter(|format| format.repairs || fix == Fix::default()) else {
        return Ok(None);
    };
    match format.check {
        Some(check) => check(file, fix, policy).await.map(Some),
        None => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sorted() {
        assert!(FORMATS.is_sorted_by(|a, b| a.name < b.name));
        assert!(find("vdi").is_some() && find("qcow2").is_none());
    }
}

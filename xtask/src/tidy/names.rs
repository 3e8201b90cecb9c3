//! Names found inside images are opened through the gate alone: code that reads images of others
//! opens no file itself, but for these files, whose names come from elsewhere.

use anyhow::Result;

use crate::workspace::Workspace;

/// Crates that read what strangers have written.
const FOLDERS: [&str; 5] = [
    "crates/graph/src",
    "crates/daemon/src",
    "crates/foreign/src",
    "crates/images/src",
    "crates/options/src",
];
const TESTS_START: &str = "#[cfg(test)]\nmod ";
const OPENS: [&str; 7] = [
    "FileStorage::open",
    "File::open(",
    "File::create(",
    "File::options(",
    "OpenOptions::new(",
    "fs::read(",
    "fs::read_to_string(",
];

/// Files that open something by a name, and whose name that is.
const OPENERS: &[(&str, &str)] = &[
    ("crates/graph/src/authz.rs", "a list that a user names"),
    (
        "crates/graph/src/checksums.rs",
        "made from the image's own name",
    ),
    ("crates/graph/src/config.rs", "the user's configuration"),
    (
        "crates/images/src/create.rs",
        "a new image that a user names",
    ),
    (
        "crates/images/src/create/own_file.rs",
        "the new image and its backing file, as a user names them",
    ),
    (
        "crates/daemon/src/chardev/files.rs",
        "logs and devices that a user names",
    ),
    (
        "crates/daemon/src/config/read.rs",
        "the daemon's configuration",
    ),
    (
        "crates/daemon/src/http/views.rs",
        "the daemon's own files in /proc",
    ),
    ("crates/daemon/src/jobs/fleece.rs", "a new file of a backup"),
    ("crates/daemon/src/state/file.rs", "the daemon's state"),
    (
        "crates/graph/src/drivers/blkdebug.rs",
        "rules that a user names",
    ),
    (
        "crates/graph/src/node/file_node.rs",
        "the driver 'file', behind the gate",
    ),
    ("crates/graph/src/testing/image.rs", "a new image of a test"),
    ("crates/images/src/overlay.rs", "a new overlay"),
    (
        "crates/options/src/ova_name.rs",
        "a package that a user names",
    ),
];

/// What breaks the rules.
pub fn findings(workspace: &Workspace) -> Result<Vec<String>> {
    let listing = workspace.tracked(&FOLDERS)?;
    let mut findings = Vec::new();
    let mut openers = Vec::new();
    let sources = listing.iter().filter(|name| name.ends_with(".rs"));
    for name in sources.filter(|name| !name.contains("/tests")) {
        let Ok(text) = std::fs::read_to_string(workspace.root.join(name)) else {
            continue;
        };
        if let Some(call) = opens(&text) {
            openers.push(name.to_owned());
            if !OPENERS.iter().any(|(opener, _)| *opener == name) {
                findings.push(format!(
                    "{name}: calls {call}…: open names found in images through the gate \
                     (crates/graph/src/open/gate.rs), or say in xtask/src/tidy/names.rs whose name it is"
                ));
            }
        }
    }
    for (opener, _) in OPENERS {
        if !openers.iter().any(|name| name == opener) {
            findings.push(format!(
                "xtask/src/tidy/names.rs: {opener} opens nothing any more"
            ));
        }
    }
    Ok(findings)
}

/// What of a source, its tests left out, opens a file by its name.
fn opens(text: &str) -> Option<&'static str> {
    let code = text.split(TESTS_START).next().unwrap_or(text);
    let lines = code.lines().map(str::trim_start);
    let code: Vec<&str> = lines.filter(|line| !line.starts_with("//")).collect();
    OPENS
        .into_iter()
        .find(|call| code.iter().any(|line| line.contains(call)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_and_comments_open_nothing() {
        let call = "    let file = std::fs::File::open(name)?;\n";
        assert_eq!(opens(call), Some("File::open("));
        assert_eq!(opens(&format!("// {call}")), None);
        assert_eq!(opens(&format!("{TESTS_START}tests {{\n{call}}}\n")), None);
    }
}

//! [`BaseKey`]: backing files that several images may stand on, by what they were opened as.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::sync::Weak;

use parking_lot::Mutex;
use vellum::BlockDevice;
use vellum_options::{OpenFlags, Options, filename};

use crate::files::Files;

/// What must be the same for a backing file to be shared.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct BaseKey {
    device: u64,
    inode: u64,
    options: String,
    flags: String,
}

/// Options that say no more than which file it is, and of which format.
const PLAIN: [&str; 3] = ["driver", "file.driver", "file.filename"];

impl BaseKey {
    /// The key of a backing file that is described so; `None` if it is not to be shared.
    pub(crate) fn of(
        options: &Options,
        flags: &OpenFlags,
        files: Option<&dyn Files>,
    ) -> Option<BaseKey> {
        let is_plain = options.keys().all(|key| PLAIN.contains(&key));
        if flags.writable || !is_plain {
            return None;
        }
        let name = options.get_text("file.filename")?;
        let (device, inode) = match files {
            // The name, among the options, says which one it is.
            Some(_) => (0, 0),
            None => {
                let file = std::fs::metadata(filename::local_path(name).ok()?).ok()?;
                file.is_file().then(|| (file.dev(), file.ino()))?
            }
        };
        Some(BaseKey {
            device,
            inode,
            options: options.to_json().to_string(),
            flags: format!("{flags:?}"),
        })
    }
}

/// The backing files that images of a process stand on, by what they were opened as.
#[derive(Debug, Default)]
pub(crate) struct SharedBases(pub(crate) Mutex<BTreeMap<BaseKey, Weak<dyn BlockDevice>>>);

/// The nodes of backing files that images may share.
#[derive(Debug, Default)]
pub(crate) struct SharedNodes(pub(crate) BTreeMap<BaseKey, String>);

impl SharedNodes {
    pub(crate) fn forget(&mut self, name: &str) {
        self.0.retain(|_, node| node != name);
    }

    /// Adds those that were opened beside these. Of two that show the same the first one stays.
    pub(crate) fn add(&mut self, others: BTreeMap<BaseKey, String>) {
        for (key, name) in others {
            self.0.entry(key).or_insert(name);
        }
    }
}

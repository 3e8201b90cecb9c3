//! The files that the target of a copy consists of, as its journal knows them.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde_json::{Value, json};
use vellum_images::create;
use vellum_options::create_options::CreateSettings;
use vellum_options::filename;
use vellum_storage::copy_journal;

use super::command::{Failure, fail};
use super::file_identity::file_identity;
use super::note::cannot;

/// Where they are: the one that the target is named by first, then its data file or its extents.
#[derive(Debug)]
pub struct TargetFiles {
    paths: Vec<PathBuf>,
}

impl TargetFiles {
    /// Those of an image that is called `name`, once it is made with these settings.
    pub fn of(name: &str, format: &str, settings: &CreateSettings) -> Result<TargetFiles, Failure> {
        let mut names = vec![name.to_owned()];
        names.extend(create::other_files(name, format, settings)?);
        let path = |name: String| filename::local_path(&name).unwrap_or(name).into();
        Ok(TargetFiles {
            paths: names.into_iter().map(path).collect(),
        })
    }

    /// The one that the target is named by.
    pub fn main(&self) -> &Path {
        self.paths.first().map_or(Path::new(""), PathBuf::as_path)
    }

    /// Which files they are, whatever they hold; `None` if one of them is no regular file, or not there.
    pub fn identity(&self) -> Option<Value> {
        let known: Option<Vec<_>> = self.paths.iter().map(|path| identity(path)).collect();
        known.map(Value::from)
    }

    /// Makes what was done to them durable, and marks them all with a new number, which is given. `None` for a single file
    /// that cannot be marked: it is known by its name alone.
    pub fn mark(&self) -> Result<Option<String>, Failure> {
        let mut random = [0; 16];
        if let Err(error) = getrandom::fill(&mut random) {
            return fail(format!("no random number for a copy: {error}"));
        }
        let id = format!("{:032x}", u128::from_ne_bytes(random));
        for path in &self.paths {
            match (mark(path, &id), self.paths.len()) {
                (Ok(true), _) => {}
                (Ok(false), 1) => return Ok(None),
                (Ok(false), _) => {
                    return fail(format!(
                        "--journal needs a target in one file here: '{}' can have no extended attributes, by which \
                         a change of each file is noticed",
                        path.display()
                    ));
                }
                (Err(error), _) => return cannot("begin a journal of", path, &error),
            }
        }
        Ok(Some(id))
    }

    /// Whether all of them are as the copy with this number has left them, as far as this program is concerned.
    pub fn are_marked(&self, id: &str) -> bool {
        let is_marked =
            |path: &PathBuf| File::open(path).is_ok_and(|file| copy_journal::is_marked(file, id));
        self.paths.iter().all(is_marked)
    }

    /// Removes the marks, which have no meaning without a journal.
    pub fn unmark(&self) {
        for file in self.paths.iter().filter_map(|path| File::open(path).ok()) {
            // One that stays is removed by the next who changes the file.
            let _ = copy_journal::unmark(file);
        }
    }
}

/// Where another file has its number by now, it was made at another time.
fn identity(path: &Path) -> Option<Value> {
    let file = std::fs::metadata(path).ok()?;
    let made = file.created().ok();
    let made = made.and_then(|made| made.duration_since(SystemTime::UNIX_EPOCH).ok());
    let made = made.map(|made| json!([made.as_secs(), made.subsec_nanos()]));
    file_identity(&file).map(|file| json!([file, made]))
}

fn mark(path: &Path, id: &str) -> std::io::Result<bool> {
    // Without locks: nothing is read or changed.
    let file = File::open(path)?;
    file.sync_all()?;
    match file.metadata()?.is_file() {
        true => copy_journal::mark(&file, id),
        false => Ok(false),
    }
}

//! Which files the layers of an image show together, as a container would see them. Pure.
//!
//! Layers are looked at from the highest on. What a layer has, or takes away (a *whiteout*: `.wh.NAME`, or
//! `.wh..wh..opq` for all that a folder has below), hides what lower ones have there.
//!
//! Invariant: memory is bounded, since only paths are noted that matter for the wanted file.

use std::collections::HashSet;
use std::io;

use super::tar::invalid;

/// Where the disk lies, unless a path is named.
const FOLDER: &str = "disk";
const WHITEOUT: &str = ".wh.";
const OPAQUE: &str = ".wh..wh..opq";
/// Paths that matter; a folder with a disk has some files.
const MOST_PATHS: usize = 4096;

/// What an entry of an archive is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    File,
    Folder,
    /// A link, a device or a pipe.
    Other,
}

/// What is wanted, and what is hidden of lower layers.
#[derive(Debug, Clone, Default)]
pub(super) struct Union {
    wanted: Option<String>,
    /// Nothing at these paths, and below, shows from lower layers.
    hidden: HashSet<String>,
    /// The same, but what lies below them shows.
    replaced: HashSet<String>,
    /// Nothing below these folders shows.
    opaque: HashSet<String>,
    /// Of the layer that is being read: links at these paths.
    links: HashSet<String>,
    /// The same for what counts for lower layers only.
    next: Vec<(Mark, String)>,
}

/// What an entry does to lower layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mark {
    Hidden,
    Replaced,
    Opaque,
}

/// The path of an entry from the root of the image, without `.` and doubled slashes.
pub(super) fn plain_path(name: &[u8]) -> io::Result<String> {
    let name = String::from_utf8_lossy(name);
    let parts = name.split('/').filter(|part| !matches!(*part, "" | "."));
    let parts: Vec<&str> = parts.collect();
    if parts.contains(&"..") {
        return Err(invalid("a name in the archive leads upwards ('..')"));
    }
    Ok(parts.join("/"))
}

fn is_below(path: &str, folder: &str) -> bool {
    folder.is_empty()
        || path
            .strip_prefix(folder)
            .is_some_and(|rest| rest.starts_with('/'))
}

impl Union {
    /// Of an image of which nothing was read yet. `wanted`: the path of the file, or else any in `disk/`.
    pub(super) fn new(wanted: Option<&str>) -> io::Result<Union> {
        let wanted = wanted.map(|path| plain_path(path.as_bytes())).transpose()?;
        Ok(Union {
            wanted,
            ..Union::default()
        })
    }

    /// Begins with the next layer below.
    pub(super) fn next_layer(&mut self) {
        self.links.clear();
        for (mark, path) in std::mem::take(&mut self.next) {
            let marked = match mark {
                Mark::Hidden => &mut self.hidden,
                Mark::Replaced => &mut self.replaced,
                Mark::Opaque => &mut self.opaque,
            };
            marked.insert(path);
        }
    }

    /// Whether a file at this path is wanted, if it shows.
    pub(super) fn is_wanted(&self, path: &str) -> bool {
        match &self.wanted {
            Some(wanted) => path == wanted,
            None => {
                let name = path
                    .strip_prefix(FOLDER)
                    .and_then(|rest| rest.strip_prefix('/'));
                name.is_some_and(|name| {
                    !name.contains('/') && !name.starts_with('.') && !name.is_empty()
                })
            }
        }
    }

    /// Whether a higher layer leaves a path as it is here.
    pub(super) fn shows(&self, path: &str) -> bool {
        let is_hidden = self
            .hidden
            .iter()
            .any(|one| one == path || is_below(path, one));
        let is_cleared = self.opaque.iter().any(|folder| is_below(path, folder));
        !is_hidden && !is_cleared && !self.replaced.contains(path)
    }

    /// Whether a folder on the way to a path is a link in this layer: what a container shows there depends on where
    /// that leads.
    pub(super) fn is_behind_link(&self, path: &str) -> bool {
        self.links.iter().any(|link| is_below(path, link))
    }

    /// Notes an entry of the layer.
    ///
    /// # Errors
    /// If too many paths matter.
    pub(super) fn note(&mut self, path: &str, kind: Kind) -> io::Result<()> {
        let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
        if name == OPAQUE {
            return self.mark(Mark::Opaque, folder);
        }
        if let Some(name) = name.strip_prefix(WHITEOUT) {
            let path = if folder.is_empty() {
                name.to_owned()
            } else {
                format!("{folder}/{name}")
            };
            return self.mark(Mark::Hidden, &path);
        }
        if kind == Kind::Folder {
            self.links.remove(path);
            return self.mark(Mark::Replaced, path);
        }
        if self.matters(path) {
            match kind {
                Kind::Other => self.links.insert(path.to_owned()),
                _ => self.links.remove(path),
            };
        }
        self.mark(Mark::Hidden, path)
    }

    fn mark(&mut self, mark: Mark, path: &str) -> io::Result<()> {
        if !self.matters(path) {
            return Ok(());
        }
        let marked = [&self.hidden, &self.replaced, &self.opaque];
        let count: usize = marked.into_iter().map(HashSet::len).sum();
        if count + self.next.len() >= MOST_PATHS {
            return Err(invalid(format!(
                "more than {MOST_PATHS} files lie beside the disk: name the path of the disk, in an image that holds little else"
            )));
        }
        self.next.push((mark, path.to_owned()));
        Ok(())
    }

    /// Whether what is at a path has to do with what is wanted: it may be it, or a folder on the way.
    fn matters(&self, path: &str) -> bool {
        let wanted = self.wanted.as_deref();
        path.is_empty()
            || wanted.is_some_and(|wanted| path == wanted || is_below(wanted, path))
            || wanted.is_none()
                && (path == FOLDER || is_below(path, FOLDER) && self.is_wanted(path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn higher_layers_hide_what_is_below() {
        for (path, kind, shows) in [
            ("disk/.wh.a", Kind::File, false),
            ("disk/.wh.b", Kind::File, true),
            (".wh.disk", Kind::File, false),
            ("disk/.wh..wh..opq", Kind::File, false),
            (".wh..wh..opq", Kind::File, false),
            ("other/.wh..wh..opq", Kind::File, true),
            ("disk", Kind::Other, false),
            ("disk", Kind::Folder, true),
            ("disk/a", Kind::Other, false),
            ("disk/a", Kind::Folder, false),
            ("disk/ab", Kind::Other, true),
        ] {
            for wanted in [None, Some("/disk/a")] {
                let mut union = Union::new(wanted).unwrap();
                union.note(path, kind).unwrap();
                assert!(
                    union.shows("disk/a"),
                    "{path}: the layer itself is not meant"
                );
                union.next_layer();
                assert_eq!(union.shows("disk/a"), shows, "{path} {kind:?} {wanted:?}");
            }
        }
    }

    #[test]
    fn only_paths_that_matter_are_noted() {
        let mut union = Union::new(None).unwrap();
        for number in 0..10_000 {
            union.note(&format!("lib/{number}"), Kind::File).unwrap();
            union
                .note(&format!("disk/folder/{number}"), Kind::Other)
                .unwrap();
        }
        assert!(union.next.is_empty());
        let mut note = |number| union.note(&format!("disk/{number}"), Kind::File);
        assert!((0..10_000).any(|number| note(number).is_err()));
    }

    #[test]
    fn names_lead_nowhere_else() {
        assert_eq!(plain_path(b"./disk//./a/").unwrap(), "disk/a");
        assert_eq!(plain_path(b"/disk/a").unwrap(), "disk/a");
        assert!(plain_path(b"disk/../a").is_err());
        assert!(Union::new(Some("../x")).is_err());
    }
}

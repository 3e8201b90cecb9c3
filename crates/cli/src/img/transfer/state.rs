//! What is noted beside a target: which stream it holds, and how far one is that is being received.
//!
//! The note is a file of JSON, `DISK.vellum-received`, and not a bitmap of that name in the image:
//! a raw image has none, QEMU would have to keep it, and how far a half received image is must be
//! known before that is opened.

use std::fs::File;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use vellum_format::stream::{Header, StreamId};
use vellum_storage::SourceVersion;

use super::super::command::{Failure, fail};
use super::super::file_identity::{content_times, file_identity, inode_times};
use super::super::note::{Note, cannot};
use super::{header_text, id_text, parse_header, parse_id};

const VERSION: u64 = 2;
/// In the place of times that tell nothing.
const UNKNOWN: &str = "unknown";

/// The name of a disk while it is half received.
pub fn partial(disk: &str) -> String {
    format!("{disk}.vellum-receiving")
}

fn note_path(disk: &str) -> PathBuf {
    PathBuf::from(format!("{disk}.vellum-received"))
}

/// A stream that the disk holds, whole.
#[derive(Debug, Clone, PartialEq)]
pub struct Received {
    pub id: StreamId,
    pub format: String,
    /// [`left_as`] of the disk's file, as it was then.
    left: Value,
}

/// A stream that is being received.
#[derive(Debug, Clone, PartialEq)]
pub struct Receiving {
    /// Its header, as of a stream that begins at the disk's start.
    pub header: Header,
    pub format: String,
    /// Everything before here is in its place, durably.
    pub done_bytes: u64,
    /// The disk was made for it: it shows zeroes where nothing was received.
    pub is_new: bool,
    /// Device and inode of the disk's file.
    file: Value,
    /// Set once everything is durable: the length of the disk's file and when its content was changed.
    complete: Option<Value>,
}

impl Receiving {
    /// Of a disk whose file is called `name` now.
    pub fn new(header: &Header, format: &str, is_new: bool, name: &str) -> Result<Self, Failure> {
        Ok(Receiving {
            header: Header {
                start_bytes: 0,
                ..header.clone()
            },
            format: format.to_owned(),
            done_bytes: 0,
            is_new,
            file: identity_of(name),
            complete: None,
        })
    }

    /// What goes on with it.
    pub fn token(&self) -> Result<String, Failure> {
        header_text(&Header {
            start_bytes: self.done_bytes,
            ..self.header.clone()
        })
    }
}

/// The note, held by this process.
pub struct State {
    note: Note,
    disk: String,
    pub received: Option<Received>,
    pub receiving: Option<Receiving>,
}

impl State {
    /// Takes the note of a disk, and ends what a killed receiver had left to do there.
    pub fn claim(disk: &str) -> Result<State, Failure> {
        let Some(note) = Note::claim(note_path(disk))? else {
            return fail(format!(
                "'{disk}' is being received: somebody else is using '{}'",
                note_path(disk).display()
            ));
        };
        let text = note.text()?;
        let mut state = State {
            note,
            disk: disk.to_owned(),
            received: None,
            receiving: None,
        };
        if !text.is_empty() && !state.parse(&text) {
            return fail(format!(
                "'{}' is no note of what was received; remove it to forget that",
                state.note.path().display()
            ));
        }
        state.recover()?;
        Ok(state)
    }

    /// As [`State::claim`] of a disk that may have no note: then there is none afterwards either.
    pub fn existing(disk: &str) -> Result<Option<State>, Failure> {
        match note_path(disk).exists() {
            true => State::claim(disk).map(Some),
            false => Ok(None),
        }
    }

    fn parse(&mut self, text: &str) -> bool {
        let value: Value = serde_json::from_str(text).unwrap_or(Value::Null);
        self.received = received(&value["received"]);
        self.receiving = receiving(&value["receiving"]);
        let is_whole = |part: &Value, known: bool| known || part.is_null();
        value["version"] == VERSION
            && is_whole(&value["received"], self.received.is_some())
            && is_whole(&value["receiving"], self.receiving.is_some())
    }

    /// Writes down what is known now, durably.
    pub fn save(&self) -> Result<(), Failure> {
        let received = self.received.as_ref().map(|received| {
            json!({
                "token": id_text(received.id),
                "format": received.format,
                "left": received.left,
            })
        });
        let receiving = match &self.receiving {
            None => None,
            Some(receiving) => Some(json!({
                "stream": header_text(&receiving.header)?,
                "format": receiving.format,
                "done": receiving.done_bytes,
                "new": receiving.is_new,
                "file": receiving.file,
                "complete": receiving.complete,
            })),
        };
        let value = json!({
            "version": VERSION,
            "received": received,
            "receiving": receiving,
        });
        self.note.replace(&value.to_string())
    }

    /// Nothing came of it: a note that says nothing goes.
    pub fn give_back(self) {
        if self.received.is_none() && self.receiving.is_none() {
            // It says nothing to anybody.
            let _ = self.note.remove();
        }
    }

    /// From now on the disk is half received, and has that name.
    pub fn begin(&mut self, receiving: Receiving) -> Result<(), Failure> {
        self.receiving = Some(receiving);
        self.save()?;
        self.find()
    }

    /// Gives the half received disk its name for that, if it still has the other one.
    pub fn find(&self) -> Result<(), Failure> {
        let partial = partial(&self.disk);
        let file = self.receiving.as_ref().map(|receiving| &receiving.file);
        match file {
            Some(file) if *file == identity_of(&partial) => Ok(()),
            Some(file) if *file == identity_of(&self.disk) => self.rename(&self.disk, &partial),
            _ => fail(format!(
                "'{partial}' is not the file that '{}' speaks of: remove both and receive a whole \
                 disk, or bring the file back",
                self.note.path().display()
            )),
        }
    }

    /// Everything before `done_bytes` is in its place, durably.
    pub fn advance(&mut self, done_bytes: u64) -> Result<(), Failure> {
        if let Some(receiving) = &mut self.receiving {
            receiving.done_bytes = receiving.done_bytes.max(done_bytes);
        }
        self.save()
    }

    /// The disk, which is closed, is received as a whole: it gets its name.
    pub async fn finish(&mut self) -> Result<(), Failure> {
        let partial = partial(&self.disk);
        let path = Path::new(&partial);
        let durable = File::open(path).and_then(|file| file.sync_all().map(|()| file));
        let file = durable.or_else(|error| cannot("sync", path, &error))?;
        // From here on a change has another time. Where that cannot be had, the disk counts as changed.
        let version = SourceVersion::of_path(path).await.known();
        let found = file.metadata();
        let found = found.or_else(|error| cannot("look at", path, &error))?;
        if let Some(receiving) = &mut self.receiving {
            receiving.complete = Some(version.map_or(json!(UNKNOWN), |_| content_times(&found)));
        }
        self.save()?;
        self.recover()
    }

    /// Gives a disk its name that is received as a whole.
    fn recover(&mut self) -> Result<(), Failure> {
        let complete = self.receiving.as_ref().and_then(|receiving| {
            let complete = receiving.complete.clone();
            complete.map(|complete| (complete, receiving.clone()))
        });
        let Some((content, receiving)) = complete else {
            return Ok(());
        };
        let partial = partial(&self.disk);
        if identity_of(&partial) == receiving.file {
            self.rename(&partial, &self.disk)?;
        } else if identity_of(&self.disk) != receiving.file {
            return self.find();
        }
        self.received = Some(Received {
            id: receiving.header.id,
            format: receiving.format,
            left: left_as(&self.disk).filter(|left| left[0] == content).into(),
        });
        self.receiving = None;
        self.save()
    }

    fn rename(&self, from: &str, to: &str) -> Result<(), Failure> {
        let renamed = std::fs::rename(from, to).and_then(|()| self.note.sync_folder());
        renamed.or_else(|error| cannot("rename", Path::new(from), &error))
    }

    /// Whether the disk's file is as it was when that stream had been received.
    pub fn is_as_received(&self, received: &Received) -> bool {
        left_as(&self.disk).is_some_and(|left| left == received.left)
    }
}

fn received(value: &Value) -> Option<Received> {
    Some(Received {
        id: parse_id(value["token"].as_str()?).ok()?,
        format: value["format"].as_str()?.to_owned(),
        left: value["left"].clone(),
    })
}

fn receiving(value: &Value) -> Option<Receiving> {
    let header = parse_header(value["stream"].as_str()?)?;
    let done_bytes = value["done"].as_u64()?;
    if done_bytes > header.size_bytes {
        return None;
    }
    Some(Receiving {
        header,
        format: value["format"].as_str()?.to_owned(),
        done_bytes,
        is_new: value["new"].as_bool()?,
        file: value["file"].clone(),
        complete: Some(value["complete"].clone()).filter(|value| !value.is_null()),
    })
}

/// Which file it is; that of anything but a regular file is null.
fn identity_of(name: &str) -> Value {
    let file = std::fs::symlink_metadata(name).ok();
    file.as_ref().and_then(file_identity).into()
}

/// What changes with the content of a file: the times of that, and those of the inode, since the first can be set
/// back. The latter also change when the file gets its name, so they are looked at after that.
fn left_as(name: &str) -> Option<Value> {
    let file = std::fs::metadata(name).ok()?;
    Some(json!([content_times(&file), inode_times(&file)]))
}

//! What is asked of a daemon: the request, what is looked at before and after it, and how the answer is
//! shown. The command line makes it, and `run` carries it out.

use serde_json::{Value, json};

/// The action that a command line asks for.
#[derive(Debug)]
pub enum Action {
    /// To ask once.
    Ask {
        method: &'static str,
        path: String,
        body: Option<Value>,
        show: Show,
        care: Care,
    },
    /// To ask again and again.
    Top,
}

/// Checks of the daemon before and after the request.
#[derive(Debug, Default)]
pub struct Care {
    /// The path of a disk, of which the size that is asked for must leave nothing out.
    pub keeps_all_of: Option<String>,
    /// A file that must not be there yet.
    pub makes: Option<String>,
    /// A job that is waited for.
    pub waits_for: Option<String>,
}

/// How an answer is shown to people.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Show {
    Disks,
    Disk,
    Jobs,
    Exports,
    Nodes,
    Stats,
    Host,
    Space,
    SpaceOfAll,
    Chains,
    /// Nothing: it is done.
    Done,
    /// As it came.
    Json,
}

impl Action {
    pub fn get(path: impl Into<String>, show: Show) -> Action {
        Action::Ask {
            method: "GET",
            path: path.into(),
            body: None,
            show,
            care: Care::default(),
        }
    }

    pub fn post(path: String, body: Value) -> Action {
        Action::Ask {
            method: "POST",
            path,
            body: Some(body),
            show: Show::Done,
            care: Care::default(),
        }
    }

    pub fn change(disk: &str, verb: &str, body: Value) -> Action {
        let disk = escaped(disk);
        Action::post(format!("/v1/disks/{disk}/{verb}"), body)
    }

    pub fn resize(disk: &str, size_bytes: u64, shrink: bool) -> Action {
        let path = format!("/v1/disks/{}", escaped(disk));
        Action::Ask {
            method: "POST",
            path: format!("{path}/resize"),
            body: Some(json!({"size": size_bytes})),
            show: Show::Done,
            care: Care {
                keeps_all_of: (!shrink).then_some(path),
                ..Care::default()
            },
        }
    }

    fn with_care(mut self, change: impl FnOnce(&mut Care)) -> Action {
        if let Action::Ask { care, .. } = &mut self {
            change(care);
        }
        self
    }

    /// It makes a file.
    pub fn making(self, file: NewFile) -> Action {
        let makes = (!file.may_be_there).then_some(file.name);
        self.with_care(|care| care.makes = makes)
    }

    /// It begins a job that is waited for.
    pub fn waiting_for(self, job: String) -> Action {
        self.with_care(|care| care.waits_for = Some(job))
    }

    pub fn delete(path: String) -> Action {
        Action::Ask {
            method: "DELETE",
            path,
            body: None,
            show: Show::Done,
            care: Care::default(),
        }
    }
}

/// A file that is to be made.
#[derive(Debug)]
pub struct NewFile {
    /// As the daemon finds it.
    pub name: String,
    /// It may hold something, which is given up.
    pub may_be_there: bool,
}

/// A name as a part of a path.
pub fn escaped(name: &str) -> String {
    let letter = |byte: u8| match byte {
        byte if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) => {
            char::from(byte).to_string()
        }
        byte => format!("%{byte:02X}"),
    };
    name.bytes().map(letter).collect()
}

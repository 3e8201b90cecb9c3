//! Names of other files, and whether the policy allows them.

use std::path::Path;

use vellum_graph::ova::MemberStorage;
use vellum_io::error::io_text;
use vellum_options::{Options, Scalar, filename};

use super::{Audit, Permission, Policy};

/// What the image wants another file for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Shows through where the image holds nothing.
    Backing,
    /// Holds the guest's data.
    DataFile,
    /// Holds writes that the image lacks.
    WriteLog,
    /// Holds its checksums.
    Checksums,
    /// A part of the disk, as VMDK has them.
    Extent,
    /// The disk that a difference is about (VMDK, VHD).
    Parent,
}

impl Role {
    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Role::Backing => "backing-file",
            Role::DataFile => "data-file",
            Role::WriteLog => "write-log",
            Role::Checksums => "checksums",
            Role::Extent => "extent",
            Role::Parent => "parent",
        }
    }
}

/// What a name is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Form {
    /// A path, from the root or from the image's folder.
    Path,
    /// A protocol prefix and what follows.
    Protocol(String),
    /// A whole graph of nodes; with the texts in it that may be names.
    Json(Vec<String>),
    /// The image says that there is another file, and not which.
    Unnamed,
}

impl Form {
    fn of(name: &str) -> Form {
        if let Some(text) = name.strip_prefix("json:") {
            let texts = |options: Options| {
                let text = |(_, value): (&str, &Scalar)| match value {
                    Scalar::Text(text) => Some(text.clone()),
                    _ => None,
                };
                options.iter().filter_map(text).collect()
            };
            return Form::Json(Options::from_json(text).map(texts).unwrap_or_default());
        }
        match filename::protocol(name) {
            Some("file") | None => Form::Path,
            Some(protocol) => Form::Protocol(protocol.to_owned()),
        }
    }

    /// The name in reports.
    pub fn name(&self) -> &'static str {
        match self {
            Form::Path => "path",
            Form::Protocol(_) => "protocol",
            Form::Json(_) => "json",
            Form::Unnamed => "unnamed",
        }
    }
}

/// Another file that an image names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reference {
    /// What for.
    pub role: Role,
    /// The name, as it stands in the image.
    pub name: String,
    /// What the name is.
    pub form: Form,
    /// The format that stands beside it.
    pub format: Option<String>,
    /// The name as seen from here, for paths.
    pub resolved: Option<String>,
    /// A program that opens the image by its rules opens the file too.
    pub in_effect: bool,
    /// Why the policy refuses it; `None` if it does not.
    pub refused: Option<String>,
}

impl Audit<'_> {
    /// Takes down a reference and judges it.
    pub(super) fn refer(
        &mut self,
        role: Role,
        name: Option<&str>,
        format: Option<&str>,
        in_effect: bool,
    ) {
        let form = name.map_or(Form::Unnamed, Form::of);
        let name = name.unwrap_or_default().to_owned();
        let resolved = match form {
            Form::Path => filename::resolve(self.storage.name(), &name).ok(),
            _ => None,
        };
        let mut reference = Reference {
            role,
            name,
            form,
            format: format.map(str::to_owned),
            resolved,
            in_effect,
            refused: None,
        };
        let is_packed = MemberStorage::of(&*self.storage).is_some();
        let refused = if is_packed {
            Some(refused_in_package(&reference))
        } else {
            refusal(&reference, self.policy)
        };
        if let Some((why, permission)) = refused {
            let code = role.name();
            match permission {
                Some(permission) => self.report.forbid(code, why.clone(), permission),
                None => self.report.reject(code, why.clone()),
            }
            reference.refused = Some(why);
        }
        self.report.references.push(reference);
    }
}

/// Why a reference is not allowed, and what would allow it.
type Refusal = (String, Option<Permission>);

/// No option allows an image in a package to open another file.
fn refused_in_package(reference: &Reference) -> Refusal {
    let (role, name) = (reference.role.name(), &reference.name);
    let why = format!(
        "the image names '{name}' ({role}) and lies in a package, where no name opens another file"
    );
    (why, None)
}

fn refusal(reference: &Reference, policy: &Policy) -> Option<Refusal> {
    let (what, permission, allowed) = match reference.role {
        Role::Backing => (
            "backing file",
            Some(Permission::Backing),
            policy.allow_backing,
        ),
        Role::DataFile => (
            "external data file",
            Some(Permission::DataFile),
            policy.allow_data_file,
        ),
        Role::WriteLog => ("write log", None, false),
        Role::Checksums => ("file of checksums", None, false),
        Role::Extent => ("extent", None, false),
        Role::Parent => ("parent disk", None, false),
    };
    let name = &reference.name;
    if !allowed {
        let why = match reference.form {
            Form::Unnamed => format!("the image wants a {what} and does not name it"),
            _ => format!("the image names the {what} '{name}'"),
        };
        return Some((why, permission));
    }
    let (why, permission) = match &reference.form {
        Form::Json(_) if !policy.allow_protocols => (
            format!("the {what} '{name}' is a description of nodes, which may open anything"),
            Permission::Protocols,
        ),
        Form::Protocol(protocol) if !policy.allow_protocols => (
            format!("the {what} '{name}' is reached by the protocol '{protocol}'"),
            Permission::Protocols,
        ),
        Form::Path => (
            confined(reference, policy.within.as_deref(), what)?,
            Permission::Folder,
        ),
        _ => return None,
    };
    Some((why, Some(permission)))
}

/// Whether a path stays in the folder, once links are followed. Nothing is opened.
fn confined(reference: &Reference, folder: Option<&Path>, what: &str) -> Option<String> {
    let folder = folder?;
    let name = &reference.name;
    let outside = || {
        let folder = folder.display();
        Some(format!("the {what} '{name}' lies outside of '{folder}'"))
    };
    let Some(path) = reference.resolved.as_deref() else {
        return outside();
    };
    let Ok(path) = filename::local_path(path) else {
        return outside();
    };
    match (std::fs::canonicalize(&path), std::fs::canonicalize(folder)) {
        (Ok(path), Ok(folder)) if path.starts_with(&folder) => None,
        (Err(error), _) => Some(format!(
            "the {what} '{name}' cannot be found: {}",
            io_text(&error)
        )),
        _ => outside(),
    }
}

//! The backing file of an image: what the user says of it, or else what the image says.

use std::borrow::Cow;
use std::sync::Arc;

use vellum::qcow2::AsQcow2;
use vellum::{BlockDevice, Error, ErrorKind, Result};
use vellum_options::{ImageSpec, OpenFlags, Options, Scalar, filename};

use crate::foreign;
use crate::gate::FilePolicy;
use crate::graph::OpenContext;
use crate::open::{Ancestry, backing_flags, open_below};

/// What the user says of the backing file.
pub(crate) enum Override {
    /// Nothing: the image decides.
    FromImage,
    /// There is to be none.
    None,
    /// A node that is there.
    Node(Arc<dyn BlockDevice>),
    /// What it is, at least in part.
    Options(Options),
}

/// The names of a backing file and its format, as an image has them.
#[derive(Debug, Default)]
pub struct Named {
    /// As it is written in the image: relative to the image, a URL, or `json:{}`.
    pub name: Option<String>,
    /// `None` where the image leaves it to probing.
    pub format: Option<String>,
}

/// What an open image says that it stands on.
pub fn named(image: &dyn BlockDevice) -> Named {
    if let Some(qcow2) = image.as_qcow2() {
        let header = qcow2.header();
        return Named {
            name: header.backing_file_text().map(Cow::into_owned),
            format: header.backing_format().map(Cow::into_owned),
        };
    }
    let backing = foreign::facts(image).and_then(|facts| facts.backing.clone());
    backing.map_or_else(Named::default, |backing| Named {
        name: Some(backing.name),
        format: backing.format,
    })
}

/// Whether an open image says that it stands on what is called `name`, or on nothing.
pub(crate) fn is_named(image: &dyn BlockDevice, name: Option<&str>) -> bool {
    match image.as_qcow2() {
        Some(qcow2) => qcow2.header().backing_file_text().as_deref() == name,
        None => named(image).name.as_deref() == name,
    }
}

/// Takes what options say of the backing file.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] for a value that is no name of a node; as standing on that node.
pub(crate) async fn take(
    options: &mut Options,
    flags: &OpenFlags,
    place: &Ancestry,
) -> Result<Override> {
    // Where only metadata is wanted no backing file can be given.
    let group = match flags.metadata_only {
        true => Options::new(),
        false => options.take_group("backing"),
    };
    match options.take("backing") {
        Some(Scalar::Null) => return Ok(Override::None),
        Some(Scalar::Text(text)) if text.is_empty() => return Ok(Override::None),
        Some(Scalar::Text(text)) => {
            let _turn = place.take_turn().await;
            place.check_activity(&text, "backing", flags)?;
            return match place.nodes.stand_on(place, &text, flags) {
                Ok(device) => Ok(Override::Node(device)),
                Err(error) if flags.metadata_only => Err(error),
                Err(error) => Err(error.context("open", "Could not open backing file")),
            };
        }
        Some(_) => {
            let message = "Invalid parameter type for 'backing', expected: string";
            return Err(Error::new(ErrorKind::InvalidArgument, "open", message));
        }
        None => {}
    }
    Ok(if group.is_empty() {
        Override::FromImage
    } else {
        Override::Options(group)
    })
}

/// Opens the backing file that options describe; `named` fills in what they leave out.
///
/// # Errors
/// As opening it, and [`ErrorKind::Denied`] for a name that the policy does not allow.
pub(crate) async fn open_described(
    options: Options,
    image: &str,
    named: Named,
    around: &OpenContext,
) -> Result<Arc<dyn BlockDevice>> {
    let below = OpenContext {
        flags: backing_flags(&around.flags),
        ..around.clone()
    };
    let options = complete(options, image, named, &below.policy)?;
    let opened = open_below(options, &below).await;
    opened.map_err(|error| error.context("open", "Could not open backing file"))
}

/// Fills in what options leave out: the name and the format.
fn complete(
    mut options: Options,
    image: &str,
    named: Named,
    policy: &FilePolicy,
) -> Result<Options> {
    let has_file = options
        .keys()
        .any(|key| key == "file" || key.starts_with("file."));
    if let (Some(name), false) = (named.name, has_file) {
        let full = filename::resolve(image, &name)?;
        policy.admit(image, &full)?;
        for (key, value) in ImageSpec::filename(full).options()?.iter() {
            if !options.contains(key) {
                options.set(key, value.clone());
            }
        }
    }
    if let (Some(format), false) = (named.format, options.contains("driver")) {
        options.set_text("driver", format);
    }
    Ok(options)
}

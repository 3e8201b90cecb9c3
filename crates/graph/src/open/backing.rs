//! The backing file of an image: what the user says of it, or else what the image says.

use std::sync::Arc;

use vellum::{BlockDevice, Error, ErrorKind, Result};
use vellum_options::{DetectZeroes, ImageSpec, OpenFlags, Options, Scalar, filename};

use crate::node::backing_name::Named;
use crate::node::file_policy::FilePolicy;
use crate::node::origin::Role;
use crate::open::context::OpenContext;
use crate::open::node::open_node;

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

/// Takes what options say of the backing file.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] for a value that is no name of a node; as standing on that node.
pub(crate) async fn take(options: &mut Options, around: &OpenContext) -> Result<Override> {
    let (flags, place) = (&around.flags, &around.place);
    // Where only metadata is wanted no backing file can be given.
    let group = match flags.metadata_only {
        true => Options::new(),
        false => options.take_group("backing"),
    };
    match options.take("backing") {
        Some(Scalar::Null) => return Ok(Override::None),
        Some(Scalar::Text(text)) if text.is_empty() => return Ok(Override::None),
        Some(Scalar::Text(text)) => {
            let _turn = around.take_turn().await;
            around.check_activity(&text, "backing")?;
            return match around.nodes.stand_on(place, &text, flags) {
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

/// The flags for a backing file of an image opened with `flags`.
pub(crate) fn backing_flags(flags: &OpenFlags) -> OpenFlags {
    let unlocked_from = flags.unlocked_from.map(|depth| depth.saturating_sub(1));
    OpenFlags {
        force_share: flags.force_share || unlocked_from == Some(0),
        unlocked_from,
        writable: false,
        detect_zeroes: DetectZeroes::Off,
        no_share: false,
        resize: false,
        no_backing: false,
        for_check: false,
        copy_on_read: false,
        ..flags.clone()
    }
}

/// Opens what the image at a place stands on.
pub(crate) async fn open_below(
    options: Options,
    around: &OpenContext,
) -> Result<Arc<dyn BlockDevice>> {
    let place = &around.place;
    let nodes = &around.nodes;
    if around.names_all()
        && let Some(name) = options.get_text("node-name").map(str::to_owned)
    {
        Box::pin(open_node(options, Role::Image, around)).await?;
        return nodes.stand_on(place, &name, &around.flags);
    }
    let key = nodes.base_key(&options, &around.flags, place);
    if let Some(key) = &key {
        let _turn = around.take_turn().await;
        if let Some(shared) = nodes.shared(key, &around.flags, place) {
            return Ok(shared);
        }
    }
    let mut own = options.clone();
    let name = around.names_all().then(|| nodes.make_up_name());
    if let Some(name) = &name {
        own.set_text("node-name", &**name);
    }
    let node = Box::pin(open_node(own, Role::Image, around)).await?;
    let device = match &name {
        Some(name) => nodes.stand_on(place, name, &around.flags)?,
        None => node.into_device(&around.flags).await?,
    };
    // Unless another file has got the name meanwhile.
    if let Some(key) = key
        && nodes.base_key(&options, &around.flags, place).as_ref() == Some(&key)
    {
        nodes.share(place, key, (name, &device));
    }
    Ok(device)
}

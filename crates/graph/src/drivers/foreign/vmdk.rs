//! VMDK: its extents and its parent are opened here.

use std::sync::Arc;

use vellum::{BlockDevice, Error, ErrorKind, Result, Storage};
use vellum_foreign::vmdk::{self, AdapterType, CreateOptions, Descriptor, OpenOptions, Subformat};
use vellum_foreign::{BackingName, Fact};
use vellum_options::create_options::{
    BACKING_FILE, CreateSettings, OptionDescription, OptionType, SIZE, option,
};
use vellum_options::{ImageSpec, OpenFlags, Options, filename};

use crate::node::file_node::{self, FileUse};
use crate::node::file_policy::FilePolicy;
use crate::node::foreign_image::facts;
use crate::node::origin::Role;
use crate::open::node::{open_node, optional_child};

use super::format::{Creation, ForeignFormat, New, Opening, QmpKind, qmp};

pub(crate) const FORMAT: ForeignFormat = ForeignFormat {
    name: "vmdk",
    open: |opening| Box::pin(open(opening)),
    create: Some(Creation {
        options: OPTIONS,
        validate: |settings| {
            // The parent is looked at when the image is made.
            let options = options(settings)?;
            let parent_cid = options.backing_file.as_ref().map(|_| 0);
            options.parent_cid(parent_cid).validate()
        },
        extents: |settings, name| options(settings)?.extent_names(name),
        fill: |new| Box::pin(fill(new)),
        qmp: &[
            qmp("subformat", "subformat", QmpKind::Choice(&SUBFORMATS)),
            qmp("backing-file", "backing_file", QmpKind::Text),
            qmp("adapter-type", "adapter_type", QmpKind::Choice(&ADAPTERS)),
            qmp("hwversion", "hwversion", QmpKind::Text),
            qmp("toolsversion", "toolsversion", QmpKind::Text),
            qmp("zeroed-grain", "zeroed_grain", QmpKind::Switch),
        ],
    }),
    check: Some(|file, _, policy| Box::pin(check(file, policy))),
    repairs: false,
    options: &[],
    compresses: true,
    has_backing: true,
};

const SUBFORMATS: [&str; 5] = [
    "monolithicSparse",
    "monolithicFlat",
    "twoGbMaxExtentSparse",
    "twoGbMaxExtentFlat",
    "streamOptimized",
];
const ADAPTERS: [&str; 4] = ["ide", "buslogic", "lsilogic", "legacyESX"];

const OPTIONS: &[OptionDescription] = &[
    SIZE,
    option(
        "adapter_type",
        OptionType::Text,
        "Virtual adapter type, can be one of ide (default), lsilogic, buslogic or legacyESX",
        None,
    ),
    BACKING_FILE,
    option(
        "backing_fmt",
        OptionType::Text,
        "Must be 'vmdk' if present",
        None,
    ),
    option(
        "compat6",
        OptionType::Bool,
        "VMDK version 6 image",
        Some("off"),
    ),
    option(
        "hwversion",
        OptionType::Text,
        "VMDK hardware version",
        Some("undefined"),
    ),
    option(
        "toolsversion",
        OptionType::Text,
        "VMware guest tools version",
        None,
    ),
    option(
        "subformat",
        OptionType::Text,
        "VMDK flat extent format, can be one of {monolithicSparse (default) | monolithicFlat | \
         twoGbMaxExtentSparse | twoGbMaxExtentFlat | streamOptimized} ",
        None,
    ),
    option(
        "zeroed_grain",
        OptionType::Bool,
        "Enable efficient zero writes using the zeroed-grain GTE feature",
        None,
    ),
];

/// QEMU's words for a value that an option of this format does not have.
fn not_known(value: &str) -> Error {
    let message = format!("invalid parameter value: {value}");
    Error::new(ErrorKind::InvalidArgument, "create", message)
}

fn options(settings: &CreateSettings) -> Result<CreateOptions> {
    let text = |name: &str| settings.text(name).map(str::to_owned);
    let subformat = match settings.text("subformat") {
        None => Subformat::default(),
        Some(name) => Subformat::named(name).ok_or_else(|| not_known(name))?,
    };
    let adapter_type = match settings.text("adapter_type") {
        None => AdapterType::default(),
        Some(name) => AdapterType::named(name).ok_or_else(|| not_known(name))?,
    };
    if settings
        .text("backing_fmt")
        .is_some_and(|format| format != "vmdk")
    {
        let message = "backing_file must be a vmdk image";
        return Err(Error::new(ErrorKind::InvalidArgument, "create", message));
    }
    // That is what stands for none.
    let hardware_version = text("hwversion").filter(|version| version != "undefined");
    Ok(CreateOptions::default()
        .size_bytes(settings.integer("size").unwrap_or(0))
        .subformat(subformat)
        .adapter_type(adapter_type)
        .hardware_version(hardware_version)
        .tools_version(text("toolsversion"))
        .compat6(settings.bool("compat6"))
        .zeroed_grain(settings.bool("zeroed_grain"))
        .backing_file(text("backing_file")))
}

async fn fill(new: New<'_>) -> Result<()> {
    let mut options = options(new.settings)?;
    if let Some(parent) = &options.backing_file {
        options.parent_cid = Some(parent_cid(new, parent).await?);
    }
    vmdk::create(new.file, new.extents, &options).await
}

/// The identifier of a parent that an image is to name.
async fn parent_cid(new: New<'_>, name: &str) -> Result<u32> {
    let full = filename::resolve(new.file.name(), name)?;
    let mut around = new.around.clone();
    around.flags.metadata_only = true;
    around.flags.force_share = true;
    let options = ImageSpec::filename(full).options()?;
    let node = open_node(options, Role::Image, &around).await?;
    let device = node.into_device(&around.flags).await?;
    let cid = cid_of(&*device).and_then(|cid| u32::try_from(cid).ok());
    let format = device.info().format;
    device.close().await?;
    cid.ok_or_else(|| {
        let message = format!("Invalid backing file format: {format}. Must be vmdk");
        Error::new(ErrorKind::InvalidArgument, "create", message)
    })
}

fn cid_of(device: &dyn BlockDevice) -> Option<u64> {
    let specific = &facts(device)?.specific;
    specific.iter().find_map(|(key, fact)| match fact {
        Fact::Number(number) if *key == "cid" => Some(*number),
        _ => None,
    })
}

/// The file of an extent that a descriptor names: the one that options give, or a local file of that name.
async fn open_extent(opening: &mut Opening, number: usize, name: &str) -> Result<Arc<dyn Storage>> {
    let mut around = opening.around.clone();
    let key = format!("extents.{number}");
    let given = optional_child(&mut opening.options, &key, Role::Protocol, &around).await?;
    if let Some(node) = given {
        return node.into_storage(&around.flags, FileUse::Format).await;
    }
    let image = opening.file.name().to_owned();
    let full = admitted(&image, name, &opening.policy())?;
    let options = filename::node_options(&full)?;
    // Whoever opens the image anew has to know that it stands on this file.
    around.place = around.place.child(&key);
    let node = open_node(options, Role::Protocol, &around).await?;
    node.into_storage(&around.flags, FileUse::Format).await
}

/// The full name of an extent that an image names, if it may be opened.
fn admitted(image: &str, name: &str, policy: &FilePolicy) -> Result<String> {
    refuse_protocol(image, name)?;
    let full = filename::resolve(image, name)?;
    policy.admit(image, &full)?;
    Ok(full)
}

/// Rule 12: what leaves the host is no part of an image on it.
fn refuse_protocol(image: &str, name: &str) -> Result<()> {
    if filename::protocol(name).is_none() {
        return Ok(());
    }
    let message = format!("extent '{name}' is no file of this host");
    Err(Error::new(ErrorKind::Denied, "open", message).target(image))
}

async fn open(mut opening: Opening) -> Result<Arc<dyn BlockDevice>> {
    let file = opening.file.clone();
    let named = |error: Error| error.target(file.name());
    let descriptor = vmdk::read_descriptor(&*file).await.map_err(named)?;
    let mut extents = Vec::new();
    for (number, name) in extent_names(&descriptor).into_iter().enumerate() {
        extents.push(open_extent(&mut opening, number, &name).await?);
    }
    let parent = descriptor.parent_name().filter(|name| !name.is_empty());
    let parent = parent.map(|name| BackingName {
        name: name.to_owned(),
        format: Some("vmdk".to_owned()),
    });
    let backing = opening.backing(parent).await?;
    let options = OpenOptions::default().read_only(opening.read_only());
    Ok(vmdk::open(file.clone(), descriptor, extents, backing, &options).await?)
}

fn extent_names(descriptor: &Descriptor) -> Vec<String> {
    let extents = descriptor.extents().iter();
    extents.map(|extent| extent.name.clone()).collect()
}

/// Checks an image, whose extents are opened as far as the policy allows.
async fn check(
    file: &Arc<dyn Storage>,
    policy: &FilePolicy,
) -> Result<vellum_foreign::CheckReport> {
    let descriptor = vmdk::read_descriptor(&**file).await?;
    let policy = policy.of_image(&**file);
    let mut extents = Vec::new();
    for name in extent_names(&descriptor) {
        let full = admitted(file.name(), &name, &policy)?;
        let flags = OpenFlags {
            force_share: true,
            ..OpenFlags::default()
        };
        let mut options = Options::new();
        options.set_text("driver", "file");
        options.set_text("filename", full);
        let opened = file_node::open_unlocked(options, &flags, &[])?;
        extents.push(opened.lock(&flags, FileUse::Raw).await? as Arc<dyn Storage>);
    }
    vmdk::check(file.clone(), descriptor, extents).await
}

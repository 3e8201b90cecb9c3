//! The `qcow2` driver: its options, and opening an image with them.

use std::borrow::Cow;
use std::sync::Arc;

use vellum::qcow2::checksums::name_of_checksums;
use vellum::qcow2::info::live_write_log;
use vellum::qcow2::seal::VerifyReads;
use vellum::qcow2::{
    Backing, CacheOptions, CompressionOptions, Corruption, Messages, Metadata, OpenOptions,
    OpenPurpose, OverlapChecks, Qcow2, read_header,
};
use vellum::{BlockDevice, Result, Storage};
use vellum_options::{OpenFlags, Options};

use crate::checksums::{self, Wanted};
use crate::live::child_access::ChildAccess;
use crate::live::notices::NodeNotice;
use crate::live::uses::Changes;
use crate::node::backing_name::Named;
use crate::node::driver::{DriverFacts, NamingKind};
use crate::node::errors::{invalid, refuse_unknown_of_format};
use crate::node::file_node::{CommonOptions, FileUse};
use crate::node::origin::Role;
use crate::open::backing::{self, Override};
use crate::open::context::{FormatOpening, OpenContext};
use crate::open::gate::FileGate;
use crate::open::node::optional_child;
use crate::write_log::{self, Journal, OpenedFile};
use crate::{cache_cleaner, config, encryption, qemu_repair, stderr};

/// Options that may change while an image is used.
const CHANGEABLE: &[&str] = &[
    "lazy-refcounts",
    "pass-discard-request",
    "pass-discard-snapshot",
    "pass-discard-other",
    "discard-no-unref",
    "cache-size",
    "l2-cache-size",
    "l2-cache-entry-size",
    "refcount-cache-size",
    "cache-clean-interval",
    "decompressed-cache-size",
    "data-cache-size",
    "checksums",
    "journal",
    "journal-size",
    "overlap-check",
    "overlap-check.",
];

/// The driver.
pub(super) const FACTS: DriverFacts = DriverFacts {
    options: &[
        &[
            "bitmap-step-size",
            "chain-index-size",
            "compression-level",
            "compression-window",
            "encrypt.format",
            "encrypt.key-secret",
            "unseal",
            "verify",
        ],
        CHANGEABLE,
    ],
    has_backing: true,
    changes_file: true,
    changeable: CHANGEABLE,
    ..DriverFacts::named("qcow2").with_naming(
        NamingKind::Format,
        &[&["encrypt.key-secret"]],
        &["file"],
    )
};

/// The values of `overlap-check`.
const OVERLAP_TEMPLATES: [(&str, OverlapChecks); 4] = [
    ("none", OverlapChecks::NONE),
    ("constant", OverlapChecks::CONSTANT),
    ("cached", OverlapChecks::CACHED),
    ("all", OverlapChecks::ALL),
];

/// Takes the options of a qcow2 node out; backing and data file are not among them.
fn take(options: &mut Options, common: &CommonOptions) -> Result<OpenOptions> {
    let mut cache = CacheOptions::default()
        .l2_cache_size_bytes(options.take_size("l2-cache-size")?)
        .refcount_cache_size_bytes(options.take_size("refcount-cache-size")?)
        .cache_size_bytes(options.take_size("cache-size")?)
        .l2_cache_entry_size_bytes(options.take_size("l2-cache-entry-size")?)
        .cache_clean_interval_s(options.take_number("cache-clean-interval")?);
    config::read()?.fill(&mut cache);
    let decompressed_cache_size_bytes = options.take_size("decompressed-cache-size")?;
    let chain_index_size_bytes = options.take_size("chain-index-size")?;
    let data_cache_size_bytes = options.take_size("data-cache-size")?;
    let compression = take_compression(options)?;
    let bitmap_step_bytes = options.take_size("bitmap-step-size")?;
    let lazy_refcounts = options.take_bool("lazy-refcounts")?;
    let pass_discard_request = options.take_bool("pass-discard-request")?;
    let pass_discard_other = options.take_bool("pass-discard-other")?.unwrap_or(false);
    let pass_discard_snapshot = options.take_bool("pass-discard-snapshot")?;
    let discard_no_unref = options.take_bool("discard-no-unref")?.unwrap_or(false);
    let overlap_checks = take_overlap_checks(options)?;
    let verify = take_verify(options)?;
    let unseal = options.take_bool("unseal")?.unwrap_or(false);
    Ok(OpenOptions::default()
        .read_only(!common.writable)
        .cache(cache)
        .decompressed_cache_size_bytes(decompressed_cache_size_bytes)
        .chain_index_size_bytes(chain_index_size_bytes)
        .data_cache_size_bytes(data_cache_size_bytes)
        .compression(compression)
        .bitmap_step_bytes(bitmap_step_bytes)
        .discard(common.discard)
        .discard_no_unref(discard_no_unref)
        .overlap_checks(overlap_checks)
        .pass_discard_request(pass_discard_request)
        .pass_discard_other(pass_discard_other)
        .pass_discard_snapshot(pass_discard_snapshot)
        .lazy_refcounts(lazy_refcounts)
        .verify(verify)
        .unseal(unseal)
        .messages(stderr::messages()))
}

/// What a live node says of its image, which others than those at a terminal hear of too.
fn messages_of(around: &OpenContext) -> Option<Messages> {
    let node = around
        .place
        .parent
        .clone()
        .filter(|_| around.nodes.are_live())?;
    let notices = around.nodes.notices().clone();
    let tell = move |corruption: &Corruption<'_>| {
        notices.give(NodeNotice::Corrupted {
            node: node.clone(),
            message: corruption.message.to_owned(),
            offset_bytes: corruption.offset_bytes,
            is_fatal: corruption.is_fatal,
        });
    };
    Some(stderr::messages().on_corruption(tell))
}

/// How compressed clusters are written: options that QEMU does not have.
fn take_compression(options: &mut Options) -> Result<CompressionOptions> {
    let level = match options.take_number("compression-level")? {
        Some(level) => {
            let refused = |_| invalid(format!("compression level {level} is too high"));
            Some(u32::try_from(level).map_err(refused)?)
        }
        None => None,
    };
    let small_window = match options.take_text("compression-window")?.as_deref() {
        None | Some("32k") => false,
        Some("4k") => true,
        Some(other) => {
            return Err(invalid(format!(
                "compression-window is '4k' or '32k', not '{other}'"
            )));
        }
    };
    Ok(CompressionOptions::default()
        .level(level)
        .small_window(small_window))
}

/// Whether reads of a sealed image are verified: an option that QEMU does not have.
fn take_verify(options: &mut Options) -> Result<Option<VerifyReads>> {
    let Some(name) = options.take_text("verify")? else {
        return Ok(None);
    };
    match VerifyReads::parse(&name) {
        Some(verify) => Ok(Some(verify)),
        None => Err(invalid(format!(
            "verify is 'on', 'off' or 'first', not '{name}'"
        ))),
    }
}

/// What writes are checked against: a template, and switches for single structures.
fn take_overlap_checks(options: &mut Options) -> Result<OverlapChecks> {
    let short = options.take_text("overlap-check")?;
    let long = options.take_text("overlap-check.template")?;
    if let (Some(short), Some(long)) = (&short, &long)
        && short != long
    {
        return Err(invalid(format!(
            "Conflicting values for qcow2 options 'overlap-check' ('{short}') and \
             'overlap-check.template' ('{long}')"
        )));
    }
    let mut checks = match short.or(long) {
        None => OverlapChecks::default(),
        Some(template) => overlap_template(&template)?,
    };
    for kind in Metadata::ALL {
        if let Some(on) = options.take_bool(&format!("overlap-check.{}", kind.option()))? {
            checks = checks.with(kind, on);
        }
    }
    Ok(checks)
}

fn overlap_template(name: &str) -> Result<OverlapChecks> {
    let mut templates = OVERLAP_TEMPLATES.into_iter();
    if let Some((_, checks)) = templates.find(|(known, _)| *known == name) {
        return Ok(checks);
    }
    let known = OVERLAP_TEMPLATES.map(|(known, _)| known).join(", ");
    Err(invalid(format!(
        "Unsupported value '{name}' for qcow2 option 'overlap-check'. Allowed are any of the \
         following: {known}"
    )))
}

/// Opens the image in `file`, with the backing file and the data file that the options,
/// or else the image, name.
pub(crate) async fn open(opening: FormatOpening) -> Result<Arc<dyn BlockDevice>> {
    let FormatOpening {
        file,
        mut options,
        common,
        around,
        ..
    } = opening;
    let common = &common;
    let flags = &around.flags;
    let unlocking = encryption::take(&mut options, flags)?;
    let mut open = take(&mut options, common)?;
    (open.encryption_format, open.passphrase) = (unlocking.format, unlocking.passphrase);
    if let Some(messages) = messages_of(&around) {
        open.messages = messages;
    }
    open.cache_budget = around.nodes.cache_budget().cloned();
    let warn = flags.warn;
    open.verify = open.verify.or(flags.verify);
    if open.compression == CompressionOptions::default() {
        open.compression = flags.compression;
    }
    open.reproducible = flags.reproducible;
    open.purpose = purpose_of(flags);
    let given = backing::take(&mut options, &around).await?;
    let journal = write_log::take(&mut options)?;
    let wanted = checksums::take(&mut options)?;
    let data_file = optional_child(&mut options, "data-file", Role::Protocol, &around).await?;
    refuse_unknown_of_format(&options, "qcow2")?;
    if let Some(data_file) = data_file {
        let nodes = &around.nodes;
        let kept = ChildAccess::keeping(Changes::SIZE);
        nodes.require(&around.place, "data-file", kept).await?;
        open.data_file = Some(data_file.into_storage(flags, FileUse::Format).await?);
    }
    match given {
        Override::None => open.backing = Backing::None,
        _ if flags.no_backing && !is_replayed(&file, common).await? => {
            open.backing = Backing::None;
        }
        Override::Options(options) => {
            let header = read_header(&file).await?;
            let named = Named {
                name: header.backing_file_text().map(Cow::into_owned),
                format: header.backing_format().map(Cow::into_owned),
            };
            let opened = backing::open_described(options, file.name(), named, &around).await?;
            open.backing = Backing::Given(opened);
        }
        Override::Node(device) => open.backing = Backing::Given(device),
        Override::FromImage => {}
    }
    let keeps_checksums = matches!(wanted, Wanted::Keep(_));
    let beside = open_beside(&mut open, journal, wanted, &file, common.writable, flags).await?;
    let clean_interval_s = open.cache.cache_clean_interval_s;
    let policy = around.policy.of_image(&*file);
    let around = OpenContext { policy, ..around };
    let device = Qcow2::open(file, Arc::new(FileGate { around }), open).await?;
    beside.into_iter().for_each(OpenedFile::keep);
    cache_cleaner::start(&device, clean_interval_s);
    if device.bitmaps().are_lost() {
        (warn)(&lost_bitmaps(device.header().version));
    }
    if keeps_checksums && let Some(danger) = qemu_repair::snapshots_in_danger(&device) {
        (warn)(&format!("{}: warning: {danger}\n", program()));
    }
    Ok(device)
}

/// What an image is opened for.
fn purpose_of(flags: &OpenFlags) -> OpenPurpose {
    match flags {
        OpenFlags {
            for_check: true, ..
        } => OpenPurpose::Check,
        OpenFlags {
            metadata_only: true,
            ..
        } => OpenPurpose::Metadata,
        OpenFlags { no_data: true, .. } => OpenPurpose::Locked,
        _ => OpenPurpose::GuestData,
    }
}

/// Opens the files that belong to the image and that the user names: its write log, its checksums.
async fn open_beside(
    open: &mut OpenOptions,
    journal: Option<Journal>,
    wanted: Wanted,
    file: &Arc<dyn Storage>,
    writable: bool,
    flags: &OpenFlags,
) -> Result<Vec<OpenedFile>> {
    let mut beside = Vec::new();
    let uses_log = matches!(open.purpose, OpenPurpose::GuestData | OpenPurpose::Locked);
    if let Some(journal) = journal.filter(|_| uses_log) {
        if writable {
            let (options, opened) = journal.open(file, flags).await?;
            open.write_log = Some(options);
            beside.extend(opened);
        } else {
            open.write_log = journal.open_to_read(flags).await?;
        }
    }
    if open.purpose != OpenPurpose::Check {
        let flags = OpenFlags {
            writable,
            ..flags.clone()
        };
        let has_some = name_of_checksums(&read_header(file).await?).is_some();
        let (options, opened) = wanted.open(file, has_some, &flags).await?;
        open.checksums = options;
        beside.extend(opened);
    }
    Ok(beside)
}

/// Whether the image brings back what its write log holds: for that it needs its backing file.
async fn is_replayed(file: &Arc<dyn Storage>, common: &CommonOptions) -> Result<bool> {
    Ok(common.writable && live_write_log(&read_header(file).await?).is_some())
}

/// What QEMU says where a program that does not know bitmaps has changed an image. It
/// does not end the last line.
fn lost_bitmaps(version: u32) -> String {
    let why = match version {
        2 => {
            "This qcow2 v2 image contains bitmaps, but they may have been modified by a program \
             without persistent bitmap support; so now they must all be considered inconsistent"
        }
        _ => {
            "a program lacking bitmap support modified this file, so all bitmaps are now \
             considered inconsistent"
        }
    };
    format!(
        "{}: warning: {why}\nSome clusters may be leaked, run 'qemu-img check -r' on the image \
         file to fix.",
        program()
    )
}

/// The name that this program was called by.
fn program() -> String {
    let program = std::env::args_os().next().unwrap_or_default();
    let program = std::path::Path::new(&program).file_name();
    program.unwrap_or_default().display().to_string()
}

//! The options of the `qcow2` driver.

use std::io::Write;

use vellum::qcow2::{
    CacheOptions, CompressionOptions, Messages, Metadata, OpenOptions, OverlapChecks,
};
use vellum::{Error, ErrorKind, Result};

use crate::config;
use crate::file_node::Common;
use crate::options::Options;

/// The values of `overlap-check`.
const OVERLAP_TEMPLATES: [(&str, OverlapChecks); 4] = [
    ("none", OverlapChecks::NONE),
    ("constant", OverlapChecks::CONSTANT),
    ("cached", OverlapChecks::CACHED),
    ("all", OverlapChecks::ALL),
];

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, "open", message)
}

/// Takes the options of a qcow2 node out; backing and data file are not among them.
pub fn take(options: &mut Options, common: &Common) -> Result<OpenOptions> {
    let mut cache = CacheOptions {
        l2_cache_size_bytes: options.take_size("l2-cache-size")?,
        refcount_cache_size_bytes: options.take_size("refcount-cache-size")?,
        cache_size_bytes: options.take_size("cache-size")?,
        l2_cache_entry_size_bytes: options.take_size("l2-cache-entry-size")?,
        cache_clean_interval_s: options.take_number("cache-clean-interval")?,
    };
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
    Ok(OpenOptions {
        read_only: !common.writable,
        cache,
        decompressed_cache_size_bytes,
        chain_index_size_bytes,
        data_cache_size_bytes,
        compression,
        bitmap_step_bytes,
        discard: common.discard,
        discard_no_unref,
        overlap_checks,
        pass_discard_request,
        pass_discard_other,
        pass_discard_snapshot,
        lazy_refcounts,
        messages: Messages::to(print_line),
        ..OpenOptions::default()
    })
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
    Ok(CompressionOptions {
        level,
        small_window,
    })
}

/// Prints a line on standard error; nothing can be done if that fails.
fn print_line(line: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
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

//! What `amend -o` says about key slots, as a change of them.

use vellum::luks::{IterationTime, KeyChange};
use vellum::{Error, ErrorKind, Result};
use vellum_options::create_options::CreateSettings;

use vellum_graph::secret;

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, "amend", message)
}

/// The options by their names without prefix.
const OPTIONS: [&str; 5] = ["state", "new-secret", "old-secret", "keyslot", "iter-time"];

/// Iterations are measured for so long where no time is given.
const DEFAULT_ITERATION_MILLISECONDS: u64 = 2000;

/// Whether settings say anything about key slots; `prefix` stands before the options'
/// names (`encrypt.` for qcow2).
pub(crate) fn is_asked_for(settings: &CreateSettings, prefix: &str) -> bool {
    OPTIONS
        .iter()
        .any(|name| settings.is_given(&format!("{prefix}{name}")))
}

/// The change of key slots that settings ask for, unlocked by a secret of its own where `unlocked_by` names one.
///
/// # Errors
/// If settings contradict each other, or a secret is not there.
pub fn key_change_by(
    settings: &CreateSettings,
    prefix: &str,
    force: bool,
    unlocked_by: Option<&str>,
) -> Result<KeyChange> {
    let mut change = key_change(settings, prefix, force)?;
    if let (KeyChange::Add { known, .. }, Some(id)) = (&mut change, unlocked_by) {
        *known = Some(secret::passphrase(id)?);
    }
    Ok(change)
}

/// The change of key slots that settings ask for.
///
/// # Errors
/// In QEMU's words, for options that do not go together and for unknown secrets.
pub(crate) fn key_change(
    settings: &CreateSettings,
    prefix: &str,
    force: bool,
) -> Result<KeyChange> {
    let given = |name: &str| settings.is_given(&format!("{prefix}{name}"));
    let text = |name: &str| settings.text(&format!("{prefix}{name}"));
    let integer = |name: &str| settings.integer(&format!("{prefix}{name}"));
    // QEMU keeps the number in 32 bits.
    let slot = integer("keyslot").map(|slot| slot & u64::from(u32::MAX));
    let unwanted = |name: &str, doing: &str| match given(name) {
        true => Err(invalid(format!(
            "'{name}' must not be given when {doing} keyslots"
        ))),
        false => Ok(()),
    };
    match text("state") {
        None => Err(invalid("Parameter 'state' is missing")),
        Some("active") => {
            let Some(new) = text("new-secret") else {
                return Err(invalid("'new-secret' is required to activate a keyslot"));
            };
            unwanted("old-secret", "activating")?;
            let milliseconds = integer("iter-time").unwrap_or(DEFAULT_ITERATION_MILLISECONDS);
            Ok(KeyChange::Add {
                slot,
                new: secret::passphrase(new)?,
                known: None,
                iteration_time: IterationTime::Milliseconds(milliseconds),
                force,
            })
        }
        Some("inactive") => {
            unwanted("new-secret", "erasing")?;
            unwanted("iter-time", "erasing")?;
            Ok(KeyChange::Erase {
                slot,
                old: text("old-secret").map(secret::passphrase).transpose()?,
                force,
            })
        }
        Some(other) => Err(invalid(format!(
            "Parameter 'state' does not accept value '{other}'"
        ))),
    }
}

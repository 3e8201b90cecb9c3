//! `--state FILE`: what clients of monitors have made comes back, beside what the command line and
//! `--config` say, which count for what they name.
//!
//! Invariant: a file that is damaged, or of which something cannot be brought back, ends the start, and
//! stays as it is. Jobs are no such things: one that cannot be begun anew is told of. With `on-error =
//! "report"` nodes are not either: what cannot be had stays in the file, and is tried again.

use std::path::PathBuf;
use std::rc::Rc;

use vellum_daemon::config::Parts;
use vellum_daemon::{Daemon, SavedState};

use super::Program;
use super::config::ConfigFile;
use crate::report;
use crate::server::Failure;

/// A state file as it was at the start.
#[derive(Debug)]
pub(super) struct StateFile {
    path: PathBuf,
    saved: SavedState,
}

impl StateFile {
    /// Reads a file; one that is not there is empty.
    ///
    /// # Errors
    /// If it cannot be read, or is damaged.
    pub(super) fn read(path: &str) -> Result<StateFile, Failure> {
        let path = PathBuf::from(path);
        let saved = Daemon::read_state(&path)?;
        Ok(StateFile { path, saved })
    }
}

/// Tells what cannot be had, and is kept.
fn tell_lost(program: &Program, text: String) {
    match &program.config {
        Some(config) => config.tell(text),
        None => report::error(text),
    }
}

/// Brings what files say into force: each thing after those that it stands on, whichever file has them.
///
/// # Errors
/// If part of it could not be made.
pub(super) async fn bring_all(program: &Rc<Program>) -> Result<(), Failure> {
    let (daemon, none) = (&program.daemon, Parts::default());
    let wanted = program
        .config
        .as_ref()
        .map_or(&none, |config| config.parts());
    let of_file = |state: &StateFile| {
        let path = state.path.display().to_string();
        move |failure| Failure::from(failure).with_prefix(path)
    };
    if let Some(state) = &program.state {
        let restored = daemon.restore_objects(&state.saved, wanted).await;
        restored.map_err(of_file(state))?;
    }
    if let Some(config) = &program.config {
        config.start(program).await?;
    }
    // Once the disks are there that it may be about.
    let saved = program.state.as_ref();
    let saved = saved.map(|state| daemon.with_named_overlays(&state.saved, wanted));
    let saved = saved.unwrap_or_default();
    if let Some(state) = &program.state {
        let keeps_lost = program.config.as_ref().is_some_and(ConfigFile::reports);
        let restored = daemon.restore_nodes(&saved, wanted, keeps_lost).await;
        for failure in restored.map_err(of_file(state))? {
            tell_lost(program, format!("{}: {failure}", state.path.display()));
        }
    }
    if let Some(state) = &program.state {
        // Before anybody is served.
        let checked = daemon.check_restored(&saved).await;
        checked.map_err(of_file(state))?;
        daemon.restore_leads(&saved, wanted);
    }
    if let Some(config) = &program.config {
        config.start_exports(program).await?;
    }
    let Some(state) = &program.state else {
        let Some(config) = &program.config else {
            return Ok(());
        };
        let parts = config.parts_in_force().await;
        return Ok(daemon.note_config(&parts).await?);
    };
    let restored = daemon.restore_exports(&saved, wanted).await;
    restored.map_err(of_file(state))?;
    let restored = daemon.restore_chains(&saved, wanted).await;
    restored.map_err(of_file(state))?;
    for failure in daemon.restore_jobs(&saved).await {
        report::error(format!("{}: {failure}", state.path.display()));
    }
    let parts = match &program.config {
        Some(config) => config.parts_in_force().await,
        None => none,
    };
    Ok(daemon.keep_state(&saved, &parts).await?)
}

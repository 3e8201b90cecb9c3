//! What an export is made in, and where it is found.

use std::path::PathBuf;

use vellum_export::fair_depth::FairDepth;
use vellum_export::size_turns::SizeTurns;
use vellum_export::unflushed_logs::UnflushedLogs;

use crate::server::{Server, ServerEnvironment};

/// Where the options of an export are from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Somebody asks for it.
    Asked,
    /// It was there before the daemon was started: a bitmap that is gone meanwhile is shown as all dirty, as
    /// where it goes while the export is there.
    Saved,
}

/// Where users find an export.
#[derive(Debug)]
pub(crate) enum ExportPlace {
    /// At the server of this daemon.
    Server,
    /// In a file that is mounted over.
    File(PathBuf),
    /// In a guest.
    Guest,
}

/// What there is beside an export.
pub(crate) struct Surroundings<'a> {
    pub(crate) server: Option<&'a Server>,
    pub(crate) environment: &'a ServerEnvironment,
    pub(super) neighbours: &'a FairDepth,
    pub(super) logs: &'a UnflushedLogs,
    pub(super) size_turns: &'a SizeTurns,
}

//! What a salvaging copy could not read, told in the order of the offsets although
//! many pieces are read at once.
//!
//! Invariant: a piece tells when it has its turn; by then all pieces before it have
//! been read, and what they met is noted.

use std::cell::RefCell;
use std::collections::BTreeMap;

use vellum::Error;

use super::Observer;
use crate::scan::UnknownStatus;

/// A sector that could not be read.
#[derive(Debug)]
enum SalvageError {
    /// Nobody can tell what it holds.
    Unknown(UnknownStatus),
    /// It cannot be read.
    Unreadable(Error),
}

/// SalvageLog by their offset in the target; a sector's status comes before its bytes.
#[derive(Debug, Default)]
pub(super) struct SalvageLog(RefCell<BTreeMap<(u64, bool), SalvageError>>);

impl SalvageLog {
    /// Notes sectors whose status could not be found out.
    pub(super) fn unknown(&self, found: Vec<UnknownStatus>) {
        let mut noted = self.0.borrow_mut();
        for unknown in found {
            noted.insert(
                (unknown.offset_bytes, false),
                SalvageError::Unknown(unknown),
            );
        }
    }

    /// Notes a sector that could not be read.
    pub(super) fn unreadable(&self, offset_bytes: u64, cause: Error) {
        let error = SalvageError::Unreadable(cause);
        self.0.borrow_mut().insert((offset_bytes, true), error);
    }

    /// Tells what was noted before an offset, once.
    pub(super) fn report(&self, end_bytes: u64, observer: &mut dyn Observer) {
        let mut noted = self.0.borrow_mut();
        if noted.is_empty() {
            return;
        }
        let later = noted.split_off(&(end_bytes, false));
        for ((offset_bytes, _), error) in std::mem::replace(&mut *noted, later) {
            match error {
                SalvageError::Unknown(unknown) => {
                    observer.unknown(unknown.source_offset_bytes, &unknown.cause);
                }
                SalvageError::Unreadable(cause) => observer.unreadable(offset_bytes, &cause),
            }
        }
    }
}

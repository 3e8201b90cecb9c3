//! What becomes of a write that has failed: its clusters are given back, its bytes are kept, and it is
//! tried again if there may be room for it now.

use std::ops::Range;
use std::sync::Arc;

use vellum_io::{Buffer, Error, ErrorKind, Loan, Result};

use crate::qcow2::alloc::allocator::Allocation;
use crate::qcow2::commit::room::RoomSearch;
use crate::qcow2::image::Image;

impl Image {
    /// After a part of a write has failed: makes room if that is what it lacked. `rest` is what is to
    /// be written to `left`, unless the failure has taken some of it.
    ///
    /// # Errors
    /// The same, if trying again does not help.
    pub(super) async fn try_again(
        self: &Arc<Self>,
        search: &mut RoomSearch,
        error: Error,
        rest: &Buffer,
        left: Range<u64>,
    ) -> Result<()> {
        let is_whole = rest.len() as u64 == left.end - left.start;
        // Boxed: a write in place would carry the room.
        match is_whole && Box::pin(self.make_room(search, &error)).await {
            true => Ok(()),
            false => Err(search.error(error)),
        }
    }

    /// Gives new clusters back for which something failed: nothing points at them. If
    /// even that fails they are leaked.
    pub(crate) async fn free_unless<T>(&self, worked: &Result<T>, allocation: Option<Allocation>) {
        let (Err(error), Some(allocation)) = (worked, allocation) else {
            return;
        };
        if error.kind() != ErrorKind::NoSpace {
            return self.give_back(allocation).await;
        }
        self.forget_unwritten(&allocation);
        drop(self.allocator.release_roomless(allocation).await);
    }

    /// Gives new clusters back that nothing points at. If even that fails they are leaked.
    pub(crate) async fn give_back(&self, allocation: Allocation) {
        self.forget_unwritten(&allocation);
        let start = allocation.start.cluster(&self.geometry);
        drop(self.allocator.release(start, allocation.clusters).await);
    }

    fn forget_unwritten(&self, allocation: &Allocation) {
        let start = allocation.start.cluster(&self.geometry).index();
        self.unwritten.forget(start..start + allocation.clusters);
    }
}

/// The buffer of a write that has ended. If that failed its bytes are put back before `rest`, so that
/// they can be written again.
pub(super) fn take_back(
    written: Result<Buffer>,
    loan: Option<Loan>,
    rest: &mut Buffer,
) -> Result<Buffer> {
    let Some(loan) = loan else {
        return written;
    };
    match written {
        Ok(lent) => Ok(loan.end(lent)),
        Err(error) => {
            if let Some(piece) = loan.take_back() {
                let behind = std::mem::replace(rest, Buffer::zeroed(0));
                *rest = Buffer::join_all([piece, behind]);
            }
            Err(error)
        }
    }
}

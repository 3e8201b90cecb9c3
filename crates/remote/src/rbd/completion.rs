//! Requests of librbd: each has what it uses until the library says that it has ended.
//!
//! Invariant (rule 10): buffers, their list and the image are the request's own from before it is
//! given to the library until the library calls back, whoever waits for it or does not.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::sync::Arc;

use futures_channel::oneshot;
use smallvec::SmallVec;
use vellum_io::buffer::total_len;
use vellum_io::{Buffers, Error, ErrorKind, Result};

use super::handle::Image;
use super::library::Pointer;

/// A request that writes zeroes out rather than giving space back.
const THICK_PROVISION: c_int = 1;

/// What is asked for; offsets and lengths in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) enum Ask {
    Read(u64),
    Write(u64),
    Zero {
        offset_bytes: u64,
        len_bytes: u64,
        may_unmap: bool,
    },
    Discard(u64, u64),
    Flush,
}

impl Ask {
    fn is_change(self) -> bool {
        !matches!(self, Ask::Read(_) | Ask::Flush)
    }

    /// Whether nothing is asked for, which librbd would refuse.
    pub(super) fn is_empty(self, buffers: &Buffers) -> bool {
        match self {
            Ask::Read(_) | Ask::Write(_) => total_len(buffers) == 0,
            Ask::Zero { len_bytes, .. } | Ask::Discard(_, len_bytes) => len_bytes == 0,
            Ask::Flush => false,
        }
    }

    fn operation(self) -> &'static str {
        match self {
            Ask::Read(_) => "read",
            Ask::Write(_) => "write",
            Ask::Zero { .. } => "write zeroes",
            Ask::Discard(..) => "discard",
            Ask::Flush => "flush",
        }
    }
}

/// What librbd holds while a request runs.
struct Running {
    image: Arc<Image>,
    ask: Ask,
    buffers: Buffers,
    /// Where the buffers lie.
    pieces: SmallVec<[libc::iovec; 4]>,
    answer: oneshot::Sender<Result<Buffers>>,
}

// SAFETY: the list points into the buffers beside it, which may go to other threads.
unsafe impl Send for Running {}

impl Running {
    fn end(mut self, returned: isize) {
        if self.ask.is_change() {
            self.image.note_change();
        }
        let operation = self.ask.operation();
        let answered = match i32::try_from(returned) {
            Ok(errno) if errno < 0 => {
                Err(Error::from_errno(operation, -errno).target(self.image.name()))
            }
            _ => {
                if let Ask::Read(_) = self.ask {
                    // Somebody else may have made the image shorter.
                    zero_behind(&mut self.buffers, returned.unsigned_abs());
                }
                Ok(self.buffers)
            }
        };
        // Nobody waits any more: the result goes.
        let _ = self.answer.send(answered);
    }
}

/// Fills what lies behind the first `len_bytes` with zeroes.
fn zero_behind(buffers: &mut Buffers, mut len_bytes: usize) {
    for buffer in buffers {
        let kept = len_bytes.min(buffer.len());
        buffer[kept..].fill(0);
        len_bytes -= kept;
    }
}

/// Called by a thread of librbd's.
extern "C" fn ended(completion: Pointer, request: Pointer) {
    // SAFETY: the argument that `submit` has given with this completion; it is called once.
    let running = unsafe { Box::from_raw(request.cast::<Running>()) };
    let library = running.image.library();
    // SAFETY: a completion that has ended and that nobody else uses.
    let returned = unsafe {
        let returned = (library.rbd_aio_get_return_value)(completion);
        (library.rbd_aio_release)(completion);
        returned
    };
    running.end(returned);
}

/// Begins a request. It runs to its end whether or not somebody waits.
///
/// # Errors
/// Where librbd does not take it; what became of it comes through the channel.
pub(super) fn submit(image: Arc<Image>, ask: Ask, mut buffers: Buffers) -> Answer {
    let (answer, receive) = oneshot::channel();
    if ask.is_change() {
        image.note_change();
    }
    let pieces = buffers.iter_mut().map(|buffer| libc::iovec {
        iov_base: buffer.as_mut_ptr().cast(),
        iov_len: buffer.len(),
    });
    let pieces = pieces.collect();
    let running = Box::new(Running {
        image,
        ask,
        buffers,
        pieces,
        answer,
    });
    let library = running.image.library();
    let handle = running.image.pointer();
    let request = Box::into_raw(running);
    let mut completion = std::ptr::null_mut();
    // SAFETY: the request is a box of its own, which `ended` takes; the place outlives the call.
    let made =
        unsafe { (library.rbd_aio_create_completion)(request.cast(), ended, &mut completion) };
    if made < 0 {
        // SAFETY: no completion has come to be that would call back.
        let running = unsafe { Box::from_raw(request) };
        running.end(made as isize);
        return Answer(receive);
    }
    // SAFETY: the image is open, since the request holds it. The list and what it points at are
    // the request's, at places that do not change, until `ended` is called, which only a request
    // that was begun does.
    let begun = unsafe {
        let pieces = (*request).pieces.as_ptr();
        let count = (*request).pieces.len() as c_int;
        match ask {
            Ask::Read(at) => (library.rbd_aio_readv)(handle, pieces, count, at, completion),
            Ask::Write(at) => (library.rbd_aio_writev)(handle, pieces, count, at, completion),
            Ask::Zero {
                offset_bytes,
                len_bytes,
                may_unmap,
            } => {
                let flags = if may_unmap { 0 } else { THICK_PROVISION };
                let len_bytes = len_bytes as usize;
                let zero = library.rbd_aio_write_zeroes;
                zero(handle, offset_bytes, len_bytes, completion, flags, 0)
            }
            Ask::Discard(at, len_bytes) => {
                (library.rbd_aio_discard)(handle, at, len_bytes, completion)
            }
            Ask::Flush => (library.rbd_aio_flush)(handle, completion),
        }
    };
    if begun < 0 {
        // SAFETY: what was not begun does not call back, so both are still ours.
        let running = unsafe {
            (library.rbd_aio_release)(completion);
            Box::from_raw(request)
        };
        running.end(begun as isize);
    }
    Answer(receive)
}

/// What becomes of a request.
pub(super) struct Answer(oneshot::Receiver<Result<Buffers>>);

impl Answer {
    /// Waits for it.
    pub(super) async fn wait(self) -> Result<Buffers> {
        self.0.await.unwrap_or_else(|_| {
            let message = "librbd has dropped a request";
            Err(Error::new(ErrorKind::Io, "wait for Ceph", message))
        })
    }
}

#[cfg(test)]
mod tests {
    use vellum_io::Buffer;

    use super::*;

    #[test]
    fn what_was_not_read_is_zeroes() {
        for len_bytes in 0..=9 {
            let buffers = [3, 0, 5].map(|len| Buffer::copy_of(&vec![7; len]));
            let mut buffers: Buffers = buffers.into_iter().collect();
            zero_behind(&mut buffers, len_bytes);
            let bytes: Vec<u8> = buffers.iter().flat_map(|buffer| buffer.to_vec()).collect();
            let mut wanted = vec![7; len_bytes.min(8)];
            wanted.resize(8, 0);
            assert_eq!(bytes, wanted);
        }
    }
}

//! The thread that sends requests to a server.

use std::io::{IoSlice, Result, Write};
use std::process::ChildStdin;
use std::sync::mpsc::Receiver;

use futures_channel::oneshot;
use vellum_io::Buffers;

use super::session::Shared;

/// At most so many bytes are given to the pipe at once: each such piece shows that something moves.
const PIECE_BYTES: usize = 64 << 10;
/// Short messages go together, up to about this length.
const TOGETHER_BYTES: usize = 4 << 10;

/// A message that is to be sent.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) message: Vec<u8>,
    pub(super) payload: Option<Payload>,
}

/// Data behind a message.
#[derive(Debug)]
pub(super) struct Payload {
    pub(super) buffers: Buffers,
    /// Takes the buffers when they were sent.
    pub(super) back: oneshot::Sender<Buffers>,
}

/// Sends what comes, until nobody can send any more or the program does not take it: whoever waits
/// for its answers is told then.
pub(super) fn send_jobs(mut output: ChildStdin, jobs: &Receiver<Job>, shared: &Shared) {
    let mut next = jobs.recv().ok();
    while let Some(job) = next.take() {
        let mut heads = job.message;
        let mut payload = job.payload;
        while payload.is_none() && heads.len() < TOGETHER_BYTES {
            let Ok(more) = jobs.try_recv() else { break };
            heads.extend(more.message);
            payload = more.payload;
        }
        if send(&mut output, &heads, payload, shared).is_err() {
            return;
        }
        next = jobs.recv().ok();
    }
}

fn send(
    output: &mut ChildStdin,
    heads: &[u8],
    payload: Option<Payload>,
    shared: &Shared,
) -> Result<()> {
    let Some(Payload { buffers, back }) = payload else {
        return send_all(output, heads, shared);
    };
    let sent = send_both(output, heads, &buffers, shared);
    // Nobody waits any more: they go.
    let _ = back.send(buffers);
    sent
}

/// Heads and the begin of the data go in one call, so that the program is woken once.
fn send_both(
    output: &mut ChildStdin,
    heads: &[u8],
    buffers: &Buffers,
    shared: &Shared,
) -> Result<()> {
    let first = buffers.first().map_or(&[][..], |buffer| buffer);
    let piece = &first[..first.len().min(PIECE_BYTES)];
    let sent = output.write_vectored(&[IoSlice::new(heads), IoSlice::new(piece)])?;
    shared.note_move();
    send_all(output, &heads[sent.min(heads.len())..], shared)?;
    send_all(output, &first[sent.saturating_sub(heads.len())..], shared)?;
    for buffer in buffers.iter().skip(1) {
        send_all(output, buffer, shared)?;
    }
    Ok(())
}

pub(super) fn send_all(output: &mut ChildStdin, bytes: &[u8], shared: &Shared) -> Result<()> {
    for piece in bytes.chunks(PIECE_BYTES) {
        output.write_all(piece)?;
        shared.note_move();
    }
    Ok(())
}

//! [`Port`]: the way to whoever is at the other end of a character device.

use std::fs::File;
use std::future::pending;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, UdpSocket};
use std::os::fd::AsFd;
use std::rc::Rc;

use vellum_io::lane::{self, net};
use vellum_io::{Buffer, Buffers};

use super::ring::Ring;

/// Bytes received at once.
const PIECE_BYTES: usize = 4096;
/// A pipe that can be written to at all takes so many bytes at once.
const PIPE_BYTES: usize = 4096;

/// A connection to a client. Clones share it.
#[derive(Debug, Clone)]
pub struct Port {
    wire: Wire,
    /// Gets a copy of everything that is sent.
    log: Option<Rc<File>>,
}

#[derive(Debug, Clone)]
pub(super) enum Wire {
    /// Files, pipes and terminals; without input nothing ever comes.
    Files {
        input: Option<Rc<File>>,
        output: Rc<File>,
    },
    Socket(net::Stream),
    Datagrams(Rc<UdpSocket>),
    Ring(Rc<Ring>),
    Nobody,
}

impl From<net::Stream> for Port {
    fn from(stream: net::Stream) -> Self {
        Port::new(Wire::Socket(stream), None)
    }
}

impl Port {
    pub(super) fn new(wire: Wire, log: Option<Rc<File>>) -> Self {
        Port { wire, log }
    }

    /// Whether something may come while a command is carried out: what QEMU serves by a
    /// thread of its own.
    pub(crate) fn hears(&self) -> bool {
        !matches!(self.wire, Wire::Ring(_) | Wire::Nobody)
    }

    /// Whether a client that says no more has gone, and the next one has a port of its own.
    pub(crate) fn is_connection(&self) -> bool {
        matches!(self.wire, Wire::Socket(_))
    }

    /// Whether whoever was at the other end has gone, and reads no answers any more.
    pub(crate) fn has_hung_up(&self) -> bool {
        matches!(&self.wire, Wire::Socket(stream) if stream.has_hung_up())
    }

    /// Receives what is there; `None` when no more comes.
    pub(crate) async fn receive(&self) -> Option<Vec<u8>> {
        match &self.wire {
            Wire::Socket(stream) => {
                let (buffer, count) = stream.recv(Buffer::for_read(PIECE_BYTES)).await.ok()?;
                (count > 0).then(|| buffer[..count].to_vec())
            }
            Wire::Files {
                input: Some(input), ..
            } => loop {
                lane::poll_readable(input.as_fd()).await.ok()?;
                let mut piece = vec![0; PIECE_BYTES];
                match (&**input).read(&mut piece) {
                    Ok(0) => return None,
                    Ok(count) => {
                        piece.truncate(count);
                        return Some(piece);
                    }
                    // Somebody else was faster.
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                    Err(_) => return None,
                }
            },
            Wire::Datagrams(socket) => loop {
                lane::poll_readable(socket.as_fd()).await.ok()?;
                let mut piece = vec![0; 1 << 16];
                // A peer that does not listen now may do so later.
                if let Ok(count) = socket.recv(&mut piece) {
                    piece.truncate(count);
                    return Some(piece);
                }
            },
            Wire::Files { input: None, .. } | Wire::Ring(_) | Wire::Nobody => pending().await,
        }
    }

    /// Sends a text; whether that worked.
    pub(crate) async fn send(&self, text: &str) -> bool {
        if let Some(log) = &self.log {
            // As QEMU's, it holds what could be written.
            let _ = (&**log).write_all(text.as_bytes());
        }
        match &self.wire {
            Wire::Socket(stream) => {
                let bytes = Buffers::from_iter([Buffer::copy_of(text.as_bytes())]);
                stream.send(bytes).await.is_ok()
            }
            Wire::Files { output, .. } => write_all(output, text.as_bytes()).await,
            Wire::Datagrams(socket) => {
                for piece in text.as_bytes().chunks(PIECE_BYTES) {
                    // Datagrams get lost.
                    let _ = socket.send(piece);
                }
                true
            }
            Wire::Ring(ring) => {
                ring.write(text.as_bytes());
                true
            }
            Wire::Nobody => true,
        }
    }

    /// Ends the connection.
    pub(crate) fn hang_up(&self) {
        if let Wire::Socket(stream) = &self.wire {
            // It may have gone by itself.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

async fn write_all(output: &File, mut rest: &[u8]) -> bool {
    let mut output = output;
    while !rest.is_empty() {
        if lane::poll_writable(output.as_fd()).await.is_err() {
            return false;
        }
        match output.write(&rest[..rest.len().min(PIPE_BYTES)]) {
            Ok(count) if count > 0 => rest = &rest[count..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            _ => return false,
        }
    }
    true
}

//! [`TlsFront`]: TLS before HTTP. `vellum_tls` runs on a lane, as for NBD; the lane here has a thread of
//! its own, and hands on what it decrypts through a pair of sockets.
//!
//! Invariant: a connection ends with the side of it that HTTP has, whatever the client does.

use std::io;
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_channel::mpsc;
use futures_util::StreamExt;
use futures_util::future::{Either, join, select};
use tokio::net::UnixStream;
use vellum_io::lane::{self, net::Stream};
use vellum_io::{Buffer, Buffers, spawn};
use vellum_nbd::{Secured, Upgrade};

/// What is handed on at once.
const PIECE_BYTES: usize = 16 << 10;
/// So long may a client take nothing.
const WRITE_TIME: Duration = Duration::from_secs(20);

/// Secures connections.
#[derive(Debug)]
pub(super) struct TlsFront {
    connections: mpsc::UnboundedSender<(TcpStream, StdUnixStream)>,
}

impl TlsFront {
    /// Secures connections as one side says. Its thread ends with it.
    pub(super) fn start(tls: Arc<dyn Upgrade>) -> TlsFront {
        let (connections, mut next) = mpsc::unbounded::<(TcpStream, StdUnixStream)>();
        let thread = std::thread::Builder::new().name("http-tls".to_owned());
        // Without a thread the channel is closed, and every connection is refused.
        let _ = thread.spawn(move || {
            lane::block_on(async move {
                while let Some((client, http)) = next.next().await {
                    let tls = tls.clone();
                    let (client, http) =
                        (Stream::from_fd(client.into()), Stream::from_fd(http.into()));
                    drop(spawn(async move {
                        let _ = lead(&*tls, client.clone(), http).await;
                        let _ = client.shutdown(Shutdown::Both);
                    }));
                }
            });
            // Those that are left end with HTTP's side of them.
            lane::finish();
        });
        TlsFront { connections }
    }

    /// What HTTP reads and writes in the place of a client.
    ///
    /// # Errors
    /// What the system says if there can be no sockets, or no thread.
    pub(super) fn secure(&self, client: TcpStream) -> io::Result<UnixStream> {
        let (own, http) = StdUnixStream::pair()?;
        http.set_nonblocking(true)?;
        let sent = self.connections.unbounded_send((client, own));
        sent.map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
        UnixStream::from_std(http)
    }
}

/// Shakes hands, and hands bytes on both ways.
async fn lead(tls: &dyn Upgrade, client: Stream, http: Stream) -> vellum::Result<()> {
    // HTTP says nothing before it was asked: what comes is its end, or the first answer.
    let first = Box::pin(http.recv(Buffer::for_read(PIECE_BYTES)));
    let (secured, first) = match select(tls.upgrade(client), first).await {
        Either::Left((secured, first)) => (secured?, first),
        Either::Right(_) => return Ok(()),
    };
    let into_http = async {
        let handed_on = hand_on_requests(&secured, &http).await;
        // The client says nothing more.
        let _ = http.shutdown(Shutdown::Write);
        handed_on
    };
    let out_of_http = async {
        let mut received = first.await;
        while let Ok((buffer, count @ 1..)) = received {
            send(&secured, Buffer::copy_of(&buffer[..count])).await?;
            received = http.recv(buffer).await;
        }
        // Whatever it says: nobody waits for it, nor for a client that takes nothing.
        let goodbye = secured.clone().finish();
        let _ = select(goodbye, pin!(lane::sleep(WRITE_TIME))).await;
        let _ = secured.stream().shutdown(Shutdown::Both);
        vellum::Result::Ok(())
    };
    let (out, into) = join(
        async {
            let out = out_of_http.await;
            // Also after an error: who hands requests on hears of it.
            let _ = secured.stream().shutdown(Shutdown::Both);
            out
        },
        into_http,
    )
    .await;
    out.and(into)
}

async fn hand_on_requests(secured: &Arc<dyn Secured>, http: &Stream) -> vellum::Result<()> {
    let mut buffer = Buffer::for_read(PIECE_BYTES);
    loop {
        let (received, count) = secured.clone().recv(buffer).await?;
        if count == 0 {
            return Ok(());
        }
        let piece = Buffers::from_iter([Buffer::copy_of(&received[..count])]);
        http.send(piece).await?;
        buffer = received;
    }
}

/// Sends to a client, unless it takes nothing.
async fn send(secured: &Arc<dyn Secured>, piece: Buffer) -> vellum::Result<()> {
    let sending = secured.clone().send(Buffers::from_iter([piece]));
    let error = match select(sending, pin!(lane::sleep(WRITE_TIME))).await {
        Either::Left((Ok((_, error)), _)) => error,
        Either::Left((Err(error), _)) => Some(error),
        Either::Right(_) => Some(vellum::Error::from_errno("send", libc::ETIMEDOUT)),
    };
    error.map_or(Ok(()), Err)
}

//! Sockets on lanes.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use futures_util::future::{Either, join_all, select};
use vellum_io::lane::net::{Listener, Stream};
use vellum_io::lane::{self, block_on};
use vellum_io::{Buffer, Buffers, Result, spawn};

use crate::on_both;

async fn send(stream: &Stream, pieces: &[&[u8]]) -> Result<()> {
    let buffers = pieces.iter().map(|piece| Buffer::copy_of(piece)).collect();
    stream.send(buffers).await.map(drop)
}

async fn receive_all(stream: &Stream, len_bytes: usize) -> Vec<u8> {
    let mut all = Vec::new();
    while all.len() < len_bytes {
        let (buffer, count) = stream.recv(Buffer::for_read(100_000)).await.unwrap();
        assert!(count > 0, "ended after {}", all.len());
        all.extend_from_slice(&buffer[..count]);
    }
    all
}

/// Sends back what comes until the peer is done.
async fn echo(stream: Stream) -> Result<()> {
    loop {
        let (mut buffer, count) = stream.recv(Buffer::for_read(8192)).await?;
        if count == 0 {
            return stream.shutdown(Shutdown::Write);
        }
        stream
            .send(Buffers::from_buf([buffer.split_to(count)]))
            .await?;
    }
}

#[test]
fn unix_and_tcp_echo() {
    on_both(|| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        block_on(async {
            let unix = Listener::unix(&path).unwrap();
            let tcp = Listener::tcp(("127.0.0.1", 0)).unwrap();
            let port = tcp.local_address().unwrap().port();
            for listener in [unix, tcp] {
                drop(spawn(async move {
                    loop {
                        drop(spawn(echo(listener.accept().await.unwrap())));
                    }
                }));
            }
            let client = |stream: Stream| async move {
                for n in 0..50 {
                    let bytes = vec![n; 10_000];
                    send(&stream, &[&bytes[..28], &bytes[28..]]).await.unwrap();
                    assert_eq!(receive_all(&stream, bytes.len()).await, bytes);
                }
                stream.shutdown(Shutdown::Write).unwrap();
                assert_eq!(stream.recv(Buffer::for_read(10)).await.unwrap().1, 0);
            };
            let mut clients = Vec::new();
            for _ in 0..4 {
                clients.push(client(Stream::connect_unix(&path).await.unwrap()));
                clients.push(client(
                    Stream::connect_tcp("127.0.0.1", port).await.unwrap(),
                ));
            }
            join_all(clients).await;
        });
    });
}

#[test]
fn large_sends_arrive_whole_while_the_peer_is_slow() {
    on_both(|| {
        let (ours, theirs) = Stream::pair().unwrap();
        let bytes: Vec<u8> = (0..5_000_000_u32).map(|n| (n % 251) as u8).collect();
        let expected = bytes.clone();
        block_on(async move {
            let pieces: Buffers = bytes.chunks(333_333).map(Buffer::copy_of).collect();
            let sending = spawn(async move { ours.send(pieces).await.map(|back| back.len()) });
            lane::sleep(Duration::from_millis(20)).await;
            assert!(receive_all(&theirs, expected.len()).await == expected);
            assert_eq!(sending.await.unwrap(), 16);
        });
    });
}

#[test]
fn a_peer_that_vanishes_is_an_end_or_an_error_never_a_signal() {
    on_both(|| {
        let (ours, theirs) = Stream::pair().unwrap();
        block_on(async {
            let pending = ours.recv(Buffer::for_read(100));
            drop(theirs);
            assert_eq!(pending.await.unwrap().1, 0);
            let error = send(&ours, &[b"hello"]).await.unwrap_err();
            assert_eq!(error.errno(), libc::EPIPE);
        });
    });
}

#[test]
fn shutdown_ends_requests_that_wait() {
    on_both(|| {
        let (ours, _theirs) = Stream::pair().unwrap();
        block_on(async {
            let pending = ours.recv(Buffer::for_read(100));
            // More than the socket holds, to a peer that does not read.
            let blocked = ours.send(Buffers::from_buf([Buffer::zeroed(8 << 20)]));
            lane::sleep(Duration::from_millis(5)).await;
            ours.shutdown(Shutdown::Both).unwrap();
            assert_eq!(pending.await.unwrap().1, 0);
            assert_eq!(blocked.await.unwrap_err().errno(), libc::EPIPE);
        });
    });
}

#[test]
fn a_dropped_accept_takes_no_connection() {
    on_both(|| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        block_on(async {
            let listener = Listener::unix(&path).unwrap();
            for _ in 0..20 {
                let sleep = lane::sleep(Duration::from_millis(1));
                assert!(matches!(
                    select(listener.accept(), sleep).await,
                    Either::Right(_)
                ));
            }
            let mut peer = UnixStream::connect(&path).unwrap();
            let stream = listener.accept().await.unwrap();
            peer.write_all(b"ping").unwrap();
            assert_eq!(receive_all(&stream, 4).await, b"ping");
            send(&stream, &[b"po", b"ng"]).await.unwrap();
            let mut answer = [0; 4];
            peer.read_exact(&mut answer).unwrap();
            assert_eq!(&answer, b"pong");
        });
    });
}

#[test]
fn connecting_to_nobody_says_so() {
    on_both(|| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("nobody");
        let error = block_on(Stream::connect_unix(&path)).unwrap_err();
        assert_eq!(
            (error.operation(), error.errno()),
            ("connect", libc::ENOENT)
        );
    });
}

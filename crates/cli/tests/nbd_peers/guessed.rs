//! Clients of raw images whose format was guessed.

use futures_util::future::join_all;
use vellum_graph::probe::{Probed, probe};
use vellum_io::{Buffer, Buffers, Io, lane, spawn};
use vellum_nbd::client::{Address, ClientOptions, NbdStorage};
use vellum_storage::{Storage, WriteFlags, ZeroFlags};

use super::*;

/// A client of a server on `socket`.
async fn client(socket: &str) -> std::sync::Arc<NbdStorage> {
    let mut options = ClientOptions::new("nbd", Address::Unix(socket.to_owned()));
    options.writable = true;
    NbdStorage::open(options).await.expect("a connection")
}

#[test]
fn clients_cannot_make_a_guessed_raw_image_another_format() {
    let place = Place::new();
    let served = place.serve(&["-t", "-e", "4", "disk.raw"]);
    let socket = place.name("socket");
    let header = b"QFI\xfb\0\0\0\x03\0\0\0\0\0\0\0\x68\0\0\0\x0b";
    lane::block_on(async {
        let disks = [client(&socket).await, client(&socket).await];
        for round in 0..100 {
            let whole = Buffers::from_iter([Buffer::copy_of(&[0xaa; 512])]);
            let flags = WriteFlags::default();
            disks[0].write(0, whole, flags).await.expect("no format");
            let unit = 1 + round % 5;
            let pieces = header.chunks(unit).enumerate().map(|(piece, bytes)| {
                let (disk, at) = (&disks[piece % 2], (piece * unit) as u64);
                let zeroes = bytes.iter().all(|byte| *byte == 0);
                match zeroes && round % 2 == 1 {
                    true => disk.write_zeroes(at, bytes.len() as u64, ZeroFlags::default()),
                    false => {
                        let buffers = Buffers::from_iter([Buffer::copy_of(bytes)]);
                        let written = disk.write(at, buffers, flags);
                        Io::task(spawn(async move { written.await.map(drop) }))
                    }
                }
            });
            let done = join_all(pieces).await;
            assert!(done.iter().any(Result::is_err), "round {round}");
            let sector = Buffers::from_iter([Buffer::for_read(512)]);
            let sector = disks[1].read(0, sector).await.expect("read");
            assert_eq!(probe(&sector[0]), Probed::Raw, "round {round}");
        }
    });
    served.end();
}

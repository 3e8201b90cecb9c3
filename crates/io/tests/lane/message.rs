//! Devices that give and take whole messages, for which datagram sockets stand here.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;

use futures_util::future::{Either, join, select};
use vellum_io::lane::message::MessageDevice;
use vellum_io::lane::{block_on, yield_now};
use vellum_io::{Buffer, Buffers};

use crate::on_both;

fn device() -> (MessageDevice, UnixDatagram) {
    let (ours, theirs) = UnixDatagram::pair().unwrap();
    let device = MessageDevice::new(OwnedFd::from(ours), "pair").unwrap();
    (device, theirs)
}

fn memory() -> Buffers {
    Buffers::from_iter([Buffer::zeroed(4), Buffer::zeroed(100)])
}

#[test]
fn messages_stay_whole_both_ways() {
    on_both(|| {
        block_on(async {
            let (device, peer) = device();
            let pieces = [&b"ab"[..], b"cde"].map(Buffer::copy_of);
            device.send(Buffers::from_iter(pieces)).await.unwrap();
            let mut bytes = [0; 100];
            assert_eq!(peer.recv(&mut bytes).unwrap(), 5);
            assert_eq!(&bytes[..5], b"abcde");

            // One waits already, the others lie there.
            let arrive = async {
                yield_now().await;
                peer.send(b"first").unwrap();
                peer.send(b"2").unwrap();
            };
            let (received, ()) = join(device.recv(memory()), arrive).await;
            let (buffers, len_bytes) = received.unwrap();
            assert_eq!(
                (len_bytes, &buffers[0][..], buffers[1][0]),
                (5, &b"firs"[..], b't')
            );
            let (buffers, len_bytes) = device.recv(buffers).await.unwrap();
            assert_eq!((len_bytes, buffers[0][0]), (1, b'2'));
        });
    });
}

#[test]
fn a_receive_that_is_dropped_takes_nothing() {
    on_both(|| {
        block_on(async {
            let (device, peer) = device();
            for _ in 0..100 {
                let waits = device.recv(memory());
                let Either::Right(_) = select(waits, Box::pin(yield_now())).await else {
                    panic!("there was nothing to receive");
                };
                yield_now().await;
            }
            peer.send(b"for the next").unwrap();
            let (_, len_bytes) = device.recv(memory()).await.unwrap();
            assert_eq!(len_bytes, 12);
        });
    });
}

/// Lanes that wait for messages of one device get each one once, and all of them.
#[test]
fn lanes_share_the_messages_of_a_device() {
    const COUNT: usize = 2000;
    on_both(|| {
        let (device, peer) = device();
        let mut lanes = Vec::new();
        for _ in 0..4 {
            let device = device.clone();
            lanes.push(std::thread::spawn(move || {
                block_on(async {
                    let mut numbers = Vec::new();
                    loop {
                        let (buffers, _) = device.recv(memory()).await.unwrap();
                        match u32::from_ne_bytes(buffers[0][..].try_into().unwrap()) {
                            u32::MAX => return numbers,
                            number => numbers.push(number),
                        }
                    }
                })
            }));
        }
        let numbers = (0..COUNT as u32).chain([u32::MAX; 4]);
        for number in numbers {
            peer.send(&number.to_ne_bytes()).unwrap();
        }
        let received = lanes.into_iter().flat_map(|lane| lane.join().unwrap());
        let mut received: Vec<u32> = received.collect();
        received.sort_unstable();
        assert_eq!(received, (0..COUNT as u32).collect::<Vec<_>>());
    });
}

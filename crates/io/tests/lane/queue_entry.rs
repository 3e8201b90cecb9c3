//! Entries of the queues of `/dev/fuse`, where there is no such queue: what mounts do with them
//! is among the tests of the program.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;

use vellum_io::lane::message::MessageDevice;
use vellum_io::lane::queue_entry::QueueEntry;
use vellum_io::lane::{self, Backend, LaneOptions, block_on};
use vellum_io::shared_memory::SharedMemory;

use crate::on_both;

fn register_with_a_socket() -> i32 {
    block_on(async {
        let (ours, _theirs) = UnixDatagram::pair().unwrap();
        let device = MessageDevice::new(OwnedFd::from(ours), "pair").unwrap();
        let entries = QueueEntry::several(3, 1 << 20).unwrap();
        assert_eq!(entries.len(), 3);
        let mut errno = 0;
        for entry in entries {
            errno = entry.register(&device, 0).await.unwrap_err().errno();
        }
        errno
    })
}

#[test]
fn lanes_without_commands_refuse_entries() {
    on_both(|| {
        assert!(!lane::takes_commands());
        assert_eq!(register_with_a_socket(), libc::EOPNOTSUPP);
    });
}

/// Whether or not the kernel has such rings, everything else goes on as in any lane.
#[test]
fn lanes_with_commands_ask_the_kernel() {
    let work = || {
        let options = LaneOptions {
            commands: true,
            ..LaneOptions::default()
        };
        lane::install(&options).unwrap();
        assert!(!lane::takes_commands() || lane::backend() == Backend::IoUring);
        assert_eq!(register_with_a_socket(), libc::EOPNOTSUPP);
        block_on(async {
            let (sender, receiver) = UnixDatagram::pair().unwrap();
            let device = MessageDevice::new(OwnedFd::from(receiver), "pair").unwrap();
            sender.send(b"more").unwrap();
            let memory = [vellum_io::Buffer::zeroed(10)].into_iter().collect();
            let (buffers, len_bytes) = device.recv(memory).await.unwrap();
            assert_eq!(&buffers[0][..len_bytes], b"more");
        });
    };
    std::thread::spawn(work).join().unwrap();
}

#[test]
fn memory_of_ones_own_is_zero_and_divided_without_gaps() {
    let memory = Arc::new(SharedMemory::anonymous(3 * 4096).unwrap());
    let range = memory.range(4096, 8192).unwrap();
    range.piece(8, 8).copy_from(0, &[7; 8]);
    let mut bytes = [1; 24];
    range.copy_to(0, &mut bytes);
    assert_eq!(bytes[..8], [0; 8]);
    assert_eq!(bytes[8..16], [7; 8]);
    assert_eq!(bytes[16..], [0; 8]);
    assert!(std::panic::catch_unwind(|| range.piece(8191, 2)).is_err());
}

//! What a user has flushed stays, whatever happens to the graph meanwhile: a guest writes
//! and flushes beside each kind of change, and after each of its flushes the power fails, or
//! only the program ends.

use std::sync::atomic::Ordering;

use vellum::ZeroRequest;
use vellum::nodes::CopyOnRead;
use vellum_io::lane::yield_now;
use vellum_io::spawn;
use vellum_storage::Storage;

use crate::testing::{SIZE_BYTES, Volatile, World, open};
use crate::wrap::WriteThrough;

use super::*;

#[test]
fn a_flush_holds_what_was_written_while_a_snapshot_was_made() {
    for driver in ["raw", "qcow2"] {
        lane::block_on(async {
            let world = World::new();
            world.add("base", driver).await;
            world.add("over", "qcow2").await;
            let snapshot = async { world.nodes.snapshot("base", "over").await.map(drop) };
            world
                .change("base", async { snapshot.await.unwrap() })
                .await;
        });
    }
}

#[test]
fn a_snapshot_of_what_cannot_be_made_durable_leaves_all_as_it_was() {
    for driver in ["raw", "qcow2"] {
        lane::block_on(async {
            let world = World::new();
            let file = world.add("base", driver).await;
            world.add("over", "qcow2").await;
            let joined = world.join("base");
            let write = async |byte: u8| {
                let bytes = Buffer::copy_of(&[byte; 512]);
                joined.link.write(0, bytes, RequestFlags::default()).await
            };
            write(1).await.unwrap();
            // Only the flush that counts fails: what it is about is written by then.
            let snapshot = spawn({
                let nodes = world.nodes.clone();
                async move { nodes.snapshot("base", "over").await }
            });
            let over = &world.nodes;
            while over.backing_of("over").is_none() {
                yield_now().await;
            }
            write(2).await.unwrap();
            file.0.fails_flushes.store(true, Ordering::SeqCst);
            assert!(snapshot.await.is_err());
            assert_eq!(world.nodes.used_by(joined.id).as_deref(), Some("base"));
            assert_eq!(world.nodes.chain("over"), ["over"]);
            let read = joined.link.read(0, Buffer::for_read(512)).await.unwrap();
            assert_eq!(read[..], [2; 512]);
            world.nodes.remove("over").await.unwrap();
        });
    }
}

#[test]
fn a_flush_holds_while_the_node_is_opened_anew() {
    for driver in ["raw", "qcow2"] {
        lane::block_on(async {
            let world = World::new();
            world.add("disk", driver).await;
            let change = async {
                for writable in [false, true, false, true] {
                    let set = world.nodes.set_writable("disk", writable);
                    set.await.unwrap();
                    for _ in 0..20 {
                        yield_now().await;
                    }
                }
            };
            world.change("disk", change).await;
        });
    }
}

#[test]
fn a_flush_holds_while_what_lies_below_is_exchanged() {
    lane::block_on(async {
        let world = World::new();
        for name in ["base", "mid", "top"] {
            world.add(name, "qcow2").await;
        }
        for (node, overlay) in [("base", "mid"), ("mid", "top")] {
            world.nodes.snapshot(node, overlay).await.unwrap();
        }
        let change = async {
            world.nodes.set_writable("base", false).await.unwrap();
            let rebased = world.nodes.rebase("top", Some("base"), None).await;
            rebased.unwrap();
            assert_eq!(world.nodes.chain("top"), ["top", "base"]);
            world.nodes.set_writable("base", true).await.unwrap();
        };
        world.change("top", change).await;
    });
}

#[test]
fn a_flush_holds_while_something_is_put_in_front_and_taken_away() {
    for driver in ["raw", "qcow2"] {
        lane::block_on(async {
            let world = World::new();
            world.add("disk", driver).await;
            let change = async {
                for _ in 0..2 {
                    let front = CopyOnRead::fetching(world.nodes.device("disk").unwrap());
                    let put = world.nodes.insert_filter("disk", Some(front)).await;
                    put.unwrap();
                    for _ in 0..20 {
                        yield_now().await;
                    }
                    world.nodes.insert_filter("disk", None).await.unwrap();
                }
            };
            world.change("disk", change).await;
        });
    }
}

/// Graphs over a file: their name, whether the file is an image, and how they are asked for.
const GRAPHS: [(&str, bool, &str); 7] = [
    ("raw", false, "driver=raw,file="),
    ("qcow2", true, "driver=qcow2,file="),
    ("blkdebug", false, "driver=blkdebug,image="),
    (
        "preallocate",
        false,
        "driver=raw,file.driver=preallocate,file.file=",
    ),
    (
        "raw on qcow2",
        true,
        "driver=raw,file.driver=qcow2,file.file=",
    ),
    (
        "copy-on-read",
        true,
        "driver=copy-on-read,file.driver=qcow2,file.file=",
    ),
    (
        "qcow2 on blkdebug",
        true,
        "driver=qcow2,file.driver=blkdebug,file.image=",
    ),
];

#[test]
fn what_was_written_is_durable_once_its_node_is_removed_or_all_are_closed() {
    for (graph, is_image, how) in GRAPHS {
        for all in [false, true] {
            lane::block_on(async {
                let world = World::new();
                let file = match is_image {
                    true => Volatile::image().await,
                    false => Volatile::new(vec![0; SIZE_BYTES as usize]),
                };
                let with_file = |below: &str| format!("{how}{below}");
                world.add_over("disk", file, with_file).await;
                let joined = world.join("disk");
                let bytes = Buffer::copy_of(&[9; 512]);
                let write = joined.link.write(1024, bytes, RequestFlags::default());
                write.await.unwrap();
                world.nodes.leave(joined.id);
                match all {
                    false => world.nodes.remove("disk").await.unwrap(),
                    true => world.nodes.clone().close().await.unwrap(),
                }
                let left = open(&world.layers(&["disk".to_owned()]), 0).await;
                let read = left.read(1024, Buffer::for_read(512)).await.unwrap();
                assert_eq!(read[..], [9; 512], "{graph}, all: {all}");
            });
        }
    }
}

#[test]
fn a_close_that_fails_is_told() {
    for driver in ["raw", "qcow2"] {
        lane::block_on(async {
            let world = World::new();
            let file = world.add("disk", driver).await;
            world.add("sound", "qcow2").await;
            let joined = world.join("disk");
            let bytes = Buffer::copy_of(&[9; 512]);
            let write = joined.link.write(0, bytes, RequestFlags::default());
            write.await.unwrap();
            file.0.fails_flushes.store(true, Ordering::SeqCst);
            world.nodes.leave(joined.id);
            let closed = world.nodes.clone().close().await;
            assert_eq!(closed.unwrap_err().errno(), libc::EIO, "{driver}");
            assert!(world.nodes.is_empty());
        });
    }
}

#[test]
fn what_has_a_name_is_there_for_the_next_one_who_stands_on_it() {
    for how in ["file=", "file.driver=raw,file.node-name=between,file.file="] {
        lane::block_on(async {
            let world = World::new();
            let file = Volatile::image().await;
            let with_file = |below: &str| format!("driver=qcow2,{how}{below}");
            world.add_over("disk", file.clone(), with_file).await;
            // Opened anew it is referred to by its name, too.
            world.nodes.set_writable("disk", false).await.unwrap();
            world.nodes.remove("disk").await.unwrap();
            assert!(!world.nodes.contains("between"));
            let again = "driver=qcow2,node-name=again,file=disk-file";
            add(&world.nodes, again).await.unwrap();
            let disk = world.nodes.device("again").unwrap();
            disk.read(0, Buffer::for_read(512)).await.unwrap();
            world.nodes.clone().close().await.unwrap();
            assert!(file.flush().await.is_err(), "its own end closes it");
        });
    }
}

#[test]
fn what_is_written_through_is_durable_at_once_before_and_after_a_snapshot() {
    for driver in ["raw", "qcow2"] {
        lane::block_on(async {
            let world = World::new();
            world.add("disk", driver).await;
            world.add("over", "qcow2").await;
            let joined = world.join("disk");
            let device = WriteThrough::new(joined.link.clone());
            let check = async |chain: &[&str]| {
                let chain: Vec<String> = chain.iter().map(ToString::to_string).collect();
                for byte in [5, 6] {
                    let bytes = Buffer::copy_of(&[byte; 1024]);
                    let write = device.write(512, bytes, RequestFlags::default());
                    write.await.unwrap();
                    world.model.borrow_mut()[1..3].fill(byte);
                    world.check_left(&chain).await;
                    let zeroes = device.write_zeroes(512, 512, ZeroRequest::default());
                    zeroes.await.unwrap();
                    world.model.borrow_mut()[1] = 0;
                    world.check_left(&chain).await;
                }
            };
            check(&["disk"]).await;
            world.nodes.snapshot("disk", "over").await.unwrap();
            check(&["over", "disk"]).await;
        });
    }
}

#[test]
fn the_bottom_of_what_is_copied_is_found_below_a_node_with_a_name() {
    lane::block_on(async {
        let world = World::new();
        for name in ["base", "over"] {
            world.add(name, "qcow2").await;
        }
        world.nodes.snapshot("base", "over").await.unwrap();
        for bottom in ["base", "over"] {
            let copying =
                format!("driver=copy-on-read,file=over,bottom={bottom},node-name=copying");
            add(&world.nodes, &copying).await.unwrap();
            world.nodes.remove("copying").await.unwrap();
        }
        let device = world.nodes.device("over").unwrap();
        device.read(0, Buffer::for_read(512)).await.unwrap();
    });
}

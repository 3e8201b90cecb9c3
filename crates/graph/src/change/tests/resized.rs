//! Nodes get other sizes beside requests of their users.

use std::sync::atomic::Ordering;

use vellum_io::lane::yield_now;
use vellum_io::spawn;

use crate::testing::{SIZE_BYTES, World};

use super::*;

#[test]
fn what_was_on_its_way_behind_a_new_end_does_not_come_back() {
    lane::block_on(async {
        let world = World::new();
        let file = world.add("disk", "raw").await;
        let joined = world.join("disk");
        let at = SIZE_BYTES - 512;
        file.0.holds_writes.store(true, Ordering::SeqCst);
        let bytes = Buffer::copy_of(&[7; 512]);
        let write = joined.link.write(at, bytes, RequestFlags::default());
        let nodes = world.nodes.clone();
        let resized = spawn(async move { nodes.resize("disk", SIZE_BYTES / 2).await });
        for _ in 0..100 {
            yield_now().await;
        }
        file.0.holds_writes.store(false, Ordering::SeqCst);
        write.await.expect("it came first");
        resized.await.expect("another size");
        assert_eq!(file.left()[1].len() as u64, SIZE_BYTES / 2);
        let bytes = Buffer::copy_of(&[7; 512]);
        let beyond = joined.link.write(at, bytes, RequestFlags::default());
        beyond
            .await
            .expect("a raw image grows with what is written");
        world.nodes.resize("disk", SIZE_BYTES / 2).await.unwrap();
        world.nodes.resize("disk", SIZE_BYTES).await.unwrap();
        let read = joined.link.read(at, Buffer::for_read(512)).await.unwrap();
        assert_eq!(read[..], [0; 512]);
    });
}

#[test]
fn nodes_that_are_as_long_as_the_one_below_follow_it() {
    for driver in ["raw", "copy-on-read", "preallocate"] {
        lane::block_on(async {
            let world = World::new();
            world.add("disk", "raw").await;
            let nodes = &world.nodes;
            for text in [
                format!("driver={driver},node-name=above,file=disk"),
                "driver=raw,node-name=top,file=above".to_owned(),
            ] {
                add(nodes, &text).await.unwrap();
            }
            let joined = world.join("top");
            for size_bytes in [2 * SIZE_BYTES, SIZE_BYTES / 2, SIZE_BYTES] {
                nodes.resize("disk", size_bytes).await.unwrap();
                for name in ["disk", "above", "top"] {
                    let found = nodes.device(name).unwrap().size_bytes();
                    assert_eq!(found, size_bytes, "{driver} {name}");
                }
                assert_eq!(joined.link.size_bytes(), size_bytes);
                let bytes = Buffer::copy_of(&[7; 512]);
                let last = size_bytes - 512;
                let written = joined.link.write(last, bytes, RequestFlags::default());
                written.await.unwrap();
                let device = nodes.device("disk").unwrap();
                let read = device.read(last, Buffer::for_read(512)).await.unwrap();
                assert_eq!(read[..], [7; 512]);
            }
            nodes.leave(joined.id);
        });
    }
}

/// The limits stay open, and hold what the node above them has to write when it is closed.
#[test]
fn a_node_below_limits_shrinks_under_a_node_that_follows() {
    lane::block_on(async {
        let world = World::new();
        world.add("disk", "raw").await;
        let group = Options::parse("id=shrinking,limits.iops-total=1000").unwrap();
        crate::throttle_groups::add(group).unwrap();
        for text in [
            "driver=throttle,node-name=limits,throttle-group=shrinking,file=disk",
            "driver=raw,node-name=top,file=limits",
        ] {
            add(&world.nodes, text).await.unwrap();
        }
        let joined = world.join("top");
        world.put(&joined, 1, 7).await;
        for size_bytes in [SIZE_BYTES / 2, SIZE_BYTES, SIZE_BYTES / 4] {
            world.nodes.resize("disk", size_bytes).await.unwrap();
            assert_eq!(joined.link.size_bytes(), size_bytes);
        }
        let read = joined.link.read(512, Buffer::for_read(512)).await;
        assert_eq!(read.unwrap()[..], [7; 512]);
        world.nodes.leave(joined.id);
    });
}

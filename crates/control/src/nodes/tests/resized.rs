//! Nodes get other sizes beside requests of their users.

use std::sync::atomic::Ordering;

use vellum_io::lane::yield_now;
use vellum_io::spawn;

use super::durable::{SIZE_BYTES, World};
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

//! Users are led from a node only once what they wrote to it is durable.

use std::sync::atomic::Ordering;

use crate::testing::{World, open};

use super::*;

#[test]
fn users_are_led_away_only_from_what_is_durable() {
    for driver in ["raw", "qcow2"] {
        lane::block_on(async {
            let world = World::new();
            world.add("top", driver).await;
            world.add("other", driver).await;
            let joined = world.join("top");
            let bytes = Buffer::copy_of(&[7; 512]);
            let write = joined.link.write(0, bytes, RequestFlags::default());
            write.await.unwrap();
            let held = world.nodes.drain("top").await.unwrap();
            world.nodes.redirect_to(held, "other").await.unwrap();
            // A flush reaches the other one only.
            joined.link.flush().await.unwrap();
            let left = open(&world.layers(&["top".to_owned()]), 0).await;
            let read = left.read(0, Buffer::for_read(512)).await.unwrap();
            assert_eq!(read[..], [7; 512], "{driver}");
        });
    }
}

#[test]
fn users_stay_with_what_cannot_be_made_durable() {
    lane::block_on(async {
        let world = World::new();
        let file = world.add("top", "raw").await;
        world.add("other", "raw").await;
        let joined = world.join("top");
        let bytes = Buffer::copy_of(&[7; 512]);
        let write = joined.link.write(0, bytes, RequestFlags::default());
        write.await.unwrap();
        file.0.fails_flushes.store(true, Ordering::SeqCst);
        let held = world.nodes.drain("top").await.unwrap();
        assert!(world.nodes.redirect_to(held, "other").await.is_err());
        assert_eq!(world.nodes.used_by(joined.id).as_deref(), Some("top"));
        let opened = world.nodes.set_writable("top", false).await;
        assert!(opened.is_err(), "what is closed is durable");
        let read = joined.link.read(0, Buffer::for_read(512)).await.unwrap();
        assert_eq!(read[..], [7; 512], "it is still there for its users");
    });
}

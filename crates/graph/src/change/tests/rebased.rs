//! A rebase that fails leaves what it has changed before as it was.

use std::rc::Rc;
use std::sync::atomic::Ordering;

use vellum::qcow2::AsQcow2;

use crate::testing::World;

use super::*;

/// The image `over` on `base`, which its header names so.
async fn chain() -> Rc<World> {
    let world = World::new();
    world.add("base", "qcow2").await;
    world.add_overlay("over", "base").await;
    world
        .nodes
        .rename_backing("over", "as/it/was")
        .await
        .unwrap();
    world
}

fn named_in_header(world: &World) -> String {
    let device = world.nodes.device("over").unwrap();
    let header = device.as_qcow2().unwrap().header();
    header.backing_file_text().unwrap().into_owned()
}

#[test]
fn a_circle_is_found_before_the_header_changes() {
    lane::block_on(async {
        let world = chain().await;
        world.add_overlay("top", "over").await;
        let file = Some("other".to_owned());
        let refused = world.nodes.rebase("over", Some("top"), file).await;
        let refused = refused.unwrap_err().message().to_owned();
        assert_eq!(
            refused,
            "Making 'top' a backing child of 'over' would create a cycle"
        );
        assert_eq!(named_in_header(&world), "as/it/was");
        assert_eq!(world.nodes.chain("top"), ["top", "over", "base"]);
    });
}

#[test]
fn what_cannot_be_opened_below_is_not_named_in_the_header() {
    lane::block_on(async {
        let world = chain().await;
        world.add("other", "qcow2").await;
        world.nodes.remove("other").await.unwrap();
        let file = world.file("other");
        world
            .add_over("raw", file.clone(), |below| {
                format!("driver=raw,file={below}")
            })
            .await;
        let joined = world.join("over");
        file.0.fails_reads.store(true, Ordering::SeqCst);
        let named = Some("other".to_owned());
        let between = ("over", "base");
        let refused = world.nodes.rebase_below(between, "raw", named).await;
        assert!(refused.is_err(), "'base' cannot be opened over it");
        assert_eq!(named_in_header(&world), "as/it/was");
        let read = joined.link.read(0, Buffer::for_read(512)).await;
        assert_eq!(read.unwrap()[..], [0; 512], "users have what they had");
    });
}

/// An image writes what it has gathered before its header changes, and reads the rest of the clusters below.
#[test]
fn the_rest_of_what_is_gathered_is_read_below_before_that_changes() {
    lane::block_on(async {
        let world = chain().await;
        world.add_overlay("top", "over").await;
        world
            .nodes
            .rename_backing("top", "as/it/was")
            .await
            .unwrap();
        let joined = world.join("top");
        world.put(&joined, 1, 5).await;
        world.nodes.rebase("top", Some("base"), None).await.unwrap();
        assert_eq!(world.nodes.chain("top"), ["top", "base"]);
        let read = joined.link.read(512, Buffer::for_read(512)).await;
        assert_eq!(read.unwrap()[..], [5; 512]);
    });
}

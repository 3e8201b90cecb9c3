//! What users have flushed stays while nodes are opened anew with other options, and nodes are put
//! under overlays that others stand on without a link.

use std::rc::Rc;
use std::sync::atomic::Ordering;

use vellum_io::lane::yield_now;

use crate::change::graph_change::GraphChange;
use crate::change::reopen_changes::ReopenChanges;
use crate::testing::World;

use super::*;

fn options(text: &str) -> Options {
    Options::parse(text).unwrap()
}

/// A node is opened anew as it is.
async fn reopen_as_is(world: &Rc<World>, name: &str) -> Result<()> {
    let unchanged = vec![(name.to_owned(), ReopenChanges::default())];
    GraphChange::reopening(unchanged).apply(&world.nodes).await
}

async fn reopen(world: &Rc<World>, nodes: &[&str]) -> std::result::Result<(), String> {
    let all = nodes.iter().map(|text| options(text)).collect();
    let done = world.nodes.reopen(all).await;
    done.map_err(|error| vellum_options::error_text(&error))
}

#[test]
fn a_flush_holds_while_nodes_get_other_options() {
    lane::block_on(async {
        let world = World::new();
        world.add("disk", "qcow2").await;
        let change = async {
            for more in ["lazy-refcounts=on", "l2-cache-size=65536", "discard=unmap"] {
                let text = format!("driver=qcow2,node-name=disk,file=disk-file,{more}");
                reopen(&world, &[&text]).await.unwrap();
                for _ in 0..20 {
                    yield_now().await;
                }
            }
        };
        world.change("disk", change).await;
    });
}

#[test]
fn of_several_nodes_all_get_other_options_or_none() {
    lane::block_on(async {
        let world = World::new();
        for name in ["base", "over"] {
            world.add(name, "qcow2").await;
        }
        world.nodes.snapshot("base", "over").await.unwrap();
        let change = async {
            let good = "driver=qcow2,node-name=over,file=over-file,backing=base,lazy-refcounts=on";
            let bad = "driver=qcow2,node-name=base,file=base-file,l2-cache-size=100,cache-size=10";
            let refused = reopen(&world, &[good, bad]).await.unwrap_err();
            assert_eq!(refused, "l2-cache-size may not exceed cache-size");
            assert_eq!(world.nodes.chain("over"), ["over", "base"]);
            let base = "driver=qcow2,node-name=base,file=base-file,lazy-refcounts=on";
            reopen(&world, &[good, base]).await.unwrap();
        };
        world.change("over", change).await;
    });
}

#[test]
fn what_cannot_be_made_durable_is_not_opened_anew() {
    lane::block_on(async {
        let world = World::new();
        let file = world.add("disk", "qcow2").await;
        let joined = world.join("disk");
        world.put(&joined, 3, 7).await;
        file.0.fails_flushes.store(true, Ordering::SeqCst);
        let text = "driver=qcow2,node-name=disk,file=disk-file,lazy-refcounts=on";
        assert!(reopen(&world, &[text]).await.is_err());
        let read = joined.link.read(3 * 512, Buffer::for_read(512)).await;
        assert_eq!(
            read.unwrap()[..],
            [7; 512],
            "it is still there for its users"
        );
    });
}

#[test]
fn an_overlay_is_put_under_what_stands_on_a_node_without_a_link() {
    lane::block_on(async {
        let world = World::new();
        for name in ["disk", "over"] {
            world.add(name, "qcow2").await;
        }
        add(&world.nodes, "driver=raw,node-name=between,file=disk")
            .await
            .unwrap();
        add(&world.nodes, "driver=raw,node-name=shown,file=between")
            .await
            .unwrap();
        let joined = world.join("shown");
        world.put(&joined, 1, 5).await;
        world.nodes.snapshot("disk", "over").await.unwrap();
        // Acknowledged before, and not flushed since.
        world.check_left(&["disk".to_owned()]).await;
        world.put(&joined, 2, 6).await;
        joined.link.flush().await.unwrap();
        world
            .check_left(&["over".to_owned(), "disk".to_owned()])
            .await;
        // And back, where nothing was written since.
        world.nodes.leave(joined.id);
        world.nodes.remove("shown").await.unwrap();
        world.nodes.remove("between").await.unwrap();
        world.nodes.remove("over").await.unwrap();
    });
}

#[test]
fn a_snapshot_that_is_taken_back_leaves_users_where_they_were() {
    lane::block_on(async {
        let world = World::new();
        for name in ["disk", "over"] {
            world.add(name, "qcow2").await;
        }
        let change = async {
            let held = world.nodes.drain("disk").await.unwrap();
            let snapshot = world.nodes.snapshot("disk", "over").await.unwrap();
            snapshot.undo(&world.nodes).await.unwrap();
            drop(held);
            assert_eq!(world.nodes.chain("over"), ["over"]);
        };
        world.change("disk", change).await;
        world.nodes.remove("over").await.unwrap();
    });
}

#[test]
fn another_name_of_the_backing_file_costs_nothing_that_was_flushed() {
    lane::block_on(async {
        let world = World::new();
        for name in ["base", "over"] {
            world.add(name, "qcow2").await;
        }
        world.nodes.snapshot("base", "over").await.unwrap();
        let change = async {
            for name in ["some/where", ""] {
                world.nodes.rename_backing("over", name).await.unwrap();
                assert_eq!(world.nodes.chain("over"), ["over", "base"]);
            }
        };
        world.change("over", change).await;
    });
}

#[test]
fn an_image_that_could_not_be_opened_for_a_while_stands_on_what_it_stood_on() {
    lane::block_on(async {
        let world = World::new();
        for name in ["base", "over"] {
            world.add(name, "qcow2").await;
        }
        let joined = world.join("base");
        world.put(&joined, 1, 5).await;
        world.nodes.snapshot("base", "over").await.unwrap();
        let over = world.file("over");
        over.0.fails_reads.store(true, Ordering::SeqCst);
        assert!(reopen_as_is(&world, "over").await.is_err());
        assert_eq!(world.nodes.chain("over"), ["over", "base"]);
        let gone = joined.link.read(512, Buffer::for_read(512)).await;
        assert!(gone.is_err(), "it is not open");
        let refused = world.nodes.remove("base").await;
        assert!(refused.is_err(), "it is stood on");
        over.0.fails_reads.store(false, Ordering::SeqCst);
        // With the one below it it would be, too.
        reopen_as_is(&world, "over").await.unwrap();
        let read = joined.link.read(512, Buffer::for_read(512)).await;
        assert_eq!(read.unwrap()[..], [5; 512]);
        // It has a link there again: what is below may be exchanged under it.
        reopen_as_is(&world, "base").await.unwrap();
        world.put(&joined, 2, 6).await;
        joined.link.flush().await.unwrap();
        world
            .check_left(&["over".to_owned(), "base".to_owned()])
            .await;
    });
}

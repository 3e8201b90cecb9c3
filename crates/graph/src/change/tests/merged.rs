//! A long chain of nodes is read as one mapping, whatever happens to the graph meanwhile.

use std::cell::Cell;
use std::rc::Rc;

use vellum::nodes::CopyOnRead;
use vellum::qcow2::AsQcow2;
use vellum_io::lane::yield_now;
use vellum_io::spawn;

use crate::testing::World;

use super::*;

const LAYERS: usize = 8;

fn name(layer: usize) -> String {
    format!("l{layer}")
}

/// A chain in which each layer holds a sector of its own, its number and 1; only the last one
/// is writable.
async fn chain(world: &World) -> NodeUse {
    world.add(&name(0), "qcow2").await;
    let guest = world.join(&name(0));
    for layer in 0..LAYERS {
        if layer > 0 {
            world.add(&name(layer), "qcow2").await;
            let below = name(layer - 1);
            world.nodes.snapshot(&below, &name(layer)).await.unwrap();
            world.nodes.set_writable(&below, false).await.unwrap();
        }
        world
            .put(&guest, 128 * layer as u64 / 2, layer as u8 + 1)
            .await;
    }
    guest
}

/// Reads the sector that a layer has written.
async fn sector(guest: &NodeUse, layer: usize) -> u8 {
    let at = 512 * (128 * layer as u64 / 2);
    let read = guest.link.read(at, Buffer::for_read(512)).await.unwrap();
    assert!(read.iter().all(|byte| *byte == read[0]));
    read[0]
}

async fn check(guest: &NodeUse, gone: &[usize]) {
    for layer in 0..LAYERS {
        let expected = match gone.contains(&layer) {
            true => 0,
            false => layer as u8 + 1,
        };
        assert_eq!(sector(guest, layer).await, expected, "layer {layer}");
    }
}

/// Whether what the node reads below itself is in its index.
fn is_merged(world: &World, name: &str) -> bool {
    let device = world.nodes.device(name).unwrap();
    device.as_qcow2().unwrap().cache_usage().chain_index_bytes > 0
}

/// Reads all the time what no change of the graph changes.
async fn reader(guest: Rc<NodeUse>, over: Rc<Cell<bool>>) -> usize {
    let mut reads = 0;
    while !over.get() {
        for layer in [0, 1, 2, 5, 6, 7] {
            assert_eq!(sector(&guest, layer).await, layer as u8 + 1);
            reads += 1;
        }
        yield_now().await;
    }
    reads
}

async fn pass() {
    for _ in 0..50 {
        yield_now().await;
    }
}

#[test]
fn a_chain_of_nodes_is_merged_again_after_each_change() {
    lane::block_on(async {
        let world = World::new();
        let guest = Rc::new(chain(&world).await);
        let over = Rc::new(Cell::new(false));
        let readers: Vec<_> = (0..3)
            .map(|_| spawn(reader(guest.clone(), over.clone())))
            .collect();
        let nodes = &world.nodes;
        let top = name(LAYERS - 1);
        check(&guest, &[]).await;
        assert!(is_merged(&world, &top));
        for layer in [2, 5, 0] {
            for writable in [true, false] {
                let opened = nodes.set_writable(&name(layer), writable).await;
                opened.unwrap();
                check(&guest, &[]).await;
                pass().await;
            }
            assert!(is_merged(&world, &top), "after layer {layer} was reopened");
        }
        let front = CopyOnRead::fetching(nodes.device(&name(4)).unwrap());
        nodes.insert_filter(&name(4), Some(front)).await.unwrap();
        check(&guest, &[]).await;
        pass().await;
        nodes.insert_filter(&name(4), None).await.unwrap();
        check(&guest, &[]).await;
        // What is below changes as soon as that is done, and not a request later. What the fourth layer
        // holds lies in a cluster that the fifth has copied.
        let rebased = nodes.rebase(&name(5), Some(&name(2)), None).await;
        rebased.unwrap();
        check(&guest, &[3]).await;
        assert!(is_merged(&world, &top));
        for layer in [4, 3] {
            nodes.remove(&name(layer)).await.unwrap();
            check(&guest, &[3]).await;
        }
        world.add("over", "qcow2").await;
        nodes.snapshot(&top, "over").await.unwrap();
        check(&guest, &[3]).await;
        pass().await;
        over.set(true);
        for reader in readers {
            assert!(reader.await > 100);
        }
    });
}

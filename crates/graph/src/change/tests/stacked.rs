//! Nodes that stand on each other in numbers, and never in a circle.

use crate::testing::World;

use super::*;

/// Twice the work at each node would not end.
#[test]
fn the_work_for_a_stack_of_nodes_does_not_double_with_each() {
    let size_bytes = 1 << 20;
    lane::block_on(async {
        let nodes = Nodes::live();
        let bottom = format!("driver=null-co,node-name=n0,size={size_bytes},read-zeroes=on");
        add(&nodes, &bottom).await.unwrap();
        for at in 1..=48 {
            let driver = ["raw", "copy-on-read", "preallocate"][at % 3];
            let text = format!("driver={driver},node-name=n{at},file=n{}", at - 1);
            add(&nodes, &text).await.unwrap();
        }
        let top = nodes.device("n48").unwrap();
        assert!(!top.info().read_only);
        let status = top.block_status(0, size_bytes, u32::MAX).await.unwrap();
        assert_eq!(status.len_bytes, size_bytes);
        let read = top.read(0, Buffer::for_read(4096)).await.unwrap();
        assert!(read.iter().all(|&byte| byte == 0));
        drop(top);
        nodes.close().await.unwrap();
    });
}

/// A filter that stood on the node may have come to stand below the new one since that was looked at.
#[test]
fn users_are_not_switched_to_what_stands_on_them() {
    lane::block_on(async {
        let world = World::new();
        world.add("base", "qcow2").await;
        add(&world.nodes, "driver=copy-on-read,node-name=flt,file=base")
            .await
            .unwrap();
        world.add_overlay("over", "flt").await;
        let held = world.nodes.drain("base").await.unwrap();
        let refused = world.nodes.redirect_to(held, "over").await.unwrap_err();
        let expected = "Making 'over' a file child of 'flt' would create a cycle";
        assert_eq!(refused.message(), expected);
        assert_eq!(world.nodes.child_of("flt", "file").as_deref(), Some("base"));
        // Requests go on.
        let device = world.nodes.device("over").unwrap();
        device.read(0, Buffer::for_read(512)).await.unwrap();
    });
}

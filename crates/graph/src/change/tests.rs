mod durable;
mod led;
mod merged;
mod moments;
mod opening;
mod rebased;
mod reopened;
mod resized;
mod stacked;

use std::sync::Arc;

use vellum::qcow2::create::CreateOptions;
use vellum::{BlockDevice, Buffer, Error, RequestFlags, Result};
use vellum_io::lane;
use vellum_options::Options;

use crate::live::joining::NodeUse;
use crate::live::new_node::NewNode;
use crate::live::nodes::Nodes;
use crate::live::uses::{RequiredAccess, User};
use crate::node::place::Turns;
use crate::testing::make_image;

async fn add(nodes: &Nodes, text: &str) -> std::result::Result<(), String> {
    let options = Options::parse(text).unwrap();
    let added = nodes.add(options).await;
    added.map_err(|error| vellum_options::error_text(&error))
}

const IMAGE_BYTES: u64 = 1 << 20;

fn image(name: &str, size_bytes: u64) -> String {
    let options = CreateOptions::default().size_bytes(size_bytes);
    lane::block_on(make_image(name, &options));
    name.to_owned()
}

#[test]
fn a_node_may_stand_on_others() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let base = image(&path("base"), IMAGE_BYTES);
    let top = image(&path("top"), IMAGE_BYTES);
    lane::block_on(async {
        let nodes = Nodes::new();
        let file = format!("driver=file,node-name=f,filename={base}");
        add(&nodes, &file).await.unwrap();
        add(&nodes, "driver=qcow2,node-name=b,file=f")
            .await
            .unwrap();
        let below = nodes.device("b").unwrap();
        let written = below.write(0, Buffer::copy_of(&[7; 512]), RequestFlags::default());
        written.await.unwrap();
        let top = format!("driver=qcow2,node-name=t,file.filename={top},backing=b");
        add(&nodes, &top).await.unwrap();
        let device = nodes.device("t").unwrap();
        let read = device.read(0, Buffer::for_read(512)).await.unwrap();
        assert_eq!(read[..], [7; 512]);
        nodes.close().await.unwrap();
    });
}

#[test]
fn what_cannot_be_is_told_in_qemus_words() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("f").display().to_string();
    image(&file, IMAGE_BYTES);
    lane::block_on(async {
        let nodes = Nodes::new();
        let good = format!("driver=file,node-name=f,filename={file},read-only=on");
        add(&nodes, &good).await.unwrap();
        for (text, message) in [
            ("node-name=x", "Parameter 'driver' is missing"),
            (
                "driver=bad,node-name=x",
                "Parameter 'driver' does not accept value 'bad'",
            ),
            (
                "driver=file,node-name=f",
                "Duplicate nodes with node-name='f'",
            ),
            ("driver=file,node-name=0f", "Invalid node-name: '0f'"),
            (
                "driver=qcow2,node-name=d,file=g",
                "Cannot find device='g' nor node-name='g'",
            ),
            (
                "driver=qcow2,node-name=d,file=f,read-only=on,backing=g",
                "Could not open backing file: Cannot find device='g' nor node-name='g'",
            ),
            ("driver=qcow2,node-name=d,file=f", "Block node is read-only"),
        ] {
            assert_eq!(add(&nodes, text).await.unwrap_err(), message, "{text}");
        }
        let message = nodes.device("g").unwrap_err().message().to_owned();
        assert_eq!(message, "Cannot find device='' nor node-name='g'");
    });
}

async fn live_chain(folder: &tempfile::TempDir) -> Nodes {
    let path = |name: &str| folder.path().join(name).display().to_string();
    for name in ["base", "over", "other"] {
        let options = CreateOptions::default().size_bytes(IMAGE_BYTES);
        make_image(&path(name), &options).await;
    }
    let nodes = Nodes::live();
    for text in [
        format!("driver=qcow2,node-name=base,file.filename={}", path("base")),
        format!("driver=qcow2,node-name=over,file.filename={}", path("over")),
    ] {
        add(&nodes, &text).await.unwrap();
    }
    nodes
}

#[test]
fn users_of_a_node_use_the_overlay_after_a_snapshot() {
    let folder = tempfile::tempdir().unwrap();
    lane::block_on(async {
        let nodes = live_chain(&folder).await;
        let user = User::Export("e".into());
        let joined = nodes
            .join(user, "base", RequiredAccess::reading("root"))
            .unwrap();
        let write = |byte: u8| {
            let bytes = Buffer::copy_of(&[byte; 512]);
            joined.link.write(0, bytes, RequestFlags::default())
        };
        write(1).await.unwrap();
        nodes.snapshot("base", "over").await.unwrap();
        assert_eq!(nodes.used_by(joined.id).as_deref(), Some("over"));
        assert_eq!(nodes.chain("over"), ["over", "base"]);
        write(2).await.unwrap();
        for (name, byte) in [("base", 1), ("over", 2)] {
            let device = nodes.device(name).unwrap();
            let read = device.read(0, Buffer::for_read(512)).await.unwrap();
            assert_eq!(read[..], [byte; 512], "{name}");
        }
        let message = |error: Error| error.message().to_owned();
        assert_eq!(
            nodes.remove("base").await.map_err(message).unwrap_err(),
            "Node 'base' is busy: node is used as backing hd of 'over'"
        );
        nodes.leave(joined.id);
        nodes.remove("over").await.unwrap();
        nodes.remove("base").await.unwrap();
        assert!(nodes.is_empty(), "files below go with what stands on them");
    });
}

#[test]
fn a_node_becomes_writable_and_read_only_under_its_users() {
    let folder = tempfile::tempdir().unwrap();
    lane::block_on(async {
        let nodes = live_chain(&folder).await;
        let user = User::Export("e".into());
        let joined = nodes
            .join(user, "base", RequiredAccess::reading("root"))
            .unwrap();
        for writable in [false, true, false] {
            nodes.set_writable("base", writable).await.unwrap();
            let bytes = Buffer::copy_of(&[1; 512]);
            let write = joined.link.write(0, bytes, RequestFlags::default());
            assert_eq!(write.await.is_ok(), writable);
        }
        let read = joined.link.read(0, Buffer::for_read(512)).await.unwrap();
        assert_eq!(read[..], [1; 512]);
        nodes.close().await.unwrap();
    });
}

#[test]
fn what_a_failed_node_has_made_is_gone() {
    let folder = tempfile::tempdir().unwrap();
    lane::block_on(async {
        let nodes = live_chain(&folder).await;
        let path = folder.path().join("other").display().to_string();
        let before = nodes.bottom_up().len();
        let text = format!(
            "driver=qcow2,node-name=x,backing=over,file.driver=file,file.node-name=f,\
             file.filename={path},read-only=on,foo=1"
        );
        assert!(add(&nodes, &text).await.is_err());
        assert_eq!(nodes.bottom_up().len(), before);
        nodes.remove("over").await.unwrap();
        nodes.close().await.unwrap();
    });
}

#[test]
fn nodes_are_freed_when_nobody_holds_the_graph_any_more() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let base = image(&path("base"), IMAGE_BYTES);
    let top = image(&path("top"), IMAGE_BYTES);
    lane::block_on(async {
        for is_live in [true, false] {
            let nodes = match is_live {
                true => Nodes::live(),
                false => Nodes::new(),
            };
            for text in [
                format!("driver=qcow2,node-name=base,file.filename={base}"),
                format!("driver=qcow2,node-name=top,file.filename={top},backing=base"),
            ] {
                add(&nodes, &text).await.unwrap();
            }
            let state = nodes.downgrade();
            let device = Arc::downgrade(&nodes.device("top").unwrap());
            // Nobody has closed them.
            drop(nodes);
            assert_eq!(state.strong_count(), 0, "live: {is_live}");
            assert!(device.upgrade().is_none(), "live: {is_live}");
        }
    });
}

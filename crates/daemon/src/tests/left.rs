//! Nodes that were described with others are closed, and their files unlocked, once a change has taken them out.

use vellum_images::create;
use vellum_options::Options;

use super::*;

/// An image, and the options of a node for it that is called as its file.
async fn image(folder: &tempfile::TempDir, name: &str) -> String {
    let path = folder.path().join(name).display().to_string();
    let mut settings = create::settings(&path, "qcow2").unwrap();
    settings.set("size", "256k").unwrap();
    create::make(&path, "qcow2", &settings).await.unwrap();
    format!("driver=qcow2,node-name={name},file.driver=file,file.filename={path}")
}

/// Options of a child.
fn below(role: &str, options: &str) -> String {
    let options = options.split(',').map(|one| format!("{role}.{one}"));
    options.collect::<Vec<_>>().join(",")
}

async fn add(place: &Place, text: &str) {
    let options = Options::parse(text).unwrap();
    place.world.nodes.add(options).await.expect(text);
}

async fn run(place: &Place, command: &str, arguments: Value) {
    place.must(command, arguments).await;
    let next = ["BLOCK_JOB_READY", "BLOCK_JOB_COMPLETED"];
    if place.told.wait(&next).await["event"] == "BLOCK_JOB_READY" {
        place.must("job-complete", json!({"id": "j"})).await;
    }
    let ended = place.told.wait(&ENDED).await;
    assert_eq!(ended["data"].get("error"), None, "{ended}");
    while place.must("query-jobs", json!({})).await != json!([]) {
        yield_now().await;
    }
}

/// The node is gone, and nothing holds its file.
async fn check_gone(place: &Place, options: &str) {
    let options = Options::parse(options).unwrap();
    let name = options.get_text("node-name").unwrap().to_owned();
    assert!(!place.world.nodes.contains(&name), "{name} is still there");
    place
        .world
        .nodes
        .add(options)
        .await
        .expect("no lock is left");
    place.must("blockdev-del", json!({"node-name": name})).await;
}

#[test]
fn a_mirror_leaves_nothing_of_an_image_below_a_filter() {
    block_on(async {
        let folder = tempfile::tempdir().unwrap();
        let place = Place::new().await;
        let img = image(&folder, "img").await;
        let filter = format!("driver=copy-on-read,node-name=flt,{}", below("file", &img));
        add(&place, &filter).await;
        let joined = place.world.join("flt");
        let mirror = json!({"job-id": "j", "device": "img", "target": "copy", "sync": "full"});
        run(&place, "blockdev-mirror", mirror).await;
        let nodes = &place.world.nodes;
        assert_eq!(nodes.child_of("flt", "file").as_deref(), Some("copy"));
        check_gone(&place, &img).await;
        nodes.leave(joined.id);
        place
            .must("blockdev-del", json!({"node-name": "flt"}))
            .await;
        place.check_end(&["top", "mid", "base"]).await;
    });
}

#[test]
fn a_layer_that_a_change_of_the_chain_takes_out_is_closed() {
    let changes = [
        ("block-stream", json!({"job-id": "j", "device": "t"}), true),
        (
            "block-commit",
            json!({"job-id": "j", "device": "t", "top-node": "m", "base-node": "b"}),
            false,
        ),
        (
            "blockdev-reopen",
            json!({"options": [{"node-name": "t", "driver": "qcow2", "backing": null}]}),
            true,
        ),
    ];
    for (command, mut arguments, with_base) in changes {
        block_on(async {
            let folder = tempfile::tempdir().unwrap();
            let place = Place::new().await;
            let (t, m, b) = (
                image(&folder, "t").await,
                image(&folder, "m").await,
                image(&folder, "b").await,
            );
            let lower = format!("{m},{}", below("backing", &b));
            add(&place, &format!("{t},{}", below("backing", &lower))).await;
            match command {
                "blockdev-reopen" => {
                    let file = json!({"driver": "file", "filename": folder.path().join("t")});
                    arguments["options"][0]["file"] = file;
                    place.must(command, arguments).await;
                }
                _ => run(&place, command, arguments).await,
            }
            check_gone(&place, &m).await;
            match with_base {
                true => check_gone(&place, &b).await,
                false => assert_eq!(place.world.nodes.chain("t"), ["t", "b"]),
            }
            place.must("blockdev-del", json!({"node-name": "t"})).await;
            place.check_end(&["top", "mid", "base"]).await;
        });
    }
}

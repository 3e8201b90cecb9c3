//! Nodes that are open and not shown yet.

use super::*;

/// An image over `base`.
fn over(base: String) -> CreateOptions {
    CreateOptions::default()
        .size_bytes(IMAGE_BYTES)
        .backing_file(Some(base))
        .backing_format(Some("qcow2".to_owned()))
}

/// A folder with the images `base`, and `one` and `two` over it.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let base = image(&path("base"), IMAGE_BYTES);
    for name in ["one", "two"] {
        lane::block_on(make_image(&path(name), &over(base.clone())));
    }
    folder
}

fn options(folder: &tempfile::TempDir, name: &str) -> Options {
    let path = folder.path().join(name);
    let path = path.display();
    let text = format!(
        "driver=qcow2,node-name={name},file.driver=file,file.filename={path},file.node-name={name}-file"
    );
    Options::parse(&text).unwrap()
}

async fn open(nodes: &Nodes, folder: &tempfile::TempDir, name: &str) -> Result<NewNode> {
    nodes.open_new(options(folder, name), Turns::Own).await
}

fn listed(nodes: &Nodes) -> Vec<String> {
    let mut names = nodes.bottom_up();
    names.retain(|name| !nodes.is_made_up(name));
    names.sort_unstable();
    names
}

#[test]
fn nobody_finds_a_node_before_it_is_shown() {
    let folder = folder();
    lane::block_on(async {
        let nodes = Nodes::live();
        let new = open(&nodes, &folder, "one").await.unwrap();
        assert!(nodes.is_empty() && nodes.uses().is_empty(), "{nodes:?}");
        assert!(nodes.descriptions(None).is_empty());
        for name in ["one", "one-file"] {
            assert!(!nodes.contains(name));
            let text = format!("driver=null-co,node-name={name}");
            let taken = add(&nodes, &text).await.unwrap_err();
            assert_eq!(taken, format!("Duplicate nodes with node-name='{name}'"));
            let below = format!("driver=raw,node-name=over,file={name}");
            assert!(add(&nodes, &below).await.is_err());
        }
        new.show();
        assert_eq!(listed(&nodes), ["one", "one-file"]);
        nodes.remove("one").await.unwrap();
        assert!(nodes.is_empty(), "{nodes:?}");
    });
}

#[test]
fn what_is_given_up_is_gone() {
    let folder = folder();
    lane::block_on(async {
        let nodes = Nodes::live();
        for is_dropped in [true, false] {
            let new = open(&nodes, &folder, "one").await.unwrap();
            match is_dropped {
                true => drop(new),
                false => new.discard().await.unwrap(),
            }
            nodes.close_abandoned().await;
            assert!(nodes.is_empty(), "{nodes:?}");
        }
        // Names and locks are free again.
        let new = open(&nodes, &folder, "one").await.unwrap();
        new.show();
        nodes.close().await.unwrap();
    });
}

#[test]
fn a_shared_backing_file_goes_to_an_image_that_is_being_opened() {
    let folder = folder();
    for is_shown in [true, false] {
        lane::block_on(async {
            let nodes = Nodes::live();
            open(&nodes, &folder, "one").await.unwrap().show();
            let base = nodes.backing_of("one").unwrap();
            let new = open(&nodes, &folder, "two").await.unwrap();
            nodes.remove("one").await.unwrap();
            assert!(nodes.contains(&base));
            if is_shown {
                new.show();
                assert_eq!(nodes.backing_of("two"), Some(base));
                nodes.remove("two").await.unwrap();
            } else {
                new.discard().await.unwrap();
            }
            assert!(nodes.is_empty(), "{nodes:?}");
        });
    }
}

#[test]
fn what_is_opened_at_once_is_shared_by_those_who_come_later() {
    let folder = folder();
    lane::block_on(async {
        let nodes = Nodes::live();
        let one = open(&nodes, &folder, "one").await.unwrap();
        open(&nodes, &folder, "two").await.unwrap().show();
        let base = nodes.backing_of("two");
        one.show();
        assert_ne!(nodes.backing_of("one"), base);
        nodes.remove("one").await.unwrap();
        open(&nodes, &folder, "one").await.unwrap().show();
        assert_eq!(nodes.backing_of("one"), base);
        nodes.close().await.unwrap();
    });
}

#[test]
fn what_an_opening_refers_to_is_not_opened_anew_under_it() {
    let folder = folder();
    lane::block_on(async {
        let nodes = Nodes::live();
        open(&nodes, &folder, "base").await.unwrap().show();
        let over = Options::parse("driver=blkdebug,node-name=over,image=base").unwrap();
        let new = nodes.open_new(over, Turns::Own).await.unwrap();
        let busy = nodes.set_writable("base", false).await.unwrap_err();
        let expected = "Node 'base' is busy: 'over', which refers to it, is being opened";
        assert_eq!(busy.message(), expected);
        assert!(nodes.check_removal("base").is_err());
        new.discard().await.unwrap();
        nodes.set_writable("base", false).await.unwrap();
        nodes.remove("base").await.unwrap();
    });
}

#[test]
fn references_are_taken_in_a_turn() {
    let folder = folder();
    lane::block_on(async {
        let nodes = Nodes::live();
        open(&nodes, &folder, "base").await.unwrap().show();
        let turn = nodes.take_turn().await;
        let over = Options::parse("driver=raw,node-name=over,file=base").unwrap();
        let opening = vellum_io::spawn({
            let nodes = nodes.clone();
            async move { nodes.open_new(over, Turns::Own).await }
        });
        lane::sleep(std::time::Duration::from_millis(20)).await;
        assert!(!nodes.is_used_by("base", |_| true));
        drop(turn);
        let new = opening.await.unwrap();
        assert!(nodes.is_used_by("base", |_| true));
        new.show();
        nodes.close().await.unwrap();
    });
}

/// Before names were reserved, what was opened below such a node was recorded as another node's, and the
/// opening could not be taken back: it never ended.
#[test]
fn a_name_below_the_root_that_is_taken_is_refused() {
    let folder = folder();
    let path = |name: &str| folder.path().join(name).display().to_string();
    lane::block_on(async {
        let nodes = Nodes::live();
        open(&nodes, &folder, "base").await.unwrap().show();
        let (one, two) = (path("one"), path("two"));
        let below = format!("driver=qcow2,node-name=new,file.filename={one},backing.driver=qcow2");
        let taken = [
            format!("{below},backing.node-name=base,backing.file.filename={two}"),
            format!("{below},backing.node-name=new,backing.file.filename={two}"),
            format!("{below},backing.node-name=base-file,backing.file.filename={two}"),
            format!(
                "driver=raw,node-name=new,file.driver=raw,file.node-name=base,file.file.driver=file,file.file.filename={two}"
            ),
            format!(
                "driver=raw,node-name=new,file.driver=raw,file.node-name=x,file.file.driver=file,file.file.filename={two},file.file.node-name=x"
            ),
        ];
        for text in &taken {
            let refused = add(&nodes, text).await.unwrap_err();
            assert!(
                refused.contains("Duplicate nodes with node-name="),
                "{text}: {refused}"
            );
            nodes.close_abandoned().await;
            assert_eq!(listed(&nodes), ["base", "base-file"], "{text}");
        }
        nodes.remove("base").await.unwrap();
        assert!(nodes.is_empty() && nodes.uses().is_empty(), "{nodes:?}");
        // Nothing is left that keeps names or files.
        for name in ["one", "two"] {
            open(&nodes, &folder, name).await.unwrap().show();
        }
        nodes.close().await.unwrap();
    });
}

/// Only an image's header says that its backing file is called so: nothing knows of it before.
#[test]
fn a_name_in_a_header_that_is_taken_is_refused() {
    let folder = folder();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let base = path("base");
    let json = format!(
        "json:{{\"driver\":\"qcow2\",\"node-name\":\"named\",\"file\":{{\"driver\":\"file\",\"filename\":\"{base}\"}}}}"
    );
    lane::block_on(async {
        make_image(&path("over"), &over(json)).await;
        let nodes = Nodes::live();
        add(&nodes, "driver=null-co,node-name=named").await.unwrap();
        let refused = open(&nodes, &folder, "over").await.unwrap_err();
        let refused = refused.to_string();
        assert!(refused.contains("Duplicate nodes"), "{refused}");
        nodes.remove("named").await.unwrap();
        open(&nodes, &folder, "over").await.unwrap().show();
        assert_eq!(listed(&nodes), ["named", "over", "over-file"]);
        nodes.close().await.unwrap();
    });
}

//! What nodes keep of the time since they were made, while others below them are opened anew.

use std::path::Path;

use super::*;

const SIZE_BYTES: u64 = 4 << 20;

/// A disk of ones, which is used through `cbw`, and `snap`, which shows what it was.
async fn backed_up(folder: &Path) -> Nodes {
    let nodes = Nodes::live();
    for (name, byte) in [("src", 1), ("tgt", 0)] {
        let path = folder.join(name);
        std::fs::write(&path, vec![byte; SIZE_BYTES as usize]).unwrap();
        let path = path.display();
        add(
            &nodes,
            &format!("driver=file,node-name={name}-file,filename={path}"),
        )
        .await
        .unwrap();
        add(
            &nodes,
            &format!("driver=raw,node-name={name},file={name}-file"),
        )
        .await
        .unwrap();
    }
    nodes
}

async fn keep(nodes: &Nodes) {
    add(
        nodes,
        "driver=copy-before-write,node-name=cbw,file=src,target=tgt",
    )
    .await
    .unwrap();
    add(nodes, "driver=snapshot-access,node-name=snap,file=cbw")
        .await
        .unwrap();
}

async fn reopen(nodes: &Nodes, text: &str) -> std::result::Result<(), String> {
    let done = nodes.reopen(vec![Options::parse(text).unwrap()]).await;
    done.map_err(|error| vellum_options::error_text(&error))
}

async fn write(nodes: &Nodes, name: &str, at: u64, byte: u8) {
    let bytes = Buffer::copy_of(&[byte; 65536]);
    let device = nodes.device(name).unwrap();
    device
        .write(at, bytes, RequestFlags::default())
        .await
        .unwrap();
}

async fn byte_at(nodes: &Nodes, name: &str, at: u64) -> Result<u8> {
    let device = nodes.device(name)?;
    let read = device.read(at, Buffer::for_read(65536)).await?;
    assert!(read.iter().all(|byte| *byte == read[0]), "{name} at {at}");
    Ok(read[0])
}

#[test]
fn a_backup_keeps_its_moment_while_nodes_below_it_are_opened_anew() {
    let folder = tempfile::tempdir().unwrap();
    let overlay = image(&folder.path().join("over").display().to_string(), 4 << 20);
    lane::block_on(async {
        let nodes = backed_up(folder.path()).await;
        keep(&nodes).await;
        write(&nodes, "cbw", 0, 9).await;
        reopen(
            &nodes,
            "driver=raw,node-name=src,file=src-file,discard=unmap",
        )
        .await
        .unwrap();
        write(&nodes, "cbw", 1 << 20, 8).await;
        reopen(
            &nodes,
            "driver=raw,node-name=tgt,file=tgt-file,discard=unmap",
        )
        .await
        .unwrap();
        write(&nodes, "cbw", 2 << 20, 7).await;
        let text = format!("driver=qcow2,node-name=over,file.driver=file,file.filename={overlay}");
        add(&nodes, &format!("{text},backing=")).await.unwrap();
        nodes.snapshot("src", "over").await.unwrap();
        write(&nodes, "cbw", 3 << 20, 6).await;
        for (at, now) in [(0, 9), (1, 8), (2, 7), (3, 6)] {
            let at = at << 20;
            assert_eq!(byte_at(&nodes, "snap", at).await.unwrap(), 1, "at {at}");
            assert_eq!(byte_at(&nodes, "cbw", at).await.unwrap(), now, "at {at}");
        }
        nodes.close().await.unwrap();
    });
}

#[test]
fn what_was_given_up_stays_so_when_nodes_are_opened_anew() {
    let folder = tempfile::tempdir().unwrap();
    lane::block_on(async {
        let nodes = backed_up(folder.path()).await;
        keep(&nodes).await;
        // What lies there is given up, of a whole grain.
        let snapshot = nodes.device("snap").unwrap();
        snapshot.discard(0, 65536).await.unwrap();
        drop(snapshot);
        reopen(
            &nodes,
            "driver=raw,node-name=src,file=src-file,discard=unmap",
        )
        .await
        .unwrap();
        byte_at(&nodes, "snap", 0).await.unwrap_err();
        assert_eq!(byte_at(&nodes, "snap", 65536).await.unwrap(), 1);
        nodes.close().await.unwrap();
    });
}

#[test]
fn the_moment_of_a_filter_ends_with_the_process() {
    let folder = tempfile::tempdir().unwrap();
    lane::block_on(async {
        let nodes = backed_up(folder.path()).await;
        for text in [
            "driver=copy-before-write,node-name=cbw,file=src,target=tgt",
            "driver=snapshot-access,node-name=snap,file=cbw",
        ] {
            let options = Options::parse(text).unwrap();
            nodes.open_restored(options).await.unwrap().show();
        }
        write(&nodes, "cbw", 0, 9).await;
        for round in ["as it came back", "opened anew"] {
            let error = byte_at(&nodes, "snap", 1 << 20).await.unwrap_err();
            assert_eq!(error.errno(), 13, "{round}");
            reopen(&nodes, "driver=raw,node-name=src,file=src-file")
                .await
                .unwrap();
        }
        assert_eq!(byte_at(&nodes, "cbw", 0).await.unwrap(), 9);
        assert_eq!(
            byte_at(&nodes, "tgt", 0).await.unwrap(),
            0,
            "nothing is copied"
        );
        nodes.close().await.unwrap();
    });
}

#[test]
fn a_log_goes_on_when_the_node_below_is_opened_anew() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    std::fs::write(&log, []).unwrap();
    let entries = || u64::from_le_bytes(std::fs::read(&log).unwrap()[16..24].try_into().unwrap());
    lane::block_on(async {
        let nodes = backed_up(folder.path()).await;
        let log = log.display();
        add(
            &nodes,
            &format!("driver=file,node-name=log-file,filename={log}"),
        )
        .await
        .unwrap();
        let text = "driver=blklogwrites,node-name=logged,log-sector-size=4096";
        add(&nodes, &format!("{text},file=src-file,log=log-file"))
            .await
            .unwrap();
        write(&nodes, "logged", 0, 2).await;
        nodes.device("logged").unwrap().flush().await.unwrap();
        assert_eq!(entries(), 2);
        let path = folder.path().join("src");
        let path = path.display();
        let text = format!("driver=file,node-name=src-file,filename={path},discard=unmap");
        reopen(&nodes, &text).await.unwrap();
        let before = entries();
        write(&nodes, "logged", 65536, 3).await;
        nodes.device("logged").unwrap().flush().await.unwrap();
        assert_eq!((before >= 2, entries()), (true, before + 2));
        nodes.close().await.unwrap();
    });
}

/// So it is with a node that a state file has: what the process before has logged still counts.
#[test]
fn a_log_goes_on_when_its_node_comes_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    std::fs::write(path("disk"), vec![0; 1 << 20]).unwrap();
    std::fs::write(path("log"), []).unwrap();
    let entries = || {
        let log = std::fs::read(path("log")).unwrap();
        u64::from_le_bytes(log[16..24].try_into().unwrap())
    };
    let text = format!(
        "driver=blklogwrites,node-name=logged,file.driver=file,file.filename={},\
         log.driver=file,log.filename={}",
        path("disk"),
        path("log")
    );
    let options = |more: &str| Options::parse(&format!("{text}{more}")).unwrap();
    lane::block_on(async {
        let mut last = 0;
        for (more, restored) in [
            ("", false),
            ("", true),
            (",read-only=on", false),
            ("", false),
        ] {
            let nodes = Nodes::live();
            match restored {
                true => nodes.open_restored(options(more)).await.unwrap().show(),
                false => nodes.add(options(more)).await.unwrap(),
            }
            let is_kept = restored || !more.is_empty();
            assert_eq!(entries(), if is_kept { last } else { 0 });
            if more.is_empty() {
                write(&nodes, "logged", 0, 2).await;
                nodes.device("logged").unwrap().flush().await.unwrap();
            }
            nodes.close().await.unwrap();
            assert_eq!(entries() == last, !more.is_empty(), "{restored}");
            last = entries();
        }
    });
}

#[test]
fn what_only_one_node_knows_is_not_begun_a_second_time() {
    let folder = tempfile::tempdir().unwrap();
    lane::block_on(async {
        let nodes = backed_up(folder.path()).await;
        let below = "file.driver=copy-before-write,file.file=src,file.target=tgt";
        add(&nodes, &format!("driver=raw,node-name=top,{below}"))
            .await
            .unwrap();
        let text = format!("driver=raw,node-name=top,discard=unmap,{below}");
        let refused = reopen(&nodes, &text).await.unwrap_err();
        assert!(refused.contains("has no name to be kept by"), "{refused}");
        keep(&nodes).await;
        let again = "driver=copy-before-write,node-name=cbw,file=src,target=tgt";
        let refused = reopen(&nodes, again).await.unwrap_err();
        assert!(
            refused.contains("does not support reopening files"),
            "{refused}"
        );
        nodes.close().await.unwrap();
    });
}

//! Nodes that are opened anew while others read through them.

use std::cell::Cell;
use std::collections::VecDeque;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use vellum::nodes::Link;
use vellum::qcow2::create::{CreateOptions, create};
use vellum::{BlockDevice, Buffer, RequestFlags};
use vellum_graph::Nodes;
use vellum_graph::live::{RequiredAccess, User};
use vellum_io::{lane, spawn};
use vellum_options::Options;
use vellum_storage::file::{Create, FileOptions, FileStorage};

const SIZE_BYTES: usize = 1 << 20;
/// How often the node below is made writable or read-only.
const TIMES: usize = 40;
/// Requests begin one after another, whether those before have ended or not: some just while
/// the node is away.
const PAUSE: Duration = Duration::from_micros(30);
const MOST_AT_A_TIME: usize = 300;

async fn read_all_the_time(link: Arc<Link>, over: Rc<Cell<bool>>) -> u64 {
    let (mut begun, mut running) = (0, VecDeque::new());
    while !over.get() {
        let at = begun % 16 * 65536;
        let link = link.clone();
        running.push_back(spawn(async move {
            let data = link.read(at, Buffer::for_read(65536)).await;
            let data = data.expect("it is there");
            assert!(data.iter().all(|byte| *byte == 7), "a read at {at}");
            // What is partly written is filled up from below, for good.
            let write = Buffer::copy_of(&[7]);
            let written = link.write(at + begun % 65536, write, RequestFlags::default());
            written.await.expect("written");
        }));
        begun += 1;
        lane::sleep(PAUSE).await;
        if running.len() > MOST_AT_A_TIME
            && let Some(first) = running.pop_front()
        {
            first.await;
        }
    }
    for one in running {
        one.await;
    }
    begun
}

async fn image(path: &Path) -> String {
    let name = path.display().to_string();
    let new = FileOptions::default().create(Create::Truncate);
    let file = FileStorage::open(path, &new).expect("a file");
    let options = CreateOptions::default().size_bytes(SIZE_BYTES as u64);
    create(file, None, &options).await.expect("an image");
    name
}

#[test]
fn what_lies_below_never_reads_as_zeroes_meanwhile() {
    let folder = tempfile::tempdir().expect("a folder");
    lane::block_on(async {
        let base = image(&folder.path().join("base")).await;
        let top = image(&folder.path().join("top")).await;
        let nodes = Nodes::live();
        for text in [
            format!("driver=qcow2,node-name=b,file.driver=file,file.filename={base}"),
            format!("driver=qcow2,node-name=t,file.driver=file,file.filename={top},backing=b"),
        ] {
            let options = Options::parse(&text).expect("options");
            if text.contains("node-name=t") {
                let below = nodes.device("b").expect("a device");
                let data = Buffer::copy_of(&vec![7; SIZE_BYTES]);
                let written = below.write(0, data, RequestFlags::default());
                written.await.expect("written");
            }
            nodes.add(options).await.expect("a node");
        }
        let user = User::Export("e".to_owned());
        let joined = nodes.join(user, "t", RequiredAccess::reading("root"));
        let link = joined.expect("a user").link;
        let over = Rc::new(Cell::new(false));
        let reads = spawn(read_all_the_time(link, over.clone()));
        for time in 0..TIMES {
            nodes
                .set_writable("b", time % 2 == 1)
                .await
                .expect("opened anew");
        }
        over.set(true);
        assert!(reads.await > 0);
        nodes.close().await.expect("closed");
    });
}

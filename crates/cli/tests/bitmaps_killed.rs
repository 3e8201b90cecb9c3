//! A server that is killed while a client writes: the image's bitmap must call dirty
//! whatever has changed, and everybody must be able to use the image afterwards.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use vellum::gate::DenyAll;
use vellum::qcow2::{OpenOptions, Qcow2};
use vellum::{BlockDevice, Buffer, Storage};
use vellum_io::lane;
use vellum_storage::{FileOptions, FileStorage};

const BLOCK_BYTES: u64 = 4096;
const SIZE_BYTES: u64 = 64 << 20;

fn run(program: &Path, folder: &Path, words: &[&str]) -> Output {
    let output = Command::new(program)
        .args(words)
        .current_dir(folder)
        .output();
    output.unwrap_or_else(|error| panic!("{}: {error}; run `cargo xtask setup`", program.display()))
}

fn qemu_img(folder: &Path, words: &[&str]) -> String {
    let done = run(Path::new("qemu-img"), folder, words);
    assert!(done.status.success(), "{words:?}: {done:?}");
    String::from_utf8_lossy(&done.stdout).into_owned()
}

/// Serves `image` over a socket, ready for clients.
fn serve(folder: &Path) -> Child {
    let server = Command::new(folder.join("qemu-nbd"))
        .arg("-k")
        .arg(folder.join("socket"))
        .args(["-f", "qcow2", "image"])
        .current_dir(folder)
        .stderr(Stdio::null())
        .spawn()
        .expect("a server");
    let deadline = Instant::now() + Duration::from_secs(30);
    while !folder.join("socket").exists() {
        assert!(Instant::now() < deadline, "no socket in time");
        std::thread::sleep(Duration::from_millis(5));
    }
    server
}

/// A client that writes blocks all over the disk, each round somewhere else.
fn client(folder: &Path, round: u64) -> Child {
    let uri = format!("nbd+unix:///?socket={}/socket", folder.display());
    let mut command = Command::new("qemu-io");
    command.args(["-f", "raw"]);
    for number in 0..1200 {
        let block = (number * 7919 + round * 31) % (SIZE_BYTES / BLOCK_BYTES);
        let words = format!("write -P {} {} 4k", round + 1, block * BLOCK_BYTES);
        command.args(["-c", &words]);
        if number % 150 == 149 {
            command.args(["-c", "flush"]);
        }
    }
    let piped = command
        .arg(uri)
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    piped.spawn().expect("qemu-io; run `cargo xtask setup`")
}

/// The blocks that the client was told are written. Once there are `enough`, the server
/// is killed.
fn kill_after(enough: usize, client: &mut Child, server: &mut Child) -> Vec<usize> {
    let output = client.stdout.take().expect("a pipe");
    let mut written = Vec::new();
    for line in BufReader::new(output).lines() {
        let line = line.expect("text");
        if let Some(offset) = line.strip_prefix("wrote 4096/4096 bytes at offset ") {
            let offset: u64 = offset.parse().expect("a number");
            written.push((offset / BLOCK_BYTES) as usize);
        }
        if written.len() == enough {
            server.kill().expect("killed");
        }
    }
    assert!(written.len() >= enough, "{} writes", written.len());
    server.wait().expect("ended");
    client.wait().expect("ended");
    written
}

async fn open(path: &Path, read_only: bool) -> Arc<Qcow2> {
    let options = FileOptions::default().read_only(read_only);
    let file: Arc<dyn Storage> = FileStorage::open_patiently(path, &options)
        .await
        .expect("the image");
    let options = OpenOptions::default().read_only(read_only);
    let opened = Qcow2::open(file, Arc::new(DenyAll), options).await;
    opened.expect("an image that opens")
}

/// Expects every block to be dirty that was `written`, or differs from `before` (the
/// device before this round).
async fn expect_dirty(image: &Qcow2, before: &mut Vec<u8>, written: &[usize]) {
    let bitmap = image.bitmaps().read("kept").await;
    let bitmap = bitmap.expect("a bitmap that can be trusted");
    let mut dirty = vec![false; (SIZE_BYTES / BLOCK_BYTES) as usize];
    for range in bitmap.ranges() {
        let end = range.end.div_ceil(BLOCK_BYTES) as usize;
        dirty[(range.start / BLOCK_BYTES) as usize..end].fill(true);
    }
    let now = image.read(0, Buffer::zeroed(SIZE_BYTES as usize)).await;
    let now = now.expect("read");
    let size = BLOCK_BYTES as usize;
    for block in written {
        assert!(dirty[*block], "block {block} was written, and is clean");
    }
    for (block, dirty) in dirty.into_iter().enumerate() {
        let bytes = block * size..(block + 1) * size;
        let changed = now[bytes.clone()] != before[bytes];
        assert!(dirty || !changed, "block {block} has changed, and is clean");
    }
    *before = now.to_vec();
}

#[test]
fn a_bitmap_survives_the_death_of_its_server() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_vellum"), dir.join("qemu-nbd")).expect("a link");
    qemu_img(dir, &["create", "-q", "-f", "qcow2", "image", "64M"]);
    let mut before = vec![0; SIZE_BYTES as usize];
    for round in 0..4 {
        // Made anew each time: what the last round did is not to be dirty.
        if round > 0 {
            qemu_img(dir, &["bitmap", "--remove", "image", "kept"]);
        }
        qemu_img(dir, &["bitmap", "--add", "-g", "4k", "image", "kept"]);
        let mut server = serve(dir);
        let mut client = client(dir, round);
        let written = kill_after(100 + 200 * round as usize, &mut client, &mut server);
        std::fs::remove_file(dir.join("socket")).expect("left behind");

        let seen = qemu_img(dir, &["info", "image"]);
        assert!(seen.contains("in-use"), "{seen}");
        let checked = run(Path::new("qemu-img"), dir, &["check", "image"]);
        let leaks_at_worst = matches!(checked.status.code(), Some(0 | 3));
        assert!(leaks_at_worst, "{checked:?}");
        lane::block_on(async {
            let image = open(&dir.join("image"), true).await;
            expect_dirty(&image, &mut before, &written).await;
            image.close().await.expect("closed");
            // Its locks end with it.
            drop(image);
            // Opened for writing and closed, the image is as it should be for all.
            let image = open(&dir.join("image"), false).await;
            image.close().await.expect("closed");
        });
        lane::finish();
        let healed = qemu_img(dir, &["info", "image"]);
        assert!(!healed.contains("in-use"), "{healed}");
    }
}

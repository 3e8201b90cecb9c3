//! A folder with an image, and programs that are killed in it.

use std::io::{BufRead, BufReader, Write};
use std::ops::Deref;
use std::process::Stdio;

use vellum_testing::{Folder, Running, Said, Words, until};

pub const VELLUM: &str = env!("CARGO_BIN_EXE_vellum");
pub const BLOCK_BYTES: u64 = 4096;
/// A log is ended when nothing is flushed for a second, so a machine that stands still for
/// so long leaves none to find.
pub const ATTEMPTS: usize = 10;

pub struct Place(Folder);

impl Deref for Place {
    type Target = Folder;

    fn deref(&self) -> &Folder {
        &self.0
    }
}

impl Place {
    pub fn new() -> Place {
        let place = Place(Folder::new(VELLUM));
        place.vellum("create -q -f qcow2 disk.qcow2 64M");
        place
    }

    #[track_caller]
    pub fn vellum(&self, words: impl Words) -> Said {
        self.run("vellum", words).expect(0)
    }

    /// Expects nothing beside the image.
    pub fn expect_one_file(&self) {
        assert_eq!(self.names(), ["disk.qcow2"]);
    }

    /// Runs commands of `vellum io`.
    pub fn io(&self, words: &[&str], commands: &[String]) -> Said {
        let commands = commands.iter().flat_map(|command| ["-c", command]);
        let words = ["io"]
            .into_iter()
            .chain(commands)
            .chain(words.iter().copied());
        self.run(VELLUM, &words.collect::<Vec<_>>())
    }

    /// Whether the image needs its log, as a program that does not know it is told.
    pub fn has_live_log(&self) -> bool {
        let told = self.run("qemu-img", "info disk.qcow2");
        match told.code {
            Some(0) => false,
            _ => {
                let refusal = "Unsupported qcow2 feature(s): Vellum's write log";
                assert!(told.err.contains(refusal), "{told:?}");
                true
            }
        }
    }

    /// Expects the blocks in the image, byte by byte, for `vellum io` and these words.
    #[track_caller]
    pub fn expect_blocks(&self, words: &[&str], blocks: &[(u64, u8)]) {
        let reads = blocks.iter().map(|(block, byte)| {
            let offset = block * BLOCK_BYTES;
            format!("read -q -P {byte} {offset} {BLOCK_BYTES}")
        });
        let reads: Vec<String> = reads.collect();
        let ran = self.io(words, &reads);
        assert_eq!((ran.code, &*ran.out), (Some(0), ""), "{ran:?}");
    }

    /// Expects everybody to find the blocks in an image whose log holds some.
    #[track_caller]
    pub fn expect_recovery(&self, blocks: &[(u64, u8)]) {
        assert!(self.has_live_log());
        self.expect_blocks(&["-r", "disk.qcow2"], blocks);
        assert!(self.has_live_log(), "reading changes nothing");
        self.expect_blocks(&["disk.qcow2"], blocks);
        self.expect_no_trace(blocks);
    }

    /// Expects an image that QEMU's tools take for one of theirs, with these blocks.
    #[track_caller]
    pub fn expect_no_trace(&self, blocks: &[(u64, u8)]) {
        assert!(!self.has_live_log());
        // Clusters may be lost: space that was counted for writes which did not come.
        let checked = self.run("qemu-img", "check disk.qcow2");
        assert!(matches!(checked.code, Some(0 | 3)), "{checked:?}");
        for (block, byte) in blocks {
            let read = format!("read -P {byte} {} {BLOCK_BYTES}", block * BLOCK_BYTES);
            self.0.io("-r disk.qcow2", &[read]);
        }
    }

    /// Kills `vellum io` after each of the blocks was written and flushed.
    pub fn kill_io(&self, options: &str, blocks: &[(u64, u8)]) {
        let options = format!("driver=qcow2,file.filename=disk.qcow2,{options}");
        let mut io = self.command(VELLUM, &["io", "--image-opts", &options]);
        let mut io = io
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it runs");
        let mut input = io.stdin.take().expect("a pipe");
        for (block, byte) in blocks {
            let offset = block * BLOCK_BYTES;
            writeln!(input, "write -q -P {byte} {offset} {BLOCK_BYTES}\nflush").expect("a pipe");
        }
        writeln!(input, "read 0 1").expect("a pipe");
        let mut lines = BufReader::new(io.stdout.take().expect("a pipe")).lines();
        let read = lines.find(|line| line.as_ref().is_ok_and(|line| line.contains("read 1/1")));
        assert!(read.is_some(), "it does not answer");
        io.kill().expect("killed");
        io.wait().expect("ended");
    }

    /// Does something until it leaves an image whose log holds writes.
    #[track_caller]
    pub fn until_live(&self, mut crash: impl FnMut()) {
        let before = self.read("disk.qcow2");
        let lives = (0..ATTEMPTS).any(|attempt| {
            if attempt > 0 {
                // What is in its place already needs no log.
                self.write("disk.qcow2", &before);
                for log in ["disk.qcow2.vlog", "a.log"] {
                    drop(std::fs::remove_file(self.path(log)));
                }
            }
            crash();
            self.has_live_log()
        });
        assert!(lives, "no log holds anything");
    }

    /// A client that writes and flushes through a socket; the server is killed in the middle.
    /// The blocks that a flush made durable.
    pub fn kill_server(&self, mut server: Running) -> Vec<(u64, u8)> {
        until("a socket", || self.has("sock"));
        let blocks: Vec<(u64, u8)> = (0..400).map(|n| (n * 7919 % 16384, n as u8 | 1)).collect();
        let mut client = self.command("qemu-io", "-f raw");
        for (block, byte) in &blocks {
            let write = format!("write -P {byte} {} {BLOCK_BYTES}", block * BLOCK_BYTES);
            client.args(["-c", &write, "-c", "flush"]);
        }
        client.arg("nbd+unix:///disk?socket=sock");
        let mut client = client
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("it runs");
        let lines = BufReader::new(client.stdout.take().expect("a pipe")).lines();
        let mut written = 0;
        for line in lines {
            written += usize::from(line.expect("text").starts_with("wrote 4096/4096"));
            if written == 100 {
                server.child.kill().expect("killed");
            }
        }
        server.wait();
        client.wait().expect("ended");
        self.remove("sock");
        assert!((100..400).contains(&written), "{written} writes");
        // The last one that was told may not have been flushed.
        blocks[..written - 1].to_vec()
    }
}

//! A folder with images and a file to mount over, and the server of that.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// The switch of FUSE over io_uring in the kernel.
const SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";
/// What an unhurried machine may take.
const PATIENCE: Duration = Duration::from_secs(60);

pub struct Place {
    folder: TempDir,
}

/// A server, which is killed if a test fails.
pub struct Server {
    child: Child,
    mountpoint: PathBuf,
}

impl Place {
    /// A folder with the empty image `image` of `size`, and an empty file `disk`.
    pub fn new(size: &str) -> Place {
        assert!(
            Path::new("/dev/fuse").exists(),
            "these tests need /dev/fuse: `modprobe fuse`, or pass the device into the container"
        );
        let folder = tempfile::tempdir().expect("a folder");
        let place = Place { folder };
        place.must("qemu-img", &["create", "-q", "-f", "qcow2", "image", size]);
        place.touch("disk");
        place
    }

    /// As [`Place::new`], with an image of that format.
    pub fn of_format(format: &str, size: &str) -> Place {
        let place = Place::new(size);
        place.must("qemu-img", &["create", "-q", "-f", format, "image", size]);
        place
    }

    pub fn touch(&self, name: &str) {
        File::create(self.path(name)).expect("a file");
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A path as a word of a command line.
    pub fn word(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    pub fn run(&self, program: &str, words: &[&str]) -> Output {
        let mut command = Command::new(program);
        command.current_dir(self.folder.path()).args(words);
        command
            .output()
            .unwrap_or_else(|error| panic!("{program}, of `cargo xtask setup`: {error}"))
    }

    pub fn must(&self, program: &str, words: &[&str]) -> String {
        let output = self.run(program, words);
        assert!(output.status.success(), "{program} {words:?}: {output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// The program in the background, from when `disk` is mounted.
    pub fn start(&self, words: &[&str]) -> Server {
        self.start_at("disk", words)
    }

    /// The program in the background, from when `mountpoint` is mounted.
    pub fn start_at(&self, mountpoint: &str, words: &[&str]) -> Server {
        // The kernel knows the attributes of a dead mount for a second more.
        wait_for("the end of the last mount", || !self.is_served(mountpoint));
        let mut command = Command::new(env!("CARGO_BIN_EXE_vellum"));
        command.current_dir(self.folder.path()).args(words);
        let child = command.spawn().expect("the program runs");
        let mut server = Server {
            child,
            mountpoint: self.path(mountpoint),
        };
        wait_for("the mount", || {
            let ended = server.child.try_wait().expect("a child");
            assert!(ended.is_none(), "{words:?}: {ended:?}");
            self.is_served(mountpoint)
        });
        server
    }

    /// The program in the background, whatever it does.
    pub fn start_bare(&self, words: &[&str]) -> Server {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vellum"));
        command.current_dir(self.folder.path()).args(words);
        Server {
            child: command.spawn().expect("the program runs"),
            mountpoint: self.path("disk"),
        }
    }

    /// `vellum mount` of `image` over `disk`.
    pub fn mount(&self, options: &[&str]) -> Server {
        let words = [&["mount", "-f", "qcow2"], options, &["image", "disk"]].concat();
        self.start(&words)
    }

    /// Whether a file is mounted over and answers.
    pub fn is_served(&self, name: &str) -> bool {
        let path = self.path(name);
        is_mounted(&path) && fs::metadata(&path).is_ok()
    }

    /// The image is sound for QEMU, and holds `expected`.
    pub fn check_image(&self, expected: &[u8]) {
        self.must("qemu-img", &["check", "-q", "image"]);
        self.must(
            "qemu-img",
            &["convert", "-f", "qcow2", "-O", "raw", "image", "raw"],
        );
        let raw = fs::read(self.path("raw")).expect("the raw image");
        assert_eq!(raw.len(), expected.len());
        let differs = raw.iter().zip(expected).position(|(a, b)| a != b);
        assert_eq!(differs, None, "the first byte that differs");
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // What a failed test has left; the folder could not be removed else.
        let under = self.folder.path().display().to_string();
        for mountpoint in mountpoints() {
            if mountpoint.starts_with(&under) {
                let _ = Command::new("umount").args(["-l", &mountpoint]).output();
            }
        }
    }
}

impl Server {
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, name: &str) {
        let pid = self.id().to_string();
        let sent = Command::new("kill").args([name, &pid]).status();
        assert!(sent.expect("kill").success());
    }

    /// Waits for the end, and for the mount to be gone; returns the exit code.
    pub fn wait(&mut self) -> Option<i32> {
        let mut status = None;
        wait_for("the end", || {
            status = self.child.try_wait().expect("a child");
            status.is_some()
        });
        status.and_then(|status| status.code())
    }

    /// Waits for an end that was asked for.
    pub fn wait_for_end(mut self) {
        assert_eq!(self.wait(), Some(0));
    }

    /// Ends it as a service manager would.
    pub fn end(mut self) {
        self.signal("-TERM");
        assert_eq!(self.wait(), Some(0));
        assert!(!is_mounted(&self.mountpoint));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.child.try_wait().is_ok_and(|status| status.is_none()) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Options for the ways in which this kernel can hand out requests.
pub fn transports() -> Vec<&'static str> {
    let offered = fs::read_to_string(SWITCH).is_ok_and(|value| value.trim() == "Y");
    let over_io_uring = offered.then_some("--io-uring=on");
    std::iter::once("--io-uring=off")
        .chain(over_io_uring)
        .collect()
}

/// What requests may fail with whose mount's server has ended. While the kernel takes its queues
/// apart, which takes a moment, what is put into them is cancelled.
pub fn is_gone(transport: &str, errno: Option<i32>) -> bool {
    let cancelled = (transport == "--io-uring=on").then_some(libc::ECANCELED);
    let gone = [libc::ENOTCONN, libc::ECONNABORTED]
        .into_iter()
        .chain(cancelled);
    errno.is_some_and(|errno| gone.into_iter().any(|other| other == errno))
}

fn mountpoints() -> Vec<String> {
    let mounts = fs::read_to_string("/proc/self/mounts").expect("a list of mounts");
    let second = |line: &str| line.split(' ').nth(1).map(str::to_owned);
    mounts.lines().filter_map(second).collect()
}

pub fn is_mounted(path: &Path) -> bool {
    mountpoints()
        .iter()
        .any(|mountpoint| Path::new(mountpoint) == path)
}

pub fn wait_for(what: &str, mut is_true: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is_true() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

//! A folder with images and a file to mount over, and the server of that.

use std::fs::{self, File};
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::Command;

use vellum_testing::{Folder, Running, until};

/// The switch of FUSE over io_uring in the kernel.
const SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";

pub struct Place(Folder);

impl Deref for Place {
    type Target = Folder;

    fn deref(&self) -> &Folder {
        &self.0
    }
}

/// A server, which is killed if a test fails.
pub struct Server {
    running: Running,
    mountpoint: PathBuf,
}

impl Place {
    /// A folder with the empty image `image` of `size`, and an empty file `disk`.
    pub fn new(size: &str) -> Place {
        assert!(
            Path::new("/dev/fuse").exists(),
            "these tests need /dev/fuse: `modprobe fuse`, or pass the device into the container"
        );
        let place = Place(Folder::new(env!("CARGO_BIN_EXE_vellum")));
        place.img(&["create", "-q", "-f", "qcow2", "image", size]);
        place.touch("disk");
        place
    }

    /// As [`Place::new`], with an image of that format.
    pub fn of_format(format: &str, size: &str) -> Place {
        let place = Place::new(size);
        place.img(&["create", "-q", "-f", format, "image", size]);
        place
    }

    pub fn touch(&self, name: &str) {
        File::create(self.path(name)).expect("a file");
    }

    /// The program in the background, from when `disk` is mounted.
    pub fn start(&self, words: &[&str]) -> Server {
        self.start_at("disk", words)
    }

    /// The program in the background, from when `mountpoint` is mounted.
    pub fn start_at(&self, mountpoint: &str, words: &[&str]) -> Server {
        // The kernel knows the attributes of a dead mount for a second more.
        until("the end of the last mount", || !self.is_served(mountpoint));
        let mut server = Server {
            running: self.0.start("vellum", words),
            mountpoint: self.path(mountpoint),
        };
        until("the mount", || {
            assert!(!server.running.has_ended(), "{words:?}");
            self.is_served(mountpoint)
        });
        server
    }

    /// The program in the background, whatever it does.
    pub fn start_bare(&self, words: &[&str]) -> Server {
        Server {
            running: self.0.start("vellum", words),
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
        self.img("check -q image");
        self.img("convert -f qcow2 -O raw image raw");
        let raw = self.read("raw");
        assert_eq!(raw.len(), expected.len());
        let differs = raw.iter().zip(expected).position(|(a, b)| a != b);
        assert_eq!(differs, None, "the first byte that differs");
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // What a failed test has left; the folder could not be removed else.
        let under = self.root().display().to_string();
        for mountpoint in mountpoints() {
            if mountpoint.starts_with(&under) {
                let _ = Command::new("umount").args(["-l", &mountpoint]).output();
            }
        }
    }
}

impl Server {
    pub fn signal(&self, name: &str) {
        self.running.signal(name);
    }

    /// Waits for the end, and for the mount to be gone; returns the exit code.
    pub fn wait(&mut self) -> Option<i32> {
        self.running.wait().code()
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

//! Whoever changes a file keeps others away: two of our programs at once, ours beside
//! QEMU's, and locks that outlive the process that took them.

use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use tempfile::TempDir;

const VELLUM: &str = env!("CARGO_BIN_EXE_vellum");

/// Runs a command line; `own/` has links to our program by the names of QEMU's.
fn shell(folder: &Path, line: &str) -> Output {
    let mut command = Command::new("bash");
    command.args(["-c", line]).current_dir(folder);
    command.env("VELLUM", VELLUM).env("LC_ALL", "C");
    command.stdin(Stdio::null()).output().expect("bash")
}

#[track_caller]
fn succeeds(folder: &Path, line: &str) {
    let output = shell(folder, line);
    assert!(output.status.success(), "{line}: {output:?}");
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn folder() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::create_dir(folder.path().join("own")).unwrap();
    for name in ["qemu-img", "qemu-nbd", "qemu-storage-daemon"] {
        symlink(VELLUM, folder.path().join("own").join(name)).unwrap();
    }
    succeeds(
        folder.path(),
        "qemu-img create -q -f qcow2 disk.qcow2 1M && truncate -s 1M other.raw third.raw && \
         qemu-img create -q -f qcow2 -b disk.qcow2 -F qcow2 top.qcow2",
    );
    folder
}

fn wait_for(what: &str, mut is_true: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !is_true() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A `qemu-io` that has an image open for writing.
struct Holder(Child);

impl Holder {
    fn of(folder: &Path, image: &str) -> Holder {
        let mut child = Command::new("qemu-io")
            .arg(image)
            .current_dir(folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("qemu-io; run `cargo xtask setup`");
        // The prompt comes when the image is open.
        let mut prompt = [0; 8];
        let output = child.stdout.as_mut().unwrap();
        output.read_exact(&mut prompt).unwrap();
        assert_eq!(&prompt, b"qemu-io>");
        Holder(child)
    }

    /// Kills it; its open files stay, without a process that has them, until the result
    /// is dropped: they are on their way through a socket.
    fn kill_but_keep_files(mut self, image: &Path) -> [UnixStream; 2] {
        let process = Pid::from_child(&self.0);
        let process_fd = pidfd_open(process, PidfdFlags::empty()).unwrap();
        let mut files: Vec<OwnedFd> = Vec::new();
        let folder = format!("/proc/{}/fd", self.0.id());
        for file in std::fs::read_dir(folder).unwrap().flatten() {
            if std::fs::read_link(file.path()).is_ok_and(|path| path == image) {
                let number = file.file_name().to_str().unwrap().parse().unwrap();
                let flags = PidfdGetfdFlags::empty();
                files.push(pidfd_getfd(&process_fd, number, flags).expect("the right to trace"));
            }
        }
        assert!(!files.is_empty());
        let (from, to) = UnixStream::pair().unwrap();
        for file in &files {
            let sent: [BorrowedFd<'_>; 1] = [file.as_fd()];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(control.push(SendAncillaryMessage::ScmRights(&sent)));
            sendmsg(
                &from,
                &[IoSlice::new(b"x")],
                &mut control,
                SendFlags::empty(),
            )
            .unwrap();
        }
        self.0.kill().unwrap();
        self.0.wait().unwrap();
        [from, to]
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// What changes an image that somebody else changes is refused as QEMU's program is.
#[test]
fn an_image_in_use_is_changed_by_nobody_else() {
    let folder = folder();
    let folder = folder.path();
    let holder = Holder::of(folder, "disk.qcow2");
    let before = std::fs::read(folder.join("disk.qcow2")).unwrap();
    let top = std::fs::read(folder.join("top.qcow2")).unwrap();
    for line in [
        "create -f qcow2 disk.qcow2 2M",
        "convert -f raw -O qcow2 other.raw disk.qcow2",
        "convert -n -f raw -O qcow2 other.raw disk.qcow2",
        "dd -f raw -O qcow2 if=other.raw of=disk.qcow2",
        "resize disk.qcow2 2M",
        "amend -f qcow2 -o lazy_refcounts=on disk.qcow2",
        "rebase -u -b '' disk.qcow2",
        "commit top.qcow2",
        "snapshot -c one disk.qcow2",
        "bitmap --add disk.qcow2 one",
        "check -r all disk.qcow2",
        "bench -w -c 1 disk.qcow2",
        "rebase -b '' top.qcow2",
    ] {
        let real = shell(folder, &format!("qemu-img {line}"));
        let own = shell(folder, &format!("PATH=own:$PATH; qemu-img {line}"));
        assert!(!real.status.success(), "{line}");
        assert_eq!(own.status.code(), real.status.code(), "{line}: {own:?}");
        assert_eq!(said(&own), said(&real), "{line}");
        assert!(
            std::fs::read(folder.join("disk.qcow2")).unwrap() == before,
            "{line}"
        );
        assert!(
            std::fs::read(folder.join("top.qcow2")).unwrap() == top,
            "{line}"
        );
    }
    drop(holder);
    succeeds(folder, "$VELLUM resize disk.qcow2 2M");
}

/// The image is not left behind, empty, because the file that was to hold its data is in use.
#[test]
fn an_image_whose_data_file_is_in_use_is_not_made() {
    let folder = folder();
    let folder = folder.path();
    let holder = Holder::of(folder, "disk.qcow2");
    let before = std::fs::read(folder.join("disk.qcow2")).unwrap();
    let line = "create -q -f qcow2 -o data_file=disk.qcow2 new.qcow2 1M";
    let output = shell(folder, &format!("$VELLUM {line}"));
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(said(&output).contains("lock"), "{output:?}");
    assert!(!folder.join("new.qcow2").exists());
    assert!(std::fs::read(folder.join("disk.qcow2")).unwrap() == before);
    drop(holder);
    succeeds(folder, &format!("$VELLUM {line}"));
}

/// QEMU lets two copies write one raw file. Called by our name, the second is refused.
#[test]
fn a_raw_target_has_one_writer() {
    let folder = folder();
    let folder = folder.path();
    succeeds(folder, "head -c 8M /dev/zero | tr '\\0' x > source");
    let mut first = Command::new(VELLUM)
        .args("convert -f raw -O raw -r 1M source target".split(' '))
        .current_dir(folder)
        .spawn()
        .unwrap();
    // The first block of a target that was just made is written before it is open.
    wait_for("the copy", || {
        std::fs::read(folder.join("target")).is_ok_and(|bytes| bytes.first() == Some(&b'x'))
    });
    for line in [
        "$VELLUM convert -f raw -O raw other.raw target",
        "$VELLUM convert -n -f raw -O raw other.raw target",
        "$VELLUM dd -f raw -O raw if=other.raw of=target",
    ] {
        let second = shell(folder, line);
        assert_eq!(second.status.code(), Some(1), "{line}");
        assert!(said(&second).contains("lock"), "{line}: {second:?}");
    }
    assert!(first.try_wait().unwrap().is_none(), "it ended too soon");
    let bytes = std::fs::read(folder.join("target")).unwrap();
    assert_eq!((bytes.len(), bytes[0]), (8 << 20, b'x'));
    first.kill().unwrap();
    first.wait().unwrap();
}

/// Who serves a raw image keeps its length and its name, whoever comes; and we leave those
/// alone that QEMU serves.
#[test]
fn a_raw_image_that_is_served_is_made_or_resized_by_nobody() {
    let folder = folder();
    let folder = folder.path();
    let bytes: Vec<u8> = (0..8 << 20).map(|at: u32| (at >> 9) as u8 | 1).collect();
    std::fs::write(folder.join("served"), &bytes).unwrap();
    let daemon = |tool: &str, read_only: &str, writable: &str| {
        format!(
            "exec {tool} --blockdev driver=raw,node-name=n,{read_only}file.driver=file,\
             file.filename=served --nbd-server addr.type=unix,addr.path=S \
             --export type=nbd,id=e,node-name=n{writable}"
        )
    };
    let holders = [
        "exec $VELLUM nbd -f raw -t -k $PWD/S served".to_owned(),
        "exec $VELLUM nbd -t -k $PWD/S served".to_owned(),
        "exec $VELLUM nbd -r -f raw -t -k $PWD/S served".to_owned(),
        daemon("$VELLUM daemon", "", ",writable=on"),
        daemon("$VELLUM daemon", "read-only=on,", ""),
        "exec qemu-nbd -f raw -t -k $PWD/S served".to_owned(),
        daemon("qemu-storage-daemon", "", ",writable=on"),
    ];
    for holder in holders {
        let _ = std::fs::remove_file(folder.join("S"));
        let server = Command::new("bash")
            .args(["-c", &holder])
            .current_dir(folder)
            .env("VELLUM", VELLUM)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let server = Server(server);
        wait_for("the server", || {
            UnixStream::connect(folder.join("S")).is_ok()
        });
        for line in [
            "create -f raw served 1M",
            "create -f qcow2 served 1M",
            "convert -f raw -O raw other.raw served",
            "convert -f raw -O qcow2 other.raw served",
            "dd -f raw -O raw if=other.raw of=served",
            "resize -f raw served +1M",
            "resize -f raw --shrink served 1M",
        ] {
            for tool in ["qemu-img", "$VELLUM"] {
                let output = shell(folder, &format!("{tool} {line}"));
                assert_eq!(output.status.code(), Some(1), "{holder}: {tool} {line}");
                let said = said(&output);
                assert!(said.contains("\"resize\" lock"), "{tool} {line}: {said}");
                let now = std::fs::read(folder.join("served"));
                assert!(now.is_ok_and(|now| now == bytes), "{holder}: {tool} {line}");
            }
        }
        drop(server);
    }
    succeeds(folder, "$VELLUM resize -q -f raw served +1M");
}

/// A server that is gone with the test, whatever becomes of that.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Two servers with one pid file: the second refuses, whosever they are.
#[test]
fn a_pid_file_belongs_to_one_server() {
    let folder = folder();
    let folder = folder.path();
    let servers = [
        (
            "qemu-nbd -f raw -t -k $PWD/S --pid-file=pid IMAGE",
            "qemu-nbd",
        ),
        (
            "qemu-storage-daemon --blockdev driver=file,node-name=f,filename=IMAGE --pidfile pid",
            "qemu-storage-daemon",
        ),
    ];
    for (line, name) in servers {
        for (first, second) in [("", "own/"), ("own/", ""), ("own/", "own/"), ("", "")] {
            let run = |tool: &str, socket: &str, image: &str| {
                let line = line.replace("$PWD/S", &format!("$PWD/{socket}"));
                format!("exec {tool}{}", line.replace("IMAGE", image))
            };
            let server = Command::new("bash")
                .args(["-c", &run(first, "s1", "other.raw")])
                .current_dir(folder)
                .spawn()
                .unwrap();
            let mut server = Server(server);
            let pid = format!("{}\n", server.0.id());
            let written = || std::fs::read_to_string(folder.join("pid")).ok();
            wait_for("the pid file", || written().as_ref() == Some(&pid));
            let refused = shell(
                folder,
                &format!("timeout 20 bash -c '{}'", run(second, "s2", "third.raw")),
            );
            assert_eq!(
                refused.status.code(),
                Some(1),
                "{second}{name}: {refused:?}"
            );
            let why = "Cannot lock pid file: Resource temporarily unavailable";
            assert!(said(&refused).contains(why), "{second}{name}: {refused:?}");
            assert_eq!(written().as_ref(), Some(&pid));
            succeeds(folder, &format!("kill {}", server.0.id()));
            server.0.wait().unwrap();
            let _ = std::fs::remove_file(folder.join("pid"));
        }
    }
}

/// What a command line prints on a terminal of its own until `stop` says so.
fn on_terminal(folder: &Path, line: &str, mut stop: impl FnMut(&str)) -> (bool, String) {
    let mut child = Command::new("script")
        .args(["-qec", line, "/dev/null"])
        .current_dir(folder)
        .env("VELLUM", VELLUM)
        .env("TERM", "xterm")
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("script, of bsdutils");
    let mut output = child.stdout.take().unwrap();
    let mut text = Vec::new();
    let mut byte = [0];
    while output.read(&mut byte).unwrap() > 0 {
        text.push(byte[0]);
        stop(&String::from_utf8_lossy(&text));
    }
    let ended = child.wait().unwrap();
    (ended.success(), String::from_utf8_lossy(&text).into_owned())
}

/// A killed process keeps its locks until the kernel is done with its requests. That is
/// waited for, and said on a terminal.
#[test]
fn locks_of_a_killed_process_are_waited_for() {
    let folder = folder();
    let folder = folder.path();
    let image = folder.join("disk.qcow2").canonicalize().unwrap();
    for line in [
        "$VELLUM info disk.qcow2",
        "$VELLUM resize disk.qcow2 2M",
        "$VELLUM create -f qcow2 disk.qcow2 1M",
    ] {
        let files = Holder::of(folder, "disk.qcow2").kill_but_keep_files(&image);
        let real = shell(folder, "qemu-img info disk.qcow2");
        assert_eq!(real.status.code(), Some(1), "the locks are held");
        let mut files = Some(files);
        let (worked, text) = on_terminal(folder, line, |text| {
            if text.contains("waiting until") {
                drop(files.take());
            }
        });
        assert!(files.is_none(), "{line}: {text}");
        assert!(worked, "{line}: {text}");
    }
}

/// Under the names of QEMU's programs too, without a word.
#[test]
fn locks_of_a_killed_process_are_waited_for_in_silence() {
    let folder = folder();
    let folder = folder.path();
    let image = folder.join("disk.qcow2").canonicalize().unwrap();
    let mut files = Some(Holder::of(folder, "disk.qcow2").kill_but_keep_files(&image));
    let child = Command::new(folder.join("own/qemu-img"))
        .args(["info", "disk.qcow2"])
        .current_dir(folder)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // It has the image open, so the first attempt to lock it has been made or comes next.
    let open_files = format!("/proc/{}/fd", child.id());
    wait_for("the image", || {
        let files = std::fs::read_dir(&open_files)
            .into_iter()
            .flatten()
            .flatten();
        let mut paths = files.filter_map(|file| std::fs::read_link(file.path()).ok());
        paths.any(|path| path == image)
    });
    drop(files.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(said(&output), "");
}

/// Nobody waits for a process that lives: neither where it is another one nor for itself.
#[test]
fn a_living_holder_is_not_waited_for() {
    let folder = folder();
    let folder = folder.path();
    let holder = Holder::of(folder, "disk.qcow2");
    let start = Instant::now();
    let (worked, text) = on_terminal(folder, "$VELLUM resize disk.qcow2 2M", |_| {});
    assert!(!worked && !text.contains("waiting"), "{text}");
    assert!(text.contains("is locked by qemu-io"), "{text}");
    assert!(!text.contains("-U"), "it has no such option: {text}");
    let (worked, text) = on_terminal(folder, "$VELLUM info disk.qcow2", |_| {});
    assert!(!worked && text.contains("read-only: -U"), "{text}");
    drop(holder);
    let (worked, text) = on_terminal(
        folder,
        "$VELLUM convert -O qcow2 top.qcow2 disk.qcow2",
        |_| {},
    );
    assert!(
        !worked && text.contains("is the same file") && !text.contains("waiting"),
        "{text}"
    );
    assert!(
        start.elapsed() < Duration::from_secs(14),
        "one of them has waited"
    );
}

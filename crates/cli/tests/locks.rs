//! Whoever changes a file keeps others away: two of our programs at once, ours beside
//! QEMU's, and locks that outlive the process that took them.

use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use vellum_testing::{Folder, Running, until};

const VELLUM: &str = env!("CARGO_BIN_EXE_vellum");

/// A folder with images; `own/` has links to our program by the names of QEMU's.
fn folder() -> Folder {
    let folder = Folder::new(VELLUM);
    std::fs::create_dir(folder.path("own")).unwrap();
    for name in ["qemu-img", "qemu-nbd", "qemu-storage-daemon"] {
        folder.link(&format!("own/{name}"));
    }
    folder.done(
        "qemu-img create -q -f qcow2 disk.qcow2 1M && truncate -s 1M other.raw third.raw && \
         qemu-img create -q -f qcow2 -b disk.qcow2 -F qcow2 top.qcow2",
    );
    folder
}

/// A `qemu-io` that has an image open for writing.
struct Holder(Child);

impl Holder {
    fn of(folder: &Folder, image: &str) -> Holder {
        let mut command = folder.command("qemu-io", &[image]);
        let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = piped.spawn().expect("qemu-io; run `cargo xtask setup`");
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
    let holder = Holder::of(&folder, "disk.qcow2");
    let before = folder.read("disk.qcow2");
    let top = folder.read("top.qcow2");
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
        let real = folder.shell(&format!("qemu-img {line}"));
        let own = folder.shell(&format!("PATH=own:$PATH; qemu-img {line}"));
        assert_ne!(real.code, Some(0), "{line}");
        assert_eq!(own.code, real.code, "{line}: {own:?}");
        assert_eq!(own.err, real.err, "{line}");
        assert!(folder.read("disk.qcow2") == before, "{line}");
        assert!(folder.read("top.qcow2") == top, "{line}");
    }
    drop(holder);
    folder.done("$VELLUM resize disk.qcow2 2M");
}

/// The image is not left behind, empty, because the file that was to hold its data is in use.
#[test]
fn an_image_whose_data_file_is_in_use_is_not_made() {
    let folder = folder();
    let holder = Holder::of(&folder, "disk.qcow2");
    let before = folder.read("disk.qcow2");
    let line = "create -q -f qcow2 -o data_file=disk.qcow2 new.qcow2 1M";
    let said = folder.fails(&format!("$VELLUM {line}"));
    assert!(said.contains("lock"), "{said}");
    assert!(!folder.has("new.qcow2"));
    assert!(folder.read("disk.qcow2") == before);
    drop(holder);
    folder.done(&format!("$VELLUM {line}"));
}

/// QEMU lets two copies write one raw file. Called by our name, the second is refused.
#[test]
fn a_raw_target_has_one_writer() {
    let folder = folder();
    folder.done("head -c 8M /dev/zero | tr '\\0' x > source");
    let mut first = folder.start("vellum", "convert -f raw -O raw -r 1M source target");
    // The first block of a target that was just made is written before it is open.
    until("the copy", || {
        std::fs::read(folder.path("target")).is_ok_and(|bytes| bytes.first() == Some(&b'x'))
    });
    for line in [
        "$VELLUM convert -f raw -O raw other.raw target",
        "$VELLUM convert -n -f raw -O raw other.raw target",
        "$VELLUM dd -f raw -O raw if=other.raw of=target",
    ] {
        let second = folder.fails(line);
        assert!(second.contains("lock"), "{line}: {second}");
    }
    assert!(!first.has_ended(), "it ended too soon");
    let bytes = folder.read("target");
    assert_eq!((bytes.len(), bytes[0]), (8 << 20, b'x'));
    first.kill();
}

/// Who serves a raw image keeps its length and its name, whoever comes; and we leave those
/// alone that QEMU serves.
#[test]
fn a_raw_image_that_is_served_is_made_or_resized_by_nobody() {
    let folder = folder();
    let bytes: Vec<u8> = (0..8 << 20).map(|at: u32| (at >> 9) as u8 | 1).collect();
    folder.write("served", &bytes);
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
        let _ = std::fs::remove_file(folder.path("S"));
        let mut server = folder.shell_command(&holder);
        let server = Running::start(server.stdout(Stdio::null()).stderr(Stdio::null()));
        until("the server", || {
            UnixStream::connect(folder.path("S")).is_ok()
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
                let said = folder.fails(&format!("{tool} {line}"));
                assert!(said.contains("\"resize\" lock"), "{tool} {line}: {said}");
                let now = std::fs::read(folder.path("served"));
                assert!(now.is_ok_and(|now| now == bytes), "{holder}: {tool} {line}");
            }
        }
        drop(server);
    }
    folder.done("$VELLUM resize -q -f raw served +1M");
}

/// Two servers with one pid file: the second refuses, whosever they are.
#[test]
fn a_pid_file_belongs_to_one_server() {
    let folder = folder();
    for line in [
        "qemu-nbd -f raw -t -k $PWD/S --pid-file=pid IMAGE",
        "qemu-storage-daemon --blockdev driver=file,node-name=f,filename=IMAGE --pidfile pid",
    ] {
        for (first, second) in [("", "own/"), ("own/", ""), ("own/", "own/"), ("", "")] {
            let run = |tool: &str, socket: &str, image: &str| {
                let line = line.replace("$PWD/S", &format!("$PWD/{socket}"));
                format!("exec {tool}{}", line.replace("IMAGE", image))
            };
            let mut server = folder.start_shell(&run(first, "s1", "other.raw"));
            let pid = format!("{}\n", server.id());
            let written = || std::fs::read_to_string(folder.path("pid")).ok();
            until("the pid file", || written().as_ref() == Some(&pid));
            let second = run(second, "s2", "third.raw");
            let refused = folder.fails(&format!("timeout 20 bash -c '{second}'"));
            let why = "Cannot lock pid file: Resource temporarily unavailable";
            assert!(refused.contains(why), "{second}: {refused}");
            assert_eq!(written().as_ref(), Some(&pid));
            server.signal("-TERM");
            server.wait();
            let _ = std::fs::remove_file(folder.path("pid"));
        }
    }
}

/// What a command line prints on a terminal of its own until `stop` says so.
fn on_terminal(folder: &Folder, line: &str, mut stop: impl FnMut(&str)) -> (bool, String) {
    let mut terminal = folder.terminal_command(line);
    let mut terminal = Running::start(terminal.stdout(Stdio::piped()));
    let mut output = terminal.child.stdout.take().unwrap();
    let mut text = Vec::new();
    let mut byte = [0];
    while output.read(&mut byte).unwrap() > 0 {
        text.push(byte[0]);
        stop(&String::from_utf8_lossy(&text));
    }
    let ended = terminal.wait();
    (ended.success(), String::from_utf8_lossy(&text).into_owned())
}

/// A killed process keeps its locks until the kernel is done with its requests. That is
/// waited for, and said on a terminal.
#[test]
fn locks_of_a_killed_process_are_waited_for() {
    let folder = folder();
    let image = folder.path("disk.qcow2").canonicalize().unwrap();
    for line in [
        "$VELLUM info disk.qcow2",
        "$VELLUM resize disk.qcow2 2M",
        "$VELLUM create -f qcow2 disk.qcow2 1M",
    ] {
        let files = Holder::of(&folder, "disk.qcow2").kill_but_keep_files(&image);
        let real = folder.shell("qemu-img info disk.qcow2");
        assert_eq!(real.code, Some(1), "the locks are held");
        let mut files = Some(files);
        let (worked, text) = on_terminal(&folder, line, |text| {
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
    let image = folder.path("disk.qcow2").canonicalize().unwrap();
    let mut files = Some(Holder::of(&folder, "disk.qcow2").kill_but_keep_files(&image));
    let mut info = folder.command("our qemu-img", "info disk.qcow2");
    let info = Running::start(info.stdout(Stdio::piped()).stderr(Stdio::piped()));
    // It has the image open, so the first attempt to lock it has been made or comes next.
    let open_files = format!("/proc/{}/fd", info.id());
    until("the image", || {
        let files = std::fs::read_dir(&open_files)
            .into_iter()
            .flatten()
            .flatten();
        let mut paths = files.filter_map(|file| std::fs::read_link(file.path()).ok());
        paths.any(|path| path == image)
    });
    drop(files.take());
    assert_eq!(info.said().1.expect(0).err, "");
}

/// Nobody waits for a process that lives: neither where it is another one nor for itself.
#[test]
fn a_living_holder_is_not_waited_for() {
    let folder = folder();
    let holder = Holder::of(&folder, "disk.qcow2");
    let start = Instant::now();
    let (worked, text) = on_terminal(&folder, "$VELLUM resize disk.qcow2 2M", |_| {});
    assert!(!worked && !text.contains("waiting"), "{text}");
    assert!(text.contains("is locked by qemu-io"), "{text}");
    assert!(!text.contains("-U"), "it has no such option: {text}");
    let (worked, text) = on_terminal(&folder, "$VELLUM info disk.qcow2", |_| {});
    assert!(!worked && text.contains("read-only: -U"), "{text}");
    drop(holder);
    let (worked, text) = on_terminal(
        &folder,
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

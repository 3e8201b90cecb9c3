//! What a person at a terminal sees, and a pipe never: hints and colours. What images say steers none.

use std::io::Read;
use std::process::Stdio;

use vellum_testing::{Folder, Said};

const VELLUM: &str = env!("CARGO_BIN_EXE_vellum");

fn folder() -> Folder {
    let folder = Folder::new(VELLUM);
    folder.img("create -q -f qcow2 disk.qcow2 1M");
    folder.link("qemu-img");
    folder
}

/// What a command line prints on a terminal of its own (`script` makes one).
fn on_terminal(folder: &Folder, line: &str) -> String {
    Said::of(&mut folder.terminal_command(line)).out
}

#[test]
fn slips_get_a_hint_on_a_terminal() {
    let folder = folder();
    folder.write("raw", [0; 512]);
    for (line, meant) in [
        ("$VELLUM covnert a b", "did you mean 'convert'?"),
        ("$VELLUM inspcet a", "did you mean 'inspect'?"),
        (
            "$VELLUM convert --target-fromat raw a b",
            "did you mean '--target-format'?",
        ),
        (
            "$VELLUM create -f qcow2 -o clustersize=4k x 1M",
            "did you mean 'cluster_size'?",
        ),
        ("$VELLUM info disk.qcow", "did you mean 'disk.qcow2'?"),
        (
            "$VELLUM io -c 'raed 0 1' disk.qcow2",
            "did you mean 'read'?",
        ),
        (
            "$VELLUM io --read-olny disk.qcow2",
            "did you mean '--read-only'?",
        ),
        (
            "$VELLUM nbd --persistant disk.qcow2",
            "did you mean '--persistent'?",
        ),
        (
            "$VELLUM daemon --blockdve driver=null-co,node-name=a",
            "did you mean '--blockdev'?",
        ),
        (
            "$VELLUM daemon --blockdev driver=nul-co,node-name=a",
            "did you mean 'null-co'?",
        ),
        (
            "$VELLUM info --image-opts driver=qcow2,l2-cach-size=1M,file.filename=disk.qcow2",
            "did you mean 'l2-cache-size'?",
        ),
        (
            "$VELLUM create -f luks -o cipher-algo=aes-256 x 1M",
            "did you mean 'cipher-alg'?",
        ),
        ("$VELLUM info nbd+unxi:///x", "did you mean 'nbd+unix:'?"),
        (
            "$VELLUM info --object secrte,id=a,data=b disk.qcow2",
            "did you mean 'secret'?",
        ),
        ("$VELLUM audit --outptu json x", "did you mean '--output'?"),
        ("$VELLUM bench --quite", "did you mean '--quiet'?"),
        ("$VELLUM inspect --no-chekc x", "did you mean '--no-check'?"),
        (
            "$VELLUM info -f qcow2 raw",
            "'raw' looks like raw: name that with -f",
        ),
        (
            "$VELLUM convert -B disk.qcow2 -O qcow2 disk.qcow2 y",
            "name it with -F",
        ),
        ("$VELLUM create -f qcow2 -b disk.qcow2 x", "name it with -F"),
    ] {
        let text = on_terminal(&folder, line);
        assert!(
            text.contains("hint:") && text.contains(meant),
            "{line}: {text}"
        );
    }
}

/// Whoever has no room is told so, and by whom.
#[test]
fn a_full_disk_says_what_is_missing() {
    let folder = folder();
    folder.img("create -q -f qcow2 -b disk.qcow2 -F qcow2 top 1M");
    // A file that takes no byte more.
    let full = "--image-opts driver=qcow2,file.driver=blkdebug,file.image.filename=top,\
                file.inject-error.0.event=pwritev,file.inject-error.0.errno=28,\
                file.inject-error.0.iotype=write";
    for (line, words) in [
        ("snapshot -c one FULL", "make room"),
        ("resize FULL 2M", "up to 1 MiB more are needed"),
    ] {
        let line = format!("$VELLUM {}", line.replace("FULL", full));
        let text = on_terminal(&folder, &line);
        let error = text.find("No space left on device");
        let hint = text.find(words);
        assert!(error.is_some() && error < hint, "{line}: {text}");
        assert!(text.contains("the file system of '.' has"), "{text}");
    }
}

/// A file below the one that was named is missing: the hint is about that, not about names
/// that look like the first one's.
#[test]
fn a_broken_chain_gets_the_hint_that_leads_on() {
    let folder = folder();
    for line in [
        "create -q -f qcow2 -b disk.qcow2 -F qcow2 mid.qcow2",
        "create -q -f qcow2 -b mid.qcow2 -F qcow2 top.qcow2",
    ] {
        folder.img(line);
    }
    std::fs::rename(folder.path("disk.qcow2"), folder.path("dosk.qcow2")).unwrap();
    std::fs::copy(folder.path("top.qcow2"), folder.path("tip.qcow2")).unwrap();
    let led = "'vellum info --backing-chain top.qcow2' shows which image names the file";
    for line in [
        "map top.qcow2",
        "check top.qcow2",
        "resize top.qcow2 2M",
        "io -c 'read 0 1' top.qcow2",
        "convert -O raw top.qcow2 x",
    ] {
        let text = on_terminal(&folder, &format!("$VELLUM {line}"));
        assert!(text.contains(led), "{line}: {text}");
        assert!(!text.contains("did you mean"), "{line}: {text}");
        let piped = on_terminal(&folder, &format!("$VELLUM {line} 2>&1 | cat"));
        assert!(!piped.contains("hint"), "{line}: {piped}");
    }
    let text = on_terminal(&folder, "$VELLUM info --backing-chain top.qcow2");
    assert!(
        text.contains("vellum rebase -u -b PLACE -F qcow2 mid.qcow2"),
        "{text}"
    );
    let text = on_terminal(&folder, "./qemu-img map top.qcow2");
    assert!(!text.contains("hint"), "{text}");
}

/// A folder that is not there, and formats that files seem to have by their names.
#[test]
fn what_new_users_run_into_gets_a_hint() {
    let folder = folder();
    for (line, words) in [
        ("create -f qcow2 none/x 1M", "there is no folder 'none'"),
        ("convert disk.qcow2 none/x", "there is no folder 'none'"),
        ("create x.qcow2 1M", "'x.qcow2' is a raw image: -f qcow2"),
        (
            "convert disk.qcow2 y.qcow2",
            "'y.qcow2' is a raw image: -O qcow2",
        ),
        ("resize +1G disk.qcow2", "the size stands behind the name"),
        ("audit -f qcow3 disk.qcow2", "did you mean 'qcow2'?"),
        ("completions bash velum", "did you mean 'vellum'?"),
        ("hepl convert", "did you mean 'help'?"),
    ] {
        let text = on_terminal(&folder, &format!("$VELLUM {line}"));
        assert!(
            text.contains("hint:") && text.contains(words),
            "{line}: {text}"
        );
        let piped = on_terminal(&folder, &format!("$VELLUM {line} 2>&1 | cat"));
        assert!(!piped.contains("hint"), "{line}: {piped}");
        let text = on_terminal(&folder, &format!("./qemu-img {line}"));
        assert!(!text.contains("hint"), "{line}: {text}");
    }
    for line in [
        "create -f raw z.qcow2 1M",
        "convert -O raw disk.qcow2 z.qcow2",
    ] {
        let text = on_terminal(&folder, &format!("$VELLUM {line}"));
        assert!(!text.contains("hint"), "it was asked for: {text}");
    }
}

/// A server says where it is found, when it ends and who can come in, to a person only.
#[test]
fn a_server_says_where_it_is() {
    let folder = folder();
    // The server ends with its only client, which comes once there is a socket.
    let serve = |program: &str| {
        let line = format!(
            "bash -c '{program} -k $PWD/s disk.qcow2 & until [ -S s ]; do :; done; \
             nbdinfo --size nbd+unix:///?socket=s; wait; rm -f s'"
        );
        on_terminal(&folder, &line)
    };
    let text = serve("$VELLUM nbd");
    assert!(
        text.contains("is served at nbd+unix:///?socket=/"),
        "{text}"
    );
    assert!(text.contains("it ends with its last client"), "{text}");
    assert!(
        !text.contains("whoever reaches"),
        "a socket is this machine's: {text}"
    );
    std::os::unix::fs::symlink(VELLUM, folder.path("qemu-nbd")).unwrap();
    let text = serve("./qemu-nbd");
    assert!(text.contains("1048576") && !text.contains("hint"), "{text}");
}

/// A daemon that can do nothing, ever, does not wait in silence.
#[test]
fn a_daemon_without_anything_to_do_says_so() {
    let folder = folder();
    // The signal is caught: what is told before the end is told.
    let run = |program: &str| {
        let line =
            format!("bash -c '{program} --pidfile p & until [ -s p ]; do :; done; kill $!; wait'");
        on_terminal(&folder, &line)
    };
    let text = run("$VELLUM daemon");
    assert!(text.contains("nothing is exported"), "{text}");
    let link = folder.path("qemu-storage-daemon");
    std::os::unix::fs::symlink(VELLUM, link).unwrap();
    let text = run("./qemu-storage-daemon");
    assert!(!text.contains("hint"), "{text}");
}

#[test]
fn long_work_shows_how_far_it_is() {
    let folder = folder();
    folder.write("raw", vec![1; 64 << 20]);
    let text = on_terminal(&folder, "$VELLUM dd bs=1M if=raw of=out");
    assert!(text.contains('%') && text.contains("MiB/s"), "{text}");
    let text = on_terminal(&folder, "./qemu-img dd bs=1M if=raw of=out2");
    assert_eq!(text, "");
}

#[test]
fn scripts_and_pipes_get_none() {
    let folder = folder();
    // By the name of QEMU's program, even on a terminal.
    let text = on_terminal(&folder, "./qemu-img info disk.qcow");
    assert!(
        text.contains("Could not open") && !text.contains("hint"),
        "{text}"
    );
    assert!(!text.contains('\x1b'), "{text}");
    let text = on_terminal(&folder, "./qemu-img covnert a b");
    assert!(!text.contains("hint"), "{text}");
    // By our own name, into a pipe.
    let text = folder.run("vellum", "info disk.qcow").err;
    assert!(
        text.contains("Could not open") && !text.contains("hint"),
        "{text}"
    );
}

#[test]
fn colours_are_for_terminals() {
    let folder = folder();
    let text = on_terminal(&folder, "$VELLUM inspect disk.qcow2");
    assert!(text.contains("\x1b[1m"), "{text}");
    let text = on_terminal(&folder, "NO_COLOR=1 $VELLUM inspect disk.qcow2");
    assert!(!text.contains("\x1b[1m"), "{text}");
}

/// Whoever made the image chose the name of its write log.
#[test]
fn names_from_an_image_do_not_steer_the_terminal() {
    let folder = folder();
    let options = "driver=qcow2,file.filename=disk.qcow2,journal=on,journal-size=1M";
    let crash = "-c 'write -q 0 4k' -c flush -c abort";
    folder.run("vellum", &format!("io --image-opts {options} {crash}"));
    let path = folder.path("disk.qcow2");
    let mut image = std::fs::read(&path).expect("an image");
    let name = b"disk.qcow2.vlog";
    let at = image.windows(name.len()).position(|bytes| bytes == name);
    image[at.expect("a name")..][..4].copy_from_slice(b"\x1b[2J");
    std::fs::write(&path, image).expect("written");
    for words in [
        "info",
        "info --output=json",
        "inspect",
        "audit",
        "io -c quit",
        "io -r -c quit",
        "map",
        "check",
        "check -r log",
        "check -r drop-log",
    ] {
        let said = folder.run("vellum", &format!("{words} disk.qcow2")).all();
        assert!(said.contains("[2J.qcow2.vlog"), "{words:?}: {said}");
        assert!(!said.contains('\x1b'), "{words:?}: {said}");
    }
}

/// The process that holds the lock is named.
#[test]
fn a_locked_image_names_its_user() {
    let folder = folder();
    let mut user = folder.command("qemu-io", "-f qcow2 disk.qcow2");
    let user = user.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut user = user.spawn().expect("qemu-io; run `cargo xtask setup`");
    let process = format!("qemu-io (process {})", user.id());
    // Its prompt says that it holds the locks.
    let prompt = user.stdout.as_mut().expect("piped");
    prompt.read_exact(&mut [0]).expect("qemu-io opens the disk");
    let text = on_terminal(&folder, "$VELLUM info disk.qcow2");
    drop(user.stdin.take());
    user.wait().expect("qemu-io ends");
    assert!(text.contains(&process), "{text}");
    assert!(text.contains("-U"), "{text}");
}

/// The bar is gone before the result is told.
#[test]
fn no_bar_stays_behind_the_result_of_a_comparison() {
    let folder = folder();
    folder.done("truncate -s 64M a b; printf x | dd of=b bs=1 seek=60M conv=notrunc status=none");
    let text = on_terminal(&folder, "$VELLUM compare -f raw -F raw a b");
    let (_, behind) = text.split_once("Content mismatch at offset").expect(&text);
    assert!(!behind.contains('%') && !behind.contains("MiB"), "{text:?}");
}

//! `vellum mount` for a user who is not root: `fusermount3` mounts and unmounts.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use crate::place::Place;

/// Mounts, writes, replaces the mount of a killed server, and unmounts, as another user. Where only
/// root may open `/dev/fuse`, another node for the same device is mounted over it, for this test alone.
#[test]
fn a_user_who_is_not_root_mounts_a_disk() {
    let place = Place::new("8M");
    // The build directory may be closed to other users, as a temporary directory is.
    fs::copy(env!("CARGO_BIN_EXE_vellum"), place.path("program")).expect("a copy");
    fs::set_permissions(place.path(""), fs::Permissions::from_mode(0o755)).expect("a mode");
    place.must("chown", "-R 65534:65534 .");
    place.must("mknod", "-m 666 node c 10 229");
    // The namespace starts with the mounts of other tests, and would keep their servers from
    // noticing that they are unmounted.
    let script = r#"
        set -eu
        umount --all --lazy --types fuse.vellum 2> /dev/null || true
        mount --bind node /dev/fuse
        user() { setpriv --reuid 65534 --regid 65534 --clear-groups "$@"; }
        server() { user ./program mount --fork --pid-file=pid -f qcow2 image disk; }
        ended() { while test -e "/proc/$(cat pid)"; do sleep 0.1; done; }
        show() { user head -c 7 disk; echo; }
        server
        printf written | user dd of=disk conv=notrunc,fsync status=none
        show
        head -c 7 disk 2> /dev/null || echo root may not
        kill -9 "$(cat pid)"
        ended
        server
        show
        user fusermount3 -u disk
        ended
        server
        show
        kill "$(cat pid)"
        ended
        if grep -qF " $PWD/disk " /proc/self/mountinfo; then echo still mounted; fi
        echo ended
    "#;
    fs::write(place.path("script"), script).expect("a script");
    let output = place.run("timeout", "60 unshare --mount sh script");
    assert_eq!(
        output.out, "written\nroot may not\nwritten\nwritten\nended\n",
        "needs root, to become another user in a mount namespace of its own: {output:?}"
    );
}

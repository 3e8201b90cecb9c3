//! A Ceph cluster of one monitor and one disk on loopback, which asks nobody for a key or everybody (cephx).

use std::fs;
use std::net::TcpListener;
use std::process::{Command, Stdio};

use vellum_testing::{Running, Said, until};

use crate::place::Place;

/// Whom a cluster asks for a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    Everybody,
    /// Those with a key. That of `client.admin` is in the keyring which `conf` names.
    Keys,
}

/// A running cluster, with a pool `rbd`.
pub struct Ceph {
    _monitor: Running,
    _disk: Running,
    pub conf: String,
    pub monitor_port: u16,
}

fn uuid() -> String {
    let read = fs::read_to_string("/proc/sys/kernel/random/uuid").expect("a number");
    read.trim().to_owned()
}

/// Two neighbouring ports that nobody has just now.
fn free_ports() -> u16 {
    for _ in 0..100 {
        let first = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = first.local_addr().expect("an address").port();
        if port < u16::MAX && TcpListener::bind(("127.0.0.1", port + 1)).is_ok() {
            return port;
        }
    }
    panic!("no two free ports");
}

fn start(program: &str, words: &[&str]) -> Running {
    let child = Command::new(program)
        .arg("-f")
        .args(words)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let message = format!("{program} is missing: run `cargo xtask setup`");
    Running {
        child: child.expect(&message),
    }
}

fn run(program: &str, words: &[&str]) -> String {
    let done = Said::of(Command::new(program).args(words));
    let said = done.err;
    assert!(done.code == Some(0), "{program} {words:?}: {said}");
    done.out
}

/// The keys that there have to be before anybody can be asked for one: the monitor's and the administrator's.
fn make_keyring(path: &str) {
    let make = [
        "--create-keyring",
        path,
        "--gen-key",
        "-n",
        "mon.",
        "--cap",
        "mon",
        "allow *",
    ];
    run("ceph-authtool", &make);
    let admin = [
        path,
        "--gen-key",
        "-n",
        "client.admin",
        "--cap",
        "mon",
        "allow *",
    ];
    run(
        "ceph-authtool",
        &[&admin[..], &["--cap", "osd", "allow *"]].concat(),
    );
}

impl Ceph {
    pub fn start(place: &Place, access: Access) -> Ceph {
        let ceph = (0..5).find_map(|number| Self::try_start(place, access, number));
        let ceph = ceph.expect("a monitor that answers");
        until("the disk does not come up", || {
            run("ceph", &["-c", &ceph.conf, "osd", "stat"]).contains("1 up")
        });
        run(
            "ceph",
            &["-c", &ceph.conf, "osd", "pool", "create", "rbd", "8", "8"],
        );
        ceph.rbd(&["pool", "init", "rbd"]);
        ceph
    }

    /// A cluster in a folder of its own, unless its monitor does not answer: somebody else has taken a
    /// port meanwhile.
    fn try_start(place: &Place, access: Access, number: u32) -> Option<Ceph> {
        let path = |name: &str| place.path(&format!("ceph-{number}")).join(name);
        let conf = path("ceph.conf").display().to_string();
        let port = free_ports();
        let (v2, v1) = (port, port + 1);
        let (fsid, folder) = (uuid(), path("").display().to_string());
        for name in ["mon", "osd"] {
            fs::create_dir_all(path(name)).expect("a folder");
        }
        let (way, keyring) = match access {
            Access::Everybody => ("none", String::new()),
            Access::Keys => (
                "cephx",
                format!("keyring = {folder}/keyring\n[osd]\nkeyring = {folder}/osd/keyring\n"),
            ),
        };
        let text = format!(
            "[global]\nfsid = {fsid}\nmon host = [v2:127.0.0.1:{v2},v1:127.0.0.1:{v1}]\n\
             public addr = 127.0.0.1\ncluster addr = 127.0.0.1\n\
             auth cluster required = {way}\nauth service required = {way}\n\
             auth client required = {way}\nosd pool default size = 1\n\
             osd pool default min size = 1\nosd pool default pg autoscale mode = off\n\
             osd crush chooseleaf type = 0\nmon allow pool size one = true\n\
             mon data avail warn = 1\nmon data avail crit = 1\nmon data = {folder}/mon\n\
             osd data = {folder}/osd\nosd objectstore = bluestore\n\
             bluestore block size = 2147483648\nbluestore cache autotune = false\n\
             bluestore cache size = 67108864\nosd memory target = 939524096\n\
             rbd default features = 61\nrun dir = {folder}\nlog file = {folder}/$name.log\n\
             admin socket = \n{keyring}"
        );
        fs::write(&conf, text).expect("a file");
        let map = path("monmap").display().to_string();
        let address = format!("[v2:127.0.0.1:{v2},v1:127.0.0.1:{v1}]");
        run(
            "monmaptool",
            &["--create", "--fsid", &fsid, "--addv", "a", &address, &map],
        );
        let keyring = path("keyring").display().to_string();
        let mut make = vec!["--mkfs", "-i", "a", "--monmap", &map, "-c", &conf];
        if access == Access::Keys {
            make_keyring(&keyring);
            make.extend(["--keyring", &keyring]);
        }
        run("ceph-mon", &make);
        let monitor = start("ceph-mon", &["-i", "a", "-c", &conf]);
        let disk = uuid();
        let ask = ["--connect-timeout", "40", "-c", &conf, "osd", "new", &disk];
        let done = Said::of(Command::new("ceph").args(ask));
        if done.code != Some(0) {
            eprintln!("{}", done.err);
            return None;
        }
        if access == Access::Keys {
            let to = path("osd/keyring").display().to_string();
            let may = ["mon", "allow profile osd", "osd", "allow *"];
            let get = ["-c", &conf, "-o", &to, "auth", "get-or-create", "osd.0"];
            run("ceph", &[&get[..], &may].concat());
        }
        run(
            "ceph-osd",
            &["-i", "0", "--mkfs", "--osd-uuid", &disk, "-c", &conf],
        );
        let osd = start("ceph-osd", &["-i", "0", "-c", &conf]);
        Some(Ceph {
            _monitor: monitor,
            _disk: osd,
            conf,
            monitor_port: v1,
        })
    }

    /// A user that may do this in the pool (`profile rbd`), and the key that it gets.
    pub fn add_user(&self, name: &str, profile: &str) -> String {
        let user = format!("client.{name}");
        let may = ["mon", "profile rbd", "osd", profile];
        let get = ["-c", &self.conf, "auth", "get-or-create-key", &user];
        run("ceph", &[&get[..], &may].concat()).trim().to_owned()
    }

    /// Runs Ceph's own tool for images.
    pub fn rbd(&self, words: &[&str]) -> String {
        run("rbd", &[&["-c", &self.conf], words].concat())
    }

    /// The name of an image of the pool, with what else is set.
    pub fn name(&self, image: &str) -> String {
        format!("rbd:rbd/{image}:conf={}", self.conf)
    }

    /// What an image holds, as Ceph's tool tells it.
    pub fn content(&self, place: &Place, image: &str) -> Vec<u8> {
        let file = place.name("exported");
        let _ = fs::remove_file(&file);
        self.rbd(&["export", "--no-progress", image, &file]);
        fs::read(file).expect("a file")
    }
}

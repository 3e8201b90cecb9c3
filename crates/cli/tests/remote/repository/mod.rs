//! Disks in repositories: in a folder, and in an object store; pushed, killed, damaged, pulled.

mod surprises;

use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

use vellum_testing::{Running, Said, until};

use serde_json::Value;

use super::gateway::Gateway;
use super::place::Place;

/// How a command of ours is run: with a store, or without.
struct Ours<'a> {
    place: &'a Place,
    gateway: Option<&'a Gateway>,
}

impl Ours<'_> {
    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vellum"));
        command.args(words).current_dir(self.place.root());
        if let Some(gateway) = self.gateway {
            command.envs(gateway.environment());
        }
        command
    }

    fn run(&self, words: &[&str]) -> Said {
        Said::of(&mut self.command(words))
    }

    fn good(&self, words: &[&str]) -> String {
        let said = self.run(words);
        assert_eq!(said.code, Some(0), "{words:?}: {}{}", said.out, said.err);
        said.out
    }

    fn json(&self, words: &[&str]) -> Value {
        let out = self.good(&[words, &["--output", "json"]].concat());
        serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out}"))
    }

    fn refused(&self, words: &[&str], message: &str) {
        let said = self.run(words);
        assert_eq!(said.code, Some(1), "{words:?}: {}", said.out);
        assert!(said.err.contains(message), "{words:?}: {}", said.err);
    }

    /// The disk in the repository holds what the file does, whose format is probed unless it is given.
    fn expect_equal(&self, disk: &str, file: &str, format: Option<&str>) {
        let disk = format!("repository:{disk}");
        let mut words = vec!["compare", "-f", "raw", &disk, file];
        words.extend(format.iter().flat_map(|format| ["-F", *format]));
        self.good(&words);
    }

    /// Everything is there, and what it was.
    fn verify(&self, repository: &str) -> Value {
        self.json(&["repo", "verify", "--read-data", repository])
    }
}

/// Pushes, changes, pushes the changes, and has all of it back.
fn there_and_back(ours: &Ours<'_>, repository: &str) {
    let place = ours.place;
    let vm = format!("{repository}:vm");
    let vm = vm.as_str();
    let disk = "www/disk.qcow2";
    let first = ours.json(&["push", "--track", disk, vm]);
    assert_eq!(first["number"], 1);
    assert_eq!(first["incremental"], false);
    // 5 MiB of one byte, 3 MiB of another: two chunks.
    assert_eq!(first["new"], 2 * 65536);
    place.must("qemu-io", &["-c", "write -P 3 40M 100k", disk]);
    let second = ours.json(&["push", "--track", disk, vm]);
    assert_eq!(second["incremental"], true);
    assert_eq!(second["read"], 2 * 65536);
    // Nothing has changed, and nobody needs to be told since when.
    let third = ours.json(&["push", "--since", "vm", disk, vm]);
    assert_eq!(
        (&third["read"], &third["sent"]),
        (&Value::from(0), &Value::from(0))
    );
    // Another disk with the same content is sent once.
    let other = ours.json(&["push", "www/disk.raw", &format!("{repository}:other")]);
    assert_eq!(other["new"], 0);
    let listed = ours.json(&["repo", "list", repository]);
    assert_eq!(listed.as_array().map(Vec::len), Some(4));
    assert!(ours.good(&["repo", "list", vm]).contains("vm@2"));
    ours.good(&["pull", vm, "back.qcow2"]);
    place.img("check back.qcow2");
    place.img(&["compare", disk, "back.qcow2"]);
    ours.good(&["pull", "-O", "raw", &format!("{vm}@1"), "back.img"]);
    place.img("compare -f raw -F raw back.img www/disk.raw");
    // Overlays can be written to at once.
    fs::create_dir(place.path("cache")).expect("a folder");
    place.good_command(Command::new("chmod").arg("700").arg(place.path("cache")));
    ours.good(&["open", "--cache", "cache", vm, "overlay.qcow2"]);
    ours.good(&[
        "io",
        "-c",
        "write -P 9 1M 1M",
        "-c",
        "read -P 3 40M 100k",
        "overlay.qcow2",
    ]);
    ours.good(&["push", "overlay.qcow2", &format!("{repository}:clone")]);
    assert_eq!(
        ours.verify(repository)["problems"],
        Value::Array(Vec::new())
    );
    what_is_old_goes(ours, repository, vm);
}

/// Refusals, and removals.
fn what_is_old_goes(ours: &Ours<'_>, repository: &str, vm: &str) {
    let disk = "www/disk.qcow2";
    ours.refused(&["open", vm, "overlay.qcow2"], "is there already");
    ours.refused(
        &["pull", &format!("{vm}@9"), "x"],
        "there is no disk 'vm@9'",
    );
    // What is old goes, with what nothing else needs.
    ours.good(&["repo", "prune", "--keep", "1", repository]);
    ours.good(&["repo", "remove", &format!("{repository}:clone")]);
    let collected = ours.json(&["repo", "gc", repository]);
    assert!(
        collected["removed-objects"].as_u64() > Some(0),
        "{collected}"
    );
    let verified = ours.verify(repository);
    assert_eq!(verified["problems"], Value::Array(Vec::new()));
    assert_eq!(
        (&verified["disks"], &verified["unused-objects"]),
        (&2.into(), &0.into())
    );
    ours.expect_equal(vm, disk, None);
}

impl Place {
    fn good_command(&self, command: &mut Command) {
        let done = Said::of(command);
        assert!(done.code == Some(0), "{done:?}");
    }
}

#[test]
fn disks_go_into_a_folder_and_come_back() {
    let place = Place::with_disk();
    let ours = Ours {
        place: &place,
        gateway: None,
    };
    there_and_back(&ours, "backups/all");
    // A folder that is something else's is left alone.
    ours.refused(
        &["push", "www/disk.raw", "www"],
        "neither empty nor a repository",
    );
    ours.refused(&["repo", "list", "nowhere"], "there is no repository");
    assert!(!place.has("nowhere"));
}

#[test]
fn disks_go_into_an_object_store_and_come_back() {
    let place = Place::with_disk();
    let gateway = Gateway::start(&place);
    let ours = Ours {
        place: &place,
        gateway: Some(&gateway),
    };
    there_and_back(&ours, "s3://images/backups/all");
    ours.refused(
        &["repo", "list", "s3://images/nothing"],
        "there is no repository",
    );
    ours.refused(
        &["repo", "list", "https://h/r"],
        "a folder or an object store",
    );
}

/// Raw disks of 8 MiB, each of other bytes.
fn small_disks(place: &Place) -> Vec<String> {
    let disk = |number: u32| {
        let name = format!("disk{number}");
        let write = format!("write -P {} 0 8M", number * 10);
        place.img(&["create", "-q", "-f", "raw", &name, "8M"]);
        place.must("qemu-io", &["-f", "raw", "-c", &write, &name]);
        name
    };
    (1..=5).map(disk).collect()
}

/// Pushes all disks at once, each to its own target; exit codes, and what the programs said.
fn push_at_once(ours: &Ours<'_>, targets: &[(&String, String)]) -> Vec<(Option<i32>, String)> {
    let start = |(disk, target): &(&String, String)| {
        let mut command = ours.command(&["push", "-q", disk, target]);
        Running::start(command.stderr(Stdio::piped()))
    };
    let pushes: Vec<_> = targets.iter().map(start).collect();
    let ends = pushes.into_iter().map(|push| {
        let (_, said) = push.said();
        (said.code, said.err)
    });
    ends.collect()
}

#[test]
fn of_pushes_at_once_to_one_tag_each_disk_is_whole() {
    let place = Place::with_disk();
    let ours = Ours {
        place: &place,
        gateway: None,
    };
    let disks = small_disks(&place);
    let targets: Vec<_> = disks.iter().map(|d| (d, "many:vm".to_owned())).collect();
    let mut pushed = 0;
    for (code, said) in push_at_once(&ours, &targets) {
        match code {
            Some(0) => pushed += 1,
            code => {
                assert_eq!(code, Some(1), "{said}");
                let refused = said.contains("another push to 'vm'") || said.contains("others push");
                assert!(refused, "{said}");
            }
        }
    }
    let verified = ours.verify("many");
    assert_eq!(verified["problems"], Value::Array(Vec::new()));
    assert_eq!(verified["disks"], pushed);
    // Whoever was refused pushes again.
    for disk in &disks {
        ours.good(&["push", "-q", disk, "many:vm"]);
        ours.expect_equal("many:vm", disk, None);
    }
}

/// To tags of their own, and to a repository that is there: versitygw lets two requests with `If-None-Match: *` that
/// come at the same time both make the object, so which of them won would be luck.
#[test]
fn pushes_at_once_into_an_object_store_do_not_disturb_each_other() {
    let place = Place::with_disk();
    let gateway = Gateway::start(&place);
    let ours = Ours {
        place: &place,
        gateway: Some(&gateway),
    };
    let disks = small_disks(&place);
    ours.good(&["push", "-q", &disks[0], "s3://images/many:first"]);
    let target = |disk| (disk, format!("s3://images/many:{disk}"));
    let targets: Vec<_> = disks.iter().map(target).collect();
    for (code, said) in push_at_once(&ours, &targets) {
        assert_eq!(code, Some(0), "{said}");
    }
    let verified = ours.verify("s3://images/many");
    assert_eq!(verified["problems"], Value::Array(Vec::new()));
    assert_eq!(verified["disks"], 1 + disks.len());
    for (disk, target) in &targets {
        ours.expect_equal(target, disk, None);
    }
}

#[test]
fn a_push_that_is_killed_is_taken_up_again() {
    let place = Place::with_disk();
    let ours = Ours {
        place: &place,
        gateway: None,
    };
    // What takes a while.
    let mut random = fastrand::Rng::with_seed(1);
    let mut bytes = vec![0; 96 << 20];
    random.fill(&mut bytes);
    place.write("large", &bytes);
    let mut killed = 0;
    for round in 0..12 {
        let mut push = ours.command(&["push", "large", "r:vm"]);
        let mut push = push.stdout(Stdio::null()).spawn().expect("our program");
        std::thread::sleep(Duration::from_millis(random.u64(20..120) * (1 + round / 4)));
        if push.try_wait().expect("its state").is_none() {
            push.kill().expect("a kill");
            killed += 1;
        }
        push.wait().expect("it ends");
        if place.has("r") && fs::exists(place.path("r/vellum-repository")).unwrap() {
            assert_eq!(ours.verify("r")["problems"], Value::Array(Vec::new()));
        }
    }
    assert!(killed > 0, "this machine is too fast for the test");
    let said = ours.good(&["push", "large", "r:vm"]);
    assert!(said.contains("of 96 MiB read"), "{said}");
    // What killed ones have sent was not sent again, and is found by all others.
    let again = ours.json(&["push", "large", "r:again"]);
    assert_eq!(again["new"], 0);
    ours.expect_equal("r:vm", "large", Some("raw"));
    let verified = ours.verify("r");
    assert_eq!(verified["problems"], Value::Array(Vec::new()));
    // Nobody runs, so what is left of the killed ones goes.
    ours.good(&["repo", "gc", "--stale-after", "0s", "r"]);
    assert_eq!(ours.verify("r")["unused-objects"], 0);
}

#[test]
fn the_users_own_bitmap_tells_what_has_changed() {
    let place = Place::with_disk();
    let ours = Ours {
        place: &place,
        gateway: None,
    };
    let disk = "www/disk.qcow2";
    ours.refused(
        &["push", "--bitmap", "b", disk, "r:vm"],
        "push all of it first",
    );
    ours.refused(
        &["push", "--track", "www/disk.raw", "r:vm"],
        "needs a disk in qcow2",
    );
    ours.good(&["push", disk, "r:vm"]);
    place.img(&["bitmap", "--add", disk, "b"]);
    place.must("qemu-io", &["-c", "write -P 5 50M 64k", disk]);
    let pushed = ours.json(&["push", "--bitmap", "b", disk, "r:vm"]);
    assert_eq!(
        (&pushed["incremental"], &pushed["read"]),
        (&true.into(), &65536.into())
    );
    ours.expect_equal("r:vm", disk, None);
    ours.refused(&["push", "--bitmap", "c", disk, "r:vm"], "'c'");
    ours.refused(
        &["push", "--since", "vm", disk, "r:vm"],
        "does not know what has changed",
    );
    // A disk that has grown, and one that has shrunk.
    for (size, mebibytes) in [("70M", 70), ("33M", 33)] {
        ours.good(&["push", "--track", disk, "r:vm"]);
        place.img(&["bitmap", "--remove", disk, "b"]);
        place.must("our qemu-img", &["resize", "--shrink", disk, size]);
        let pushed = ours.json(&["push", "--track", disk, "r:vm"]);
        assert_eq!(pushed["virtual-size"], mebibytes << 20);
        assert_eq!(pushed["incremental"], true);
        ours.expect_equal("r:vm", disk, None);
        place.img(&["bitmap", "--add", disk, "b"]);
    }
}

/// Pushes the disk to another tag, with all of its chunks.
fn push_again(ours: &Ours<'_>) {
    let pushed = ours.json(&["push", "--full", "small", "r:again"]);
    assert_eq!(pushed["new"], 1 << 20);
    ours.expect_equal("r:again", "small", Some("raw"));
    ours.good(&["repo", "remove", "r:again"]);
}

#[test]
fn damage_is_named_and_nothing_of_it_is_given_out() {
    let place = Place::with_disk();
    let ours = Ours {
        place: &place,
        gateway: None,
    };
    let mut bytes = vec![0; 1 << 20];
    fastrand::Rng::with_seed(2).fill(&mut bytes);
    place.write("small", &bytes);
    ours.good(&["push", "small", "r:vm"]);
    let mut files = Vec::new();
    for folder in ["segments", "maps", "tags", "indexes"] {
        let below = fs::read_dir(place.path("r").join(folder)).expect("a folder");
        let below = below.flat_map(|entry| fs::read_dir(entry.unwrap().path()).unwrap());
        files.extend(below.map(|file| file.unwrap().path()));
    }
    assert_eq!(files.len(), 4);
    for file in files {
        let good = fs::read(&file).expect("an object");
        for at in [0, good.len() / 2, good.len().saturating_sub(60)] {
            let mut bad = good.clone();
            bad[at] ^= 4;
            fs::write(&file, &bad).expect("an object");
            let said = ours.run(&["repo", "verify", "--read-data", "r"]);
            assert_eq!(said.code, Some(2), "{file:?} {at}: {}", said.err);
            let is_below = |folder: &str| file.components().any(|part| part.as_os_str() == folder);
            if is_below("indexes") {
                // It only costs that chunks are sent again.
                push_again(&ours);
                continue;
            }
            let said = ours.run(&["pull", "r:vm", "back.qcow2"]);
            assert_eq!(said.code, Some(1), "{file:?} {at}");
            assert!(!place.has("back.qcow2"));
            if is_below("segments") {
                assert!(said.err.contains("push the disk again"), "{}", said.err);
                assert!(said.err.contains(": segments/"), "{}", said.err);
                push_again(&ours);
            }
        }
        fs::remove_file(&file).expect("an object");
        if file.components().any(|part| part.as_os_str() == "segments") {
            push_again(&ours);
        }
        let is_list = file.components().any(|part| part.as_os_str() == "indexes");
        let pulled = ours.run(&["pull", "r:vm", "back.qcow2"]).code;
        assert_eq!(pulled == Some(0), is_list);
        fs::write(&file, good).expect("an object");
    }
    assert_eq!(ours.verify("r")["problems"], Value::Array(Vec::new()));
    let left = fs::read_dir(place.root()).expect("a folder");
    let left = left.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned());
    assert!(left.into_iter().all(|name| !name.contains("pull-")));
}

/// Serves a disk to a guest, and a snapshot of it with its bitmap.
fn serve_snapshot(place: &Place, socket: &str) -> Running {
    let mut daemon = Command::new(env!("CARGO_BIN_EXE_vellum"));
    daemon.arg("daemon").current_dir(place.root());
    for words in [
        [
            "--blockdev",
            "driver=qcow2,node-name=disk,file.driver=file,file.filename=www/disk.qcow2",
        ],
        [
            "--blockdev",
            "driver=qcow2,node-name=tmp,file.driver=file,file.filename=tmp.qcow2",
        ],
        [
            "--blockdev",
            "driver=copy-before-write,node-name=cbw,file=disk,target=tmp",
        ],
        [
            "--blockdev",
            "driver=snapshot-access,node-name=snapshot,file=cbw",
        ],
        [
            "--nbd-server",
            &format!("addr.type=unix,addr.path={socket}"),
        ],
        [
            "--export",
            "type=nbd,id=guest,node-name=cbw,name=disk,writable=on",
        ],
        [
            "--export",
            "type=nbd,id=backup,node-name=snapshot,name=backup,bitmaps.0.node=disk,bitmaps.0.name=b",
        ],
        ["--pidfile", "live.pid"],
    ] {
        daemon.args(words);
    }
    let daemon = daemon.stdin(Stdio::null()).spawn().expect("our daemon");
    let daemon = Running { child: daemon };
    until("a daemon", || place.has("live.pid"));
    daemon
}

#[test]
fn a_disk_in_use_is_pushed_through_a_snapshot() {
    let place = Place::with_disk();
    let ours = Ours {
        place: &place,
        gateway: None,
    };
    let disk = "www/disk.qcow2";
    ours.good(&["push", disk, "r:vm"]);
    place.img(&["bitmap", "--add", disk, "b"]);
    place.must("qemu-io", &["-c", "write -P 5 10M 64k", disk]);
    place.img("create -q -f qcow2 tmp.qcow2 64M");
    let socket = place.name("live.sock");
    let _daemon = serve_snapshot(&place, &socket);
    fs::copy(place.path(disk), place.path("moment.qcow2")).expect("a copy");
    let guest = format!("nbd+unix:///disk?socket={socket}");
    // Not in the snapshot any more, inside and outside of what the bitmap has.
    for write in ["write -P 6 10M 64k", "write -P 7 0 1M"] {
        ours.good(&["io", "-f", "raw", "-c", write, &guest]);
    }
    let backup = format!("nbd+unix:///backup?socket={socket}");
    let pushed = ours.json(&["push", "-f", "raw", "--bitmap", "b", &backup, "r:vm"]);
    // The bitmap goes on noting what the guest writes, so it tells too much rather than too little.
    assert_eq!(
        (&pushed["incremental"], &pushed["read"]),
        (&true.into(), &(17 * 65536).into())
    );
    place.img("check -U moment.qcow2");
    ours.expect_equal("r:vm", "moment.qcow2", None);
    ours.refused(
        &["push", "-f", "raw", "--bitmap", "c", &backup, "r:vm"],
        "c",
    );
}

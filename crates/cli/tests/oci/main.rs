//! `vellum oci`: with a real registry (Debian's docker-registry), and with one that lies.

mod fake;

use std::net::TcpStream;
use std::ops::Deref;
use std::process::Stdio;
use std::time::Duration;

use fake::{Answer, Fake};
use sha2::{Digest, Sha256};
use vellum_testing::{Folder, Running, until};

const VELLUM: &str = env!("CARGO_BIN_EXE_vellum");

struct Place(Folder);

impl Deref for Place {
    type Target = Folder;

    fn deref(&self) -> &Folder {
        &self.0
    }
}

impl Place {
    fn new() -> Place {
        Place(Folder::new(VELLUM))
    }

    /// What a line that must fail with exit code 1 says. No target is left, and nothing half written.
    #[track_caller]
    fn fails(&self, line: &str) -> String {
        let said = self.0.fails(line);
        assert!(!self.has("got"), "{line}");
        let mut names = self.names().into_iter();
        assert!(!names.any(|name| name.starts_with(".vellum")), "{line}");
        said
    }

    /// A disk with noise and zeroes.
    fn disk(&self) {
        self.done(
            "qemu-img create -q -f qcow2 disk 256M && head -c 6M /dev/urandom > noise && \
             qemu-io -c 'write -s noise 9M 6M' -c 'write -P 1 100M 20M' disk > /dev/null && rm noise",
        );
    }
}

/// A registry that is ended when it is dropped.
struct Registry {
    _process: Running,
    port: u16,
}

impl Registry {
    fn start(place: &Place) -> Registry {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port();
        drop(listener);
        let root = place.path("registry");
        let text = format!(
            "version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {}}}}}\n\
             http: {{addr: '127.0.0.1:{port}'}}\n",
            root.display()
        );
        place.write("registry.yml", text);
        let mut command = place.command("docker-registry", "serve registry.yml");
        let process = Running::start(command.stdout(Stdio::null()).stderr(Stdio::null()));
        until("a registry", || {
            TcpStream::connect(("127.0.0.1", port)).is_ok()
        });
        Registry {
            _process: process,
            port,
        }
    }
}

#[test]
fn a_disk_goes_to_a_registry_and_comes_back() {
    let place = Place::new();
    place.disk();
    let registry = Registry::start(&place);
    let image = format!("127.0.0.1:{}/vms/debian", registry.port);
    for compression in ["none", "gzip", "zstd"] {
        let push = format!(
            "$VELLUM oci push --plain-http --compression {compression} disk {image}:{compression}"
        );
        let said = place.done(&push);
        let (_, digest) = said.split_once(": ").expect("a digest");
        assert_eq!(place.done(&push), said, "what is there already is the same");
        for name in [
            format!("{image}:{compression}"),
            format!("{image}@{digest}"),
        ] {
            let said = place.done(&format!("$VELLUM oci pull --plain-http oci://{name} got"));
            assert!(said.starts_with("got: disk/disk.qcow2 of"), "{said}");
            place.done("cmp disk got && qemu-img check -q got && rm got");
        }
        // As others see it.
        let list = place.done(&format!(
            "url=http://{}; get() {{ curl -sf -H 'Accept: application/vnd.oci.image.manifest.v1+json' \
             $url/$1; }}; layer=$(get manifests/{compression} | grep -o '\"layers\".*' | grep -o \
             'sha256:[0-9a-f]*'); get blobs/$layer > layer && tar tvf layer --numeric-owner",
            image.replace("/vms", "/v2/vms")
        ));
        let lines: Vec<&str> = list.lines().collect();
        assert!(lines[0].starts_with("drwxr-xr-x 107/107"), "{list}");
        assert!(lines[1].starts_with("-r--r----- 107/107"), "{list}");
        assert!(
            lines[1].ends_with("disk/disk.qcow2") && lines.len() == 2,
            "{list}"
        );
    }
    place.done("qemu-img convert -O raw disk raw");
    place.done(&format!(
        "$VELLUM oci push -q -f raw --plain-http raw {image}"
    ));
    place.done(&format!(
        "$VELLUM oci pull -q --plain-http {image} got && cmp raw got"
    ));
    let said = place.shell(&format!("$VELLUM oci pull --plain-http {image} got"));
    assert!(said.err.contains("--force replaces it"));
    place.done(&format!(
        "$VELLUM oci pull -q --plain-http --force {image}:gzip got && cmp disk got"
    ));
}

#[test]
fn what_cannot_be_pushed_or_pulled_is_refused() {
    let place = Place::new();
    place.disk();
    let registry = Registry::start(&place);
    let image = format!("127.0.0.1:{}/a", registry.port);
    place.done("qemu-img create -q -f qcow2 -b disk -F qcow2 overlay");
    place.done("qemu-img create -q -f qcow2 -o data_file=data extern 1M");
    for (line, words) in [
        (
            format!("push --plain-http overlay {image}"),
            "has a backing file",
        ),
        (
            format!("push --plain-http extern {image}"),
            "has a data file",
        ),
        (format!("push --plain-http none {image}"), "No such file"),
        (
            format!("push --compression xz disk {image}"),
            "none, gzip or zstd",
        ),
        (
            format!("push disk {image}@sha256:{}", "0".repeat(64)),
            "follows from what it holds",
        ),
        ("push disk a:b".to_owned(), "names no registry"),
        ("push disk".to_owned(), "Expecting push DISK"),
        (format!("pull --plain-http {image} got"), "no such image"),
        (format!("pull {image} got"), "Failed to connect"),
        (
            "pull --plain-http 127.0.0.1:1/a got".to_owned(),
            "Connection refused",
        ),
        (
            format!("pull --user a --password-secret b {image} got"),
            "No secret",
        ),
    ] {
        let said = place.fails(&format!("$VELLUM oci {line}"));
        assert!(said.contains(words), "{line}: {said}");
    }
    // And what somebody is writing to. The shell stays to the end: if it became its last command,
    // qemu-io's input would end there.
    let said = place.fails(&format!(
        "coproc qemu-io disk; read -r -n 8 -u ${{COPROC[0]}}; \
         $VELLUM oci push --plain-http disk {image}; exit $?"
    ));
    assert!(said.contains("lock"), "{said}");
}

fn digest(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    let digits: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{digits}")
}

fn manifest(layer: &[u8], len: usize) -> String {
    let digest = digest(layer);
    format!("{{\"layers\":[{{\"digest\":\"{digest}\",\"size\":{len}}}]}}")
}

/// An archive made by tar.
fn archive(place: &Place, line: &str) -> Vec<u8> {
    place.done(&format!(
        "rm -rf tree t && mkdir -p tree/disk && cd tree && {line}"
    ));
    std::fs::read(place.path("t")).expect("an archive")
}

/// A registry with an image of one layer, `a/b:c`.
fn with_layer(layer: &[u8]) -> Fake {
    let fake = Fake::start();
    fake.put(
        "/v2/a/b/manifests/c",
        Answer::ok(manifest(layer, layer.len())),
    );
    fake.put(
        &format!("/v2/a/b/blobs/{}", digest(layer)),
        Answer::ok(layer),
    );
    fake
}

fn pull(fake: &Fake) -> String {
    format!(
        "$VELLUM oci pull --plain-http 127.0.0.1:{}/a/b:c got",
        fake.port
    )
}

#[test]
fn archives_of_others_are_understood() {
    let place = Place::new();
    let disk = "head -c 300k /dev/urandom > ../r; cp ../r disk/my.img";
    for (line, options) in [
        ("tar cf ../t disk", ""),
        ("tar czf ../t ./disk", ""),
        ("tar c disk | zstd -q > ../t", ""),
        (
            "tar cf ../t -H pax --pax-option=a:=b $PWD/disk -P --transform s,^$PWD,,",
            "",
        ),
        (
            "echo x > other; ln -s other disk/.l; tar cf ../t other disk",
            "",
        ),
        (
            "mkdir disk/.x; echo 1 > disk/.wh.my.img; tar cf ../t disk",
            "",
        ),
        ("mv disk/my.img x; tar cf ../t x", "--path /x"),
        (
            "n=$(printf %0150d 1); mkdir -p a/$n; mv disk/my.img a/$n/f; tar cf ../t a; mv a/$n/f ../r",
            "--path a/$(printf %0150d 1)/f",
        ),
    ] {
        let layer = archive(&place, &format!("{disk}; {line}"));
        let fake = with_layer(&layer);
        place.done(&format!("{} {options} && cmp r got && rm got", pull(&fake)));
    }
}

#[test]
fn archives_that_hold_no_disk_or_mean_harm_are_refused() {
    let place = Place::new();
    for (line, words) in [
        ("echo > disk/.hidden; tar cf ../t disk", "holds no disk"),
        (
            "mkdir -p disk/a; echo > disk/a/b; tar cf ../t disk",
            "holds no disk",
        ),
        (
            "ln -s /etc/passwd disk/disk.img; tar cf ../t disk",
            "holds no disk",
        ),
        (
            "echo > x; tar cPf ../t --transform s,x,../disk/x, x",
            "leads upwards",
        ),
        ("head -c 1M /dev/urandom > ../t", "cannot be unpacked"),
        (
            "head -c 1M /dev/zero > disk/d; (tar cf - disk || true) | head -c 100k > ../t",
            "ends inside the disk",
        ),
        (
            "head -c 1M /dev/zero > disk/d; (tar czf - disk || true) | head -c 500 > ../t",
            "cannot be unpacked",
        ),
        ("> ../t", "holds no disk"),
    ] {
        let fake = with_layer(&archive(&place, line));
        let said = place.fails(&pull(&fake));
        assert!(said.contains(words), "{line}: {said}");
    }
}

#[test]
fn registries_that_lie_are_found_out() {
    let place = Place::new();
    let layer = archive(&place, "head -c 3M /dev/urandom > disk/d; tar cf ../t disk");
    let blob = format!("/v2/a/b/blobs/{}", digest(&layer));
    let mut changed = layer.clone();
    changed[2_000_000] ^= 1;
    let longer = [layer.clone(), vec![0; 512]].concat();
    let list = |inner: &str| {
        let digest = digest(inner.as_bytes());
        format!("{{\"manifests\":[{{\"digest\":\"{digest}\",\"size\":1}}]}}")
    };
    let none = "x".repeat(5 << 20);
    for (path, body, words) in [
        (
            blob.as_str(),
            changed.as_slice(),
            "not what its digest says",
        ),
        (&blob, &longer, "longer than its manifest says"),
        (&blob, &layer[..1000], "ends too early"),
        ("/v2/a/b/manifests/c", none.as_bytes(), "answer is too long"),
        ("/v2/a/b/manifests/c", b"{}", "not known"),
        ("/v2/a/b/manifests/c", list("x").as_bytes(), "no such image"),
    ] {
        let fake = with_layer(&layer);
        fake.put(path, Answer::ok(body));
        let said = place.fails(&pull(&fake));
        assert!(said.contains(words), "{path}: {said}");
    }
    // A list that leads to itself, and one whose manifest is another.
    let fake = with_layer(&layer);
    let other = manifest(&layer, layer.len());
    fake.put("/v2/a/b/manifests/c", Answer::ok(list("x")));
    fake.put(
        &format!("/v2/a/b/manifests/{}", digest(b"x")),
        Answer::ok(other),
    );
    let said = place.fails(&pull(&fake));
    assert!(said.contains("not what its digest says"), "{said}");
    let errors = Answer::ok("{\"errors\":[{\"message\":\"go \\u001b[31m away\"}]}").status(403);
    fake.put("/v2/a/b/manifests/c", errors);
    let said = place.fails(&pull(&fake));
    assert!(
        said.contains("does not let us") && said.contains("go [31m away"),
        "{said}"
    );
    fake.put("/v2/a/b/manifests/c", Answer::leads("file:///etc/passwd"));
    let said = place.fails(&pull(&fake));
    assert!(said.contains("not https"), "{said}");
    let round = Answer::leads("/v2/a/b/manifests/c");
    fake.put("/v2/a/b/manifests/c", round);
    let said = place.fails(&pull(&fake));
    assert!(said.contains("leads on more than"), "{said}");
}

#[test]
fn a_layer_goes_on_where_its_connection_breaks() {
    let place = Place::new();
    let layer = archive(
        &place,
        "head -c 3M /dev/urandom > disk/d; tar cf ../t disk; cp disk/d ..",
    );
    let fake = with_layer(&layer);
    let blob = format!("/v2/a/b/blobs/{}", digest(&layer));
    fake.put(&blob, Answer::ok(layer.as_slice()).cut_after(1_000_000));
    place.done(&format!("{} && cmp d got", pull(&fake)));
    let asked = fake.asked(&blob);
    assert!(
        asked.len() >= 3 && asked[1].contains("range: bytes="),
        "{asked:?}"
    );
}

#[test]
fn who_asks_is_shown_to_the_registry_alone() {
    let place = Place::new();
    let layer = archive(&place, "echo 1 > disk/d; tar cf ../t disk");
    let blob = format!("/v2/a/b/blobs/{}", digest(&layer));
    let elsewhere = Fake::start();
    elsewhere.put("/x", Answer::ok(layer.as_slice()));
    let login = "--user me --object secret,id=s,data=word --password-secret s";
    for kind in ["Basic", "Bearer"] {
        let fake = with_layer(&layer);
        let challenge = match kind {
            "Basic" => "Basic realm=\"r\"".to_owned(),
            _ => format!(
                "Bearer realm=\"http://127.0.0.1:{}/token\",service=\"s\",scope=\"repository:a/b:pull\"",
                fake.port
            ),
        };
        fake.protect(&challenge);
        fake.put("/token", Answer::ok("{\"token\":\"known\"}"));
        fake.put(
            &blob,
            Answer::leads(&format!("http://127.0.0.1:{}/x", elsewhere.port)),
        );
        place.done(&format!("{} {login} && rm got", pull(&fake)));
        let shown = fake.asked(&blob);
        let wanted = match kind {
            "Basic" => "authorization: basic bwu6d29yza==",
            _ => "authorization: bearer known",
        };
        assert!(shown.iter().any(|head| head.contains(wanted)), "{shown:?}");
        if kind == "Basic" {
            let said = place.fails(&pull(&fake));
            assert!(said.contains("--user and --password-secret"), "{said}");
        } else {
            let asked = fake.asked("/token?service=s&scope=repository%3Aa%2Fb%3Apull");
            assert!(asked[0].contains("basic bwu6d29yza=="), "{asked:?}");
        }
    }
    let seen = elsewhere.asked("/x");
    assert!(
        !seen.is_empty() && !seen.iter().any(|head| head.contains("authorization")),
        "{seen:?}"
    );
}

/// Who keeps the bytes for a registry is shown no login, and names nobody who is.
#[test]
fn servers_that_a_registry_leads_to_may_not_ask_who_asks() {
    let place = Place::new();
    let layer = archive(&place, "echo 1 > disk/d; tar cf ../t disk");
    let blob = format!("/v2/a/b/blobs/{}", digest(&layer));
    let (elsewhere, thief) = (Fake::start(), Fake::start());
    elsewhere.put("/x", Answer::ok(layer.as_slice()));
    thief.put("/token", Answer::ok("{\"token\":\"t\"}"));
    let to = format!("http://127.0.0.1:{}/x", elsewhere.port);
    let login = "--user me --object secret,id=s,data=word --password-secret s";
    let realm = format!("Bearer realm=\"http://127.0.0.1:{}/token\"", thief.port);
    for challenge in ["Basic realm=\"r\"", &realm] {
        elsewhere.protect(challenge);
        // While a blob is read, and while one is sent.
        let fake = with_layer(&layer);
        fake.put(&blob, Answer::leads(&to));
        let said = place.fails(&format!("{} {login}", pull(&fake)));
        assert!(said.contains("does not let us"), "{said}");
        fake.put("/v2/a/b/blobs/uploads/", Answer::leads(&to).status(202));
        place.done("qemu-img create -q -f qcow2 disk.qcow2 1M");
        let said = place.fails(&format!(
            "$VELLUM oci push --plain-http {login} disk.qcow2 127.0.0.1:{}/a/b:c",
            fake.port
        ));
        assert!(said.contains("does not let us"), "{said}");
    }
    assert!(thief.asked("/token").is_empty(), "a login was asked for");
    let mut heads = elsewhere.asked("/x");
    heads.extend(elsewhere.asked("/x?digest="));
    assert!(!heads.is_empty());
    assert!(!heads.iter().any(|head| head.contains("authorization")));
}

/// Killed in the middle, a pull leaves no disk under its name.
#[test]
fn a_pull_that_is_killed_leaves_no_disk() {
    let place = Place::new();
    let layer = archive(&place, "head -c 3M /dev/urandom > disk/d; tar cf ../t disk");
    let fake = with_layer(&layer);
    let blob = format!("/v2/a/b/blobs/{}", digest(&layer));
    fake.put(&blob, Answer::ok(layer.as_slice()).stalls_after(1_000_000));
    let pull = place.start_shell(&format!("exec {}", pull(&fake)));
    until("a request", || !fake.asked(&blob).is_empty());
    std::thread::sleep(Duration::from_millis(200));
    pull.kill();
    assert!(!place.path("got").exists());
}

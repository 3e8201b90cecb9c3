//! `qemu-storage-daemon` beside the real one, and as a server.

use std::io::Read;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

const NAME: &str = "qemu-storage-daemon";

/// A folder with images and a link to our daemon.
struct Place {
    folder: TempDir,
}

impl Place {
    fn new() -> Place {
        let folder = tempfile::tempdir().expect("a folder");
        symlink(env!("CARGO_BIN_EXE_vellum"), folder.path().join(NAME)).expect("a link");
        let place = Place { folder };
        place.must("qemu-img", "create -q -f qcow2 base 8M");
        place.must("qemu-img", "create -q -f qcow2 top 8M");
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self, program: &Path, words: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.current_dir(self.folder.path()).args(words);
        command
    }

    fn must(&self, program: &str, line: &str) -> String {
        let words: Vec<&str> = line.split_whitespace().collect();
        self.must_words(program, &words)
    }

    fn must_words(&self, program: &str, words: &[&str]) -> String {
        let output = self.command(Path::new(program), words).output();
        let output = output.expect("the program of `cargo xtask setup`");
        assert!(output.status.success(), "{program} {words:?}: {output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Starts our daemon and waits until it listens.
    fn start(&self, words: &[&str]) -> Child {
        let child = self.command(&self.path(NAME), words).spawn();
        let child = child.expect("the program runs");
        wait_for("a socket", || {
            UnixStream::connect(self.path("sock")).is_ok()
        });
        child
    }

    /// Ends a daemon as a service manager would.
    fn end(&self, mut child: Child) {
        let pid = child.id().to_string();
        self.must_words("kill", &["-TERM", &pid]);
        let mut code = None;
        wait_for("the end", || {
            code = child
                .try_wait()
                .expect("a child")
                .map(|status| status.code());
            code.is_some()
        });
        assert_eq!(code, Some(Some(0)));
    }
}

fn wait_for(what: &str, mut is_true: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !is_true() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

const SERVER: &str = "addr.type=unix,addr.path=sock,max-connections=16";
const URI: &str = "nbd+unix:///?socket=sock";

#[test]
fn errors_agree() {
    let place = Place::new();
    let file = "--blockdev driver=file,node-name=f,filename=base";
    let server = format!("--nbd-server {SERVER}");
    let lines = [
        "extra".to_owned(),
        "--foo".into(),
        "--blockdev".into(),
        "--blockdev node-name=x".into(),
        "--blockdev driver=bad,node-name=x".into(),
        "--blockdev bad,node-name=x".into(),
        "--blockdev null-co,node-name=0".into(),
        "--blockdev driver=file,node-name=f,filename=nosuch".into(),
        "--blockdev driver=file,node-name=0f,filename=base".into(),
        format!("{file} {file}"),
        format!("{file} --blockdev driver=qcow2,node-name=d,file=g"),
        format!("{file} --blockdev driver=qcow2,node-name=d,file=f,backing=g"),
        format!("{file} --export type=nbd,id=e,node-name=f"),
        format!("{server} --export type=nbd,id=e,node-name=f"),
        format!("{server} {file},read-only=on --export nbd,id=e,node-name=f,writable=on"),
        format!("{server} {file} --export nbd,id=e,node-name=f --export nbd,id=e,node-name=f"),
        format!("{server} {file} --export nbd,id=e,node-name=f --export nbd,id=g,node-name=f"),
        format!("{server} {file} --export nbd,id=e,node-name=f,iothread=none"),
        format!("{server} {file} --export nbd,id=e,node-name=f,foo=1"),
        "--export type=bad,id=e,node-name=f".into(),
        "--export id=e,node-name=f".into(),
        "--export type=nbd,node-name=f".into(),
        "--export type=nbd,id=e".into(),
        "--object bad,id=x".into(),
        "--object iothread".into(),
        "--object iothread,id=a --object iothread,id=a".into(),
        "--nbd-server addr.type=unix".into(),
        "--nbd-server addr.type=bad".into(),
        "--nbd-server addr.type=fd".into(),
        "--nbd-server addr.type=fd,addr.str=77".into(),
        "--nbd-server addr.type=fd,addr.str=x".into(),
        "--nbd-server addr.type=fd,addr.str=0".into(),
        "--nbd-server addr.type=inet,addr.host=127.0.0.1,addr.port=x".into(),
        format!("{server} {server}"),
        "--pidfile /nonexistent/x".into(),
        "--monitor chardev=x".into(),
        "--monitor pretty=on".into(),
        "--chardev foo,id=a".into(),
        "--chardev stdio".into(),
        "--chardev stdio,id=a --daemonize".into(),
        "--chardev null,id=a --monitor a --monitor a".into(),
        "--chardev null,id=a --monitor a,mode=readline".into(),
        "--chardev null,id=a --monitor a,mode=x".into(),
        "--chardev null,id=a --monitor a,foo=1".into(),
        "--chardev socket,id=a,path=/nonexistent/x".into(),
        "--chardev socket,id=a,path=/nonexistent/x,server=on,wait=off".into(),
        "--chardev socket,id=a,path=x,wait=on".into(),
        "--chardev socket,id=a,path=x,foo=1".into(),
    ];
    for line in lines {
        let words: Vec<&str> = line.split_whitespace().collect();
        let run = |program: &Path| {
            let output = place.command(program, &words).output().expect("it runs");
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            (output.status.code(), text)
        };
        assert_eq!(run(&place.path(NAME)), run(Path::new(NAME)), "{line}");
    }
}

#[test]
fn every_program_has_the_version_of_the_real_one() {
    let place = Place::new();
    for name in ["qemu-img", "qemu-io", "qemu-nbd", NAME] {
        let ours = place.path("links").join(name);
        std::fs::create_dir_all(place.path("links")).expect("a folder");
        symlink(env!("CARGO_BIN_EXE_vellum"), &ours).expect("a link");
        let shown = |program: &Path| {
            let output = place.command(program, &["--version"]).output();
            let output = output.expect("it runs");
            assert!(output.status.success(), "{name}: {output:?}");
            String::from_utf8_lossy(&output.stdout).into_owned()
        };
        let theirs = shown(Path::new(name));
        let words = theirs.split(char::is_numeric).next().expect("words");
        let start = format!("{words}10.0.2 (vellum ");
        assert!(shown(&ours).starts_with(&start), "{name}: {}", shown(&ours));
    }
}

#[test]
fn what_does_not_exist_is_refused_by_name() {
    let place = Place::new();
    for (line, word) in [
        (
            "--object tls-creds-psk,id=t,dir=.",
            "Unable to access credentials ./keys.psk: No such file or directory",
        ),
        (
            "--export vduse-blk,id=e,node-name=f,name=m",
            "'vduse-blk' are not part",
        ),
        (
            "--nbd-server addr.type=unix,tls-creds=t",
            "No TLS credentials with id 't'",
        ),
    ] {
        let words: Vec<&str> = line.split_whitespace().collect();
        let output = place.command(&place.path(NAME), &words).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{line}");
        assert!(text.contains(word), "{line}: {text}");
    }
}

#[test]
fn an_overlay_on_a_named_node_is_served_and_left_clean() {
    let place = Place::new();
    place.must_words("qemu-io", &["-c", "write -P 1 0 64k", "base"]);
    let child = place.start(&[
        "--object",
        "iothread,id=io",
        "--blockdev",
        "driver=qcow2,node-name=base,file.driver=file,file.filename=base,read-only=on",
        "--blockdev",
        r#"{"driver":"file","node-name":"file","filename":"top"}"#,
        "--blockdev",
        "driver=qcow2,node-name=disk,file=file,backing=base",
        "--nbd-server",
        SERVER,
        "--export",
        "type=nbd,id=e,node-name=disk,name=,writable=on,iothread=io",
        "--export",
        "type=nbd,id=b,node-name=base,description=below",
        "--pidfile",
        "pid",
    ]);
    let commands = ["-c", "read -P 1 0 64k", "-c", "write -P 2 64k 64k"];
    let words: Vec<&str> = ["-f", "raw"]
        .into_iter()
        .chain(commands)
        .chain([URI])
        .collect();
    let said = place.must_words("qemu-io", &words);
    assert!(!said.contains("failed"), "{said}");
    let listed = place.must_words(
        "qemu-nbd",
        &["--list", "-k", place.path("sock").to_str().unwrap()],
    );
    assert!(
        listed.contains("export: 'base'") && listed.contains("below"),
        "{listed}"
    );
    let pid = std::fs::read_to_string(place.path("pid")).expect("a pid file");
    assert_eq!(pid.trim(), child.id().to_string());
    place.end(child);
    assert!(!place.path("pid").exists() && !place.path("sock").exists());
    place.must("qemu-img", "check -q top");
    let said = place.must_words("qemu-io", &["-c", "read -P 2 64k 64k", "top"]);
    assert!(!said.contains("failed"), "{said}");
}

#[test]
fn it_goes_to_the_background_when_clients_can_come() {
    let place = Place::new();
    let mut words = vec!["--blockdev", "driver=file,node-name=f,filename=base"];
    words.extend([
        "--nbd-server",
        SERVER,
        "--export",
        "nbd,id=e,node-name=f,name=",
    ]);
    words.extend(["--daemonize", "--pidfile", "pid"]);
    let status = place
        .command(&place.path(NAME), &words)
        .stdin(Stdio::null())
        .status();
    assert!(status.expect("it runs").success());
    place.must_words("qemu-img", &["info", URI]);
    let pid = std::fs::read_to_string(place.path("pid")).expect("a pid file");
    place.must_words("kill", &["-TERM", pid.trim()]);
    wait_for("the end", || !place.path("pid").exists());
}

#[test]
fn why_it_does_not_go_to_the_background_is_said_before_it_ends() {
    let place = Place::new();
    for _ in 0..40 {
        let said = std::fs::File::create(place.path("said")).expect("a file");
        let words = [
            "--blockdev",
            "driver=file,node-name=f,filename=nobody",
            "--daemonize",
        ];
        let mut command = place.command(&place.path(NAME), &words);
        let status = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(said)
            .status();
        assert_eq!(status.expect("it runs").code(), Some(1));
        let said = std::fs::read_to_string(place.path("said")).expect("what it said");
        assert!(said.contains("Could not open 'nobody'"), "{said:?}");
    }
}

/// More than a lane gives to the kernel at a time: none keeps what others ask of the disk waiting.
#[test]
fn hundreds_of_exports_and_clients_are_served_at_once() {
    let place = Place::new();
    let server = "addr.type=unix,addr.path=sock";
    let disk = "driver=qcow2,node-name=f,file.driver=file,file.filename=top";
    let nbd = "nbd,id=e,node-name=f,name=,writable=on";
    let mut words = ["--blockdev", disk, "--nbd-server", server, "--export", nbd]
        .map(str::to_owned)
        .to_vec();
    for at in 0..600 {
        let export = format!("id=v{at},node-name=f,addr.type=unix,addr.path=v{at}");
        words.extend(["--export".to_owned(), format!("vhost-user-blk,{export}")]);
    }
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let child = place.start(&words);
    let clients = (0..400).map(|_| {
        let mut client = UnixStream::connect(place.path("sock")).expect("a connection");
        let patience = Some(Duration::from_secs(30));
        client.set_read_timeout(patience).expect("a socket");
        client.read_exact(&mut [0; 18]).expect("a greeting");
        client
    });
    let clients: Vec<UnixStream> = clients.collect();
    let asked = "write -P 3 0 64k;flush;read -P 3 0 64k";
    let asked = asked.split(';').flat_map(|line| ["-c", line]);
    let words: Vec<&str> = ["-f", "raw"]
        .into_iter()
        .chain(asked)
        .chain([URI])
        .collect();
    let said = place.must_words("qemu-io", &words);
    assert!(!said.contains("failed"), "{said}");
    drop(clients);
    place.end(child);
}

/// Kilobytes of memory that a process has to itself, without those of its program: who else runs it
/// decides whether they are.
fn private_kib(child: &Child) -> u64 {
    let path = format!("/proc/{}/smaps_rollup", child.id());
    let text = std::fs::read_to_string(path).expect("its memory");
    let lines = text
        .lines()
        .filter(|line| line.starts_with("Private_Dirty"));
    let values = lines.filter_map(|line| line.split_whitespace().nth(1));
    values
        .map(|value| value.parse::<u64>().expect("a number"))
        .sum()
}

#[test]
fn an_overlay_of_a_base_that_is_open_costs_little() {
    let place = Place::new();
    const COUNT: usize = 300;
    let name = |at: usize| format!("o{at}");
    place.must("qemu-img", "create -q -f qcow2 -b base -F qcow2 o0");
    for at in 1..COUNT {
        std::fs::copy(place.path("o0"), place.path(&name(at))).expect("a copy");
    }
    let serve = |count: usize| {
        let mut words = Vec::new();
        for at in 0..count {
            let name = name(at);
            let node =
                format!("driver=qcow2,node-name={name},file.driver=file,file.filename={name}");
            let export = format!("nbd,id={name},node-name={name},writable=on");
            words.extend(["--blockdev".to_owned(), node, "--export".to_owned(), export]);
        }
        let server = [
            "--nbd-server",
            "addr.type=unix,addr.path=sock",
            "--pidfile",
            "pid",
        ];
        let mut all: Vec<&str> = server.to_vec();
        all.extend(words.iter().map(String::as_str));
        let child = place.start(&all);
        wait_for("a pid file", || place.path("pid").exists());
        let files = std::fs::read_dir(format!("/proc/{}/fd", child.id()));
        let measured = (private_kib(&child), files.expect("its files").count());
        place.end(child);
        measured
    };
    let ((one_kib, one_files), (all_kib, all_files)) = (serve(1), serve(COUNT));
    let more = COUNT - 1;
    assert!(all_kib < one_kib + 48 * more as u64, "{one_kib} {all_kib}");
    assert_eq!(all_files, one_files + more);
}

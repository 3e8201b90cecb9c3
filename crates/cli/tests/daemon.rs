//! `qemu-storage-daemon` beside the real one, and as a server.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::time::Duration;

use vellum_testing::{Folder, Running, Words, signal, until};

const VELLUM: &str = env!("CARGO_BIN_EXE_vellum");
const NAME: &str = "qemu-storage-daemon";
const OURS: &str = "our qemu-storage-daemon";

/// A folder with images.
fn folder() -> Folder {
    let folder = Folder::new(VELLUM);
    folder.img("create -q -f qcow2 base 8M");
    folder.img("create -q -f qcow2 top 8M");
    folder
}

/// Starts our daemon and waits until it listens.
fn start(folder: &Folder, words: impl Words) -> Running {
    let daemon = folder.start(OURS, words);
    until("a socket", || {
        UnixStream::connect(folder.path("sock")).is_ok()
    });
    daemon
}

const SERVER: &str = "addr.type=unix,addr.path=sock,max-connections=16";
const URI: &str = "nbd+unix:///?socket=sock";
const RAW: &str = "-f raw nbd+unix:///?socket=sock";

#[test]
fn errors_agree() {
    let folder = folder();
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
        let run = |program: &str| {
            let said = folder.run(program, &line);
            (said.code, said.err)
        };
        assert_eq!(run(OURS), run(NAME), "{line}");
    }
}

#[test]
fn every_program_has_the_version_of_the_real_one() {
    let folder = folder();
    for name in ["qemu-img", "qemu-io", "qemu-nbd", NAME] {
        let shown = |program: &str| folder.must(program, "--version");
        let theirs = shown(name);
        let words = theirs.split(char::is_numeric).next().expect("words");
        let start = format!("{words}10.0.2 (vellum ");
        let ours = shown(&format!("our {name}"));
        assert!(ours.starts_with(&start), "{name}: {ours}");
    }
}

#[test]
fn what_does_not_exist_is_refused_by_name() {
    let folder = folder();
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
        let text = folder.refused(OURS, line);
        assert!(text.contains(word), "{line}: {text}");
    }
}

#[test]
fn an_overlay_on_a_named_node_is_served_and_left_clean() {
    let folder = folder();
    folder.io("base", &["write -P 1 0 64k"]);
    let daemon = start(
        &folder,
        &[
            "--object=iothread,id=io",
            "--blockdev=driver=qcow2,node-name=base,file.driver=file,file.filename=base,read-only=on",
            r#"--blockdev={"driver":"file","node-name":"file","filename":"top"}"#,
            "--blockdev=driver=qcow2,node-name=disk,file=file,backing=base",
            "--nbd-server",
            SERVER,
            "--export=type=nbd,id=e,node-name=disk,name=,writable=on,iothread=io",
            "--export=type=nbd,id=b,node-name=base,description=below",
            "--pidfile=pid",
        ],
    );
    folder.io(RAW, &["read -P 1 0 64k", "write -P 2 64k 64k"]);
    let sock = folder.name("sock");
    let listed = folder.must("qemu-nbd", &["--list", "-k", &sock]);
    assert!(
        listed.contains("export: 'base'") && listed.contains("below"),
        "{listed}"
    );
    assert_eq!(folder.text("pid").trim(), daemon.id().to_string());
    daemon.end();
    assert!(!folder.has("pid") && !folder.has("sock"));
    folder.img("check -q top");
    folder.io("top", &["read -P 2 64k 64k"]);
}

#[test]
fn it_goes_to_the_background_when_clients_can_come() {
    let folder = folder();
    let words = format!(
        "--blockdev driver=file,node-name=f,filename=base --nbd-server {SERVER} \
         --export nbd,id=e,node-name=f,name= --daemonize --pidfile pid"
    );
    // Its output goes nowhere: it stays open in the background.
    let status = folder.command(OURS, &words).status();
    assert!(status.expect("it runs").success());
    folder.img(&["info", URI]);
    let pid = folder.text("pid");
    signal(pid.trim().parse().expect("a number"), "-TERM");
    until("the end", || !folder.has("pid"));
}

#[test]
fn why_it_does_not_go_to_the_background_is_said_before_it_ends() {
    let folder = folder();
    for _ in 0..40 {
        let said = std::fs::File::create(folder.path("said")).expect("a file");
        let words = "--blockdev driver=file,node-name=f,filename=nobody --daemonize";
        let mut command = folder.command(OURS, words);
        let status = command.stdout(Stdio::null()).stderr(said).status();
        assert_eq!(status.expect("it runs").code(), Some(1));
        let said = folder.text("said");
        assert!(said.contains("Could not open 'nobody'"), "{said:?}");
    }
}

/// More than a lane gives to the kernel at a time: none keeps what others ask of the disk waiting.
#[test]
fn hundreds_of_exports_and_clients_are_served_at_once() {
    let folder = folder();
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
    let daemon = start(&folder, &words);
    let clients = (0..400).map(|_| {
        let mut client = UnixStream::connect(folder.path("sock")).expect("a connection");
        let patience = Some(Duration::from_secs(30));
        client.set_read_timeout(patience).expect("a socket");
        client.read_exact(&mut [0; 18]).expect("a greeting");
        client
    });
    let clients: Vec<UnixStream> = clients.collect();
    folder.io(RAW, &["write -P 3 0 64k", "flush", "read -P 3 0 64k"]);
    drop(clients);
    daemon.end();
}

/// Kilobytes of memory that a process has to itself, without those of its program: who else runs it
/// decides whether they are.
fn private_kib(process: u32) -> u64 {
    let path = format!("/proc/{process}/smaps_rollup");
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
    let folder = folder();
    const COUNT: usize = 300;
    let name = |at: usize| format!("o{at}");
    folder.img("create -q -f qcow2 -b base -F qcow2 o0");
    for at in 1..COUNT {
        std::fs::copy(folder.path("o0"), folder.path(&name(at))).expect("a copy");
    }
    let serve = |count: usize| {
        let server = "--nbd-server addr.type=unix,addr.path=sock --pidfile pid";
        let mut words = server.words();
        for at in 0..count {
            let name = name(at);
            let node =
                format!("driver=qcow2,node-name={name},file.driver=file,file.filename={name}");
            let export = format!("nbd,id={name},node-name={name},writable=on");
            words.extend(["--blockdev".to_owned(), node, "--export".to_owned(), export]);
        }
        let daemon = start(&folder, &words);
        until("a pid file", || folder.has("pid"));
        let files = std::fs::read_dir(format!("/proc/{}/fd", daemon.id()));
        let measured = (private_kib(daemon.id()), files.expect("its files").count());
        daemon.end();
        measured
    };
    let ((one_kib, one_files), (all_kib, all_files)) = (serve(1), serve(COUNT));
    let more = COUNT - 1;
    assert!(all_kib < one_kib + 48 * more as u64, "{one_kib} {all_kib}");
    assert_eq!(all_files, one_files + more);
}

//! Clients that mean harm, while others are served.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;

use crate::client::{DISK, MOST_TIME, Served, parse, say, tcp};

/// Many connections, of which the daemon keeps some.
const CONNECTIONS: usize = 10_000;
/// How many of them come between two looks at how others are served.
const BETWEEN_LOOKS: usize = 1000;

fn moment(stream: &UnixStream) {
    let moment = Duration::from_millis(300);
    stream.set_read_timeout(Some(moment)).expect("set");
    stream.set_write_timeout(Some(moment)).expect("set");
}

#[test]
fn others_are_served_whatever_a_client_sends() {
    let served = Served::new(DISK, None);
    let long = "x".repeat(1 << 20);
    let many: String = (0..1000).map(|n| format!("H{n}: v\r\n")).collect();
    let deep = "[".repeat(200 << 10);
    let length = |len: u64| format!("Content-Type: application/json\r\nContent-Length: {len}\r\n");
    for (text, statuses) in [
        // Half messages.
        ("GET /v1/di".to_owned(), &[][..]),
        ("GET /v1/disks HTTP/1.1\r\nHost: x\r\n".to_owned(), &[]),
        (
            format!(
                "POST /v1/nodes HTTP/1.1\r\nHost: x\r\n{}\r\n{{",
                length(100)
            ),
            &[408],
        ),
        // Heads that are too long, or none.
        (format!("GET /{long} HTTP/1.1\r\n\r\n"), &[414, 431, 400]),
        (format!("GET / HTTP/1.1\r\nX: {long}\r\n\r\n"), &[431]),
        (format!("GET / HTTP/1.1\r\n{many}\r\n"), &[431]),
        ("\0\u{1}\u{2}\r\n\r\n".to_owned(), &[400]),
        ("GET / HTTP/9.9\r\n\r\n".to_owned(), &[400, 505]),
        // Bodies that are too long, or say so.
        (
            format!(
                "POST /v1/nodes HTTP/1.1\r\nHost: x\r\n{}\r\n{long}",
                length(1 << 20)
            ),
            &[413],
        ),
        (
            format!(
                "POST /v1/nodes HTTP/1.1\r\nHost: x\r\n{}\r\n",
                length(u64::MAX)
            ),
            &[413, 431],
        ),
        (
            format!(
                "POST /v1/nodes HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n100000\r\n{long}\r\n0\r\n\r\n"
            ),
            &[413],
        ),
        (
            format!(
                "POST /v1/nodes HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{}\r\n{deep}",
                length(200 << 10)
            ),
            &[400],
        ),
        // Both lengths: whoever believes the other one sees another request.
        (
            format!(
                "POST /v1/nodes HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n{}\r\n0\r\n\r\n",
                length(5)
            ),
            &[400],
        ),
    ] {
        let mut stream = served.unix();
        moment(&stream);
        let heard = say(&mut stream, text.as_bytes());
        let begins = &text[..text.len().min(60)];
        if !heard.is_empty() {
            let status = parse(&heard).status;
            assert!(statuses.contains(&status), "{begins:?}: {status}");
        }
        served.check_served();
    }
    served.daemon.end();
}

#[test]
fn paths_lead_nowhere_else() {
    let served = Served::new(DISK, None);
    for (target, status) in [
        ("/v1/../metrics", 400),
        ("/v1/disks/..", 400),
        ("/v1/disks/%2e%2e", 400),
        ("/v1/disks/..%2f..%2fetc%2fpasswd", 400),
        ("/v1//disks", 400),
        ("/v1/disks/", 400),
        ("//evil.example/v1/disks", 400),
        ("http://evil.example/v1/disks", 400),
        ("/v1/disks/d%00", 400),
        ("/v1/disks/%", 400),
        ("/v1/disks/nosuch", 404),
        ("/etc/passwd", 404),
        ("/index.html", 404),
        ("/v1/disks/d/e/f/g/h/i/j", 400),
    ] {
        let answer = served.ask("GET", target, serde_json::Value::Null);
        assert_eq!(answer.status, status, "{target}");
        assert_eq!(answer.json()["status"], status);
    }
    let wrong = served.ask("PATCH", "/v1/disks/d", json!({}));
    assert_eq!(
        (wrong.status, wrong.header("allow")),
        (405, Some("GET, HEAD"))
    );
    served.daemon.end();
}

/// Lets this process have so many descriptors.
fn allow_descriptors(count: usize) {
    let limit = getrlimit(Resource::Nofile);
    let wanted = count as u64;
    if limit.current.is_none_or(|current| current >= wanted) {
        return;
    }
    let raised = Rlimit {
        current: Some(wanted),
        // Beyond the hard limit root alone may go.
        maximum: limit.maximum.map(|most| most.max(wanted)),
    };
    setrlimit(Resource::Nofile, raised).expect("so many descriptors (ulimit -Hn)");
}

#[test]
fn ten_thousand_connections_keep_nobody_out() {
    allow_descriptors(CONNECTIONS + 1000);
    let served = Served::new(DISK, Some(""));
    let mut all = Vec::new();
    for number in 0..CONNECTIONS {
        let mut stream = tcp(served.port);
        if number % 2 == 0 {
            let _ = stream.write_all(b"GET /v1/disks HTTP/1.1\r\nHo");
        }
        all.push(stream);
        if number % BETWEEN_LOOKS == 0 {
            let begin = Instant::now();
            let answer = crate::client::ask(&mut tcp(served.port), ("GET", "/v1/host"), &[], b"");
            assert_eq!(answer.status, 200);
            assert!(begin.elapsed() < MOST_TIME, "{:?}", begin.elapsed());
        }
    }
    served.check_served();
    // Those that came first were hung up on.
    let first = &mut all[0];
    assert!(matches!(first.read(&mut [0; 1024]), Ok(0) | Err(_)));
    drop(all);
    served.check_served();
    served.daemon.end();
}

#[test]
fn whoever_waits_for_ever_is_hung_up_on() {
    let served = Served::new(DISK, None);
    let begin = Instant::now();
    let mut streams: Vec<UnixStream> = (0..4).map(|_| served.unix()).collect();
    streams[1]
        .write_all(b"GET /v1/disks HTTP/1.1\r\n")
        .expect("it listens");
    streams[2]
        .write_all(b"POST /v1/nodes HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        .expect("it listens");
    // One after a request that was answered.
    streams[3]
        .write_all(b"GET /v1/host HTTP/1.1\r\nHost: x\r\n\r\n")
        .expect("it listens");
    for stream in &mut streams {
        let mut heard = Vec::new();
        stream.read_to_end(&mut heard).expect("it hangs up");
    }
    let took = begin.elapsed();
    assert!(
        (Duration::from_secs(5)..Duration::from_secs(25)).contains(&took),
        "{took:?}"
    );
    served.check_served();
    served.daemon.end();
}

#[test]
fn whoever_reads_nothing_is_hung_up_on_and_keeps_nobody_waiting() {
    let served = Served::new(DISK, None);
    let mut slow: Vec<UnixStream> = (0..20).map(|_| served.unix()).collect();
    let request = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n".repeat(50);
    for stream in &mut slow {
        moment(stream);
        // More answers than sockets hold.
        let _ = stream.write_all(&request);
    }
    for _ in 0..5 {
        served.check_served();
    }
    let begin = Instant::now();
    while slow.iter_mut().any(|stream| stream.write_all(b"x").is_ok()) {
        assert!(
            begin.elapsed() < Duration::from_secs(40),
            "they are still there"
        );
        std::thread::sleep(Duration::from_millis(200));
    }
    served.check_served();
    served.daemon.end();
}

#[test]
fn the_monitor_and_guests_are_served_meanwhile() {
    let mut served = Served::new(DISK, None);
    let path = served.place.path("ctl");
    let noise = std::thread::spawn(move || {
        let begin = Instant::now();
        let mut asked = 0;
        while begin.elapsed() < Duration::from_secs(2) {
            let mut stream = crate::client::unix(&path);
            let target = ["/metrics", "/v1/disks", "/v1/nodes", "/openapi.json"][asked % 4];
            let answer = crate::client::ask(&mut stream, ("GET", target), &[], b"");
            assert_eq!(answer.status, 200, "{target}");
            asked += 1;
        }
        asked
    });
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(2) {
        served.daemon.must("query-named-block-nodes", json!({}));
        served
            .place
            .io(crate::client::URI, &["write -P 5 0 64k", "read -P 5 0 64k"]);
    }
    let asked = noise.join().expect("all were answered");
    assert!(asked > 10, "{asked}");
    served.daemon.end();
}

//! Files on a web server of the test's own, which fails in every way that a test wants.

mod faults;
mod server;

use std::sync::Arc;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use server::{Answer, Server, content};
use vellum_io::{Buffer, Buffers, ErrorKind, Result, lane};
use vellum_remote::{Credentials, HttpOptions, Login, RemoteStorage};
use vellum_storage::Storage;
use zeroize::Zeroizing;

const MIB: usize = 1 << 20;

/// Options that give up soon.
fn quick(url: String) -> HttpOptions {
    let mut options = HttpOptions::new(url);
    options.connection.timeout = Duration::from_millis(300);
    options
}

async fn open(server: &Server) -> Result<Arc<RemoteStorage>> {
    RemoteStorage::open_http(quick(server.url())).await
}

async fn read(storage: &RemoteStorage, offset: u64, len: usize) -> Result<Vec<u8>> {
    let buffers = Buffers::from_iter([Buffer::for_read(len)]);
    let read = storage.read(offset, buffers).await?;
    Ok(Buffer::join_all(read).to_vec())
}

#[test]
fn bytes_come_from_where_they_are_asked_for() {
    let bytes = content(1, 5 * MIB + 123);
    let server = Server::new(bytes.clone());
    lane::block_on(async {
        let storage = open(&server).await.unwrap();
        assert_eq!(storage.len_bytes().unwrap(), bytes.len() as u64);
        assert!(storage.capabilities().read_only && storage.has_ranges());
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..300 {
            let offset = random.usize(0..bytes.len() + 1000);
            let len = match random.u8(0..4) {
                0 => random.usize(1..3 * MIB),
                1 => 512,
                _ => random.usize(1..200_000),
            };
            let got = read(&storage, offset as u64, len).await.unwrap();
            let mut wanted =
                bytes[offset.min(bytes.len())..(offset + len).min(bytes.len())].to_vec();
            wanted.resize(len, 0);
            assert!(got == wanted, "{offset} + {len}");
        }
        // Several buffers, one of them empty.
        let buffers = [5, 0, 70_000, 1].map(Buffer::for_read);
        let got = storage
            .read(65_530, Buffers::from_iter(buffers))
            .await
            .unwrap();
        assert_eq!(
            got.iter().map(|one| one.len()).collect::<Vec<_>>(),
            [5, 0, 70_000, 1]
        );
        assert!(Buffer::join_all(got)[..] == bytes[65_530..65_530 + 70_006]);
    });
}

#[test]
fn nobody_writes() {
    let server = Server::new(content(1, 1000));
    lane::block_on(async {
        let storage = open(&server).await.unwrap();
        let buffers = Buffers::from_iter([Buffer::zeroed(512)]);
        let refused = storage
            .write(0, buffers, Default::default())
            .await
            .unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ReadOnly);
        assert_eq!(
            storage.truncate(5).await.unwrap_err().kind(),
            ErrorKind::ReadOnly
        );
        storage.flush().await.unwrap();
    });
}

#[test]
fn an_empty_file_is_a_file() {
    let server = Server::new(Vec::new());
    lane::block_on(async {
        let storage = open(&server).await.unwrap();
        assert_eq!(storage.len_bytes().unwrap(), 0);
        assert_eq!(read(&storage, 0, 10).await.unwrap(), [0; 10]);
    });
}

#[test]
fn who_reads_on_is_read_ahead_of_over_many_connections() {
    let bytes = content(2, 32 * MIB);
    let server = Server::new(bytes.clone());
    server.decide(|_| Answer::Late(Duration::from_millis(20)));
    lane::block_on(async {
        let storage = RemoteStorage::open_http(HttpOptions::new(server.url()))
            .await
            .unwrap();
        let begun = Instant::now();
        for at in (0..bytes.len()).step_by(128 << 10) {
            let got = read(&storage, at as u64, 128 << 10).await.unwrap();
            assert!(got[..] == bytes[at..at + (128 << 10)], "{at}");
        }
        // One after the other, 256 requests would take 5 seconds.
        assert!(
            begun.elapsed() < Duration::from_millis(2500),
            "{:?}",
            begun.elapsed()
        );
    });
    let requests = server.requests();
    assert!(requests.len() < 60, "{}", requests.len());
    // Sixteen requests at most are on their way at a time. The next one may set
    // out before the client has put the connection of an answered one back, and
    // then opens another: on a busy machine there are a few more.
    assert!(
        (2..=24).contains(&server.connections()),
        "{}",
        server.connections()
    );
    let sent: u64 = requests
        .iter()
        .flat_map(|one| one.range.clone())
        .map(|one| one.end - one.start)
        .sum();
    assert_eq!(sent, bytes.len() as u64);
}

#[test]
fn who_reads_here_and_there_gets_only_that() {
    let bytes = content(3, 64 * MIB);
    let server = Server::new(bytes.clone());
    lane::block_on(async {
        let storage = open(&server).await.unwrap();
        for at in 1..100 {
            let offset = at * 7_919 % 1000 * 65_536;
            let got = read(&storage, offset as u64, 4096).await.unwrap();
            assert!(got[..] == bytes[offset..offset + 4096]);
        }
    });
    let requests = server.requests();
    assert!(requests.len() <= 100, "{}", requests.len());
    let sent: u64 = requests
        .iter()
        .flat_map(|one| one.range.clone())
        .map(|one| one.end - one.start)
        .sum();
    assert!(sent <= 100 * 65_536, "{sent}");
    // One may not be free again when the next request comes.
    assert!(server.connections() <= 3, "{}", server.connections());
}

#[test]
fn neighbours_that_are_asked_for_together_are_one_request() {
    let bytes = content(4, 8 * MIB);
    let server = Server::new(bytes.clone());
    lane::block_on(async {
        let storage = open(&server).await.unwrap();
        let start = 4 * MIB as u64;
        let reads = (0..64).map(|at| {
            storage.read(
                start + at * 16_384,
                Buffers::from_iter([Buffer::for_read(16_384)]),
            )
        });
        for (at, got) in reads.collect::<Vec<_>>().into_iter().enumerate() {
            let from = start as usize + at * 16_384;
            assert!(Buffer::join_all(got.await.unwrap())[..] == bytes[from..from + 16_384]);
        }
    });
    // 16 blocks were wanted, and some more may have been fetched ahead.
    let requests = server.requests().len();
    assert!(requests <= 8, "{requests}");
}

#[test]
fn without_ranges_the_file_is_copied_once() {
    static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let bytes = content(5, 3 * MIB + 17);
    for answer in [Answer::Whole, Answer::WholeChunked] {
        let server = Server::new(bytes.clone());
        let first = answer.clone();
        // The first try breaks off.
        server.decide(move |request| match (request.number, &answer) {
            (0, Answer::Whole) => Answer::Status(503, Vec::new()),
            _ => answer.clone(),
        });
        lane::block_on(async {
            let mut options = HttpOptions::new(server.url());
            options.notice = |line| SAID.lock().unwrap().push(line.to_owned());
            let storage = RemoteStorage::open_http(options).await.unwrap();
            assert!(!storage.has_ranges());
            assert_eq!(storage.len_bytes().unwrap(), bytes.len() as u64);
            assert!(read(&storage, 0, bytes.len()).await.unwrap() == bytes);
            let end = read(&storage, bytes.len() as u64 - 1, 3).await.unwrap();
            assert_eq!(end, [bytes[bytes.len() - 1], 0, 0]);
        });
        let tries = if first == Answer::Whole { 2 } else { 1 };
        assert_eq!(server.requests().len(), tries);
    }
    let said = SAID.lock().unwrap().join("\n");
    assert!(
        said.contains("the server knows no ranges; copying 3145745 bytes"),
        "{said}"
    );
    assert!(said.contains("copying all of it"), "{said}");
}

/// The connection of a server that is killed ends, too.
#[test]
fn a_file_whose_end_nobody_tells_is_refused() {
    for len in [MIB, 3 * MIB] {
        let server = Server::new(content(5, 3 * MIB));
        server.decide(move |_| Answer::WholeUntilTheEnd(len));
        lane::block_on(async {
            let opened = RemoteStorage::open_http(quick(server.url())).await;
            let refused = opened.expect_err("it may be a part");
            assert!(refused.to_string().contains("where it ends"), "{refused}");
        });
    }
}

#[test]
fn credentials_do_not_follow_to_other_servers() {
    let bytes = content(6, MIB);
    let there = Server::new(bytes.clone());
    let here = Server::new(Vec::new());
    let target = there.url();
    here.decide(move |_| Answer::Status(302, vec![("Location", target.clone())]));
    lane::block_on(async {
        for credentials in [
            Credentials::Basic(Login {
                username: "me".to_owned(),
                password: Some(Zeroizing::new("secret".to_owned())),
            }),
            Credentials::Bearer(Zeroizing::new("token".to_owned())),
        ] {
            let mut options = quick(here.url());
            options.credentials = Some(credentials);
            options.cookie = Some(Zeroizing::new("a=b".to_owned()));
            options.header = Some(Zeroizing::new("X-Tenant: mine".to_owned()));
            let storage = RemoteStorage::open_http(options).await.unwrap();
            assert!(read(&storage, 0, MIB).await.unwrap() == bytes);
        }
    });
    let asked = here.requests();
    // The way is remembered.
    assert_eq!(asked.len(), 2);
    assert_eq!(asked[0].headers["authorization"], "Basic bWU6c2VjcmV0");
    assert_eq!(asked[1].headers["authorization"], "Bearer token");
    assert_eq!(asked[0].headers["cookie"], "a=b");
    assert_eq!(asked[0].headers["x-tenant"], "mine");
    for request in there.requests() {
        assert!(!request.headers.contains_key("authorization"));
        assert!(!request.headers.contains_key("cookie"));
        assert!(!request.headers.contains_key("x-tenant"));
    }
}

#[test]
fn a_way_that_ends_is_looked_for_anew() {
    let bytes = content(6, 2 * MIB);
    let there = Server::new(bytes.clone());
    let here = Server::new(Vec::new());
    let target = there.url();
    here.decide(move |request| {
        Answer::Status(
            307,
            vec![("Location", format!("{target}?{}", request.number))],
        )
    });
    // A link holds for a few requests.
    there.decide(|request| match (&request.path[..], request.number) {
        ("/disk?0", number) if number > 0 => Answer::Status(403, Vec::new()),
        _ => Answer::Right,
    });
    lane::block_on(async {
        let storage = open(&here).await.unwrap();
        assert!(read(&storage, 0, 2 * MIB).await.unwrap() == bytes);
    });
    here.decide(|request| Answer::Status(302, vec![("Location", format!("/x{}", request.number))]));
    lane::block_on(async {
        let error = open(&here).await.unwrap_err();
        assert!(
            error.to_string().contains("leads on more than 10 times"),
            "{error}"
        );
    });
}

#[test]
fn what_a_server_refuses_is_told_at_once() {
    let server = Server::new(content(7, 1000));
    for (status, kind, words) in [
        (404, ErrorKind::NotFound, "404: there is no such file"),
        (
            401,
            ErrorKind::PermissionDenied,
            "'username' and 'password-secret'",
        ),
        (403, ErrorKind::PermissionDenied, "does not let this user"),
        (418, ErrorKind::Protocol, "returned error: 418"),
    ] {
        server.decide(move |_| Answer::Status(status, Vec::new()));
        let before = server.requests().len();
        let error = lane::block_on(open(&server)).unwrap_err();
        assert_eq!(error.kind(), kind);
        let text = error.to_string();
        assert!(
            text.contains(words) && text.contains(&server.url()),
            "{text}"
        );
        assert_eq!(server.requests().len(), before + 1);
    }
    let gone = server.url();
    drop(server);
    let begun = Instant::now();
    let error = lane::block_on(RemoteStorage::open_http(HttpOptions::new(gone))).unwrap_err();
    assert!(error.to_string().contains("Failed to connect"), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(3));
}

#[test]
fn passwords_are_not_told() {
    let server = Server::new(content(7, 1000));
    server.decide(|_| Answer::Status(404, Vec::new()));
    let url = server.url().replace("http://", "http://me:hidden@");
    let error = lane::block_on(RemoteStorage::open_http(quick(url))).unwrap_err();
    assert!(!format!("{error} {error:?}").contains("hidden"), "{error}");
    assert_eq!(
        server.requests()[0].headers["authorization"],
        "Basic bWU6aGlkZGVu"
    );
}

#[test]
fn threads_are_there_as_long_as_they_are_needed() {
    // Other tests of this process have storages as well.
    const ALONE: &str = "VELLUM_TEST_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let status = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "threads_are_there_as_long_as_they_are_needed"])
            .env(ALONE, "1")
            .status();
        assert!(status.unwrap().success());
        return;
    }
    let count = || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let names = tasks.map(|task| std::fs::read_to_string(task.path().join("comm")));
        names
            .flatten()
            .filter(|name| name.starts_with("vellum-remote"))
            .count()
    };
    assert_eq!(count(), 0);
    let server = Server::new(content(8, MIB));
    for _ in 0..3 {
        lane::block_on(async {
            let one = open(&server).await.unwrap();
            let other = open(&server).await.unwrap();
            drop(one);
            read(&other, 0, MIB).await.unwrap();
            assert!((1..=4).contains(&count()), "{}", count());
        });
        let until = Instant::now() + Duration::from_secs(20);
        while count() > 0 {
            assert!(Instant::now() < until, "threads stay");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

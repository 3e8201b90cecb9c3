//! A registry behind a slow line, and one that says nothing: what takes long to be sent is sent, and
//! silence has an end.
#![cfg(feature = "oci")]

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use vellum_io::{Result, lane};
use vellum_remote::oci::{self, OciOptions, Packing, Push, Reference};

const LAYER_BYTES: u64 = 32 << 20;
const PIECE_BYTES: usize = 64 << 10;

/// What a registry does with a layer.
#[derive(Debug, Clone, Copy)]
enum Takes {
    /// All of it, in this time.
    Within(Duration),
    /// All of it, and never answers.
    Silently,
}

/// A registry that knows nothing yet; where it is.
fn start(takes: Takes) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    thread::spawn(move || {
        for client in listener.incoming().flatten() {
            // Clients that leave are a part of it.
            thread::spawn(move || drop(serve(client, takes)));
        }
    });
    address
}

fn serve(mut client: TcpStream, takes: Takes) -> std::io::Result<()> {
    let mut lines = BufReader::new(client.try_clone()?);
    loop {
        let (mut first, mut len) = (String::new(), 0);
        if lines.read_line(&mut first)? == 0 {
            return Ok(());
        }
        loop {
            let mut line = String::new();
            lines.read_line(&mut line)?;
            let line = line.trim().to_ascii_lowercase();
            if line.is_empty() {
                break;
            }
            if let Some(text) = line.strip_prefix("content-length:") {
                len = text.trim().parse().unwrap();
            }
        }
        take(&mut lines, len, takes)?;
        let answer = match &first[..4] {
            "HEAD" => "404 Not Found\r\n",
            "POST" => "202 Accepted\r\nLocation: uploads/1\r\n",
            _ if matches!(takes, Takes::Silently) => {
                lines.read_exact(&mut [0])?;
                return Ok(());
            }
            _ => "201 Created\r\n",
        };
        client.write_all(format!("HTTP/1.1 {answer}Content-Length: 0\r\n\r\n").as_bytes())?;
    }
}

fn take(lines: &mut impl Read, len: usize, takes: Takes) -> std::io::Result<()> {
    let mut piece = vec![0; PIECE_BYTES];
    let mut left = len;
    while left > 0 {
        let now = left.min(PIECE_BYTES);
        lines.read_exact(&mut piece[..now])?;
        left -= now;
        if let Takes::Within(time) = takes {
            thread::sleep(time / (LAYER_BYTES as u32 / PIECE_BYTES as u32));
        }
    }
    Ok(())
}

/// Puts a disk there; a registry may be silent for a time like this.
fn push(takes: Takes, timeout: Duration) -> Result<String> {
    let file: File = tempfile::tempfile().unwrap();
    file.set_len(LAYER_BYTES).unwrap();
    let mut options = OciOptions {
        plain_http: true,
        ..OciOptions::default()
    };
    options.connection.timeout = timeout;
    let push = Push {
        name: "disk.raw".to_owned(),
        packing: Packing::None,
        progress: Arc::new(|_, _| ()),
    };
    let reference = Reference::parse(&format!("{}/disk:1", start(takes))).unwrap();
    lane::block_on(oci::push(file, reference, options, push))
}

#[test]
fn a_layer_may_take_longer_than_a_registry_may_be_silent() {
    let takes = Takes::Within(Duration::from_millis(3000));
    let pushed = push(takes, Duration::from_millis(500)).unwrap();
    assert!(pushed.starts_with("sha256:"), "{pushed}");
}

#[test]
fn a_registry_that_says_nothing_is_given_up() {
    let error = push(Takes::Silently, Duration::from_millis(200)).unwrap_err();
    assert!(error.message().contains("silent"), "{error}");
}

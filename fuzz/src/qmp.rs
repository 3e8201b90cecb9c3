//! A monitor's client that says anything, in any pieces, to a daemon with nodes of nothing.

use std::pin::pin;
use std::time::{Duration, Instant};

use futures_util::future::{Either, select};
use serde_json::{Value, json};
use vellum_daemon::qmp::{self, Messages, Request};
use vellum_daemon::{Daemon, ServerEnvironment, carry_out, enabled_oob};
use vellum_graph::Nodes;
use vellum_io::lane;
use vellum_options::Options;

/// Most messages of a session that are carried out.
const MOST_MESSAGES: usize = 200;
/// Most of a message that an answer repeats, beside its words: the `id` and names.
const MOST_ANSWER_BYTES: usize = 1 << 20;
/// What a session may take, on a machine that is busy with other things.
const MOST_TIME: Duration = Duration::from_secs(30);
/// Drivers that lead to nothing outside of the process.
const DRIVERS: [&str; 5] = ["null-co", "null-aio", "raw", "copy-on-read", "compress"];

/// The first byte is the length of the pieces, the rest what the client says.
///
/// Invariants:
/// - no bytes make the monitor panic or hang, and the next message is understood again;
/// - every message has one answer, a return or an error, with the `id` that came with it;
/// - nothing is carried out before the capabilities are agreed on;
/// - the daemon ends when it is told to, whatever was begun.
pub fn check_qmp(data: &[u8]) {
    let begin = Instant::now();
    let Some((&piece, stream)) = data.split_first() else {
        return;
    };
    lane::block_on(async {
        let daemon = Daemon::new(Nodes::live(), ServerEnvironment::without_sockets());
        for name in ["a", "b"] {
            let mut options = Options::new();
            options.set_text("driver", "null-co");
            options.set_text("node-name", name);
            options.set_text("size", "1M");
            daemon.add_node(options).await.expect("nothing");
        }
        let mut session = Session::default();
        let mut messages = Messages::new();
        for piece in stream.chunks(usize::from(piece).max(1)) {
            messages.push(piece);
            while let Some(message) = messages.next_message() {
                let (request, id) = match message {
                    Ok(message) => Request::parse(message, true),
                    Err(error) => (Err(error), None),
                };
                let outcome = match request {
                    Ok(request) => session.carry_out(&daemon, request).await,
                    Err(error) => Err(error),
                };
                check_answer(&qmp::answer(outcome, id.clone()), id.as_ref());
                if daemon.stop.is_requested() {
                    return;
                }
            }
            // Jobs go on meanwhile.
            lane::sleep(Duration::from_micros(50)).await;
        }
        // A node may have failed; it is gone all the same.
        let _ = daemon.shut_down().await;
    });
    assert!(begin.elapsed() < MOST_TIME, "{:?}", begin.elapsed());
}

#[derive(Default)]
struct Session {
    negotiated: bool,
    carried_out: usize,
}

impl Session {
    async fn carry_out(&mut self, daemon: &std::rc::Rc<Daemon>, request: Request) -> qmp::Outcome {
        let Request {
            command, arguments, ..
        } = request;
        match (command.as_str(), self.negotiated) {
            ("qmp_capabilities", false) => {
                enabled_oob(arguments, true)?;
                self.negotiated = true;
                Ok(json!({}))
            }
            (_, false) => Err(qmp::Failure::new("not yet")),
            (name, true) => {
                self.carried_out += 1;
                let told = format!("{arguments:?}");
                if self.carried_out > MOST_MESSAGES || !stays_inside(name, &told) {
                    return Err(qmp::Failure::new("not here"));
                }
                let carried_out = carry_out(daemon, name, arguments);
                if name != "quit" {
                    return carried_out.await;
                }
                // Its answer comes when everything has ended, which the program sees to.
                let ending = async {
                    daemon.stop.wait().await;
                    // A node may have failed; it is gone all the same.
                    let _ = daemon.shut_down().await;
                };
                match select(pin!(carried_out), pin!(ending)).await {
                    Either::Left((outcome, _)) => outcome,
                    Either::Right(((), carried_out)) => carried_out.await,
                }
            }
        }
    }
}

/// Whether a command can touch nothing but nodes of nothing: what is tried here is the
/// daemon, and not the files of whoever tries it.
fn stays_inside(command: &str, arguments: &str) -> bool {
    if command == "object-add" {
        return arguments.contains("\"iothread\"");
    }
    if command.starts_with("chardev-") {
        let outside = ["file", "pipe", "serial", "socket", "udp", "stdio", "path"];
        return !outside.iter().any(|part| arguments.contains(part));
    }
    if command != "blockdev-add" {
        return true;
    }
    let outside = ["filename", "path", "host", "secret", "backing", "json:"];
    let words = arguments.split('"').skip(1).step_by(2);
    let mut last = "";
    let mut known = true;
    for word in words {
        if last.ends_with("driver") {
            known &= DRIVERS.contains(&word);
        }
        known &= !outside.iter().any(|part| word.contains(part));
        last = word;
    }
    known && !arguments.contains('\\')
}

fn check_answer(answer: &Value, id: Option<&Value>) {
    let members = answer.as_object().expect("an object");
    assert!(members.contains_key("return") != members.contains_key("error"));
    assert_eq!(members.get("id"), id);
    let text = qmp::text(answer, false);
    let most = MOST_ANSWER_BYTES + id.map_or(0, |id| 8 * id.to_string().len());
    assert!(text.len() < most, "{} bytes", text.len());
    let again: Value = serde_json::from_str(&text).expect("an answer is JSON");
    assert_eq!(again.as_object().map(|all| all.len()), Some(members.len()));
}

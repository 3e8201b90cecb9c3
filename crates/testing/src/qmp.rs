//! A client of a QMP monitor, on a socket or on the pipes of a process.
//!
//! The methods that begin with `try_` return errors; the others panic, for tests.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Child;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::wait::{PATIENCE, until};

/// Why a command has returned nothing.
#[derive(Debug)]
pub enum Error {
    /// The server has hung up.
    Gone,
    /// It is silent, or says what is no QMP.
    Hangs(String),
    /// It refuses the command.
    Refused(String),
}

impl std::error::Error for Error {}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Error::Gone => write!(f, "the monitor has ended"),
            Error::Hangs(how) => write!(f, "the monitor hangs: {how}"),
            Error::Refused(why) => write!(f, "{why}"),
        }
    }
}

/// A client, which was greeted unless it comes from [`Qmp::over`].
pub struct Qmp {
    /// Where commands go; `None` once the client has closed it.
    pub input: Option<Box<dyn Write + Send>>,
    /// What the server says, a line each.
    pub lines: Receiver<String>,
    /// Events so far, without their times.
    pub events: Vec<Value>,
    /// What the client is connected by, if that is a socket.
    socket: Option<UnixStream>,
}

impl Drop for Qmp {
    fn drop(&mut self) {
        // Another thread still reads from it. The server may have hung up before.
        if let Some(socket) = &self.socket {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

impl std::fmt::Debug for Qmp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Qmp").field("events", &self.events).finish()
    }
}

impl Qmp {
    /// A client that has read nothing yet.
    pub fn over(input: impl Write + Send + 'static, output: impl Read + Send + 'static) -> Qmp {
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            let (mut output, mut line) = (BufReader::new(output), String::new());
            // The end of a process may cut the last line off.
            while output.read_line(&mut line).is_ok() && line.ends_with('\n') {
                let line = std::mem::take(&mut line);
                // QEMU prints on standard output which image it makes.
                if !line.starts_with("Formatting '") && sender.send(line).is_err() {
                    return;
                }
            }
        });
        Qmp {
            input: Some(Box::new(input)),
            lines,
            events: Vec::new(),
            socket: None,
        }
    }

    /// As [`Qmp::over`], over a socket.
    fn over_socket(socket: UnixStream) -> std::io::Result<Qmp> {
        let mut client = Qmp::over(socket.try_clone()?, socket.try_clone()?);
        client.socket = Some(socket);
        Ok(client)
    }

    /// As [`Qmp::over`], over the pipes of a process.
    pub fn of_child(child: &mut Child) -> Qmp {
        let input = child.stdin.take().expect("its input is a pipe");
        Qmp::over(input, child.stdout.take().expect("its output is a pipe"))
    }

    /// Connects to a socket, and negotiates.
    pub fn try_connect(socket: impl AsRef<Path>) -> std::io::Result<Qmp> {
        let mut client = Qmp::over_socket(UnixStream::connect(socket)?)?;
        client.try_greet().map_err(std::io::Error::other)?;
        Ok(client)
    }

    /// As [`Qmp::try_connect`], once something listens there.
    #[track_caller]
    pub fn connect(socket: impl AsRef<Path>) -> Qmp {
        let mut stream = None;
        until("a monitor listens", || {
            stream = UnixStream::connect(&socket).ok();
            stream.is_some()
        });
        let client = Qmp::over_socket(stream.expect("as was seen"));
        let mut client = client.expect("a socket");
        client.try_greet().expect("a greeting");
        client
    }

    /// Tells the server that no more commands come. Answers still do.
    pub fn end_asking(&self) {
        let socket = self.socket.as_ref().expect("a socket");
        socket.shutdown(Shutdown::Write).expect("it is connected");
    }

    /// Waits for the greeting, and takes no capabilities.
    pub fn try_greet(&mut self) -> Result<(), Error> {
        match self.try_next(Instant::now() + PATIENCE)? {
            Some(greeting) if greeting.get("QMP").is_some() => {}
            other => return Err(Error::Hangs(format!("no greeting, but {other:?}"))),
        }
        self.try_must("qmp_capabilities", json!({})).map(drop)
    }

    /// The next message; an event has lost its time. `None` if none comes in time.
    pub fn try_next(&mut self, deadline: Instant) -> Result<Option<Value>, Error> {
        let left = deadline.saturating_duration_since(Instant::now());
        let line = match self.lines.recv_timeout(left) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) => return Ok(None),
            Err(RecvTimeoutError::Disconnected) => return Err(Error::Gone),
        };
        let message = serde_json::from_str::<Value>(&line);
        let mut message =
            message.map_err(|error| Error::Hangs(format!("{line:?} is no JSON: {error}")))?;
        let members = message.as_object_mut();
        let is_event = members
            .as_ref()
            .is_some_and(|all| all.contains_key("event"));
        let time = members.and_then(|members| members.remove("timestamp"));
        match is_event == time.is_some() {
            true => Ok(Some(message)),
            false => Err(Error::Hangs(format!("events alone have a time: {line}"))),
        }
    }

    /// Sends text as it is.
    pub fn try_send(&mut self, text: &str) -> Result<(), Error> {
        // In one piece: what is asked may be over before another one comes.
        let input = self.input.as_mut().ok_or(Error::Gone)?;
        let sent = input
            .write_all(text.as_bytes())
            .and_then(|()| input.flush());
        sent.map_err(|_| Error::Gone)
    }

    /// The answer to what was sent; events before it are kept.
    pub fn try_answer(&mut self) -> Result<Value, Error> {
        let deadline = Instant::now() + PATIENCE;
        while let Some(message) = self.try_next(deadline)? {
            if message.get("event").is_none() {
                return Ok(message);
            }
            self.events.push(message);
        }
        Err(Error::Hangs("no answer".to_owned()))
    }

    /// The whole answer to a command.
    pub fn try_ask(&mut self, command: &str, arguments: Value) -> Result<Value, Error> {
        let request = json!({"execute": command, "arguments": arguments});
        self.try_send(&format!("{request}\n"))?;
        self.try_answer().map_err(|error| match error {
            Error::Hangs(how) => Error::Hangs(format!("{request}: {how}")),
            other => other,
        })
    }

    /// What a command returns.
    pub fn try_must(&mut self, command: &str, arguments: Value) -> Result<Value, Error> {
        let mut answer = self.try_ask(command, arguments)?;
        if let Some(returned) = answer.get_mut("return") {
            return Ok(returned.take());
        }
        match answer["error"]["desc"].as_str() {
            Some(why) => Err(Error::Refused(why.to_owned())),
            None => Err(Error::Hangs(format!("{command}: {answer}"))),
        }
    }

    /// Waits until an event has come for which `wanted` returns something, or the limit is over.
    pub fn try_wait<T>(
        &mut self,
        limit: Duration,
        wanted: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(found) = self.events.iter().find_map(&wanted) {
                return Ok(Some(found));
            }
            match self.try_next(deadline)? {
                Some(message) => self.events.push(message),
                None => return Ok(None),
            }
        }
    }

    /// The next message; `None` if the server is gone.
    #[track_caller]
    pub fn message(&mut self) -> Option<Value> {
        match self.try_next(Instant::now() + PATIENCE) {
            Ok(Some(message)) => Some(message),
            Ok(None) => panic!("nothing comes; events so far: {:?}", self.events),
            Err(Error::Gone) => None,
            Err(error) => panic!("{error}"),
        }
    }

    /// Sends a command, whatever the answer will be.
    #[track_caller]
    pub fn send(&mut self, command: &str, arguments: Value) {
        let request = json!({"execute": command, "arguments": arguments});
        self.say(&format!("{request}\n"));
    }

    /// Sends text as it is.
    #[track_caller]
    pub fn say(&mut self, text: &str) {
        self.try_send(text).expect("it listens");
    }

    /// The answer to what was sent; events before it are kept.
    #[track_caller]
    pub fn answer(&mut self) -> Value {
        let answer = self.try_answer();
        answer.unwrap_or_else(|error| panic!("{error}; events so far: {:?}", self.events))
    }

    /// The whole answer to a command.
    #[track_caller]
    pub fn ask(&mut self, command: &str, arguments: Value) -> Value {
        self.send(command, arguments);
        self.answer()
    }

    /// What a command returns, which must succeed.
    #[track_caller]
    pub fn must(&mut self, command: &str, arguments: Value) -> Value {
        let mut answer = self.ask(command, arguments);
        assert!(answer.get("return").is_some(), "{command}: {answer}");
        answer["return"].take()
    }

    /// Why a command is refused.
    #[track_caller]
    pub fn refused(&mut self, command: &str, arguments: Value) -> String {
        let answer = self.ask(command, arguments);
        let why = answer["error"]["desc"].as_str();
        why.unwrap_or_else(|| panic!("{command}: {answer}"))
            .to_owned()
    }

    /// As [`Qmp::event`]; the event is taken out of those that have come.
    #[track_caller]
    pub fn take_event(&mut self, name: &str) -> Value {
        self.event(name);
        let at = self.events.iter().position(|event| event["event"] == name);
        self.events.remove(at.expect("as was seen"))
    }

    /// How many events of a name have come.
    #[track_caller]
    pub fn events_of(&mut self, name: &str) -> usize {
        // They come before the answer to this.
        self.must("query-version", json!({}));
        let named = |event: &&Value| event["event"] == name;
        self.events.iter().filter(named).count()
    }

    /// What a list has as `key`, sorted.
    #[track_caller]
    pub fn names(&mut self, command: &str, key: &str) -> Vec<String> {
        let list = self.must(command, json!({}));
        let names = list.as_array().expect("a list").iter();
        let names = names.filter_map(|one| one[key].as_str().map(str::to_owned));
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    }

    /// The names of all exports, sorted.
    #[track_caller]
    pub fn exports(&mut self) -> Vec<String> {
        self.names("query-block-exports", "id")
    }

    /// Waits for an event, or finds one that has come, which stays.
    #[track_caller]
    pub fn event(&mut self, name: &str) -> Value {
        let named = |event: &Value| (event["event"] == name).then(|| event.clone());
        let found = self.try_wait(PATIENCE, named).expect("it is there");
        found.unwrap_or_else(|| panic!("no {name}, but {:?}", self.events))
    }
}

//! A client of the monitor (QMP) of a daemon or a machine, on a socket.

use std::io::{BufRead, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use serde_json::{Value, json};

/// A command that is not answered for so long never is.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);

/// A client that was greeted.
#[derive(Debug)]
pub struct Monitor {
    input: UnixStream,
    output: BufReader<UnixStream>,
}

impl Monitor {
    /// Connects, and says that it takes no capabilities.
    pub fn connect(socket: &str) -> Result<Monitor> {
        let input = UnixStream::connect(socket)?;
        input.set_read_timeout(Some(ANSWER_LIMIT))?;
        let output = BufReader::new(input.try_clone()?);
        let mut monitor = Monitor { input, output };
        monitor.next()?;
        monitor.ask("qmp_capabilities", json!({}))?;
        Ok(monitor)
    }

    fn next(&mut self) -> Result<Value> {
        let mut line = String::new();
        let len_bytes = self.output.read_line(&mut line)?;
        ensure!(len_bytes > 0, "the monitor has ended");
        Ok(serde_json::from_str(&line)?)
    }

    /// What a command returns; events are dropped.
    pub fn ask(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let request = json!({"execute": command, "arguments": arguments});
        writeln!(self.input, "{request}")?;
        loop {
            let mut answer = self.next()?;
            if answer.get("error").is_some() {
                bail!("{command}: {}", answer["error"]["desc"]);
            }
            if answer.get("return").is_some() {
                return Ok(answer["return"].take());
            }
        }
    }
}

//! The command line of `qemu-storage-daemon`: parts, made in order.

use std::ffi::OsString;
use std::fmt;

use crate::getopt::{Parser, UsageError};
use crate::server::Failure;
use crate::spec::Spec;
use crate::trace::LogFormat;

/// A kind of part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Blockdev,
    Export,
    NbdServer,
    Object,
    Chardev,
    Monitor,
    Metrics,
    Trace,
}

impl Part {
    /// The part that an option adds.
    fn of(option: &str) -> Option<Part> {
        Some(match option {
            "blockdev" => Part::Blockdev,
            "chardev" => Part::Chardev,
            "export" => Part::Export,
            "nbd-server" => Part::NbdServer,
            "object" => Part::Object,
            "metrics" => Part::Metrics,
            "monitor" => Part::Monitor,
            "trace" => Part::Trace,
            _ => return None,
        })
    }
}

pub const SPEC: Spec = Spec {
    name: "daemon",
    about: "Serve the images that options describe (qemu-storage-daemon)",
    usage: "[OPTIONS]\n",
    explains: "\
Opens the images that the options describe and serves them, until a signal, or a client of
a monitor, ends it.
",
    arguments: &["  -h, --help                 print this text
  -V, --version              print the version
  -T, --trace [[enable=]PATTERN][,events=FILE][,file=FILE]
                             write the events of PATTERN, and of those in a file, as they
                             happen (help: their names)

What there is, each made in the order given:
  --object help              the types of objects; --object TYPE,help: their properties
  --object iothread,id=ID    a name for --export; threads are started as they are needed
  --object throttle-group,id=ID[,x-iops-total=N][,x-bps-total=N][,x-bps-read-max=N]...
                             limits of nodes with driver=throttle,throttle-group=ID
  --blockdev driver=DRIVER,node-name=NAME,...
                             a node: 'file', 'host_device', 'raw' or 'qcow2'; 'file=NAME'
                             and 'backing=NAME' refer to nodes given before
  --nbd-server addr.type=unix,addr.path=PATH[,max-connections=N]
  --nbd-server addr.type=inet,addr.host=HOST,addr.port=PORT[,max-connections=N]
                             where to listen (100 connections at most; 0: any number)
  --export [type=]nbd,id=ID,node-name=NAME[,name=NAME][,description=TEXT][,writable=on]
           [,writethrough=on][,allow-inactive=on][,allocation-depth=on][,iothread=ID]
           [,on-full=wait]
                             a node to serve, under the node's name if no other is given
  --export [type=]fuse,id=ID,node-name=NAME,mountpoint=FILE[,writable=on][,growable=on]
           [,allow-other=on|off|auto][,io-uring=on|off|auto][,writethrough=on]
           [,on-full=wait]   a node to show as a regular file, which must exist
  --export [type=]vhost-user-blk,id=ID,node-name=NAME,addr.type=unix,addr.path=PATH
           [,writable=on][,num-queues=N][,logical-block-size=N][,serial=TEXT]
           [,writethrough=on][,poll-max-ns=N][,iothread=ID][,on-full=wait]
  --export [type=]vhost-user-blk,id=ID,node-name=NAME,addr.type=fd,addr.str=NUMBER,...
                             a node as the disk of a virtual machine, whose monitor
                             (QEMU, cloud-hypervisor) connects to PATH

  --chardev help             the types of character devices
  --chardev stdio,id=ID
  --chardev socket,id=ID,path=PATH[,abstract=on][,server=on[,wait=off]]
  --chardev socket,id=ID,host=HOST,port=PORT[,to=PORT][,server=on[,wait=off]]
  --chardev socket,id=ID,fd=NUMBER[,server=on[,wait=off]]
                             where a client of a monitor is; as a server it waits for one,
                             as a client it connects again after ,reconnect-ms=N
  --chardev pty,id=ID[,path=LINK]
  --chardev pipe,id=ID,path=PATH
  --chardev file,id=ID,path=PATH[,input-path=PATH][,append=on]
  --chardev serial,id=ID,path=PATH
  --chardev udp,id=ID,port=PORT[,host=HOST][,localaddr=HOST][,localport=PORT]
  --chardev ringbuf,id=ID[,size=N]
  --chardev null,id=ID       the same at other things; all take ,logfile=PATH[,logappend=on]
  --monitor [chardev=]ID[,pretty=on]
                             a monitor (QMP): nodes, exports and jobs made, changed and
                             asked for while the program runs
  --metrics unix:PATH[,token-secret=ID]
  --metrics HOST:PORT[,token-secret=ID][,tls-creds=ID]
                             metrics for Prometheus, a page for people, and all that a
                             monitor can do as JSON over HTTP (vellum ctl); over TCP
                             changes need a token, and other machines TLS too

Values may be JSON objects as well.

How to run:
  --config FILE              disks and exports as a file describes them (TOML); SIGHUP reads
                             it again and changes only what is different
  --state FILE               keep what clients of monitors have made in FILE, and bring it
                             back at the next start
  --check                    say what --config would do, and end
  --cache-budget SIZE        what the caches of all images may take together (K, M, G)
  --log text|json            a line on standard error for what happens: the start, disks,
                             exports, clients, jobs, errors
  --daemonize                go to the background once everything is there
  --pidfile PATH             write the process id to PATH
"],
    order: "cache-budget chardev check config metrics monitor",
    examples: "\
vellum daemon --blockdev driver=file,node-name=file,filename=disk.qcow2 --blockdev \
driver=qcow2,node-name=disk,file=file --nbd-server addr.type=unix,addr.path=/run/disk.sock \
--export nbd,id=one,node-name=disk,writable=on
  a disk behind a socket
vellum daemon --config disks.toml --check
  what a file of disks would do, with the line of each request
vellum daemon --config disks.toml --state state.json --log json
  the disks of a file, and what clients make besides; SIGHUP reads the file again
vellum daemon --metrics unix:/run/disks.sock --metrics localhost:9100 ...
  commands over the socket, metrics for Prometheus over the port
",
    exits: "\
0  ended by a signal or a client
1  an error, which is told
",
    ..Spec::EMPTY
};

/// A part as it was given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Item {
    pub(super) part: Part,
    pub(super) text: String,
    option: &'static str,
}

impl fmt::Display for Item {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The data of a secret is no text for messages.
        match (self.part, self.text.find("data")) {
            (Part::Object, Some(at)) => write!(f, "--{} {}...", self.option, &self.text[..at]),
            _ => write!(f, "--{} {}", self.option, self.text),
        }
    }
}

/// The command line, taken apart.
#[derive(Debug, Default)]
pub(super) struct Arguments {
    pub(super) items: Vec<Item>,
    pub(super) daemonize: bool,
    pub(super) pid_file: Option<String>,
    /// The file that says what is served.
    pub(super) config: Option<String>,
    /// Lines for what happens.
    pub(super) log: Option<LogFormat>,
    /// The file that has what was made at run time.
    pub(super) state: Option<String>,
    /// Only say what the file of `config` would do.
    pub(super) check: bool,
    /// What the caches of all images may take together.
    pub(super) cache_budget_bytes: Option<u64>,
}

impl Arguments {
    pub(super) fn parse(words: Vec<OsString>) -> Result<Arguments, Failure> {
        let mut arguments = Arguments::default();
        let mut parser = Parser::new(SPEC.options(), words);
        while let Some((name, text)) = parser.next_option()? {
            match name {
                "help" => return Err(UsageError::Help.into()),
                "version" => return Err(UsageError::Version.into()),
                "cache-budget" => arguments.cache_budget_bytes = Some(parse_budget(&text)?),
                "check" => arguments.check = true,
                "config" if arguments.config.is_some() => {
                    return Err(Failure::message("--config can only be specified once"));
                }
                "config" => arguments.config = Some(text),
                "log" => match LogFormat::of(&text) {
                    Some(format) => arguments.log = Some(format),
                    None => {
                        let text = format!("--log is 'text' or 'json', not '{text}'");
                        return Err(Failure::message(text));
                    }
                },
                "state" if arguments.state.is_some() => {
                    return Err(Failure::message("--state can only be specified once"));
                }
                "state" => arguments.state = Some(text),
                "daemonize" => arguments.daemonize = true,
                "pidfile" if arguments.pid_file.is_some() => {
                    return Err(Failure::message("--pidfile can only be specified once"));
                }
                "pidfile" => arguments.pid_file = Some(text),
                option => {
                    let part = Part::of(option).ok_or_else(|| UsageError::not_taken(option))?;
                    arguments.items.push(Item { part, text, option });
                }
            }
        }
        match parser.operands().first() {
            Some(word) => Err(Failure::message(format!("{word}: Unexpected argument"))),
            None if arguments.check && arguments.config.is_none() => Err(Failure::message(
                "--check says what --config FILE would do; name that file",
            )),
            None => Ok(arguments),
        }
    }
}

/// The smallest budget that is of any use: it would be reading tables all the time.
const MIN_CACHE_BUDGET_BYTES: u64 = 1 << 20;

fn parse_budget(text: &str) -> Result<u64, Failure> {
    match crate::size::parse(text) {
        Ok(bytes) if bytes >= MIN_CACHE_BUDGET_BYTES => Ok(bytes),
        _ => Err(Failure::message(format!(
            "--cache-budget is a size of 1M or more, not '{text}'"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Arguments, String> {
        let words = line.split_whitespace().map(OsString::from).collect();
        Arguments::parse(words).map_err(|failure| match failure {
            Failure::Message(text) => text,
            other => format!("{other:?}"),
        })
    }

    #[test]
    fn a_cache_budget_is_a_size() {
        let arguments = parse("--cache-budget 64M").unwrap();
        assert_eq!(arguments.cache_budget_bytes, Some(64 << 20));
        for wrong in ["4k", "much", "-1"] {
            let error = parse(&format!("--cache-budget {wrong}")).unwrap_err();
            assert!(error.contains(wrong), "{error}");
        }
    }

    #[test]
    fn parts_keep_their_order() {
        let parsed = parse("--export a --blockdev=b --daemonize --object c --pidfile p").unwrap();
        let items: Vec<String> = parsed.items.iter().map(Item::to_string).collect();
        assert_eq!(items, ["--export a", "--blockdev b", "--object c"]);
        assert!(parsed.daemonize);
        assert_eq!(parsed.pid_file.as_deref(), Some("p"));
    }

    #[test]
    fn words_that_are_no_options_are_refused() {
        assert_eq!(parse("extra").unwrap_err(), "extra: Unexpected argument");
        let twice = parse("--pidfile a --pidfile b").unwrap_err();
        assert_eq!(twice, "--pidfile can only be specified once");
    }
}

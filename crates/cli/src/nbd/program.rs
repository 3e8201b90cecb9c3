//! `vellum nbd`, and `qemu-nbd`: the command.

use std::ffi::OsString;

use crate::report;
use crate::server::Failure;
use crate::version::version;

use super::arguments::{Action, Arguments, DEFAULT_ADDRESS, DEFAULT_PORT, options};
use super::{list, serve};

/// Runs the tool and returns its exit code.
pub fn main(program: &str, args: Vec<OsString>) -> i32 {
    let done = Arguments::parse(args).and_then(|arguments| match arguments.action {
        Action::Help => {
            report::print(help(program));
            Ok(())
        }
        Action::Version => {
            // qemu-nbd leaves out the word that the other programs have.
            report::print(version(program).replace(" version ", " "));
            Ok(())
        }
        Action::List => list::list(&arguments),
        Action::Serve => serve::serve(arguments),
    });
    match done {
        Ok(()) => 0,
        Err(failure) => {
            failure.report(&options());
            if matches!(failure, Failure::Usage(_)) && !report::is_own() {
                report::error("Try `qemu-nbd --help' for more information.");
            }
            1
        }
    }
}

/// What `--help` prints.
pub fn help(program: &str) -> String {
    let call = report::call(program, "nbd");
    format!(
        "Usage: {call} [OPTIONS] IMAGE
  or:  {call} --list [OPTIONS]
Serves a disk image to clients of the NBD protocol.

  -h, --help                 print this text
  -V, --version              print the version

Where to listen, and to whom:
  -k, --socket=PATH          unix socket to listen on (an absolute path)
  -p, --port=PORT            TCP port to listen on (default {DEFAULT_PORT})
  -b, --bind=ADDRESS         TCP address to listen on (default {DEFAULT_ADDRESS})
  -e, --shared=N             clients served at once (default 1; 0: any number)
  -t, --persistent           stay when the last client leaves
  -x, --export-name=NAME     name of the export (default: empty)
  -D, --description=TEXT     description of the export
      --handshake-limit=N    seconds a client may take to choose (default 10; 0: any)

What to show:
  -r, --read-only            refuse writes
  -o, --offset=N             leave out the first N bytes
  -A, --allocation-depth     let clients ask which layer holds a range
  -B, --bitmap=NAME          let clients ask what a dirty bitmap holds; several times

How to open the image:
  -f, --format=FORMAT        format of the image (raw, qcow2)
      --image-opts           IMAGE is a list of key=value options
  -n, --nocache              the same as --cache=none
      --cache=MODE           none, writeback (default), writethrough, directsync, unsafe
      --aio=MODE             threads, native, io_uring
      --discard=MODE         ignore, unmap
      --detect-zeroes=MODE   off, on, unmap

  -s, --snapshot             throw all changes away in the end
  -l, --load-snapshot=PARAM  show an internal snapshot: ID, NAME, or
                             snapshot.id=ID,snapshot.name=NAME

Who may come in, and how:
      --object=TYPE,id=ID    define a secret, TLS credentials (tls-creds-x509,
                             tls-creds-psk, tls-creds-anon), or who may come in
                             (authz-simple, authz-list, authz-list-file)
      --tls-creds=ID         insist on TLS with these credentials
      --tls-authz=ID         let only those in that this object allows
      --tls-hostname=NAME    with --list: the name in the server's certificate

How to run:
  -v, --verbose              tell what clients do wrong
  -T, --trace=PATTERN        write events as they happen; help lists them
      --fork                 go to the background once clients can connect
      --pid-file=PATH        write the process id to PATH

Another server:
  -L, --list                 list what the server at -k, or -b and -p, offers
"
    )
}

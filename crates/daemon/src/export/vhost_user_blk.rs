//! What an export has when it is a disk in a guest's memory (`type=vhost-user-blk`).

use std::sync::Arc;
use std::time::Duration;

use vellum::BlockDevice;
use vellum_export::nbd::Listener;
use vellum_export::vhost_user_blk::{Export, Log, Options as ExportOptions, SERIAL_BYTES};
use vellum_graph::live::{Changes, RequiredAccess};
use vellum_graph::stderr;
use vellum_options::Options;

use crate::failure::{Failure, failure, message, refuse_rest};
use crate::inherited::inherited;
use crate::server::{ServerEnvironment, refuse_abstract};

/// How long a queue looks for requests at most if nothing is said: QEMU's figure for a thread.
const DEFAULT_POLL_MAX_NS: u64 = 32_768;
/// More would be a program that never sleeps.
const LONGEST_POLL_NS: u64 = 1_000_000;
const BLOCK_BYTES: std::ops::RangeInclusive<u64> = 512..=65536;

/// The options of this type.
#[derive(Debug)]
pub(super) struct Wanted {
    address: Options,
    pub(super) options: ExportOptions,
}

impl Wanted {
    /// Takes the options apart.
    pub(super) fn take(options: &mut Options) -> Result<Self, Failure> {
        let block_bytes = options.take_size("logical-block-size").map_err(failure)?;
        let queues = options.take_number("num-queues").map_err(failure)?;
        let poll_max_ns = options.take_number("poll-max-ns").map_err(failure)?;
        let serial = options.take_text("serial").map_err(failure)?;
        let address = options.take_group("addr");
        let poll_max_ns = poll_max_ns.unwrap_or(DEFAULT_POLL_MAX_NS);
        if poll_max_ns > LONGEST_POLL_NS {
            return Err(message(format!(
                "poll-max-ns must be at most {LONGEST_POLL_NS}"
            )));
        }
        let serial = serial.unwrap_or_else(|| "vellum".to_owned());
        if serial.len() > SERIAL_BYTES {
            return Err(message(format!(
                "serial must be at most {SERIAL_BYTES} bytes long"
            )));
        }
        Ok(Wanted {
            address,
            options: ExportOptions {
                logical_block_bytes: check_block_bytes(block_bytes.unwrap_or(512))?,
                queues: check_queues(queues.unwrap_or(1))?,
                serial,
                poll_limit: Duration::from_nanos(poll_max_ns),
                ..ExportOptions::default()
            },
        })
    }

    /// What a guest does to the node. It is told of another size.
    pub(super) fn access(writable: bool) -> RequiredAccess {
        RequiredAccess {
            role: "root".to_owned(),
            changes: if writable {
                Changes::CONTENT
            } else {
                Changes::NONE
            },
            keeps: Changes::NONE,
        }
    }

    /// Serves a device.
    pub(super) fn serve(
        self,
        device: Arc<dyn BlockDevice>,
        id: &str,
        environment: &ServerEnvironment,
    ) -> Result<Export, Failure> {
        let listener = listen(self.address, environment)?;
        Export::start(device, &self.options, listener, Some(log_of(id))).map_err(failure)
    }
}

fn check_block_bytes(bytes: u64) -> Result<u32, Failure> {
    match u32::try_from(bytes) {
        Ok(fits) if bytes.is_power_of_two() && BLOCK_BYTES.contains(&bytes) => Ok(fits),
        _ => Err(message(format!(
            "parameter logical-block-size must be a power of 2 between {} and {}",
            BLOCK_BYTES.start(),
            BLOCK_BYTES.end()
        ))),
    }
}

fn check_queues(count: u64) -> Result<u16, Failure> {
    match u16::try_from(count) {
        Ok(0) => Err(message("num-queues must be greater than 0")),
        Ok(count) if count <= ExportOptions::MAX_QUEUES => Ok(count),
        Ok(_) => {
            let most = ExportOptions::MAX_QUEUES;
            Err(message(format!("num-queues must be at most {most}")))
        }
        Err(_) => Err(message("Parameter 'num-queues' expects uint16_t")),
    }
}

/// Listens where the options say.
fn listen(mut address: Options, environment: &ServerEnvironment) -> Result<Listener, Failure> {
    if address.is_empty() {
        return Err(message("Parameter 'addr' is missing"));
    }
    let mut part = |key: &str| {
        let value = address.take_text(key).map_err(failure)?;
        value.ok_or_else(|| message(format!("Parameter 'addr.{key}' is missing")))
    };
    let listener = match part("type")?.as_str() {
        "unix" => {
            let path = part("path")?;
            refuse_abstract(&mut address)?;
            (environment.listen_unix)(&path)?
        }
        "fd" => inherited(&part("str")?)?,
        "inet" | "vsock" => {
            return Err(message(
                "Only socket address types 'unix' and 'fd' are supported",
            ));
        }
        other => {
            return Err(message(format!(
                "Parameter 'addr.type' does not accept value '{other}'"
            )));
        }
    };
    refuse_rest(&address)?;
    Ok(listener)
}

/// Says which export a line is about.
fn log_of(id: &str) -> Log {
    let export = format!("export '{id}'");
    Arc::new(move |line| stderr::print_line(&format!("{export}: {line}")))
}

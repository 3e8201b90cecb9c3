//! Options that all drivers of servers have: times, certificates, the proxy.

use std::time::Duration;

use vellum::Result;
use vellum_options::Options;
use vellum_remote::{ConnectionOptions, Login};
use zeroize::Zeroizing;

use crate::node::errors::invalid;
use crate::secret;

/// Read-ahead is counted in these.
const SECTOR_BYTES: u64 = 512;
/// QEMU's limit.
const MOST_TIMEOUT_SECONDS: u64 = 10_000;

pub(super) fn take_readahead(options: &mut Options) -> Result<Option<u64>> {
    let readahead_bytes = options.take_size("readahead")?;
    if let Some(bytes) = readahead_bytes.filter(|bytes| !bytes.is_multiple_of(SECTOR_BYTES)) {
        return Err(invalid(format!(
            "HTTP_READAHEAD_SIZE {bytes} is not a multiple of 512"
        )));
    }
    Ok(readahead_bytes)
}

/// The option `timeout`.
pub(super) fn take_timeout(options: &mut Options) -> Result<Option<Duration>> {
    let seconds = match options.take_number("timeout")? {
        // 0 is no time at all, and in QEMU none that ends.
        Some(0) => Some(MOST_TIMEOUT_SECONDS),
        Some(seconds) if seconds > MOST_TIMEOUT_SECONDS => {
            return Err(invalid("timeout parameter is too large or negative"));
        }
        seconds => seconds,
    };
    Ok(seconds.map(Duration::from_secs))
}

pub(super) fn take_times(options: &mut Options) -> Result<ConnectionOptions> {
    let mut connection = ConnectionOptions::default();
    connection.timeout = take_timeout(options)?.unwrap_or(connection.timeout);
    Ok(connection)
}

/// Refuses what is left of a group of options, `name`, when all that are known were taken.
#[cfg(any(feature = "rbd", feature = "ssh"))]
pub(super) fn refuse_left(group: &Options, name: &str) -> Result<()> {
    match group.keys().next() {
        None => Ok(()),
        Some(key) => Err(invalid(format!("Parameter '{name}.{key}' is unexpected"))),
    }
}

/// The proxy's and the certificates' options.
pub(super) fn take_rest(options: &mut Options, connection: &mut ConnectionOptions) -> Result<()> {
    connection.proxy_login = take_login(options, "proxy-username", "proxy-password-secret")?;
    connection.authorities = options.take_text("tls-ca-file")?.map(Into::into);
    let certificate = options.take_text("tls-cert-file")?;
    let key = options.take_text("tls-key-file")?;
    connection.certificate = match (certificate, key) {
        (Some(certificate), key) => {
            let key = key.unwrap_or_else(|| certificate.clone());
            Some((certificate.into(), key.into()))
        }
        (None, Some(_)) => {
            return Err(invalid("tls-key-file needs tls-cert-file"));
        }
        (None, None) => None,
    };
    Ok(())
}

pub(super) fn take_login(options: &mut Options, name: &str, secret: &str) -> Result<Option<Login>> {
    let username = options.take_text(name)?;
    let password = take_secret(options, secret)?;
    if username.is_none() && password.is_none() {
        return Ok(None);
    }
    let username = username.unwrap_or_default();
    Ok(Some(Login { username, password }))
}

pub(super) fn take_secret(options: &mut Options, key: &str) -> Result<Option<Zeroizing<String>>> {
    let Some(id) = options.take_text(key)? else {
        return Ok(None);
    };
    let bytes = secret::passphrase(&id)?;
    let text = std::str::from_utf8(bytes.bytes());
    let text = text.map_err(|_| invalid(format!("Data from secret {id} is not valid UTF-8")))?;
    Ok(Some(Zeroizing::new(text.to_owned())))
}

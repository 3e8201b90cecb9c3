//! `http` and `https`: files on web servers, to be read.

use std::time::Duration;

use vellum::Result;
use vellum_remote::{Credentials, HttpOptions, HttpStorage};
use zeroize::Zeroizing;

use crate::file_node::CommonOptions;
use crate::graph::{NodeKind, OpenContext, OpenedNode, invalid, refuse_unknown};
use crate::http_name;
use crate::options::Options;
use crate::{secret, stderr};

/// Read-ahead is counted in these.
const SECTOR_BYTES: u64 = 512;
/// QEMU's limit.
const MOST_TIMEOUT_SECONDS: u64 = 10_000;

pub(super) async fn open(
    driver: &'static str,
    mut options: Options,
    common: CommonOptions,
    _around: OpenContext,
) -> Result<OpenedNode> {
    if common.writable {
        return Err(invalid("curl driver does not support writes"));
    }
    let client = take(driver, &mut options)?;
    refuse_unknown(&options, driver)?;
    let storage = HttpStorage::open(client).await?;
    Ok(OpenedNode {
        driver,
        kind: NodeKind::Storage(storage),
        filtered: None,
        files: Vec::new(),
        writable: false,
    })
}

fn take(driver: &str, options: &mut Options) -> Result<HttpOptions> {
    let readahead_bytes = options.take_size("readahead")?;
    if let Some(bytes) = readahead_bytes.filter(|bytes| !bytes.is_multiple_of(SECTOR_BYTES)) {
        return Err(invalid(format!(
            "HTTP_READAHEAD_SIZE {bytes} is not a multiple of 512"
        )));
    }
    let timeout = options.take_number("timeout")?;
    if timeout.is_some_and(|seconds| seconds > MOST_TIMEOUT_SECONDS) {
        return Err(invalid("timeout parameter is too large or negative"));
    }
    let verify = options.take_bool("sslverify")?.unwrap_or(true);
    let cookie = take_cookie(options)?;
    let Some(url) = options.take_text("url")? else {
        return Err(invalid("curl block driver requires an 'url' option"));
    };
    http_name::check(driver, &url)?;
    let mut client = HttpOptions::new(url);
    client.readahead_bytes = readahead_bytes.unwrap_or(client.readahead_bytes);
    // 0 is no time at all, and in QEMU none that ends.
    client.timeout = match timeout {
        Some(0) => Duration::from_secs(MOST_TIMEOUT_SECONDS),
        Some(seconds) => Duration::from_secs(seconds),
        None => client.timeout,
    };
    client.verify = verify;
    client.cookie = cookie;
    client.credentials = take_basic(options, "username", "password-secret")?;
    client.proxy_credentials = take_basic(options, "proxy-username", "proxy-password-secret")?;
    if let Some(token) = take_secret(options, "bearer-token-secret")? {
        if client.credentials.is_some() {
            return Err(invalid(
                "bearer-token-secret cannot be used with username and password-secret",
            ));
        }
        client.credentials = Some(Credentials::Bearer(token));
    }
    take_certificates(options, &mut client)?;
    client.notice = stderr::print_line;
    Ok(client)
}

fn take_cookie(options: &mut Options) -> Result<Option<Zeroizing<String>>> {
    let cookie = options.take_text("cookie")?.map(Zeroizing::new);
    if cookie.is_some() && options.contains("cookie-secret") {
        return Err(invalid(
            "curl driver cannot handle both cookie and cookie secret",
        ));
    }
    Ok(cookie.or(take_secret(options, "cookie-secret")?))
}

fn take_basic(options: &mut Options, name: &str, secret: &str) -> Result<Option<Credentials>> {
    let username = options.take_text(name)?;
    let password = take_secret(options, secret)?;
    if username.is_none() && password.is_none() {
        return Ok(None);
    }
    let username = username.unwrap_or_default();
    Ok(Some(Credentials::Basic { username, password }))
}

fn take_secret(options: &mut Options, key: &str) -> Result<Option<Zeroizing<String>>> {
    let Some(id) = options.take_text(key)? else {
        return Ok(None);
    };
    let bytes = secret::passphrase(&id)?;
    let text = std::str::from_utf8(bytes.bytes());
    let text = text.map_err(|_| invalid(format!("Data from secret {id} is not valid UTF-8")))?;
    Ok(Some(Zeroizing::new(text.to_owned())))
}

fn take_certificates(options: &mut Options, client: &mut HttpOptions) -> Result<()> {
    client.authorities = options.take_text("tls-ca-file")?.map(Into::into);
    let certificate = options.take_text("tls-cert-file")?;
    let key = options.take_text("tls-key-file")?;
    client.certificate = match (certificate, key) {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(text: &str) -> String {
        let mut options = Options::parse(text).unwrap();
        take("http", &mut options).unwrap_err().message().to_owned()
    }

    #[test]
    fn options_have_qemus_defaults_and_words() {
        let mut options = Options::parse("url=http://h/x").unwrap();
        let client = take("http", &mut options).unwrap();
        assert_eq!(client.readahead_bytes, 256 << 10);
        assert_eq!(client.timeout, Duration::from_secs(5));
        assert!(client.verify);
        for (text, message) in [
            ("timeout=1", "curl block driver requires an 'url' option"),
            (
                "url=http://h/x,readahead=1",
                "HTTP_READAHEAD_SIZE 1 is not a multiple of 512",
            ),
            (
                "url=http://h/x,timeout=10001",
                "timeout parameter is too large or negative",
            ),
            (
                "url=http://h/x,cookie=a,cookie-secret=b",
                "curl driver cannot handle both cookie and cookie secret",
            ),
            (
                "url=http://h/x,password-secret=nobody",
                "No secret with id 'nobody'",
            ),
            (
                "url=http://h/x,sslverify=foo",
                "Parameter 'sslverify' expects 'on' or 'off'",
            ),
            (
                "url=http://h/x,tls-key-file=k",
                "tls-key-file needs tls-cert-file",
            ),
        ] {
            assert_eq!(refusal(text), message, "{text}");
        }
    }
}

//! `http` and `https`: files on web servers, to be read.

use vellum::Result;
use vellum_options::{Options, url_name};
use vellum_remote::{Credentials, HttpOptions, RemoteStorage};
use zeroize::Zeroizing;

use crate::node::driver::DriverFacts;
use crate::node::errors::{invalid, refuse_unknown};
use crate::node::file_node::CommonOptions;
use crate::node::opened::OpenedNode;
use crate::open::context::OpenContext;
use crate::stderr;

use super::server_options::{self, take_secret};

/// The driver.
pub(super) const FACTS: DriverFacts = DriverFacts {
    options: &[&[
        "url",
        "readahead",
        "keep-size",
        "timeout",
        "username",
        "password-secret",
        "proxy-username",
        "proxy-password-secret",
        "cookie",
        "cookie-secret",
        "header",
        "header-secret",
        "sslverify",
        "bearer-token-secret",
        "tls-ca-file",
        "tls-cert-file",
        "tls-key-file",
    ]],

    ..DriverFacts::named("http")
};

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
    let storage = RemoteStorage::open_http(client).await?;
    Ok(OpenedNode::remote(FACTS.called(driver), storage))
}

fn take(driver: &str, options: &mut Options) -> Result<HttpOptions> {
    let readahead_bytes = server_options::take_readahead(options)?;
    let mut connection = server_options::take_times(options)?;
    connection.verify = options.take_bool("sslverify")?.unwrap_or(true);
    let cookie = take_cookie(options)?;
    let Some(url) = options.take_text("url")? else {
        return Err(invalid("curl block driver requires an 'url' option"));
    };
    url_name::check(driver, &url)?;
    let mut client = HttpOptions::new(url);
    client.readahead_bytes = readahead_bytes.unwrap_or(client.readahead_bytes);
    client.cookie = cookie;
    client.header = take_header(options)?;
    client.keep_bytes = options.take_size("keep-size")?.unwrap_or(client.keep_bytes);
    let login = server_options::take_login(options, "username", "password-secret")?;
    client.credentials = login.map(Credentials::Basic);
    server_options::take_rest(options, &mut connection)?;
    if let Some(token) = take_secret(options, "bearer-token-secret")? {
        if client.credentials.is_some() {
            return Err(invalid(
                "bearer-token-secret cannot be used with username and password-secret",
            ));
        }
        client.credentials = Some(Credentials::Bearer(token));
    }
    client.connection = connection;
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

/// Header fields beside, which may be secret.
fn take_header(options: &mut Options) -> Result<Option<Zeroizing<String>>> {
    let header = options.take_text("header")?.map(Zeroizing::new);
    if header.is_some() && options.contains("header-secret") {
        return Err(invalid("header cannot be used with header-secret"));
    }
    Ok(header.or(take_secret(options, "header-secret")?))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

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
        assert_eq!(client.connection.timeout, Duration::from_secs(5));
        assert!(client.connection.verify);
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
                "url=http://h/x,header=a,header-secret=b",
                "header cannot be used with header-secret",
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

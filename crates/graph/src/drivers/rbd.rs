//! `rbd`: images of Ceph clusters.

use std::sync::Arc;

use base64::Engine;
use vellum::{Error, ErrorKind, Result, Storage};
use vellum_options::{Options, Scalar, rbd_name};
use vellum_remote::{Encryption, EncryptionFormat, RbdOptions, RbdStorage};
use zeroize::Zeroizing;

use crate::node::driver::DriverFacts;
use crate::node::errors::{invalid, refuse_unknown};
use crate::node::file_node::CommonOptions;
use crate::node::opened::OpenedNode;
use crate::open::context::OpenContext;
use crate::secret;

use super::server_options::refuse_left;

/// The driver.
pub(super) const FACTS: DriverFacts = DriverFacts {
    options: &[&[
        "pool",
        "namespace",
        "image",
        "snapshot",
        "conf",
        "user",
        "key-secret",
        "auth-client-required",
        "server",
        "encrypt.format",
        "encrypt.key-secret",
    ]],

    ..DriverFacts::named("rbd")
};

const DRIVER: &str = "rbd";

pub(super) async fn open(
    _driver: &'static str,
    mut options: Options,
    common: CommonOptions,
    _around: OpenContext,
) -> Result<OpenedNode> {
    let mut image = take(&mut options)?;
    refuse_unknown(&options, DRIVER)?;
    if image.snapshot.is_some() && common.writable {
        return Err(invalid("rbd snapshots are read-only"));
    }
    image.writable = common.writable;
    image.cached = !common.direct;
    let storage = RbdStorage::open(image).await?;
    Ok(OpenedNode {
        writable: common.writable,
        ..OpenedNode::remote(FACTS, storage)
    })
}

/// Makes an image, and opens it; `object_bytes`: the size of its objects.
///
/// # Errors
/// If an option is wrong or unknown, or the cluster refuses.
pub async fn create(
    mut options: Options,
    size_bytes: u64,
    object_bytes: Option<u64>,
) -> Result<Arc<dyn Storage>> {
    options.take("driver");
    let mut image = take(&mut options)?;
    refuse_unknown(&options, DRIVER)?;
    if image.snapshot.is_some() {
        return Err(refused("a snapshot cannot be made as an image is"));
    }
    if image.encryption.is_some() {
        return Err(refused(
            "images that librbd encrypts are made with 'rbd encryption format'",
        ));
    }
    vellum_remote::create_image(image.clone(), size_bytes, object_bytes).await?;
    image.writable = true;
    Ok(RbdStorage::open(image).await?)
}

/// Removes an image that is of no use to anybody.
///
/// # Errors
/// As [`create`].
pub async fn remove(mut options: Options) -> Result<()> {
    options.take("driver");
    vellum_remote::remove_image(take(&mut options)?).await
}

fn refused(message: &str) -> Error {
    Error::new(ErrorKind::Unsupported, "create", message)
}

/// The image that options describe; takes them.
fn take(options: &mut Options) -> Result<RbdOptions> {
    take_filename(options)?;
    let name = rbd_name::name_of(options).0;
    let missing = |key: &str| invalid(format!("Parameter '{key}' is missing"));
    let pool = options.take_text("pool")?.ok_or_else(|| missing("pool"))?;
    let image = options
        .take_text("image")?
        .ok_or_else(|| missing("image"))?;
    let mut taken = RbdOptions::new(pool, image);
    taken.name = name.unwrap_or(taken.name);
    taken.namespace = options
        .take_text("namespace")?
        .filter(|name| !name.is_empty());
    taken.snapshot = options.take_text("snapshot")?;
    taken.conf = options.take_text("conf")?;
    taken.user = options.take_text("user")?;
    if let Some(pairs) = options.take_text(rbd_name::PAIRS)? {
        taken.more = rbd_name::pairs(&pairs)?;
    }
    if let Some(id) = options.take_text("key-secret")? {
        let key = secret::bytes(&id)?;
        let key = base64::engine::general_purpose::STANDARD.encode(key.bytes());
        taken.key = Some(Zeroizing::new(key));
    }
    taken.authentication = take_list(options.take_group("auth-client-required"))?;
    taken.monitors = take_servers(options.take_group("server"))?;
    taken.encryption = take_encryption(options.take_group("encrypt"))?;
    Ok(taken)
}

/// Takes a name for the options that it stands for.
fn take_filename(options: &mut Options) -> Result<()> {
    let Some(filename) = options.take_text("filename")? else {
        return Ok(());
    };
    for (key, value) in rbd_name::options(&filename)?.iter() {
        if options.contains(key) {
            return Err(invalid(format!(
                "Option '{key}' cannot be used with a file name"
            )));
        }
        if key != "driver" {
            options.set(key, value.clone());
        }
    }
    Ok(())
}

fn take_list(mut list: Options) -> Result<Vec<String>> {
    let mut found = Vec::new();
    while let Some(one) = list.take_text(&found.len().to_string())? {
        if !matches!(one.as_str(), "cephx" | "none") {
            return Err(invalid(format!(
                "Parameter 'auth-client-required' does not accept value '{one}'"
            )));
        }
        found.push(one);
    }
    refuse_left(&list, "auth-client-required")?;
    Ok(found)
}

fn take_servers(mut list: Options) -> Result<Vec<String>> {
    let mut found = Vec::new();
    loop {
        let mut server = list.take_group(&found.len().to_string());
        let Some(host) = server.take_text("host")? else {
            break;
        };
        let port = match server.take("port") {
            Some(Scalar::Text(text)) => text,
            Some(Scalar::Number(number)) => number.to_string(),
            _ => return Err(invalid("Parameter 'server.port' is missing")),
        };
        refuse_left(&server, "server")?;
        found.push(match host.contains(':') {
            true => format!("[{host}]:{port}"),
            false => format!("{host}:{port}"),
        });
    }
    refuse_left(&list, "server")?;
    Ok(found)
}

fn take_encryption(mut options: Options) -> Result<Option<Encryption>> {
    if options.is_empty() {
        return Ok(None);
    }
    let format = match options.take_text("format")?.as_deref() {
        Some("luks") => EncryptionFormat::Luks1,
        Some("luks2") => EncryptionFormat::Luks2,
        Some("luks-any") => {
            return Err(invalid(
                "encrypt.format=luks-any is not part of this version; say luks or luks2",
            ));
        }
        Some(other) => {
            return Err(invalid(format!(
                "Parameter 'encrypt.format' does not accept value '{other}'"
            )));
        }
        None => return Err(invalid("Parameter 'encrypt.format' is missing")),
    };
    let Some(id) = options.take_text("key-secret")? else {
        return Err(invalid("Parameter 'encrypt.key-secret' is missing"));
    };
    refuse_left(&options, "encrypt")?;
    let passphrase = Zeroizing::new(secret::bytes(&id)?.bytes().to_vec());
    Ok(Some(Encryption { format, passphrase }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(text: &str) -> std::result::Result<RbdOptions, String> {
        let mut options = Options::parse(text).unwrap();
        take(&mut options).map_err(|error| error.message().to_owned())
    }

    #[test]
    fn images_are_told_in_many_ways() {
        let image = taken("filename=rbd:p/n/i@s:id=me:rados_osd_op_timeout=5").unwrap();
        assert_eq!((&*image.pool, &*image.image), ("p", "i"));
        assert_eq!(image.namespace.as_deref(), Some("n"));
        assert_eq!(image.user.as_deref(), Some("me"));
        let more = [("rados_osd_op_timeout".to_owned(), "5".to_owned())];
        assert_eq!(image.more, more);
        let image = taken(
            "pool=p,image=i,server.0.host=a,server.0.port=1,server.1.host=::1,server.1.port=2,\
             auth-client-required.0=none",
        );
        let image = image.unwrap();
        assert_eq!(image.monitors, ["a:1", "[::1]:2"]);
        assert_eq!(image.authentication, ["none"]);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for (text, message) in [
            ("image=i", "Parameter 'pool' is missing"),
            ("pool=p", "Parameter 'image' is missing"),
            (
                "filename=rbd:p/i,pool=q",
                "Option 'pool' cannot be used with a file name",
            ),
            (
                "pool=p,image=i,key-secret=nobody",
                "No secret with id 'nobody'",
            ),
            (
                "pool=p,image=i,auth-client-required.0=x",
                "Parameter 'auth-client-required' does not accept value 'x'",
            ),
            (
                "pool=p,image=i,encrypt.format=luks",
                "Parameter 'encrypt.key-secret' is missing",
            ),
            (
                "pool=p,image=i,server.0.host=h",
                "Parameter 'server.port' is missing",
            ),
        ] {
            assert_eq!(taken(text).unwrap_err(), message, "{text}");
        }
    }
}

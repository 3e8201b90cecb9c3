//! TLS credentials and who may come in: what `--object tls-creds-…` and `authz-…` define
//! and options refer to by name.
//!
//! As in QEMU they belong to the process, and live as long as it.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use vellum::{Error, ErrorKind, Result};
use vellum_nbd::Upgrade;
use vellum_options::Options;
use zeroize::Zeroizing;

use vellum_tls::{Authorizer, Client, Credentials, CredentialsOptions, Endpoint, Kind, Server};

use crate::authz;
use crate::secret;

static OBJECTS: Mutex<BTreeMap<String, (&str, Object)>> = Mutex::new(BTreeMap::new());

#[derive(Debug, Clone)]
enum Object {
    Credentials(Arc<Credentials>),
    Authorizer(Arc<dyn Authorizer>),
}

fn objects() -> MutexGuard<'static, BTreeMap<String, (&'static str, Object)>> {
    OBJECTS.lock()
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, "make object", message)
}

/// The types of objects that are made here.
const TYPES: [&str; 6] = [
    "tls-creds-x509",
    "tls-creds-psk",
    "tls-creds-anon",
    "authz-simple",
    "authz-list",
    "authz-list-file",
];

/// Whether objects of this type are made here.
pub fn is_type(name: &str) -> bool {
    TYPES.contains(&name)
}

/// The type of the object of this name.
pub fn kind(id: &str) -> Option<&'static str> {
    objects().get(id).map(|(kind, _)| *kind)
}

/// The names of all objects.
pub fn names() -> Vec<String> {
    objects().keys().cloned().collect()
}

/// Removes an object; whether there was one. Whoever uses it goes on to do so.
pub fn remove(id: &str) -> bool {
    objects().remove(id).is_some()
}

/// Makes an object of a type that [`is_type`] knows, by its options.
///
/// # Errors
/// In QEMU's words, for options and files that cannot be.
pub fn add(kind: &str, mut options: Options) -> Result<()> {
    let id = secret::take_id(&mut options)?;
    if objects().contains_key(&id) {
        return Err(secret::duplicate(&id));
    }
    let object = match kind {
        "tls-creds-x509" => credentials(Kind::X509, &mut options)?,
        "tls-creds-psk" => credentials(Kind::Psk, &mut options)?,
        "tls-creds-anon" => credentials(Kind::Anonymous, &mut options)?,
        _ => Object::Authorizer(authz::make(kind, &mut options)?),
    };
    if let Some(key) = options.keys().next() {
        return Err(invalid(format!("Parameter '{key}' is unexpected")));
    }
    // The name as it lives on.
    let kind = TYPES.into_iter().find(|known| *known == kind);
    objects().insert(id, (kind.unwrap_or_default(), object));
    Ok(())
}

fn credentials(kind: Kind, options: &mut Options) -> Result<Object> {
    let endpoint = match options.take_text("endpoint")?.as_deref() {
        None | Some("client") => Endpoint::Client,
        Some("server") => Endpoint::Server,
        Some(other) => {
            return Err(invalid(format!(
                "Parameter 'endpoint' does not accept value '{other}'"
            )));
        }
    };
    // Each kind has its own options; what has no meaning is not taken.
    let (mut password, mut username, mut sanity_check) = (None, None, true);
    match kind {
        Kind::X509 => {
            if let Some(id) = options.take_text("passwordid")? {
                let secret = secret::passphrase(&id)?;
                password = Some(Zeroizing::new(secret.bytes().to_vec()));
            }
            sanity_check = options.take_bool("sanity-check")?.unwrap_or(true);
        }
        Kind::Psk => username = options.take_text("username")?,
        Kind::Anonymous => {}
    }
    let dir = options.take_text("dir")?;
    if dir.is_none() && kind != Kind::Anonymous {
        return Err(invalid("Missing 'dir' property value"));
    }
    let loaded = Credentials::load(&CredentialsOptions {
        kind,
        endpoint,
        dir: dir.map(Into::into),
        verify_peer: options.take_bool("verify-peer")?.unwrap_or(true),
        psk_file: None,
        sanity_check,
        username,
        password,
        priority: options.take_text("priority")?,
    })?;
    Ok(Object::Credentials(Arc::new(loaded)))
}

/// The credentials of a name, for one side.
fn find(id: &str, endpoint: Endpoint) -> Result<Arc<Credentials>> {
    let found = objects().get(id).map(|(_, object)| object.clone());
    let credentials = match found {
        None => return Err(invalid(format!("No TLS credentials with id '{id}'"))),
        Some(Object::Authorizer(_)) => {
            return Err(invalid(format!(
                "Object with id '{id}' is not TLS credentials"
            )));
        }
        Some(Object::Credentials(credentials)) => credentials,
    };
    match (endpoint, credentials.endpoint() == endpoint) {
        (_, true) => Ok(credentials),
        (Endpoint::Client, false) => Err(invalid("Expected TLS credentials for a client endpoint")),
        (Endpoint::Server, false) => Err(invalid("Expected TLS credentials for a server endpoint")),
    }
}

/// Secures connections to a server that must be `hostname`, with the credentials of a name.
///
/// # Errors
/// If there are none, or they are for a server.
pub fn client(id: &str, hostname: Option<String>) -> Result<Arc<dyn Upgrade>> {
    let credentials = find(id, Endpoint::Client)?;
    Ok(Arc::new(Client::new(credentials, hostname)))
}

/// Secures connections to a server as the parameters of a URI say, in libnbd's words.
///
/// # Errors
/// As [`add`].
pub fn for_uri(mut options: Options, host: Option<String>) -> Result<Arc<dyn Upgrade>> {
    let psk_file = options.take_text("tls-psk-file")?;
    // What asks for a proof that nobody would look at is refused.
    let other = match psk_file {
        Some(_) => "tls-certificates",
        None => "tls-username",
    };
    if options.contains(other) {
        return Err(invalid(match psk_file {
            Some(_) => format!("'tls-psk-file' and '{other}' are mutually exclusive"),
            None => format!("'{other}' is not permitted without 'tls-psk-file'"),
        }));
    }
    let kind = match psk_file {
        Some(_) => Kind::Psk,
        None => Kind::X509,
    };
    let credentials = Credentials::load(&CredentialsOptions {
        kind,
        endpoint: Endpoint::Client,
        dir: options.take_text("tls-certificates")?.map(Into::into),
        verify_peer: options.take_bool("tls-verify-peer")?.unwrap_or(true),
        psk_file: psk_file.map(Into::into),
        sanity_check: true,
        username: options.take_text("tls-username")?,
        password: None,
        priority: None,
    })?;
    let hostname = options.take_text("tls-hostname")?.or(host);
    Ok(Arc::new(Client::new(Arc::new(credentials), hostname)))
}

/// Secures connections of clients, with the credentials of a name; only those come in
/// that the object called `authorizer` lets in.
///
/// # Errors
/// If there are none, or they are for a client.
pub fn server(id: &str, authorizer: Option<String>) -> Result<Arc<dyn Upgrade>> {
    let credentials = find(id, Endpoint::Server)?;
    let authorizer = authorizer.map(|id| Arc::new(NamedAuthorizer(id)) as Arc<dyn Authorizer>);
    Ok(Arc::new(Server::new(credentials, authorizer)))
}

/// An authorizer by its name, looked up when somebody wants to come in.
#[derive(Debug)]
struct NamedAuthorizer(String);

impl Authorizer for NamedAuthorizer {
    fn is_allowed(&self, identity: &str) -> Result<bool> {
        let found = objects().get(&self.0).map(|(_, object)| object.clone());
        match found {
            Some(Object::Authorizer(authorizer)) => authorizer.is_allowed(identity),
            Some(Object::Credentials(_)) => Err(invalid(format!(
                "Object with ID {} is not an authz object",
                self.0
            ))),
            None => Err(invalid(format!("Cannot find QAuthZ object ID {}", self.0))),
        }
    }
}

//! What a side of a connection shows of itself and demands of the other: certificates
//! in a folder, keys in a file, or nothing.

use std::fmt;
use std::path::{Path, PathBuf};

use openssl::dh::Dh;
use openssl::error::ErrorStack;
use openssl::pkey::PKey;
use openssl::ssl::{
    Ssl, SslContext, SslContextBuilder, SslFiletype, SslMethod, SslOptions, SslSessionCacheMode,
    SslVersion,
};
use openssl::x509::store::{X509Lookup, X509StoreBuilder};
use openssl::x509::verify::X509VerifyFlags;
use openssl::x509::{X509, X509Name};
use vellum_io::{Error, Result};
use vellum_storage::secret;
use zeroize::Zeroizing;

use crate::error::error;
use crate::keys::Keys;
use crate::{choose, library};

/// Suites of TLS 1.2 with pre-shared keys: those that prove the key, and encrypt.
const PSK_SUITES: &str = "kECDHEPSK:kDHEPSK:kPSK:!eNULL";
/// Suites without any proof of who the peer is; OpenSSL has them below its usual level.
const ANONYMOUS_SUITES: &str = "ADH+AESGCM:ADH+AES:@SECLEVEL=0";
/// The name that a client shows for its key.
const DEFAULT_USER: &str = "qemu";

/// Which side of a connection credentials are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Endpoint {
    /// The one that connects.
    Client,
    /// The one that listens.
    Server,
}

/// What proves who somebody is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Certificates.
    X509,
    /// Keys that both sides have.
    Psk,
    /// Nothing.
    Anonymous,
}

/// What a user says of credentials.
#[derive(Clone)]
pub struct CredentialsOptions {
    /// Their kind.
    pub kind: Kind,
    /// Their side.
    pub endpoint: Endpoint,
    /// The folder with the files, under the names that QEMU gives them. A client without
    /// one believes whom the system believes.
    pub dir: Option<PathBuf>,
    /// The peer must prove who it is.
    pub verify_peer: bool,
    /// Certificates are looked at when they are loaded.
    pub sanity_check: bool,
    /// The file with the pre-shared keys, instead of `keys.psk` in the folder.
    pub psk_file: Option<PathBuf>,
    /// The name that a client shows for its pre-shared key.
    pub username: Option<String>,
    /// What unlocks the private key.
    pub password: Option<Zeroizing<Vec<u8>>>,
    /// Restricts the versions of TLS, in the words of GnuTLS.
    pub priority: Option<String>,
}

impl fmt::Debug for CredentialsOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CredentialsOptions")
            .field("kind", &self.kind)
            .field("endpoint", &self.endpoint)
            .field("dir", &self.dir)
            .finish_non_exhaustive()
    }
}

/// Credentials, loaded.
pub struct Credentials {
    context: SslContext,
    kind: Kind,
    endpoint: Endpoint,
    verify_peer: bool,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials")
            .field("kind", &self.kind)
            .field("endpoint", &self.endpoint)
            .finish_non_exhaustive()
    }
}

/// An error of the library while `what` was done.
fn failed(what: &str, stack: &ErrorStack) -> Error {
    let reason = stack
        .errors()
        .last()
        .and_then(|one| one.reason())
        .unwrap_or("unknown error");
    error(format!("{what}: {reason}"))
}

impl Credentials {
    /// Loads what `options` name.
    ///
    /// # Errors
    /// In QEMU's words, if a file is missing, cannot be understood or is out of date; or that
    /// OpenSSL is not installed.
    pub fn load(options: &CredentialsOptions) -> Result<Self> {
        library::load().map_err(|reason| error(format!("TLS needs OpenSSL 3: {reason}")))?;
        let mut builder = SslContextBuilder::new(SslMethod::tls())
            .map_err(|stack| failed("Unable to set up TLS", &stack))?;
        let setup = |stack: ErrorStack| failed("Unable to set up TLS", &stack);
        builder
            .set_min_proto_version(Some(SslVersion::TLS1_2))
            .map_err(setup)?;
        builder.set_options(SslOptions::NO_RENEGOTIATION | SslOptions::NO_TICKET);
        // Every session proves everything anew: what was believed once is not kept, neither
        // here nor, sealed, with the peer.
        builder.set_session_cache_mode(SslSessionCacheMode::OFF);
        builder.set_num_tickets(0).map_err(setup)?;
        if let Some(priority) = &options.priority {
            apply_priority(&mut builder, priority)?;
        }
        match options.kind {
            Kind::X509 => load_certificates(&mut builder, options)?,
            Kind::Psk => load_keys(&mut builder, options)?,
            Kind::Anonymous => load_nothing(&mut builder, options)?,
        }
        Ok(Credentials {
            context: builder.build(),
            kind: options.kind,
            endpoint: options.endpoint,
            verify_peer: options.verify_peer,
        })
    }

    /// Their side.
    pub fn endpoint(&self) -> Endpoint {
        self.endpoint
    }

    /// What proves who somebody is.
    pub(crate) fn kind(&self) -> Kind {
        self.kind
    }

    /// Whether the peer has to show a certificate that is good.
    pub(crate) fn wants_certificate(&self) -> bool {
        self.kind == Kind::X509 && self.verify_peer
    }

    /// A new session.
    pub(crate) fn session(&self) -> Result<Ssl> {
        Ssl::new(&self.context).map_err(|stack| failed("cannot initialize TLS session", &stack))
    }
}

/// Takes the words of a GnuTLS priority string that mean something here.
fn apply_priority(builder: &mut SslContextBuilder, priority: &str) -> Result<()> {
    let refuse = || {
        error(format!(
            "Unable to set TLS session priority {priority}: The request is invalid."
        ))
    };
    let mut versions = [true, true];
    for word in priority.split(':') {
        match word {
            "NORMAL" | "SECURE" | "SECURE128" | "SECURE192" | "SECURE256" | "PFS"
            | "PERFORMANCE" | "@SYSTEM" | "%SERVER_PRECEDENCE" => {}
            "-VERS-ALL" | "-VERS-TLS-ALL" => versions = [false, false],
            "+VERS-ALL" | "+VERS-TLS-ALL" => versions = [true, true],
            "-VERS-TLS1.2" => versions[0] = false,
            "+VERS-TLS1.2" => versions[0] = true,
            "-VERS-TLS1.3" => versions[1] = false,
            "+VERS-TLS1.3" => versions[1] = true,
            // Not spoken anyway.
            "-VERS-TLS1.0" | "-VERS-TLS1.1" | "-VERS-SSL3.0" => {}
            _ => return Err(refuse()),
        }
    }
    let (least, most) = match versions {
        [true, true] => return Ok(()),
        [true, false] => (SslVersion::TLS1_2, SslVersion::TLS1_2),
        [false, true] => (SslVersion::TLS1_3, SslVersion::TLS1_3),
        [false, false] => return Err(refuse()),
    };
    builder
        .set_min_proto_version(Some(least))
        .and_then(|()| builder.set_max_proto_version(Some(most)))
        .map_err(|_| refuse())
}

/// A file of the folder; `None` if it is not there and need not be.
fn find(options: &CredentialsOptions, name: &str, needed: bool) -> Result<Option<PathBuf>> {
    let dir = options.dir.as_deref().unwrap_or(Path::new(""));
    let path = dir.join(name);
    match std::fs::metadata(&path) {
        Ok(_) => Ok(Some(path)),
        Err(_) if !needed => Ok(None),
        Err(cause) => {
            let reason = Error::from_io("open", &cause);
            Err(error(format!(
                "Unable to access credentials {}: {}",
                path.display(),
                reason.message()
            )))
        }
    }
}

fn read(path: &Path) -> Result<Zeroizing<Vec<u8>>> {
    secret::read_file(path).map_err(|cause| {
        let reason = Error::from_io("read", &cause);
        error(format!(
            "Cannot load certificate {}: {}",
            path.display(),
            reason.message()
        ))
    })
}

fn read_certificates(path: &Path) -> Result<Vec<X509>> {
    let bytes = read(path)?;
    let found = X509::stack_from_pem(&bytes).unwrap_or_default();
    if found.is_empty() {
        return Err(error(format!(
            "Unable to import certificate {}: Base64 unexpected header error.",
            path.display()
        )));
    }
    Ok(found)
}

/// Refuses certificates that are not valid now.
fn check_times(path: &Path, certificate: &X509) -> Result<()> {
    let setup = |stack: ErrorStack| failed("cannot tell the time", &stack);
    let now = openssl::asn1::Asn1Time::days_from_now(0).map_err(setup)?;
    let shown = path.display();
    if certificate.not_after() < now {
        return Err(error(format!("The certificate {shown} has expired")));
    }
    if certificate.not_before() > now {
        return Err(error(format!("The certificate {shown} is not yet active")));
    }
    Ok(())
}

fn load_certificates(builder: &mut SslContextBuilder, options: &CredentialsOptions) -> Result<()> {
    let server = options.endpoint == Endpoint::Server;
    if options.dir.is_none() && !server {
        // Whom the system trusts.
        return builder
            .set_default_verify_paths()
            .map_err(|stack| failed("Cannot load CA certificates", &stack));
    }
    let side = if server { "server" } else { "client" };
    let trusted = find(options, "ca-cert.pem", true)?.unwrap_or_default();
    let revoked = find(options, "ca-crl.pem", false)?;
    let certificate = find(options, &format!("{side}-cert.pem"), server)?;
    let key = find(options, &format!("{side}-key.pem"), server)?;
    load_trust(builder, options, &trusted, revoked.as_deref())?;
    let (Some(certificate), Some(key)) = (certificate, key) else {
        return Ok(());
    };
    if options.sanity_check {
        for one in read_certificates(&certificate)? {
            check_times(&certificate, &one)?;
        }
    }
    let what = format!(
        "Cannot load certificate '{}' & key '{}'",
        certificate.display(),
        key.display()
    );
    builder
        .set_certificate_chain_file(&certificate)
        .map_err(|stack| failed(&what, &stack))?;
    let pem = read(&key)?;
    let password = options.password.as_deref().map_or(&[][..], Vec::as_slice);
    let key = PKey::private_key_from_pem_passphrase(&pem, password)
        .map_err(|stack| failed(&what, &stack))?;
    builder
        .set_private_key(&key)
        .and_then(|()| builder.check_private_key())
        .map_err(|stack| failed(&what, &stack))?;
    if !server {
        choose::show_only_to_acquaintances(builder);
    }
    Ok(())
}

/// Takes in whose signatures are believed, and which of them are not any more.
fn load_trust(
    builder: &mut SslContextBuilder,
    options: &CredentialsOptions,
    trusted: &Path,
    revoked: Option<&Path>,
) -> Result<()> {
    let what = format!("Cannot load CA certificate '{}'", trusted.display());
    let refused = |stack: ErrorStack| failed(&what, &stack);
    let mut store = X509StoreBuilder::new().map_err(refused)?;
    for certificate in read_certificates(trusted)? {
        if options.sanity_check {
            check_times(trusted, &certificate)?;
        }
        store.add_cert(certificate).map_err(refused)?;
    }
    if let Some(path) = revoked {
        let what = format!("Cannot load CRL '{}'", path.display());
        let refused = |stack: ErrorStack| failed(&what, &stack);
        store
            .add_lookup(X509Lookup::file())
            .and_then(|lookup| lookup.load_crl_file(path, SslFiletype::PEM))
            .map_err(refused)?;
        store
            .set_flags(X509VerifyFlags::CRL_CHECK)
            .map_err(refused)?;
    }
    builder.set_cert_store(store.build());
    if options.endpoint == Endpoint::Server && options.verify_peer {
        // Clients with several certificates choose by this.
        builder.set_client_ca_list(X509Name::load_client_ca_file(trusted).map_err(refused)?);
    }
    Ok(())
}

fn load_keys(builder: &mut SslContextBuilder, options: &CredentialsOptions) -> Result<()> {
    let path = match &options.psk_file {
        Some(path) => path.clone(),
        None => find(options, "keys.psk", true)?.unwrap_or_default(),
    };
    let keys = Keys::read(&path)?;
    builder
        .set_cipher_list(PSK_SUITES)
        .map_err(|stack| failed("Unable to set up TLS", &stack))?;
    if options.endpoint == Endpoint::Server {
        builder.set_psk_server_callback(move |_, user, place| {
            let user = user.and_then(|user| std::str::from_utf8(user).ok());
            Ok(user
                .and_then(|user| keys.of(user))
                .map_or(0, |key| put(key, place)))
        });
        return Ok(());
    }
    let user = options
        .username
        .as_deref()
        .unwrap_or(DEFAULT_USER)
        .to_owned();
    let Some(key) = keys.of(&user).cloned() else {
        return Err(error(format!(
            "Username {user} not found in PSK file {}",
            path.display()
        )));
    };
    builder.set_psk_client_callback(move |_, _, identity, place| {
        let mut name = user.as_bytes().to_vec();
        name.push(0);
        Ok(match put(&name, identity) {
            0 => 0,
            _ => put(&key, place),
        })
    });
    Ok(())
}

/// Copies bytes to the start of a place; 0 if they do not fit.
fn put(bytes: &[u8], place: &mut [u8]) -> usize {
    let Some(space) = place.get_mut(..bytes.len()) else {
        return 0;
    };
    space.copy_from_slice(bytes);
    bytes.len()
}

fn load_nothing(builder: &mut SslContextBuilder, options: &CredentialsOptions) -> Result<()> {
    let setup = |stack: ErrorStack| failed("Unable to set up TLS", &stack);
    builder
        .set_max_proto_version(Some(SslVersion::TLS1_2))
        .map_err(setup)?;
    builder.set_cipher_list(ANONYMOUS_SUITES).map_err(setup)?;
    if options.endpoint == Endpoint::Client {
        return Ok(());
    }
    let group = match find(options, "dh-params.pem", false)? {
        Some(path) if options.dir.is_some() => Dh::params_from_pem(&read(&path)?).map_err(setup)?,
        _ => Dh::get_2048_256().map_err(setup)?,
    };
    builder.set_tmp_dh(&group).map_err(setup)
}

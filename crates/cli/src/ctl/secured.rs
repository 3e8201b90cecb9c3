//! TLS to a daemon on another machine: whom `vellum ctl` believes, and what it shows of itself.
//!
//! Invariant: nothing is said, and no token shown, before the daemon has proved that it is who it was asked for as.

use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use vellum_io::error::io_text;

/// Makes secured connections.
pub struct Secured {
    connector: TlsConnector,
}

impl Secured {
    /// Believes those whom `folder` says, which is as for QEMU's objects `tls-creds-x509` of clients: `ca-cert.pem`, and
    /// where there are such `ca-crl.pem`, `client-cert.pem` with `client-key.pem`. Without one, whom the system does.
    ///
    /// # Errors
    /// What a person should read.
    pub fn new(folder: Option<&Path>) -> Result<Secured, String> {
        let provider = Arc::new(ring::default_provider());
        let (trusted, revoked) = match folder {
            Some(folder) => (trusted_in(folder)?, read_pem(folder, "ca-crl.pem")?),
            None => (trusted_by_system()?, None),
        };
        let verifier = verifier(trusted, revoked.unwrap_or_default(), &provider)?;
        let told = |why: rustls::Error| format!("Cannot speak TLS: {why}");
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(told)?
            .with_webpki_verifier(verifier);
        let shown = folder.map(identity).transpose()?.flatten();
        let config = match shown {
            None => config.with_no_client_auth(),
            Some((certificates, key)) => config
                .with_client_auth_cert(certificates, key)
                .map_err(told)?,
        };
        Ok(Secured {
            connector: TlsConnector::from(Arc::new(config)),
        })
    }

    /// Has the daemon at the other end of a connection prove that it is the one of `place`, a host and a port.
    ///
    /// # Errors
    /// Why it is not believed.
    pub async fn secure(
        &self,
        place: &str,
        stream: TcpStream,
    ) -> Result<TlsStream<TcpStream>, String> {
        let host = place.rsplit_once(':').map_or(place, |(host, _)| host);
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let name = ServerName::try_from(host.to_owned());
        let name = name.map_err(|_| format!("no certificate can be for '{host}'"))?;
        let secured = self.connector.connect(name, stream).await;
        secured.map_err(|why| io_text(&why))
    }
}

fn verifier(
    trusted: RootCertStore,
    revoked: Vec<CertificateRevocationListDer<'static>>,
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<WebPkiServerVerifier>, String> {
    WebPkiServerVerifier::builder_with_provider(Arc::new(trusted), provider.clone())
        .with_crls(revoked)
        // As of NBD's peers.
        .only_check_end_entity_revocation()
        .enforce_revocation_expiration()
        .build()
        .map_err(|why| format!("Cannot verify daemons: {why}"))
}

fn trusted_in(folder: &Path) -> Result<RootCertStore, String> {
    let name = "ca-cert.pem";
    let path = folder.join(name);
    let found: Option<Vec<CertificateDer<'static>>> = read_pem(folder, name)?;
    let found = found.ok_or_else(|| format!("'{}' is missing", path.display()))?;
    let mut trusted = RootCertStore::empty();
    for certificate in found {
        let added = trusted.add(certificate);
        added.map_err(|why| format!("Cannot use '{}': {why}", path.display()))?;
    }
    Ok(trusted)
}

fn trusted_by_system() -> Result<RootCertStore, String> {
    let mut trusted = RootCertStore::empty();
    // Some may be of no use, which is no harm as long as others are.
    trusted.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    match trusted.is_empty() {
        true => Err(
            "The system trusts no authority: say --tls DIR, with the certificate of yours in \
             DIR/ca-cert.pem"
                .to_owned(),
        ),
        false => Ok(trusted),
    }
}

/// What shows the daemon who asks, where there is something.
fn identity(
    folder: &Path,
) -> Result<Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)>, String> {
    let certificate = read_pem(folder, "client-cert.pem")?;
    let key = folder.join("client-key.pem");
    match (certificate, key.exists()) {
        (None, false) => Ok(None),
        (Some(certificates), true) => {
            let pem =
                vellum_storage::secret::read_file(&key).map_err(|why| unreadable(&key, &why))?;
            let read = PrivateKeyDer::from_pem_slice(&pem);
            let read = read.map_err(|why| format!("Cannot use '{}': {why}", key.display()))?;
            Ok(Some((certificates, read)))
        }
        _ => Err(format!(
            "'{}' has one of client-cert.pem and client-key.pem without the other",
            folder.display()
        )),
    }
}

/// What a file of a folder has in PEM; `None` where there is none.
fn read_pem<T: PemObject>(folder: &Path, name: &str) -> Result<Option<Vec<T>>, String> {
    let path = folder.join(name);
    let bytes = match std::fs::read(&path) {
        Ok(bytes) => bytes,
        Err(why) if why.kind() == ErrorKind::NotFound => return Ok(None),
        Err(why) => return Err(unreadable(&path, &why)),
    };
    let found: Result<Vec<T>, _> = T::pem_slice_iter(&bytes).collect();
    let found = found.map_err(|why| format!("Cannot use '{}': {why}", path.display()))?;
    match found.is_empty() {
        true => Err(format!("'{}' is no such file in PEM", path.display())),
        false => Ok(Some(found)),
    }
}

fn unreadable(path: &Path, why: &std::io::Error) -> String {
    format!("Cannot read '{}': {}", path.display(), io_text(why))
}

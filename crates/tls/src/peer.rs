//! Who the peer is: what is wrong with its certificate, and the name in it.

use std::net::IpAddr;
use std::sync::Arc;

use openssl::error::ErrorStack;
use openssl::nid::Nid;
use openssl::ssl::{SslRef, SslVerifyMode, SslVersion};
use openssl::x509::{X509NameRef, X509Ref, X509VerifyResult};
use parking_lot::Mutex;
use vellum_io::Result;

use crate::authorizer::Authorizer;
use crate::error::error;

/// What was found wrong with a certificate, in the order in which it was found.
#[derive(Debug, Clone, Default)]
pub(crate) struct Findings(Arc<Mutex<Vec<i32>>>);

/// Numbers of OpenSSL's findings (`X509_V_ERR_*`).
mod finding {
    pub(super) const UNKNOWN_ISSUER: &[i32] = &[2, 18, 19, 20, 21, 22, 24, 26, 27, 79];
    pub(super) const NOT_YET_VALID: &[i32] = &[9, 13];
    pub(super) const EXPIRED: &[i32] = &[10, 14];
    pub(super) const REVOKED: &[i32] = &[23];
    pub(super) const WEAK: &[i32] = &[66, 67, 68];
    pub(super) const WRONG_NAME: &[i32] = &[62, 63, 64];
    /// No list of what was revoked.
    pub(super) const NO_LIST: &[i32] = &[3];
}

impl Findings {
    /// Has a session note what is wrong and go on, so that it can be told in full after
    /// the handshake.
    pub(crate) fn watch(&self, session: &mut SslRef) {
        let findings = self.0.clone();
        session.set_verify_callback(SslVerifyMode::PEER, move |good, context| {
            if !good {
                let found = context.error().as_raw();
                findings.lock().push(found);
                // OpenSSL keeps for the thread, too, what it was: the handshake would seem to
                // have failed of it.
                drop(ErrorStack::get());
            }
            true
        });
    }

    /// The refusal that the findings call for, the gravest first, in QEMU's words.
    pub(crate) fn judge(&self, session: &SslRef, hostname: Option<&str>) -> Result<()> {
        let found = self.0.lock().clone();
        let Some(certificate) = session.peer_certificate() else {
            return Err(error("Verify failed: No certificate was found."));
        };
        let has = |kinds: &[i32]| found.iter().any(|one| kinds.contains(one));
        let refusal = if has(finding::UNKNOWN_ISSUER) {
            "The certificate hasn't got a known issuer".to_owned()
        } else if has(finding::REVOKED) {
            "The certificate has been revoked".to_owned()
        } else if has(finding::WEAK) {
            "The certificate uses an insecure algorithm".to_owned()
        } else if has(finding::EXPIRED) {
            "The certificate has expired".to_owned()
        } else if has(finding::NOT_YET_VALID) {
            "The certificate is not yet activated".to_owned()
        } else if has(finding::WRONG_NAME)
            || hostname.is_some_and(|name| is_ambiguous(&certificate, name))
        {
            let hostname = hostname.unwrap_or_default();
            format!("Certificate does not match the hostname {hostname}")
        } else if !found.iter().all(|one| finding::NO_LIST.contains(one))
            || session.verify_result() != X509VerifyResult::OK && found.is_empty()
        {
            "The certificate is not trusted".to_owned()
        } else {
            return Ok(());
        };
        Err(error(refusal))
    }
}

/// Whether a certificate could be for that host by its subject alone, and says of its
/// subject or of itself more than that: then GnuTLS does not take its word for it.
fn is_ambiguous(certificate: &X509Ref, hostname: &str) -> bool {
    if hostname.parse::<IpAddr>().is_ok() {
        // An address is never looked for in the subject.
        return false;
    }
    let names = certificate.subject_alt_names();
    let mut subject = certificate.subject_name().entries_by_nid(Nid::COMMONNAME);
    match names {
        Some(names) => names.iter().all(|name| name.dnsname().is_none()),
        None => subject.next().is_some() && subject.next().is_some(),
    }
}

/// Has a session with a server end as soon as that shows a certificate: it was asked for
/// a key.
pub(crate) fn refuse_certificates(session: &mut SslRef) {
    session.set_verify_callback(SslVerifyMode::PEER, |_, _| false);
}

/// Refuses a session that does not rest on a key that both sides have.
///
/// A peer may pass over a key that it is offered. Under TLS 1.3 one that has used it has
/// resumed what that key stands for, and as nothing else is ever resumed (`Credentials`),
/// that is the proof; under TLS 1.2 the suite is.
pub(crate) fn check_key(session: &SslRef) -> Result<()> {
    let proved = match session.version2() {
        Some(SslVersion::TLS1_3) => session.session_reused(),
        Some(SslVersion::TLS1_2) => {
            let suite = session.current_cipher().map(|cipher| cipher.name());
            let is_shared = |suite: &str| suite.split('-').any(|part| part == "PSK");
            suite.is_some_and(is_shared) && !session.session_reused()
        }
        _ => false,
    };
    match proved && session.peer_certificate().is_none() {
        true => Ok(()),
        false => Err(error("The peer has not proved that it has the key")),
    }
}

/// Asks whether the peer may come in.
pub(crate) fn authorize(session: &SslRef, authorizer: &dyn Authorizer) -> Result<()> {
    let certificate = session.peer_certificate();
    let name = certificate.map(|certificate| distinguished_name(certificate.subject_name()));
    let name = name.ok_or_else(|| error("TLS x509 authz check needs a certificate"))?;
    match authorizer.is_allowed(&name)? {
        true => Ok(()),
        false => Err(error(format!("TLS x509 authz check for {name} is denied"))),
    }
}

/// The name in the words of RFC 4514, but in the order of the certificate, as GnuTLS
/// gives it to QEMU.
fn distinguished_name(name: &X509NameRef) -> String {
    let parts: Vec<String> = name
        .entries()
        .map(|entry| {
            let key = entry.object().nid().short_name().unwrap_or("?");
            let key = match key {
                "emailAddress" => "EMAIL",
                other => other,
            };
            let value = entry.data().to_string().unwrap_or_default();
            format!("{key}={}", escaped(&value))
        })
        .collect();
    parts.join(",")
}

fn escaped(value: &str) -> String {
    let mut text = String::new();
    for letter in value.chars() {
        if matches!(letter, ',' | '+' | '"' | '\\' | '<' | '>' | ';') {
            text.push('\\');
        }
        text.push(letter);
    }
    text
}

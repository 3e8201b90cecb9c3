//! Certificates of every kind, good and bad, made on the spot.

use std::fs;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use openssl::asn1::Asn1Time;
use openssl::bn::BigNum;
use openssl::ec::{EcGroup, EcKey};
use openssl::hash::MessageDigest;
use openssl::nid::Nid;
use openssl::pkey::{PKey, Private};
use openssl::ssl::SslContextBuilder;
use openssl::x509::extension::{
    BasicConstraints, ExtendedKeyUsage, KeyUsage, SubjectAlternativeName,
};
use openssl::x509::{X509, X509Builder, X509NameBuilder};

const DAY_SECONDS: i64 = 24 * 60 * 60;

/// A certificate, its key, and the certificates between it and its root.
#[derive(Clone)]
pub struct Identity {
    pub certificate: X509,
    pub key: PKey<Private>,
    pub between: Vec<X509>,
}

/// What a certificate says it may be used for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    Authority,
    /// An authority that may sign nothing below another authority.
    LastAuthority,
    /// One that calls itself none, and signs all the same.
    FalseAuthority,
    Server,
    Client,
}

/// What is to be certified.
pub struct Wish {
    pub name: &'static str,
    /// Another one beside it.
    pub second: Option<&'static str>,
    pub purpose: Purpose,
    /// `DNS:name` or `IP:address`.
    pub also: &'static [&'static str],
    /// The days, from today, of its validity.
    pub days: (i64, i64),
    pub digest: MessageDigest,
}

impl Wish {
    pub fn new(name: &'static str, purpose: Purpose) -> Self {
        Wish {
            name,
            second: None,
            purpose,
            also: &[],
            days: (-1, 100),
            digest: MessageDigest::sha256(),
        }
    }

    pub fn second_name(mut self, name: &'static str) -> Self {
        self.second = Some(name);
        self
    }

    pub fn also(mut self, names: &'static [&'static str]) -> Self {
        self.also = names;
        self
    }

    pub fn days(mut self, from: i64, to: i64) -> Self {
        self.days = (from, to);
        self
    }

    pub fn digest(mut self, digest: MessageDigest) -> Self {
        self.digest = digest;
        self
    }

    /// Signs itself.
    pub fn self_signed(&self) -> Identity {
        self.signed(None)
    }

    /// Has it signed.
    pub fn signed_by(&self, issuer: &Identity) -> Identity {
        self.signed(Some(issuer))
    }

    fn signed(&self, issuer: Option<&Identity>) -> Identity {
        let group = EcGroup::from_curve_name(Nid::X9_62_PRIME256V1).expect("a curve");
        let key = PKey::from_ec_key(EcKey::generate(&group).expect("a key")).expect("a key");
        let mut builder = X509::builder().expect("a certificate");
        builder.set_version(2).expect("version 3");
        let number = BigNum::from_u32(rand_number()).expect("a number");
        let number = number.to_asn1_integer().expect("a number");
        builder.set_serial_number(&number).expect("set");
        let mut name = X509NameBuilder::new().expect("a name");
        for part in std::iter::once(self.name).chain(self.second) {
            name.append_entry_by_text("CN", part).expect("a name");
        }
        let name = name.build();
        builder.set_subject_name(&name).expect("set");
        let issuer_name = issuer.map_or(&*name, |issuer| issuer.certificate.subject_name());
        builder.set_issuer_name(issuer_name).expect("set");
        builder.set_not_before(&day(self.days.0)).expect("set");
        builder.set_not_after(&day(self.days.1)).expect("set");
        builder.set_pubkey(&key).expect("set");
        self.extend(&mut builder, issuer.map(|issuer| &*issuer.certificate));
        let signer = issuer.map_or(&key, |issuer| &issuer.key);
        builder.sign(signer, self.digest).expect("signed");
        let between = match issuer {
            // A root is known to whoever believes in it.
            Some(issuer) if !is_root(issuer) => {
                let mut between = vec![issuer.certificate.clone()];
                between.extend(issuer.between.iter().cloned());
                between
            }
            _ => Vec::new(),
        };
        Identity {
            certificate: builder.build(),
            key,
            between,
        }
    }

    fn extend(&self, builder: &mut X509Builder, issuer: Option<&openssl::x509::X509Ref>) {
        let mut constraints = BasicConstraints::new();
        constraints.critical();
        let mut usage = KeyUsage::new();
        usage.critical();
        let mut extended = ExtendedKeyUsage::new();
        match self.purpose {
            Purpose::Authority => {
                constraints.ca();
                usage.key_cert_sign().crl_sign();
            }
            Purpose::LastAuthority => {
                constraints.ca().pathlen(0);
                usage.key_cert_sign();
            }
            Purpose::FalseAuthority | Purpose::Server | Purpose::Client => {
                usage.digital_signature().key_encipherment();
            }
        }
        match self.purpose {
            Purpose::Server => drop(extended.server_auth()),
            Purpose::Client => drop(extended.client_auth()),
            _ => {}
        }
        let mut add = |extension: Result<_, _>| {
            builder
                .append_extension(extension.expect("an extension"))
                .expect("added");
        };
        add(constraints.build());
        add(usage.build());
        if matches!(self.purpose, Purpose::Server | Purpose::Client) {
            add(extended.build());
        }
        if !self.also.is_empty() {
            let mut names = SubjectAlternativeName::new();
            for name in self.also {
                match name.split_once(':') {
                    Some(("DNS", name)) => drop(names.dns(name)),
                    Some(("IP", address)) => drop(names.ip(address)),
                    _ => panic!("{name} is no name"),
                }
            }
            let context = builder.x509v3_context(issuer, None);
            let names = names.build(&context).expect("names");
            builder.append_extension(names).expect("added");
        }
    }
}

fn is_root(identity: &Identity) -> bool {
    let certificate = &identity.certificate;
    let (name, issuer) = (certificate.subject_name(), certificate.issuer_name());
    name.try_cmp(issuer).expect("names").is_eq()
}

/// Serial numbers must differ.
fn rand_number() -> u32 {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

fn day(number: i64) -> Asn1Time {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("now");
    let seconds = i64::try_from(now.as_secs()).expect("now") + number * DAY_SECONDS;
    Asn1Time::from_unix(seconds).expect("a time")
}

impl Identity {
    /// Has a side of a connection show it.
    pub fn show(&self, builder: &mut SslContextBuilder) {
        builder.set_certificate(&self.certificate).expect("set");
        builder.set_private_key(&self.key).expect("set");
        for certificate in &self.between {
            builder
                .add_extra_chain_cert(certificate.clone())
                .expect("added");
        }
    }

    /// Writes the files of a side (`server` or `client`) that believes in `authority`, as
    /// QEMU names them.
    pub fn write(&self, folder: &Path, side: &str, authority: &Identity) {
        fs::create_dir_all(folder).expect("a folder");
        let pem = authority.certificate.to_pem().expect("text");
        fs::write(folder.join("ca-cert.pem"), pem).expect("written");
        let mut pem = self.certificate.to_pem().expect("text");
        for certificate in &self.between {
            pem.extend(certificate.to_pem().expect("text"));
        }
        fs::write(folder.join(format!("{side}-cert.pem")), pem).expect("written");
        let pem = self.key.private_key_to_pem_pkcs8().expect("text");
        fs::write(folder.join(format!("{side}-key.pem")), pem).expect("written");
    }
}

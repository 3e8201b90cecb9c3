//! Keys and passwords leave nothing behind in memory that is given back: the allocator of
//! this program looks for them in everything that is.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::fs;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use openssl::asn1::Asn1Time;
use openssl::hash::MessageDigest;
use openssl::pkey::{PKey, Private};
use openssl::x509::X509;
use vellum_tls::{Credentials, CredentialsOptions, Endpoint, Kind};
use zeroize::Zeroizing;

/// What must not be found: the beginnings of the key, as digits and as bytes, and of the
/// password. Shorter than what is kept of any of them.
const DIGITS: &[u8] = b"9fc3a7d15be8264";
const KEY: &[u8] = &[0x9f, 0xc3, 0xa7, 0xd1, 0x5b, 0xe8, 0x26];
const PASSWORD: &[u8] = b"correct horse ba";
/// A part of a private key as text, once there is one.
static PEM: OnceLock<&'static [u8]> = OnceLock::new();

/// Blocks that were given back with one of those in them.
static FOUND: AtomicUsize = AtomicUsize::new(0);

struct Watching;

fn look(place: *mut u8, layout: Layout) {
    // SAFETY: the block is still the caller's, and as long as the layout says. What was
    // never written in it may hold anything, and is only compared.
    let bytes = unsafe { std::slice::from_raw_parts(place, layout.size()) };
    let pem = PEM.get().copied();
    for secret in [DIGITS, KEY, PASSWORD].into_iter().chain(pem) {
        if bytes.windows(secret.len()).any(|part| part == secret) {
            FOUND.fetch_add(1, Ordering::SeqCst);
        }
    }
}

// SAFETY: everything is the system's, which is only watched.
unsafe impl GlobalAlloc for Watching {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // Whole of zeroes, so that all of it can be looked at.
        // SAFETY: as the caller promises.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        look(place, layout);
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(place, layout) }
    }

    // `realloc` is not taken over: what the trait makes of it copies and gives back.
}

#[global_allocator]
static ALLOCATOR: Watching = Watching;

fn options(kind: Kind, endpoint: Endpoint) -> CredentialsOptions {
    CredentialsOptions {
        kind,
        endpoint,
        dir: None,
        verify_peer: true,
        sanity_check: true,
        psk_file: None,
        username: None,
        password: None,
        priority: None,
    }
}

fn certify(key: &PKey<Private>) -> X509 {
    let mut builder = X509::builder().expect("a certificate");
    builder.set_pubkey(key).expect("set");
    let day = |days| Asn1Time::days_from_now(days).expect("a time");
    builder.set_not_before(&day(0)).expect("set");
    builder.set_not_after(&day(10)).expect("set");
    builder.sign(key, MessageDigest::null()).expect("signed");
    builder.build()
}

#[test]
fn nothing_of_a_key_is_left() {
    // The allocator finds what it looks for.
    drop(KEY.to_vec());
    assert_eq!(FOUND.swap(0, Ordering::SeqCst), 1);

    let folder = tempfile::tempdir().expect("a folder");
    let keys = folder.path().join("keys.psk");
    // Constant text: nothing of it is ever on the heap here.
    fs::write(&keys, "qemu:9fc3a7d15be82640112233445566778899\n").expect("written");
    for endpoint in [Endpoint::Client, Endpoint::Server] {
        let loaded = Credentials::load(&CredentialsOptions {
            psk_file: Some(keys.clone()),
            ..options(Kind::Psk, endpoint)
        });
        let told = format!("{loaded:?}");
        assert!(!told.contains("9fc3"), "{told}");
        drop(loaded.expect("keys"));
    }
    // One that is not good leaves nothing either, and its refusal does not tell it.
    fs::write(&keys, "qemu:9fc3a7d15be82640112233445566778899x\n").expect("written");
    let refused = Credentials::load(&CredentialsOptions {
        psk_file: Some(keys),
        ..options(Kind::Psk, Endpoint::Client)
    });
    let told = format!("{:?}", refused.expect_err("no key"));
    assert!(!told.contains("9fc3"), "{told}");

    // By now OpenSSL is loaded.
    let key = PKey::generate_ed25519().expect("a key");
    let certificate = certify(&key).to_pem().expect("text");
    for name in ["ca-cert.pem", "server-cert.pem"] {
        fs::write(folder.path().join(name), &certificate).expect("written");
    }
    // Never given back.
    let pem = key.private_key_to_pem_pkcs8().expect("text").leak();
    fs::write(folder.path().join("server-key.pem"), &*pem).expect("written");
    // Behind the first line and the words that all such keys begin with.
    PEM.set(&pem[55..80]).expect("once");
    let with_password = CredentialsOptions {
        dir: Some(folder.path().to_owned()),
        password: Some(Zeroizing::new(b"correct horse battery".to_vec())),
        sanity_check: false,
        ..options(Kind::X509, Endpoint::Server)
    };
    let told = format!("{with_password:?}");
    assert!(!told.contains("horse"), "{told}");
    drop(Credentials::load(&with_password).expect("certificates"));
    drop(with_password);

    assert_eq!(
        FOUND.load(Ordering::SeqCst),
        0,
        "blocks with secrets in them"
    );
}

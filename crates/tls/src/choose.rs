//! Which certificate a client shows: its own, unless the server names the authorities
//! whose signatures it takes, and none of them has signed it (RFC 8446, 4.2.4). So a
//! stranger does not learn who asks.
//!
//! The crate `openssl` has no word for this, hence the unsafe code: each function is
//! declared as OpenSSL 1.1.1 and later have it.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_long, c_void};
use std::ptr;

use openssl::ssl::SslContextBuilder;
use openssl_sys as ffi;

const SSL_CTRL_GET_CHAIN_CERTS: c_int = 115;

type CertificateCallback = unsafe extern "C" fn(*mut ffi::SSL, *mut c_void) -> c_int;

unsafe extern "C" {
    fn SSL_CTX_set_cert_cb(
        context: *mut ffi::SSL_CTX,
        callback: Option<CertificateCallback>,
        argument: *mut c_void,
    );
    fn SSL_get0_peer_CA_list(session: *const ffi::SSL) -> *const ffi::stack_st_X509_NAME;
    fn SSL_certs_clear(session: *mut ffi::SSL);
}

/// Has the clients of a context show their certificate only to servers that may take it.
pub(crate) fn show_only_to_acquaintances(builder: &mut SslContextBuilder) {
    // SAFETY: the builder holds a context; the callback is a function, and takes nothing.
    unsafe { SSL_CTX_set_cert_cb(builder.as_ptr(), Some(choose), ptr::null_mut()) }
}

/// Called for a session that is asked for a certificate; 1: the handshake goes on.
unsafe extern "C" fn choose(session: *mut ffi::SSL, _: *mut c_void) -> c_int {
    // SAFETY: OpenSSL calls this with a session that lives, and that nobody else uses
    // meanwhile. What it hands out belongs to the session, and is not kept.
    unsafe {
        let taken = SSL_get0_peer_CA_list(session);
        if ffi::OPENSSL_sk_num(taken.cast()) > 0 && !is_signed_by_one(session, taken) {
            SSL_certs_clear(session);
        }
    }
    1
}

/// Whether one of `names` has signed the certificate of a session, or one of those that
/// go with it.
///
/// # Safety
/// Both must be alive.
unsafe fn is_signed_by_one(session: *mut ffi::SSL, names: *const ffi::stack_st_X509_NAME) -> bool {
    let mut chain: *mut ffi::stack_st_X509 = ptr::null_mut();
    let place: *mut *mut ffi::stack_st_X509 = &mut chain;
    let none: c_long = 0;
    // SAFETY: the session is alive, so is what it hands out; `place` is a pointer that
    // this question fills. A stack that is null has no elements.
    unsafe {
        ffi::SSL_ctrl(session, SSL_CTRL_GET_CHAIN_CERTS, none, place.cast());
        let own = ffi::SSL_get_certificate(session);
        let others = (0..ffi::OPENSSL_sk_num(chain.cast()))
            .map(|index| ffi::OPENSSL_sk_value(chain.cast(), index).cast::<ffi::X509>());
        let certificates = std::iter::once(own).chain(others);
        certificates.filter(|one| !one.is_null()).any(|one| {
            let issuer = ffi::X509_get_issuer_name(one);
            (0..ffi::OPENSSL_sk_num(names.cast())).any(|index| {
                let name = ffi::OPENSSL_sk_value(names.cast(), index).cast::<ffi::X509_NAME>();
                ffi::X509_NAME_cmp(issuer, name) == 0
            })
        })
    }
}

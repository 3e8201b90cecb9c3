//! OpenSSL's shared library, loaded with the first credentials instead of with the
//! program: few runs need it, and it doubles what a cold start takes and adds a third to
//! the memory of a server (figures in PERFORMANCE.md). A machine without it runs everything
//! else.
//!
//! Each function of OpenSSL that this crate comes to call is defined here as a jump through
//! a pointer, hidden from other libraries. So the linker finds no need for the shared
//! library, and drops it. A function that is missing in the list below is found by the
//! linker where it always was: then the program needs the library from the start, and a
//! test says so.
//!
//! Invariant: [`load`] succeeds before any function of OpenSSL is called. Nothing here is
//! reached without credentials, and loading those begins with it.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

/// The library whose functions, and those of libcrypto below it, are called.
const NAME: &CStr = c"libssl.so.3";

#[cfg(target_arch = "x86_64")]
macro_rules! jump {
    () => {
        "jmp *{place}(%rip)"
    };
}

#[cfg(target_arch = "aarch64")]
macro_rules! jump {
    () => {
        "adrp x16, {place}\nldr x16, [x16, #:lo12:{place}]\nbr x16"
    };
}

#[cfg(target_arch = "x86_64")]
macro_rules! define {
    ($text:expr, $place:path) => {
        std::arch::global_asm!($text, place = sym $place, options(att_syntax));
    };
}

#[cfg(target_arch = "aarch64")]
macro_rules! define {
    ($text:expr, $place:path) => {
        std::arch::global_asm!($text, place = sym $place);
    };
}

macro_rules! functions {
    ($($name:ident)*) => {
        /// Where each function lies.
        #[allow(non_upper_case_globals)]
        mod places {
            use super::{AtomicPtr, c_void, not_loaded};
            $(pub(super) static $name: AtomicPtr<c_void> =
                AtomicPtr::new(not_loaded as *mut c_void);)*
        }

        $(define!(
            concat!(
                ".pushsection .text.", stringify!($name), ",\"ax\",@progbits\n",
                ".globl ", stringify!($name), "\n",
                ".hidden ", stringify!($name), "\n",
                ".type ", stringify!($name), ",@function\n",
                stringify!($name), ":\n",
                jump!(), "\n",
                ".popsection",
            ),
            places::$name
        );)*

        const FUNCTIONS: &[(&str, &AtomicPtr<c_void>)] =
            &[$((concat!(stringify!($name), "\0"), &places::$name)),*];
    };
}

functions! {
    ASN1_STRING_get0_data ASN1_STRING_length ASN1_STRING_to_UTF8 ASN1_STRING_type ASN1_TIME_diff
    ASN1_TIME_free BIO_clear_flags BIO_free_all BIO_get_data BIO_meth_free BIO_meth_new
    BIO_meth_set_create BIO_meth_set_ctrl BIO_meth_set_destroy BIO_meth_set_puts BIO_meth_set_read
    BIO_meth_set_write BIO_new BIO_new_mem_buf BIO_set_data BIO_set_flags BIO_set_init CRYPTO_free
    CRYPTO_get_ex_new_index CRYPTO_malloc DH_free DH_get_2048_256 ERR_get_error_all
    ERR_lib_error_string ERR_new ERR_reason_error_string ERR_set_debug ERR_set_error
    ERR_set_error_data EVP_PKEY_free GENERAL_NAME_free OBJ_nid2sn OBJ_obj2nid OPENSSL_init_ssl
    OPENSSL_sk_free OPENSSL_sk_num OPENSSL_sk_pop OPENSSL_sk_value PEM_read_bio_DHparams
    PEM_read_bio_PrivateKey PEM_read_bio_X509 SSL_CIPHER_get_name SSL_CTX_check_private_key
    SSL_CTX_ctrl SSL_CTX_free SSL_CTX_get_ex_data SSL_CTX_new SSL_CTX_set_cert_cb
    SSL_CTX_set_cert_store SSL_CTX_set_cipher_list SSL_CTX_set_client_CA_list
    SSL_CTX_set_default_verify_paths SSL_CTX_set_ex_data SSL_CTX_set_num_tickets SSL_CTX_set_options
    SSL_CTX_set_psk_client_callback SSL_CTX_set_psk_server_callback SSL_CTX_up_ref
    SSL_CTX_use_PrivateKey SSL_CTX_use_certificate_chain_file SSL_accept SSL_certs_clear SSL_connect
    SSL_ctrl SSL_free SSL_get0_param SSL_get0_peer_CA_list SSL_get1_peer_certificate
    SSL_get_certificate SSL_get_current_cipher SSL_get_error SSL_get_ex_data
    SSL_get_ex_data_X509_STORE_CTX_idx SSL_get_rbio SSL_get_verify_result SSL_load_client_CA_file
    SSL_new SSL_read_ex SSL_session_reused SSL_set_bio SSL_set_ex_data SSL_set_verify SSL_shutdown
    SSL_state_string_long SSL_version SSL_write_ex TLS_method X509_LOOKUP_file
    X509_NAME_ENTRY_get_data X509_NAME_ENTRY_get_object X509_NAME_cmp X509_NAME_entry_count
    X509_NAME_get_entry X509_NAME_get_index_by_NID X509_STORE_CTX_get_error
    X509_STORE_CTX_get_ex_data X509_STORE_add_cert X509_STORE_add_lookup X509_STORE_free
    X509_STORE_new X509_STORE_set_flags X509_VERIFY_PARAM_set1_host X509_VERIFY_PARAM_set1_ip
    X509_VERIFY_PARAM_set_hostflags X509_free X509_get_ext_d2i X509_get_issuer_name
    X509_get_subject_name X509_getm_notAfter X509_getm_notBefore X509_gmtime_adj X509_load_crl_file
    X509_verify_cert_error_string
}

extern "C" fn not_loaded() {
    // The invariant is broken; there is no caller that could be told.
    std::process::abort();
}

/// Loads the library, if that has not been done.
///
/// # Errors
///
/// What the dynamic linker says: the library is not installed, or lacks a function.
pub(crate) fn load() -> Result<(), String> {
    static LOADED: OnceLock<Result<(), String>> = OnceLock::new();
    LOADED.get_or_init(load_once).clone()
}

fn load_once() -> Result<(), String> {
    // SAFETY: a name that ends in a zero byte. What runs while OpenSSL is loaded expects
    // nothing of us.
    let library = unsafe { libc::dlopen(NAME.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if library.is_null() {
        return Err(reason());
    }
    for (name, place) in FUNCTIONS {
        // SAFETY: an open library that is never closed, and a name that ends in a zero byte.
        let function = unsafe { libc::dlsym(library, name.as_ptr().cast()) };
        if function.is_null() {
            return Err(reason());
        }
        place.store(function, Ordering::Release);
    }
    Ok(())
}

/// Why the dynamic linker has refused, for the thread that asked.
fn reason() -> String {
    // SAFETY: no arguments.
    let message = unsafe { libc::dlerror() };
    if message.is_null() {
        return format!("{} cannot be loaded", NAME.to_string_lossy());
    }
    // SAFETY: not null, so a string of the dynamic linker's, which stays as it is until this
    // thread asks it for something again.
    let message = unsafe { CStr::from_ptr(message) };
    message.to_string_lossy().into_owned()
}

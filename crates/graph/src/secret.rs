//! Secrets: what `--object secret,...` defines and options refer to by name.
//!
//! As in QEMU they belong to the process, and live as long as it. Nothing prints them;
//! their bytes are wiped when they are removed.

use std::collections::BTreeMap;
use std::path::Path;

use aes::Aes256;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use cbc::cipher::block_padding::Pkcs7;
use cbc::cipher::{BlockModeDecrypt, KeyIvInit};
use parking_lot::{Mutex, MutexGuard};
use vellum::luks::Passphrase;
use vellum::{Error, ErrorKind, Result};
use vellum_options::Options;
use vellum_storage::secret::read_file;
use zeroize::Zeroizing;

use crate::keyring;

static SECRETS: Mutex<BTreeMap<String, Secret>> = Mutex::new(BTreeMap::new());

/// A secret that was defined.
#[derive(Debug)]
struct Secret {
    kind: &'static str,
    passphrase: Passphrase,
}

/// The type of secrets that are given, or lie in files.
const GIVEN: &str = "secret";
/// The type of secrets that the kernel keeps.
pub const KEYRING: &str = "secret_keyring";

/// Key and IV of an encrypted secret are as long.
const KEY_BYTES: usize = 32;
const IV_BYTES: usize = 16;

fn secrets() -> MutexGuard<'static, BTreeMap<String, Secret>> {
    SECRETS.lock()
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, "define a secret", message)
}

/// The encoding of a secret's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Encoding {
    Raw,
    Base64,
}

/// Defines a secret by the options of `--object secret`, without `qom-type`.
///
/// # Errors
/// In QEMU's words for options that cannot be, and for names that are in use.
pub fn add(options: Options) -> Result<()> {
    define(options, GIVEN, |options| {
        let (data, file) = (options.take_text("data")?, options.take_text("file")?);
        Ok(Box::new(move || read(data, file)))
    })
}

/// Defines a secret by the options of `--object secret_keyring`, without `qom-type`.
///
/// # Errors
/// As [`add`]; what the kernel says if it does not give the key away.
pub fn add_keyring(options: Options) -> Result<()> {
    define(options, KEYRING, |options| {
        let serial = options.take_number("serial")?;
        let serial = serial.ok_or_else(|| invalid("Parameter 'serial' is missing"))?;
        // A negative number stands for one of the process's own keyrings.
        Ok(Box::new(move || keyring::read(serial as i32)))
    })
}

/// What reads the bytes of a secret, once all options are known to be good.
type Reader = Box<dyn FnOnce() -> Result<Zeroizing<Vec<u8>>>>;

fn define(
    mut options: Options,
    kind: &'static str,
    reader: impl FnOnce(&mut Options) -> Result<Reader>,
) -> Result<()> {
    let id = take_id(&mut options)?;
    let encoding = match options.take_text("format")?.as_deref() {
        None | Some("raw") => Encoding::Raw,
        Some("base64") => Encoding::Base64,
        Some(other) => {
            return Err(invalid(format!(
                "Parameter 'format' does not accept value '{other}'"
            )));
        }
    };
    let reader = reader(&mut options)?;
    let (key_id, iv) = (options.take_text("keyid")?, options.take_text("iv")?);
    if let Some(key) = options.keys().next() {
        return Err(invalid(format!("Parameter '{key}' is unexpected")));
    }
    if secrets().contains_key(&id) {
        return Err(duplicate(&id));
    }
    let bytes = reader()?;
    let bytes = match key_id {
        Some(key_id) => decrypt(&key_id, iv.as_deref(), &bytes, encoding)?,
        None if encoding == Encoding::Base64 => decode(&bytes)?,
        None => bytes,
    };
    let passphrase = Passphrase::new(bytes.to_vec());
    secrets().insert(id, Secret { kind, passphrase });
    Ok(())
}

/// Takes the name of an object out of its options.
///
/// # Errors
/// If it is missing or no identifier.
pub fn take_id(options: &mut Options) -> Result<String> {
    let Some(id) = options.take_text("id")? else {
        return Err(invalid("Parameter 'id' is missing"));
    };
    if !is_identifier(&id) {
        return Err(invalid(
            "Parameter 'id' expects an identifier\nIdentifiers consist of letters, digits, '-', \
             '.', '_', starting with a letter.",
        ));
    }
    Ok(id)
}

/// The refusal of a name that is in use.
pub fn duplicate(id: &str) -> Error {
    invalid(format!(
        "attempt to add duplicate property '{id}' to object (type 'container')"
    ))
}

/// The type of the secret of this name.
pub fn kind(id: &str) -> Option<&'static str> {
    secrets().get(id).map(|secret| secret.kind)
}

/// The names of all secrets.
pub fn names() -> Vec<String> {
    secrets().keys().cloned().collect()
}

/// Forgets a secret; whether there was one.
pub fn remove(id: &str) -> bool {
    secrets().remove(id).is_some()
}

/// The secret of that name as a passphrase.
///
/// # Errors
/// If there is none, or it is no text.
pub fn passphrase(id: &str) -> Result<Passphrase> {
    let secret = bytes(id)?;
    if std::str::from_utf8(secret.bytes()).is_err() {
        return Err(invalid(format!("Data from secret {id} is not valid UTF-8")));
    }
    Ok(secret)
}

/// The secret of that name, whatever bytes it has.
///
/// # Errors
/// If there is none.
pub fn bytes(id: &str) -> Result<Passphrase> {
    let found = secrets().get(id).map(|secret| secret.passphrase.clone());
    found.ok_or_else(|| invalid(format!("No secret with id '{id}'")))
}

/// Names begin with a letter and hold letters, digits and `-._`.
pub fn is_identifier(id: &str) -> bool {
    id.starts_with(|c: char| c.is_ascii_alphabetic())
        && id
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "-._".contains(c))
}

fn read(data: Option<String>, file: Option<String>) -> Result<Zeroizing<Vec<u8>>> {
    match (data, file) {
        (Some(data), None) => Ok(Zeroizing::new(data.into_bytes())),
        (None, Some(file)) => read_file(Path::new(&file)).map_err(|error| {
            let reason = match error.raw_os_error() {
                Some(errno) => Error::from_errno("read", errno).message().to_owned(),
                None => error.to_string(),
            };
            invalid(format!(
                "Unable to read {file}: Failed to open file “{file}”: {reason}"
            ))
        }),
        (Some(_), Some(_)) => Err(invalid("'file' and 'data' are mutually exclusive")),
        (None, None) => Err(invalid("Either 'file' or 'data' must be provided")),
    }
}

/// Decodes base64; whitespace is left out, as files end with a line's end.
fn decode(text: &[u8]) -> Result<Zeroizing<Vec<u8>>> {
    // As long as they will be: what grows leaves copies behind.
    let mut digits = Zeroizing::new(Vec::with_capacity(text.len()));
    digits.extend(text.iter().filter(|byte| !byte.is_ascii_whitespace()));
    let mut bytes = Zeroizing::new(vec![0; base64::decoded_len_estimate(digits.len())]);
    let len = BASE64_STANDARD
        .decode_slice(&*digits, &mut bytes)
        .map_err(|_| invalid("Base64 data contains invalid characters"))?;
    bytes.truncate(len);
    Ok(bytes)
}

/// Decrypts a secret with another one (AES-256 in CBC mode).
fn decrypt(
    key_id: &str,
    iv: Option<&str>,
    bytes: &[u8],
    encoding: Encoding,
) -> Result<Zeroizing<Vec<u8>>> {
    let key = passphrase_bytes(key_id)?;
    if key.bytes().len() != KEY_BYTES {
        return Err(invalid(format!(
            "Key should be {KEY_BYTES} bytes in length"
        )));
    }
    let iv = iv.ok_or_else(|| invalid("IV is required to decrypt secret"))?;
    let iv = decode(iv.as_bytes())?;
    if iv.len() != IV_BYTES {
        return Err(invalid(format!(
            "IV should be {IV_BYTES} bytes in length not {}",
            iv.len()
        )));
    }
    let mut data = match encoding {
        Encoding::Base64 => decode(bytes)?,
        Encoding::Raw => Zeroizing::new(bytes.to_vec()),
    };
    if data.len() % IV_BYTES != 0 {
        return Err(invalid(format!(
            "Length {} must be a multiple of block size {IV_BYTES}",
            data.len()
        )));
    }
    let cipher = cbc::Decryptor::<Aes256>::new_from_slices(key.bytes(), &iv)
        .map_err(|_| invalid("Unable to decrypt the secret"))?;
    let plain = cipher
        .decrypt_padded::<Pkcs7>(&mut data)
        .map_err(|_| invalid("Incorrect number of padding bytes found on decrypted data"))?;
    Ok(Zeroizing::new(plain.to_vec()))
}

fn passphrase_bytes(id: &str) -> Result<Passphrase> {
    let found = secrets().get(id).map(|secret| secret.passphrase.clone());
    found.ok_or_else(|| invalid(format!("No secret with id '{id}'")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn define_by(text: &str) -> Result<()> {
        add(Options::parse(text).unwrap())
    }

    fn refusal(text: &str) -> String {
        define_by(text).unwrap_err().message().to_owned()
    }

    #[test]
    fn secrets_are_found_by_name() {
        define_by("id=t1,data=abc").unwrap();
        define_by("id=t2,data=YWJj,format=base64").unwrap();
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("secret");
        std::fs::write(&file, "YWJj\n").unwrap();
        define_by(&format!("id=t3,format=base64,file={}", file.display())).unwrap();
        for id in ["t1", "t2", "t3"] {
            assert_eq!(passphrase(id).unwrap().bytes(), b"abc", "{id}");
        }
        assert!(remove("t1"));
        let message = passphrase("t1").unwrap_err().message().to_owned();
        assert_eq!(message, "No secret with id 't1'");
    }

    #[test]
    fn a_secret_may_be_encrypted_with_another() {
        // printf letmein | openssl enc -aes-256-cbc -K 0001..1f -iv 0001..0f
        define_by("id=master,format=base64,data=AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=")
            .unwrap();
        define_by(
            "id=inner,keyid=master,format=base64,iv=AAECAwQFBgcICQoLDA0ODw==,\
             data=SI4JuWqmJF8bjD9IJ662eg==",
        )
        .map_err(|error| error.message().to_owned())
        .unwrap();
        assert_eq!(passphrase("inner").unwrap().bytes(), b"letmein");
    }

    #[test]
    fn refusals_are_qemus() {
        define_by("id=twice,data=x").unwrap();
        for (text, message) in [
            ("data=x", "Parameter 'id' is missing"),
            ("id=a", "Either 'file' or 'data' must be provided"),
            (
                "id=a,data=x,file=y",
                "'file' and 'data' are mutually exclusive",
            ),
            (
                "id=a,data=!!,format=base64",
                "Base64 data contains invalid characters",
            ),
            (
                "id=a,file=/nonexist",
                "Unable to read /nonexist: Failed to open file “/nonexist”: No such file or \
                 directory",
            ),
            (
                "id=a,data=x,format=foo",
                "Parameter 'format' does not accept value 'foo'",
            ),
            ("id=a,data=x,foo=1", "Parameter 'foo' is unexpected"),
            ("id=a,data=x,keyid=nobody", "No secret with id 'nobody'"),
            (
                "id=twice,data=y",
                "attempt to add duplicate property 'twice' to object (type 'container')",
            ),
        ] {
            assert_eq!(refusal(text), message, "{text}");
        }
    }
}

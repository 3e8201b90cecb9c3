//! Signatures in minisign's format: files of two lines for keys, of four for signatures, which
//! the program `minisign` makes and checks too.
//!
//! Checking is left to `minisign-verify`; its counterpart for signing brings older versions of
//! half the crates that are here, so signing is put together from the primitives.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use blake2::digest::consts::U32;
use blake2::{Blake2b, Blake2b512, Digest};
use minisign_verify::{PublicKey, Signature};
use vellum::{Error, ErrorKind, Result};
use zeroize::Zeroizing;

const SIGNATURE_ALGORITHM: &[u8; 2] = b"Ed";
/// Of the hash of a text, rather than of all of it.
const PREHASHED: &[u8; 2] = b"ED";
const SCRYPT: &[u8; 2] = b"Sc";
const BLAKE2B: &[u8; 2] = b"B2";
const KEY_FILE_BYTES: usize = 158;
/// Number of the key, secret key, checksum: what the password hides.
const HIDDEN_AT: usize = 54;
/// The most that a key file may have scrypt take: twice what minisign asks for.
const MOST_MEMORY_BYTES: u64 = 2 << 30;

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, "sign", message)
}

/// A secret key.
pub struct SecretKey {
    number: [u8; 8],
    key: ed25519_compact::SecretKey,
}

impl std::fmt::Debug for SecretKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SecretKey({})", id_text(&self.number))
    }
}

impl SecretKey {
    /// The key in the text of a key file; one with a password needs it.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for what is no key; [`ErrorKind::Denied`] for a password
    /// that is missing or wrong.
    pub fn decode(text: &str, password: Option<&[u8]>) -> Result<SecretKey> {
        let file = Zeroizing::new(decode_line(text, 1).unwrap_or_default());
        let is_key = file.len() == KEY_FILE_BYTES
            && file.starts_with(SIGNATURE_ALGORITHM)
            && file[4..6] == *BLAKE2B;
        if !is_key {
            return Err(invalid("This is no secret key of minisign"));
        }
        let mut hidden = Zeroizing::new(file[HIDDEN_AT..].to_vec());
        // minisign leaves the checksum of a key without a password empty.
        let mut has_sum = true;
        match (&file[2..4], password) {
            ([0, 0], _) => has_sum = false,
            (kind, Some(password)) if kind == SCRYPT => {
                let stream = password_stream(&file, password)?;
                for (byte, mask) in hidden.iter_mut().zip(stream.iter()) {
                    *byte ^= mask;
                }
            }
            (kind, None) if kind == SCRYPT => {
                let message = "The secret key has a password: --password-secret";
                return Err(Error::new(ErrorKind::Denied, "sign", message));
            }
            _ => return Err(invalid("The secret key is hidden in an unknown way")),
        }
        let (key, checksum) = hidden.split_at(72);
        let mut sum = Blake2b::<U32>::new();
        sum.update(SIGNATURE_ALGORITHM);
        sum.update(key);
        if has_sum && sum.finalize()[..] != *checksum {
            let message = "The password of the secret key is wrong";
            return Err(Error::new(ErrorKind::Denied, "sign", message));
        }
        let mut number = [0; 8];
        number.copy_from_slice(&key[..8]);
        let key = ed25519_compact::SecretKey::from_slice(&key[8..])
            .ok()
            .filter(|key| ed25519_compact::KeyPair::from_seed(key.seed()).sk == *key)
            .ok_or_else(|| invalid("The secret key is damaged"))?;
        Ok(SecretKey { number, key })
    }

    /// The text of a signature file for `text`; `comment`, one line, is signed with it.
    pub fn sign(&self, text: &str, comment: &str) -> String {
        let hash = Blake2b512::digest(text.as_bytes());
        let signature = self.key.sign(&hash[..], None);
        let mut first = PREHASHED.to_vec();
        first.extend_from_slice(&self.number);
        first.extend_from_slice(signature.as_ref());
        let mut all = signature.as_ref().to_vec();
        all.extend_from_slice(comment.as_bytes());
        let second = self.key.sign(&all, None);
        format!(
            "untrusted comment: signature of a vellum seal\n{}\ntrusted comment: {comment}\n{}\n",
            BASE64_STANDARD.encode(first),
            BASE64_STANDARD.encode(second.as_ref()),
        )
    }
}

/// What hides a key that has a password.
fn password_stream(file: &[u8], password: &[u8]) -> Result<Zeroizing<Vec<u8>>> {
    let number = |at: usize| {
        let bytes = file[at..at + 8].try_into().unwrap_or_default();
        u64::from_le_bytes(bytes)
    };
    let (operations, memory_bytes) = (number(38), number(46));
    if memory_bytes > MOST_MEMORY_BYTES || operations > 1 << 32 {
        return Err(invalid("The secret key's password takes too much to check"));
    }
    let (log_n, p) = scrypt_parameters(operations, memory_bytes);
    let parameters = scrypt::Params::new(log_n, 8, p)
        .map_err(|_| invalid("The secret key's password cannot be checked"))?;
    let mut stream = Zeroizing::new(vec![0; KEY_FILE_BYTES - HIDDEN_AT]);
    scrypt::scrypt(password, &file[6..38], &parameters, &mut stream)
        .map_err(|_| invalid("The secret key's password cannot be checked"))?;
    Ok(stream)
}

/// scrypt's cost parameter (its logarithm) and parallelism for limits as libsodium takes them.
fn scrypt_parameters(operations: u64, memory_bytes: u64) -> (u8, u32) {
    const R: u64 = 8;
    let operations = operations.max(32768);
    let log_of = |most: u64| {
        let fits = (1..63_u8).find(|log| 1_u64 << log > most / 2);
        fits.unwrap_or(62)
    };
    if operations < memory_bytes / 32 {
        return (log_of(operations / (R * 4)), 1);
    }
    let log_n = log_of(memory_bytes / (R * 128));
    let most = ((operations / 4) >> log_n).min(0x3fff_ffff);
    (log_n, (most / R).max(1) as u32)
}

/// Whether `signature`, the text of a signature file, is one of `text` by the key in
/// `public_key`, the text of a key file or its second line; gives the comment that was signed.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] for what is no key; [`ErrorKind::Denied`] where the signature
/// is not one, or another's.
pub fn verify(text: &str, signature: &str, public_key: &str) -> Result<String> {
    let key = PublicKey::decode(public_key)
        .or_else(|_| PublicKey::from_base64(public_key.trim()))
        .map_err(|_| invalid("This is no public key of minisign"))?;
    let denied = |message: String| Error::new(ErrorKind::Denied, "verify", message);
    let signature = Signature::decode(signature)
        .map_err(|error| denied(format!("The signature cannot be read: {error}")))?;
    key.verify(text.as_bytes(), &signature, false)
        .map_err(|error| denied(format!("The signature is not one of this key: {error}")))?;
    Ok(signature.trusted_comment().to_owned())
}

/// The number of the key that a signature file names, as minisign shows it. Anybody can write
/// any number.
pub fn key_id(signature: &str) -> Option<String> {
    let line = decode_line(signature, 1)?;
    let number: [u8; 8] = line.get(2..10)?.try_into().ok()?;
    Some(id_text(&number))
}

fn id_text(number: &[u8; 8]) -> String {
    format!("{:016X}", u64::from_le_bytes(*number))
}

fn decode_line(text: &str, index: usize) -> Option<Vec<u8>> {
    let line = text.lines().nth(index)?.trim();
    BASE64_STANDARD.decode(line).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Made by `minisign -G -W`.
    const SECRET: &str = include_str!("minisign/secret.key");
    const PUBLIC: &str = include_str!("minisign/public.key");

    #[test]
    fn a_signature_is_one_of_its_key_and_text_only() {
        let key = SecretKey::decode(SECRET, None).unwrap();
        let signature = key.sign("text\n", "comment");
        assert_eq!(verify("text\n", &signature, PUBLIC).unwrap(), "comment");
        let bare = PUBLIC.lines().nth(1).unwrap();
        assert!(verify("text\n", &signature, bare).is_ok());
        assert!(verify("text", &signature, PUBLIC).is_err());
        let other = signature.replace("comment: comment", "comment: another");
        assert!(verify("text\n", &other, PUBLIC).is_err());
        let id = key_id(&signature).unwrap();
        assert!(PUBLIC.contains(&id), "{id}");
        assert_eq!(format!("{key:?}"), format!("SecretKey({id})"));
    }

    #[test]
    fn what_is_no_key_is_refused() {
        for text in ["", "comment\nRWQ=", PUBLIC] {
            assert!(SecretKey::decode(text, None).is_err());
            assert!(verify("", "", text).is_err());
        }
        let mut broken = decode_line(SECRET, 1).unwrap();
        broken[80] ^= 1;
        let broken = format!("comment\n{}\n", BASE64_STANDARD.encode(broken));
        let refused = SecretKey::decode(&broken, None).unwrap_err();
        assert_eq!(refused.message(), "The secret key is damaged");
    }

    #[test]
    fn the_cost_of_a_password_is_what_libsodium_makes_of_it() {
        // minisign's limits, and those that libsodium calls interactive.
        assert_eq!(scrypt_parameters(33_554_432, 1_073_741_824), (20, 1));
        assert_eq!(scrypt_parameters(524_288, 16_777_216), (14, 1));
    }
}

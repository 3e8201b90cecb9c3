//! The options of encryption: of new images, and of nodes that are opened.

use vellum::luks::{
    self, Cipher, CryptMethod, FormatOptions, Hash, IterationTime, IvGenerator, Mode, NewVolume,
    Passphrase, SECTOR_BYTES, Unlocking,
};
use vellum::qcow2::create::Encryption;
use vellum::{Error, ErrorKind, Result};
use vellum_options::create_options::CreateSettings;
use vellum_options::{OpenFlags, Options, Scalar};

use crate::secret;

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, "encrypt", message)
}

fn not_accepted(name: &str, value: &str) -> Error {
    invalid(format!(
        "Parameter '{name}' does not accept value '{value}'"
    ))
}

/// A secret that has to be there; `prefix` stands before the option's name.
fn passphrase(id: Option<&str>, prefix: &str) -> Result<Passphrase> {
    match id {
        Some(id) => secret::passphrase(id),
        None => Err(invalid(format!(
            "Parameter '{prefix}key-secret' is required for cipher"
        ))),
    }
}

/// What a name among creation options stands for, if one is given.
fn named<T>(
    settings: &CreateSettings,
    prefix: &str,
    name: &str,
    find: impl Fn(&str) -> Option<T>,
) -> Result<Option<T>> {
    match settings.text(&format!("{prefix}{name}")) {
        None => Ok(None),
        Some(text) => find(text).map(Some).ok_or_else(|| not_accepted(name, text)),
    }
}

/// Ciphers that QEMU's options know by name and LUKS does not have.
const FOREIGN_CIPHERS: [&str; 3] = ["des", "3des", "sm4"];

/// What says how to encrypt, and has no meaning without `encrypt.format`.
const ENCRYPT_OPTIONS: [&str; 7] = [
    "encrypt.key-secret",
    "encrypt.cipher-alg",
    "encrypt.cipher-mode",
    "encrypt.ivgen-alg",
    "encrypt.ivgen-hash-alg",
    "encrypt.hash-alg",
    "encrypt.iter-time",
];

fn format_options(settings: &CreateSettings, prefix: &str) -> Result<FormatOptions> {
    let cipher_option = format!("{prefix}cipher-alg");
    if let Some(name) = settings.text(&cipher_option)
        && FOREIGN_CIPHERS.contains(&name)
    {
        return Err(invalid(format!("Algorithm '{name}' not supported")));
    }
    let defaults = FormatOptions::default();
    let iteration_time = match settings.integer(&format!("{prefix}iter-time")) {
        Some(milliseconds) => IterationTime::Milliseconds(milliseconds),
        None => defaults.iteration_time,
    };
    let options = FormatOptions {
        cipher: named(settings, prefix, "cipher-alg", Cipher::named)?.unwrap_or(defaults.cipher),
        mode: named(settings, prefix, "cipher-mode", Mode::named)?.unwrap_or(defaults.mode),
        iv_generator: named(settings, prefix, "ivgen-alg", IvGenerator::named)?
            .unwrap_or(defaults.iv_generator),
        iv_hash: named(settings, prefix, "ivgen-hash-alg", Hash::named)?,
        hash: named(settings, prefix, "hash-alg", Hash::named)?.unwrap_or(defaults.hash),
        iteration_time,
    };
    options.suite()?;
    Ok(options)
}

/// The way in which a new image is to be encrypted.
fn method(settings: &CreateSettings) -> Result<CryptMethod> {
    match settings.text("encrypt.format") {
        None if settings.bool("encryption") => Ok(CryptMethod::Aes),
        None if ENCRYPT_OPTIONS.iter().any(|name| settings.is_given(name)) => {
            Err(invalid("Parameter 'encrypt.format' is missing"))
        }
        None => Ok(CryptMethod::None),
        Some(_) if settings.bool("encryption") => Err(invalid(
            "'encrypt.format' and its alias 'encryption' can't be used at the same time",
        )),
        // The name in QMP, which QEMU takes here, too.
        Some("aes" | "qcow") => Ok(CryptMethod::Aes),
        Some("luks") => Ok(CryptMethod::Luks),
        Some(other) => Err(not_accepted("format", other)),
    }
}

/// How a new qcow2 image is to be encrypted.
///
/// # Errors
/// In QEMU's words for options that cannot be.
pub fn for_qcow2(settings: &CreateSettings) -> Result<Option<Encryption>> {
    let passphrase = || passphrase(settings.text("encrypt.key-secret"), "encrypt.");
    match method(settings)? {
        CryptMethod::None => Ok(None),
        CryptMethod::Aes => passphrase().map(Encryption::LegacyAes).map(Some),
        CryptMethod::Luks => Ok(Some(Encryption::Luks {
            passphrase: passphrase()?,
            options: format_options(settings, "encrypt.")?,
        })),
    }
}

/// Whether a new qcow image is to be encrypted. It keeps nothing of its secret, which has to be there all the same.
///
/// # Errors
/// In QEMU's words for options that cannot be.
pub(crate) fn for_qcow(settings: &CreateSettings) -> Result<bool> {
    match method(settings)? {
        CryptMethod::Luks => Err(invalid("Unsupported encryption format")),
        _ => Ok(for_qcow2(settings)?.is_some()),
    }
}

/// A new volume of the luks format, still to be written.
pub struct Volume {
    /// Its header, from the beginning of the file on.
    pub bytes: Vec<u8>,
    header: NewVolume,
}

impl Volume {
    /// What the header takes.
    pub fn header_bytes(&self) -> u64 {
        self.header.size_bytes
    }
}

/// Whether only a header is to be made, for a payload that lies elsewhere.
pub fn has_detached_header(settings: &CreateSettings) -> bool {
    settings.bool("detached-header")
}

/// Makes the header of a volume.
///
/// # Errors
/// In QEMU's words for options that cannot be, and without a secret.
pub async fn new_volume(settings: &CreateSettings) -> Result<Volume> {
    let passphrase = passphrase(settings.text("key-secret"), "")?;
    let options = format_options(settings, "")?;
    let mut header = luks::format(&options, &passphrase, has_detached_header(settings)).await?;
    Ok(Volume {
        bytes: std::mem::take(&mut header.bytes),
        header,
    })
}

/// What a volume of the luks format takes besides its payload, in bytes.
///
/// # Errors
/// As [`new_volume`].
pub fn overhead_bytes(settings: &CreateSettings) -> Result<u64> {
    passphrase(settings.text("key-secret"), "")?;
    let options = format_options(settings, "")?;
    Ok(luks::header_size_bytes(&options)?.next_multiple_of(SECTOR_BYTES))
}

/// The options that open an image which `-o` texts have made: those that name its
/// secrets.
///
/// # Errors
/// If the texts cannot be parsed.
pub fn key_secrets(texts: Option<&str>) -> Result<Options> {
    let mut secrets = Options::new();
    let given = match texts {
        Some(texts) => Options::parse(texts)?,
        None => Options::new(),
    };
    for (key, value) in given.iter() {
        if let Scalar::Text(value) = value
            && key.ends_with("key-secret")
        {
            secrets.set_text(key, value.as_str());
        }
    }
    Ok(secrets)
}

/// Whether settings ask for encryption.
pub fn is_asked_for(settings: &CreateSettings) -> bool {
    settings.bool("encryption") || settings.is_given("encrypt.format")
}

/// Whether a node is opened for something else than the guest's data.
fn reads_no_data(flags: &OpenFlags) -> bool {
    flags.metadata_only || flags.no_data
}

/// The secret that a node names, if its data is going to be read.
pub(crate) fn needed_passphrase(
    id: Option<String>,
    flags: &OpenFlags,
) -> Result<Option<Passphrase>> {
    if reads_no_data(flags) {
        return Ok(None);
    }
    id.map(|id| secret::passphrase(&id)).transpose()
}

/// Takes `encrypt.*` out of the options of a qcow2 or qcow node. The secret is looked up only if
/// data is going to be read.
pub(crate) fn take(options: &mut Options, flags: &OpenFlags) -> Result<Unlocking> {
    let mut options = options.take_group("encrypt");
    let format = options.take_text("format")?;
    let id = options.take_text("key-secret")?;
    if let Some(key) = options.keys().next() {
        return Err(invalid(format!("Parameter '{key}' is unexpected")));
    }
    Ok(Unlocking::default()
        .format(format)
        .passphrase(needed_passphrase(id, flags)?)
        .no_data(reads_no_data(flags)))
}

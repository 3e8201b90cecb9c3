//! The names of ciphers, modes, IV generators and hashes, as QEMU's options and the
//! headers of volumes write them.

/// A cipher with the length of its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names say it all")]
pub enum Cipher {
    Aes128,
    Aes192,
    Aes256,
    Cast5,
    Serpent128,
    Serpent192,
    Serpent256,
    Twofish128,
    Twofish192,
    Twofish256,
}

/// How a sector is made of a cipher's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names say it all")]
pub enum Mode {
    Ecb,
    Cbc,
    Xts,
    Ctr,
}

/// Where the IV of a sector comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum IvGenerator {
    /// The lower 32 bits of the sector's number.
    Plain,
    /// The sector's number.
    Plain64,
    /// The sector's number, encrypted with a hash of the key.
    Essiv,
}

/// A hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names say it all")]
pub enum Hash {
    Md5,
    Sha1,
    Sha224,
    Sha256,
    Sha384,
    Sha512,
    Ripemd160,
    Sm3,
}

impl Cipher {
    /// All of them.
    pub const ALL: [Cipher; 10] = [
        Cipher::Aes128,
        Cipher::Aes192,
        Cipher::Aes256,
        Cipher::Cast5,
        Cipher::Serpent128,
        Cipher::Serpent192,
        Cipher::Serpent256,
        Cipher::Twofish128,
        Cipher::Twofish192,
        Cipher::Twofish256,
    ];

    /// QEMU's name of it.
    pub const fn name(self) -> &'static str {
        match self {
            Cipher::Aes128 => "aes-128",
            Cipher::Aes192 => "aes-192",
            Cipher::Aes256 => "aes-256",
            Cipher::Cast5 => "cast5-128",
            Cipher::Serpent128 => "serpent-128",
            Cipher::Serpent192 => "serpent-192",
            Cipher::Serpent256 => "serpent-256",
            Cipher::Twofish128 => "twofish-128",
            Cipher::Twofish192 => "twofish-192",
            Cipher::Twofish256 => "twofish-256",
        }
    }

    /// The cipher of that name.
    pub fn named(name: &str) -> Option<Self> {
        Cipher::ALL.into_iter().find(|cipher| cipher.name() == name)
    }

    /// Its name in a header, which leaves out the key's length.
    pub const fn family(self) -> &'static str {
        match self {
            Cipher::Aes128 | Cipher::Aes192 | Cipher::Aes256 => "aes",
            Cipher::Cast5 => "cast5",
            Cipher::Serpent128 | Cipher::Serpent192 | Cipher::Serpent256 => "serpent",
            Cipher::Twofish128 | Cipher::Twofish192 | Cipher::Twofish256 => "twofish",
        }
    }

    /// The family's name in messages, if it can make IVs by ESSIV.
    pub(crate) const fn essiv_family(self) -> Option<&'static str> {
        match self {
            Cipher::Aes128 | Cipher::Aes192 | Cipher::Aes256 => Some("AES"),
            Cipher::Serpent128 | Cipher::Serpent192 | Cipher::Serpent256 => Some("Serpent"),
            Cipher::Twofish128 | Cipher::Twofish192 | Cipher::Twofish256 => Some("Twofish"),
            Cipher::Cast5 => None,
        }
    }

    /// The cipher of a family with keys of that length.
    pub fn of_family(family: &str, key_bytes: usize) -> Option<Self> {
        Cipher::ALL
            .into_iter()
            .find(|cipher| cipher.family() == family && cipher.key_bytes() == key_bytes)
    }

    /// Bytes of a key.
    pub const fn key_bytes(self) -> usize {
        match self {
            Cipher::Aes128 | Cipher::Cast5 | Cipher::Serpent128 | Cipher::Twofish128 => 16,
            Cipher::Aes192 | Cipher::Serpent192 | Cipher::Twofish192 => 24,
            Cipher::Aes256 | Cipher::Serpent256 | Cipher::Twofish256 => 32,
        }
    }

    /// Bytes of a block.
    pub const fn block_bytes(self) -> usize {
        match self {
            Cipher::Cast5 => 8,
            _ => 16,
        }
    }
}

impl Mode {
    /// All of them.
    pub const ALL: [Mode; 4] = [Mode::Ecb, Mode::Cbc, Mode::Xts, Mode::Ctr];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Mode::Ecb => "ecb",
            Mode::Cbc => "cbc",
            Mode::Xts => "xts",
            Mode::Ctr => "ctr",
        }
    }

    /// The mode of that name.
    pub fn named(name: &str) -> Option<Self> {
        Mode::ALL.into_iter().find(|mode| mode.name() == name)
    }
}

impl IvGenerator {
    /// All of them.
    pub const ALL: [IvGenerator; 3] =
        [IvGenerator::Plain, IvGenerator::Plain64, IvGenerator::Essiv];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            IvGenerator::Plain => "plain",
            IvGenerator::Plain64 => "plain64",
            IvGenerator::Essiv => "essiv",
        }
    }

    /// The generator of that name.
    pub fn named(name: &str) -> Option<Self> {
        IvGenerator::ALL
            .into_iter()
            .find(|generator| generator.name() == name)
    }
}

impl Hash {
    /// All of them.
    pub const ALL: [Hash; 8] = [
        Hash::Md5,
        Hash::Sha1,
        Hash::Sha224,
        Hash::Sha256,
        Hash::Sha384,
        Hash::Sha512,
        Hash::Ripemd160,
        Hash::Sm3,
    ];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Hash::Md5 => "md5",
            Hash::Sha1 => "sha1",
            Hash::Sha224 => "sha224",
            Hash::Sha256 => "sha256",
            Hash::Sha384 => "sha384",
            Hash::Sha512 => "sha512",
            Hash::Ripemd160 => "ripemd160",
            Hash::Sm3 => "sm3",
        }
    }

    /// The hash of that name.
    pub fn named(name: &str) -> Option<Self> {
        Hash::ALL.into_iter().find(|hash| hash.name() == name)
    }

    /// Bytes of a digest.
    pub const fn digest_bytes(self) -> usize {
        match self {
            Hash::Md5 => 16,
            Hash::Sha1 | Hash::Ripemd160 => 20,
            Hash::Sha224 => 28,
            Hash::Sha256 | Hash::Sm3 => 32,
            Hash::Sha384 => 48,
            Hash::Sha512 => 64,
        }
    }
}

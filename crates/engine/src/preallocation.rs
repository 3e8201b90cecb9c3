//! [`Preallocation`]: what is made ahead as an image is created or grows.

/// How much of an image is made ahead of its use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Preallocation {
    /// Nothing: clusters are allocated as they are written.
    #[default]
    Off,
    /// All tables, with every cluster mapped; the file is sparse.
    Metadata,
    /// Like `Metadata`, with space reserved for the data.
    Falloc,
    /// Like `Metadata`, with zeroes written over all the data.
    Full,
}

impl Preallocation {
    /// QEMU's name.
    pub const fn name(self) -> &'static str {
        match self {
            Preallocation::Off => "off",
            Preallocation::Metadata => "metadata",
            Preallocation::Falloc => "falloc",
            Preallocation::Full => "full",
        }
    }

    /// The mode of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        let all = [Self::Off, Self::Metadata, Self::Falloc, Self::Full];
        all.into_iter().find(|mode| mode.name() == name)
    }
}

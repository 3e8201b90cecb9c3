//! Settings for good: a file that says what nobody wants to say at every start.
//!
//! ```toml
//! [qcow2]
//! l2-cache-size = "8M"
//! refcount-cache-size = "1M"   # or, of both together: cache-size
//! cache-clean-interval = 300
//! ```
//!
//! The file is the one that the environment variable `VELLUM_CONFIG` names (none if
//! that is empty); else `vellum/config.toml` in `$XDG_CONFIG_HOME` or `~/.config`;
//! else `/etc/vellum/config.toml`. Only the first that exists is read. What a user
//! says of an image itself comes before what stands here.

use std::ffi::OsString;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::{Deserializer, Error as _};
use toml::Spanned;
use vellum::qcow2::CacheOptions;
use vellum::{Error, ErrorKind, Result};
use vellum_options::size;

/// What may stand in the file and where it lies, for `vellum help config` and the manual.
pub const CONFIG_HELP: &str = "\
config.toml holds settings for good: what nobody wants to say at every start.  What is said
of an image on the command line, or by a client, comes before what stands there.

Where it is looked for; the first that exists is read, and no other:

  $VELLUM_CONFIG                    a file of any name; empty: no file is read
  $XDG_CONFIG_HOME/vellum/config.toml
                                    ~/.config/vellum/config.toml without that variable
  /etc/vellum/config.toml

What may stand in it (all of it may be left out):

  [qcow2]
  l2-cache-size = \"8M\"              bytes of L2 tables to keep; 32M without it, and less
                                    while less is used
  refcount-cache-size = \"1M\"        bytes of refcount blocks to keep
  cache-size = \"9M\"                 of both together, in the place of one of the two above
  cache-clean-interval = 300        seconds after which what was not used is forgotten (600);
                                    0: never

A size is a number of bytes, or a text with a suffix: k, M, G or T.  A mistake is told with
the file and the line, and the image is not opened.
";

const SYSTEM_FILE: &str = "/etc/vellum/config.toml";
const FILE_IN_CONFIG_HOME: &str = "vellum/config.toml";

/// What the file says.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Config {
    qcow2: Qcow2Section,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
struct Qcow2Section {
    l2_cache_size: Option<Spanned<Size>>,
    refcount_cache_size: Option<Spanned<Size>>,
    cache_size: Option<Spanned<Size>>,
    cache_clean_interval: Option<u32>,
}

/// A number of bytes, or a text like `8M`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd)]
struct Size(u64);

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(
            untagged,
            expecting = "a size is a number of bytes or a text like \"8M\""
        )]
        enum Written {
            Number(u64),
            Text(String),
        }
        match Written::deserialize(deserializer)? {
            Written::Number(bytes) => Ok(Size(bytes)),
            Written::Text(text) => size::parse(&text)
                .map(Size)
                .map_err(|error| D::Error::custom(format!("'{text}': {error}"))),
        }
    }
}

/// Reads the file, if there is one.
pub(crate) fn read() -> Result<Config> {
    let Some(path) = find() else {
        return Ok(Config::default());
    };
    let text = fs::read_to_string(&path).map_err(|error| {
        let message = format!("Could not read the configuration '{}'", path.display());
        Error::from_io("configure", &error).context("configure", message)
    })?;
    Config::parse(&text, &path)
}

fn find() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("VELLUM_CONFIG") {
        return Some(named).filter(|name| !name.is_empty()).map(Into::into);
    }
    let set = |name: &str| std::env::var_os(name).filter(|value: &OsString| !value.is_empty());
    let home = set("XDG_CONFIG_HOME")
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(set("HOME")?).join(".config")));
    let own = home.map(|home| home.join(FILE_IN_CONFIG_HOME));
    let mut places = own.into_iter().chain([PathBuf::from(SYSTEM_FILE)]);
    places.find(|path| path.exists())
}

/// A mistake in the file, by file and line.
fn mistake(path: &Path, text: &str, span: Option<Range<usize>>, message: &str) -> Error {
    let before = text.get(..span.map_or(0, |span| span.start));
    let line = 1 + before.unwrap_or(text).matches('\n').count();
    let message = message.trim_end().replace('\n', ", ");
    Error::new(
        ErrorKind::InvalidArgument,
        "configure",
        format!("{}:{line}: {message}", path.display()),
    )
}

impl Config {
    fn parse(text: &str, path: &Path) -> Result<Config> {
        let config: Config = toml::from_str(text)
            .map_err(|error| mistake(path, text, error.span(), error.message()))?;
        config
            .qcow2
            .check()
            .map_err(|(span, message)| mistake(path, text, Some(span), &message))?;
        Ok(config)
    }

    /// Fills in what the user has not said of an image. The three sizes belong
    /// together: who says one of them does not mean the others from here.
    pub(crate) fn fill(&self, cache: &mut CacheOptions) {
        let bytes = |size: &Option<Spanned<Size>>| size.as_ref().map(|size| size.get_ref().0);
        let said = [
            cache.l2_cache_size_bytes,
            cache.refcount_cache_size_bytes,
            cache.cache_size_bytes,
        ];
        if said.iter().all(Option::is_none) {
            cache.l2_cache_size_bytes = bytes(&self.qcow2.l2_cache_size);
            cache.refcount_cache_size_bytes = bytes(&self.qcow2.refcount_cache_size);
            cache.cache_size_bytes = bytes(&self.qcow2.cache_size);
        }
        let interval = self.qcow2.cache_clean_interval.map(u64::from);
        cache.cache_clean_interval_s = cache.cache_clean_interval_s.or(interval);
    }
}

impl Qcow2Section {
    /// Refuses sizes that contradict each other, before an image is there to
    /// blame.
    fn check(&self) -> std::result::Result<(), (Range<usize>, String)> {
        let Some(both) = &self.cache_size else {
            return Ok(());
        };
        let parts = [
            ("l2-cache-size", &self.l2_cache_size),
            ("refcount-cache-size", &self.refcount_cache_size),
        ];
        if parts.iter().all(|(_, size)| size.is_some()) {
            let message = "cache-size, l2-cache-size and refcount-cache-size may not be set at \
                           the same time";
            return Err((both.span(), message.to_owned()));
        }
        for (name, size) in parts {
            if let Some(size) = size
                && size.get_ref() > both.get_ref()
            {
                return Err((size.span(), format!("{name} may not exceed cache-size")));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config> {
        Config::parse(text, Path::new("/etc/c.toml"))
    }

    fn message(text: &str) -> String {
        parse(text).unwrap_err().message().to_owned()
    }

    #[test]
    fn fills_what_the_user_left_open() {
        let config =
            parse("[qcow2]\nl2-cache-size = \"8M\"\nrefcount-cache-size = 65536\n").unwrap();
        let mut cache = CacheOptions::default();
        config.fill(&mut cache);
        assert_eq!(cache.l2_cache_size_bytes, Some(8 << 20));
        assert_eq!(cache.refcount_cache_size_bytes, Some(65536));
        let mut said = CacheOptions::default().cache_size_bytes(Some(1));
        config.fill(&mut said);
        assert_eq!(said.l2_cache_size_bytes, None);
        assert_eq!(said.cache_size_bytes, Some(1));
    }

    #[test]
    fn mistakes_are_named_by_file_and_line() {
        let wrong = "# mine\n[qcow2]\nl2-cache-size = \"8X\"\n";
        assert_eq!(message(wrong), "/etc/c.toml:3: '8X': not a size");
        let unknown = message("[qcow2]\n\nl2-cache = 1\n");
        assert!(
            unknown.starts_with("/etc/c.toml:3: unknown field `l2-cache`"),
            "{unknown}"
        );
        let broken = message("[qcow2\n");
        assert!(broken.starts_with("/etc/c.toml:1: "), "{broken}");
        assert_eq!(
            message("[qcow2]\ncache-size = 4096\nl2-cache-size = \"8k\"\n"),
            "/etc/c.toml:3: l2-cache-size may not exceed cache-size"
        );
        let kind = message("[qcow2]\ncache-size = true\n");
        assert!(kind.starts_with("/etc/c.toml:2: a size is"), "{kind}");
    }
}

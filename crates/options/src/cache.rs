//! Cache modes: `-t none`, `cache.direct=on`.

/// How writes and the host's page cache go together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CacheMode {
    /// Bypass the page cache (O_DIRECT).
    pub direct: bool,
    /// Ignore flushes: fast, and unsafe after a power cut.
    pub no_flush: bool,
    /// Every write is durable when it completes.
    pub writethrough: bool,
}

impl CacheMode {
    /// The mode that QEMU calls `unsafe`.
    pub const UNSAFE: CacheMode = CacheMode {
        direct: false,
        no_flush: true,
        writethrough: false,
    };

    /// The mode of a name as `-t` and `--cache` take it.
    pub fn parse(name: &str) -> Option<CacheMode> {
        let (direct, no_flush, writethrough) = match name {
            "none" | "off" => (true, false, false),
            "directsync" => (true, false, true),
            "writeback" => (false, false, false),
            "unsafe" => (false, true, false),
            "writethrough" => (false, false, true),
            _ => return None,
        };
        Some(CacheMode {
            direct,
            no_flush,
            writethrough,
        })
    }
}

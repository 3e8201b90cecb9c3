//! The program's own code and constants in memory.
//!
//! A server starts once and serves for months, but what its start has touched (parsers of
//! options, the linker's tables) stays mapped and counts as its memory. The kernel maps 16
//! pages with each one that is touched, so that is half of the program.

use std::fs;
use std::ops::Range;

use crate::sys;

/// Unmaps the pages of code and constants that the process has touched so far. Those it
/// needs again come back with the next use, from the page cache as a rule. Takes about a
/// millisecond; for programs that have started, are going to run for long, and unload no
/// library meanwhile.
pub fn discard_startup_pages() {
    // Without the file there is nothing to know, and nothing lost.
    let mappings = fs::read_to_string("/proc/self/smaps").unwrap_or_default();
    for range in unchanged_files(&mappings) {
        // SAFETY: the kernel has just said so of the range; it is one of a program or a
        // library, and these stay until the process ends.
        unsafe { sys::discard_pages(range) };
    }
}

/// The mappings of `smaps` whose pages are those of a file: nobody can write to them, and
/// nobody has (the linker when it moved the program, a debugger that set a breakpoint).
fn unchanged_files(smaps: &str) -> Vec<Range<usize>> {
    let mut found = Vec::new();
    let mut current = None;
    for line in smaps.lines() {
        let mut words = line.split_ascii_whitespace();
        let first = words.next().unwrap_or_default();
        if !first.ends_with(':') {
            current = file_of_constants(first, words);
        } else if first == "Anonymous:" && words.next() == Some("0") {
            found.extend(current.take());
        }
    }
    found
}

/// The range of a mapping that is a private one of a file, and not writable.
fn file_of_constants<'a>(
    range: &str,
    mut words: impl Iterator<Item = &'a str>,
) -> Option<Range<usize>> {
    let permissions = words.next()?;
    let path = words.nth(3)?;
    let (start, end) = range.split_once('-')?;
    let address = |text| usize::from_str_radix(text, 16).ok();
    let is_constant = matches!(permissions, "r-xp" | "r--p" | "--xp");
    (is_constant && path.starts_with('/')).then_some(address(start)?..address(end)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_unchanged_constants_of_files_are_forgotten() {
        let mapping = |range, permissions, path, anonymous| {
            format!(
                "{range} {permissions} 00001000 08:01 4711                       {path}\n\
                 Size:                 12 kB\n\
                 Rss:                   8 kB\n\
                 Anonymous:             {anonymous} kB\n\
                 VmFlags: rd ex mr mw me\n"
            )
        };
        let smaps = [
            mapping("1000-4000", "r-xp", "/usr/bin/vellum", 0),
            mapping("4000-7000", "r--p", "/usr/bin/vellum", 4),
            mapping("7000-a000", "rw-p", "/usr/bin/vellum", 0),
            mapping("a000-d000", "r--s", "/tmp/shared", 0),
            mapping("d000-f000", "r-xp", "[vdso]", 0),
            mapping(
                "7f0000000000-7f0000003000",
                "r--p",
                "/lib/a b.so (deleted)",
                0,
            ),
            mapping("10000-13000", "rw-p", "", 0),
        ];
        assert_eq!(
            unchanged_files(&smaps.concat()),
            [0x1000..0x4000, 0x7f00_0000_0000..0x7f00_0000_3000]
        );
    }

    #[test]
    fn forgotten_code_still_runs() {
        fn mapped_bytes() -> u64 {
            let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
            let code = smaps
                .split_inclusive("VmFlags:")
                .filter(|m| m.contains(" r-xp "));
            let sizes = code.filter_map(|mapping| {
                let rss = mapping.lines().find_map(|line| line.strip_prefix("Rss:"))?;
                rss.split_ascii_whitespace().next()?.parse::<u64>().ok()
            });
            sizes.sum()
        }
        let before = mapped_bytes();
        discard_startup_pages();
        let after = mapped_bytes();
        assert!(after > 0 && after < before, "{after} of {before} KiB");
    }
}

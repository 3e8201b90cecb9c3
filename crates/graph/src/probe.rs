//! Guessing a format from the first bytes of a file.

/// What a file seems to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Probed {
    /// A qcow2 image.
    Qcow2,
    /// A LUKS1 volume.
    Luks,
    /// A format that QEMU knows and this version does not have.
    Foreign(&'static str),
    /// Anything else.
    Raw,
}

/// Drivers that QEMU has beside those of [`FOREIGN`]: all may be named as the format of a backing
/// file.
const DRIVERS: &[&str] = &[
    "raw",
    "qcow2",
    "blkdebug",
    "blklogwrites",
    "blkverify",
    "compress",
    "copy-before-write",
    "copy-on-read",
    "dmg",
    "file",
    "ftp",
    "ftps",
    "gluster",
    "host_cdrom",
    "host_device",
    "http",
    "https",
    "iscsi",
    "iser",
    "nbd",
    "nfs",
    "null-aio",
    "null-co",
    "nvme",
    "preallocate",
    "rbd",
    "replication",
    "snapshot-access",
    "ssh",
    "throttle",
    "vvfat",
];

/// Whether QEMU knows a format or driver of this name.
pub fn is_format_name(name: &str) -> bool {
    DRIVERS.contains(&name) || FOREIGN.iter().any(|(format, _, _)| *format == name)
}

/// How many bytes the guess looks at, as QEMU's does: what guards a guess
/// ([`crate::probed_raw`]) guards all of them.
pub const PROBE_BYTES: usize = 512;

/// Signatures at their offsets, by the name of the format.
const FOREIGN: &[(&str, usize, &[u8])] = &[
    ("qcow", 0, b"QFI\xfb\0\0\0\x01"),
    ("qed", 0, b"QED\0"),
    ("vmdk", 0, b"KDMV"),
    ("vmdk", 0, b"COWD"),
    ("vdi", 64, b"\x7f\x10\xda\xbe"),
    ("vhdx", 0, b"vhdxfile"),
    ("vpc", 0, b"conectix"),
    // With the version, which is the only one.
    ("parallels", 0, b"WithoutFreeSpace\x02\0\0\0"),
    ("parallels", 0, b"WithouFreSpacExt\x02\0\0\0"),
    (
        "cloop",
        0,
        b"#!/bin/sh\n#V2.0 Format\nmodprobe cloop file=$0 && mount -r -t iso9660 /dev/cloop $1\n",
    ),
    ("bochs", 0, b"Bochs Virtual HD Image\0"),
];

/// The signatures of formats that QEMU knows and this version does not have: name of the
/// format, offset, bytes.
pub fn signatures() -> &'static [(&'static str, usize, &'static [u8])] {
    FOREIGN
}

/// Whether QEMU takes a text for a VMDK descriptor: nothing but comments and empty lines
/// before the line that tells its version.
fn is_vmdk_text(start: &[u8]) -> bool {
    for line in start.split_inclusive(|byte| *byte == b'\n') {
        if line.starts_with(b"#") {
            continue;
        }
        let line = line
            .strip_suffix(b"\r\n")
            .or_else(|| line.strip_suffix(b"\n"));
        match line {
            Some(b"version=1" | b"version=2" | b"version=3") => return true,
            Some(blank @ [b' ', ..]) if blank.iter().all(|byte| *byte == b' ') => {}
            _ => return false,
        }
    }
    false
}

/// Guesses the format from the first [`PROBE_BYTES`] of a file (fewer if the
/// file is shorter).
pub fn probe(start: &[u8]) -> Probed {
    if start.starts_with(b"QFI\xfb") {
        let version = start
            .get(4..8)
            .map(|bytes| bytes.iter().fold(0_u32, |v, &b| v << 8 | u32::from(b)));
        if version.is_some_and(|version| version >= 2) {
            return Probed::Qcow2;
        }
    }
    if vellum::luks::is_luks(start) {
        return Probed::Luks;
    }
    if is_vmdk_text(start) {
        return Probed::Foreign("vmdk");
    }
    let found = FOREIGN.iter().find(|(_, offset, signature)| {
        start
            .get(*offset..)
            .is_some_and(|bytes| bytes.starts_with(signature))
    });
    found.map_or(Probed::Raw, |(name, _, _)| Probed::Foreign(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signatures_are_seen() {
        assert_eq!(probe(b"QFI\xfb\0\0\0\x03"), Probed::Qcow2);
        assert_eq!(probe(b"QFI\xfb\0\0\0\x01"), Probed::Foreign("qcow"));
        assert_eq!(probe(b"QFI\xfb"), Probed::Raw);
        assert_eq!(probe(b""), Probed::Raw);
        assert_eq!(probe(b"LUKS\xba\xbe\0\x01"), Probed::Luks);
        assert_eq!(probe(b"LUKS\xba\xbe\0\x02"), Probed::Raw);
        assert_eq!(probe(b"conectix..."), Probed::Foreign("vpc"));
        let parallels = |version: u8| [&b"WithoutFreeSpace"[..], &[version, 0, 0, 0]].concat();
        assert_eq!(probe(&parallels(2)), Probed::Foreign("parallels"));
        assert_eq!(probe(&parallels(3)), Probed::Raw);
    }

    #[test]
    fn a_descriptor_is_one_whatever_its_first_comment_says() {
        for text in [
            "version=1\n",
            "# anything\n#\nversion=2\nCID=1\n",
            "  \nversion=3\r\n",
            "# Disk DescriptorFile\nversion=1\n",
            "# Disk DescriptorFile\r\n \r\nversion=1\r\n",
        ] {
            assert_eq!(probe(text.as_bytes()), Probed::Foreign("vmdk"), "{text:?}");
        }
        for text in [
            "version=4\n",
            "# only a comment\n",
            "x\nversion=1\n",
            "version=1",
            "VERSION=1\n",
            "# Disk DescriptorFile\nVERSION=1\n",
            "# Disk DescriptorFile\n version=1\n",
            "# Disk DescriptorFile\nversion = 1\n",
            "# Disk DescriptorFile\nCID=1\nversion=1\n",
            "# Disk DescriptorFile\n\nversion=1\n",
            "# Disk DescriptorFile\n\tversion=1\n",
            "# Disk DescriptorFile",
        ] {
            assert_eq!(probe(text.as_bytes()), Probed::Raw, "{text:?}");
        }
    }
}

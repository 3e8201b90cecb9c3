//! What a file looks like at the places where programs look. Pure.

use vellum_graph::probe::{self, Probed};

/// A mark of a format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Signature {
    /// The format, by QEMU's name where it has one.
    pub format: &'static str,
    /// Where the mark stands in the file.
    pub offset_bytes: u64,
    /// Programs that probe take the file for this image format because of the mark;
    /// otherwise it is what a guest puts on a disk.
    pub is_container: bool,
}

/// Marks of image formats beside those that probing knows, from the start of the file.
const CONTAINERS: &[(&str, usize, &[u8])] =
    &[("cloop", 0, b"#!/bin/sh\n#V2.0 Format\nmodprobe cloop")];

/// Marks of image formats in the last sector.
const TRAILERS: &[(&str, &[u8])] = &[("vpc", b"conectix"), ("dmg", b"koly")];

/// What guests and media put on disks.
const CONTENTS: &[(&str, usize, &[u8])] = &[
    ("luks2", 0, b"LUKS\xba\xbe\0\x02"),
    ("mbr", 510, b"\x55\xaa"),
    ("gpt", 512, b"EFI PART"),
    ("gpt", 4096, b"EFI PART"),
    ("iso9660", 0x8001, b"CD001"),
    ("iso9660", 0x8801, b"CD001"),
    ("iso9660", 0x9001, b"CD001"),
];

/// What files begin with that are no disks, and may be taken for raw ones.
const NO_DISKS: &[(&str, usize, &[u8])] = &[
    (
        "a file compressed by gzip: unpack it first",
        0,
        b"\x1f\x8b\x08",
    ),
    ("a file compressed by xz: unpack it first", 0, b"\xfd7zXZ\0"),
    ("a file compressed by bzip2: unpack it first", 0, b"BZh"),
    (
        "a file compressed by zstd: unpack it first",
        0,
        b"\x28\xb5\x2f\xfd",
    ),
    (
        "a file compressed by lz4: unpack it first",
        0,
        b"\x04\x22\x4d\x18",
    ),
    ("a zip archive: unpack it first", 0, b"PK\x03\x04"),
    ("a 7z archive: unpack it first", 0, b"7z\xbc\xaf\x27\x1c"),
    (
        "a tar archive: unpack it first, or name a disk of an OVA package as FILE#DISK",
        257,
        b"ustar",
    ),
    ("a program (ELF)", 0, b"\x7fELF"),
    ("a program (PE)", 0, b"MZ\x90\0"),
    ("a script", 0, b"#!"),
    ("a PDF document", 0, b"%PDF-"),
    ("a PNG picture", 0, b"\x89PNG\r\n\x1a\n"),
    ("an HTML page", 0, b"<!DOCTYPE html"),
    ("an HTML page", 0, b"<html"),
    ("an XML document", 0, b"<?xml"),
];

/// What the file is, if it begins as no disk does.
pub(super) fn no_disk(head: &[u8]) -> Option<&'static str> {
    let mut all = NO_DISKS.iter();
    let found = all.find(|(_, at, mark)| head.get(*at..).is_some_and(|b| b.starts_with(mark)));
    found.map(|(what, _, _)| *what)
}

/// Every mark in the first and the last bytes of a file.
pub(super) fn find(head: &[u8], tail: &[u8], tail_offset_bytes: u64) -> Vec<Signature> {
    let mut found = Vec::new();
    let mut add = |format, offset_bytes, is_container| {
        found.push(Signature {
            format,
            offset_bytes,
            is_container,
        });
    };
    match probe::probe(&head[..head.len().min(probe::PROBE_BYTES)]) {
        Probed::Qcow2 => add("qcow2", 0, true),
        Probed::Luks => add("luks", 0, true),
        Probed::Foreign(format) => add(format, 0, true),
        Probed::Raw => {}
    }
    let at = |(_, offset, mark): &&(&str, usize, &[u8])| {
        head.get(*offset..)
            .is_some_and(|bytes| bytes.starts_with(mark))
    };
    for (format, offset, _) in probe::signatures().iter().filter(at) {
        if *offset > 0 {
            add(format, *offset as u64, true);
        }
    }
    for (format, offset, _) in CONTAINERS.iter().filter(at) {
        add(format, *offset as u64, true);
    }
    for (format, offset, _) in CONTENTS.iter().filter(at) {
        add(format, *offset as u64, false);
    }
    for (format, mark) in TRAILERS {
        if tail_offset_bytes > 0 && tail.starts_with(mark) {
            add(format, tail_offset_bytes, true);
        }
    }
    found.dedup();
    found
}

/// The format that a program takes the file for.
pub(super) fn leading(signatures: &[Signature]) -> &'static str {
    let mut containers = signatures.iter().filter(|mark| mark.is_container);
    containers.next().map_or("raw", |mark| mark.format)
}

//! Images of formats that are only read: no program at hand makes them, so they are made here, to be read.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use anyhow::{Context, Result};
use flate2::Compression;
use flate2::write::ZlibEncoder;

use crate::process;

const SECTOR_BYTES: usize = 512;
/// What a Bochs image has in one piece.
const EXTENT_BYTES: usize = 1 << 20;
const CLOOP_BLOCK_BYTES: usize = 64 << 10;
/// As Apple's own tool has it.
const DMG_CHUNK_BYTES: usize = 256 << 10;
const DMG_ZERO: u32 = 0;
const DMG_ZLIB: u32 = 0x8000_0005;
const DMG_END: u32 = 0xffff_ffff;

/// How a disk is made an image.
pub type Make = fn(&Path, &Path) -> Result<()>;

/// The formats that are made here.
pub const FORMATS: &[(&str, Make)] = &[("bochs", bochs), ("cloop", cloop), ("dmg", dmg)];

/// Calls `take` for all pieces of a disk, of which the last may be shorter.
fn pieces(
    disk: &Path,
    piece_bytes: usize,
    mut take: impl FnMut(u64, &[u8]) -> Result<()>,
) -> Result<()> {
    let mut disk = File::open(disk)?;
    for number in 0.. {
        let mut piece = Vec::new();
        let mut rest = (&mut disk).take(piece_bytes as u64);
        if rest.read_to_end(&mut piece)? == 0 {
            break;
        }
        take(number, &piece)?;
    }
    Ok(())
}

fn is_zero(piece: &[u8]) -> bool {
    piece.iter().all(|byte| *byte == 0)
}

fn deflated(piece: &[u8]) -> Result<Vec<u8>> {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(piece)?;
    Ok(encoder.finish()?)
}

fn put(bytes: &mut [u8], at: usize, field: &[u8]) {
    bytes[at..at + field.len()].copy_from_slice(field);
}

/// A growing image of Bochs, with the extents that hold something.
fn bochs(disk: &Path, image: &Path) -> Result<()> {
    let size_bytes = disk.metadata()?.len();
    let extents = size_bytes.div_ceil(EXTENT_BYTES as u64) as usize;
    let mut head = vec![0; 512];
    put(&mut head, 0, b"Bochs Virtual HD Image");
    put(&mut head, 32, b"Redolog");
    put(&mut head, 48, b"Growing");
    let version_2 = 0x2_0000u32;
    let bitmap = [0xff; EXTENT_BYTES / SECTOR_BYTES / 8];
    let bitmap_bytes = bitmap.len().next_multiple_of(SECTOR_BYTES);
    let fields = [version_2, 512, extents as u32, bitmap_bytes as u32];
    for (at, field) in (64..).step_by(4).zip(fields) {
        put(&mut head, at, &field.to_le_bytes());
    }
    put(&mut head, 80, &(EXTENT_BYTES as u32).to_le_bytes());
    put(&mut head, 88, &size_bytes.to_le_bytes());
    head.resize(512 + extents * 4, 0xff);
    let image = File::create(image)?;
    let whole_bytes = bitmap_bytes + EXTENT_BYTES;
    let (data, mut used) = (head.len(), 0u32);
    pieces(disk, EXTENT_BYTES, |number, piece| {
        if is_zero(piece) {
            return Ok(());
        }
        put(&mut head, 512 + number as usize * 4, &used.to_le_bytes());
        let at = data + used as usize * whole_bytes;
        image.write_all_at(&bitmap, at as u64)?;
        image.write_all_at(piece, (at + bitmap_bytes) as u64)?;
        used += 1;
        Ok(())
    })?;
    image.write_all_at(&head, 0)?;
    image.set_len((data + used as usize * whole_bytes) as u64)?;
    Ok(())
}

/// A compressed loop, as Knoppix has it.
fn cloop(disk: &Path, image: &Path) -> Result<()> {
    let mut head = b"#!/bin/sh\n#V2.0 Format\n\
        modprobe cloop file=$0 && mount -r -t iso9660 /dev/cloop $1\n"
        .to_vec();
    head.resize(128, 0);
    let blocks = disk.metadata()?.len().div_ceil(CLOOP_BLOCK_BYTES as u64);
    head.extend((CLOOP_BLOCK_BYTES as u32).to_be_bytes());
    head.extend((blocks as u32).to_be_bytes());
    let image = File::create(image)?;
    let mut at = head.len() as u64 + (blocks + 1) * 8;
    pieces(disk, CLOOP_BLOCK_BYTES, |_, piece| {
        let mut block = piece.to_vec();
        block.resize(CLOOP_BLOCK_BYTES, 0);
        let stored = deflated(&block)?;
        head.extend(at.to_be_bytes());
        image.write_all_at(&stored, at)?;
        at += stored.len() as u64;
        Ok(())
    })?;
    head.extend(at.to_be_bytes());
    image.write_all_at(&head, 0)?;
    Ok(())
}

/// A row of a table of Apple's: sectors from one on are stored at an offset.
fn dmg_row(code: u32, fields: [usize; 4]) -> impl Iterator<Item = u8> {
    let fields = fields.into_iter();
    let fields = fields.flat_map(|field| (field as u64).to_be_bytes());
    code.to_be_bytes().into_iter().chain([0; 4]).chain(fields)
}

/// Apple's UDZO, with one table in a resource fork.
fn dmg(disk: &Path, image: &Path) -> Result<()> {
    let mut table = vec![0; 204];
    put(&mut table, 0, b"mish");
    let image = File::create(image)?;
    let (mut at, mut sector) = (0, 0);
    pieces(disk, DMG_CHUNK_BYTES, |_, piece| {
        let (code, stored) = match is_zero(piece) {
            true => (DMG_ZERO, Vec::new()),
            false => (DMG_ZLIB, deflated(piece)?),
        };
        let sectors = piece.len().div_ceil(SECTOR_BYTES);
        table.extend(dmg_row(code, [sector, sectors, at, stored.len()]));
        image.write_all_at(&stored, at as u64)?;
        at += stored.len();
        sector += sectors;
        Ok(())
    })?;
    table.extend(dmg_row(DMG_END, [sector, 0, 0, 0]));
    let mut fork = vec![0; 256];
    put(&mut fork, 0, &256u32.to_be_bytes());
    put(&mut fork, 8, &(table.len() as u32 + 4).to_be_bytes());
    fork.extend((table.len() as u32).to_be_bytes());
    fork.extend(table);
    let mut trailer = vec![0; 512];
    put(&mut trailer, 0, b"koly");
    put(&mut trailer, 0x28, &(at as u64).to_be_bytes());
    put(&mut trailer, 0x30, &(fork.len() as u64).to_be_bytes());
    put(&mut trailer, 0x1ec, &(sector as u64).to_be_bytes());
    fork.extend(trailer);
    image.write_all_at(&fork, at as u64)?;
    Ok(())
}

/// A package of one machine, whose disk is a stream; its names for our program and for QEMU's, which has to be told
/// where in the package the disk lies.
pub fn package(disk: &Path, folder: &Path) -> Result<[String; 2]> {
    const MEMBER: &str = "disk1.vmdk";
    let member = folder.join(MEMBER);
    let mut convert = process::program("qemu-img")?;
    let options = "subformat=streamOptimized";
    convert.args(["convert", "-f", "raw", "-O", "vmdk", "-o", options]);
    process::output(convert.arg(disk).arg(&member))?;
    let descriptor = format!(
        "<Envelope><References><File id='f' href='{MEMBER}'/></References><DiskSection>\
         <Disk diskId='d' capacity='{}' fileRef='f'/></DiskSection></Envelope>",
        disk.metadata()?.len()
    );
    std::fs::write(folder.join("machine.ovf"), &descriptor)?;
    let mut tar = process::program("tar")?;
    let tar = tar.current_dir(folder).args(["--format=ustar", "-cf"]);
    process::output(tar.args(["machine.ova", "machine.ovf", MEMBER]))?;
    let offset_bytes = 2 * SECTOR_BYTES + descriptor.len().next_multiple_of(SECTOR_BYTES);
    let size_bytes = member.metadata()?.len();
    std::fs::remove_file(member)?;
    let path = folder.join("machine.ova");
    let path = path.to_str().context("the folder has a plain name")?;
    let theirs = serde_json::json!({
        "driver": "vmdk",
        "file": {
            "driver": "raw", "offset": offset_bytes, "size": size_bytes,
            "file": { "driver": "file", "filename": path },
        },
    });
    Ok([format!("{path}#{MEMBER}"), format!("json:{theirs}")])
}

//! The table of UEFI: a header in the second sector and one in the last, each with a checksum of
//! its own and one of the entries that it leads to.
//!
//! ```text
//!   0  "EFI PART"         32  where the other header is      84  bytes of an entry
//!  12  bytes of it        72  first sector of the entries    88  their CRC-32
//!  16  its CRC-32         80  number of entries
//! entry:  0 type   16 identity   32 first sector   40 last sector   56 name, UTF-16
//! ```

use super::{Partition, Scheme, Table, place};
use crate::bytes::{has, le16, le32, le64, part};
use crate::error::Result;
use crate::source::Source;

const MARK: &[u8] = b"EFI PART";
const HEADER_BYTES_MIN: usize = 92;
const ENTRY_BYTES_MIN: usize = 128;
/// What entries take at most, in bytes: a disk has 16 KiB of them.
const ENTRIES_BYTES_MAX: usize = 1 << 20;
const SECTORS: [u64; 2] = [512, 4096];

/// Types with a name, in the order in which their bytes lie on the disk.
const PURPOSES: &[([u8; 16], &str)] = &[
    (id(0xC12A7328_F81F_11D2_BA4B_00A0C93EC93B), "EFI system"),
    (id(0x21686148_6449_6E6F_744E_656564454649), "BIOS boot"),
    (
        id(0xE3C9E316_0B5C_4DB8_817D_F92DF00215AE),
        "Microsoft reserved",
    ),
    (
        id(0xEBD0A0A2_B9E5_4433_87C0_68B6B72699C7),
        "Microsoft basic data",
    ),
    (
        id(0xDE94BBA4_06D1_4D40_A16A_BFD50179D6AC),
        "Windows recovery",
    ),
    (id(0x0FC63DAF_8483_4772_8E79_3D69D8477DE4), "Linux"),
    (id(0x4F68BCE3_E8CD_4DB1_96E7_FBCAF984B709), "Linux root"),
    (id(0x933AC7E1_2EB4_4F13_B844_0E14E2AEF915), "Linux home"),
    (id(0xBC13C2FF_59E6_4262_A352_B275FD6F7172), "Linux boot"),
    (id(0x0657FD6D_A4AB_43C4_84E5_0933C84B4F4F), "Linux swap"),
    (id(0xE6D6D379_F507_44C2_A23C_238F2A3DF928), "Linux LVM"),
    (id(0xCA7D7CCB_63ED_4C53_861C_1742536059CC), "Linux LUKS"),
    (id(0xA19D880F_05FC_4D3B_A006_743F0F84911E), "Linux RAID"),
    (id(0x48465300_0000_11AA_AA11_00306543ECAC), "Apple HFS"),
    (id(0x7C3457EF_0000_11AA_AA11_00306543ECAC), "Apple APFS"),
];

/// The first three of a type's groups lie with their lowest byte first.
const fn id(written: u128) -> [u8; 16] {
    let w = written.to_be_bytes();
    [
        w[3], w[2], w[1], w[0], w[5], w[4], w[7], w[6], w[8], w[9], w[10], w[11], w[12], w[13],
        w[14], w[15],
    ]
}

/// A sound header's entries.
struct Header {
    sector_bytes: u64,
    /// Sound, and all of them.
    entries: Vec<u8>,
    entry_bytes: usize,
}

/// Reads the table.
pub(super) fn read(disk: &Source) -> Result<Option<Table>> {
    for sector_bytes in SECTORS {
        if let Some(header) = header(disk, sector_bytes, sector_bytes)? {
            return Ok(Some(table(disk, &header, Vec::new())));
        }
    }
    // A copy at the end counts only where the start was one as well: a disk may have been used
    // for something else since.
    let starts = disk.head(4096 + MARK.len())?;
    let is_gpt = SECTORS.iter().any(|at| has(&starts, *at as usize, MARK)) || has_guard(&starts);
    if !is_gpt {
        return Ok(None);
    }
    for sector_bytes in SECTORS {
        let last = (disk.len_bytes() / sector_bytes).saturating_sub(1) * sector_bytes;
        if let Some(header) = header(disk, sector_bytes, last)? {
            let text = "the first copy of the GPT is damaged: the second one is used";
            return Ok(Some(table(disk, &header, vec![text.to_owned()])));
        }
    }
    Ok(None)
}

/// Whether the first sector keeps programs off that know no GPT.
fn has_guard(start: &[u8]) -> bool {
    let is_guard = |entry: usize| start.get(446 + entry * 16 + 4) == Some(&0xee);
    has(start, 510, &[0x55, 0xaa]) && (0..4).any(is_guard)
}

/// The header at `at`, if it and its entries are sound.
fn header(disk: &Source, sector_bytes: u64, at: u64) -> Result<Option<Header>> {
    let Some((start, len)) = place(disk, sector_bytes, at / sector_bytes, 1) else {
        return Ok(None);
    };
    let mut sector = disk.part(start, len).head(sector_bytes as usize)?;
    let header_bytes = le32(&sector, 12) as usize;
    if !has(&sector, 0, MARK) || header_bytes < HEADER_BYTES_MIN || header_bytes > sector.len() {
        return Ok(None);
    }
    let sum = le32(&sector, 16);
    sector[16..20].fill(0);
    if crc32(&sector[..header_bytes]) != sum || le64(&sector, 24) != at / sector_bytes {
        return Ok(None);
    }
    let entry_bytes = le32(&sector, 84) as usize;
    let bytes = entry_bytes.saturating_mul(le32(&sector, 80) as usize);
    if !(ENTRY_BYTES_MIN..=4096).contains(&entry_bytes) || bytes > ENTRIES_BYTES_MAX {
        return Ok(None);
    }
    let first = le64(&sector, 72).checked_mul(sector_bytes);
    let fits = |first: &u64| first.saturating_add(bytes as u64) <= disk.len_bytes();
    let Some(first) = first.filter(fits) else {
        return Ok(None);
    };
    let entries = disk.bytes(first, bytes)?;
    let is_sound = crc32(&entries) == le32(&sector, 88);
    Ok(is_sound.then_some(Header {
        sector_bytes,
        entries,
        entry_bytes,
    }))
}

fn table(disk: &Source, header: &Header, remarks: Vec<String>) -> Table {
    let mut partitions = Vec::new();
    for (index, entry) in header.entries.chunks_exact(header.entry_bytes).enumerate() {
        let (first, last) = (le64(entry, 32), le64(entry, 40));
        let purpose = part(entry, 0..16);
        if purpose.iter().all(|byte| *byte == 0) || last < first {
            continue;
        }
        let sectors = (last - first).saturating_add(1);
        let Some((start_bytes, len_bytes)) = place(disk, header.sector_bytes, first, sectors)
        else {
            continue;
        };
        let named = PURPOSES.iter().find(|(id, _)| id == purpose);
        partitions.push(Partition {
            number: index as u32 + 1,
            start_bytes,
            len_bytes,
            purpose: named.map_or_else(|| written(purpose), |(_, name)| (*name).to_owned()),
            name: Some(name(part(entry, 56..128))).filter(|name| !name.is_empty()),
        });
    }
    Table {
        scheme: Scheme::Gpt,
        partitions,
        remarks,
    }
}

/// A type as people write it.
fn written(id: &[u8]) -> String {
    let rest: String = part(id, 10..16)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let [a, b] = [8, 9].map(|at| id.get(at).copied().unwrap_or_default());
    format!(
        "{:08x}-{:04x}-{:04x}-{a:02x}{b:02x}-{rest}",
        le32(id, 0),
        le16(id, 4),
        le16(id, 6),
    )
}

fn name(bytes: &[u8]) -> String {
    let units = bytes.chunks_exact(2).map(|unit| le16(unit, 0));
    let units: Vec<u16> = units.take_while(|unit| *unit != 0).collect();
    crate::bytes::text(String::from_utf16_lossy(&units).as_bytes())
}

/// The CRC-32 of Ethernet, bit by bit: 16 KiB of it are rare.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |sum, byte| {
        (0..8).fold(sum ^ u32::from(*byte), |sum, _| {
            (sum >> 1) ^ (0xedb8_8320 & 0_u32.wrapping_sub(sum & 1))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::source;
    use super::*;

    const SECTORS: u64 = 2000;

    /// A disk with one partition, of sectors 100 to 199.
    fn disk(sector_bytes: u64) -> Vec<u8> {
        let size = sector_bytes as usize;
        let mut disk = vec![0; SECTORS as usize * size];
        disk[450] = 0xee;
        disk[510..512].copy_from_slice(&[0x55, 0xaa]);
        let mut entries = vec![0; 128 * 128];
        entries[128..144].copy_from_slice(&PURPOSES[5].0);
        entries[160..168].copy_from_slice(&100_u64.to_le_bytes());
        entries[168..176].copy_from_slice(&199_u64.to_le_bytes());
        entries[184..188].copy_from_slice(b"a\0b\0");
        for (own, other, at) in [(1, SECTORS - 1, 2), (SECTORS - 1, 1, SECTORS - 33)] {
            disk[at as usize * size..][..entries.len()].copy_from_slice(&entries);
            let mut header = [0; HEADER_BYTES_MIN];
            header[..8].copy_from_slice(MARK);
            header[12..16].copy_from_slice(&92_u32.to_le_bytes());
            header[24..32].copy_from_slice(&own.to_le_bytes());
            header[32..40].copy_from_slice(&other.to_le_bytes());
            header[72..80].copy_from_slice(&at.to_le_bytes());
            header[80..84].copy_from_slice(&128_u32.to_le_bytes());
            header[84..88].copy_from_slice(&128_u32.to_le_bytes());
            header[88..92].copy_from_slice(&crc32(&entries).to_le_bytes());
            let sum = crc32(&header);
            header[16..20].copy_from_slice(&sum.to_le_bytes());
            disk[own as usize * size..][..HEADER_BYTES_MIN].copy_from_slice(&header);
        }
        disk
    }

    #[test]
    fn partitions_are_found_with_sectors_of_either_length() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
        for sector_bytes in super::SECTORS {
            let table = read(&source(disk(sector_bytes))).expect("readable");
            let table = table.expect("a table");
            let expected = Partition {
                number: 2,
                start_bytes: 100 * sector_bytes,
                len_bytes: 100 * sector_bytes,
                purpose: "Linux".to_owned(),
                name: Some("ab".to_owned()),
            };
            assert_eq!(table.partitions, [expected]);
            assert_eq!(table.remarks, [""; 0]);
        }
    }

    #[test]
    fn the_second_copy_is_used_where_the_first_is_damaged() {
        for damage in [512 + 72, 1024 + 40] {
            let mut disk = disk(512);
            disk[damage] ^= 1;
            let table = read(&source(disk.clone()))
                .expect("readable")
                .expect("a table");
            assert_eq!((table.partitions.len(), table.remarks.len()), (1, 1));
            let last = disk.len() - 500;
            disk[last] ^= 1;
            assert_eq!(read(&source(disk)).expect("readable"), None);
        }
    }

    #[test]
    fn absurd_numbers_are_told_from_tables() {
        let mut random = fastrand::Rng::with_seed(3);
        for _ in 0..5000 {
            let mut disk = disk(512);
            let at = 512 + random.usize(20..92);
            disk[at] = random.u8(..);
            // Sound as far as checksums tell.
            disk[528..532].fill(0);
            let sum = crc32(&disk[512..604]);
            disk[528..532].copy_from_slice(&sum.to_le_bytes());
            let table = read(&source(disk)).expect("readable");
            let partitions = table.map(|table| table.partitions).unwrap_or_default();
            assert!(partitions.len() <= 128);
        }
    }
}

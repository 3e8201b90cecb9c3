//! One function per decoder of `vellum-format`. Each lists the invariants that it
//! checks; all of them check that no bytes make a decoder panic.

#[path = "decoders/checksums.rs"]
pub mod checksums;
#[path = "decoders/seal.rs"]
pub mod seal;
#[path = "decoders/stream.rs"]
pub mod stream;

use vellum_format::bitmap::{self, BitmapDirectoryEntry, BitmapTableEntry};
use vellum_format::crypto::{CryptMethod, EncryptionHeaderPointer};
use vellum_format::extension::{self, Context};
use vellum_format::header::{self, Purpose};
use vellum_format::luks::{self, LuksHeader};
use vellum_format::refcount::{self, RefcountTableEntry};
use vellum_format::write_log::{self, RecordHead, Superblock, WriteLogExtension};
use vellum_format::{
    CompressedDescriptor, FormatErrorKind, Geometry, Header, L1Entry, L2Entry, Mapping, limits,
    snapshot,
};

/// What a fuzz target does with its bytes.
pub type Check = fn(&[u8]);

/// Every check with the name of its fuzz target and corpus.
pub const ALL: [(&str, Check); 18] = [
    ("header", check_header),
    ("extensions", check_extensions),
    ("l1_table", check_l1_table),
    ("l2_table", check_l2_table),
    ("compressed", check_compressed),
    ("refcount_table", check_refcount_table),
    ("refcount_block", check_refcount_block),
    ("snapshot_table", check_snapshot_table),
    ("bitmap_directory", check_bitmap_directory),
    ("bitmap_table", check_bitmap_table),
    ("encryption_header", check_encryption_header),
    ("luks_header", check_luks_header),
    ("checksums", checksums::check),
    ("seal", seal::check),
    ("stream", stream::check),
    ("write_log_extension", check_write_log_extension),
    ("write_log_superblock", check_write_log_superblock),
    ("write_log_record", check_write_log_record),
];

/// - `decode(encode(decode(x))) == decode(x)`, and the second encoding equals the first.
/// - What decodes can be encoded, unless it no longer fits the first cluster.
/// - What may be used may be checked, with the same result.
/// - A decoded header is within the limits, and its file looks like qcow2.
/// - An error names a structure, a field and a message.
pub fn check_header(data: &[u8]) {
    let header = match Header::decode(data) {
        Ok(header) => header,
        Err(error) => {
            assert!(!error.structure().is_empty() && !error.field().is_empty());
            assert!(!error.message().is_empty());
            return;
        }
    };
    assert!(header::probe(data));
    assert_eq!(
        header::first_cluster_size_bytes(data).as_ref(),
        Ok(&header.geometry().cluster_size_bytes())
    );
    assert_eq!(
        Header::decode_for(data, Purpose::Check).as_ref(),
        Ok(&header)
    );
    check_header_limits(&header);
    match header.encode() {
        Ok(encoded) => {
            assert!(encoded.len() as u64 <= header.geometry().cluster_size_bytes());
            assert_eq!(Header::decode(&encoded).as_ref(), Ok(&header));
            assert_eq!(header.encode().as_ref(), Ok(&encoded));
        }
        Err(error) => assert_eq!(error.kind(), FormatErrorKind::NoSpace),
    }
}

fn check_header_limits(header: &Header) {
    let geometry = header.geometry();
    assert!(matches!(header.version, 2 | 3));
    assert!(header.incompatible.unknown().is_empty());
    assert!(u64::from(header.l1_entries) * 8 <= limits::MAX_L1_SIZE_BYTES);
    assert!(u64::from(header.l1_entries) >= geometry.l1_entries_for(header.size_bytes));
    assert!(header.snapshot_count <= limits::MAX_SNAPSHOTS);
    let refcount_table = u64::from(header.refcount_table_clusters) * geometry.cluster_size_bytes();
    assert!(refcount_table <= limits::MAX_REFCOUNT_TABLE_SIZE_BYTES);
    for offset in [
        header.l1_table_offset,
        header.refcount_table_offset,
        header.snapshots_offset,
    ] {
        assert!(geometry.is_cluster_aligned(offset.bytes()));
    }
    if let Some(name) = &header.backing_file {
        assert!(!name.is_empty() && !name.contains(&0));
        assert!(name.len() <= limits::MAX_BACKING_FILE_LEN_BYTES as usize);
    }
}

/// Byte 0 chooses the cluster size, byte 1 what the header says; the rest is the
/// extension area.
///
/// - The extensions that were decoded survive encoding, in their order.
/// - Encoding adds nothing but padding and the end marker.
pub fn check_extensions(data: &[u8]) {
    let Some(([size, flags], area)) = data.split_first_chunk() else {
        return;
    };
    let context = Context {
        cluster_size_bytes: 1 << (limits::MIN_CLUSTER_BITS + u32::from(*size) % 13),
        crypt_method: match flags & 3 {
            0 => CryptMethod::None,
            1 => CryptMethod::Aes,
            _ => CryptMethod::Luks,
        },
        bitmaps_consistent: flags & 4 != 0,
    };
    let Ok(extensions) = extension::decode_all(area, &context) else {
        return;
    };
    let mut encoded = Vec::new();
    for extension in &extensions {
        extension.encode(&mut encoded);
    }
    assert!(encoded.len() <= area.len().next_multiple_of(8));
    extension::encode_end(&mut encoded);
    assert_eq!(
        extension::decode_all(&encoded, &context).as_ref(),
        Ok(&extensions)
    );
}

/// The geometry that two bytes stand for; any two stand for one.
fn geometry(size: u8, flags: u8) -> Geometry {
    let cluster_bits = limits::MIN_CLUSTER_BITS + u32::from(size) % 13;
    if flags & 1 != 0 {
        let order = limits::DEFAULT_REFCOUNT_ORDER;
        return Geometry::new(2, cluster_bits, false, order, false).expect("version 2");
    }
    let extended_l2 = flags & 2 != 0 && cluster_bits >= limits::MIN_EXTENDED_L2_CLUSTER_BITS;
    let refcount_order = u32::from(flags >> 4) % 7;
    let external_data = flags & 4 != 0;
    Geometry::new(3, cluster_bits, extended_l2, refcount_order, external_data)
        .expect("a geometry within the limits")
}

/// Splits the bytes of a target that begins with a geometry.
fn with_geometry(data: &[u8]) -> Option<(Geometry, &[u8])> {
    let ([size, flags], rest) = data.split_first_chunk()?;
    Some((geometry(*size, *flags), rest))
}

/// Geometry, then an L1 table.
///
/// - A decoded offset starts a cluster and is below 2^56.
/// - The entry made from offset and flag decodes to the same and has no reserved bits.
/// - Entries are read and written at the same place; none beyond the end.
pub fn check_l1_table(data: &[u8]) {
    let Some((geometry, table)) = with_geometry(data) else {
        return;
    };
    let mut copy = table.to_vec();
    let count = table.len() / 8;
    assert_eq!(L1Entry::read(table, count), None);
    assert!(!L1Entry::UNALLOCATED.write(&mut copy, count));
    for index in 0..count {
        let entry = L1Entry::read(table, index).expect("an entry inside the table");
        assert!(entry.write(&mut copy, index));
        let Ok(offset) = entry.decode(&geometry) else {
            continue;
        };
        assert_eq!(entry.l2_offset(), offset);
        let Some(offset) = offset else { continue };
        assert!(geometry.is_cluster_aligned(offset.bytes()));
        assert!(offset.bytes() < limits::HOST_OFFSET_END);
        let again = L1Entry::new(offset, entry.copied());
        assert_eq!(again.decode(&geometry), Ok(Some(offset)));
        assert_eq!((again.copied(), again.reserved_bits()), (entry.copied(), 0));
    }
    assert_eq!(copy, table);
}

/// Geometry, then an L2 table.
///
/// - `decode(encode(decode(x))) == decode(x)`, without reserved bits.
/// - A host cluster starts a cluster below 2^56.
/// - Each kind of mapping appears only in images that can hold it; no subcluster
///   is both data and zero; data has a host cluster.
/// - Entries are read and written at the same place; none beyond the end.
pub fn check_l2_table(data: &[u8]) {
    let Some((geometry, table)) = with_geometry(data) else {
        return;
    };
    let mut copy = table.to_vec();
    let count = table.len() / geometry.l2_entry_size_bytes() as usize;
    assert_eq!(L2Entry::read(table, count, &geometry), None);
    assert!(!L2Entry::UNALLOCATED.write(&mut copy, count, &geometry));
    for index in 0..count {
        let entry = L2Entry::read(table, index, &geometry).expect("an entry inside the table");
        assert!(entry.write(&mut copy, index, &geometry));
        let Ok(mapping) = entry.decode(&geometry) else {
            continue;
        };
        check_mapping(mapping, &geometry);
        let encoded = mapping.encode(&geometry);
        assert_eq!(encoded.reserved_bits(), 0);
        assert_eq!(encoded.decode(&geometry), Ok(mapping));
    }
    assert_eq!(copy, table);
}

fn check_mapping(mapping: Mapping, geometry: &Geometry) {
    if let Some(host) = mapping.host() {
        assert!(geometry.is_cluster_aligned(host.bytes()));
        assert!(host.bytes() < limits::HOST_OFFSET_END);
        assert!(host.bytes() != 0 || geometry.external_data);
    } else {
        assert!(!mapping.copied());
    }
    match mapping {
        Mapping::Unallocated => {}
        Mapping::Zero { .. } => assert!(!geometry.extended_l2 && geometry.version >= 3),
        Mapping::Data { .. } => assert!(!geometry.extended_l2),
        Mapping::Compressed(_) => assert!(!geometry.external_data),
        Mapping::Subclusters {
            host,
            allocated,
            zero,
            ..
        } => {
            assert!(geometry.extended_l2);
            assert_eq!(allocated & zero, 0);
            assert!(allocated == 0 || host.is_some());
        }
    }
}

/// Cluster size, then descriptors of 8 bytes.
///
/// - `decode(encode(decode(x))) == decode(x)`.
/// - The data starts below 2^56, has between 1 byte and two clusters, and ends
///   with a sector.
/// - The descriptor made from offset and length is the same one.
pub fn check_compressed(data: &[u8]) {
    let Some((size, rest)) = data.split_first() else {
        return;
    };
    let cluster_bits = geometry(*size, 0).cluster_bits;
    for entry in rest.as_chunks::<8>().0 {
        let entry = u64::from_be_bytes(*entry);
        let Ok(descriptor) = CompressedDescriptor::decode(entry, cluster_bits) else {
            continue;
        };
        let offset = descriptor.host_offset;
        let length = descriptor.max_len_bytes();
        assert!(offset.bytes() < limits::HOST_OFFSET_END);
        assert!(length >= 1 && length <= 2 << cluster_bits);
        assert_eq!(
            descriptor.end().bytes() % limits::COMPRESSED_SECTOR_BYTES,
            0
        );
        let encoded = descriptor.encode(cluster_bits);
        assert_eq!(
            CompressedDescriptor::decode(encoded, cluster_bits),
            Ok(descriptor)
        );
        let made = CompressedDescriptor::new(offset, length, cluster_bits);
        assert_eq!(made, Ok(descriptor));
    }
}

/// Geometry, then a refcount table.
///
/// - A decoded offset starts a cluster and is below 2^56.
/// - The entry made from it decodes to the same and has no reserved bits.
pub fn check_refcount_table(data: &[u8]) {
    let Some((geometry, table)) = with_geometry(data) else {
        return;
    };
    let mut copy = table.to_vec();
    for index in 0..table.len() / 8 {
        let entry = RefcountTableEntry::read(table, index).expect("an entry inside the table");
        assert!(entry.write(&mut copy, index));
        let Ok(Some(offset)) = entry.decode(&geometry) else {
            continue;
        };
        assert!(geometry.is_cluster_aligned(offset.bytes()));
        assert!(offset.bytes() < limits::HOST_OFFSET_END);
        let again = RefcountTableEntry::new(offset);
        assert_eq!(again.decode(&geometry), Ok(Some(offset)));
        assert_eq!(again.reserved_bits(), 0);
    }
    assert_eq!(copy, table);
}

/// Order, then changes of 9 bytes (index and value), applied to a block of 64 bytes.
///
/// - A change is refused exactly if index or value are out of range.
/// - Afterwards the block holds what was set, and every other count is unchanged.
pub fn check_refcount_block(data: &[u8]) {
    let Some((order, changes)) = data.split_first() else {
        return;
    };
    let order = u32::from(*order) % 7;
    let mut block = [0xa5u8; 64];
    let count = (block.len() * 8) >> order;
    let max = u64::MAX >> (64 - (1u32 << order));
    let mut model: Vec<u64> = (0..count)
        .map(|at| refcount::get(&block, order, at))
        .collect();
    for change in changes.chunks_exact(9).take(64) {
        let index = usize::from(change[0]) * 3;
        let value = change[1..]
            .iter()
            .fold(0, |value, &byte| (value << 8) | u64::from(byte));
        let accepted = refcount::set(&mut block, order, index, value);
        assert_eq!(accepted, index < count && value <= max);
        if accepted {
            model[index] = value;
        }
        let now: Vec<u64> = (0..count)
            .map(|at| refcount::get(&block, order, at))
            .collect();
        assert_eq!(now, model);
    }
    assert_eq!(refcount::get(&block, order, count), 0);
}

/// Number of snapshots in 2 bytes, then a snapshot table.
///
/// - `decode(encode(decode(x))) == decode(x)`.
/// - Exactly as many entries as asked for come from bytes that are there.
/// - What decodes can be encoded.
pub fn check_snapshot_table(data: &[u8]) {
    let Some((count, table)) = data.split_first_chunk() else {
        return;
    };
    let count = u32::from(u16::from_be_bytes(*count));
    let Ok((entries, used)) = snapshot::decode_table(table, count) else {
        return;
    };
    assert!(used <= table.len());
    assert_eq!(entries.len(), count as usize);
    let encoded = snapshot::encode_table(&entries).expect("what decodes can be encoded");
    let len = encoded.len();
    assert_eq!(snapshot::decode_table(&encoded, count), Ok((entries, len)));
}

/// Geometry, number of bitmaps in 2 bytes, size of the disk in 8 bytes, then a
/// bitmap directory.
///
/// - `encode(decode(x))` has the length of `x` and decodes to the same.
/// - Names are unique, not empty and at most 1023 bytes long; tables are within
///   the limits.
pub fn check_bitmap_directory(data: &[u8]) {
    let Some((geometry, rest)) = with_geometry(data) else {
        return;
    };
    let Some((count, rest)) = rest.split_first_chunk() else {
        return;
    };
    let Some((size, directory)) = rest.split_first_chunk() else {
        return;
    };
    let count = u32::from(u16::from_be_bytes(*count));
    let size = u64::from_be_bytes(*size);
    let decode = |bytes| bitmap::decode_directory(bytes, count, &geometry, size);
    let Ok(entries) = decode(directory) else {
        return;
    };
    assert_eq!(entries.len(), count as usize);
    for entry in &entries {
        check_bitmap_entry(entry, &geometry);
    }
    let encoded = bitmap::encode_directory(&entries, &geometry, size).expect("encodable");
    assert_eq!(encoded.len(), directory.len());
    assert_eq!(decode(&encoded), Ok(entries));
}

fn check_bitmap_entry(entry: &BitmapDirectoryEntry, geometry: &Geometry) {
    let name_len = entry.name.len();
    assert!((1..=usize::from(limits::MAX_BITMAP_NAME_LEN_BYTES)).contains(&name_len));
    assert!((1..=limits::MAX_BITMAP_TABLE_ENTRIES).contains(&entry.table_entries));
    assert!(geometry.is_cluster_aligned(entry.table_offset.bytes()));
    assert!(entry.table_offset.bytes() != 0);
}

/// Geometry, then a bitmap table.
///
/// - What decodes encodes to exactly the same entry.
pub fn check_bitmap_table(data: &[u8]) {
    let Some((geometry, table)) = with_geometry(data) else {
        return;
    };
    for index in 0..table.len() / 8 {
        let entry = BitmapTableEntry::read(table, index).expect("an entry inside the table");
        if let Ok(cluster) = entry.decode(&geometry) {
            assert_eq!(cluster.encode(), entry);
        }
    }
}

/// Cluster size, then the pointer to the encryption header.
///
/// - What decodes encodes to exactly the same bytes, and starts a cluster.
pub fn check_encryption_header(data: &[u8]) {
    let Some((size, data)) = data.split_first() else {
        return;
    };
    let cluster_size = geometry(*size, 0).cluster_size_bytes();
    if let Ok(pointer) = EncryptionHeaderPointer::decode(data, cluster_size) {
        assert_eq!(pointer.encode().as_slice(), data);
        assert!(pointer.offset.is_aligned(cluster_size));
    }
}

/// Whether a LUKS header stands apart, then the header.
///
/// - `decode(encode(decode(x))) == decode(x)`, and its file looks like LUKS.
/// - No key slot overlaps the header, another one, or the payload.
/// - A suite that is understood has keys as long as the header says, and its words
///   lead back to it.
pub fn check_luks_header(data: &[u8]) {
    let Some((detached, data)) = data.split_first() else {
        return;
    };
    let detached = detached & 1 == 1;
    let header = match LuksHeader::decode(data, detached) {
        Ok(header) => header,
        Err(error) => {
            assert!(!error.message().is_empty());
            return;
        }
    };
    assert!(luks::is_luks(data));
    let encoded = header.encode().expect("what decodes fits");
    assert_eq!(encoded.len(), luks::HEADER_SIZE_BYTES);
    assert_eq!(LuksHeader::decode(&encoded, detached).as_ref(), Ok(&header));
    let length = luks::key_material_sectors(header.key_bytes, luks::STRIPES);
    let mut starts = header.slots.map(|slot| u64::from(slot.key_offset_sectors));
    starts.sort_unstable();
    assert!(starts[0] * luks::SECTOR_SIZE_BYTES >= luks::HEADER_SIZE_BYTES as u64);
    assert!(starts.windows(2).all(|pair| pair[0] + length <= pair[1]));
    assert!(detached || starts[7] + length <= u64::from(header.payload_offset_sectors));
    if let Ok(suite) = header.suite() {
        assert_eq!(suite.key_bytes(), header.key_bytes as usize);
        let words = LuksHeader {
            cipher_name: suite.cipher.family().into(),
            cipher_mode: suite.mode_spec(),
            ..header
        };
        assert_eq!(words.suite(), Ok(suite));
    }
}

/// - What decodes encodes to exactly the same bytes; its name is within the limits.
pub fn check_write_log_extension(data: &[u8]) {
    let Ok(extension) = WriteLogExtension::decode(data) else {
        return;
    };
    assert!((1..=write_log::MAX_NAME_LEN_BYTES).contains(&extension.name.len()));
    assert_eq!(extension.encode(), data);
}

/// A superblock as it is, and with the checksum that it should have.
///
/// - `decode(encode(decode(x))) == decode(x)`, and a decoded one is within the limits.
/// - With the magic and the right checksum there is a superblock, or an error.
/// - A bit that changes in a superblock is noticed.
pub fn check_write_log_superblock(data: &[u8]) {
    let _ = Superblock::decode(data);
    let mut block = data.to_vec();
    let Some(whole) = block.get_mut(..72) else {
        return;
    };
    let crc = crc32c(&[&whole[..12], &whole[16..]].concat());
    whole[12..16].copy_from_slice(&crc.to_be_bytes());
    let has_magic = whole[..8] == *b"VLLMWLOG";
    let Ok(decoded) = Superblock::decode(&block) else {
        return assert!(has_magic);
    };
    assert_eq!(decoded.is_some(), has_magic);
    let Some(superblock) = decoded else { return };
    assert!((write_log::MIN_LEN_BYTES..=write_log::MAX_LEN_BYTES).contains(&superblock.len_bytes));
    assert!(superblock.start_bytes < superblock.len_bytes);
    assert!(superblock.start_bytes >= write_log::RING_START_BYTES);
    for place in [superblock.len_bytes, superblock.start_bytes] {
        assert_eq!(place % write_log::BLOCK_BYTES, 0);
    }
    let numbers = superblock.start_sequence | superblock.start_batch;
    assert!(numbers < write_log::NUMBERS_END);
    assert!(superblock.generation < write_log::GENERATIONS_END);
    assert_eq!(
        Superblock::decode(&superblock.encode()),
        Ok(Some(superblock))
    );
    let changed = usize::from(block[71]) % 72;
    block[changed] ^= 1;
    assert_eq!(Superblock::decode(&block), Ok(None));
}

/// A record and its payload as they are, and with the checksum that they should have.
///
/// - `decode(encode(decode(x))) == decode(x)`, which has the length that it says.
/// - The range is within the limits, and the payload inside the bytes.
/// - The generation is what the last bytes of the head say.
/// - A bit that changes in a record is noticed.
pub fn check_write_log_record(data: &[u8]) {
    let _ = RecordHead::decode(data);
    let mut raw = data.to_vec();
    let Some((head, rest)) = raw.split_first_chunk_mut::<64>() else {
        return;
    };
    let len_bytes = u64::from_be_bytes(*head[48..].first_chunk().expect("inside the head"));
    let payload_bytes = match head[56] {
        1 => usize::try_from(len_bytes).unwrap_or(usize::MAX),
        _ => 0,
    };
    let payload = rest.get(..payload_bytes).unwrap_or_default().to_vec();
    let crc = crc32c(&[&head[..4], &head[8..], &payload].concat());
    head[4..8].copy_from_slice(&crc.to_be_bytes());
    let Some(record) = RecordHead::decode(&raw) else {
        return;
    };
    assert!((1..=write_log::MAX_RECORD_BYTES).contains(&record.len_bytes));
    assert!(record.guest_offset_bytes + record.len_bytes <= limits::MAX_SIZE_BYTES);
    assert_eq!(record.payload_bytes(), payload.len());
    assert_eq!(record.generation.to_be_bytes()[2..], data[58..64]);
    let mut encoded = Vec::new();
    record.encode(&payload, &mut encoded);
    assert_eq!(encoded.len(), RecordHead::record_bytes(payload.len()));
    assert_eq!(RecordHead::decode(&encoded), Some(record));
    let end = write_log::RECORD_HEAD_BYTES + payload.len();
    raw[usize::from(data[63]) % end] ^= 1;
    assert_eq!(RecordHead::decode(&raw), None);
}

/// CRC32C, bit by bit: another implementation than the decoders have.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ (0x82f6_3b78 * (crc & 1))
        })
    })
}

//! The check of checksums: superblock, entries, pages.

use vellum_format::checksums::{
    Entry, PAGE_BYTES, SUMS_PER_PAGE, Superblock, decode_page, encode_page,
};

/// The bytes as a superblock, also with the checksum that it should have, as an entry and as a page.
///
/// - `decode(encode(decode(x))) == decode(x)`; a bit that changes in a superblock is noticed.
/// - An entry means that its page counts, or nothing.
pub fn check(data: &[u8]) {
    let _ = Superblock::decode(data);
    let mut page = data.to_vec();
    page.resize(PAGE_BYTES as usize, 0);
    let crc = super::crc32c(&[&page[..12], &page[16..48]].concat());
    page[12..16].copy_from_slice(&crc.to_be_bytes());
    if let Ok(Some(superblock)) = Superblock::decode(&page) {
        let mut encoded = superblock.encode();
        assert_eq!(Superblock::decode(&encoded), Ok(Some(superblock)));
        let bit = usize::from(page[48]) % (48 * 8);
        encoded[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(Superblock::decode(&encoded), Ok(None));
    }
    if let Some(raw) = data.first_chunk() {
        let entry = Entry::decode(*raw);
        assert_eq!(Entry::decode(entry.encode()), entry);
    }
    let sums: Vec<u32> = decode_page(&page).collect();
    assert_eq!(sums.len() as u64, SUMS_PER_PAGE);
    assert_eq!(encode_page(sums), page);
}

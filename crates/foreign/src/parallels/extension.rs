//! The format extension of a Parallels image, read for its dirty bitmaps.
//!
//! Bytes are hostile: a table of places is as long as the extension's cluster has room for at most, a place
//! has to be inside the file, and every bit of a bitmap stands for a part of the disk.

use std::ops::Range;

use md5::{Digest, Md5};
use vellum::{Error, ErrorKind, Result, Storage};

use super::Header;
use super::header::SECTOR_BYTES;
use crate::facts::StoredBitmap;
use crate::fields::{array, le32, le64, read_at};

const MAGIC: u64 = 0xab23_4cef_23dc_ea87;
const DIRTY_BITMAP: u64 = 0x2038_5fae_252c_b34a;
/// The magic and the checksum of what follows them.
const HEAD_BYTES: usize = 24;
const FEATURE_BYTES: usize = 24;
/// A bitmap's size, identifier, granularity and number of places.
const BITMAP_BYTES: usize = 32;
/// Far more than any program makes clusters.
const MOST_CLUSTER_BYTES: u64 = 64 << 20;
/// Pieces of dirty ranges of all bitmaps, which take 16 bytes each.
const MOST_RANGES: usize = 4 << 20;

fn invalid(message: &str) -> Error {
    Error::new(ErrorKind::InvalidImage, "open", message)
}

/// A bitmap before its bits are read.
#[derive(Debug, PartialEq, Eq)]
struct Described {
    name: String,
    granularity_bytes: u64,
    /// By cluster of bits: none dirty, all, or where they are, in sectors.
    places: Vec<u64>,
}

/// The bitmaps of an image; none where it has no extension.
///
/// # Errors
/// [`ErrorKind::InvalidImage`] for an extension that is damaged; else what the storage says.
pub(super) async fn read_bitmaps(file: &dyn Storage, header: &Header) -> Result<Vec<StoredBitmap>> {
    if header.extension_sectors == 0 {
        return Ok(Vec::new());
    }
    let cluster_bytes = header.cluster_bytes();
    if cluster_bytes > MOST_CLUSTER_BYTES {
        return Err(invalid("the format extension is too large"));
    }
    let at_bytes = header.extension_sectors.saturating_mul(SECTOR_BYTES);
    if at_bytes >= file.len_bytes()? {
        return Err(invalid("the format extension is not in the file"));
    }
    let cluster = read_at(file, at_bytes, cluster_bytes as usize).await?;
    let mut bitmaps = Vec::new();
    let mut room = MOST_RANGES;
    for described in decode(&cluster, header.size_bytes)? {
        let dirty = read_bits(file, header, &described, room).await?;
        room -= dirty.len();
        bitmaps.push(StoredBitmap {
            name: described.name,
            granularity_bytes: described.granularity_bytes,
            dirty,
        });
    }
    Ok(bitmaps)
}

/// The bitmaps that an extension's cluster describes. Other features are passed over: what is only read
/// needs none of them.
fn decode(cluster: &[u8], size_bytes: u64) -> Result<Vec<Described>> {
    if le64(cluster, 0) != Some(MAGIC) {
        return Err(invalid("the format extension has a wrong magic"));
    }
    let (sum, content) = (array::<16>(cluster, 8), cluster.get(HEAD_BYTES..));
    let content = content.unwrap_or_default();
    if sum != Some(Md5::digest(content).into()) {
        return Err(invalid("the checksum of the format extension is wrong"));
    }
    let mut bitmaps = Vec::new();
    let mut rest = content;
    loop {
        let short = || invalid("the format extension has no end");
        let kind = le64(rest, 0).ok_or_else(short)?;
        let len = le32(rest, 16).ok_or_else(short)? as usize;
        if kind == 0 {
            return Ok(bitmaps);
        }
        let data = rest.get(FEATURE_BYTES..).and_then(|rest| rest.get(..len));
        let data = data.ok_or_else(short)?;
        if kind == DIRTY_BITMAP {
            bitmaps.push(decode_bitmap(data, size_bytes)?);
        }
        let next = FEATURE_BYTES + len.next_multiple_of(8);
        rest = rest.get(next..).ok_or_else(short)?;
    }
}

fn decode_bitmap(data: &[u8], size_bytes: u64) -> Result<Described> {
    let fail = || invalid("a dirty bitmap of the format extension is invalid");
    let size_sectors = le64(data, 0).ok_or_else(fail)?;
    let id = array::<16>(data, 8).ok_or_else(fail)?;
    let granularity = le32(data, 24).ok_or_else(fail)?;
    let count = le32(data, 28).ok_or_else(fail)? as usize;
    let table = data.get(BITMAP_BYTES..).unwrap_or_default();
    let is_whole = table.len() / 8 == count && table.len().is_multiple_of(8);
    let is_of_disk = size_sectors.checked_mul(SECTOR_BYTES) == Some(size_bytes);
    if !is_whole || !is_of_disk || !granularity.is_power_of_two() {
        return Err(fail());
    }
    let places = (0..count).filter_map(|index| le64(table, index * 8));
    Ok(Described {
        name: uuid(&id),
        granularity_bytes: u64::from(granularity) * SECTOR_BYTES,
        places: places.collect(),
    })
}

/// As programs write such identifiers: in groups, in the order of the bytes.
fn uuid(id: &[u8; 16]) -> String {
    let mut text = String::new();
    for (at, byte) in id.iter().enumerate() {
        if matches!(at, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

/// The dirty ranges of a bitmap, in bytes of the disk, in order and joined; at most `most` of them.
async fn read_bits(
    file: &dyn Storage,
    header: &Header,
    bitmap: &Described,
    most: usize,
) -> Result<Vec<Range<u64>>> {
    let fail = || invalid("a dirty bitmap of the format extension is invalid");
    let cluster_bytes = header.cluster_bytes();
    let bits = header.size_bytes.div_ceil(bitmap.granularity_bytes);
    let bits_of_cluster = cluster_bytes * 8;
    if bits.div_ceil(bits_of_cluster) != bitmap.places.len() as u64 {
        return Err(fail());
    }
    let len_bytes = file.len_bytes()?;
    let mut runs = Runs::default();
    for (number, &place) in (0..).zip(&bitmap.places) {
        let first = number * bits_of_cluster;
        let here = bits_of_cluster.min(bits - first);
        match place {
            0 => {}
            1 => runs.add(first..first + here),
            sectors => {
                let at_bytes = sectors.checked_mul(SECTOR_BYTES).ok_or_else(fail)?;
                if at_bytes >= len_bytes {
                    return Err(fail());
                }
                let bytes = read_at(file, at_bytes, here.div_ceil(8) as usize).await?;
                let is_dirty = |bit: u64| {
                    let byte = bytes.get((bit / 8) as usize);
                    byte.is_some_and(|byte| byte >> (bit % 8) & 1 == 1)
                };
                for bit in (0..here).filter(|bit| is_dirty(*bit)) {
                    runs.add(first + bit..first + bit + 1);
                    if runs.0.len() > most {
                        return Err(invalid("the dirty bitmaps have too many ranges"));
                    }
                }
            }
        }
    }
    let bytes = |bit: u64| (bit * bitmap.granularity_bytes).min(header.size_bytes);
    let ranges = runs.0.iter().map(|run| bytes(run.start)..bytes(run.end));
    Ok(ranges.collect())
}

/// Ranges in order, of which neighbours are one.
#[derive(Debug, Default)]
struct Runs(Vec<Range<u64>>);

impl Runs {
    fn add(&mut self, range: Range<u64>) {
        match self.0.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => self.0.push(range),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;
    use vellum_io::lane::block_on;
    use vellum_storage::MemStorage;

    use super::super::{CreateOptions, create};
    use super::*;
    use crate::fields::write_at;

    const ID: [u8; 16] = *b"0123456789abcdef";

    /// An extension with what stands between its head and its end.
    fn extension(features: &[u8], cluster_bytes: usize) -> Vec<u8> {
        let mut cluster = vec![0; HEAD_BYTES];
        cluster.extend(features);
        cluster.resize(cluster_bytes, 0);
        let sum = Md5::digest(&cluster[HEAD_BYTES..]);
        cluster[..8].copy_from_slice(&MAGIC.to_le_bytes());
        cluster[8..24].copy_from_slice(&sum);
        cluster
    }

    fn feature(kind: u64, data: &[u8]) -> Vec<u8> {
        let mut bytes = kind.to_le_bytes().to_vec();
        bytes.extend([0; 8]);
        bytes.extend((data.len() as u32).to_le_bytes());
        bytes.extend([0; 4]);
        bytes.extend(data);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        bytes
    }

    fn bitmap(size_sectors: u64, granularity: u32, places: &[u64]) -> Vec<u8> {
        let mut data = size_sectors.to_le_bytes().to_vec();
        data.extend(ID);
        data.extend(granularity.to_le_bytes());
        data.extend((places.len() as u32).to_le_bytes());
        data.extend(places.iter().flat_map(|place| place.to_le_bytes()));
        feature(DIRTY_BITMAP, &data)
    }

    #[test]
    fn an_image_gives_its_bitmaps_when_it_is_only_read() {
        block_on(async {
            let file: Arc<dyn Storage> = Arc::new(MemStorage::new());
            let options = CreateOptions::default()
                .size_bytes(40 << 20)
                .cluster_size_bytes(4096);
            create(&file, &options).await.unwrap();
            let end = file.len_bytes().unwrap().next_multiple_of(4096);
            // A bit for each sector: three clusters of bits, of which the last one is not full.
            let sectors = (40 << 20) / 512_u64;
            let bits_at = end / 512 + 8;
            let places = [0, bits_at, 1];
            let known = bitmap(sectors, 1, &places);
            let unknown = feature(77, b"what nobody knows");
            let cluster = extension(&[unknown, known].concat(), 4096);
            write_at(&*file, end, &cluster).await.unwrap();
            let mut bits = vec![0; 4096];
            (bits[0], bits[1], bits[4095]) = (0b1000_0001, 0b1, 0x80);
            write_at(&*file, end + 4096, &bits).await.unwrap();
            write_at(&*file, 56, &(end / 512).to_le_bytes())
                .await
                .unwrap();

            let header = super::super::read(&*file).await.unwrap();
            let found = read_bitmaps(&*file, &header).await.unwrap();
            let first = 4096 * 8;
            let bit = |number: u64| (first + number) * 512;
            let dirty = vec![
                bit(0)..bit(1),
                bit(7)..bit(9),
                // Up to the last cluster of bits, which is all dirty.
                bit(first - 1)..40 << 20,
            ];
            assert_eq!(
                found,
                [StoredBitmap {
                    name: "30313233-3435-3637-3839-616263646566".to_owned(),
                    granularity_bytes: 512,
                    dirty,
                }]
            );
        });
    }

    #[test]
    fn what_is_damaged_is_refused() {
        let good = bitmap(8, 1, &[1]);
        assert_eq!(decode(&extension(&good, 512), 4096).unwrap().len(), 1);
        let mut wrong_sum = extension(&good, 512);
        wrong_sum[100] ^= 1;
        for (cluster, size_bytes) in [
            (wrong_sum, 4096),
            (vec![0; 512], 4096),
            (extension(&good, 512), 8192),
            (extension(&bitmap(8, 3, &[1]), 512), 4096),
            // No end.
            (extension(&good, 24 + good.len()), 4096),
            (Vec::new(), 4096),
        ] {
            let error = decode(&cluster, size_bytes).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidImage);
        }
    }

    proptest! {
        #[test]
        fn any_features_give_bitmaps_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode(&extension(&bytes, 256), 4096);
        }
    }
}

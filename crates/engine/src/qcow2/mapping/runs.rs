//! Runs of plain L2 entries: what most images are made of, dealt with many at a time.

use vellum_format::Geometry;

/// The only bit that a plain entry has beside its offset.
const COPIED: u64 = 1 << 63;

/// Entries that lie side by side and lead to clusters that do, or nowhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct EntryRun {
    pub(crate) entries: usize,
    /// Where the first leads; 0: all lead nowhere.
    pub(crate) offset_bytes: u64,
    /// The copied flag that all of them have.
    pub(crate) copied: bool,
}

impl EntryRun {
    /// The first entry is of another kind.
    pub(crate) const NONE: EntryRun = EntryRun {
        entries: 0,
        offset_bytes: 0,
        copied: false,
    };
}

/// The first entries of a table, as far as they are all 0, or all lead to whole
/// clusters below `end_bytes`, one behind the other, with the same copied flag.
/// Entries of 8 bytes only.
pub(crate) fn first_run(table: &[u8], geometry: &Geometry, end_bytes: u64) -> EntryRun {
    let mut entries = table
        .chunks_exact(8)
        .map(|entry| u64::from_be_bytes(entry.try_into().unwrap_or_default()));
    let Some(first) = entries.next() else {
        return EntryRun::NONE;
    };
    let cluster = geometry.cluster_size_bytes();
    let offset_bytes = first & !COPIED;
    if first == 0 {
        return EntryRun {
            entries: 1 + entries.take_while(|&entry| entry == 0).count(),
            ..EntryRun::NONE
        };
    }
    let below = end_bytes.saturating_sub(offset_bytes) / cluster;
    let is_plain = offset_bytes != 0 && geometry.is_cluster_aligned(offset_bytes) && below > 0;
    if !is_plain {
        return EntryRun::NONE;
    }
    let next = (1..below).map(|index| first + index * cluster);
    let following = entries.zip(next).take_while(|(entry, next)| entry == next);
    EntryRun {
        entries: 1 + following.count(),
        offset_bytes,
        copied: first & COPIED != 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GEOMETRY: Geometry = Geometry {
        cluster_bits: 16,
        extended_l2: false,
        refcount_order: 4,
        version: 3,
        external_data: false,
    };

    fn run(entries: &[u64]) -> (usize, u64) {
        let bytes: Vec<u8> = entries
            .iter()
            .flat_map(|entry| entry.to_be_bytes())
            .collect();
        let run = first_run(&bytes, &GEOMETRY, 0x10_0000);
        let copied = run.offset_bytes != 0 && entries[0] & COPIED != 0;
        assert_eq!(run.copied, copied);
        (run.entries, run.offset_bytes)
    }

    fn plain(offset: u64) -> u64 {
        COPIED | offset
    }

    #[test]
    fn a_run_ends_with_what_does_not_follow() {
        let (a, b, far) = (plain(0x5_0000), plain(0x6_0000), plain(0x9_0000));
        assert_eq!(run(&[a, b, far]), (2, 0x5_0000));
        assert_eq!(run(&[b, a]), (1, 0x6_0000));
        assert_eq!(run(&[0, 0, a]), (2, 0));
        assert_eq!(run(&[]), (0, 0));
    }

    #[test]
    fn entries_of_a_run_agree_about_the_copied_flag() {
        assert_eq!(run(&[0x5_0000, 0x6_0000, 0x8_0000]), (2, 0x5_0000));
        assert_eq!(run(&[0x5_0000, plain(0x6_0000)]), (1, 0x5_0000));
        assert_eq!(run(&[plain(0x5_0000), 0x6_0000]), (1, 0x5_0000));
    }

    #[test]
    fn what_is_not_plain_begins_no_run() {
        let odd = [
            plain(0x5_0200),
            plain(0x5_0001),
            plain(0x5_0000) | 1 << 62,
            plain(0x5_0000) | 1 << 56,
            COPIED,
            1,
            plain(0x10_0000),
        ];
        for entry in odd {
            assert_eq!(run(&[entry, entry]), (0, 0), "{entry:#x}");
        }
        let last = plain(0xf_0000);
        assert_eq!(
            run(&[last, plain(0x10_0000)]),
            (1, 0xf_0000),
            "the file ends"
        );
    }
}

//! A part of a list of buffers, taken out to be filled and put back without a copy.

use vellum_io::{Buffer, Buffers};

/// Buffers with a part set apart.
#[derive(Debug)]
pub(super) struct SplitBuffers {
    before: Buffers,
    /// The part.
    pub(super) part: Buffers,
    after: Buffers,
    /// The part begins, and ends, inside a buffer.
    split_before: bool,
    split_after: bool,
}

/// Sets `len_bytes` bytes from `from_bytes` on apart; they must be there.
pub(super) fn cut(buffers: Buffers, from_bytes: usize, len_bytes: usize) -> SplitBuffers {
    let mut cut = SplitBuffers {
        before: Buffers::new(),
        part: Buffers::new(),
        after: Buffers::new(),
        split_before: false,
        split_after: false,
    };
    if len_bytes == 0 {
        cut.before = buffers;
        return cut;
    }
    let (mut skip, mut rest) = (from_bytes, len_bytes);
    for mut buffer in buffers {
        if skip > 0 && skip >= buffer.len() {
            skip -= buffer.len();
            cut.before.push(buffer);
            continue;
        }
        if skip > 0 {
            cut.before.push(buffer.split_to(skip));
            cut.split_before = true;
            skip = 0;
        }
        if rest == 0 {
            cut.after.push(buffer);
            continue;
        }
        if rest < buffer.len() {
            cut.part.push(buffer.split_to(rest));
            cut.after.push(buffer);
            cut.split_after = true;
            rest = 0;
            continue;
        }
        rest -= buffer.len();
        cut.part.push(buffer);
    }
    debug_assert_eq!((skip, rest), (0, 0));
    cut
}

impl SplitBuffers {
    /// The buffers as they were, with what the part holds now.
    pub(super) fn rejoin(self) -> Buffers {
        let mut whole = self.before;
        append(&mut whole, self.part, self.split_before);
        append(&mut whole, self.after, self.split_after);
        whole
    }
}

/// Appends `more`; its first piece was one with the last of `whole` if `split`.
fn append(whole: &mut Buffers, more: Buffers, split: bool) {
    let mut more = more.into_iter();
    if split && let (Some(last), Some(first)) = (whole.pop(), more.next()) {
        whole.push(Buffer::join_all([last, first]));
    }
    whole.extend(more);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_keep_their_shape_and_place() {
        let make = || -> Buffers {
            [5, 0, 3, 8]
                .into_iter()
                .map(|len: usize| Buffer::copy_of(&vec![b'.'; len]))
                .collect()
        };
        for from in 0..=16 {
            for len in 0..=16 - from {
                let buffers = make();
                let places: Vec<_> = buffers
                    .iter()
                    .map(|one| (one.as_ptr(), one.len()))
                    .collect();
                let mut cut = cut(buffers, from, len);
                let part: usize = cut.part.iter().map(|one| one.len()).sum();
                assert_eq!(part, len);
                cut.part.iter_mut().for_each(|one| one.fill(b'x'));
                let whole = cut.rejoin();
                let after: Vec<_> = whole.iter().map(|one| (one.as_ptr(), one.len())).collect();
                let real = |list: &[(*const u8, usize)]| -> Vec<_> {
                    list.iter().copied().filter(|(_, len)| *len > 0).collect()
                };
                assert_eq!(real(&after), real(&places), "{from} {len}");
                assert_eq!(after.len(), places.len());
                let bytes: Vec<u8> = whole.iter().flat_map(|one| one.to_vec()).collect();
                let mut expected = vec![b'.'; 16];
                expected[from..from + len].fill(b'x');
                assert_eq!(bytes, expected);
            }
        }
    }
}

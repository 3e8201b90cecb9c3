//! Reads that end behind the end of a file: what lies there are zeroes, and nobody is asked for it.

use vellum_io::{Buffer, Buffers};

/// The buffers of a read that lie behind the end.
#[derive(Debug)]
pub(crate) struct BeyondEnd {
    buffers: Buffers,
    /// The first of them is the rest of the last one before the end.
    is_split: bool,
}

impl BeyondEnd {
    /// Takes what lies behind the first `inside_bytes` out of the buffers of a read.
    pub(crate) fn split(buffers: Buffers, inside_bytes: u64) -> (Buffers, BeyondEnd) {
        let mut left_bytes = usize::try_from(inside_bytes).unwrap_or(usize::MAX);
        let mut inside = Buffers::new();
        let mut beyond = BeyondEnd {
            buffers: Buffers::new(),
            is_split: false,
        };
        for mut buffer in buffers {
            if buffer.len() <= left_bytes {
                left_bytes -= buffer.len();
                inside.push(buffer);
                continue;
            }
            if left_bytes > 0 {
                inside.push(buffer.split_to(left_bytes));
                beyond.is_split = true;
                left_bytes = 0;
            }
            buffer.fill(0);
            beyond.buffers.push(buffer);
        }
        (inside, beyond)
    }

    /// The buffers of the read again, as they were.
    pub(crate) fn join(self, mut inside: Buffers) -> Buffers {
        let mut beyond = self.buffers.into_iter();
        if self.is_split {
            let halves = inside.pop().into_iter().chain(beyond.next());
            inside.push(Buffer::join_all(halves));
        }
        inside.extend(beyond);
        inside
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_come_back_as_they_were() {
        for inside_bytes in 0..=13 {
            let buffers = [3, 4, 5].map(|len| Buffer::copy_of(&vec![7; len]));
            let (inside, beyond) = BeyondEnd::split(buffers.into_iter().collect(), inside_bytes);
            let inside_len: usize = inside.iter().map(|buffer| buffer.len()).sum();
            assert_eq!(inside_len as u64, inside_bytes.min(12));
            let whole = beyond.join(inside);
            let lens: Vec<usize> = whole.iter().map(|buffer| buffer.len()).collect();
            assert_eq!(lens, [3, 4, 5]);
            let bytes = whole.iter().flat_map(|buffer| buffer.to_vec());
            let sevens = bytes.filter(|&byte| byte == 7).count();
            assert_eq!(sevens as u64, inside_bytes.min(12));
        }
    }
}

//! Bits of a block's sectors. The first sector has the highest bit of the first byte.

/// A run of sectors of one kind: whether the image has them, and how many they are, from `first` on up to
/// `count`.
pub(super) fn run(bitmap: &[u8], first: u64, count: u64) -> (bool, u64) {
    let bit = |sector: u64| {
        let byte = bitmap.get((sector / 8) as usize).copied().unwrap_or(0);
        byte >> (7 - sector % 8) & 1 == 1
    };
    let is_here = bit(first);
    let whole = if is_here { 0xff } else { 0 };
    let mut len = 1;
    while len < count {
        let sector = first + len;
        let byte = bitmap.get((sector / 8) as usize);
        if sector.is_multiple_of(8) && byte == Some(&whole) {
            len += 8;
        } else if bit(sector) == is_here {
            len += 1;
        } else {
            break;
        }
    }
    (is_here, len.min(count))
}

/// Whether the image has all sectors of a block of so many.
pub(super) fn is_whole(bitmap: &[u8], sectors: u64) -> bool {
    run(bitmap, 0, sectors) == (true, sectors)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_first_sector_has_the_highest_bit() {
        assert_eq!(run(&[0b1000_0000], 0, 8), (true, 1));
        assert_eq!(run(&[0b1000_0000, 0], 1, 15), (false, 15));
        assert!(is_whole(&[0xff, 0xf0], 12));
        assert!(!is_whole(&[0xff, 0xf0], 13));
        assert!(!is_whole(&[], 1));
    }

    proptest! {
        #[test]
        fn runs_are_those_of_single_bits(
            bitmap in proptest::collection::vec(prop_oneof![Just(0u8), Just(255), any::<u8>()], 1..20),
            first in 0u64..160,
            count in 1u64..200,
        ) {
            let bit = |sector: u64| {
                let byte = bitmap.get((sector / 8) as usize);
                byte.is_some_and(|byte| byte & 0x80 >> (sector % 8) != 0)
            };
            let len = (0..count).take_while(|at| bit(first + at) == bit(first)).count() as u64;
            prop_assert_eq!(run(&bitmap, first, count), (bit(first), len));
        }
    }
}

//! Names as Linux shows them.

use super::record::Record;

/// A name without Rock Ridge: small letters, without a version that is the first, or a full stop
/// before it.
pub(super) fn plain(record: &Record) -> Vec<u8> {
    let name = record.name();
    let mut shown = Vec::with_capacity(name.len());
    for (at, letter) in name.iter().enumerate() {
        let rest = &name[at..];
        if *letter == 0 || rest == b".;1" || rest == b";1" {
            break;
        }
        shown.push(match letter {
            b';' | b'/' => b'.',
            letter => letter.to_ascii_lowercase(),
        });
    }
    shown
}

/// A name of Joliet: without a version that is the first, and without full stops at its end.
pub(super) fn joliet(record: &Record) -> Vec<u8> {
    let units = record.name().chunks_exact(2);
    let units = units.map(|unit| u16::from_be_bytes([unit[0], unit[1]]));
    let units: Vec<u16> = units.take_while(|unit| *unit != 0).collect();
    let name = String::from_utf16_lossy(&units);
    let mut name = name.strip_suffix(";1").unwrap_or(&name);
    while let Some(shorter) = name.strip_suffix('.').filter(|rest| !rest.is_empty()) {
        name = shorter;
    }
    name.as_bytes().to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(name: &[u8]) -> Record {
        let len = 33 + name.len();
        let mut bytes = vec![0; len];
        bytes[0] = len as u8;
        bytes[32] = name.len() as u8;
        bytes[33..].copy_from_slice(name);
        Record::decode(&bytes, 0).expect("sound")
    }

    #[test]
    fn plain_names_are_small_and_have_no_first_version() {
        for (name, shown) in [
            ("README.TXT;1", "readme.txt"),
            ("README.;1", "readme"),
            ("README;1", "readme"),
            ("README.TXT;2", "readme.txt.2"),
            ("A/B", "a.b"),
            ("A;10", "a.10"),
            (";1", ""),
        ] {
            assert_eq!(plain(&record(name.as_bytes())), shown.as_bytes(), "{name}");
        }
    }

    #[test]
    fn names_of_joliet_are_utf_16() {
        for (name, shown) in [
            ("Größe.txt;1", "Größe.txt"),
            ("漢字..;1", "漢字"),
            ("😀", "😀"),
            ("a;2", "a;2"),
        ] {
            let bytes: Vec<u8> = name.encode_utf16().flat_map(u16::to_be_bytes).collect();
            assert_eq!(joliet(&record(&bytes)), shown.as_bytes(), "{name}");
        }
        assert_eq!(joliet(&record(&[0xd8, 0, 0, 65])), "\u{fffd}A".as_bytes());
    }
}

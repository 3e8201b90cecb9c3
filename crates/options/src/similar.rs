//! The word that was probably meant.

/// Words that are less alike than this have nothing to do with each other.
const ALIKE: f64 = 0.75;

/// The word that is most like `word`, if one is like it at all.
pub fn closest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let likeness = |other: &&'a str| {
        let typo = strsim::normalized_damerau_levenshtein(word, other);
        typo.max(strsim::jaro_winkler(word, other) * 0.9)
    };
    known
        .into_iter()
        .filter(|other| *other != word)
        .map(|other| (likeness(&other), other))
        .filter(|(likeness, _)| *likeness >= ALIKE)
        .max_by(|one, two| one.0.total_cmp(&two.0))
        .map(|(_, other)| other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slips_of_the_hand_are_seen_through() {
        let known = ["convert", "commit", "compare", "create", "check", "info"];
        for (word, meant) in [
            ("covnert", Some("convert")),
            ("comit", Some("commit")),
            ("chekc", Some("check")),
            ("inof", Some("info")),
            ("frobnicate", None),
            ("", None),
        ] {
            assert_eq!(closest(word, known), meant, "{word}");
        }
    }
}

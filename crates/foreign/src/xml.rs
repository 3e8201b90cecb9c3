//! What is asked of XML before it is parsed: texts that cost the parser more than their length are refused.

/// Attributes of one element: the parser compares each with all others.
pub(crate) const MAX_ATTRIBUTES: usize = 1024;

/// Whether some element may have more attributes than an element may: no tag begins inside of another, so
/// that what looks like attributes between two beginnings is no less than there are.
pub(crate) fn has_many_attributes(text: &[u8]) -> bool {
    let (mut count, mut after_equals) = (0, false);
    for byte in text {
        match byte {
            b'<' => count = 0,
            b'"' | b'\'' if after_equals => count += 1,
            _ => {}
        }
        after_equals = *byte == b'=' || (after_equals && byte.is_ascii_whitespace());
        if count > MAX_ATTRIBUTES {
            return true;
        }
    }
    false
}

/// Whether a text may define entities, each use of which is as long as what it stands for.
pub(crate) fn has_entities(text: &[u8]) -> bool {
    text.windows(8).any(|word| word == b"<!ENTITY")
}

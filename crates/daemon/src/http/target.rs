//! [`Target`]: the path and the query of a request, taken apart.
//!
//! Invariant: no segment leads anywhere: none is empty, `.` or `..`, and none holds a slash, a
//! backslash or a control character, however it was written.

/// Longer paths and queries are refused.
const MAX_TARGET_BYTES: usize = 4 << 10;
/// A path has no more segments.
const MAX_SEGMENTS: usize = 8;
/// A query has no more pairs.
const MAX_PAIRS: usize = 64;

/// What a request is about.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Target {
    /// The parts of the path, decoded; none for `/`.
    pub segments: Vec<String>,
    /// The pairs of the query, decoded, in order; a name stands there once.
    pub query: Vec<(String, String)>,
}

impl Target {
    /// Takes a path with its query apart, as it stands in the first line of a request.
    ///
    /// # Errors
    /// What is wrong, for whoever has sent it.
    pub fn parse(text: &str) -> Result<Target, &'static str> {
        if text.len() > MAX_TARGET_BYTES {
            return Err("the path is too long");
        }
        let (path, query) = match text.split_once('?') {
            Some((path, query)) => (path, Some(query)),
            None => (text, None),
        };
        let Some(path) = path.strip_prefix('/') else {
            return Err("the path begins with no slash");
        };
        let mut target = Target::default();
        if !path.is_empty() {
            for part in path.split('/') {
                if target.segments.len() == MAX_SEGMENTS {
                    return Err("the path has too many parts");
                }
                target.segments.push(segment(part)?);
            }
        }
        for pair in query.into_iter().flat_map(|query| query.split('&')) {
            if pair.is_empty() {
                continue;
            }
            if target.query.len() == MAX_PAIRS {
                return Err("the query has too many pairs");
            }
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let (key, value) = (decoded(key, Plus::IsSpace)?, decoded(value, Plus::IsSpace)?);
            if key.is_empty() || target.query.iter().any(|(known, _)| *known == key) {
                return Err("the query has a name twice, or none");
            }
            target.query.push((key, value));
        }
        Ok(target)
    }
}

fn segment(text: &str) -> Result<String, &'static str> {
    let segment = decoded(text, Plus::IsPlus)?;
    let leads = |letter: char| matches!(letter, '/' | '\\') || letter.is_control();
    match segment.as_str() {
        "" | "." | ".." => Err("the path has a part that is no name"),
        _ if segment.contains(leads) => Err("the path has a part with letters that no name has"),
        _ => Ok(segment),
    }
}

/// What a plus sign stands for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Plus {
    IsPlus,
    IsSpace,
}

/// Text with its `%XX` resolved, once.
fn decoded(text: &str, plus: Plus) -> Result<String, &'static str> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'%' => {
                let digits = [rest.next(), rest.next()];
                let digit = |byte: Option<u8>| char::from(byte?).to_digit(16);
                match digits.map(digit) {
                    [Some(high), Some(low)] => (high << 4 | low) as u8,
                    _ => return Err("a percent sign is followed by no two digits"),
                }
            }
            b'+' if plus == Plus::IsSpace => b' ',
            byte => byte,
        });
    }
    String::from_utf8(bytes).map_err(|_| "the path or the query is not UTF-8")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segments(text: &str) -> Vec<String> {
        Target::parse(text).expect(text).segments
    }

    #[test]
    fn paths_and_queries_are_taken_apart() {
        assert!(segments("/").is_empty());
        assert_eq!(
            segments("/v1/disks/%23block001"),
            ["v1", "disks", "#block001"]
        );
        assert_eq!(segments("/a+b"), ["a+b"]);
        let target = Target::parse("/x?mode=hard&n=a+b%26&&flag").unwrap();
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        assert_eq!(
            target.query,
            [pair("mode", "hard"), pair("n", "a b&"), pair("flag", "")]
        );
    }

    #[test]
    fn tricks_are_refused() {
        for text in [
            "",
            "v1",
            "http://other/v1",
            "*",
            "//v1",
            "/v1/",
            "/v1//disks",
            "/v1/../metrics",
            "/v1/%2e%2e/metrics",
            "/v1/.%2E",
            "/v1/a%2fb",
            "/v1/a%5cb",
            "/v1/a\\b",
            "/v1/a%00",
            "/v1/a%0d%0ab",
            "/v1/%",
            "/v1/%g0",
            "/v1/%+f",
            "/v1/%ff",
            "/1/2/3/4/5/6/7/8/9",
            "/x?a=1&a=2",
            "/x?=1",
            "/x?a=%zz",
        ] {
            assert!(Target::parse(text).is_err(), "{text}");
        }
        assert!(Target::parse(&format!("/{}", "x".repeat(MAX_TARGET_BYTES))).is_err());
        let many: Vec<String> = (0..=MAX_PAIRS).map(|n| format!("k{n}=")).collect();
        assert!(Target::parse(&format!("/x?{}", many.join("&"))).is_err());
    }
}

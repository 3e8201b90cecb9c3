//! What a server's answer says of the file: its length, its version, the range that comes.

use reqwest::StatusCode;
use reqwest::header::{
    CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, DATE, ETAG, HeaderMap, HeaderName,
    LAST_MODIFIED, RETRY_AFTER,
};
use std::time::Duration;
use vellum_storage::tells_version;

/// Which bytes a file has had when it was opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Version {
    pub(crate) len_bytes: u64,
    etag: Option<String>,
    modified: Option<String>,
    /// A later change has another time.
    is_settled: bool,
}

/// Of the file behind an answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// The bytes from this one on, up to that one, of a file of this length.
    Part { start: u64, end: u64, total: u64 },
    /// All of it, of this length where the server says it.
    Whole(Option<u64>),
    /// Nothing: it has this length, and ends before the range.
    Beyond(u64),
}

fn text(headers: &HeaderMap, name: HeaderName) -> Option<&str> {
    headers.get(name)?.to_str().ok().map(str::trim)
}

/// Whether the file was last changed some seconds ago, by the server's own clock.
fn is_settled(headers: &HeaderMap) -> bool {
    let time = |name| httpdate::parse_http_date(text(headers, name)?).ok();
    match (time(LAST_MODIFIED), time(DATE)) {
        (Some(modified), Some(now)) => tells_version(modified, now),
        _ => false,
    }
}

impl Version {
    pub(super) fn of(headers: &HeaderMap, len_bytes: u64) -> Self {
        Version {
            len_bytes,
            etag: text(headers, ETAG).map(str::to_owned),
            modified: text(headers, LAST_MODIFIED).map(str::to_owned),
            is_settled: is_settled(headers),
        }
    }

    /// What tells this version from others, if the server says anything that does: a weak entity tag may be that of
    /// other bytes too, and so may the time of a change a moment ago, since it has whole seconds.
    pub(super) fn tag(&self) -> Option<String> {
        let modified = self.modified().filter(|_| self.is_settled);
        let tag = self.strong_etag().or(modified)?;
        Some(format!("{} {tag}", self.len_bytes))
    }

    /// An entity tag that a server may be asked to compare: weak ones never agree there.
    pub(super) fn strong_etag(&self) -> Option<&str> {
        self.etag.as_deref().filter(|etag| etag.starts_with('"'))
    }

    pub(super) fn modified(&self) -> Option<&str> {
        self.modified.as_deref()
    }

    /// Why an answer is not of this version, if it is not. What the first answer has said, each
    /// has to say.
    pub(super) fn difference(&self, headers: &HeaderMap, total: u64) -> Option<String> {
        if total != self.len_bytes {
            let old = self.len_bytes;
            return Some(format!("it had {old} bytes and has {total} now"));
        }
        let compare = |what: &str, old: &Option<String>, new: Option<&str>| {
            let old = old.as_deref()?;
            match new {
                Some(new) if new == old => None,
                Some(new) => Some(format!("its {what} was {old} and is {new} now")),
                None => Some(format!(
                    "its {what} was {old}, and the server says none now"
                )),
            }
        };
        // With an entity tag the time says nothing: mirrors of one file often differ in it.
        match self.etag {
            Some(_) => compare("entity tag", &self.etag, text(headers, ETAG)),
            None => compare("time", &self.modified, text(headers, LAST_MODIFIED)),
        }
    }
}

/// What an answer with content holds; an error says what is wrong with it.
pub(super) fn content(status: StatusCode, headers: &HeaderMap) -> Result<Content, String> {
    if let Some(encoding) = text(headers, CONTENT_ENCODING).filter(|name| *name != "identity") {
        return Err(format!(
            "the server sends the file packed ({encoding}), which was not asked for"
        ));
    }
    match status {
        StatusCode::PARTIAL_CONTENT => {
            let range = text(headers, CONTENT_RANGE)
                .ok_or("the answer is a part of the file, and does not say which")?;
            parse_range(range)
                .ok_or_else(|| format!("the range of the answer makes no sense: {range}"))
        }
        StatusCode::RANGE_NOT_SATISFIABLE => {
            let total = text(headers, CONTENT_RANGE)
                .and_then(|range| range.strip_prefix("bytes */"))
                .and_then(|total| total.parse().ok());
            let total = total
                .ok_or("the server refuses the range, and does not say how long the file is")?;
            Ok(Content::Beyond(total))
        }
        StatusCode::OK if headers.contains_key(CONTENT_RANGE) => {
            Err("the answer says that it is the whole file, and names a range of it".to_owned())
        }
        StatusCode::OK => {
            let length = match text(headers, CONTENT_LENGTH) {
                Some(length) => Some(length.parse().map_err(|_| "the length makes no sense")?),
                None => None,
            };
            Ok(Content::Whole(length))
        }
        other => Err(format!("the answer {other} was not expected")),
    }
}

fn parse_range(text: &str) -> Option<Content> {
    let (range, total) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let start = first.parse().ok()?;
    let end = last.parse::<u64>().ok()?.checked_add(1)?;
    let total = total.parse().ok()?;
    // Offsets are signed in the interfaces of files.
    (start < end && end <= total && total <= i64::MAX as u64).then_some(Content::Part {
        start,
        end,
        total,
    })
}

/// How long the server wants to be left alone, in whole seconds.
pub(super) fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds = text(headers, RETRY_AFTER)?.parse().ok()?;
    Some(Duration::from_secs(seconds))
}

#[cfg(test)]
mod tests {
    use reqwest::header::HeaderValue;

    use super::*;

    fn headers(list: &[(&'static str, &'static str)]) -> HeaderMap {
        let pairs = list.iter().map(|(name, value)| {
            let name = HeaderName::from_static(name);
            (name, HeaderValue::from_static(value))
        });
        pairs.collect()
    }

    #[test]
    fn ranges_are_read_strictly() {
        let part = |start, end, total| Some(Content::Part { start, end, total });
        assert_eq!(parse_range("bytes 0-0/1"), part(0, 1, 1));
        assert_eq!(parse_range("bytes 5-9/10"), part(5, 10, 10));
        for wrong in [
            "bytes 5-4/10",
            "bytes 5-10/10",
            "bytes 0-9/*",
            "bytes */10",
            "0-9/10",
            "bytes 0-18446744073709551615/18446744073709551615",
            "bytes 0-9223372036854775807/9223372036854775808",
            "bytes -1-2/3",
            "",
        ] {
            assert_eq!(parse_range(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn answers_are_told_apart() {
        let told =
            |status: u16, list| content(StatusCode::from_u16(status).unwrap(), &headers(list));
        assert_eq!(told(200, &[]), Ok(Content::Whole(None)));
        assert!(told(200, &[("content-range", "bytes 0-4/10")]).is_err());
        assert_eq!(
            told(200, &[("content-length", "5")]),
            Ok(Content::Whole(Some(5)))
        );
        assert_eq!(
            told(416, &[("content-range", "bytes */0")]),
            Ok(Content::Beyond(0))
        );
        assert!(told(416, &[]).is_err());
        assert!(told(206, &[]).is_err());
        assert!(told(200, &[("content-encoding", "gzip")]).is_err());
        assert!(told(204, &[]).is_err());
    }

    #[test]
    fn weak_tags_and_times_of_a_moment_ago_tell_no_version() {
        let modified = ("last-modified", "Wed, 25 Nov 2026 10:00:00 GMT");
        let early = ("date", "Wed, 25 Nov 2026 10:00:01 GMT");
        let late = ("date", "Wed, 25 Nov 2026 10:00:09 GMT");
        let (weak, strong) = (("etag", "W/\"a\""), ("etag", "\"a\""));
        let tag = |list: &[(&'static str, &'static str)]| Version::of(&headers(list), 10).tag();
        assert_eq!(tag(&[modified, early]), None);
        assert_eq!(tag(&[modified]), None, "the server's clock is unknown");
        let settled = tag(&[modified, late]);
        assert_eq!(settled, Some(format!("10 {}", modified.1)));
        assert_eq!(tag(&[weak, modified, early]), None);
        assert_eq!(tag(&[weak, modified, late]), settled);
        assert_eq!(tag(&[strong, modified, early]).as_deref(), Some("10 \"a\""));
    }

    #[test]
    fn versions_are_compared_by_what_was_said_first() {
        let tagged = headers(&[("etag", "\"a\""), ("last-modified", "Monday")]);
        let version = Version::of(&tagged, 10);
        assert_eq!(version.difference(&tagged, 10), None);
        assert!(version.difference(&tagged, 11).is_some());
        assert!(
            version
                .difference(&headers(&[("etag", "\"b\"")]), 10)
                .is_some()
        );
        assert!(
            version
                .difference(&headers(&[("last-modified", "Monday")]), 10)
                .is_some()
        );
        assert_eq!(version.difference(&headers(&[("etag", "\"a\"")]), 10), None);
        let dated = Version::of(&headers(&[("last-modified", "Monday")]), 10);
        assert!(
            dated
                .difference(&headers(&[("last-modified", "Tuesday")]), 10)
                .is_some()
        );
        assert!(dated.difference(&headers(&[]), 10).is_some());
        let plain = Version::of(&headers(&[]), 10);
        assert_eq!(plain.difference(&tagged, 10), None);
        let weak = Version::of(&headers(&[("etag", "W/\"a\"")]), 10);
        assert_eq!(weak.strong_etag(), None);
        assert!(weak.difference(&tagged, 10).is_some());
    }
}

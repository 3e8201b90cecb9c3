//! Dates, in the time zone of the machine and in that of all.

/// `YYYY-MM-DD HH:MM:SS` for a number of seconds since the epoch.
pub fn format(seconds: i64) -> String {
    // The type has no name here, since that of musl's in `libc` is called deprecated.
    let time = seconds as _;
    // SAFETY: `tm` is plain old data, for which all zeroes is a valid value.
    let mut broken_down: libc::tm = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are to live values of the right types, and
    // `localtime_r` keeps neither.
    let converted = unsafe { libc::localtime_r(&time, &mut broken_down) };
    if converted.is_null() {
        return seconds.to_string();
    }
    let (date, time) = parts(&broken_down);
    format!("{date} {time}")
}

fn parts(broken_down: &libc::tm) -> (String, String) {
    let date = format!(
        "{:04}-{:02}-{:02}",
        broken_down.tm_year + 1900,
        broken_down.tm_mon + 1,
        broken_down.tm_mday
    );
    let time = format!(
        "{:02}:{:02}:{:02}",
        broken_down.tm_hour, broken_down.tm_min, broken_down.tm_sec
    );
    (date, time)
}

/// `YYYY-MM-DDTHH:MM:SS.uuuuuuZ`, as RFC 3339 has it, for a number of seconds since the epoch.
pub fn utc(seconds: i64, microseconds: u32) -> String {
    let time = seconds as _;
    // SAFETY: as in `format`.
    let mut broken_down: libc::tm = unsafe { std::mem::zeroed() };
    // SAFETY: as in `format`; `gmtime_r` keeps neither pointer.
    let converted = unsafe { libc::gmtime_r(&time, &mut broken_down) };
    if converted.is_null() {
        return seconds.to_string();
    }
    let (date, time) = parts(&broken_down);
    format!("{date}T{time}.{microseconds:06}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_of_all_zones_is_that_of_the_standard() {
        assert_eq!(utc(951_782_400, 7), "2000-02-29T00:00:00.000007Z");
    }
}

//! Dates in the time zone of the machine.

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
    format!(
        "{:04}-{:02}-{:02} {:02}:{:02}:{:02}",
        broken_down.tm_year + 1900,
        broken_down.tm_mon + 1,
        broken_down.tm_mday,
        broken_down.tm_hour,
        broken_down.tm_min,
        broken_down.tm_sec
    )
}

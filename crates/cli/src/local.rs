//! Commands that take files of this machine only, and what they say to other names.

use std::path::Path;

use vellum_options::filename;

/// That a name is of a file on another machine, for a command that takes none; `None` for any other name,
/// and for a file here that is called so.
pub fn refusal(name: &str) -> Option<String> {
    let is_elsewhere = filename::is_on_server(name) && !Path::new(name).exists();
    is_elsewhere.then(|| {
        format!(
            "'{name}' is on another machine, and this command takes files of this one only: 'vellum \
             convert' copies images from there and to there"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_other_machines_are_refused() {
        assert!(refusal("s3://b/k").is_some());
        assert!(refusal("ssh://h/f").is_some());
        assert!(refusal("disk.qcow2").is_none());
    }
}

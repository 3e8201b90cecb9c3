//! The Debian mirror that the machine's own apt uses, so that a mirror or proxy that a person has set up is
//! respected.

use anyhow::{Context, Result};

use crate::process;

/// The URI of the mirror of Debian's main archive.
///
/// # Errors
/// If apt cannot tell, or has none.
pub fn find() -> Result<String> {
    let policy = process::output(process::program("apt-cache")?.arg("policy"))?;
    in_policy(&policy).map(str::to_owned).context(
        "apt has no mirror of Debian's main archive, so there is nothing to fetch from: add one to \
         /etc/apt/sources.list and run 'apt-get update' ('apt-cache policy' shows what apt has)",
    )
}

/// The first archive of Debian in what `apt-cache policy` prints. Security updates lie in another one.
fn in_policy(policy: &str) -> Option<&str> {
    let mut uri = None;
    for line in policy.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["release", ..] if is_main_archive(line) && uri.is_some() => return uri,
            [priority, found, ..] if priority.parse::<i64>().is_ok() => {
                uri = Some(found).filter(|found| found.contains(':'));
            }
            _ => {}
        }
    }
    None
}

fn is_main_archive(release: &str) -> bool {
    let fields = release.trim_start().trim_start_matches("release ");
    let mut fields = fields.split(',').map(str::trim);
    fields.any(|field| field == "l=Debian" || field == "l=Debian Backports")
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: &str = "\
Package files:
 100 /var/lib/dpkg/status
     release a=now
 500 https://packages.example.org/tool stable/main amd64 Packages
     release o=Tool,a=stable,l=Tool,c=main
     origin packages.example.org
 500 http://mirror.example.org/debian-security bookworm-security/main amd64 Packages
     release v=12,o=Debian,a=oldstable-security,n=bookworm-security,l=Debian-Security,c=main,b=amd64
     origin mirror.example.org
 500 http://mirror.example.org:3142/debian bookworm/main amd64 Packages
     release v=12.15,o=Debian,a=oldstable,n=bookworm,l=Debian,c=main,b=amd64
     origin mirror.example.org
Pinned packages:
";

    #[test]
    fn the_mirror_is_that_of_the_machine() {
        let found = in_policy(POLICY);
        assert_eq!(found, Some("http://mirror.example.org:3142/debian"));
        let (others, _) = POLICY
            .split_once(" 500 http://mirror.example.org:3142")
            .expect("both");
        assert_eq!(in_policy(others), None);
        assert_eq!(in_policy("Package files:\nPinned packages:\n"), None);
    }
}

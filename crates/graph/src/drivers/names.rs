//! The options of drivers by name: for whoever mistypes one. What they mean, and what
//! else is wrong with them, only the drivers know.

use crate::{foreign, reopen};

/// Those of files on other machines.
fn of_servers(driver: &str) -> &'static [&'static str] {
    match driver {
        "cache" => &[
            "directory",
            "limit",
            "readahead",
            "outage",
            "prefetch",
            "prefetch-speed",
            "record-trace",
            "trace",
            "version",
        ],
        "http" | "https" => &[
            "url",
            "readahead",
            "keep-size",
            "timeout",
            "username",
            "password-secret",
            "proxy-username",
            "proxy-password-secret",
            "cookie",
            "cookie-secret",
            "header",
            "header-secret",
            "sslverify",
            "bearer-token-secret",
            "tls-ca-file",
            "tls-cert-file",
            "tls-key-file",
        ],
        // Object stores.
        _ => &[
            "url",
            "endpoint",
            "region",
            "access-key-id",
            "access-key-secret",
            "session-token-secret",
            "anonymous",
            "virtual-hosted-style",
            "readahead",
            "keep-size",
            "timeout",
            "proxy-username",
            "proxy-password-secret",
            "sslverify",
            "tls-ca-file",
            "tls-cert-file",
            "tls-key-file",
        ],
    }
}

/// Those of images on other machines that may be written.
fn of_far_disks(driver: &str) -> &'static [&'static str] {
    match driver {
        "rbd" => &[
            "pool",
            "namespace",
            "image",
            "snapshot",
            "conf",
            "user",
            "key-secret",
            "auth-client-required",
            "server",
            "encrypt.format",
            "encrypt.key-secret",
        ],
        // By SSH.
        _ => &[
            "server.host",
            "server.port",
            "path",
            "user",
            "host",
            "port",
            "host-key-check.mode",
            "host-key-check.type",
            "host-key-check.hash",
            "host_key_check",
            "timeout",
        ],
    }
}

/// What a node of a driver may be told, beside its children.
fn own(driver: &str) -> &'static [&'static str] {
    match driver {
        "qcow2" => &[
            "bitmap-step-size",
            "chain-index-size",
            "compression-level",
            "compression-window",
            "encrypt.format",
            "encrypt.key-secret",
            "overlap-check",
            "unseal",
            "verify",
        ],
        "raw" => &["offset", "size"],
        "luks" => &["key-secret", "header"],
        "file" | "host_device" | "host_cdrom" => &["filename", "aio", "locking"],
        "ova" => &["filename", "member"],
        "repository" => &["path", "tag", "number", "push"],
        "http" | "https" | "s3" | "gs" | "az" | "cache" => of_servers(driver),
        "rbd" | "ssh" => of_far_disks(driver),
        "nbd" => &[
            "server.type",
            "server.path",
            "server.host",
            "server.port",
            "path",
            "host",
            "port",
            "export",
            "tls-creds",
            "tls-hostname",
            "x-dirty-bitmap",
            "reconnect-delay",
            "open-timeout",
        ],
        "null-co" | "null-aio" => &["size", "latency-ns", "read-zeroes"],
        "blkdebug" => &[
            "config",
            "align",
            "max-transfer",
            "opt-write-zero",
            "max-write-zero",
            "opt-discard",
            "max-discard",
        ],
        "blklogwrites" => &["log-append", "log-sector-size", "log-super-update-interval"],
        "throttle" => &["throttle-group"],
        "copy-before-write" => &[
            "target",
            "bitmap.node",
            "bitmap.name",
            "on-cbw-error",
            "cbw-timeout",
            "min-cluster-size",
        ],
        "copy-on-read" => &["bottom"],
        "preallocate" => &["prealloc-align", "prealloc-size"],
        other => foreign::node_options(other),
    }
}

/// The names of all options that a node of a driver takes.
pub fn option_names(driver: &str) -> impl Iterator<Item = &'static str> {
    let changeable: &[&str] = match driver {
        "qcow2" => &reopen::QCOW2,
        _ => &[],
    };
    let common = ["driver", "node-name", "file", "backing"];
    // What a repository in an object store is reached with.
    let store = match driver {
        "repository" => of_servers("s3"),
        _ => &[],
    };
    let lists = [own(driver), store, changeable, &reopen::COMMON];
    common.into_iter().chain(lists.concat())
}

#[cfg(test)]
mod tests {
    use vellum::qcow2::create::CreateOptions;
    use vellum_io::lane;
    use vellum_options::{ImageSpec, OpenFlags};

    use crate::open_device;
    use crate::testing::make_image;

    use super::*;

    /// What opening a node with one more option is refused with, if it is.
    fn refusal(driver: &str, file: &str, key: &str) -> Option<String> {
        let text = match driver {
            "null-co" => format!("driver=null-co,{key}=1"),
            "file" => format!("driver=file,filename={file},{key}=1"),
            "blkdebug" => format!("driver=blkdebug,image.filename={file},{key}=1"),
            _ => format!("driver={driver},file.filename={file},{key}=1"),
        };
        let spec = ImageSpec::image_opts(&text).unwrap();
        let opened = lane::block_on(open_device(&spec, &OpenFlags::default()));
        opened.err().map(|error| vellum_options::error_text(&error))
    }

    #[test]
    fn every_name_is_one_that_its_driver_takes() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("image").display().to_string();
        let options = CreateOptions::default().size_bytes(1 << 20);
        lane::block_on(make_image(&file, &options));
        for driver in [
            "blkdebug",
            "copy-on-read",
            "file",
            "null-co",
            "preallocate",
            "qcow2",
            "raw",
        ] {
            let unknown = refusal(driver, &file, "nonsense").unwrap();
            assert!(
                unknown.contains("support the option 'nonsense'"),
                "{unknown}"
            );
            let skipped = ["driver", "file", "filename", "backing", "config"];
            for name in option_names(driver).filter(|name| !skipped.contains(name)) {
                let refused = refusal(driver, &file, name).unwrap_or_default();
                assert!(
                    !refused.contains("support the option"),
                    "{driver}: {refused}"
                );
            }
        }
    }
}

//! The image that `mount` and `serve` serve, and the options that say which one and how.

use std::sync::Arc;

use vellum::BlockDevice;
use vellum_graph::open_device;
use vellum_images::overlay;
use vellum_options::{Aio, CacheMode, DetectZeroes, OpenFlags};

use super::Failure;
use crate::getopt::UsageError;
use crate::img::snapshot;
use crate::report;
use crate::spec::CommonArgs;

/// Rows of options: for the help, and the version.
pub const ABOUT_ROWS: &str = "  -h, --help                 print this text
  -V, --version              print the version
";

/// Rows of options: which of the image's disks, and how it is opened. `--read-only` stands before them.
pub const IMAGE_ROWS: &str = "  -s, --snapshot             throw all changes away in the end
  -l, --load-snapshot=PARAM  show an internal snapshot: ID, NAME, or
                             snapshot.id=ID,snapshot.name=NAME

How to open the image:
  -f, --format=FORMAT        format of the image (raw, qcow2)
      --image-opts           IMAGE is a list of key=value options
      --object=TYPE,id=ID    define a secret
  -n, --nocache              the same as --cache=none
      --cache=MODE           none, writeback (default), writethrough, directsync, unsafe
      --aio=MODE             threads, native, io_uring
      --discard=MODE         ignore, unmap (default)
      --detect-zeroes=MODE   off, on, unmap

How to run:
";

/// An image, what of it is served, and how the program runs.
#[derive(Debug, Default)]
pub struct ServedImage {
    pub common: CommonArgs,
    pub name: String,
    pub read_only: bool,
    /// Changes are thrown away.
    pub temporary: bool,
    /// An internal snapshot, as the user names it.
    pub snapshot: Option<String>,
    pub cache: CacheMode,
    pub aio: Option<Aio>,
    /// Discards do not give space back.
    pub keep_space: bool,
    pub detect_zeroes: DetectZeroes,
    pub fork: bool,
    pub pid_file: Option<String>,
}

impl ServedImage {
    /// Takes an option.
    ///
    /// # Errors
    /// A value that cannot be, and an option that is none of these.
    pub fn take(&mut self, name: &str, value: String) -> Result<(), Failure> {
        let invalid =
            |what: &str, value: &str| Failure::message(format!("Invalid {what} mode `{value}'"));
        match name {
            "read-only" => self.read_only = true,
            "snapshot" => self.temporary = true,
            "load-snapshot" => self.snapshot = Some(value),
            "nocache" => return self.take("cache", "none".to_owned()),
            "cache" => {
                self.cache = CacheMode::parse(&value).ok_or_else(|| invalid("cache", &value))?;
            }
            "aio" => {
                let unknown = || Failure::message(format!("Invalid aio mode '{value}'"));
                self.aio = Some(Aio::parse(&value).ok_or_else(unknown)?);
            }
            "discard" => {
                self.keep_space = match value.as_str() {
                    "ignore" | "off" => true,
                    "unmap" | "on" => false,
                    _ => return Err(invalid("discard", &value)),
                }
            }
            "detect-zeroes" => {
                let mode = DetectZeroes::parse(&value);
                self.detect_zeroes = mode.ok_or_else(|| invalid("detect-zeroes", &value))?;
            }
            "fork" => self.fork = true,
            "pid-file" => self.pid_file = Some(value),
            _ => return Err(UsageError::not_taken(name).into()),
        }
        Ok(())
    }

    /// Refuses combinations that make no sense. A snapshot is read-only.
    pub fn check(&mut self) -> Result<(), Failure> {
        if self.common.image_opts && self.common.format.is_some() {
            return Err(Failure::message(
                "--image-opts and -f are mutually exclusive",
            ));
        }
        if self.detect_zeroes == DetectZeroes::Unmap && self.keep_space {
            return Err(Failure::message(
                "--detect-zeroes=unmap is not allowed with --discard=ignore",
            ));
        }
        self.read_only |= self.snapshot.is_some();
        Ok(())
    }

    /// Opens it.
    pub async fn open(&self) -> Result<Arc<dyn BlockDevice>, Failure> {
        let name = &self.name;
        let failed = |error: vellum_io::Error| {
            let text = report::error_text(&error);
            Failure::message(format!("Failed to open '{name}': {text}"))
        };
        let flags = OpenFlags {
            writable: !self.read_only && !self.temporary,
            cache: self.cache,
            aio: self.aio,
            discard: !self.keep_space,
            detect_zeroes: self.detect_zeroes,
            ..OpenFlags::default()
        };
        let spec = self.common.spec(name).map_err(failed)?;
        let device = open_device(&spec, &flags).await.map_err(failed)?;
        if self.temporary && !self.read_only {
            return overlay::put_on(device).await.map_err(failed);
        }
        let Some(text) = &self.snapshot else {
            return Ok(device);
        };
        let shown = match snapshot::selector(text) {
            Ok(selector) => snapshot::shown(&device, selector).await.map_err(failed),
            Err(_) => {
                let text = format!("Failed in parsing snapshot param `{text}'");
                Err(Failure::message(text))
            }
        };
        if shown.is_err() {
            // The first error is the one to report.
            let _ = device.close().await;
        }
        shown
    }
}

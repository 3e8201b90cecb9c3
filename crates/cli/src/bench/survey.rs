//! An image that the user names: opens it for reading, and finds out which of its blocks hold data,
//! which are what is read.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vellum::BlockDevice;
use vellum::qcow2::AsQcow2;
use vellum_graph::open_device;
use vellum_options::{ImageSpec, Options, Source};

use super::arguments::Arguments;
use super::failure::Failure;
use super::images::Opening;
use super::load::Blocks;
use super::plan::Metadata;
use super::scratch::Interrupt;

/// Looking at a fragmented image of many terabytes ends here: what was seen until
/// then is what is read.
const LONGEST_LOOK: Duration = Duration::from_secs(10);

/// What is known about the image.
#[derive(Debug)]
pub(super) struct Survey {
    name: String,
    options: Options,
    force_share: bool,
    direct: bool,
    pub(super) size_bytes: u64,
    pub(super) metadata: Metadata,
    /// Bytes of the slices of 4 KiB that map the data.
    pub(super) used_l2_bytes: u64,
    /// Blocks of the guest that hold data.
    pub(super) blocks: Blocks,
    /// Where the same blocks lie in files.
    pub(super) raw_blocks: Blocks,
    pub(super) raw_devices: Vec<Arc<dyn BlockDevice>>,
    /// What should be known about the figures.
    pub(super) notes: Vec<String>,
}

/// Options of the node that the arguments name.
fn node_options(arguments: &Arguments, name: &str) -> Result<Options, Failure> {
    let format = arguments.common.format.as_deref();
    let spec = ImageSpec::from_argument(name, arguments.common.image_opts, format)
        .map_err(|error| Failure::open(name, &error))?;
    let mut options = match spec.source {
        Source::Options(options) => options,
        Source::Filename(name) => match name.strip_prefix("json:") {
            Some(json) => Options::from_json(json)?,
            None => {
                let mut options = Options::new();
                options.set_text("file.filename", name);
                options
            }
        },
    };
    // A raw image has no cache to choose, so this is about qcow2 only.
    options.set_text("driver", spec.format.as_deref().unwrap_or("qcow2"));
    Ok(options)
}

impl Survey {
    /// Looks at the image.
    pub(super) async fn make(
        arguments: &Arguments,
        name: &str,
        interrupt: &Interrupt,
    ) -> Result<Survey, Failure> {
        let mut survey = Survey {
            name: name.to_owned(),
            options: node_options(arguments, name)?,
            force_share: arguments.common.force_share,
            direct: true,
            size_bytes: 0,
            metadata: Metadata {
                l2_bytes: 0,
                cluster_bytes: 0,
            },
            used_l2_bytes: 0,
            blocks: Blocks::default(),
            raw_blocks: Blocks::default(),
            raw_devices: Vec::new(),
            notes: Vec::new(),
        };
        let device = match survey.open(Opening::default()).await {
            Ok(device) => device,
            // A file system without direct I/O, or a true failure that comes again.
            Err(_) => {
                survey.direct = false;
                survey.open(Opening::default()).await?
            }
        };
        let Some(qcow2) = device.as_qcow2() else {
            return Failure::message(format!(
                "'{name}' is not a qcow2 image: it has no cache to choose"
            ));
        };
        let geometry = qcow2.header().geometry();
        survey.size_bytes = device.size_bytes();
        survey.metadata = Metadata {
            l2_bytes: geometry
                .clusters_for(device.size_bytes())
                .saturating_mul(geometry.l2_entry_size_bytes()),
            cluster_bytes: geometry.cluster_size_bytes(),
        };
        let slice_bytes = 4096.min(geometry.cluster_size_bytes());
        let mapped_by_slice =
            slice_bytes / geometry.l2_entry_size_bytes() * geometry.cluster_size_bytes();
        let runs = survey.look(&device, mapped_by_slice, interrupt).await;
        device.close().await?;
        survey.used_l2_bytes *= slice_bytes;
        survey.find_limit(runs?).await;
        if survey.blocks.count() == 0 {
            return Failure::message(format!("'{name}' holds no data to read"));
        }
        Ok(survey)
    }

    /// Whether requests go around the page cache.
    pub(super) fn is_direct(&self) -> bool {
        self.direct
    }

    /// Opens the image with these caches.
    pub(super) async fn open(&self, opening: Opening) -> Result<Arc<dyn BlockDevice>, Failure> {
        let opening = Opening {
            direct: self.direct,
            ..opening
        };
        let mut options = self.options.clone();
        opening.add_to(&mut options, true);
        let spec = ImageSpec {
            added: Options::new(),
            source: Source::Options(options),
            format: None,
            name: self.name.clone(),
        };
        let mut flags = opening.flags();
        flags.force_share = self.force_share;
        let opened = open_device(&spec, &flags).await;
        opened.map_err(|error| Failure::open(&self.name, &error))
    }

    /// Collects the runs of data; counts the slices that map them on the way.
    async fn look(
        &mut self,
        device: &Arc<dyn BlockDevice>,
        mapped_by_slice: u64,
        interrupt: &Interrupt,
    ) -> Result<Vec<(Arc<str>, u64, u64)>, Failure> {
        let (mut at, start) = (0, Instant::now());
        let mut raw = Vec::new();
        let mut next_slice = 0;
        while at < self.size_bytes {
            interrupt.check()?;
            if start.elapsed() > LONGEST_LOOK {
                self.notes.push(format!(
                    "The image is large and fragmented: only its first {} % are read.",
                    at * 100 / self.size_bytes
                ));
                break;
            }
            let extent = device
                .block_status(at, self.size_bytes - at, u32::MAX)
                .await?;
            if extent.kind.needs_reading() {
                self.blocks.add(0, at, extent.len_bytes);
                let last = (at + extent.len_bytes - 1) / mapped_by_slice;
                let first = next_slice.max(at / mapped_by_slice);
                self.used_l2_bytes += (last + 1).saturating_sub(first);
                next_slice = next_slice.max(last + 1);
                if let Some(host) = extent.host {
                    raw.push((host.storage, host.offset_bytes, extent.len_bytes));
                }
            }
            at += extent.len_bytes.max(1);
        }
        Ok(raw)
    }

    /// Opens the files that the data lies in, to read it there directly.
    async fn find_limit(&mut self, runs: Vec<(Arc<str>, u64, u64)>) {
        let mut numbers: HashMap<Arc<str>, Option<usize>> = HashMap::new();
        for (file, offset_bytes, len_bytes) in runs {
            let number = match numbers.get(&file) {
                Some(known) => *known,
                None => {
                    let number = self.open_raw(&file).await;
                    numbers.insert(file, number);
                    number
                }
            };
            if let Some(number) = number {
                self.raw_blocks.add(number, offset_bytes, len_bytes);
            }
        }
        if self.raw_blocks.count() == 0 {
            self.notes.push(
                "The data cannot be read from a file as it is (it is compressed), so there is no \
                 limit to compare with."
                    .into(),
            );
        }
    }

    /// A file as a device; none if it cannot be opened a second time.
    async fn open_raw(&mut self, file: &str) -> Option<usize> {
        let mut options = Options::new();
        options.set_text("driver", "raw");
        options.set_text("file.filename", file);
        let opening = Opening {
            direct: self.direct,
            ..Opening::default()
        };
        opening.add_to(&mut options, false);
        let spec = ImageSpec {
            added: Options::new(),
            source: Source::Options(options),
            format: None,
            name: file.to_owned(),
        };
        let mut flags = opening.flags();
        // Only read beside the image itself, which holds the locks that matter.
        flags.force_share = true;
        self.raw_devices
            .push(open_device(&spec, &flags).await.ok()?);
        Some(self.raw_devices.len() - 1)
    }
}

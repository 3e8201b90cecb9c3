//! Gathers the [`Facts`] about an image: opens the chain for reading, walks its mapping, and for
//! qcow2 reads headers, surveys the clusters and runs a check.
//!
//! Only this module and `growth` do I/O on images; all others work on `Facts`.

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use vellum::qcow2::AsQcow2;
use vellum::qcow2::check::{CheckOptions, CheckReport, CutShort, ProgressSink, check, cut_short};
use vellum::qcow2::info::ImageInfo;
use vellum::qcow2::survey::{Survey, SurveyOptions, survey};
use vellum::{BlockDevice, Extent, Storage};
use vellum_graph::open_device;
use vellum_jobs::map::map;
use vellum_options::{CacheMode, OpenFlags};

use super::arguments::Arguments;
use super::growth::{self, Growth, Sampler};
use super::picture::{CELLS, GuestCell, Picture};
use crate::progress::{Progress, SharedProgress};
use crate::report;

/// One image of the chain, and what of the disk it decides.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Layer {
    pub name: String,
    pub format: &'static str,
    pub size_bytes: u64,
    /// What its file takes on the host.
    pub disk_bytes: Option<u64>,
    /// Guest bytes that are read from it.
    pub data_bytes: u64,
    /// Of these, compressed.
    pub compressed_bytes: u64,
    /// Guest bytes that it says are zeroes.
    pub zero_bytes: u64,
}

/// What only qcow2 images have.
#[derive(Debug, Clone)]
pub struct Qcow2Facts {
    pub info: ImageInfo,
    pub survey: Survey,
    /// What the file lacks.
    pub cut_short: Option<CutShort>,
    /// What a check says; `None` if it was not wanted, or why it failed.
    pub check: Option<Result<CheckReport, String>>,
    /// What copy-on-write costs an overlay.
    pub growth: Option<Growth>,
}

/// Everything that is known.
#[derive(Debug, Clone)]
pub struct Facts {
    pub name: String,
    pub format: &'static str,
    pub size_bytes: u64,
    /// The image itself, its backing file, and so on.
    pub layers: Vec<Layer>,
    /// Guest bytes that no layer holds.
    pub absent_bytes: u64,
    /// The disk in few cells.
    pub guest: Vec<GuestCell>,
    pub guest_cell_bytes: u64,
    pub qcow2: Option<Qcow2Facts>,
}

/// Collects the facts; a message for the user if that cannot be done.
pub async fn gather(program: &str, arguments: &Arguments) -> Result<Facts, String> {
    let name = &arguments.image;
    let could_not = |error: vellum::Error| {
        let why = report::error_text(&error);
        format!("Could not open '{name}': {why}")
    };
    let spec = arguments.common.spec(&arguments.image).map_err(could_not)?;
    let flags = OpenFlags {
        cache: CacheMode::default(),
        force_share: arguments.common.force_share,
        no_data: true,
        ..OpenFlags::default()
    };
    let device = open_device(&spec, &flags).await.map_err(could_not)?;
    let failed = |error: vellum::Error| {
        let why = report::error_text(&error);
        format!("Could not inspect '{name}': {why}")
    };
    let mut facts = map_disk(&device).await.map_err(failed)?;
    facts.facts.name.clone_from(name);
    if let (Some(image), Some(file)) = (device.as_qcow2(), device.storage()) {
        let encrypted = image.header().crypt_method.number() != 0;
        let progress =
            SharedProgress::new(Progress::new(program, false, arguments.common.quiet, 1.0));
        let mut qcow2 = look_inside(file, arguments, &progress)
            .await
            .map_err(failed)?;
        progress.end();
        // What is encrypted differs from what it was copied from, whatever it is.
        if !encrypted && let Some(below) = device.backing() {
            let clusters = facts.sampler.into_clusters();
            let measured = growth::measure(&device, &below, &clusters).await;
            qcow2.growth = measured.map_err(failed)?;
        }
        facts.facts.qcow2 = Some(qcow2);
    }
    device.close().await.map_err(failed)?;
    Ok(facts.facts)
}

/// The facts, and clusters to look at more closely.
struct Mapped {
    facts: Facts,
    sampler: Sampler,
}

/// Walks over the disk as the guest sees it.
async fn map_disk(device: &Arc<dyn BlockDevice>) -> vellum::Result<Mapped> {
    let size = device.size_bytes();
    let info = device.info();
    let mut layers = chain(device);
    let cluster = info.cluster_size_bytes.unwrap_or(growth::BLOCK_BYTES);
    let mut sampler = Sampler::new(cluster);
    let mut picture = Picture::new(CELLS, size);
    let mut absent_bytes = 0;
    map(device, 0, size, |entry| {
        let extent = &entry.extent;
        picture.add(entry.start_bytes, extent);
        sampler.offer(entry.start_bytes, extent);
        match layers.get_mut(extent.depth as usize) {
            Some(layer) if extent.kind.is_present() => layer.add(extent),
            _ => absent_bytes += extent.len_bytes,
        }
    })
    .await?;
    let facts = Facts {
        name: info.name,
        format: info.format,
        size_bytes: size,
        layers,
        absent_bytes,
        guest_cell_bytes: picture.cell_bytes,
        guest: picture.cells,
        qcow2: None,
    };
    Ok(Mapped { facts, sampler })
}

impl Layer {
    fn add(&mut self, extent: &Extent) {
        if extent.kind.needs_reading() {
            self.data_bytes += extent.len_bytes;
            if extent.kind.is_compressed() {
                self.compressed_bytes += extent.len_bytes;
            }
        } else {
            self.zero_bytes += extent.len_bytes;
        }
    }
}

fn chain(device: &Arc<dyn BlockDevice>) -> Vec<Layer> {
    let mut layers = Vec::new();
    let mut next = Some(device.clone());
    while let Some(device) = next {
        let info = device.info();
        layers.push(Layer {
            disk_bytes: disk_bytes(&device),
            name: info.name,
            format: info.format,
            size_bytes: device.size_bytes(),
            ..Layer::default()
        });
        next = device.backing();
    }
    layers
}

/// What the file of an image takes on the host.
fn disk_bytes(device: &Arc<dyn BlockDevice>) -> Option<u64> {
    let storage = device.storage()?;
    if let Ok(Some(bytes)) = storage.allocated_bytes() {
        return Some(bytes);
    }
    let file = std::fs::metadata(storage.name()).ok()?;
    Some(file.blocks() * 512)
}

/// Check and survey.
async fn look_inside(
    file: Arc<dyn Storage>,
    arguments: &Arguments,
    progress: &SharedProgress,
) -> vellum::Result<Qcow2Facts> {
    let info = ImageInfo::read(file.clone()).await?;
    let checked = match arguments.no_check {
        true => None,
        false => {
            let options = CheckOptions::default()
                .on_finding(None)
                .on_progress(Some(sink(progress)));
            let checked = check(file.clone(), &options).await;
            Some(checked.map_err(|error| report::error_text(&error)))
        }
    };
    let options = SurveyOptions::default()
        .cells(CELLS)
        .on_progress(Some(sink(progress)));
    Ok(Qcow2Facts {
        info,
        cut_short: cut_short(file.clone()).await?,
        survey: survey(file, &options).await?,
        check: checked,
        growth: None,
    })
}

fn sink(progress: &SharedProgress) -> ProgressSink {
    let progress = progress.clone();
    Arc::new(move |done, total| progress.show(done, total))
}

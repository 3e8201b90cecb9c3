//! Makes and opens the images that are measured when the user names none: a full one, whose
//! clusters lie in order or scattered, and empty ones for rows that write. They lie in the folder
//! of `scratch`.

use std::collections::VecDeque;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use vellum::{BlockDevice, Buffer, Io, RequestFlags};
use vellum_format::header::Header;
use vellum_format::l1::L1Entry;
use vellum_graph::open_device;
use vellum_images::create;
use vellum_options::{ImageSpec, OpenFlags, Options, Source};

use super::failure::Failure;
use super::plan::{Layout, READ_CLUSTER_BYTES};
use super::scratch::Interrupt;

/// The full image is written in pieces of this size, so many at a time.
const FILL_BYTES: u64 = 1 << 20;
const FILL_DEPTH: usize = 8;

/// How an image is opened.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Opening {
    pub(super) writable: bool,
    pub(super) direct: bool,
    pub(super) cache_bytes: Option<u64>,
    pub(super) entry_bytes: Option<u64>,
    /// Length of a write log, if there is one: the file [`log_path`].
    pub(super) log_bytes: Option<u64>,
}

impl Opening {
    /// The options of a node with these settings.
    pub(super) fn add_to(&self, options: &mut Options, qcow2: bool) {
        if qcow2 {
            for (key, value) in [
                ("l2-cache-size", self.cache_bytes),
                ("l2-cache-entry-size", self.entry_bytes),
            ] {
                if let Some(value) = value {
                    options.set_text(key, value.to_string());
                }
            }
        }
        let direct = if self.direct { "on" } else { "off" };
        options.set_text("cache.direct", direct);
    }

    pub(super) fn flags(&self) -> OpenFlags {
        OpenFlags {
            writable: self.writable,
            ..OpenFlags::default()
        }
    }
}

/// Where the write log of an image lies. Absolute, so that no part of it is taken for a protocol.
pub(super) fn log_path(image: &Path) -> PathBuf {
    let path = image.with_extension("vlog");
    std::path::absolute(&path).unwrap_or(path)
}

/// Opens a file as a format.
pub(super) async fn open(
    path: &Path,
    format: &str,
    opening: Opening,
) -> Result<Arc<dyn BlockDevice>, Failure> {
    let name = path.display().to_string();
    let mut options = Options::new();
    options.set_text("driver", format);
    options.set_text("file.driver", "file");
    options.set_text("file.filename", name.clone());
    opening.add_to(&mut options, format == "qcow2");
    if let Some(log_bytes) = opening.log_bytes {
        options.set_text("journal", log_path(path).display().to_string());
        options.set_text("journal-size", log_bytes.to_string());
    }
    let spec = ImageSpec {
        added: Options::new(),
        source: Source::Options(options),
        format: None,
        name: name.clone(),
    };
    let opened = open_device(&spec, &opening.flags()).await;
    opened.map_err(|error| Failure::open(&name, &error))
}

/// Makes an empty image; `options` are those of `-o`.
pub(super) async fn make(
    path: &Path,
    format: &str,
    size_bytes: u64,
    options: &str,
) -> Result<(), Failure> {
    let name = path.display().to_string();
    let mut settings = create::settings(&name, format)?;
    settings.set("size", &size_bytes.to_string())?;
    settings.parse(options)?;
    Ok(create::make(&name, format, &settings).await?)
}

/// Bytes of the disk that a file takes.
pub(super) fn allocated_bytes(path: &Path) -> Result<u64, Failure> {
    match path.metadata() {
        Ok(metadata) => Ok(metadata.blocks() * 512),
        Err(error) => Failure::io("stat", path, &error),
    }
}

/// Whether files at `path` can be used around the page cache.
pub(super) async fn can_be_direct(path: &Path) -> bool {
    let opening = Opening {
        direct: true,
        ..Opening::default()
    };
    open(path, "raw", opening).await.is_ok()
}

/// An image in which every cluster is written.
#[derive(Debug)]
pub(super) struct FullImage {
    pub(super) path: PathBuf,
    /// Where the L2 tables lie, and what they say when everything is in order.
    tables: Vec<u64>,
    in_order: Vec<u64>,
    layout: Layout,
}

impl FullImage {
    /// Makes one of `size_bytes`; `progress` hears how many bytes are written.
    pub(super) async fn make(
        path: PathBuf,
        size_bytes: u64,
        direct: bool,
        seed: u64,
        interrupt: &Interrupt,
        progress: &dyn Fn(u64),
    ) -> Result<FullImage, Failure> {
        let options = format!("cluster_size={READ_CLUSTER_BYTES},preallocation=metadata");
        make(&path, "qcow2", size_bytes, &options).await?;
        let opening = Opening {
            writable: true,
            direct,
            ..Opening::default()
        };
        let device = open(&path, "qcow2", opening).await?;
        let filled = fill_device(&device, seed, interrupt, progress).await;
        device.close().await?;
        filled?;
        let (tables, in_order) = match read_tables(&path) {
            Ok(read) => read,
            Err(error) => return Failure::io("read", &path, &error),
        };
        Ok(FullImage {
            path,
            tables,
            in_order,
            layout: Layout::InOrder,
        })
    }

    /// Has the clusters lie in this order: the same data, mapped otherwise.
    pub(super) fn set_layout(&mut self, layout: Layout) -> Result<(), Failure> {
        if self.layout == layout {
            return Ok(());
        }
        let clusters = self.in_order.len();
        let step = match layout {
            Layout::InOrder => 1,
            Layout::Scattered => coprime_step(clusters),
        };
        let entries: Vec<u8> = (0..clusters)
            .flat_map(|index| self.in_order[index * step % clusters].to_be_bytes())
            .collect();
        match write_tables(&self.path, &self.tables, &entries) {
            Ok(()) => self.layout = layout,
            Err(error) => return Failure::io("write", &self.path, &error),
        }
        Ok(())
    }
}

async fn fill_device(
    device: &Arc<dyn BlockDevice>,
    seed: u64,
    interrupt: &Interrupt,
    progress: &dyn Fn(u64),
) -> Result<(), Failure> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut running: VecDeque<Io<Buffer>> = VecDeque::new();
    let (mut at, size_bytes) = (0, device.size_bytes());
    while at < size_bytes {
        interrupt.check()?;
        let oldest = match running.len() >= FILL_DEPTH {
            true => running.pop_front(),
            false => None,
        };
        let mut buffer = match oldest {
            Some(written) => written.await?,
            None => Buffer::zeroed(FILL_BYTES as usize),
        };
        buffer.truncate((size_bytes - at).min(FILL_BYTES) as usize);
        random.fill(&mut buffer);
        let len_bytes = buffer.len() as u64;
        running.push_back(device.write(at, buffer, RequestFlags::default()));
        at += len_bytes;
        progress(at);
    }
    for written in running {
        written.await?;
    }
    Ok(device.flush().await?)
}

/// A step that visits all of `count` indices far from one after the other: the
/// golden ratio's share of them.
fn coprime_step(count: usize) -> usize {
    let common = |mut a: usize, mut b: usize| {
        while b > 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    let mut step = (count as f64 * 0.618_033_988_7) as usize | 1;
    while common(step, count) != 1 {
        step += 2;
    }
    step
}

/// Where the L2 tables are, and their entries as numbers. Without locks, as [`write_tables`].
fn read_tables(path: &Path) -> std::io::Result<(Vec<u64>, Vec<u64>)> {
    let file = File::open(path)?;
    let read = |offset_bytes: u64, len_bytes: u64| {
        let mut bytes = vec![0; len_bytes as usize];
        file.read_exact_at(&mut bytes, offset_bytes)?;
        Ok::<_, std::io::Error>(bytes)
    };
    let header = Header::decode(&read(0, READ_CLUSTER_BYTES)?).map_err(std::io::Error::other)?;
    let entries = u64::from(header.l1_entries);
    let l1 = read(header.l1_table_offset.bytes(), entries * 8)?;
    let geometry = header.geometry();
    let clusters = header.size_bytes.div_ceil(geometry.cluster_size_bytes());
    let mut tables = Vec::new();
    let mut words = Vec::new();
    for index in 0..clusters.div_ceil(geometry.l2_entries()) {
        let entry = L1Entry::read(&l1, index as usize).and_then(L1Entry::l2_offset);
        let Some(offset) = entry else {
            return Err(std::io::Error::other("a table is missing"));
        };
        tables.push(offset.bytes());
        let table = read(offset.bytes(), READ_CLUSTER_BYTES)?;
        let table = table.as_chunks::<8>().0;
        words.extend(table.iter().map(|bytes| u64::from_be_bytes(*bytes)));
    }
    words.truncate(clusters as usize);
    Ok((tables, words))
}

/// Without locks: the image lies in a folder of the benchmark's own, and nobody has it open.
fn write_tables(path: &Path, tables: &[u64], entries: &[u8]) -> std::io::Result<()> {
    let file = File::options().write(true).open(path)?;
    for (table, entries) in tables
        .iter()
        .zip(entries.chunks(READ_CLUSTER_BYTES as usize))
    {
        file.write_all_at(entries, *table)?;
    }
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use vellum_io::lane;

    use super::*;

    #[test]
    fn a_step_visits_everything_once() {
        for count in [1, 2, 7, 64, 1000, 16384] {
            let step = coprime_step(count);
            let mut seen: Vec<_> = (0..count).map(|index| index * step % count).collect();
            seen.sort_unstable();
            assert!(seen.into_iter().eq(0..count), "{count}");
        }
    }

    #[test]
    fn a_scattered_image_is_sound_and_can_be_put_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("full.qcow2");
        lane::block_on(async {
            let interrupt = Interrupt::default();
            let made = FullImage::make(path.clone(), 5 << 20, false, 1, &interrupt, &|_| {});
            let mut image = made.await.unwrap();
            let before = std::fs::read(&path).unwrap();
            image.set_layout(Layout::Scattered).unwrap();
            assert_ne!(before, std::fs::read(&path).unwrap());
            let device = open(&path, "qcow2", Opening::default()).await.unwrap();
            let options = vellum::qcow2::check::CheckOptions::default();
            let storage = device.storage().unwrap();
            let report = vellum::qcow2::check::check(storage, &options).await;
            let report = report.unwrap();
            assert_eq!((report.corruptions, report.leaks), (0, 0));
            image.set_layout(Layout::InOrder).unwrap();
            assert_eq!(before, std::fs::read(&path).unwrap());
        });
    }
}

//! A machine that is off: what its files hold, and what its guest may expect.

use std::sync::Arc;

use vellum::raw::{Raw, RawOptions};
use vellum::{BlockDevice, Result as IoResult};
use vellum_io::{Buffer, Buffers};

use crate::audit::Frozen;
use crate::disk::{Disk, LOG_NAME, Mode, SUMS_NAME};
use crate::failure::{Failure, FailureKind};
use crate::image_engine::{Files, ImageEngine};
use crate::layout::Layout;
use crate::model::Model;
use crate::scenario::{Backing, DataFile, ImageOptions, Place, WriteLog};
use crate::sparse_bytes::SparseBytes;
use crate::storage::SimFileOptions;

/// Behind the end of a file so much, and as much as it is long, may be counted after a cut.
const ROOM_BYTES: u64 = 8 << 20;

/// A machine that is off; see the module's head.
#[derive(Debug, Clone)]
pub struct Machine {
    /// The image, and after it the data file and the write log if there are any.
    pub files: Vec<SparseBytes>,
    /// The backing file.
    pub backing: Option<Arc<SparseBytes>>,
    /// What the guest's sectors may hold.
    pub model: Model,
    /// What the snapshots refer to.
    pub frozen: Arc<Frozen>,
}

/// The storages of a machine that is on, all on one disk.
#[derive(Debug, Clone)]
pub(crate) struct MachineStorages {
    pub(crate) disk: Arc<Disk>,
    files: Files,
    backing: Option<Arc<dyn vellum_storage::Storage>>,
}

impl Machine {
    /// This machine with other expectations and no files yet.
    pub(crate) fn with_model(&self, model: Model) -> Machine {
        let backing = self.backing.clone();
        let frozen = match model.is_thawed() {
            true => Arc::default(),
            false => self.frozen.clone(),
        };
        Machine {
            files: Vec::new(),
            backing,
            model,
            frozen,
        }
    }

    /// This machine with other files, the backing file's last.
    pub(crate) fn with_files(&self, mut files: Vec<SparseBytes>) -> Machine {
        let backing = match files.len() > self.files.len() {
            true => files.pop().map(Arc::new),
            false => None,
        };
        Machine {
            files,
            backing,
            ..self.clone()
        }
    }

    /// Gives it all files of a disk.
    pub(crate) fn set_files(&mut self, options: &ImageOptions, files: Vec<SparseBytes>) {
        self.files = files;
        // The backing file is the last on the disk.
        if let Some(backing) = self.files.split_off(options.own_files()).pop() {
            self.backing = Some(Arc::new(backing));
        }
    }

    /// This machine with longer files: a cut may have left clusters counted that bug behind
    /// the end, where a check does not look.
    pub(crate) fn with_room(&self) -> Machine {
        let mut longer = self.clone();
        if let Some(image) = longer.files.first_mut() {
            image.set_len(2 * image.len_bytes() + ROOM_BYTES);
        }
        if let Some(backing) = longer.backing.as_mut().map(Arc::make_mut) {
            backing.set_len(2 * backing.len_bytes() + ROOM_BYTES);
        }
        longer
    }

    /// Puts the files on a disk.
    pub(crate) fn plug(&self, options: &ImageOptions, mode: Mode) -> MachineStorages {
        let disk = Disk::new(mode);
        let image = disk.add_file("image", self.files[0].clone(), options.traits);
        let mut others = self.files[1..].iter();
        let mut add = |is_there, name, traits| {
            let pages = if is_there {
                others.next()?.clone()
            } else {
                return None;
            };
            Some(disk.add_file(name, pages, traits) as Arc<dyn vellum_storage::Storage>)
        };
        let data = match options.data_file {
            DataFile::Inside => None,
            _ => add(true, "data", options.traits),
        };
        let log = add(
            options.write_log == WriteLog::File,
            LOG_NAME,
            SimFileOptions::default(),
        );
        let sums = add(options.checksums, SUMS_NAME, SimFileOptions::default());
        let backing = self.backing.as_ref().map(|pages| {
            let backing = disk.add_file(
                "backing",
                SparseBytes::clone(pages),
                SimFileOptions::default(),
            );
            backing as Arc<dyn vellum_storage::Storage>
        });
        MachineStorages {
            disk,
            files: Files {
                image,
                data,
                log,
                sums,
                backing: None,
            },
            backing,
        }
    }
}

impl MachineStorages {
    /// Sets the quota that an image has at first.
    pub(crate) fn limit(&self, options: &ImageOptions) {
        if let Place::Quota { blocks } = options.place {
            self.disk.set_quota(0, Some(blocks));
        }
    }

    /// The image and its data file alone.
    pub(crate) fn files(&self) -> Files {
        self.files.clone()
    }

    /// Opens the image over its backing file.
    pub(crate) async fn open(
        &self,
        engine: &dyn ImageEngine,
        options: &ImageOptions,
    ) -> Result<Arc<dyn BlockDevice>, Failure> {
        let failed = |error| Failure::error(FailureKind::Open, "open", &error);
        let mut files = self.files();
        let options = &self.options_now(&mut files, options);
        if self.has_backing(options) {
            let read_only = true;
            files.backing = self
                .open_backing(engine, options, read_only)
                .await
                .map_err(failed)?;
        }
        engine.open(files, options).await.map_err(failed)
    }

    /// Opens the image over a backing device that is open already.
    pub(crate) async fn open_over(
        &self,
        engine: &dyn ImageEngine,
        options: &ImageOptions,
        backing: Arc<dyn BlockDevice>,
    ) -> IoResult<Arc<dyn BlockDevice>> {
        let mut files = self.files();
        let options = self.options_now(&mut files, options);
        files.backing = Some(backing);
        engine.open(files, &options).await
    }

    /// How the image is opened now: once it was downgraded it has no feature bits, no write log and
    /// no checksums.
    fn options_now(&self, files: &mut Files, options: &ImageOptions) -> ImageOptions {
        let mut options = options.clone();
        let mut version = [0; 4];
        self.disk.contents(0).read(4, &mut version);
        if version == 2_u32.to_be_bytes() {
            (files.log, files.sums) = (None, None);
            options.write_log = WriteLog::None;
        }
        options
    }

    /// Whether the image stands on its backing file (still). The smallest header has no
    /// space to say so.
    pub(crate) fn has_backing(&self, options: &ImageOptions) -> bool {
        let image = self.disk.contents(0);
        let says = || Layout::parse(&image).is_ok_and(|layout| layout.has_backing);
        // Images of other formats are handed theirs, and keep it.
        let is_sure = options.requests_only || !options.names_backing();
        options.backing != Backing::None && (is_sure || says())
    }

    /// Opens the backing file; `None` if there is none.
    pub(crate) async fn open_backing(
        &self,
        engine: &dyn ImageEngine,
        options: &ImageOptions,
        read_only: bool,
    ) -> IoResult<Option<Arc<dyn BlockDevice>>> {
        let Some(storage) = self.backing.clone() else {
            return Ok(None);
        };
        let device = match options.backing {
            Backing::None => return Ok(None),
            Backing::Raw(_) => {
                let options = RawOptions::default().read_only(read_only);
                Raw::open(storage, options)?
            }
            Backing::Qcow2 {
                size_bytes,
                cluster_bits,
            } => {
                let below = Files {
                    image: storage,
                    data: None,
                    log: None,
                    sums: None,
                    backing: None,
                };
                let options = ImageOptions::plain(size_bytes, cluster_bits);
                match read_only {
                    true => engine.open_backing(below, &options).await?,
                    false => engine.open(below, &options).await?,
                }
            }
        };
        Ok(Some(device))
    }

    /// The backing file alone, if it is a qcow2 image.
    pub(crate) fn backing_image(&self, options: &ImageOptions) -> Option<Files> {
        let is_image = matches!(options.backing, Backing::Qcow2 { .. });
        self.backing
            .clone()
            .filter(|_| is_image)
            .map(|image| Files {
                image,
                data: None,
                log: None,
                sums: None,
                backing: None,
            })
    }

    /// What the backing file holds now.
    pub(crate) fn backing_contents(&self) -> SparseBytes {
        self.disk.contents(self.own_files())
    }

    /// What all files hold now, the backing file last.
    pub(crate) fn all_contents(&self) -> Vec<SparseBytes> {
        let mut all = self.contents();
        all.extend(self.backing.as_ref().map(|_| self.backing_contents()));
        all
    }

    /// Waits until nothing is in flight that an image has left behind.
    pub(crate) async fn wait_for_requests(&self) {
        let mut quiet = 0;
        while quiet < 3 {
            self.disk.end_delays();
            // Each read lets others end and begin.
            let buffer = Buffers::from_iter([Buffer::zeroed(1)]);
            drop(self.files.image.read(0, buffer).await);
            quiet = match self.disk.in_flight() {
                0 => quiet + 1,
                _ => 0,
            };
        }
    }

    /// Makes durable what there is, on a disk that does not fail.
    pub(crate) async fn make_durable(&self) {
        drop(self.files.image.flush().await);
        if let Some(data) = &self.files.data {
            drop(data.flush().await);
        }
        if let Some(log) = &self.files.log {
            drop(log.flush().await);
        }
        if let Some(sums) = &self.files.sums {
            drop(sums.flush().await);
        }
    }

    fn own_files(&self) -> usize {
        let files = &self.files;
        let others = [&files.data, &files.log, &files.sums];
        1 + others.into_iter().flatten().count()
    }

    /// What the image and the files that belong to it hold now.
    pub(crate) fn contents(&self) -> Vec<SparseBytes> {
        let files = 0..self.own_files();
        files.map(|file| self.disk.contents(file)).collect()
    }
}

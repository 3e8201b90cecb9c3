//! Vellum's own engine as the engine of a simulation.

use std::sync::Arc;

use parking_lot::Mutex;
use vellum::BlockDevice;
use vellum::gate::DenyAll;
use vellum::luks::{Cipher, FormatOptions, IterationTime, Mode, Passphrase};
use vellum::qcow2::check::{CheckOptions, FindingKind, Fix, check, repair};
use vellum::qcow2::checksums::ChecksumOptions;
use vellum::qcow2::create::{CreateOptions, Encryption, create};
use vellum::qcow2::{
    Backing as OpenBacking, CacheOptions, OpenOptions, PreallocateAhead, Qcow2, WriteLogOptions,
};
use vellum_io::Io;

use crate::image_engine::{Files, Findings, ImageEngine};
use crate::scenario::{Backing, DataFile, ImageOptions, WriteLog};

/// Vellum's qcow2 engine.
#[derive(Debug, Clone, Copy, Default)]
pub struct Engine;

/// Vellum's engine, to be simulated.
pub fn engine() -> Arc<dyn ImageEngine> {
    Arc::new(Engine)
}

/// What unlocks encrypted images.
pub(crate) const PASSPHRASE: &str = "simulated";

/// How LUKS headers are made.
pub(crate) fn luks_options() -> FormatOptions {
    FormatOptions {
        // The shortest key makes the smallest header and unlocks soonest; no time
        // is measured.
        cipher: Cipher::Aes128,
        mode: Mode::Cbc,
        iteration_time: IterationTime::Iterations(1),
        ..FormatOptions::default()
    }
}

fn encryption() -> Encryption {
    Encryption::Luks {
        options: luks_options(),
        passphrase: Passphrase::from(PASSPHRASE),
    }
}

fn create_options(options: &ImageOptions) -> CreateOptions {
    let backing = match options.backing {
        _ if !options.names_backing() => None,
        Backing::None => None,
        Backing::Raw(_) => Some("raw"),
        Backing::Qcow2 { .. } => Some("qcow2"),
    };
    CreateOptions::default()
        .size_bytes(options.size_bytes)
        .version(options.version)
        .cluster_size_bytes(1 << options.cluster_bits)
        .refcount_bits(1 << options.refcount_order)
        .extended_l2(options.extended_l2)
        .lazy_refcounts(options.lazy_refcounts)
        .backing_file(backing.map(|_| "backing".to_owned()))
        .backing_format(backing.map(str::to_owned))
        .data_file((options.data_file != DataFile::Inside).then(|| "data".to_owned()))
        .data_file_raw(options.data_file == DataFile::ExternalRaw)
        .encryption(options.encrypted.then(encryption))
}

fn open_options(files: &Files, options: &ImageOptions) -> OpenOptions {
    let smallest = CacheOptions::default()
        .l2_cache_size_bytes(Some(1))
        .refcount_cache_size_bytes(Some(1))
        .l2_cache_entry_size_bytes(Some(512));
    OpenOptions::default()
        .cache(if options.tiny_cache {
            smallest
        } else {
            CacheOptions::default()
        })
        .backing(match &files.backing {
            Some(device) => OpenBacking::Given(device.clone()),
            None => OpenBacking::None,
        })
        .data_file(files.data.clone())
        .data_cache_size_bytes((!options.data_cache).then_some(0))
        .write_log(write_log(files, options))
        .checksums(files.sums.clone().map(|storage| ChecksumOptions::Keep {
            storage,
            name: "sums".to_owned(),
        }))
        .ahead(if options.eager {
            PreallocateAhead::default()
                .after_clusters(0)
                .max_bytes(8 << options.cluster_bits)
        } else {
            PreallocateAhead::default()
        })
        .bitmap_step_bytes(Some(1024))
        .discard(true)
        .discard_no_unref(options.discard_no_unref)
        .pass_discard_other(true)
        .passphrase(options.encrypted.then(|| Passphrase::from(PASSPHRASE)))
}

/// A log so short that it goes on at its start again and again.
fn write_log(files: &Files, options: &ImageOptions) -> Option<WriteLogOptions> {
    let log = match options.write_log {
        WriteLog::Inside => Some(WriteLogOptions::inside()),
        _ => (files.log.clone()).map(|file| WriteLogOptions::new(file, "log")),
    };
    log.map(|log| log.len_bytes(WriteLogOptions::MIN_LEN_BYTES))
}

impl ImageEngine for Engine {
    fn create(&self, files: Files, options: &ImageOptions) -> Io<()> {
        let options = create_options(options);
        Io::boxed(async move { create(files.image, files.data, &options).await })
    }

    fn open(&self, files: Files, options: &ImageOptions) -> Io<Arc<dyn BlockDevice>> {
        let options = open_options(&files, options);
        Io::boxed(async move {
            let image = Qcow2::open(files.image, Arc::new(DenyAll), options).await?;
            Ok(image as Arc<dyn BlockDevice>)
        })
    }

    fn open_backing(&self, files: Files, options: &ImageOptions) -> Io<Arc<dyn BlockDevice>> {
        let options = (open_options(&files, options)).read_only(true);
        Io::boxed(async move {
            let image = Qcow2::open(files.image, Arc::new(DenyAll), options).await?;
            Ok(image as Arc<dyn BlockDevice>)
        })
    }

    fn check(&self, files: Files) -> Io<Findings> {
        Io::boxed(check_or_repair(files, None))
    }

    fn repair(&self, files: Files) -> Io<Findings> {
        Io::boxed(check_or_repair(files, Some(Fix::All)))
    }
}

async fn check_or_repair(files: Files, fix: Option<Fix>) -> vellum::Result<Findings> {
    let messages = Arc::new(Mutex::new(Vec::new()));
    let sink = messages.clone();
    let options = CheckOptions::default().on_finding(Some(Arc::new(move |finding| {
        if finding.kind != FindingKind::Leak {
            let mut sink = sink.lock();
            sink.push(finding.message.clone());
        }
    })));
    let report = match fix {
        None => check(files.image, &options).await?,
        Some(fix) => repair(files.image, fix, &options).await?,
    };
    let messages = messages.lock().clone();
    Ok(Findings {
        corruptions: report.corruptions,
        check_errors: report.check_errors,
        leaks: report.leaks,
        messages,
    })
}

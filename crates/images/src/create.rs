//! Making images: `create`, and the target of `convert`.

mod foreign_image;
mod other_files;
mod own_file;
mod qcow2;

use std::path::PathBuf;
use std::sync::Arc;

use vellum::qcow2::create::CreateOptions;
use vellum::{Buffer, Buffers, Error, ErrorKind, Preallocation, Result, Storage};
use vellum_format::header::CompressionType;
use vellum_options::create_options::{CreateSettings, OptionDescription};
use vellum_options::{
    ImageSpec, OpenFlags, error_text, filename, nbd_name, rbd_name, repository_name, url_name,
};
use vellum_storage::WriteFlags;
use vellum_storage::file::{Create, FileOptions, FileStorage, Locks};
use vellum_storage::lock::Permissions;

use crate::create_options::{OBJECT_SIZE, all_options, not_creatable};
use crate::created_elsewhere;

pub use other_files::other_files;
use own_file::{refuse_own_file, refuse_own_files};
pub use qcow2::ShortStorage;
use vellum_graph::probe::is_format_name;
use vellum_graph::{checksums_beside, encryption, foreign, open_device, open_file};

const SECTOR_BYTES: u64 = 512;

/// The first block of a new raw file is allocated, as QEMU does it: what direct
/// I/O needs can only be found out by reading data that is there.
const FIRST_BLOCK_BYTES: u64 = 4096;

/// Zeroes are written out in pieces of this size (`preallocation=full`).
const ZERO_CHUNK_BYTES: u64 = 1 << 20;

/// What `create` was asked for.
#[derive(Debug, Clone, Default)]
pub struct CreateRequest {
    /// The image to make.
    pub filename: String,
    /// Its format.
    pub format: String,
    /// The `-o` texts, joined by commas.
    pub options: Option<String>,
    /// The backing file (`-b`), named as it is to stand in the image.
    pub backing: Option<String>,
    /// Its format (`-F`).
    pub backing_format: Option<String>,
    /// The size in bytes, where one is given as an argument.
    pub size_bytes: Option<u64>,
    /// Do not look at the backing file (`-u`).
    pub unchecked_backing: bool,
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, "create", message)
}

/// Settings of a format on a file.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] for a format or a file that cannot be made.
pub fn settings(filename: &str, format: &str) -> Result<CreateSettings> {
    let options = options_on(format, filename).ok_or_else(|| invalid(not_creatable(format)))?;
    let settings = CreateSettings::of(options);
    if filename.starts_with("json:") {
        return Err(invalid("Unknown protocol 'json'"));
    }
    let makes_none = |protocol: &&str| {
        matches!(
            *protocol,
            "blkdebug" | "blkverify" | "null-co" | "null-aio" | repository_name::DRIVER
        ) || url_name::is_scheme(protocol)
    };
    if let Some(protocol) = filename::protocol(filename).filter(makes_none) {
        let hint = match url_name::is_store(protocol) {
            true => "; make the image here, and put a whole image there with 'convert'",
            false => "",
        };
        return Err(invalid(format!(
            "Protocol driver '{protocol}' does not support image creation{hint}"
        )));
    }
    filename::node_options(filename)?;
    Ok(settings)
}

/// The options of a format on a file of this name.
pub fn options_on(format: &str, filename: &str) -> Option<Vec<OptionDescription>> {
    let mut options = all_options(format)?;
    let is_rbd = filename::protocol(filename) == Some(rbd_name::SCHEME);
    if is_rbd && !options.iter().any(|option| option.name == OBJECT_SIZE.name) {
        options.push(OBJECT_SIZE);
    }
    Some(options)
}

/// Takes the names of a backing file and of its format into settings.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] for a format that knows no backing files.
pub fn set_backing(
    settings: &mut CreateSettings,
    format: &str,
    backing: Option<&str>,
    backing_format: Option<&str>,
) -> Result<()> {
    if let Some(backing) = backing {
        if !settings.knows("backing_file") {
            return Err(invalid(format!(
                "Backing file not supported for file format '{format}'"
            )));
        }
        settings.set("backing_file", backing)?;
    }
    if let Some(backing_format) = backing_format {
        if !settings.knows("backing_fmt") {
            return Err(invalid(format!(
                "Backing file format not supported for file format '{format}'"
            )));
        }
        settings.set("backing_fmt", backing_format)?;
    }
    Ok(())
}

/// Checks a request and fills in what follows from the backing file. Nothing is
/// made yet.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] for settings that are unknown, wrong or contradict each
/// other; what opening the backing file reports.
pub async fn prepare(request: &CreateRequest) -> Result<CreateSettings> {
    let mut settings = settings(&request.filename, &request.format)?;
    if let Some(options) = &request.options {
        settings.parse(options)?;
    }
    if let Some(size_bytes) = request.size_bytes {
        if settings.is_given("size") {
            return Err(invalid("The image size must be specified only once"));
        }
        settings.set("size", &size_bytes.to_string())?;
    }
    let backing_format = request.backing_format.as_deref();
    set_backing(
        &mut settings,
        &request.format,
        request.backing.as_deref(),
        backing_format,
    )?;
    if let Some(backing) = settings.text("backing_file").map(str::to_owned) {
        if backing.is_empty() {
            return Err(invalid("Expected backing file name, got empty string"));
        }
        if backing == request.filename {
            return Err(invalid(
                "Error: Trying to create an image with the same filename as the backing file",
            ));
        }
        refuse_own_file(&made_files(request, &settings), &backing)?;
        check_backing(request, &mut settings, &backing).await?;
    }
    let needs_size = !encryption::has_detached_header(&settings);
    if needs_size && settings.integer("size").is_none() {
        return Err(invalid("Image creation needs a size parameter"));
    }
    Ok(settings)
}

/// The names of the files that a request makes: the image first, then its external data file.
fn made_files<'a>(request: &'a CreateRequest, settings: &'a CreateSettings) -> Vec<&'a str> {
    std::iter::once(request.filename.as_str())
        .chain(settings.text("data_file"))
        .collect()
}

async fn check_backing(
    request: &CreateRequest,
    settings: &mut CreateSettings,
    backing: &str,
) -> Result<()> {
    let format = settings.text("backing_fmt").map(str::to_owned);
    let unnamed = "Backing file specified without backing format";
    if request.unchecked_backing {
        return match format {
            Some(_) => Ok(()),
            None => Err(invalid(unnamed)),
        };
    }
    let full = filename::resolve(&request.filename, backing)?;
    let spec = ImageSpec::filename(full).with_format(format.as_deref());
    // Nothing of it is used but its size: whoever writes to it may go on.
    let flags = OpenFlags {
        no_data: true,
        force_share: true,
        ..OpenFlags::default()
    };
    let device = open_device(&spec, &flags).await.map_err(|error| {
        invalid(format!(
            "{}\nCould not open backing image.",
            error_text(&error)
        ))
    })?;
    refuse_own_files(&made_files(request, settings), backing, &device)?;
    if format.is_none() {
        let detected = device.info().format;
        return Err(invalid(format!(
            "{unnamed}\nDetected format of {detected}."
        )));
    }
    if settings.integer("size").is_none() {
        settings.set("size", &device.size_bytes().to_string())?;
    }
    Ok(())
}

/// Makes an image from checked settings.
///
/// # Errors
/// What making or opening the file, and making the image in it, report.
pub async fn make(name: &str, format: &str, settings: &CreateSettings) -> Result<()> {
    make_on(name, format, settings).await.map(drop)
}

/// As [`make`]; reports a storage of fixed length that cannot hold all of a qcow2 image's disk.
///
/// # Errors
/// As [`make`].
pub async fn make_on(
    name: &str,
    format: &str,
    settings: &CreateSettings,
) -> Result<Option<ShortStorage>> {
    match format {
        "host_device" if std::fs::metadata(name).is_ok_and(|file| file.is_file()) => {
            Err(invalid(format!(
                "'host_device' driver requires '{name}' to be either a character or block device"
            )))
        }
        "qcow2" => qcow2::make(name, settings).await,
        "luks" => make_luks(name, settings).await.map(|()| None),
        _ => match foreign::find(format).and_then(|format| format.create.as_ref()) {
            Some(creation) => foreign_image::make(name, creation, settings).await,
            None => make_raw(name, settings).await,
        }
        .map(|()| None),
    }
}

/// What an image is made in.
enum Target {
    /// A file of the host, made anew, and the checksums of the image that it was before.
    File(Arc<FileStorage>, Option<PathBuf>),
    /// An export that is there already.
    Export(Arc<dyn Storage>),
    /// What was made on another machine.
    Elsewhere(Arc<dyn Storage>),
}

impl Target {
    /// Makes or opens what a name means.
    async fn open(name: &str, settings: &CreateSettings) -> Result<Target> {
        if created_elsewhere::is_elsewhere(name) {
            let object_bytes = match settings.knows("encrypt.format") {
                // It is that of qcow2.
                true => None,
                false => settings.integer("cluster_size"),
            };
            let made = created_elsewhere::create(name, object_bytes).await?;
            return Ok(Target::Elsewhere(made));
        }
        if !filename::protocol(name).is_some_and(nbd_name::is_scheme) {
            let path = filename::local_path(name)?;
            let left_over = checksums_beside(&path).await;
            let file = create_file(&path).await?;
            return Ok(Target::File(file, left_over));
        }
        let export = open_protocol(name).await.map_err(|error| {
            let protocol = filename::protocol(name).unwrap_or_default();
            let driver = protocol.split('+').next().unwrap_or_default();
            let message = format!(
                "Protocol driver '{driver}' does not support creating new images, so an existing \
                 image must be selected as the target; however, opening the given target as an \
                 existing image failed"
            );
            error.context("create", message)
        })?;
        Ok(Target::Export(export))
    }

    fn storage(&self) -> Arc<dyn Storage> {
        match self {
            Target::File(file, _) => file.clone(),
            Target::Export(storage) | Target::Elsewhere(storage) => storage.clone(),
        }
    }

    /// Makes an image in it once nobody else uses it, and ends the making.
    async fn fill(self, name: &str, filled: impl AsyncFnOnce(&Target) -> Result<()>) -> Result<()> {
        let claimed = match &self {
            Target::File(file, _) => {
                // Where somebody else uses it already it stays: he may need it.
                file.set_permissions_patiently(Permissions::WRITER).await?;
                Ok(())
            }
            Target::Export(export) => claim_export(export, 0).await,
            Target::Elsewhere(_) => Ok(()),
        };
        let made = match claimed {
            Ok(()) => filled(&self).await,
            Err(error) => Err(error),
        };
        self.end(name, made).await
    }

    /// Ends the making: a half-made file is of no use to anybody.
    async fn end<T>(self, name: &str, result: Result<T>) -> Result<T> {
        match self {
            Target::File(_, left_over) => {
                if let Some(path) = left_over.filter(|_| result.is_ok()) {
                    // If it stays, who opens the image with checksums is told what to do.
                    let _ = std::fs::remove_file(path);
                }
                remove_after_failure(&filename::local_path(name)?, result)
            }
            Target::Export(storage) => end_use(&storage, result).await,
            Target::Elsewhere(storage) => {
                let result = end_use(&storage, result).await;
                if result.is_err() {
                    created_elsewhere::remove(name).await;
                }
                result
            }
        }
    }

    /// Makes room for a raw image, or for what stands before one.
    async fn make_room(&self, size_bytes: u64, preallocation: Preallocation) -> Result<()> {
        match self {
            Target::File(file, _) => fill_raw(file, size_bytes, preallocation).await,
            Target::Export(export) => claim_export(export, size_bytes).await,
            Target::Elsewhere(_) if preallocation != Preallocation::Off => {
                Err(invalid("This protocol knows no preallocation"))
            }
            Target::Elsewhere(storage) => storage.truncate(size_bytes).await,
        }
    }
}

/// Ends the use of a storage that an image was made in.
async fn end_use<T>(storage: &Arc<dyn Storage>, result: Result<T>) -> Result<T> {
    match result {
        Ok(value) => {
            storage.flush().await?;
            storage.close().await?;
            Ok(value)
        }
        // The first error is the one to tell.
        Err(error) => storage.close().await.and(Err(error)),
    }
}

/// Opens an export to make an image in it. What was there before is gone: its first
/// sector is zeroes, so that nobody takes it for an image.
async fn open_protocol(name: &str) -> Result<Arc<dyn Storage>> {
    let flags = OpenFlags {
        writable: true,
        ..OpenFlags::default()
    };
    let spec = ImageSpec::filename(name).with_format(Some("nbd"));
    let file = open_file(&spec, &flags).await?;
    Ok(file.storage)
}

/// Zeroes the first sector of a device or an export, whose length stays, so that its old content is not
/// probed as an image format.
async fn clear_first_sector(storage: &dyn Storage, len_bytes: u64) -> Result<()> {
    let first = SECTOR_BYTES.min(len_bytes);
    let zeroes = Buffers::from_iter([Buffer::zeroed(first as usize)]);
    storage.write(0, zeroes, WriteFlags::default()).await?;
    Ok(())
}

/// Gives the first sector of an export zeroes and checks that the image fits.
async fn claim_export(export: &Arc<dyn Storage>, size_bytes: u64) -> Result<()> {
    let len_bytes = export.len_bytes()?;
    if size_bytes > len_bytes {
        return Err(invalid("Cannot grow NBD nodes"));
    }
    clear_first_sector(&**export, len_bytes).await
}

/// Opens a file to make an image in it: others are kept away, and it is emptied.
pub(crate) async fn create_file(path: &str) -> Result<Arc<FileStorage>> {
    FileStorage::open_patiently(
        path,
        &FileOptions::default()
            .create(Create::Truncate)
            .locks(Locks::Of(Permissions::CREATOR)),
    )
    .await
}

/// A half-made image is of no use to anybody.
fn remove_after_failure<T>(path: &str, result: Result<T>) -> Result<T> {
    if result.is_err() && std::fs::metadata(path).is_ok_and(|file| file.is_file()) {
        // The first error is the one to tell.
        let _ = std::fs::remove_file(path);
    }
    result
}

async fn make_raw(name: &str, settings: &CreateSettings) -> Result<()> {
    let size_bytes = settings.integer("size").unwrap_or(0);
    let size_bytes = size_bytes
        .checked_next_multiple_of(SECTOR_BYTES)
        .ok_or_else(too_large_for_raw)?;
    let preallocation = preallocation(settings)?;
    if preallocation == Preallocation::Metadata {
        return Err(invalid("Unsupported preallocation mode: metadata"));
    }
    let target = Target::open(name, settings).await?;
    let filled = target.make_room(size_bytes, preallocation).await;
    let filled = filled.map_err(|error| match error.errno() {
        libc::EFBIG => too_large_for_raw(),
        _ => error,
    });
    target.end(name, filled).await
}

fn too_large_for_raw() -> Error {
    invalid("The image size is too large for file format 'raw'")
}

pub(crate) async fn fill_raw(
    file: &Arc<FileStorage>,
    size_bytes: u64,
    preallocation: Preallocation,
) -> Result<()> {
    if file.is_device() {
        return match file.len_bytes()? {
            len if len < size_bytes => Err(invalid("The device is too small for the image")),
            len => clear_first_sector(&**file, len).await,
        };
    }
    let reserve = |error: Error| {
        let message = format!(
            "Could not preallocate data for the new file: {}",
            error.message()
        );
        error.context("create", message)
    };
    match preallocation {
        Preallocation::Falloc if size_bytes > 0 => {
            file.allocate(0, size_bytes).await.map_err(reserve)?;
        }
        Preallocation::Full => {
            let mut at = 0;
            while at < size_bytes {
                let len_bytes = ZERO_CHUNK_BYTES.min(size_bytes - at);
                let zeroes = Buffers::from_iter([Buffer::zeroed(len_bytes as usize)]);
                file.write(at, zeroes, WriteFlags::default())
                    .await
                    .map_err(reserve)?;
                at += len_bytes;
            }
            file.flush().await?;
        }
        _ => allocate_first_block(file, size_bytes).await?,
    }
    file.truncate(size_bytes).await.map_err(|error| {
        let message = format!("Could not resize file: {}", error.message());
        Error::new(error.kind(), "create", message).with_errno(error.errno())
    })
}

async fn allocate_first_block(file: &FileStorage, size_bytes: u64) -> Result<()> {
    let len_bytes = if size_bytes < FIRST_BLOCK_BYTES {
        SECTOR_BYTES
    } else {
        FIRST_BLOCK_BYTES
    };
    let zeroes = Buffers::from_iter([Buffer::zeroed(len_bytes.min(size_bytes) as usize)]);
    file.write(0, zeroes, WriteFlags::default()).await?;
    Ok(())
}

async fn make_luks(name: &str, settings: &CreateSettings) -> Result<()> {
    let size_bytes = match encryption::has_detached_header(settings) {
        // The payload is another file.
        true => 0,
        false => settings.integer("size").unwrap_or(0),
    };
    let preallocation = preallocation(settings)?;
    let volume = encryption::new_volume(settings).await?;
    let whole = size_bytes
        .checked_next_multiple_of(SECTOR_BYTES)
        .and_then(|size| size.checked_add(volume.header_bytes()))
        .filter(|&whole| whole <= i64::MAX as u64)
        .ok_or_else(|| invalid("The requested file size is too large"))?;
    let target = Target::open(name, settings).await?;
    let made = async {
        target.make_room(whole, preallocation).await?;
        let file = target.storage();
        let header = Buffers::from_iter([Buffer::copy_of(&volume.bytes)]);
        file.write(0, header, WriteFlags::default()).await?;
        file.flush().await
    };
    let made = made.await;
    target.end(name, made).await
}

pub(crate) fn preallocation(settings: &CreateSettings) -> Result<Preallocation> {
    let name = settings.text("preallocation").unwrap_or("off");
    Preallocation::from_name(name).ok_or_else(|| not_accepted("preallocation", name))
}

fn not_accepted(name: &str, value: &str) -> Error {
    invalid(format!(
        "Parameter '{name}' does not accept value '{value}'"
    ))
}

/// The engine's creation options for settings of a qcow2 image.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] for a value that its option does not have.
pub fn qcow2_options(settings: &CreateSettings) -> Result<CreateOptions> {
    let text = |name| settings.text(name).map(str::to_owned);
    let version = match settings.text("compat") {
        Some("0.10" | "v2") => 2,
        None | Some("1.1" | "v3") => 3,
        Some(other) => return Err(not_accepted("version", other)),
    };
    let compression_type = match settings.text("compression_type") {
        None | Some("zlib") => CompressionType::Zlib,
        Some("zstd") => CompressionType::Zstd,
        Some(other) => return Err(not_accepted("compression-type", other)),
    };
    if let Some(format) = settings
        .text("backing_fmt")
        .filter(|name| !is_format_name(name))
    {
        return Err(not_accepted("backing-fmt", format));
    }
    let defaults = CreateOptions::default();
    Ok(CreateOptions::default()
        .size_bytes(settings.integer("size").unwrap_or(0))
        .version(version)
        .cluster_size_bytes(
            settings
                .integer("cluster_size")
                .unwrap_or(defaults.cluster_size_bytes),
        )
        .refcount_bits(
            settings
                .integer("refcount_bits")
                .unwrap_or(defaults.refcount_bits),
        )
        .extended_l2(settings.bool("extended_l2"))
        .lazy_refcounts(settings.bool("lazy_refcounts"))
        .compression_type(compression_type)
        .backing_file(text("backing_file"))
        .backing_format(text("backing_fmt"))
        .data_file(text("data_file"))
        .data_file_raw(settings.bool("data_file_raw"))
        .preallocation(preallocation(settings)?)
        .encryption(encryption::for_qcow2(settings)?))
}

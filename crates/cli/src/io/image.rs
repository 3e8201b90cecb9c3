//! The open image of a session, and the commands that open it, open it anew and close it.

use std::sync::Arc;

use vellum::qcow2::AsQcow2;
use vellum::{BlockDevice, Error, ErrorKind, RequestFlags, Result, ZeroRequest};
use vellum_graph::merged_options::{self, Drivers};
use vellum_graph::open_device;
use vellum_images::overlay;
use vellum_io::Buffer;
use vellum_io::error::errno_text;
use vellum_options::{ImageSpec, OpenFlags, Options, Source, filename};

use super::arguments::Words;
use super::options::{NO_CACHE, default_flags, set_aio, set_cache, set_discard};
use super::outcome::{Failed, Outcome};
use crate::report;

/// An open image and how it was opened.
#[derive(Debug, Clone)]
pub struct Image {
    device: Arc<dyn BlockDevice>,
    spec: ImageSpec,
    flags: OpenFlags,
    /// Changes go to an overlay that is gone with the image.
    temporary: bool,
}

impl Image {
    /// Opens an image, or a temporary overlay over it; a failure is reported.
    pub async fn open(spec: ImageSpec, flags: OpenFlags, temporary: bool) -> Outcome<Image> {
        let name = match &spec.source {
            Source::Filename(name) => Some(name.clone()),
            Source::Options(_) => None,
        };
        Image::open_named(spec, flags, temporary, name.as_deref()).await
    }

    /// As [`Image::open`], with the file name that the user gave beside options.
    async fn open_named(
        spec: ImageSpec,
        flags: OpenFlags,
        temporary: bool,
        name: Option<&str>,
    ) -> Outcome<Image> {
        match Image::try_open(spec, flags, temporary).await {
            Ok(image) => Ok(image),
            Err(error) => {
                let device = name.map(|name| format!(" device {name}"));
                let device = device.unwrap_or_default();
                let text = report::error_text(&error);
                report::error(format_args!("can't open{device}: {text}"));
                Err(Failed)
            }
        }
    }

    async fn try_open(spec: ImageSpec, flags: OpenFlags, temporary: bool) -> Result<Image> {
        let device = match temporary {
            true => {
                let below = OpenFlags {
                    writable: false,
                    copy_on_read: false,
                    ..flags.clone()
                };
                overlay::put_on(open_device(&spec, &below).await?).await?
            }
            false => open_device(&spec, &flags).await?,
        };
        Ok(Image {
            device,
            spec,
            flags,
            temporary,
        })
    }

    /// Closes the image; what cannot be written back is reported. Of an image that is
    /// corrupt users have been told when that was found.
    pub async fn close(self) -> Outcome {
        self.device.close().await.map_err(|error| {
            if error.kind() == ErrorKind::Corrupt {
                return Failed;
            }
            if self.device.as_qcow2().is_none() {
                report::fail(&error);
                return Failed;
            }
            let why = errno_text(error.errno());
            report::error(format_args!("Failed to flush the L2 table cache: {why}"));
            report::error(format_args!(
                "Failed to flush the refcount block cache: {why}"
            ));
            Failed
        })
    }

    /// The device.
    pub fn device(&self) -> &Arc<dyn BlockDevice> {
        &self.device
    }

    /// Whether writes are allowed.
    pub fn is_writable(&self) -> bool {
        !self.device.info().read_only
    }

    /// Reads a range inside the device.
    pub async fn read(&self, offset_bytes: u64, buffer: Buffer) -> Result<Buffer> {
        self.check_range(offset_bytes, buffer.len() as u64)?;
        self.device.read(offset_bytes, buffer).await
    }

    /// Writes a range inside the device.
    pub async fn write(
        &self,
        offset_bytes: u64,
        buffer: Buffer,
        flags: RequestFlags,
    ) -> Result<()> {
        self.check_range(offset_bytes, buffer.len() as u64)?;
        self.device
            .write(offset_bytes, buffer, flags)
            .await
            .map(drop)
    }

    /// Writes a range inside the device, compressed.
    pub async fn write_compressed(&self, offset_bytes: u64, buffer: Buffer) -> Result<()> {
        self.check_range(offset_bytes, buffer.len() as u64)?;
        let flags = RequestFlags::default();
        let written = self.device.write_compressed(offset_bytes, buffer, flags);
        written.await.map(drop)
    }

    /// Reads a part of the state of the virtual machine.
    pub async fn load_vm_state(&self, offset_bytes: u64, buffer: Buffer) -> Result<Buffer> {
        let image = self.device.as_qcow2().ok_or_else(no_vm_state)?;
        image.load_vm_state(offset_bytes, buffer).await
    }

    /// Writes a part of the state of the virtual machine.
    pub async fn save_vm_state(&self, offset_bytes: u64, buffer: Buffer) -> Result<()> {
        let image = self.device.as_qcow2().ok_or_else(no_vm_state)?;
        image.save_vm_state(offset_bytes, buffer).await?;
        match self.flags.cache.writethrough {
            true => self.device.flush().await,
            false => Ok(()),
        }
    }

    /// Writes zeroes to a range inside the device.
    pub async fn write_zeroes(
        &self,
        offset_bytes: u64,
        len_bytes: u64,
        request: ZeroRequest,
    ) -> Result<()> {
        self.check_range(offset_bytes, len_bytes)?;
        self.device
            .write_zeroes(offset_bytes, len_bytes, request)
            .await
    }

    /// Discards a range inside the device.
    pub async fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Result<()> {
        self.check_range(offset_bytes, len_bytes)?;
        self.device.discard(offset_bytes, len_bytes).await
    }

    /// QEMU's block layer answers a request beyond the end with EIO.
    fn check_range(&self, offset_bytes: u64, len_bytes: u64) -> Result<()> {
        let end = offset_bytes.checked_add(len_bytes);
        if end.is_some_and(|end| end <= self.device.size_bytes()) {
            return Ok(());
        }
        Err(Error::new(ErrorKind::OutOfRange, "access", "beyond the end").with_errno(libc::EIO))
    }
}

/// `open`; `is_open` says whether an image is open already.
pub async fn open(words: &Words, is_open: bool) -> Outcome<Image> {
    let mut flags = default_flags();
    for (letter, value) in &words.options {
        apply(&mut flags, *letter, value)?;
    }
    let spec = spec_from(words)?;
    if is_open {
        report::error("file open already, try 'help close'");
        return Err(Failed);
    }
    let name = words.operands.first().map(String::as_str);
    let temporary = words.has('s');
    Image::open_named(spec, flags, temporary, name).await
}

/// One option of `open`.
fn apply(flags: &mut OpenFlags, letter: char, value: &str) -> Outcome {
    let result = match letter {
        'r' => {
            flags.writable = false;
            Ok(())
        }
        'n' => {
            flags.cache = NO_CACHE;
            Ok(())
        }
        'U' => {
            flags.force_share = true;
            Ok(())
        }
        'k' => set_aio(flags, "native"),
        'i' => set_aio(flags, value),
        't' => set_cache(flags, value),
        'd' => set_discard(flags, value),
        'C' => {
            flags.copy_on_read = true;
            Ok(())
        }
        // `-o` is read with the path, `-s` with the image.
        _ => Ok(()),
    };
    result.map_err(complain)
}

fn spec_from(words: &Words) -> Outcome<ImageSpec> {
    let options = driver_options(words)?;
    let path = match words.operands.as_slice() {
        [] => None,
        [path] => Some(path),
        _ => return Err(words.usage()),
    };
    match (options, path) {
        (None, Some(path)) => Ok(ImageSpec::filename(path.clone())),
        (Some(mut options), path) => {
            if let Some(path) = path {
                options =
                    named(path, &options).map_err(|error| complain(report::error_text(&error)))?;
            }
            Ok(ImageSpec {
                added: Options::new(),
                source: Source::Options(options),
                format: None,
                name: path.cloned().unwrap_or_default(),
            })
        }
        (None, None) => Err(complain(
            "can't open: Must specify either driver or file".into(),
        )),
    }
}

/// The options of the image called `path`, with others over them.
fn named(path: &str, over: &Options) -> Result<Options> {
    let mut options = match over.get_text("driver") {
        Some(_) if !path.starts_with("json:") => {
            let mut place = String::new();
            while let Some(driver) = over.get_text(&format!("{place}driver"))
                && stands_on_a_file(driver)
            {
                place.push_str("file.");
            }
            let mut options = Options::new();
            for (key, value) in filename::node_options(path)?.iter() {
                options.set(&format!("{place}{key}"), value.clone());
            }
            options
        }
        _ => ImageSpec::filename(path).options()?,
    };
    for (key, value) in over.iter() {
        options.set(key, value.clone());
    }
    Ok(options)
}

/// Formats and filters, whose name is that of the file below.
fn stands_on_a_file(driver: &str) -> bool {
    const FILTERS: [&str; 4] = ["compress", "copy-on-read", "preallocate", "throttle"];
    FILTERS.contains(&driver) || !vellum_options::spec::is_protocol(driver)
}

fn no_vm_state() -> Error {
    let message = "this format has no VM state";
    Error::new(ErrorKind::Unsupported, "access", message)
}

/// All `-o` of a command as one set.
fn driver_options(words: &Words) -> Outcome<Option<Options>> {
    let texts = words.options.iter().filter(|(letter, _)| *letter == 'o');
    let texts: Vec<&str> = texts.map(|(_, text)| text.as_str()).collect();
    if texts.is_empty() {
        return Ok(None);
    }
    Options::parse(&texts.join(","))
        .map(Some)
        .map_err(|error| complain(report::error_text(&error)))
}

/// `reopen`: how to open the image again, and how it is open now.
pub struct Reopening {
    new: (ImageSpec, OpenFlags),
    old: (ImageSpec, OpenFlags),
}

impl Reopening {
    /// Reads the words of the command; the image must be closed before [`Reopening::open`], or
    /// the new opening would meet the locks of the old one.
    pub fn new(image: &Image, words: &Words) -> Outcome<Reopening> {
        if image.temporary {
            // Its file has no name by which it could be found again.
            return Err(complain("A temporary overlay cannot be reopened".into()));
        }
        let flags = reopen_flags(words, &image.flags)?;
        let new = driver_options(words)?;
        check_once(words, new.as_ref())?;
        let spec = merge(&image.spec, new, &image.device)
            .map_err(|error| complain(report::error_text(&error)))?;
        Ok(Reopening {
            new: (spec, flags),
            old: (image.spec.clone(), image.flags.clone()),
        })
    }

    /// Opens the image in the new way, or after a failure, which is reported, in the old way.
    /// Also returns whether the new way worked.
    pub async fn open(self) -> Outcome<(Image, Outcome)> {
        let (spec, flags) = self.new;
        match Image::try_open(spec, flags, false).await {
            Ok(image) => Ok((image, Ok(()))),
            Err(error) => {
                report::fail(&error);
                let (spec, flags) = self.old;
                Ok((Image::open(spec, flags, false).await?, Err(Failed)))
            }
        }
    }
}

fn reopen_flags(words: &Words, old: &OpenFlags) -> Outcome<OpenFlags> {
    let mut flags = old.clone();
    let directions = words
        .options
        .iter()
        .filter(|(letter, _)| matches!(letter, 'r' | 'w'));
    if directions.count() > 1 {
        return Err(complain("Only one -r/-w option may be given".into()));
    }
    for (letter, value) in &words.options {
        match letter {
            'c' => set_cache(&mut flags, value).map_err(complain)?,
            'r' => flags.writable = false,
            'w' => flags.writable = true,
            _ => {}
        }
    }
    Ok(flags)
}

/// Refuses what is said by a letter and by an option.
fn check_once(words: &Words, new: Option<&Options>) -> Outcome {
    let Some(new) = new else {
        return Ok(());
    };
    if (words.has('r') || words.has('w')) && new.contains("read-only") {
        return Err(complain("Cannot set both -r/-w and 'read-only'".into()));
    }
    let cache = ["cache.direct", "cache.no-flush"];
    if words.has('c') && cache.iter().any(|key| new.contains(key)) {
        return Err(complain("Cannot set both -c and the cache options".into()));
    }
    Ok(())
}

/// The old options with the new ones over them.
fn merge(
    old: &ImageSpec,
    new: Option<Options>,
    device: &Arc<dyn BlockDevice>,
) -> Result<ImageSpec> {
    let Some(new) = new else {
        return Ok(old.clone());
    };
    let backing = device.backing().map(|backing| backing.info().format);
    let drivers = Drivers {
        format: device.info().format,
        backing,
    };
    Ok(ImageSpec {
        added: Options::new(),
        source: Source::Options(merged_options::merge(&old.options()?, &new, drivers)?),
        format: None,
        name: old.name.clone(),
    })
}

fn complain(message: String) -> Failed {
    report::error(message);
    Failed
}

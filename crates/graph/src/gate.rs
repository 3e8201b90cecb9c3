//! The gate of the tools: opens what an image names, as QEMU would.

use std::path::PathBuf;
use std::sync::Arc;

use vellum::gate::{FileRequest, Gate};
use vellum::{BlockDevice, Error, ErrorKind, Io, Result, Storage};
use vellum_options::{ImageSpec, OpenFlags, filename, ova_name};

use crate::file_node::FileUse;
use crate::graph::{self, OpenContext, Role};
use crate::open;
use crate::ova::MemberStorage;
use crate::write_log;

/// Which files an image may name.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum FilePolicy {
    /// Any, as QEMU's tools allow.
    #[default]
    Any,
    /// Only files below this directory, named by path.
    Within(PathBuf),
    /// None.
    Nothing,
    /// None: the image lies in a package of a virtual machine.
    Package,
}

impl FilePolicy {
    /// Returns the policy for the names in an image that lies in `file`: a user who names a package does not vouch for
    /// the names in it.
    pub(crate) fn of_image(&self, file: &dyn Storage) -> FilePolicy {
        match MemberStorage::of(file) {
            Some(_) => FilePolicy::Package,
            None => self.clone(),
        }
    }

    pub(crate) fn admit(&self, image: &str, name: &str) -> Result<()> {
        ova_name::refuse_named(image, name)?;
        let allowed = match self {
            FilePolicy::Any => true,
            FilePolicy::Nothing => false,
            FilePolicy::Package => return Err(ova_name::named_in_package(image, name)),
            FilePolicy::Within(directory) => lies_within(name, directory),
        };
        if allowed {
            return Ok(());
        }
        let message = format!("the policy does not allow the file '{name}' that the image names");
        Err(Error::new(ErrorKind::Denied, "open", message).target(image))
    }
}

/// Whether a name is a plain path to something below `directory`, with all
/// links followed.
fn lies_within(name: &str, directory: &std::path::Path) -> bool {
    let Ok(path) = filename::local_path(name) else {
        return false;
    };
    match (
        std::fs::canonicalize(path),
        std::fs::canonicalize(directory),
    ) {
        (Ok(path), Ok(directory)) => path.starts_with(directory),
        _ => false,
    }
}

/// A gate for one image, which knows the images that led to it.
#[derive(Debug, Clone)]
pub struct FileGate {
    pub(crate) around: OpenContext,
}

impl FileGate {
    async fn backing(self, request: FileRequest) -> Result<Arc<dyn BlockDevice>> {
        let full = filename::resolve(&request.image, &request.name)?;
        self.around.policy.admit(&request.image, &full)?;
        let spec = ImageSpec::filename(full).with_format(request.format.as_deref());
        let around = OpenContext {
            flags: open::backing_flags(&self.around.flags),
            ..self.around
        };
        let opened = match spec.options() {
            Ok(options) => open::open_below(options, &around).await,
            Err(error) => Err(error),
        };
        opened.map_err(|error| error.context("open", "Could not open backing file"))
    }

    async fn data_file(self, request: FileRequest) -> Result<Arc<dyn Storage>> {
        // Unlike a backing file's name it counts from the working directory, as in QEMU.
        let full = request.name;
        let mut around = self.around;
        around.policy.admit(&request.image, &full)?;
        around.flags.writable = request.writable;
        // Whoever opens the image anew has to know that it stands on this file.
        around.place = around.place.child("data-file");
        let options = filename::node_options(&full)?;
        let node = graph::open(options, Role::Protocol, &around).await?;
        node.into_storage(&around.flags, FileUse::Format).await
    }

    async fn checksums(self, request: FileRequest) -> Result<Arc<dyn Storage>> {
        let full = write_log::resolve(&request.image, &request.name)?;
        self.around.policy.admit(&request.image, &full)?;
        let flags = OpenFlags {
            writable: request.writable,
            ..self.around.flags
        };
        write_log::open_file(&full, &flags).await
    }

    async fn write_log(self, request: FileRequest) -> Result<Arc<dyn Storage>> {
        let full = write_log::resolve(&request.image, &request.name)?;
        self.around.policy.admit(&request.image, &full)?;
        let open = |writable| {
            let flags = OpenFlags {
                writable,
                ..self.around.flags.clone()
            };
            let full = full.clone();
            async move { write_log::open_file(&full, &flags).await }
        };
        match open(request.writable).await {
            // Then its content counts all the same.
            Err(error) if request.writable && is_read_only(&error) => open(false).await,
            opened => opened,
        }
    }
}

fn is_read_only(error: &Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::PermissionDenied | ErrorKind::ReadOnly
    )
}

impl Gate for FileGate {
    fn open_backing(&self, request: FileRequest) -> Io<Arc<dyn BlockDevice>> {
        // A task of its own, so that the stack does not grow with the chain.
        Io::task(vellum_io::spawn(self.clone().backing(request)))
    }

    fn open_data_file(&self, request: FileRequest) -> Io<Arc<dyn Storage>> {
        Io::boxed(self.clone().data_file(request))
    }

    fn open_write_log(&self, request: FileRequest) -> Io<Arc<dyn Storage>> {
        Io::boxed(self.clone().write_log(request))
    }

    fn open_checksums(&self, request: FileRequest) -> Io<Arc<dyn Storage>> {
        Io::boxed(self.clone().checksums(request))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_confines() {
        let directory = tempfile::tempdir().unwrap();
        let inside = directory.path().join("a");
        std::fs::write(&inside, b"").unwrap();
        let policy = FilePolicy::Within(directory.path().to_owned());
        assert!(policy.admit("i", inside.to_str().unwrap()).is_ok());
        assert!(policy.admit("i", "/etc/passwd").is_err());
        assert!(policy.admit("i", "nbd:localhost:1").is_err());
        assert!(policy.admit("i", "http://localhost/a").is_err());
        let escape = format!("{}/../../etc/passwd", directory.path().display());
        assert!(policy.admit("i", &escape).is_err());
        assert!(FilePolicy::Nothing.admit("i", "a").is_err());
    }

    #[test]
    fn options_do_not_lead_past_the_gate() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("base"), [0; 65536]).unwrap();
        let path = directory.path().join("image");
        let opened = vellum_io::lane::block_on(async {
            let file = vellum_storage::FileOptions::default()
                .create(vellum_storage::file::Create::Truncate);
            let storage = vellum_storage::FileStorage::open(&path, &file)?;
            let options = vellum::qcow2::create::CreateOptions::default()
                .size_bytes(65536)
                .backing_file(Some("base".to_owned()))
                .backing_format(Some("raw".to_owned()));
            vellum::qcow2::create::create(storage, None, &options).await?;
            let name = path.to_str().unwrap();
            let text = format!("driver=qcow2,file.filename={name},backing.driver=raw");
            let spec = ImageSpec::image_opts(&text)?;
            let flags = OpenFlags::default();
            let any = open::open_device_with(&spec, &flags, &FilePolicy::Any).await?;
            assert!(any.backing().is_some());
            open::open_device_with(&spec, &flags, &FilePolicy::Nothing).await
        });
        assert_eq!(opened.unwrap_err().kind(), ErrorKind::Denied);
    }

    #[test]
    fn a_write_log_is_another_file() {
        let directory = tempfile::tempdir().unwrap();
        let name = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
        vellum_io::lane::block_on(async {
            let new = vellum::qcow2::create::CreateOptions::default().size_bytes(1 << 20);
            crate::nodes::testing::make_image(&name("image"), &new).await;
            let options = "journal=on,journal-size=128k,driver=qcow2,file.filename=";
            let spec = ImageSpec::image_opts(&format!("{options}{}", name("image"))).unwrap();
            let flags = OpenFlags {
                writable: true,
                ..OpenFlags::default()
            };
            // A log that the user names is no business of the policy's.
            let device = open::open_device_with(&spec, &flags, &FilePolicy::Nothing).await;
            let device = device.unwrap();
            let bytes = vellum::Buffer::copy_of(&[5; 512]);
            device.write(0, bytes, Default::default()).await.unwrap();
            device.flush().await.unwrap();
            for (from, to) in [("image", "copy"), ("image.vlog", "log")] {
                std::fs::copy(name(from), name(to)).unwrap();
            }
            device.close().await.unwrap();
            std::fs::rename(name("log"), name("image.vlog")).unwrap();
            let spec = ImageSpec::filename(name("copy"));
            for writable in [false, true] {
                let flags = OpenFlags {
                    writable,
                    ..OpenFlags::default()
                };
                let opened = open::open_device_with(&spec, &flags, &FilePolicy::Nothing).await;
                assert_eq!(opened.unwrap_err().kind(), ErrorKind::Denied);
                let within = FilePolicy::Within(directory.path().to_owned());
                let device = open::open_device_with(&spec, &flags, &within)
                    .await
                    .unwrap();
                let read = device.read(0, vellum::Buffer::for_read(512)).await.unwrap();
                assert_eq!(read[..], [5; 512]);
                device.close().await.unwrap();
            }
        });
    }
}

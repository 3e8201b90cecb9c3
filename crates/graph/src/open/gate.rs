//! The gate of the tools: opens what an image names, as QEMU would.

use std::sync::Arc;

use vellum::gate::{FileRequest, Gate};
use vellum::{BlockDevice, Error, ErrorKind, Io, Result, Storage};
use vellum_options::{ImageSpec, OpenFlags, filename};

use crate::node::file_node::FileUse;
use crate::node::origin::Role;
use crate::open::backing::{backing_flags, open_below};
use crate::open::context::OpenContext;
use crate::open::node::open_node;
use crate::write_log;

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
            flags: backing_flags(&self.around.flags),
            ..self.around
        };
        let opened = match spec.options() {
            Ok(options) => open_below(options, &around).await,
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
        let node = open_node(options, Role::Protocol, &around).await?;
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

pub(crate) fn is_read_only(error: &Error) -> bool {
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
    use vellum::ErrorKind;
    use vellum_options::{ImageSpec, OpenFlags};

    use crate::node::file_policy::FilePolicy;
    use crate::open_device_with;

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
            let any = open_device_with(&spec, &flags, &FilePolicy::Any).await?;
            assert!(any.backing().is_some());
            open_device_with(&spec, &flags, &FilePolicy::Nothing).await
        });
        assert_eq!(opened.unwrap_err().kind(), ErrorKind::Denied);
    }

    #[test]
    fn a_write_log_is_another_file() {
        let directory = tempfile::tempdir().unwrap();
        let name = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
        vellum_io::lane::block_on(async {
            let new = vellum::qcow2::create::CreateOptions::default().size_bytes(1 << 20);
            crate::testing::make_image(&name("image"), &new).await;
            let options = "journal=on,journal-size=128k,driver=qcow2,file.filename=";
            let spec = ImageSpec::image_opts(&format!("{options}{}", name("image"))).unwrap();
            let flags = OpenFlags {
                writable: true,
                ..OpenFlags::default()
            };
            // A log that the user names is no business of the policy's.
            let device = open_device_with(&spec, &flags, &FilePolicy::Nothing).await;
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
                let opened = open_device_with(&spec, &flags, &FilePolicy::Nothing).await;
                assert_eq!(opened.unwrap_err().kind(), ErrorKind::Denied);
                let within = FilePolicy::Within(directory.path().to_owned());
                let device = open_device_with(&spec, &flags, &within).await.unwrap();
                let read = device.read(0, vellum::Buffer::for_read(512)).await.unwrap();
                assert_eq!(read[..], [5; 512]);
                device.close().await.unwrap();
            }
        });
    }
}

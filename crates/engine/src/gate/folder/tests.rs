use std::os::unix::fs::symlink;
use std::sync::atomic::{AtomicBool, Ordering};

use fs::RenameFlags;
use parking_lot::Mutex;
use vellum_io::lane;
use vellum_storage::file::{Create, Locks};

use super::*;
use crate::Buffer;
use crate::luks::{FormatOptions, IterationTime};
use crate::qcow2::WriteLogOptions;
use crate::qcow2::create::{CreateOptions, Encryption, create};

const DISK_SIZE_BYTES: u64 = 65536;

/// A directory `inside`, a directory `inside/sub`, and a raw file `secret` beside `inside`.
struct Place {
    directory: tempfile::TempDir,
}

impl Place {
    fn new() -> Place {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(directory.path().join("inside/sub")).unwrap();
        let place = Place { directory };
        place.raw("../secret", 0x66);
        place
    }

    fn inside(&self) -> PathBuf {
        self.directory.path().join("inside")
    }

    fn raw(&self, name: &str, byte: u8) {
        std::fs::write(self.inside().join(name), [byte; DISK_SIZE_BYTES as usize]).unwrap();
    }

    async fn make(&self, name: &str, options: CreateOptions) {
        let options = options.size_bytes(DISK_SIZE_BYTES).cluster_size_bytes(512);
        let create_file = FileOptions::default().create(Create::Truncate);
        let file = FileStorage::open(self.inside().join(name), &create_file).unwrap();
        let data = match &options.data_file {
            Some(data) => {
                let path = self.inside().join(name).with_file_name(data);
                let data = FileStorage::open(path, &create_file).unwrap();
                Some(data as Arc<dyn Storage>)
            }
            None => None,
        };
        create(file, data, &options).await.unwrap();
    }

    async fn overlay(&self, name: &str, backing: &str, format: Option<&str>) {
        let options = CreateOptions::default()
            .backing_file(Some(backing.to_owned()))
            .backing_format(format.map(str::to_owned));
        self.make(name, options).await;
    }

    fn folder(&self) -> Folder {
        Folder::new(self.inside()).unwrap()
    }

    /// The first byte of the disk in the image of that name.
    async fn first_byte(&self, folder: &Folder, name: &str) -> Result<u8> {
        let image = folder.open_image(name, OpenOptions::default()).await?;
        let byte = image.read(0, Buffer::for_read(512)).await?[0];
        image.close().await?;
        Ok(byte)
    }

    /// Writes to an image with the write log `log`, which it calls `called`, and copies the
    /// image as a crash would have left it.
    async fn crash_with_log(&self, name: &str, called: &str, copy: &str) {
        let create_file = FileOptions::default().create(Create::Truncate);
        let log = FileStorage::open(self.inside().join("log"), &create_file).unwrap();
        let log = WriteLogOptions::new(log, called).len_bytes(WriteLogOptions::MIN_LEN_BYTES);
        let options = OpenOptions::default().write_log(Some(log));
        let image = self.folder().open_image(name, options).await.unwrap();
        let bytes = Buffer::copy_of(&[5; 512]);
        image.write(0, bytes, Default::default()).await.unwrap();
        image.flush().await.unwrap();
        std::fs::copy(self.inside().join(name), self.inside().join(copy)).unwrap();
        std::fs::copy(self.inside().join("log"), self.inside().join("kept")).unwrap();
        image.close().await.unwrap();
        std::fs::rename(self.inside().join("kept"), self.inside().join("log")).unwrap();
    }

    /// The error of an image that names this backing file.
    async fn refusal(&self, backing: &str, format: Option<&str>) -> Error {
        self.overlay("top", backing, format).await;
        let folder = self.folder();
        let opened = folder.open_image("top", OpenOptions::default()).await;
        opened.unwrap_err()
    }
}

#[test]
fn a_chain_opens_with_names_that_count_from_each_image() {
    let place = Place::new();
    lane::block_on(async {
        place.raw("sub/base", 1);
        place.overlay("sub/middle", "base", Some("raw")).await;
        place
            .overlay("sub/over", "../sub/middle", Some("qcow2"))
            .await;
        symlink("sub/over", place.inside().join("link")).unwrap();
        place.overlay("top", "./sub/over", Some("qcow2")).await;
        let folder = place.folder();
        assert_eq!(place.first_byte(&folder, "top").await.unwrap(), 1);
        assert_eq!(place.first_byte(&folder, "sub/middle").await.unwrap(), 1);

        // A link may lead to what lies inside.
        place.raw("base", 2);
        symlink("../base", place.inside().join("sub/linked")).unwrap();
        place.overlay("top", "sub/linked", Some("raw")).await;
        assert_eq!(place.first_byte(&folder, "top").await.unwrap(), 2);
    });
}

#[test]
fn a_data_file_counts_from_its_image_too() {
    let place = Place::new();
    lane::block_on(async {
        let with_data = |name: &str| CreateOptions::default().data_file(Some(name.to_owned()));
        place.make("sub/image", with_data("data")).await;
        let folder = place.folder();
        let opened = folder.open_image("sub/image", OpenOptions::default()).await;
        let image = opened.unwrap();
        image
            .write(0, Buffer::copy_of(&[5; 512]), Default::default())
            .await
            .unwrap();
        image.close().await.unwrap();
        drop(image);
        assert_eq!(place.first_byte(&folder, "sub/image").await.unwrap(), 5);

        place.make("image", with_data("../other")).await;
        let opened = folder.open_image("image", OpenOptions::default()).await;
        assert_eq!(opened.unwrap_err().kind(), ErrorKind::Denied);
    });
}

#[test]
fn a_write_log_counts_from_its_image_too() {
    let place = Place::new();
    lane::block_on(async {
        for (log, kind) in [("log", None), ("../../log", Some(ErrorKind::Denied))] {
            place.make("image", CreateOptions::default()).await;
            place.crash_with_log("image", log, "sub/image").await;
            let path = place.inside().join("log");
            std::fs::rename(path, place.inside().join("sub").join(log)).unwrap();
            let folder = place.folder();
            for read_only in [true, false] {
                let options = OpenOptions::default().read_only(read_only);
                let opened = folder.open_image("sub/image", options).await;
                if let Some(kind) = kind {
                    assert_eq!(opened.unwrap_err().kind(), kind);
                    continue;
                }
                let image = opened.unwrap();
                let read = image.read(0, Buffer::for_read(512)).await.unwrap();
                assert_eq!(read[..], [5; 512]);
                image.close().await.unwrap();
            }
        }
    });
}

#[test]
fn names_that_lead_outside_are_refused() {
    let place = Place::new();
    let outside = place.directory.path().join("secret");
    symlink(&outside, place.inside().join("absolute")).unwrap();
    symlink("../secret", place.inside().join("relative")).unwrap();
    symlink("..", place.inside().join("sub/up")).unwrap();
    symlink("/proc/self/root", place.inside().join("magic")).unwrap();
    let absolute = outside.to_str().unwrap();
    let leads_out = "the name leads out of the directory";
    let cases = [
        ("../secret", leads_out),
        ("sub/../../secret", leads_out),
        ("absolute", leads_out),
        ("relative", leads_out),
        ("sub/up/../secret", leads_out),
        ("magic/etc/passwd", leads_out),
        (absolute, "absolute names are not allowed here"),
        (
            "nbd://localhost/x",
            "names with a protocol are not allowed here",
        ),
        (
            "json:{\"file\":{}}",
            "names with a protocol are not allowed here",
        ),
        ("file:secret", "names with a protocol are not allowed here"),
    ];
    lane::block_on(async {
        for (name, reason) in cases {
            let error = place.refusal(name, Some("raw")).await;
            assert_eq!(error.kind(), ErrorKind::Denied, "{name}: {error}");
            let text = error.to_string();
            assert!(text.contains(reason), "{name}: {text}");
            assert!(text.contains(&format!("backing file '{name}'")), "{text}");
        }
        let folder = place.folder();
        let opened = folder.open_image("../secret", OpenOptions::default()).await;
        assert_eq!(opened.unwrap_err().kind(), ErrorKind::Denied);
    });
}

#[test]
fn a_missing_or_unknown_format_is_refused() {
    let place = Place::new();
    place.raw("base", 1);
    lane::block_on(async {
        let error = place.refusal("base", None).await;
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        let text = error.to_string();
        assert!(
            text.contains("vellum rebase -u -b base -F FORMAT"),
            "{text}"
        );
        let error = place.refusal("base", Some("vmdk")).await;
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    });
}

#[test]
fn only_regular_files_are_opened() {
    let place = Place::new();
    let fifo = place.inside().join("fifo");
    fs::mknodat(fs::CWD, fifo, fs::FileType::Fifo, Mode::RUSR, 0).unwrap();
    lane::block_on(async {
        for name in ["fifo", "sub"] {
            let text = place.refusal(name, Some("raw")).await.to_string();
            assert!(text.contains("to be a regular file"), "{text}");
        }
    });
}

#[test]
fn a_chain_may_be_as_long_as_the_bound_and_no_longer() {
    let place = Place::new();
    place.raw("0", 9);
    lane::block_on(async {
        place.overlay("1", "0", Some("raw")).await;
        for number in 2..=4 {
            let below = (number - 1).to_string();
            place
                .overlay(&number.to_string(), &below, Some("qcow2"))
                .await;
        }
        let folder = place.folder().max_depth(3);
        assert_eq!(place.first_byte(&folder, "3").await.unwrap(), 9);
        let error = place.first_byte(&folder, "4").await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied);
        assert!(
            error.to_string().contains("more than 3 backing files"),
            "{error}"
        );

        // An image that is its own backing file ends at the bound too.
        let options = OpenOptions::default().read_only(true);
        place.overlay("ring", "ring", Some("qcow2")).await;
        let opened = place.folder().open_image("ring", options).await;
        let text = opened.unwrap_err().to_string();
        assert!(text.contains("more than 200 backing files"), "{text}");
    });
}

#[test]
fn each_backing_image_is_opened_as_its_options_say() {
    let place = Place::new();
    let luks = || {
        Some(Encryption::Luks {
            options: FormatOptions {
                iteration_time: IterationTime::Milliseconds(10),
                ..FormatOptions::default()
            },
            passphrase: "sesame".into(),
        })
    };
    lane::block_on(async {
        place
            .make("base", CreateOptions::default().encryption(luks()))
            .await;
        place.overlay("middle", "base", Some("qcow2")).await;
        place.overlay("top", "middle", Some("qcow2")).await;
        let error = place.first_byte(&place.folder(), "top").await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");

        let asked = Arc::<Mutex<Vec<String>>>::default();
        let names = asked.clone();
        let folder = place.folder().backing_options(move |request| {
            names.lock().push(request.name.clone());
            let passphrase = (request.name == "base").then(|| "sesame".into());
            OpenOptions::default().passphrase(passphrase)
        });
        let opened = folder.open_image("top", OpenOptions::default()).await;
        let top = opened.unwrap();
        top.read(0, Buffer::for_read(512)).await.unwrap();
        assert!(top.backing().unwrap().info().read_only);
        top.close().await.unwrap();
        assert_eq!(*asked.lock(), ["middle", "base"]);
    });
}

#[test]
fn files_are_opened_as_their_options_say() {
    let place = Place::new();
    lane::block_on(async {
        place.raw("base", 1);
        place.overlay("top", "base", Some("raw")).await;
        let base = FileOptions::default();
        let writer = FileStorage::open(place.inside().join("base"), &base).unwrap();
        let error = place.first_byte(&place.folder(), "top").await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Locked, "{error}");

        // What the gate decides itself stays as it is.
        let options = FileOptions::default()
            .locks(Locks::Unlocked)
            .create(Create::Truncate);
        let folder = place.folder().file_options(options);
        assert_eq!(place.first_byte(&folder, "top").await.unwrap(), 1);
        drop(writer);

        // Some file systems know no direct I/O.
        let direct = FileOptions::default().read_only(true).direct(true);
        match open_beneath(&place.folder().root.fd, Path::new("base"), &direct) {
            Ok(fd) => assert!(fs::fcntl_getfl(&fd).unwrap().contains(OFlags::DIRECT)),
            Err(errno) => assert_eq!(errno, Errno::INVAL),
        }
    });
}

#[test]
fn a_directory_that_is_exchanged_for_a_link_leads_nowhere_else() {
    let place = Place::new();
    place.raw("sub/base", 1);
    let outside = place.directory.path().join("outside");
    std::fs::create_dir(&outside).unwrap();
    std::fs::write(outside.join("base"), [0x66; DISK_SIZE_BYTES as usize]).unwrap();
    symlink(&outside, place.inside().join("link")).unwrap();
    lane::block_on(place.overlay("top", "sub/base", Some("raw")));

    let stop = AtomicBool::new(false);
    let (mut opened, mut refused) = (0, 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (sub, link) = (place.inside().join("sub"), place.inside().join("link"));
            while !stop.load(Ordering::Relaxed) {
                fs::renameat_with(fs::CWD, &sub, fs::CWD, &link, RenameFlags::EXCHANGE).unwrap();
            }
        });
        let folder = place.folder();
        for _ in 0..2000 {
            match lane::block_on(place.first_byte(&folder, "top")) {
                Ok(byte) => {
                    assert_eq!(byte, 1);
                    opened += 1;
                }
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
                    refused += 1;
                }
            }
            if opened >= 50 && refused >= 50 {
                break;
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(
        opened > 0 && refused > 0,
        "{opened} opened, {refused} refused"
    );
}

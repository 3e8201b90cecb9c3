//! Plain threads use an image, without a lane or a future of their own.
//!
//! ```sh
//! cargo run --example blocking -- disk.qcow2
//! ```

use std::path::Path;
use std::thread;

use vellum::blocking::Device;
use vellum::gate::Folder;
use vellum::io::lane::{LaneOptions, LaneThread};
use vellum::qcow2::OpenOptions;
use vellum::qcow2::create::{CreateOptions, create};
use vellum::storage::{Create, FileOptions, FileStorage};
use vellum::{Error, ErrorKind, Result, ZeroRequest};

const MIB: u64 = 1 << 20;

fn main() -> Result<()> {
    let path = std::env::args_os().nth(1).unwrap_or("disk.qcow2".into());
    run(Path::new(&path))
}

/// Makes an image and has four threads fill it.
pub fn run(path: &Path) -> Result<()> {
    let new_file = path.to_owned();
    LaneThread::start("create", LaneOptions::default())?.call(|| async move {
        let file = FileStorage::open(new_file, &FileOptions::default().create(Create::Truncate))?;
        create(file, None, &CreateOptions::default().size_bytes(64 * MIB)).await
    })?;

    let (folder, name) = folder_and_name(path)?;
    let disk = Device::open(&folder, &name, OpenOptions::default())?;
    thread::scope(|scope| {
        let writers: Vec<_> = (0..4u8)
            .map(|writer| {
                let disk = &disk;
                scope.spawn(move || {
                    let offset_bytes = u64::from(writer) * 16 * MIB;
                    disk.write(offset_bytes, &vec![writer + 1; 10 << 20])?;
                    disk.write_zeroes(offset_bytes + 10 * MIB, MIB, ZeroRequest::default())?;
                    disk.flush()
                })
            })
            .collect();
        writers
            .into_iter()
            .try_for_each(|writer| writer.join().expect("a writer's thread"))
    })?;

    let mut last = [0; 4];
    disk.read(48 * MIB, &mut last)?;
    assert_eq!(last, [4; 4]);
    println!("{} bytes of {name} are filled", 4 * 10 * MIB);
    disk.close()
}

/// The directory is all that the image may open files in.
fn folder_and_name(path: &Path) -> Result<(Folder, String)> {
    let name = path.file_name().and_then(|name| name.to_str());
    let name = name.ok_or_else(|| Error::new(ErrorKind::InvalidArgument, "open", "no name"))?;
    let parent = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty());
    let folder = Folder::new(parent.unwrap_or(Path::new(".")))?;
    Ok((folder, name.to_owned()))
}

//! VMDK images: made here and read by QEMU, made by QEMU and read and written here.

mod hostile;
mod made;
mod power;
mod streams;

use std::path::Path;
use std::sync::Arc;

use crate::common::{Model, Place, compare_with_qemu, new_file, open_file, qemu, run};
use vellum::{BlockDevice, Buffer, RequestFlags, Result, Storage, ZeroRequest};
use vellum_foreign::vmdk::header::SparseHeader;
use vellum_foreign::vmdk::{
    AdapterType, CreateOptions, OpenOptions, Subformat, VmdkLayout, check, create, open,
    read_descriptor,
};
use vellum_foreign::{Fact, Facts, ForeignImage, MappedDevice};
use vellum_io::finish_all;

type Device = Arc<MappedDevice<VmdkLayout>>;

const ALL: [Subformat; 5] = [
    Subformat::MonolithicSparse,
    Subformat::MonolithicFlat,
    Subformat::TwoGbMaxExtentSparse,
    Subformat::TwoGbMaxExtentFlat,
    Subformat::StreamOptimized,
];

/// Opens an image and the files that it names, in its folder.
async fn open_image(
    path: &Path,
    backing: Option<Arc<dyn BlockDevice>>,
    options: OpenOptions,
) -> Result<Device> {
    let file = open_file(path);
    let descriptor = read_descriptor(&*file).await?;
    let extents = open_extents(path, &descriptor);
    open(file, descriptor, extents, backing, &options).await
}

fn open_extents(
    path: &Path,
    descriptor: &vellum_foreign::vmdk::Descriptor,
) -> Vec<Arc<dyn Storage>> {
    let lines = descriptor.extents().iter();
    let files = lines.map(|line| open_file(&path.with_file_name(&line.name)));
    files.collect()
}

async fn create_image(path: &Path, options: &CreateOptions) {
    let names = options.extent_names(path.to_str().unwrap()).unwrap();
    let extents: Vec<_> = names.iter().map(|name| new_file(Path::new(name))).collect();
    create(&new_file(path), &extents, options).await.unwrap();
}

/// Closes a device and gives its files back.
async fn close(device: Device) {
    device.close().await.unwrap();
}

/// Messages of a check.
async fn check_image(path: &Path) -> Vec<String> {
    let file = open_file(path);
    let descriptor = read_descriptor(&*file).await.unwrap();
    let extents = open_extents(path, &descriptor);
    check(file, descriptor, extents).await.unwrap().messages
}

#[test]
fn what_is_written_here_is_read_there() {
    let kinds = [
        (Subformat::MonolithicSparse, false),
        (Subformat::MonolithicSparse, true),
        (Subformat::MonolithicFlat, false),
        (Subformat::TwoGbMaxExtentSparse, true),
        (Subformat::TwoGbMaxExtentFlat, false),
    ];
    for (seed, (subformat, zeroed_grain)) in (1..).zip(kinds) {
        let place = Place::default();
        let path = place.path("a.vmdk");
        let mut model = Model::new(seed, 3 << 20 | 0x600);
        run(async {
            let options = CreateOptions::default()
                .size_bytes(model.bytes.len() as u64)
                .subformat(subformat)
                .zeroed_grain(zeroed_grain);
            create_image(&path, &options).await;
            for _ in 0..2 {
                let device = open_image(&path, None, OpenOptions::default())
                    .await
                    .unwrap();
                model.compare(&*device).await;
                model.exercise(&*device, 50).await;
                model.compare(&*device).await;
                close(device).await;
            }
            assert_eq!(check_image(&path).await, Vec::<String>::new());
        });
        match subformat {
            Subformat::MonolithicSparse => assert_copies_agree(&path),
            Subformat::TwoGbMaxExtentSparse => assert_copies_agree(&place.path("a-s001.vmdk")),
            _ => {}
        }
        qemu("qemu-img", &["check", "-f", "vmdk", &place.text("a.vmdk")]);
        compare_with_qemu(&place, "vmdk", "a.vmdk", &model.bytes);
    }
}

/// As QEMU has it: only streams want whole grains.
#[test]
fn a_compressed_write_of_less_than_a_grain_is_stored_as_it_is() {
    for subformat in [Subformat::MonolithicSparse, Subformat::TwoGbMaxExtentSparse] {
        let place = Place::default();
        let path = place.path("a.vmdk");
        let mut model = Model::new(1, 128 << 10);
        run(async {
            let options = CreateOptions::default()
                .size_bytes(model.bytes.len() as u64)
                .subformat(subformat);
            create_image(&path, &options).await;
            let opened = open_image(&path, None, OpenOptions::default()).await;
            let device = opened.unwrap();
            for range in [0..66048, 100_352..100_864] {
                let content = vec![7; range.len()];
                let content = Buffer::copy_of(&content);
                let flags = RequestFlags::default();
                let written = device.write_compressed(range.start as u64, content, flags);
                written.await.unwrap();
                model.bytes[range].fill(7);
            }
            model.compare(&*device).await;
            close(device).await;
        });
        compare_with_qemu(&place, "vmdk", "a.vmdk", &model.bytes);
    }
}

#[test]
fn what_qemu_writes_is_read_here() {
    for (seed, subformat) in (10..).zip(ALL.into_iter().take(4)) {
        let place = Place::default();
        let image = place.text("a.vmdk");
        let grains = match subformat.name().ends_with("Flat") {
            true => "",
            false => ",zeroed_grain=on",
        };
        let options = format!("subformat={}{grains}", subformat.name());
        qemu(
            "qemu-img",
            &["create", "-q", "-f", "vmdk", "-o", &options, &image, "5M"],
        );
        let mut model = Model::new(seed, 5 << 20);
        let random = &mut fastrand::Rng::with_seed(seed);
        let mut commands = Vec::new();
        for pattern in 1..20 {
            let (offset, len) = (random.usize(0..8000) * 512, random.usize(1..2000) * 512);
            commands.extend([
                "-c".to_owned(),
                format!("write -P {pattern} {offset} {len}"),
            ]);
            model.bytes[offset..offset + len].fill(pattern);
            let grain = random.usize(0..80) * 65536;
            commands.extend(["-c".to_owned(), format!("write -z {grain} 64k")]);
            model.bytes[grain..grain + 65536].fill(0);
        }
        let mut arguments = vec!["-f", "vmdk"];
        arguments.extend(commands.iter().map(String::as_str));
        arguments.push(&image);
        qemu("qemu-io", &arguments);
        run(async {
            let path = place.path("a.vmdk");
            let device = open_image(&path, None, OpenOptions::default())
                .await
                .unwrap();
            model.compare(&*device).await;
            model.exercise(&*device, 50).await;
            close(device).await;
        });
        compare_with_qemu(&place, "vmdk", "a.vmdk", &model.bytes);
        // And it goes on where we ended.
        qemu("qemu-io", &["-f", "vmdk", "-c", "write -P 3 0 5M", &image]);
        qemu("qemu-img", &["check", "-f", "vmdk", &image]);
    }
}

/// Whether both sets of tables of a file with grains say the same.
fn assert_copies_agree(path: &Path) {
    let bytes = std::fs::read(path).unwrap();
    let header = SparseHeader::parse(&bytes).unwrap();
    let directory = |sector: u64| {
        let entries = header.capacity_sectors.div_ceil(128 * 512) as usize;
        let at = sector as usize * 512;
        let (entries, _) = bytes[at..at + entries * 4].as_chunks();
        entries
            .iter()
            .map(|entry| u32::from_le_bytes(*entry) as usize * 512)
    };
    let both = directory(header.directory_sector).zip(directory(header.redundant_sector));
    for (first, second) in both {
        assert!(first != second && first > 0 && second > 0);
        assert!(bytes[first..first + 2048] == bytes[second..second + 2048]);
    }
}

/// Takes the random digits out of a descriptor.
fn without_cid(mut bytes: Vec<u8>) -> Vec<u8> {
    let found = bytes.windows(5).position(|it| it == b"\nCID=");
    let Some(start) = found.map(|at| at + 5) else {
        return bytes;
    };
    let digits = bytes[start..]
        .iter()
        .take_while(|it| it.is_ascii_hexdigit());
    let end = start + digits.count();
    // What follows a shorter one is padded with more zeroes.
    let padding = vec![0; end - start];
    bytes.drain(start..end);
    if bytes.starts_with(b"KDMV") {
        let at = 512 + 20 * 512 - padding.len();
        bytes.splice(at..at, padding);
    }
    bytes
}

#[test]
fn new_images_are_qemus_to_the_byte() {
    let options = CreateOptions::default();
    let cases = [
        ("", options.clone()),
        ("adapter_type=lsilogic,hwversion=10", {
            let options = options.clone().adapter_type(AdapterType::LsiLogic);
            options.hardware_version(Some("10".into()))
        }),
        ("compat6=on,toolsversion=99", {
            options
                .clone()
                .compat6(true)
                .tools_version(Some("99".into()))
        }),
        ("adapter_type=legacyESX,zeroed_grain=on", {
            let options = options.clone().adapter_type(AdapterType::LegacyEsx);
            options.zeroed_grain(true)
        }),
        (
            "adapter_type=buslogic",
            options.adapter_type(AdapterType::BusLogic),
        ),
    ];
    for subformat in ALL {
        let sizes: [u64; 4] = [0, 1, 5 << 30, (1 << 40) + 12345];
        for (text, options) in &cases {
            if text.contains("zeroed") && subformat.name().ends_with("Flat") {
                continue;
            }
            let size_bytes = sizes[text.len() % 4];
            let (theirs, ours) = (Place::default(), Place::default());
            let text = format!("subformat={},{text}", subformat.name());
            let text = text.trim_end_matches(',');
            let size = size_bytes.to_string();
            let image = theirs.text("a.vmdk");
            if size_bytes > 1 << 40 && !subformat.name().starts_with("mono") {
                continue;
            }
            qemu(
                "qemu-img",
                &["create", "-q", "-f", "vmdk", "-o", text, &image, &size],
            );
            let options = options.clone().size_bytes(size_bytes).subformat(subformat);
            run(create_image(&ours.path("a.vmdk"), &options));
            let mut names: Vec<_> = std::fs::read_dir(theirs.path("."))
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect();
            names.sort();
            let count = std::fs::read_dir(ours.path(".")).unwrap().count();
            assert_eq!(count, names.len(), "{text}");
            for name in names {
                let lengths = [&theirs, &ours]
                    .map(|place| std::fs::metadata(place.path(&name)).unwrap().len());
                let is_descriptor = lengths[0] < 1 << 16;
                assert!(lengths[0] == lengths[1] || is_descriptor, "{text} {name}");
                if lengths[0] < 64 << 20 {
                    let [theirs, ours] = [&theirs, &ours]
                        .map(|place| without_cid(std::fs::read(place.path(&name)).unwrap()));
                    assert!(theirs == ours, "{text} {name} differs");
                }
            }
        }
    }
}

/// What an image says of itself, in the words of `qemu-img info`.
fn told(facts: &Facts) -> String {
    let mut text = String::from("Format specific information:\n");
    let value = |fact: &Fact| match fact {
        Fact::Text(text) => text.clone(),
        Fact::Number(number) => number.to_string(),
        Fact::Bool(is_so) => is_so.to_string(),
        Fact::List(_) => String::new(),
    };
    for (key, fact) in &facts.specific {
        let key = key.replace('-', " ");
        let Fact::List(all) = fact else {
            text += &format!("    {key}: {}\n", value(fact));
            continue;
        };
        text += &format!("    {key}:\n");
        for (number, members) in all.iter().enumerate() {
            text += &format!("        [{number}]:\n");
            for (key, fact) in members {
                let key = key.replace('-', " ");
                text += &format!("            {key}: {}\n", value(fact));
            }
        }
    }
    text
}

#[test]
fn what_is_told_of_an_image_is_what_qemu_tells() {
    for subformat in ALL {
        let place = Place::default();
        let path = place.path("a.vmdk");
        let options = CreateOptions::default()
            .size_bytes(3 << 30)
            .subformat(subformat);
        let text = run(async {
            create_image(&path, &options).await;
            let read_only = OpenOptions::default().read_only(true);
            let device = open_image(&path, None, read_only).await.unwrap();
            told(&ForeignImage::of(&*device).unwrap().facts())
        });
        let info = qemu("qemu-img", &["info", &place.text("a.vmdk")]);
        // What is told first varies with the kind of an extent.
        let sorted = |text: &str| {
            let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
            lines.sort();
            lines
        };
        let theirs = info.split_once("Format specific information:").unwrap().1;
        let theirs = theirs.split("Child node").next().unwrap();
        let theirs = format!("Format specific information:{theirs}");
        assert_eq!(sorted(&text), sorted(&theirs));
    }
}

#[test]
fn tables_come_and_go() {
    let place = Place::default();
    let path = place.path("a.vmdk");
    run(async {
        let options = CreateOptions::default().size_bytes(7 << 30);
        create_image(&path, &options).await;
        // One table is there at a time, but for those that have to be.
        for round in 1..4u8 {
            let options = OpenOptions::default().tables_bytes(0);
            let device = open_image(&path, None, options).await.unwrap();
            let places = (0..200u64).map(|number| (number * 77 % 200, number));
            let bytes = |number: u64| vec![round ^ number as u8; 4096];
            let offset = |place: u64| (place << 25) + u64::from(round) * 0x1_1000;
            let writes = places.clone().map(|(place, number)| {
                let buffer = Buffer::copy_of(&bytes(number));
                device.write(offset(place), buffer, RequestFlags::default())
            });
            finish_all(8, writes).await.unwrap();
            device.flush().await.unwrap();
            for (place, number) in places {
                let read = device
                    .read(offset(place), Buffer::for_read(4096))
                    .await
                    .unwrap();
                assert!(
                    read[..] == bytes(number)[..],
                    "place {place} of round {round}"
                );
            }
            close(device).await;
        }
        assert_eq!(check_image(&path).await, Vec::<String>::new());
    });
    let read = (0..200u64).map(|place| {
        let number = (0..200).find(|number| number * 77 % 200 == place).unwrap();
        format!(
            "read -P {} {} 4k",
            2 ^ number as u8,
            (place << 25) + 0x2_2000
        )
    });
    let commands: Vec<_> = read.flat_map(|read| ["-c".to_owned(), read]).collect();
    let image = place.text("a.vmdk");
    let mut arguments = vec!["-r", "-f", "vmdk"];
    arguments.extend(commands.iter().map(String::as_str));
    arguments.push(&image);
    let shown = qemu("qemu-io", &arguments);
    assert!(!shown.contains("failed"), "{shown}");
    qemu("qemu-img", &["check", "-f", "vmdk", &image]);
}

#[test]
fn extents_meet_at_two_gib() {
    for subformat in [
        Subformat::TwoGbMaxExtentSparse,
        Subformat::TwoGbMaxExtentFlat,
    ] {
        let place = Place::default();
        let path = place.path("a.vmdk");
        let options = CreateOptions::default()
            .size_bytes(5 << 30)
            .subformat(subformat);
        run(async {
            create_image(&path, &options).await;
            let device = open_image(&path, None, OpenOptions::default())
                .await
                .unwrap();
            for (offset, byte) in [((2 << 30) - 100_000, 1), ((4 << 30) - 512, 2)] {
                let buffer = Buffer::copy_of(&vec![byte; 200_000]);
                let written = device.write(offset, buffer, RequestFlags::default());
                written.await.unwrap();
            }
            close(device).await;
        });
        let image = place.text("a.vmdk");
        let read = |pattern: u8, offset: u64, len: u64| format!("read -P {pattern} {offset} {len}");
        let shown = qemu(
            "qemu-io",
            &[
                "-r",
                "-f",
                "vmdk",
                "-c",
                &read(1, (2 << 30) - 100_000, 200_000),
                "-c",
                &read(2, (4 << 30) - 512, 200_000),
                "-c",
                &read(0, (2 << 30) + 100_000, 1 << 20),
                &image,
            ],
        );
        assert!(!shown.contains("failed"), "{shown}");
        qemu("qemu-img", &["check", "-f", "vmdk", &image]);
    }
}

/// Bytes that compress, and some that do not.
fn stream_content(seed: u64, len: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut bytes = vec![0; len];
    for grain in bytes.chunks_mut(65536) {
        match random.u8(0..4) {
            0 => {}
            1 => random.fill(grain),
            _ => grain.fill_with(|| random.u8(0..4)),
        }
    }
    bytes
}

/// Makes a stream of what is not zero.
async fn write_stream(path: &Path, bytes: &[u8]) {
    let options = CreateOptions::default()
        .size_bytes(bytes.len() as u64)
        .subformat(Subformat::StreamOptimized);
    create_image(path, &options).await;
    let device = open_image(path, None, OpenOptions::default()).await;
    let device = device.unwrap();
    let grains = bytes.chunks(65536).enumerate();
    let grains = grains.filter(|(_, grain)| grain.iter().any(|&byte| byte != 0));
    let writes = grains.map(|(number, grain)| {
        let offset = number as u64 * 65536;
        device.write_compressed(offset, Buffer::copy_of(grain), RequestFlags::default())
    });
    finish_all(8, writes.collect::<Vec<_>>()).await.unwrap();
    close(device).await;
}

/// Compares all of an image with bytes.
async fn compare_image(path: &Path, bytes: &[u8]) {
    let device = open_image(path, None, OpenOptions::default()).await;
    let device = device.unwrap();
    let read = device.read(0, Buffer::for_read(bytes.len())).await.unwrap();
    assert!(read[..] == *bytes, "{}", path.display());
    close(device).await;
}

/// The first grain of zeroes.
fn absent_grain(bytes: &[u8]) -> usize {
    let mut grains = bytes.chunks(65536);
    grains
        .position(|grain| grain.iter().all(|&byte| byte == 0))
        .unwrap()
        * 65536
}

#[test]
fn parents_show_through_and_are_recognized() {
    let place = Place::default();
    let (base, image) = (place.text("base.vmdk"), place.text("a.vmdk"));
    qemu("qemu-img", &["create", "-q", "-f", "vmdk", &base, "4M"]);
    qemu("qemu-io", &["-f", "vmdk", "-c", "write -P 5 0 3M", &base]);
    let mut model = Model::new(30, 6 << 20);
    model.bytes[..3 << 20].fill(5);
    let path = place.path("a.vmdk");
    let open_chain = async |options: OpenOptions| {
        let parent = OpenOptions::default().read_only(true);
        let parent = open_image(&place.path("base.vmdk"), None, parent)
            .await
            .unwrap();
        // As in a graph, where it can be exchanged.
        let link = vellum::nodes::Link::new(parent.clone());
        let device = open_image(&path, Some(link), options).await.unwrap();
        (device, parent)
    };
    run(async {
        let parent = read_descriptor(&*open_file(&place.path("base.vmdk"))).await;
        let parent_cid = parent.unwrap().cid();
        let options = CreateOptions::default()
            .size_bytes(6 << 20)
            .zeroed_grain(true)
            .backing_file(Some("base.vmdk".into()))
            .parent_cid(Some(parent_cid));
        create_image(&path, &options).await;
        for _ in 0..2 {
            let (device, parent) = open_chain(OpenOptions::default()).await;
            model.compare(&*device).await;
            model.exercise(&*device, 60).await;
            model.compare(&*device).await;
            close(device).await;
            close(parent).await;
        }
    });
    compare_with_qemu(&place, "vmdk", "a.vmdk", &model.bytes);
    let info = qemu("qemu-img", &["info", "--backing-chain", &image]);
    assert!(info.contains("backing file: base.vmdk"), "{info}");

    // A parent that has changed is not the parent any more.
    let fresh = place.text("fresh.vmdk");
    qemu(
        "qemu-img",
        &[
            "create", "-q", "-f", "vmdk", "-b", &base, "-F", "vmdk", &fresh,
        ],
    );
    qemu("qemu-io", &["-f", "vmdk", "-c", "write -P 6 0 64k", &base]);
    run(async {
        let fails = async |device: &dyn BlockDevice| {
            let read = device.read(0, Buffer::for_read(512)).await;
            let written = Buffer::zeroed(512);
            let written = device.write(0, written, RequestFlags::default()).await;
            [read.unwrap_err().errno(), written.unwrap_err().errno()]
        };
        let parent = OpenOptions::default().read_only(true);
        let parent = open_image(&place.path("base.vmdk"), None, parent)
            .await
            .unwrap();
        let fresh = place.path("fresh.vmdk");
        let device = open_image(&fresh, Some(parent), OpenOptions::default()).await;
        assert_eq!(fails(&*device.unwrap()).await, [22, 22]);
    });
}

#[test]
fn first_writes_change_the_identifier_alone() {
    let place = Place::default();
    let path = place.path("a.vmdk");
    run(async {
        for subformat in [Subformat::MonolithicSparse, Subformat::MonolithicFlat] {
            let options = CreateOptions::default().size_bytes(1 << 20);
            create_image(&path, &options.subformat(subformat)).await;
            let before = std::fs::read(&path).unwrap();
            let device = open_image(&path, None, OpenOptions::default())
                .await
                .unwrap();
            device.flush().await.unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), before);
            let one = Buffer::copy_of(&[1; 512]);
            device.write(0, one, RequestFlags::default()).await.unwrap();
            let cid = device.layout().descriptor().cid();
            close(device).await;
            let after = read_descriptor(&*open_file(&path)).await.unwrap();
            assert_eq!(after.cid(), cid);
            let after = std::fs::read(&path).unwrap();
            assert_ne!(after, before);
            let digits = before.windows(5).position(|it| it == b"\nCID=").unwrap() + 5;
            let len = before.len().min(digits + 2048);
            assert_eq!(after[digits + 8..len], before[digits + 8..len]);
        }
    });
}

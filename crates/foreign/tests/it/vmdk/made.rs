//! Images of kinds that QEMU reads and does not make, as VMware makes them.

use std::io::Write as _;

use vellum::ErrorKind;
use vellum_foreign::vmdk::header::{DIRECTORY_AT_END, SparseHeader};
use vellum_foreign::vmdk::marker::pack_grain;

use super::*;

const GRAIN: usize = 65536;

/// A file that is made sector by sector.
#[derive(Default)]
struct Sectors(Vec<u8>);

impl Sectors {
    /// Adds bytes at the next sector, and says which that is.
    fn add(&mut self, bytes: &[u8]) -> u64 {
        self.0.resize(self.0.len().next_multiple_of(512), 0);
        let sector = self.0.len() as u64 / 512;
        self.0.write_all(bytes).unwrap();
        self.0.resize(self.0.len().next_multiple_of(512), 0);
        sector
    }

    fn marker(&mut self, sectors: u64, kind: u32) {
        let mut marker = [0; 512];
        marker[..8].copy_from_slice(&sectors.to_le_bytes());
        marker[12..16].copy_from_slice(&kind.to_le_bytes());
        self.add(&marker);
    }

    fn numbers(&mut self, numbers: &[u32]) -> u64 {
        let bytes: Vec<u8> = numbers.iter().flat_map(|it| it.to_le_bytes()).collect();
        self.add(&bytes)
    }
}

fn descriptor(create_type: &str, extents: &str) -> String {
    format!(
        "# Disk DescriptorFile\nversion=1\nencoding=\"UTF-8\"\nCID=6ab10f7a\n\
        parentCID=ffffffff\ncreateType=\"{create_type}\"\n\n# Extent description\n{extents}\n\
        \n# The Disk Data Base \n#DDB\n\nddb.adapterType = \"lsilogic\"\n"
    )
}

/// What `streams_go_both_ways` has, with the last grain not whole.
fn content() -> Vec<u8> {
    stream_content(40, 40 * GRAIN + 0x600)
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|&byte| byte == 0)
}

/// A header as such files have them; where things are is told later.
fn header(size_bytes: usize) -> SparseHeader {
    let bytes = [0; 512];
    let mut header = SparseHeader::parse(&[&b"KDMV"[..], &bytes].concat()).unwrap();
    header.version = 3;
    header.flags = 3 << 16;
    header.capacity_sectors = size_bytes as u64 / 512;
    header.grain_sectors = 128;
    header.descriptor_sector = 1;
    header.descriptor_sectors = 20;
    header.table_entries = 512;
    header.overhead_sectors = 128;
    header.compression = 1;
    header
}

/// A stream as VMware exports it: tables behind the grains that they lead to, found by the footer.
fn exported_stream(content: &[u8]) -> Vec<u8> {
    let mut file = Sectors::default();
    let mut header = header(content.len());
    header.directory_sector = DIRECTORY_AT_END;
    file.add(&header.encode());
    file.add(descriptor("streamOptimized", "RW 1 SPARSE \"x.vmdk\"").as_bytes());
    file.0.resize(128 * 512, 0);
    let mut table = [0; 512];
    for (number, grain) in content.chunks(GRAIN).enumerate() {
        if !is_zero(grain) {
            let mut grain = grain.to_vec();
            grain.resize(GRAIN, 0);
            let packed = pack_grain(number as u64 * 128, &grain).unwrap();
            table[number] = file.add(&packed) as u32;
        }
    }
    file.marker(4, 1);
    let table = file.numbers(&table) as u32;
    file.marker(1, 2);
    header.directory_sector = file.numbers(&[table]);
    file.marker(1, 3);
    file.add(&header.encode());
    file.marker(0, 0);
    file.0
}

/// A file that is only read: by us as by QEMU, and no write is taken.
fn read_only(place: &Place, content: &[u8]) {
    compare_with_qemu(place, "vmdk", "a.vmdk", content);
    let path = place.path("a.vmdk");
    run(async {
        let options = OpenOptions::default().read_only(true).tables_bytes(0);
        let device = open_image(&path, None, options).await.unwrap();
        let read = device.read(0, Buffer::for_read(content.len())).await;
        assert!(read.unwrap()[..] == *content);
        close(device).await;
        assert_eq!(check_image(&path).await, Vec::<String>::new());
        match open_image(&path, None, OpenOptions::default()).await {
            Err(error) => assert_eq!(error.kind(), ErrorKind::ReadOnly),
            Ok(device) => {
                let grain = Buffer::zeroed(GRAIN);
                let written = device.write(0, grain, RequestFlags::default()).await;
                assert_eq!(written.unwrap_err().kind(), ErrorKind::Unsupported);
                close(device).await;
            }
        }
    });
    qemu("qemu-img", &["check", "-f", "vmdk", &place.text("a.vmdk")]);
}

#[test]
fn exported_streams() {
    let place = Place::default();
    let content = content();
    let file = exported_stream(&content);
    std::fs::write(place.path("a.vmdk"), &file).unwrap();
    read_only(&place, &content);

    // Without its end the tables cannot be found.
    std::fs::write(place.path("a.vmdk"), &file[..file.len() - 512]).unwrap();
    let opened = run(open_image(
        &place.path("a.vmdk"),
        None,
        OpenOptions::default(),
    ));
    assert_eq!(opened.unwrap_err().message(), "Invalid footer");
}

#[test]
fn snapshots_of_esx() {
    let place = Place::default();
    let content = content();
    let mut file = Sectors::default();
    file.add(&[0; 4 * 512]);
    let directory = file.numbers(&[0]);
    let mut table = vec![0; 4096];
    let table_sector = file.numbers(&table);
    for (number, grain) in content.chunks(512).enumerate() {
        if !is_zero(grain) && number < 4096 {
            table[number] = file.add(grain) as u32;
        }
    }
    let mut expected = content.clone();
    expected[4096 * 512..].fill(0);
    let mut put = |at: usize, number: u32| {
        file.0[at..at + 4].copy_from_slice(&number.to_le_bytes());
    };
    put(0, u32::from_le_bytes(*b"COWD"));
    put(4, 1);
    put(8, 3);
    put(12, (content.len() / 512) as u32);
    put(16, 1);
    put(20, directory as u32);
    put(24, 2);
    put(directory as usize * 512, table_sector as u32);
    for (number, sector) in table.iter().enumerate() {
        put(table_sector as usize * 512 + number * 4, *sector);
    }
    std::fs::write(place.path("a-delta.vmdk"), &file.0).unwrap();
    let line = format!("RW {} VMFSSPARSE \"a-delta.vmdk\"", content.len() / 512);
    let text = descriptor("vmfsSparse", &line);
    std::fs::write(place.path("a.vmdk"), text).unwrap();
    read_only(&place, &expected);
}

#[test]
fn snapshots_of_large_disks() {
    let place = Place::default();
    let content = content();
    let mut constant = [0u64; 64];
    constant[..5].copy_from_slice(&[
        0xcafe_babe,
        0x2_0000_0001,
        content.len() as u64 / 512,
        8,
        64,
    ]);
    constant[10..12].copy_from_slice(&[1, 1]);
    constant[16..20].copy_from_slice(&[2, 1, 8, 64]);
    constant[24] = 128;
    let mut table = vec![0u64; 4096];
    let mut grains = Vec::new();
    let mut expected = content.clone();
    for (number, grain) in content.chunks(4096).enumerate() {
        table[number] = match number {
            3 => 0x1000_0000_0000_0000,
            4 => 0x2000_0000_0000_0000,
            _ if is_zero(grain) => continue,
            _ => {
                let place = grains.len() as u64 / 4096;
                grains.extend_from_slice(grain);
                grains.resize(grains.len().next_multiple_of(4096), 0);
                0x3000_0000_0000_0000 | (place & 0xfff) << 48 | place >> 12
            }
        };
    }
    expected[3 * 4096..5 * 4096].fill(0);
    let bytes =
        |numbers: &[u64]| -> Vec<u8> { numbers.iter().flat_map(|it| it.to_le_bytes()).collect() };
    let mut file = Sectors::default();
    file.add(&bytes(&constant));
    file.add(&bytes(&[0xcafe_cafe]));
    file.add(&bytes(&[0x1000_0000_0000_0000]));
    file.0.resize(8 * 512, 0);
    file.add(&bytes(&table));
    file.0.resize(128 * 512, 0);
    file.add(&grains);
    std::fs::write(place.path("a-sesparse.vmdk"), &file.0).unwrap();
    let line = format!("RW {} SESPARSE \"a-sesparse.vmdk\"", content.len() / 512);
    let text = descriptor("seSparse", &line);
    std::fs::write(place.path("a.vmdk"), text).unwrap();
    read_only(&place, &expected);

    // One that was not closed.
    file.0[512 + 24] = 1;
    std::fs::write(place.path("a-sesparse.vmdk"), &file.0).unwrap();
    let options = OpenOptions::default().read_only(true);
    let opened = run(open_image(&place.path("a.vmdk"), None, options));
    assert_eq!(
        opened.unwrap_err().message(),
        "Image is dirty, Replaying journal not supported"
    );
}

#[test]
fn disks_with_tracked_changes() {
    let place = Place::default();
    let image = place.text("a.vmdk");
    qemu("qemu-img", &["create", "-q", "-f", "vmdk", &image, "1M"]);
    qemu(
        "qemu-io",
        &["-f", "vmdk", "-c", "write -P 9 64k 64k", &image],
    );
    let mut bytes = std::fs::read(&image).unwrap();
    bytes[4] = 3;
    std::fs::write(&image, bytes).unwrap();
    let mut content = vec![0; 1 << 20];
    content[GRAIN..2 * GRAIN].fill(9);
    read_only(&place, &content);
    let opened = run(open_image(
        &place.path("a.vmdk"),
        None,
        OpenOptions::default(),
    ));
    assert_eq!(
        opened.unwrap_err().message(),
        "VMDK version 3 must be read only"
    );
}

#[test]
fn flat_disks_of_esx() {
    let place = Place::default();
    let mut model = Model::new(50, 2 << 20);
    std::fs::write(place.path("a-flat.vmdk"), &model.bytes).unwrap();
    let text = descriptor("vmfs", "RW 4096 VMFS \"a-flat.vmdk\"");
    std::fs::write(place.path("a.vmdk"), text).unwrap();
    run(async {
        let path = place.path("a.vmdk");
        let device = open_image(&path, None, OpenOptions::default())
            .await
            .unwrap();
        model.exercise(&*device, 50).await;
        model.compare(&*device).await;
        close(device).await;
    });
    compare_with_qemu(&place, "vmdk", "a.vmdk", &model.bytes);
}

#[test]
fn grains_behind_the_end() {
    let place = Place::default();
    let path = place.path("a.vmdk");
    let image = place.text("a.vmdk");
    qemu("qemu-img", &["create", "-q", "-f", "vmdk", &image, "1M"]);
    qemu(
        "qemu-io",
        &["-f", "vmdk", "-c", "write -P 9 0 200k", &image],
    );
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(file.metadata().unwrap().len() - 2 * GRAIN as u64)
        .unwrap();
    let checked = std::process::Command::new("qemu-img")
        .args(["check", &image])
        .output();
    let said = String::from_utf8(checked.unwrap().stderr).unwrap();
    run(async {
        let found = check_image(&path).await;
        assert_eq!(found.len(), 1);
        assert_eq!(said.lines().next(), Some(&*found[0]));
        // New grains would be put where the lost ones were.
        let device = open_image(&path, None, OpenOptions::default())
            .await
            .unwrap();
        let flags = RequestFlags::default();
        let written = device
            .write(2 * GRAIN as u64, Buffer::zeroed(512), flags)
            .await;
        assert_eq!(written.unwrap_err().kind(), ErrorKind::Corrupt);
        device.write(0, Buffer::zeroed(512), flags).await.unwrap();
        close(device).await;
    });
}

#[test]
fn unlike_extents() {
    // Flat and sparse extents whose ends no grain meets: read, and not written.
    let place = Place::default();
    let flat = stream_content(60, 100 * 512);
    let image = place.text("b.vmdk");
    qemu("qemu-img", &["create", "-q", "-f", "vmdk", &image, "1M"]);
    qemu(
        "qemu-io",
        &["-f", "vmdk", "-c", "write -P 9 100k 300k", &image],
    );
    std::fs::write(place.path("c"), [&[7; 512][..], &flat].concat()).unwrap();
    std::fs::write(place.path("d"), &flat).unwrap();
    let lines = "RW 100 FLAT \"c\" 1\nRW 2048 SPARSE \"b.vmdk\"\nRW 50 FLAT \"d\" 0";
    let text = descriptor("twoGbMaxExtentSparse", lines);
    std::fs::write(place.path("a.vmdk"), text).unwrap();
    let mut expected = flat.clone();
    expected.resize(flat.len() + (1 << 20), 0);
    expected[flat.len()..][100 << 10..400 << 10].fill(9);
    expected.extend_from_slice(&flat[..50 * 512]);
    read_only(&place, &expected);
}

//! Encrypted images and volumes, against the real `qemu-img` and by themselves.

mod dropped;
mod legacy;
mod write_log;

use std::sync::Arc;

use vellum::Preallocation;
use vellum::io::lane;
use vellum::luks::{
    Cipher, FormatOptions, Hash, IterationTime, IvGenerator, KeyChange, LuksDevice, LuksOptions,
    Mode, Passphrase, change_keys, format, read_header, unlock,
};
use vellum::qcow2::amend::AmendOptions;
use vellum::qcow2::create::{self, CreateOptions, Encryption};
use vellum::qcow2::{Backing, NewSnapshot, OpenOptions, Qcow2, SnapshotSelector};
use vellum::storage::MemStorage;
use vellum::{BlockDevice, Buffer, Buffers, ErrorKind, RequestFlags, Storage, ZeroRequest};

const QUICK: IterationTime = IterationTime::Iterations(1000);

fn quick() -> FormatOptions {
    FormatOptions {
        iteration_time: QUICK,
        ..FormatOptions::default()
    }
}

fn encryption() -> Encryption {
    Encryption::Luks {
        options: quick(),
        passphrase: Passphrase::from("secret"),
    }
}

fn sized(size_bytes: u64) -> CreateOptions {
    CreateOptions::default().size_bytes(size_bytes)
}

async fn image(options: CreateOptions) -> Arc<dyn Storage> {
    let storage: Arc<dyn Storage> = Arc::new(MemStorage::new());
    let options = options.encryption(Some(encryption()));
    create::create(storage.clone(), None, &options)
        .await
        .unwrap();
    storage
}

async fn open(storage: &Arc<dyn Storage>, passphrase: &str) -> vellum::Result<Arc<Qcow2>> {
    let options = OpenOptions::default()
        .passphrase(Some(passphrase.into()))
        .discard(true);
    let gate = Arc::new(vellum::gate::DenyAll);
    Qcow2::open(storage.clone(), gate, options).await
}

async fn read(device: &dyn BlockDevice, at: u64, length: usize) -> Buffer {
    device.read(at, Buffer::for_read(length)).await.unwrap()
}

async fn write(device: &dyn BlockDevice, at: u64, bytes: &[u8]) {
    let buffer = Buffer::copy_of(bytes);
    let written = device.write(at, buffer, RequestFlags::default());
    written.await.unwrap();
}

async fn bytes_of(storage: &Arc<dyn Storage>) -> Vec<u8> {
    let length = storage.len_bytes().unwrap() as usize;
    let buffers = Buffers::from_iter([Buffer::for_read(length)]);
    storage
        .read(0, buffers)
        .into_single()
        .await
        .unwrap()
        .to_vec()
}

#[test]
fn what_is_written_is_read_again_and_nowhere_plain() {
    lane::block_on(async {
        let storage = image(sized(4 << 20)).await;
        let device = open(&storage, "secret").await.unwrap();
        let words = b"words that nobody else may read!";
        for (at, count) in [(100, 1), (65536 - 8, 3), (1 << 20, 4096), (3 << 20, 16)] {
            write(&*device, at, &words.repeat(count)).await;
        }
        device.close().await.unwrap();
        let device = open(&storage, "secret").await.unwrap();
        for (at, count) in [(100, 1), (65536 - 8, 3), (1 << 20, 4096), (3 << 20, 16)] {
            let found = read(&*device, at, count * words.len()).await;
            assert_eq!(found[..], words.repeat(count));
        }
        assert!(
            read(&*device, 0, 100).await.is_zero(),
            "beside what was written"
        );
        assert!(
            read(&*device, 2 << 20, 65536).await.is_zero(),
            "never written"
        );
        let bytes = bytes_of(&storage).await;
        assert!(!bytes.windows(8).any(|window| window == &words[..8]));
    });
}

#[test]
fn a_wrong_passphrase_is_told_in_qemus_words() {
    lane::block_on(async {
        let storage = image(sized(1 << 20)).await;
        let error = open(&storage, "wrong").await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied);
        assert_eq!(
            error.message(),
            "Invalid password, cannot unlock any keyslot"
        );
        let gate = Arc::new(vellum::gate::DenyAll);
        let without = Qcow2::open(storage, gate, OpenOptions::default()).await;
        let message = "Parameter 'encrypt.key-secret' is required for cipher";
        assert_eq!(without.unwrap_err().message(), message);
    });
}

#[test]
fn clusters_that_are_made_ahead_read_as_zeroes() {
    lane::block_on(async {
        let modes = [
            Preallocation::Metadata,
            Preallocation::Falloc,
            Preallocation::Full,
        ];
        for version in [2, 3] {
            for preallocation in modes {
                let storage = image(
                    CreateOptions::default()
                        .size_bytes(1 << 20)
                        .version(version)
                        .preallocation(preallocation),
                )
                .await;
                let device = open(&storage, "secret").await.unwrap();
                assert!(read(&*device, 0, 1 << 20).await.is_zero());
                write(&*device, 70_000, b"x").await;
                let grown = device.resize(2 << 20, preallocation).await;
                let end = if version == 3 { 2 << 20 } else { 1 << 20 };
                assert_eq!(grown.is_ok(), version == 3);
                let mut all = read(&*device, 0, end).await;
                assert_eq!(all[70_000], b'x');
                all[70_000] = 0;
                assert!(all.is_zero(), "{version} {preallocation:?}");
                device.close().await.unwrap();
            }
        }
    });
}

#[test]
fn zeroes_and_discards_leave_zeroes() {
    lane::block_on(async {
        let storage = image(sized(1 << 20)).await;
        let device = open(&storage, "secret").await.unwrap();
        write(&*device, 0, &[7; 1 << 18]).await;
        device
            .write_zeroes(1000, 70_000, ZeroRequest::default())
            .await
            .unwrap();
        device.discard(131_072, 65536).await.unwrap();
        device.flush().await.unwrap();
        // A partial write to a cluster that may be used again.
        write(&*device, 512 << 10, b"new").await;
        let all = read(&*device, 0, 1 << 20).await;
        assert!(all[..1000].iter().all(|&byte| byte == 7));
        assert!(vellum_io::buffer::is_zero(&all[1000..71_000]));
        assert!(all[71_000..131_072].iter().all(|&byte| byte == 7));
        assert!(vellum_io::buffer::is_zero(&all[131_072..196_608]));
        assert_eq!(all[512 << 10..][..3], *b"new");
        assert!(vellum_io::buffer::is_zero(&all[(512 << 10) + 3..]));
        device.close().await.unwrap();
    });
}

#[test]
fn passphrases_come_and_go() {
    lane::block_on(async {
        let storage = image(sized(1 << 20)).await;
        let device = open(&storage, "secret").await.unwrap();
        write(&*device, 0, b"kept").await;
        for slot in [None, Some(6)] {
            let added = KeyChange::Add {
                known: None,
                slot,
                new: "other".into(),
                iteration_time: QUICK,
                force: false,
            };
            let header = device.change_keys(added).await.unwrap();
            assert!(header.slots[slot.unwrap_or(1) as usize].active);
        }
        let erased = KeyChange::Erase {
            slot: None,
            old: Some("secret".into()),
            force: false,
        };
        device.change_keys(erased).await.unwrap();
        device.close().await.unwrap();
        assert!(open(&storage, "secret").await.is_err());
        let device = open(&storage, "other").await.unwrap();
        assert_eq!(read(&*device, 0, 4).await[..], *b"kept");
        device.close().await.unwrap();
    });
}

#[test]
fn the_last_passphrase_stays_and_refusals_are_qemus() {
    lane::block_on(async {
        let storage: Arc<dyn Storage> = Arc::new(MemStorage::new());
        let volume = format(&quick(), &"secret".into(), false).await.unwrap();
        let buffers = Buffers::from_iter([Buffer::copy_of(&volume.bytes)]);
        storage.write(0, buffers, Default::default()).await.unwrap();
        let header = read_header(&storage, 0, false).await.unwrap();
        let add = |slot| KeyChange::Add {
            known: None,
            slot,
            new: "new".into(),
            iteration_time: QUICK,
            force: false,
        };
        let erase = |slot, old: Option<&str>| KeyChange::Erase {
            slot,
            old: old.map(Passphrase::from),
            force: false,
        };
        for (change, message) in [
            (
                add(Some(8)),
                "Invalid keyslot 8 specified, must be between 0 and 7",
            ),
            (
                add(Some(0)),
                "Refusing to overwrite active keyslot 0 - please erase it first",
            ),
            (
                erase(Some(0), None),
                "Attempt to erase the only active keyslot 0 which will erase all the data in \
                 the image irreversibly - refusing operation",
            ),
            (
                erase(Some(0), Some("other")),
                "Given keyslot 0 doesn't contain the given old password for erase operation",
            ),
            (
                erase(Some(3), None),
                "Given keyslot 3 is already erased (inactive) ",
            ),
            (
                erase(None, Some("secret")),
                "All the active keyslots match the (old) password that was given and erasing \
                 them will erase all the data in the image irreversibly - refusing operation",
            ),
            (
                erase(None, Some("other")),
                "No keyslots match given (old) password for erase operation",
            ),
            (
                erase(None, None),
                "To erase keyslot(s), either explicit keyslot index or the password currently \
                 contained in them must be given",
            ),
        ] {
            let refused = change_keys(&storage, 0, header.clone(), &"secret".into(), change).await;
            assert_eq!(refused.unwrap_err().message(), message);
        }
        unlock(&storage, 0, &header, &"secret".into())
            .await
            .unwrap();
    });
}

/// The length of the encryption header that an image tells may be anything: QEMU, too, reads
/// such an image. It ends in no time, and takes no memory for clusters that are nowhere.
#[test]
fn an_absurd_length_of_the_encryption_header_harms_nobody() {
    lane::block_on(async {
        let storage = image(sized(1 << 20)).await;
        let image = open(&storage, "secret").await.unwrap();
        write(&*image, 0, &[7; 4096]).await;
        image.close().await.unwrap();
        let bytes = bytes_of(&storage).await;
        // The header extension that names the encryption header: its type and its length.
        let extension = [0x05, 0x37, 0xbe, 0x77, 0, 0, 0, 16];
        let at = bytes.windows(8).position(|window| window == extension);
        let length_at = at.unwrap() as u64 + 16;
        let absurd = Buffers::from_iter([Buffer::copy_of(&(1_u64 << 59).to_be_bytes())]);
        let written = storage.write(length_at, absurd, Default::default());
        written.await.unwrap();
        let image = open(&storage, "secret").await.unwrap();
        assert!(read(&*image, 0, 4096).await.iter().all(|byte| *byte == 7));
        write(&*image, 1 << 19, &[8; 4096]).await;
        assert!(
            read(&*image, 1 << 19, 4096)
                .await
                .iter()
                .all(|byte| *byte == 8)
        );
        image.close().await.unwrap();
    });
}

#[test]
fn key_material_outside_of_the_images_header_is_refused() {
    lane::block_on(async {
        let storage = image(sized(1 << 20)).await;
        let bytes = bytes_of(&storage).await;
        let magic = b"LUKS\xba\xbe";
        let luks = bytes.windows(6).position(|window| window == magic).unwrap();
        // The payload starts so late that the header by itself is sound.
        for (field, sectors) in [(104, 1_u32 << 20), (208 + 7 * 48 + 40, 1 << 19)] {
            let at = (luks + field) as u64;
            let buffers = Buffers::from_iter([Buffer::copy_of(&sectors.to_be_bytes())]);
            let written = storage.write(at, buffers, Default::default());
            written.await.unwrap();
        }
        let error = open(&storage, "secret").await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidImage);
        assert_eq!(
            error.message(),
            "Request for data outside of extension header"
        );
    });
}

#[test]
fn passphrases_of_volumes_come_and_go() {
    lane::block_on(async {
        let storage: Arc<dyn Storage> = Arc::new(MemStorage::new());
        let volume = format(&quick(), &"secret".into(), false).await.unwrap();
        let buffers = Buffers::from_iter([Buffer::copy_of(&volume.bytes)]);
        storage.write(0, buffers, Default::default()).await.unwrap();
        let device = luks_device(storage.clone()).await;
        let added = KeyChange::Add {
            known: None,
            slot: None,
            new: "other".into(),
            iteration_time: QUICK,
            force: false,
        };
        device.change_keys(added).await.unwrap();
        let erased = KeyChange::Erase {
            slot: Some(0),
            old: None,
            force: false,
        };
        let header = device.change_keys(erased).await.unwrap();
        let refused = unlock(&storage, 0, &header, &"secret".into()).await;
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::Denied);
        unlock(&storage, 0, &header, &"other".into()).await.unwrap();
    });
}

/// Runs a tool of QEMU's; its output.
fn qemu(program: &str, arguments: &[&str]) -> String {
    let output = std::process::Command::new(program)
        .args(arguments)
        .output()
        .unwrap_or_else(|error| panic!("{program} must be installed: {error}"));
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

const SECRET: &str = "secret,id=s,data=secret";

async fn luks_device(file: Arc<dyn Storage>) -> Arc<LuksDevice> {
    let options = LuksOptions::default().passphrase(Some("secret".into()));
    LuksDevice::open(file, options).await.unwrap()
}

fn file(path: &str) -> Arc<dyn Storage> {
    vellum::storage::FileStorage::open(path, &Default::default()).unwrap()
}

/// Makes a volume in a file.
async fn make_volume(path: &str, options: &FormatOptions) {
    std::fs::write(path, b"").unwrap();
    let storage = file(path);
    let volume = format(options, &"secret".into(), false).await.unwrap();
    let buffers = Buffers::from_iter([Buffer::copy_of(&volume.bytes)]);
    storage.write(0, buffers, Default::default()).await.unwrap();
    storage
        .truncate(volume.size_bytes + (1 << 20))
        .await
        .unwrap();
}

/// Has QEMU write to a volume, reads that, writes itself, and has QEMU read that.
fn exchange(path: &str) {
    let open = format!("driver=luks,key-secret=s,file.filename={path}");
    let io = |commands: &[&str]| {
        let mut arguments = vec!["--object", SECRET, "--image-opts", &open];
        arguments.extend(commands.iter().flat_map(|command| ["-c", command]));
        qemu("qemu-io", &arguments)
    };
    io(&["write -P 65 0 64k"]);
    lane::block_on(async {
        let device = luks_device(file(path)).await;
        assert_eq!(device.size_bytes(), 1 << 20);
        let found = read(&*device, 0, 65536).await;
        assert!(found.iter().all(|&byte| byte == 65));
        write(&*device, 70_000, &[66; 5000]).await;
        write(&*device, 200_000, &[67; 300_000]).await;
        device.close().await.unwrap();
    });
    let told = io(&["read -P 66 70000 5000", "read -P 67 200000 300000"]);
    assert!(!told.contains("failed"), "{told}");
}

#[test]
fn qemus_volumes_are_read_and_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("volume").display().to_string();
    for options in [
        "",
        ",cipher-alg=serpent-256,cipher-mode=cbc,ivgen-alg=essiv,hash-alg=sha1",
    ] {
        let options = format!("key-secret=s,iter-time=10{options}");
        qemu(
            "qemu-img",
            &[
                "create", "-q", "--object", SECRET, "-f", "luks", "-o", &options, &path, "1M",
            ],
        );
        exchange(&path);
    }
}

#[test]
fn volumes_of_every_cipher_and_mode_are_qemus() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("volume").display().to_string();
    for cipher in Cipher::ALL {
        for mode in Mode::ALL {
            let narrow = mode == Mode::Xts && cipher == Cipher::Cast5;
            // QEMU stops on an assertion where a split key is not made of sectors.
            if narrow || (mode != Mode::Xts && cipher.key_bytes() == 24) {
                continue;
            }
            let options = FormatOptions {
                cipher,
                mode,
                ..quick()
            };
            lane::block_on(make_volume(&path, &options));
            exchange(&path);
        }
    }
}

#[test]
fn volumes_of_every_hash_and_iv_are_qemus() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("volume").display().to_string();
    let mut all: Vec<FormatOptions> = Hash::ALL
        .map(|hash| FormatOptions { hash, ..quick() })
        .to_vec();
    for iv_generator in IvGenerator::ALL {
        all.push(FormatOptions {
            mode: Mode::Cbc,
            iv_generator,
            ..quick()
        });
    }
    for (cipher, iv_hash) in [
        (Cipher::Aes256, Hash::Md5),
        (Cipher::Serpent128, Hash::Sha256),
        (Cipher::Twofish256, Hash::Sm3),
    ] {
        all.push(FormatOptions {
            cipher,
            iv_generator: IvGenerator::Essiv,
            iv_hash: Some(iv_hash),
            ..quick()
        });
    }
    for options in all {
        lane::block_on(make_volume(&path, &options));
        exchange(&path);
    }
}

#[test]
fn a_snapshot_needs_no_other_key_than_its_image() {
    lane::block_on(async {
        let options = CreateOptions::default().size_bytes(1 << 20);
        let image = open(&image(options).await, "secret").await.unwrap();
        write(&*image, 4096, b"then").await;
        let made = image.create_snapshot(NewSnapshot::default()).await.unwrap();
        write(&*image, 4096, b"now!").await;

        let selector = SnapshotSelector::Id(made.id);
        let then = image.open_snapshot(selector).await.unwrap();
        assert_eq!(&read(&*then, 4096, 4).await[..], b"then");
        assert_eq!(&read(&*image, 4096, 4).await[..], b"now!");
    });
}

/// A zero cluster without a place hides the backing file; as data it needs zeroes that are encrypted.
#[test]
fn zeroes_that_hide_a_backing_file_are_written_encrypted_for_version_2() {
    lane::block_on(async {
        let options = CreateOptions::default()
            .size_bytes(1 << 20)
            .backing_file(Some("base".into()));
        let storage = image(options).await;
        let base: Arc<dyn Storage> = Arc::new(MemStorage::with_bytes(vec![3; 1 << 20]));
        let open = || async {
            let base = vellum::Raw::open(base.clone(), Default::default()).unwrap();
            let options = OpenOptions::default()
                .passphrase(Some("secret".into()))
                .backing(Backing::Given(base));
            let gate = Arc::new(vellum::gate::DenyAll);
            Qcow2::open(storage.clone(), gate, options).await.unwrap()
        };
        let device = open().await;
        let zeroes = ZeroRequest::default();
        device.write_zeroes(0, 128 << 10, zeroes).await.unwrap();
        let options = AmendOptions::default().version(Some(2));
        device.amend(options, None).await.unwrap();
        let device = open().await;
        assert_eq!(read(&*device, 0, 128 << 10).await[..], [0; 128 << 10]);
        assert_eq!(read(&*device, 128 << 10, 4).await[..], [3; 4]);
    });
}

use futures_util::FutureExt;
use proptest::prelude::*;
use sha1::{Digest, Sha1};
use vellum_storage::mem::MemStorage;

use super::tar::tests::header;
use super::*;
use vellum_io::lane::block_on;

/// A tar file of members.
fn archive(members: &[(&str, &[u8])]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (name, content) in members {
        add(&mut bytes, name, b'0', content);
    }
    bytes.resize(bytes.len() + 1024, 0);
    bytes
}

fn add(bytes: &mut Vec<u8>, name: &str, kind: u8, content: &[u8]) {
    let size = format!("{:011o}\0", content.len());
    bytes.extend(header(name.as_bytes(), size.as_bytes(), kind));
    bytes.extend(content);
    bytes.resize(bytes.len().next_multiple_of(BLOCK_BYTES), 0);
}

fn ovf(disks: &[&str]) -> Vec<u8> {
    let mut text = "<Envelope><References>".to_owned();
    for name in disks {
        text += &format!("<File id='{name}' href='{name}'/>");
    }
    text += "</References><DiskSection>";
    for name in disks {
        text += &format!("<Disk diskId='v{name}' capacity='1' fileRef='{name}'/>");
    }
    (text + "</DiskSection></Envelope>").into_bytes()
}

fn open(bytes: Vec<u8>) -> Result<Package> {
    block_on(Package::open(Arc::new(MemStorage::with_bytes(bytes))))
}

fn content(storage: &MemberStorage, at: u64, len: usize) -> Vec<u8> {
    block_on(read_at(storage, at, len)).unwrap().to_vec()
}

#[test]
fn members_are_windows_of_the_file() {
    let disk: Vec<u8> = (0..1000).map(|at| at as u8).collect();
    let bytes = archive(&[("m.ovf", &ovf(&["d"])), ("./d", &disk), ("rest", b"xyz")]);
    let package = open(bytes).unwrap();
    let storage = package.storage(Some("./d")).unwrap();
    assert_eq!(storage.len_bytes().unwrap(), 1000);
    assert_eq!(content(&storage, 0, 1000), disk);
    let mut end = disk[990..].to_vec();
    end.resize(20, 0);
    assert_eq!(
        content(&storage, 990, 20),
        end,
        "nothing of the next member shows"
    );
    assert_eq!(content(&storage, u64::MAX - 5, 3), [0; 3]);
    assert_eq!(package.storage(None).unwrap().member().name, "d");
    assert!(
        storage
            .write_zeroes(0, 1, Default::default())
            .now_or_never()
            .unwrap()
            .is_err()
    );
    let error = package.storage(Some("../m.ovf")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(MemberStorage::of(&*storage).is_some());
}

#[test]
fn the_only_disk_is_taken_and_several_are_told() {
    let two = archive(&[("m.ovf", &ovf(&["a", "b"])), ("a", b"1"), ("b", b"2")]);
    let error = open(two).unwrap().storage(None).unwrap_err();
    assert!(
        error.message().contains("2 disks, 'a', 'b': name one"),
        "{error}"
    );
    let none = archive(&[("m.ovf", &ovf(&["gone"]))]);
    let error = open(none).unwrap().storage(None).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    let gzip =
        b"<Envelope><References><File id='d' href='d' compression='gzip'/></References></Envelope>";
    let gzip = open(archive(&[("m.ovf", gzip), ("d", b"1")])).unwrap();
    let error = gzip.storage(Some("d")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}

#[test]
fn long_names_and_sizes_come_from_extensions() {
    let long = "l".repeat(200);
    let mut bytes = archive(&[("m.ovf", &ovf(&[]))]);
    bytes.truncate(bytes.len() - 1024);
    add(
        &mut bytes,
        "././@LongLink",
        b'L',
        format!("{long}\0").as_bytes(),
    );
    add(&mut bytes, "short", b'0', b"1");
    add(&mut bytes, "pax", b'x', b"17 path=folder/p\n10 size=3\n");
    bytes.extend(header(b"p", b"0\0", b'0'));
    bytes.extend(b"abc");
    let package = open(bytes).unwrap();
    let told: Vec<_> = package.members()[1..]
        .iter()
        .map(|m| (&*m.name, m.size_bytes))
        .collect();
    assert_eq!(told, [(&*long, 1), ("folder/p", 3)]);
    assert_eq!(
        content(&package.storage(Some("folder/p")).unwrap(), 0, 3),
        b"abc"
    );
}

#[test]
fn what_a_manifest_says_is_checked() {
    let sum = "3f786850e387550fdab836ed7e6dc881de23001b"; // "a\n"
    let of_descriptor: String = Sha1::digest(ovf(&["d"]))
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let manifest = format!("SHA1(d)= {sum}\nSHA1(m.ovf)= {of_descriptor}\n");
    let of = |manifest: &str, disk: &[u8]| {
        let bytes = archive(&[
            ("m.ovf", &ovf(&["d"])),
            ("m.mf", manifest.as_bytes()),
            ("d", disk),
        ]);
        block_on(open(bytes).unwrap().check()).unwrap()
    };
    assert_eq!(of(&manifest, b"a\n"), CheckReport::default());
    let wrong = of(&manifest, b"b\n");
    assert_eq!(
        wrong.messages,
        ["ERROR the manifest has another SHA1 sum of 'd'"]
    );
    assert_eq!(wrong.corruptions, 1);
    assert_eq!(
        of(&format!("{manifest}x\nSHA1(e)= {sum}"), b"a\n").corruptions,
        2
    );
    let twice = of(&format!("{manifest}{manifest}"), b"a\n");
    assert_eq!(
        twice.messages,
        [
            "ERROR line 3 of the manifest cannot be read",
            "ERROR line 4 of the manifest cannot be read"
        ]
    );
    let missing = of(&format!("SHA1(m.ovf)= {of_descriptor}\n"), b"a\n");
    assert_eq!(missing.messages, ["ERROR the manifest has no sum of 'd'"]);
    let without = block_on(open(archive(&[("m.ovf", &ovf(&["d"]))])).unwrap().check()).unwrap();
    assert_eq!(
        without.corruptions, 1,
        "the descriptor names what is not there"
    );
    assert_eq!(without.messages.len(), 2);
}

/// A manifest that is there and does not tell is no reason to take a disk for whole.
#[test]
fn a_disk_that_no_sum_vouches_for_is_not_verified() {
    let sum = "3f786850e387550fdab836ed7e6dc881de23001b"; // "a\n"
    let verify = |name: &str, manifest: &str| {
        let bytes = archive(&[
            ("m.ovf", &ovf(&["d"])),
            (name, manifest.as_bytes()),
            ("d", b"a\n"),
        ]);
        let package = open(bytes).unwrap();
        block_on(package.storage(None).unwrap().verify())
    };
    let good = format!("SHA1(d)= {sum}\n");
    verify("m.mf", &good).unwrap();
    verify("notes", "none").unwrap();
    for (name, manifest, why) in [
        ("m.mf", String::new(), "no sum of 'd'"),
        ("m.mf", format!("MD7(d)= {sum}\n"), "line 1"),
        ("m.mf", good.replace("SHA1(d)", "SHA1(e)"), "no sum of 'd'"),
        (
            "m.mf",
            format!("{good}SHA1(d)= {}\n", sum.replace('3', "4")),
            "line 2",
        ),
        ("other.mf", good.clone(), "'other.mf' is not called"),
        ("m.MF", good.clone(), "'m.MF' is not called"),
    ] {
        let error = verify(name, &manifest).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidImage, "{name} {manifest}");
        assert!(error.message().contains(why), "{error}");
    }
}

#[test]
fn references_are_uris() {
    let members = |member| {
        open(archive(&[
            ("m.ovf", &ovf(&["a%20b%C3%A4"])),
            (member, b"1"),
        ]))
    };
    for member in ["a bä", "a%20b%C3%A4"] {
        let package = members(member).unwrap();
        assert_eq!(package.storage(None).unwrap().member().name, member);
    }
    assert!(percent_decoded("a%2").is_none() && percent_decoded("a%+1").is_none());
    assert!(percent_decoded("%ff").is_none());
}

#[test]
fn what_is_no_package_is_refused() {
    let refused = |bytes: Vec<u8>, why: &str| {
        let error = open(bytes).unwrap_err();
        assert!(error.message().contains(why), "{error}");
    };
    refused(archive(&[("d", b"1")]), "no OVF descriptor");
    refused(vec![], "no OVF descriptor");
    refused(archive(&[("m.ovf", b"x")]), "descriptor");
    refused(
        archive(&[("m.ovf", &ovf(&[])), ("a", b""), ("./a", b"")]),
        "two members",
    );
    refused(
        archive(&[("m.ovf", &ovf(&[])), ("a\n", b"")]),
        "without a name",
    );
    let mut cut = archive(&[("m.ovf", &ovf(&[])), ("a", &[1; 700])]);
    cut.truncate(cut.len() - 1024 - 512);
    refused(cut, "the file ends before its member 'a' does");
    let mut huge = header(b"m.ovf", b"77777777777\0", b'0').to_vec();
    huge.resize(1024, 0);
    refused(huge, "ends before");
    let many: Vec<u8> = header(b"x", b"0\0", b'5').repeat(MAX_HEADERS);
    refused(many, "too many members");
    let long = vec![b'x'; MAX_DESCRIPTOR_BYTES as usize + 1];
    refused(archive(&[("m.ovf", &long)]), "the most that is read");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_change_gives_a_package_or_an_error(
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
        len in any::<prop::sample::Index>(),
    ) {
        let manifest = b"SHA1(d)= 3f786850e387550fdab836ed7e6dc881de23001b\n";
        let mut bytes = archive(&[("m.ovf", &ovf(&["d"])), ("m.mf", manifest), ("d", b"a\n")]);
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        bytes.truncate(len.index(bytes.len() * 2));
        if let Ok(package) = open(bytes) {
            let _ = block_on(package.check());
            let _ = package.storage(None).map(|storage| content(&storage, 0, 10));
        }
    }
}

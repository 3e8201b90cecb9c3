//! Packages of virtual machines (OVA), made here byte by byte around disks of the real `qemu-img`.

use serde_json::Value;
use sha2::{Digest, Sha256};
use vellum_testing::Folder;

const VELLUM: &str = env!("CARGO_BIN_EXE_vellum");

const DISK_BYTES: &str = "4194304";

fn octal(field: &mut [u8], value: usize) {
    let digits = format!("{value:0width$o}", width = field.len() - 1);
    field[..digits.len()].copy_from_slice(digits.as_bytes());
}

/// A tar file.
fn archive(members: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (name, content) in members {
        let mut header = [0; 512];
        header[..name.len()].copy_from_slice(name.as_bytes());
        octal(&mut header[124..136], content.len());
        header[148..156].fill(b' ');
        header[156] = b'0';
        header[257..263].copy_from_slice(b"ustar\0");
        let sum = header.iter().map(|&byte| usize::from(byte)).sum();
        octal(&mut header[148..155], sum);
        bytes.extend(header);
        bytes.extend(content);
        bytes.resize(bytes.len().next_multiple_of(512), 0);
    }
    bytes.resize(bytes.len() + 1024, 0);
    bytes
}

fn descriptor(disks: &[&str]) -> Vec<u8> {
    let files = disks
        .iter()
        .map(|name| format!("<File ovf:id='{name}' ovf:href='{name}'/>"));
    let entries = disks.iter().map(|name| {
        format!(
            "<Disk ovf:diskId='of {name}' ovf:capacity='4' ovf:capacityAllocationUnits='byte * 2^20' \
             ovf:fileRef='{name}' ovf:format='http://www.vmware.com/x#streamOptimized'/>"
        )
    });
    let (files, entries) = (files.collect::<String>(), entries.collect::<String>());
    let namespace = "http://schemas.dmtf.org/ovf/envelope/1";
    format!(
        "<Envelope xmlns='{namespace}' xmlns:ovf='{namespace}'><References>{files}</References>\
         <DiskSection>{entries}</DiskSection><VirtualSystem ovf:id='vm'><Name>a machine</Name>\
         </VirtualSystem></Envelope>"
    )
    .into_bytes()
}

fn manifest(members: &[(&str, &[u8])]) -> Vec<u8> {
    let line = |(name, bytes): &(&str, &[u8])| {
        let sum = Sha256::digest(bytes);
        let digits: String = sum.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("SHA256({name})= {digits}\n")
    };
    members.iter().map(line).collect::<String>().into_bytes()
}

/// `disk.raw`, and `one.ova` of its streamOptimized VMDK.
fn folder() -> Folder {
    let folder = Folder::new(VELLUM);
    folder.img("create -q disk.raw 4M");
    let writes = [
        "-f",
        "raw",
        "-c",
        "write -P 1 0 64k",
        "-c",
        "write -P 2 3M 5k",
        "disk.raw",
    ];
    folder.must("qemu-io", &writes);
    let convert = "convert -f raw -O vmdk -o subformat=streamOptimized disk.raw disk1.vmdk";
    folder.img(&convert.split(' ').collect::<Vec<_>>());
    let disk = folder.read("disk1.vmdk");
    // Nothing beside the package must be taken for what is in it.
    folder.remove("disk1.vmdk");
    let ovf = descriptor(&["disk1.vmdk"]);
    let sums = manifest(&[("m.ovf", &ovf), ("disk1.vmdk", &disk)]);
    let members = [("m.ovf", ovf), ("m.mf", sums), ("disk1.vmdk", disk)];
    folder.write("one.ova", archive(&members));
    folder
}

#[test]
fn a_member_is_an_image_wherever_a_name_is_taken() {
    let folder = folder();
    let member = "one.ova#disk1.vmdk";
    folder.must("vellum", &format!("convert {member} -O qcow2 out.qcow2"));
    folder.img("compare out.qcow2 disk.raw");
    folder.must(
        "vellum",
        &format!("compare -f vmdk -F raw {member} disk.raw"),
    );
    folder.must("vellum", &format!("check {member}"));
    let info = folder
        .run("vellum", &format!("info --output=json {member}"))
        .expect(0)
        .json();
    assert_eq!(info["format"], "vmdk");
    assert_eq!(info["virtual-size"].to_string(), DISK_BYTES);
    assert_eq!(info["filename"], member);
    folder.must("vellum", &format!("map --output=json {member}"));
    folder.must(
        "vellum",
        &format!("create -q -f qcow2 -b {member} -F vmdk over.qcow2"),
    );
    folder.must("vellum", "compare -f qcow2 -F raw over.qcow2 disk.raw");
    for options in [
        "file.filename=one.ova,file.member=disk1.vmdk",
        "file.file.driver=file,file.file.filename=one.ova",
    ] {
        let options = format!("driver=vmdk,file.driver=ova,{options}");
        let answer = folder.must("vellum", &format!("info --image-opts {options}"));
        assert!(answer.contains("virtual size: 4 MiB"), "{answer}");
    }
    let io = ["io", "-f", "vmdk", "-c", "write 0 64k", member];
    let error = folder.run("vellum", &io).err;
    let reason = "a member of a package cannot be changed";
    assert!(error.contains(reason), "{error}");
    let audit = folder.must("vellum", &format!("audit {member}"));
    assert!(audit.contains("safe"), "{audit}");
}

#[test]
fn a_package_is_told_and_its_only_disk_taken() {
    let folder = folder();
    let answer = folder.must("vellum", "info one.ova");
    for line in [
        "package: one.ova",
        "virtual machine: a machine",
        "manifest: SHA256 ('vellum check' compares)",
        "    of disk1.vmdk: 4 MiB, in disk1.vmdk, http://www.vmware.com/x#streamOptimized",
    ] {
        assert!(answer.lines().any(|told| told == line), "{line}: {answer}");
    }
    let info = folder
        .run("vellum", "info --output=json one.ova")
        .expect(0)
        .json();
    assert_eq!(info["disks"][0]["capacity"].to_string(), DISK_BYTES);
    assert_eq!(info["disks"][0]["file"], "disk1.vmdk");
    assert_eq!(info["members"][2]["in-manifest"], true);
    assert_eq!(info["members"][1]["in-manifest"], false);
    assert_eq!(info["certificate"], Value::Null);
    folder.must("vellum", "convert one.ova -O raw out.raw");
    assert_eq!(folder.read("out.raw"), folder.read("disk.raw"));
    assert_eq!(
        folder.must("vellum", "check one.ova"),
        "No errors were found on the image.\n"
    );
    // Bytes for whoever says so, and for programs called as QEMU's.
    folder.must("vellum", "convert -f raw one.ova -O raw bytes");
    assert_eq!(folder.read("bytes"), folder.read("one.ova"));
    let output = folder.run("our qemu-img", "info one.ova");
    assert!(output.out.contains("file format: raw"), "{output:?}");
}

#[test]
fn one_of_several_disks_is_to_be_named() {
    let folder = folder();
    let members = [
        ("m.ovf", descriptor(&["a", "b"])),
        ("a", vec![1; 512]),
        ("b", vec![2; 1024]),
    ];
    folder.write("two.ova", archive(&members));
    let error = folder.refused("vellum", "convert two.ova -O raw out");
    assert!(
        error.contains("2 disks, 'a', 'b': name one, as in 'two.ova#a'"),
        "{error}"
    );
    folder.must("vellum", "convert -f raw two.ova#b -O raw out");
    assert_eq!(folder.read("out"), [2; 1024]);
    let error = folder.refused(
        "vellum",
        "convert -f raw two.ova#../../etc/passwd -O raw out2",
    );
    assert!(error.contains("no member '../../etc/passwd'"), "{error}");
    let checked = folder.must("vellum", "check two.ova");
    assert!(checked.contains("No errors"), "{checked}");
    assert!(
        folder
            .must("vellum", "info two.ova")
            .contains("manifest: none")
    );
}

#[test]
fn what_the_manifest_does_not_have_is_not_converted() {
    let folder = folder();
    let mut bytes = folder.read("one.ova");
    // The last bytes of the disk, which no reader of it looks at.
    let at = bytes.len() - 1024 - 1;
    bytes[at] ^= 1;
    folder.write("wrong.ova", &bytes);
    let line = "the manifest has another SHA256 sum of 'disk1.vmdk'";
    for words in [
        "convert wrong.ova -O raw out",
        "convert wrong.ova#disk1.vmdk -O raw out",
    ] {
        let error = folder.refused("vellum", words);
        assert!(error.contains(line), "{error}");
        assert!(!folder.has("out"));
    }
    let output = folder.run("vellum", "check wrong.ova").expect(2);
    assert!(output.err.contains(line), "{output:?}");
    let output = folder.run("vellum", "check --output=json wrong.ova");
    let value: Value = output.json();
    assert_eq!(
        (&value["format"], &value["corruptions"]),
        (&"ova".into(), &1.into())
    );
    bytes[0] ^= 1;
    folder.write("damaged.ova", &bytes);
    let error = folder.refused("vellum", "convert damaged.ova -O raw out");
    assert!(
        error.contains("a header of the tar file has a wrong checksum"),
        "{error}"
    );
    bytes[0] ^= 1;
    bytes.truncate(bytes.len() - 4096);
    folder.write("cut.ova", &bytes);
    let error = folder.refused("vellum", "info cut.ova");
    assert!(
        error.contains("the file ends before its member 'disk1.vmdk' does"),
        "{error}"
    );
}

#[test]
fn files_are_what_their_names_say() {
    let folder = folder();
    folder.write("one.ova#disk1.vmdk", [7; 512]);
    folder.write("plain#name", [8; 512]);
    folder.must("vellum", "convert -f raw one.ova#disk1.vmdk -O raw out");
    assert_eq!(folder.read("out"), [7; 512]);
    folder.must("vellum", "convert -f raw plain#name -O raw out2");
    assert_eq!(folder.read("out2"), [8; 512]);
    let error = folder.refused("vellum", "info none.ova#disk");
    assert!(error.contains("No such file or directory"), "{error}");
    // A member that is called like a file of the host is still a member.
    folder.write("secret", b"of the host");
    let path = folder.path("secret").display().to_string();
    let members = [("m.ovf", descriptor(&[&path])), (&*path, vec![3; 512])];
    folder.write("trick.ova", archive(&members));
    folder.must(
        "vellum",
        &format!("convert -f raw trick.ova#{path} -O raw inside"),
    );
    assert_eq!(folder.read("inside"), [3; 512]);
    // A descriptor in a package that names a part beside it.
    let flat = b"# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=ffffffff\ncreateType=\"monolithicFlat\"\n\
                 RW 1 FLAT \"secret\" 0\n";
    let members = [("m.ovf", descriptor(&["d"])), ("d", flat.to_vec())];
    folder.write("flat.ova", archive(&members));
    let error = folder.refused("vellum", "convert flat.ova -O raw out3");
    assert!(error.contains("names 'secret'"), "{error}");
}

/// Whatever form a name has that stands in an image in a package, it opens nothing.
#[test]
fn an_image_in_a_package_opens_no_other_file() {
    let folder = folder();
    folder.write("secret", [5; 65536]);
    let secret = folder.path("secret").display().to_string();
    let json = format!(r#"json:{{"driver":"file","filename":"{secret}"}}"#);
    let names = [secret.clone(), format!("file:{secret}"), json];
    for (number, name) in names.iter().enumerate() {
        let words = [
            "create", "-q", "-u", "-f", "qcow2", "-F", "raw", "-b", name, "over", "64k",
        ];
        folder.img(&words);
        let members = [
            ("m.ovf", descriptor(&["over"])),
            ("over", folder.read("over")),
        ];
        folder.write("over.ova", archive(&members));
        for words in [
            "convert over.ova -O raw out",
            "info --backing-chain over.ova#over",
        ] {
            let error = folder.refused("vellum", words);
            assert!(
                error.contains("opens no other file"),
                "{number} {words}: {error}"
            );
        }
        let audit = "audit --allow-backing --allow-protocols over.ova";
        folder.run("vellum", audit).expect(2);
    }
    let flat = format!(
        "# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=ffffffff\ncreateType=\"monolithicFlat\"\n\
         RW 128 FLAT \"{secret}\" 0\n"
    );
    let members = [("m.ovf", descriptor(&["d"])), ("d", flat.into_bytes())];
    folder.write("flat.ova", archive(&members));
    for words in ["convert flat.ova -O raw out", "check flat.ova#d"] {
        let error = folder.refused("vellum", words);
        assert!(error.contains("opens no other file"), "{words}: {error}");
    }
    assert!(!folder.has("out"));
}

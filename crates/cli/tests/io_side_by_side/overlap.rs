//! Images whose tables lead guest data into metadata.

use super::{QCOW2, Twins};

/// An entry of an L1 or L2 table that leads to this host offset alone.
fn entry_to(offset: u64) -> [u8; 8] {
    (1 << 63 | offset).to_be_bytes()
}

impl Twins {
    /// Has the first L2 entry of the disk lead to `offset`, in both folders.
    fn mislead(&self, offset: u64) {
        for folder in [&self.ours, &self.theirs] {
            let path = folder.path().join("disk");
            let mut bytes = std::fs::read(&path).expect("the disk");
            let be64 = |bytes: &[u8], at: usize| {
                u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
            };
            let l1 = be64(&bytes, 40) as usize;
            let l2 = (be64(&bytes, l1) & !(1 << 63)) as usize;
            bytes[l2..l2 + 8].copy_from_slice(&entry_to(offset));
            std::fs::write(&path, bytes).expect("the disk");
        }
    }

    /// Whether the header says that the disk is corrupt, which both must agree about.
    fn is_corrupt(&self) -> bool {
        let [ours, theirs] = [&self.ours, &self.theirs].map(|folder| {
            let bytes = std::fs::read(folder.path().join("disk")).expect("the disk");
            bytes[79] & 2 != 0
        });
        assert_eq!(ours, theirs);
        ours
    }
}

#[test]
fn writes_that_would_hit_metadata_are_refused_alike() {
    const TABLE: u64 = 0x1_0000;
    const BLOCK: u64 = 0x2_0000;
    const L1: u64 = 0x3_0000;
    const L2: u64 = 0x4_0000;
    let cases = [
        ("", 0, None),
        ("", TABLE, Some("refcount table")),
        ("", BLOCK, Some("refcount block")),
        ("", L1, Some("active L1 table")),
        ("", L2, Some("active L2 table")),
        ("overlap-check=all,", L2, Some("active L2 table")),
        ("overlap-check=constant,", L1, Some("active L1 table")),
        ("overlap-check=constant,", L2, None),
        ("overlap-check=none,", TABLE, None),
        (
            "overlap-check.template=none,overlap-check.refcount-block=on,",
            BLOCK,
            Some("block"),
        ),
        ("overlap-check.active-l1=off,", L1, None),
    ];
    for (options, target, hit) in cases {
        let twins = Twins::with_image(QCOW2);
        twins.commands(&["disk"], &["write 0 64k"]);
        twins.mislead(target);
        let image = format!("driver=qcow2,{options}file.filename=disk");
        let answer = twins.commands(&["--image-opts", &image], &["write 0 4k"]);
        let said = answer.errors.concat();
        // An entry that leads to the header leads nowhere: the cluster gets a place.
        assert_eq!(
            hit.is_some(),
            said.contains("Preventing invalid write"),
            "{said}"
        );
        assert!(said.contains(hit.unwrap_or_default()), "{said}");
        assert_eq!(twins.is_corrupt(), hit.is_some(), "{options}");
    }
}

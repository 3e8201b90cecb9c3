//! File systems that were not unmounted: what is in the journal alone is shown, as e2fsck would
//! bring it to its place.

mod common;

use std::fs;
use std::path::Path;
use std::process::Command;

use common::images;
use vellum_files::{Contents, ROOT};

fn debugfs(image: &str, commands: &str) -> String {
    let mut child = Command::new("/usr/sbin/debugfs");
    let script = tempfile::NamedTempFile::new().expect("a file");
    fs::write(script.path(), commands).expect("a script");
    child.args(["-w", "-f"]).arg(script.path()).arg(image);
    let output = child.output().expect("debugfs, of `cargo xtask setup`");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn content(image: &Path, name: &str) -> Vec<u8> {
    let files = vellum_files::open(common::source(image), Contents::Ext("ext4")).expect("sound");
    assert_eq!(files.remarks(), [""; 0]);
    let file = files
        .lookup(ROOT, name.as_bytes())
        .expect("sound")
        .expect("there");
    let mut bytes = vec![0; 4096];
    assert_eq!(files.read(file, 0, &mut bytes).expect("sound"), bytes.len());
    bytes
}

#[test]
fn what_is_in_the_journal_alone_is_shown() {
    let folder = tempfile::tempdir().expect("a folder");
    let tree = folder.path().join("tree");
    fs::create_dir(&tree).expect("a directory");
    for name in ["one", "two", "three"] {
        fs::write(tree.join(name), [b'o'; 4096]).expect("a file");
    }
    let newer = folder.path().join("newer");
    let mut bytes = vec![b'n'; 4096];
    // As blocks of journals begin.
    bytes[..4].copy_from_slice(&0xc03b_3998_u32.to_be_bytes());
    fs::write(&newer, &bytes).expect("a file");
    let image = folder.path().join("image");
    let (tree, shown) = (tree.display().to_string(), image.display().to_string());
    for features in [
        "^metadata_csum,^64bit",
        "^metadata_csum,64bit",
        "metadata_csum,64bit",
    ] {
        let _ = fs::remove_file(&image);
        let words = [
            "-q", "-F", "-t", "ext4", "-b", "4096", "-O", features, "-d", &tree, &shown, "32M",
        ];
        images::run("mke2fs", &words);
        let block = |name: &str| {
            let told = debugfs(&shown, &format!("blocks {name}\n"));
            let last = told.split_whitespace().last().expect("a block");
            last.parse::<u64>().expect("a number")
        };
        let [one, two] = [block("one"), block("two")];
        let newer = newer.display();
        debugfs(
            &shown,
            &format!("jo\njw -b {one} {newer}\njw -b {two} {newer}\njw -r {two}\njc\n"),
        );
        let old = vec![b'o'; 4096];
        let found = ["one", "two", "three"].map(|name| content(&image, name));
        assert!(found[0] == bytes, "{features}: {:?}", &found[0][..8]);
        assert!(found[1] == old && found[2] == old, "{features}");
        // The same as when it is brought to its place.
        debugfs(&shown, "jr\n");
        assert!(found == ["one", "two", "three"].map(|name| content(&image, name)));
    }
}

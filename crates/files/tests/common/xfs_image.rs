//! A small XFS, made by a prototype file.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::images::noise;

/// A small XFS, made without mounting it: files by their paths, and what is in them. The sizes of
/// directories make each form of them; fragments are there only where the kernel made them.
pub fn small_xfs(options: &[&str], folder: &Path, image: &Path) -> Vec<(String, Vec<u8>)> {
    let content = folder.join("content");
    let mut prototype = "boot 0 0\nd--755 3 4\n".to_owned();
    let mut files = Vec::new();
    for (directory, count) in [("inside", 2), ("block", 30), ("leaf", 200), ("node", 1500)] {
        prototype += &format!("{directory} d--750 5 6\n");
        for number in 0..count {
            let bytes = noise(number, (number * 37 % 9000) as usize);
            let path = folder.join(format!("{directory} {number}").replace(' ', "_"));
            fs::write(&path, &bytes).expect("a file");
            prototype += &format!("entry{number} ---644 7 8 {}\n", path.display());
            files.push((format!("{directory}/entry{number}"), bytes));
        }
        prototype += "$\n";
    }
    fs::write(&content, b"set-user-ID").expect("a file");
    // Longer ones it writes without the head that version 5 has.
    let long = match options.contains(&"crc=0") {
        true => format!("/{}", "t".repeat(900)),
        false => "short".to_owned(),
    };
    prototype += &format!(
        "tty c--640 0 0 4 7\ndisk b--640 0 0 259 7\npipe p--600 1 1\nlink l--777 0 0 some/where\n\
         long l--777 0 0 {long}\nset -u-755 0 0 {}\n$\n",
        content.display()
    );
    files.push(("set".to_owned(), b"set-user-ID".to_vec()));
    let description = folder.join("prototype");
    fs::write(&description, prototype).expect("a file");
    let _ = fs::remove_file(image);
    let (description, shown) = (
        description.display().to_string(),
        image.display().to_string(),
    );
    let target = format!("name={shown},size=32m,file=1");
    // It makes so small ones for tests alone.
    let output = Command::new("mkfs.xfs")
        .args(["-q", "-L", "a label", "-d", &target, "-p", &description])
        .args(options)
        .env("TEST_DIR", "1")
        .env("TEST_DEV", "1")
        .env("QA_CHECK_FS", "1")
        .env(
            "PATH",
            "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        )
        .output()
        .expect("mkfs.xfs, of `cargo xtask setup`");
    assert!(output.status.success(), "{output:?}");
    files
}

//! The fuzz targets' check without a fuzzer: over their corpora, and over mutations of them.

#[path = "../../../../fuzz/src/foreign.rs"]
mod foreign;

use std::path::Path;

fn corpus(format: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus");
    let files = std::fs::read_dir(folder.join(format)).expect("each target has a corpus");
    let mut paths: Vec<_> = files.map(|file| file.expect("a file").path()).collect();
    paths.sort();
    let bytes = paths
        .iter()
        .map(|path| std::fs::read(path).expect("a file"));
    bytes.collect()
}

#[test]
fn the_corpora_hold() {
    for format in foreign::FORMATS {
        let inputs = corpus(format);
        assert!(inputs.len() > 1, "the corpus of {format} is too small");
        for input in inputs {
            foreign::check_image(format, &input);
        }
    }
}

#[test]
fn packages_hold() {
    let inputs = corpus("ova");
    assert!(inputs.len() > 1, "the corpus of ova is too small");
    let mut random = fastrand::Rng::with_seed(21);
    for input in &inputs {
        foreign::check_package(input);
        for number in 0..200 {
            let mut changed = input.clone();
            for _ in 0..random.usize(1..6) {
                let at = random.usize(0..changed.len());
                changed[at] = random.u8(..);
            }
            if random.bool() {
                changed.truncate(random.usize(0..changed.len()));
            }
            eprintln!("package {number}");
            foreign::check_package(&changed);
        }
    }
}

#[test]
fn changed_images_hold() {
    let mut random = fastrand::Rng::with_seed(20);
    for format in foreign::FORMATS {
        let inputs = corpus(format);
        for number in 0..60 {
            let mut input = inputs[random.usize(0..inputs.len())].clone();
            // Changes at the beginning of the file, where the structures are.
            for _ in 0..random.usize(1..4) {
                let end = [1024, 8192, 1 << 18][random.usize(0..3)];
                let at = random.u32(0..end);
                let len = random.u8(1..9);
                input.extend(&at.to_be_bytes()[1..]);
                input.push(len);
                input.extend((0..len).map(|_| random.u8(..)));
            }
            eprintln!("{format} {number}: {input:?}");
            foreign::check_image(format, &input);
        }
    }
}

use super::*;
use crate::Preallocation;

fn message(options: &CreateOptions) -> String {
    options
        .validate()
        .expect_err("contradicts itself")
        .message()
        .to_owned()
}

#[test]
fn defaults_are_valid() {
    CreateOptions::default().validate().expect("an empty image");
    assert_eq!(
        Preallocation::from_name("falloc"),
        Some(Preallocation::Falloc)
    );
    assert_eq!(Preallocation::from_name("foo"), None);
}

fn with(change: impl FnOnce(&mut CreateOptions)) -> CreateOptions {
    let mut options = CreateOptions::default();
    change(&mut options);
    options
}

#[test]
fn contradictions_are_refused_in_qemus_words() {
    let cases = [
        (
            with(|o| o.cluster_size_bytes = 1000),
            "Cluster size must be a power of two between 512 and 2048k",
        ),
        (
            with(|o| (o.extended_l2, o.cluster_size_bytes) = (true, 8192)),
            "Extended L2 entries are only supported with cluster sizes of at least 16384 bytes",
        ),
        (
            with(|o| (o.version, o.lazy_refcounts) = (2, true)),
            "Lazy refcounts only supported with compatibility level 1.1 and above \
             (use version=v3 or greater)",
        ),
        (
            with(|o| o.refcount_bits = 24),
            "Refcount width must be a power of two and may not exceed 64 bits",
        ),
        (
            with(|o| o.data_file_raw = true),
            "data-file-raw requires data-file",
        ),
        (
            with(|o| {
                o.backing_file = Some("base".into());
                o.preallocation = Preallocation::Metadata;
            }),
            "Backing file and preallocation can only be used at the same time if extended_l2 is on",
        ),
        (
            with(|o| (o.cluster_size_bytes, o.size_bytes) = (512, 1 << 40)),
            "The image size is too large for file format 'qcow2' (try using a larger cluster size)",
        ),
        (
            with(|o| o.size_bytes = u64::MAX),
            "The image size is too large",
        ),
    ];
    for (options, expected) in cases {
        let message = message(&options);
        assert!(message.starts_with(expected), "{message}");
    }
}

#[test]
fn a_header_that_does_not_fit_is_refused_before_anything_is_written() {
    let options = CreateOptions {
        cluster_size_bytes: 512,
        backing_file: Some("x".repeat(450)),
        ..CreateOptions::default()
    };
    let layout = options.layout().expect("valid otherwise");
    let error = options
        .encoded_header(&layout, None)
        .expect_err("does not fit");
    assert!(
        error.message().ends_with("No space left on device"),
        "{}",
        error.message()
    );
}

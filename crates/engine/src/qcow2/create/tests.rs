use super::*;

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

#[test]
fn contradictions_are_refused_in_qemus_words() {
    let default = CreateOptions::default;
    let some = |text: &str| Some(text.to_owned());
    let cases = [
        (
            CreateOptions {
                cluster_size_bytes: 1000,
                ..default()
            },
            "Cluster size must be a power of two between 512 and 2048k",
        ),
        (
            CreateOptions {
                extended_l2: true,
                cluster_size_bytes: 8192,
                ..default()
            },
            "Extended L2 entries are only supported with cluster sizes of at least 16384 bytes",
        ),
        (
            CreateOptions {
                version: 2,
                lazy_refcounts: true,
                ..default()
            },
            "Lazy refcounts only supported with compatibility level 1.1 and above \
             (use version=v3 or greater)",
        ),
        (
            CreateOptions {
                version: 2,
                refcount_bits: 8,
                ..default()
            },
            "Different refcount widths than 16 bits require compatibility level 1.1 or above \
             (use version=v3 or greater)",
        ),
        (
            CreateOptions {
                refcount_bits: 24,
                ..default()
            },
            "Refcount width must be a power of two and may not exceed 64 bits",
        ),
        (
            CreateOptions {
                data_file_raw: true,
                ..default()
            },
            "data-file-raw requires data-file",
        ),
        (
            CreateOptions {
                backing_format: some("raw"),
                ..default()
            },
            "Backing format cannot be used without backing file",
        ),
        (
            CreateOptions {
                backing_file: some("base"),
                preallocation: Preallocation::Metadata,
                ..default()
            },
            "Backing file and preallocation can only be used at the same time if extended_l2 is on",
        ),
        (
            CreateOptions {
                cluster_size_bytes: 512,
                size_bytes: 1 << 40,
                ..default()
            },
            "The image size is too large for file format 'qcow2' (try using a larger cluster size)",
        ),
        (
            CreateOptions {
                size_bytes: u64::MAX,
                ..default()
            },
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
        backing_file: Some("x".repeat(300)),
        ..CreateOptions::default()
    };
    let layout = options.layout().expect("valid otherwise");
    let error = options.encoded_header(&layout).expect_err("does not fit");
    assert!(
        error.message().ends_with("No space left on device"),
        "{}",
        error.message()
    );
}

//! Whatever a user or an image writes as options, names and rules is taken or refused.

use vellum_graph::merged_options;
use vellum_options::{ImageSpec, Options, Scalar, filename, ini, options, size};

/// Groups of [`ini::parse`], as `blkdebug` has them.
const GROUPS: [&str; 2] = ["inject-error", "set-state"];

/// Invariants:
/// - no text makes a parser panic;
/// - options written out again, with their commas doubled, are the same options;
/// - the tree of a `json:` name, flattened again, is the same options;
/// - an image that is opened anew with no other options has those that it had.
pub fn check_options(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    if let Ok(parsed) = Options::parse(&text) {
        let again = Options::parse(&written(&parsed)).expect("what was parsed parses");
        assert_eq!(again, parsed);
        let drivers = merged_options::Drivers {
            format: "raw",
            backing: None,
        };
        let merged =
            merged_options::merge(&parsed, &Options::new(), drivers).expect("nothing changes");
        assert_eq!(merged, parsed);
        take_all(parsed);
    }
    if let Ok(parsed) = Options::from_json(&text) {
        // (Fractions may be read with another last bit.)
        let fraction =
            |(_, value): (&str, &Scalar)| matches!(value, Scalar::Number(n) if n.is_f64());
        if let tree @ serde_json::Value::Object(_) = parsed.to_json()
            && !parsed.iter().any(fraction)
        {
            let again = Options::from_json(&tree.to_string()).expect("a tree is JSON");
            assert_eq!(again, parsed);
        }
        take_all(parsed);
    }
    for word in options::words(&text) {
        assert!(word.len() <= text.len());
    }
    check_names(&text);
    let _ = size::parse(&text);
    let _ = ini::parse(&text, &GROUPS);
}

fn check_names(text: &str) {
    if let Ok(path) = filename::local_path(text) {
        assert!(path.len() <= text.len() + 2);
    }
    if let Ok(spec) = ImageSpec::image_opts(text) {
        let _ = spec.options();
    }
    let _ = ImageSpec::filename(text).options();
    if let Some((image, name)) = text.split_once('\n') {
        let _ = filename::resolve(image, name);
    }
}

/// Options as `--image-opts` takes them.
fn written(options: &Options) -> String {
    let word = |(key, value): (&str, &Scalar)| {
        let Scalar::Text(value) = value else {
            panic!("a list of words holds text only");
        };
        format!("{key}={}", value.replace(',', ",,"))
    };
    options.iter().map(word).collect::<Vec<_>>().join(",")
}

/// Takes every option as every type.
fn take_all(options: Options) {
    let keys: Vec<String> = options.keys().map(str::to_owned).collect();
    for key in keys {
        let _ = options.clone().take_number(&key);
        let _ = options.clone().take_size(&key);
        let _ = options.clone().take_bool(&key);
        let _ = options.clone().take_text(&key);
        let first = key.split('.').next().unwrap_or_default();
        let mut rest = options.clone();
        let group = rest.take_group(first);
        rest.set_group(first, group);
        assert_eq!(rest, options);
    }
}

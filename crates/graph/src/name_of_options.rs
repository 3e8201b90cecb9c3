//! The names of images for people: a file name, or a name of a protocol, where that
//! opens the same graph again; otherwise `json:{...}` with the options that say what is
//! seen, and none that only say how.

use std::borrow::Cow;

use vellum_options::{ImageSpec, Options, Scalar};

use crate::drivers;
use crate::node::display::{Name, composed, is_leaf, name_of_leaf};
use crate::node::driver::{DriverFacts, NamingKind};

pub use crate::node::display::is_optional;

/// The places below nodes of a driver, by their names in options.
pub fn child_keys(driver: &str) -> &'static [&'static str] {
    let naming = drivers::facts(driver).and_then(|facts| facts.naming);
    naming.map_or(&[], |naming| naming.children)
}

/// The name of an image of a given format for people.
pub fn display_name(spec: &ImageSpec, format: &str) -> String {
    let name = spec.options().ok();
    match name.and_then(|options| name_of(options, format)) {
        None => spec.name.clone(),
        Some(name) => name.text(),
    }
}

/// The name of the node that options describe; `None` for what has none here.
fn name_of(mut options: Options, default_driver: &str) -> Option<Name<'static>> {
    let driver = match options.take("driver") {
        None => default_driver.to_owned(),
        Some(Scalar::Text(driver)) => driver,
        Some(_) => return None,
    };
    if is_leaf(&driver) {
        return name_of_leaf(driver.into(), Cow::Owned(options));
    }
    let DriverFacts { name, naming, .. } = drivers::facts(&driver)?;
    let naming = naming?;
    let mut children = Vec::new();
    for key in naming.children {
        // A format that stands on no child of its own was named by its file.
        let below = match options.take_group(key) {
            below if below.is_empty() && is_optional(key) => continue,
            below if below.is_empty() && naming.kind == NamingKind::Format => options.clone(),
            below => below,
        };
        children.push((*key, name_of(below, "file")?));
    }
    let backing = options.take_group("backing");
    let backing = (!backing.is_empty()).then(|| backing.to_json());
    Some(composed(
        (name, naming),
        Cow::Owned(options),
        children,
        backing,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_opens_the_same_graph_again() {
        for (options, name) in [
            ("driver=qcow2,file.filename=a,read-only=on", "a"),
            ("file.filename=a", "a"),
            ("driver=file,filename=a", "a"),
            (
                "driver=qcow2,file.driver=blkdebug,file.image.filename=a",
                "blkdebug::a",
            ),
            (
                "driver=blkdebug,config=c,image.filename=a,align=4k",
                "blkdebug:c:a",
            ),
            (
                "driver=blkverify,raw.filename=a,test.driver=qcow2,test.file.filename=b",
                "blkverify:a:b",
            ),
            ("driver=null-co", "null-co://"),
            (
                "driver=null-co,size=1M",
                r#"json:{"driver": "null-co", "size": "1M"}"#,
            ),
            (
                "driver=raw,size=1k,offset=1k,file.filename=a",
                r#"json:{"offset": "1k", "driver": "raw", "size": "1k", "file": {"driver": "file", "filename": "a"}}"#,
            ),
            (
                "driver=cache,directory=d,record-trace=on,file.driver=s3,file.url=s3://b/k,file.readahead=0",
                r#"json:{"driver": "cache", "file": {"url": "s3://b/k", "driver": "s3"}, "directory": "d"}"#,
            ),
            (
                "driver=throttle,throttle-group=t,file.filename=a",
                r#"json:{"throttle-group": "t", "driver": "throttle", "file": {"driver": "file", "filename": "a"}}"#,
            ),
            (
                "driver=raw,file.driver=qcow2,file.file.filename=a",
                r#"json:{"driver": "raw", "file": {"driver": "qcow2", "file": {"driver": "file", "filename": "a"}}}"#,
            ),
        ] {
            let spec = ImageSpec::image_opts(options).unwrap();
            assert_eq!(display_name(&spec, "qcow2"), name, "{options}");
        }
        let strange = ImageSpec::image_opts("driver=qcow2,file=node").unwrap();
        assert_eq!(display_name(&strange, "qcow2"), "driver=qcow2,file=node");
    }
}

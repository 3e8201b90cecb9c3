//! What registries say of images: manifests, and lists of them for several machines.

use serde_json::{Value, json};
use vellum_io::{Error, ErrorKind, Result};

use super::reference::is_digest;

pub(super) const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
const DOCKER_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
/// Images of more layers are no disks.
const MOST_LAYERS: usize = 128;

/// What is asked for.
pub(super) fn accepted() -> String {
    [MANIFEST, INDEX, DOCKER_MANIFEST, DOCKER_LIST].join(", ")
}

/// Bytes that the registry keeps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Blob {
    pub(super) digest: String,
    pub(super) len_bytes: u64,
}

/// What a name in a registry stands for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Manifest {
    /// The layers of an image, from the lowest on.
    Layers(Vec<Blob>),
    /// The digest of the manifest for a machine.
    For(String),
}

fn wrong<T>(message: impl Into<String>) -> Result<T> {
    Err(Error::new(
        ErrorKind::Protocol,
        "read manifest",
        message.into(),
    ))
}

/// Understands a manifest; of a list takes the one for `architecture`.
pub(super) fn parse(bytes: &[u8], architecture: &str) -> Result<Manifest> {
    let Ok(value) = serde_json::from_slice::<Value>(bytes) else {
        return wrong("the registry's manifest is no JSON");
    };
    if let Some(list) = value["manifests"].as_array() {
        let is_for = |one: &&Value| {
            let platform = &one["platform"];
            platform["architecture"] == architecture && platform["os"] == "linux"
        };
        let found = list.iter().find(is_for);
        // A list of one has no choice.
        let found = found.or(list.first().filter(|_| list.len() == 1));
        return match found.map(blob) {
            Some(blob) => Ok(Manifest::For(blob?.digest)),
            None => wrong(format!(
                "the image is for other machines than {architecture}"
            )),
        };
    }
    let Some(layers) = value["layers"].as_array() else {
        return wrong("the registry's manifest is of a kind that is not known");
    };
    if layers.len() > MOST_LAYERS {
        return wrong(format!("the image has {} layers", layers.len()));
    }
    let layers: Result<Vec<Blob>> = layers.iter().map(blob).collect();
    layers.map(Manifest::Layers)
}

fn blob(value: &Value) -> Result<Blob> {
    match (value["digest"].as_str(), value["size"].as_u64()) {
        (Some(digest), Some(len_bytes)) if is_digest(digest) => Ok(Blob {
            digest: digest.to_owned(),
            len_bytes,
        }),
        _ => wrong("the registry's manifest names something without a SHA-256 or a size"),
    }
}

/// The configuration of an image of one layer.
pub(super) fn config(architecture: &str, uncompressed_digest: &str) -> Vec<u8> {
    let value = json!({
        "architecture": architecture,
        "os": "linux",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": [uncompressed_digest]},
        "history": [{"created_by": "vellum oci push"}],
    });
    value.to_string().into_bytes()
}

/// The manifest of an image of one layer; `packing` is `""`, `"+gzip"` or `"+zstd"`.
pub(super) fn manifest(config: &Blob, layer: &Blob, packing: &str) -> Vec<u8> {
    let value = json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": {"mediaType": CONFIG, "digest": config.digest, "size": config.len_bytes},
        "layers": [{
            "mediaType": format!("{LAYER}{packing}"),
            "digest": layer.digest,
            "size": layer.len_bytes,
        }],
    });
    value.to_string().into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(digit: char) -> String {
        format!("sha256:{}", digit.to_string().repeat(64))
    }

    #[test]
    fn what_is_written_is_understood() {
        let blob = |digit, len_bytes| Blob {
            digest: digest(digit),
            len_bytes,
        };
        let bytes = manifest(&blob('1', 5), &blob('2', 7), "+zstd");
        assert_eq!(
            parse(&bytes, "amd64").unwrap(),
            Manifest::Layers(vec![blob('2', 7)])
        );
    }

    #[test]
    fn lists_lead_to_the_machines_own() {
        let one = |machine: &str, digit| {
            json!({"digest": digest(digit), "size": 1,
                   "platform": {"architecture": machine, "os": "linux"}})
        };
        let list = |ones: &[Value]| json!({"manifests": ones}).to_string();
        let both = list(&[one("arm64", '1'), one("amd64", '2')]);
        let found = |text: &str, machine| parse(text.as_bytes(), machine);
        assert_eq!(found(&both, "amd64").unwrap(), Manifest::For(digest('2')));
        assert!(found(&both, "s390x").is_err());
        let single = list(&[one("arm64", '1')]);
        assert_eq!(found(&single, "amd64").unwrap(), Manifest::For(digest('1')));
    }

    #[test]
    fn what_is_none_is_refused() {
        for text in [
            "",
            "[]",
            "{}",
            "{\"layers\":[{}]}",
            "{\"layers\":[{\"digest\":\"sha256:0\",\"size\":1}]}",
            "{\"manifests\":[]}",
            "{\"layers\":7}",
        ] {
            assert!(parse(text.as_bytes(), "amd64").is_err(), "{text}");
        }
        let many = json!({"layers": vec![json!({"digest": digest('1'), "size": 1}); 129]});
        assert!(parse(many.to_string().as_bytes(), "amd64").is_err());
    }
}

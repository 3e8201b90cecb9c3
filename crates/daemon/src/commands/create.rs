//! `blockdev-create`: its options, checked before there is a job, as in QEMU.

use std::rc::Rc;

use serde_json::Value;
use vellum_graph::driver_names;
use vellum_graph::foreign::{self, Creation, QmpKind};
use vellum_images::create_options::{OBJECT_SIZE, settings};
use vellum_options::Options;
use vellum_options::create_options::{CreateSettings, SIZE};

use crate::daemon::Daemon;
use crate::jobs::create::{Create, Made, Place};
use crate::jobs::{Settings, kinds};
use crate::qmp::{Arguments, Failure};

use super::jobs;

const CIPHERS: [&str; 13] = [
    "aes-128",
    "aes-192",
    "aes-256",
    "des",
    "3des",
    "cast5-128",
    "serpent-128",
    "serpent-192",
    "serpent-256",
    "twofish-128",
    "twofish-192",
    "twofish-256",
    "sm4",
];
const MODES: [&str; 4] = ["ecb", "cbc", "xts", "ctr"];
const GENERATORS: [&str; 3] = ["plain", "plain64", "essiv"];
const HASHES: [&str; 8] = [
    "md5",
    "sha1",
    "sha224",
    "sha256",
    "sha384",
    "sha512",
    "ripemd160",
    "sm3",
];

/// `blockdev-create`.
pub(super) struct CreateRequest {
    id: String,
    made: Made,
    settings: CreateSettings,
}

impl CreateRequest {
    pub(super) fn take(mut arguments: Arguments) -> Result<CreateRequest, Failure> {
        let id = arguments.need_text("job-id")?;
        let options = arguments.need_object("options")?;
        arguments.finish()?;
        let (made, settings) = take_options(options)?;
        Ok(CreateRequest { id, made, settings })
    }
}

fn take_options(mut options: Arguments) -> Result<(Made, CreateSettings), Failure> {
    let driver = options.need_text("driver")?;
    let creation = foreign::find(&driver).and_then(|format| format.create.as_ref());
    match driver.as_str() {
        "file" => take_file(options),
        "qcow2" => take_qcow2(options),
        "luks" => take_luks(options),
        driver @ ("rbd" | "ssh") => take_elsewhere(driver, options),
        driver if creation.is_some() => take_foreign(driver, creation, options),
        other if driver_names().contains(&other) => {
            options.finish()?;
            Err(Failure::new("Driver does not support blockdev-create"))
        }
        other => Err(Failure::new(format!(
            "Parameter 'driver' does not accept value '{other}'"
        ))),
    }
}

pub(super) async fn begin(daemon: Rc<Daemon>, request: CreateRequest) -> Result<(), Failure> {
    let CreateRequest { id, made, settings } = request;
    let parts = daemon.parts.lock().await;
    let job = Settings {
        id,
        kind: kinds::CREATE,
        auto_finalize: true,
        auto_dismiss: false,
        filter: None,
    };
    let job = jobs::create(&daemon, (job, 0))?;
    jobs::begin(
        &daemon,
        job,
        Ok(Create::new(parts.nodes.clone(), made, settings)),
    )
}

fn settings_of(format: &str) -> Result<CreateSettings, Failure> {
    settings(format).ok_or_else(|| Failure::new("Driver does not support creation"))
}

/// What is taken out of the options into settings, which have other names.
struct Taker {
    options: Arguments,
    settings: CreateSettings,
}

impl Taker {
    fn set(&mut self, name: &str, value: Option<String>) -> Result<(), Failure> {
        match value {
            Some(value) => Ok(self.settings.set(name, &value)?),
            None => Ok(()),
        }
    }

    fn text(&mut self, key: &str, name: &str) -> Result<(), Failure> {
        let value = self.options.text(key)?;
        self.set(name, value)
    }

    fn switch(&mut self, key: &str, name: &str) -> Result<(), Failure> {
        let value = self.options.switch(key)?;
        self.set(
            name,
            value.map(|on| if on { "on" } else { "off" }.to_owned()),
        )
    }

    fn size(&mut self, key: &str, name: &str) -> Result<(), Failure> {
        let value = self.options.size(key)?;
        self.set(name, value.map(|bytes| bytes.to_string()))
    }

    fn need_size(&mut self) -> Result<(), Failure> {
        let size = self.options.need_size("size")?;
        self.set("size", Some(size.to_string()))
    }

    fn choice(&mut self, key: &str, name: &str, choices: &[&'static str]) -> Result<(), Failure> {
        let choices: Vec<(&str, &str)> = choices.iter().map(|one| (*one, *one)).collect();
        let value = self.options.choice(key, &choices)?;
        self.set(name, value.map(str::to_owned))
    }

    fn preallocation(&mut self) -> Result<(), Failure> {
        let modes = ["off", "metadata", "falloc", "full"];
        self.choice("preallocation", "preallocation", &modes)
    }

    /// What encryption takes, behind `prefix` in the settings.
    fn cipher(&mut self, prefix: &str) -> Result<(), Failure> {
        self.text("key-secret", &format!("{prefix}key-secret"))?;
        for (key, choices) in [
            ("cipher-alg", &CIPHERS[..]),
            ("cipher-mode", &MODES),
            ("ivgen-alg", &GENERATORS),
            ("ivgen-hash-alg", &HASHES),
            ("hash-alg", &HASHES),
        ] {
            self.choice(key, &format!("{prefix}{key}"), choices)?;
        }
        self.size("iter-time", &format!("{prefix}iter-time"))
    }

    /// A node that is there, or the options of one.
    fn place(&mut self, key: &str) -> Result<Option<Place>, Failure> {
        let value = self.options.any(key);
        value.map(|value| place_of(value, key)).transpose()
    }

    fn need_place(&mut self, key: &str) -> Result<Place, Failure> {
        let missing = || Failure::new(format!("Parameter 'options.{key}' is missing"));
        self.place(key)?.ok_or_else(missing)
    }
}

fn place_of(value: Value, key: &str) -> Result<Place, Failure> {
    match value {
        Value::String(name) => Ok(Place::Node(name)),
        Value::Object(members) => {
            if !members.contains_key("driver") {
                return Err(Failure::new(format!(
                    "Parameter 'options.{key}.driver' is missing"
                )));
            }
            Ok(Place::Options(Options::from_object(members)?))
        }
        _ => Err(Failure::new(format!(
            "Invalid parameter type for '{key}', expected: BlockdevRef"
        ))),
    }
}

fn take_file(options: Arguments) -> Result<(Made, CreateSettings), Failure> {
    let settings = settings_of("file")?;
    let mut taker = Taker { options, settings };
    let path = taker.options.need_text("filename")?;
    taker.need_size()?;
    taker.preallocation()?;
    taker.switch("nocow", "nocow")?;
    taker.size("extent-size-hint", "extent_size_hint")?;
    taker.options.finish()?;
    Ok((Made::File(path), taker.settings))
}

fn take_qcow2(options: Arguments) -> Result<(Made, CreateSettings), Failure> {
    let settings = settings_of("qcow2")?;
    let mut taker = Taker { options, settings };
    let place = taker.need_place("file")?;
    let data = taker.place("data-file")?;
    taker.switch("data-file-raw", "data_file_raw")?;
    taker.switch("extended-l2", "extended_l2")?;
    taker.need_size()?;
    taker.choice("version", "compat", &["v2", "v3"])?;
    taker.text("backing-file", "backing_file")?;
    taker.choice("backing-fmt", "backing_fmt", &driver_names())?;
    taker.size("cluster-size", "cluster_size")?;
    taker.preallocation()?;
    taker.switch("lazy-refcounts", "lazy_refcounts")?;
    taker.size("refcount-bits", "refcount_bits")?;
    taker.choice("compression-type", "compression_type", &["zlib", "zstd"])?;
    taker = take_encryption(taker, "encrypt")?;
    taker.options.finish()?;
    Ok((Made::Qcow2(place, data), taker.settings))
}

/// An image of another format.
fn take_foreign(
    driver: &str,
    creation: Option<&'static Creation>,
    options: Arguments,
) -> Result<(Made, CreateSettings), Failure> {
    let settings = settings_of(driver)?;
    let mut taker = Taker { options, settings };
    let place = taker.need_place("file")?;
    taker.need_size()?;
    for option in creation.iter().flat_map(|creation| creation.qmp) {
        match option.kind {
            QmpKind::Text => taker.text(option.key, option.setting)?,
            QmpKind::Switch => taker.switch(option.key, option.setting)?,
            QmpKind::Size => taker.size(option.key, option.setting)?,
            QmpKind::Choice(known) => taker.choice(option.key, option.setting, known)?,
            QmpKind::Encryption => taker = take_encryption(taker, option.key)?,
        }
    }
    let mut extents = Vec::new();
    if driver == "vmdk" {
        let given = taker.options.array("extents")?.unwrap_or_default();
        for (number, extent) in given.into_iter().enumerate() {
            extents.push(place_of(extent, &format!("extents[{number}]"))?);
        }
    }
    taker.options.finish()?;
    let creation = creation.ok_or_else(|| Failure::new("Driver does not support creation"))?;
    Ok((Made::Foreign(place, extents, creation), taker.settings))
}

fn take_encryption(mut taker: Taker, key: &str) -> Result<Taker, Failure> {
    let Some(encrypt) = taker.options.object(key)? else {
        return Ok(taker);
    };
    let Taker { options, settings } = taker;
    let mut taker = Taker {
        options: encrypt,
        settings,
    };
    let formats = [("qcow", "aes"), ("luks", "luks")];
    let format = taker.options.need_choice("format", &formats)?;
    taker.set("encrypt.format", Some(format.to_owned()))?;
    match format {
        "luks" => taker.cipher("encrypt.")?,
        _ => taker.text("key-secret", "encrypt.key-secret")?,
    }
    taker.options.finish()?;
    Ok(Taker {
        options,
        settings: taker.settings,
    })
}

/// What is made on another machine.
fn take_elsewhere(driver: &str, options: Arguments) -> Result<(Made, CreateSettings), Failure> {
    let settings = CreateSettings::of(vec![SIZE, OBJECT_SIZE]);
    let mut taker = Taker { options, settings };
    let location = taker.options.need_object("location")?;
    let mut location = location.into_options()?;
    location.set_text("driver", driver);
    taker.need_size()?;
    if driver == "rbd" {
        taker.size("cluster-size", "cluster_size")?;
        if taker.options.object("encrypt")?.is_some() {
            return Err(Failure::new(
                "Images that librbd encrypts are made with 'rbd encryption format'",
            ));
        }
    }
    taker.options.finish()?;
    Ok((Made::Elsewhere(location), taker.settings))
}

fn take_luks(options: Arguments) -> Result<(Made, CreateSettings), Failure> {
    let settings = settings_of("luks")?;
    let mut taker = Taker { options, settings };
    let (file, header) = (taker.place("file")?, taker.place("header")?);
    taker.need_size()?;
    taker.preallocation()?;
    taker.cipher("")?;
    if header.is_some() {
        taker.set("detached-header", Some("on".to_owned()))?;
    }
    taker.options.finish()?;
    Ok((Made::Luks { file, header }, taker.settings))
}

//! What Grafana takes as a dashboard, of the parts that ours has: their keys, which of them must be
//! there, and what they hold. Grafana loads what it does not know without a word, and shows nothing.

use serde_json::Value;

/// What stands in a place.
#[derive(Debug)]
pub enum Shape {
    Text,
    Number,
    Truth,
    /// One of these texts.
    OneOf(&'static [&'static str]),
    /// One of these numbers.
    Among(std::ops::RangeInclusive<u64>),
    List(&'static Shape),
    /// These keys and no others; whether each must be there.
    Object(&'static [(&'static str, bool, Shape)]),
}

use Shape::{List, Number, Object, OneOf, Text, Truth};

const MUST: bool = true;
const MAY: bool = false;

const DATASOURCE: Shape = Object(&[
    ("type", MUST, OneOf(&["prometheus"])),
    ("uid", MUST, OneOf(&["${datasource}"])),
]);

const TARGET: Shape = Object(&[
    ("datasource", MUST, DATASOURCE),
    ("expr", MUST, Text),
    ("legendFormat", MAY, Text),
    ("refId", MUST, Text),
    ("editorMode", MAY, OneOf(&["code", "builder"])),
    ("range", MAY, Truth),
    ("instant", MAY, Truth),
    ("format", MAY, OneOf(&["time_series", "table", "heatmap"])),
]);

const PLACE: Shape = Object(&[
    ("x", MUST, Shape::Among(0..=23)),
    ("y", MUST, Number),
    ("w", MUST, Shape::Among(1..=24)),
    ("h", MUST, Shape::Among(1..=64)),
]);

const STEP: Shape = Object(&[("color", MUST, Text), ("value", MAY, Number)]);

const DEFAULTS: Shape = Object(&[
    ("unit", MUST, Text),
    ("min", MAY, Number),
    ("max", MAY, Number),
    ("decimals", MAY, Number),
    ("noValue", MAY, Text),
    (
        "thresholds",
        MAY,
        Object(&[
            ("mode", MUST, OneOf(&["absolute", "percentage"])),
            ("steps", MUST, List(&STEP)),
        ]),
    ),
    (
        "custom",
        MAY,
        Object(&[
            ("drawStyle", MAY, OneOf(&["line", "bars", "points"])),
            ("fillOpacity", MAY, Shape::Among(0..=100)),
            ("showPoints", MAY, OneOf(&["auto", "never", "always"])),
        ]),
    ),
]);

const LEGEND: Shape = Object(&[
    ("displayMode", MUST, OneOf(&["list", "table", "hidden"])),
    ("placement", MUST, OneOf(&["bottom", "right"])),
    ("showLegend", MUST, Truth),
    ("calcs", MUST, List(&Text)),
]);

const TOOLTIP: Shape = Object(&[
    ("mode", MUST, OneOf(&["single", "multi", "none"])),
    ("sort", MUST, OneOf(&["asc", "desc", "none"])),
]);

/// Of a panel of type `timeseries`.
const SERIES: Shape = Object(&[("legend", MUST, LEGEND), ("tooltip", MUST, TOOLTIP)]);

/// Of a panel of type `stat`.
const STAT: Shape = Object(&[
    ("colorMode", MUST, OneOf(&["value", "background", "none"])),
    ("graphMode", MUST, OneOf(&["none", "line", "area"])),
    ("justifyMode", MUST, OneOf(&["auto", "center"])),
    (
        "orientation",
        MUST,
        OneOf(&["auto", "vertical", "horizontal"]),
    ),
    (
        "percentChangeColorMode",
        MUST,
        OneOf(&["standard", "inverted", "same_as_value"]),
    ),
    (
        "reduceOptions",
        MUST,
        Object(&[
            ("calcs", MUST, List(&Text)),
            ("fields", MAY, Text),
            ("values", MAY, Truth),
        ]),
    ),
    ("showPercentChange", MUST, Truth),
    (
        "textMode",
        MUST,
        OneOf(&["auto", "value", "value_and_name", "name", "none"]),
    ),
    ("wideLayout", MUST, Truth),
]);

/// The keys of a panel, with its own options.
macro_rules! panel {
    ($kind:literal, $options:expr) => {
        Object(&[
            ("id", MUST, Number),
            ("type", MUST, OneOf(&[$kind])),
            ("title", MUST, Text),
            ("description", MUST, Text),
            ("datasource", MUST, DATASOURCE),
            ("gridPos", MUST, PLACE),
            ("targets", MUST, List(&TARGET)),
            (
                "fieldConfig",
                MUST,
                Object(&[
                    ("defaults", MUST, DEFAULTS),
                    ("overrides", MUST, List(&Text)),
                ]),
            ),
            ("options", MUST, $options),
        ])
    };
}

/// By the type of a panel.
pub const PANELS: [(&str, Shape); 2] = [
    ("stat", panel!("stat", STAT)),
    ("timeseries", panel!("timeseries", SERIES)),
];

const CHOSEN: Shape = Object(&[("text", MUST, Text), ("value", MUST, Text)]);

/// A variable at the top of a dashboard.
pub const VARIABLE: Shape = Object(&[
    ("name", MUST, Text),
    ("type", MUST, OneOf(&["query", "datasource"])),
    ("label", MAY, Text),
    ("query", MUST, Text),
    ("definition", MAY, Text),
    ("datasource", MAY, DATASOURCE),
    ("current", MAY, CHOSEN),
    ("hide", MAY, Shape::Among(0..=2)),
    ("includeAll", MAY, Truth),
    ("multi", MAY, Truth),
    ("allValue", MAY, Text),
    ("refresh", MAY, Shape::Among(0..=2)),
    ("sort", MAY, Shape::Among(0..=8)),
]);

/// A dashboard but for its panels.
pub const DASHBOARD: Shape = Object(&[
    ("title", MUST, Text),
    ("uid", MUST, Text),
    ("description", MAY, Text),
    ("tags", MAY, List(&Text)),
    ("schemaVersion", MUST, Shape::Among(36..=99)),
    ("version", MAY, Number),
    ("editable", MAY, Truth),
    ("graphTooltip", MAY, Shape::Among(0..=2)),
    ("refresh", MAY, Text),
    (
        "time",
        MUST,
        Object(&[("from", MUST, Text), ("to", MUST, Text)]),
    ),
    ("timezone", MAY, Text),
    (
        "templating",
        MUST,
        Object(&[("list", MUST, List(&VARIABLE))]),
    ),
    ("annotations", MUST, Object(&[("list", MUST, List(&Text))])),
    ("links", MAY, List(&Text)),
]);

impl Shape {
    /// What is wrong with a value, and where.
    ///
    /// # Errors
    /// The first thing.
    pub fn check(&self, value: &Value, at: &str) -> Result<(), String> {
        let is_right = match self {
            Text => value
                .as_str()
                .is_some_and(|text| !at.ends_with("title") || !text.is_empty()),
            Number => value.is_number(),
            Truth => value.is_boolean(),
            OneOf(all) => value.as_str().is_some_and(|text| all.contains(&text)),
            Shape::Among(all) => value.as_u64().is_some_and(|number| all.contains(&number)),
            List(each) => {
                let all = value.as_array().ok_or_else(|| format!("{at} is no list"))?;
                let mut all = all.iter().enumerate();
                return all.try_for_each(|(index, one)| each.check(one, &format!("{at}[{index}]")));
            }
            Object(keys) => return check_object(keys, value, at),
        };
        match is_right {
            true => Ok(()),
            false => Err(format!("{at} is {value}, not {self:?}")),
        }
    }
}

fn check_object(keys: &[(&str, bool, Shape)], value: &Value, at: &str) -> Result<(), String> {
    let object = value.as_object();
    let object = object.ok_or_else(|| format!("{at} is no object"))?;
    for (key, must, shape) in keys {
        match object.get(*key) {
            Some(found) => shape.check(found, &format!("{at}.{key}"))?,
            None if *must => return Err(format!("{at} has no '{key}'")),
            None => {}
        }
    }
    let is_known = |key: &String| keys.iter().any(|(known, ..)| known == key);
    match object.keys().find(|key| !is_known(key)) {
        Some(key) => Err(format!("{at} has '{key}', which Grafana does not know")),
        None => Ok(()),
    }
}

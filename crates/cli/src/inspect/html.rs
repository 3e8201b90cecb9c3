//! The facts as an HTML page (`--html`): one file that loads nothing else. Its elements come from
//! `html_page`, its text from `templates/inspect.html`.

use std::path::Path;

use askama::Template;

use super::advice::Advice;
use super::gather::{Facts, Qcow2Facts};
use super::picture::{Drawn, Kind, draw};
use crate::html_page::{self, svg};
use crate::size::human;

/// Columns of a map on a desk's screen and on a telephone's, and the most squares.
const WIDE: usize = 80;
const NARROW: usize = 36;
const SQUARES: usize = 1600;
/// Snapshots and images that are shown one by one.
const MAX_ROWS: usize = 100;

#[derive(Template)]
#[template(path = "inspect.html")]
struct Page<'a> {
    name: &'a str,
    about: String,
    version: &'static str,
    facts: Vec<Fact>,
    advice: &'a [Advice],
    maps: Vec<Map>,
    lists: Vec<List>,
}

/// A figure that matters.
struct Fact {
    name: &'static str,
    value: String,
    note: String,
}

/// A picture of squares, drawn twice.
struct Map {
    id: &'static str,
    title: &'static str,
    explains: String,
    /// Class and name of each kind.
    legend: Vec<(&'static str, &'static str)>,
    wide: String,
    narrow: String,
}

/// A table with a bar in each row.
struct List {
    id: &'static str,
    title: &'static str,
    explains: String,
    legend: Vec<(&'static str, &'static str)>,
    heads: Vec<&'static str>,
    rows: Vec<Row>,
}

struct Row {
    cells: Vec<String>,
    /// Class and per cent of each part.
    bar: Vec<(&'static str, f64)>,
}

fn class(kind: Kind) -> &'static str {
    match kind {
        Kind::Empty => "empty",
        Kind::Data => "data",
        Kind::Compressed => "compressed",
        Kind::Zero => "zero",
        Kind::Below => "below",
        Kind::Shared => "shared",
        Kind::Snapshot => "snapshot",
        Kind::Metadata => "metadata",
    }
}

fn percent(part: u64, whole: u64) -> f64 {
    (part as f64 * 100.0 / whole.max(1) as f64).min(100.0)
}

/// Writes the page.
pub fn write(path: &Path, facts: &Facts, advice: &[Advice]) -> Result<(), String> {
    html_page::write(path, &text(facts, advice)?)
}

fn text(facts: &Facts, advice: &[Advice]) -> Result<String, String> {
    let mut maps = vec![guest_map(facts)];
    let mut lists = Vec::new();
    if let Some(qcow2) = &facts.qcow2 {
        maps.push(host_map(qcow2));
        lists.push(space(facts, qcow2));
    }
    if facts.layers.len() > 1 {
        lists.push(layers(facts));
    }
    if let Some(qcow2) = &facts.qcow2 {
        if !qcow2.survey.snapshots.is_empty() {
            lists.push(snapshots(qcow2));
        }
        lists.push(metadata(qcow2));
        lists.push(caches(qcow2));
    }
    let page = Page {
        name: &facts.name,
        about: about(facts),
        version: env!("CARGO_PKG_VERSION"),
        facts: figures(facts),
        advice,
        maps,
        lists,
    };
    let text = page.render();
    text.map_err(|error| format!("Cannot make the page: {error}"))
}

fn about(facts: &Facts) -> String {
    let Some(qcow2) = &facts.qcow2 else {
        return format!("A {} image.", facts.format);
    };
    let info = &qcow2.info;
    let mut parts = vec![
        format!("A qcow2 image, compat {}", info.compat()),
        format!("clusters of {}", human(info.cluster_size_bytes)),
    ];
    parts.extend(info.extended_l2.then(|| "with 32 subclusters".to_owned()));
    parts.push(format!("{} compression", info.compression_type.name()));
    parts.extend(
        info.encryption
            .map(|method| format!("encrypted ({method})")),
    );
    let external = info
        .external_data
        .then(|| "data in another file".to_owned());
    parts.extend(external);
    parts.push(match &qcow2.check {
        None => "not checked".to_owned(),
        Some(Err(_)) => "cannot be checked".to_owned(),
        Some(Ok(report)) if report.corruptions + report.check_errors > 0 => "damaged".to_owned(),
        Some(Ok(report)) if report.leaks > 0 => "sound, with lost clusters".to_owned(),
        Some(Ok(_)) => "checked: sound".to_owned(),
    });
    format!("{}.", parts.join(", "))
}

fn figures(facts: &Facts) -> Vec<Fact> {
    let fact = |name, value: String, note: String| Fact { name, value, note };
    let data: u64 = facts.layers.iter().map(|layer| layer.data_bytes).sum();
    let mut figures = vec![fact(
        "The disk",
        human(facts.size_bytes),
        format!("{:.1} % hold data", percent(data, facts.size_bytes)),
    )];
    if let Some(bytes) = facts.layers.first().and_then(|layer| layer.disk_bytes) {
        let note = match facts.layers.len() {
            1 => "this file".to_owned(),
            count => format!("this file, of {count} in the chain"),
        };
        figures.push(fact("On the host", human(bytes), note));
    }
    if let Some(qcow2) = &facts.qcow2 {
        let survey = &qcow2.survey;
        let used = survey.metadata.total();
        let share = format!(
            "{:.2} % of what is used",
            percent(used, survey.counted_bytes)
        );
        figures.push(fact("Metadata", human(used), share));
        let disk = &survey.disk;
        let data = disk.data_clusters * qcow2.info.cluster_size_bytes;
        let note = match disk.extents {
            0 => "nothing is allocated".to_owned(),
            extents => format!("{} each on average", human(data / extents)),
        };
        figures.push(fact("Pieces", disk.extents.to_string(), note));
        if !survey.snapshots.is_empty() {
            let count = survey.snapshots.len();
            let held = human(survey.held_by_snapshots_bytes());
            let note = format!("{held} held by them alone");
            figures.push(fact("Snapshots", count.to_string(), note));
        }
        let bitmaps = &qcow2.info.bitmaps;
        if !bitmaps.is_empty() {
            let sound = bitmaps.iter().filter(|bitmap| bitmap.consistent).count();
            figures.push(fact(
                "Bitmaps",
                bitmaps.len().to_string(),
                format!("{sound} sound"),
            ));
        }
        let packed = human(survey.cache.packed_bytes);
        figures.push(fact(
            "L2 cache",
            packed,
            "covers all data, packed".to_owned(),
        ));
    }
    figures
}

fn map(id: &'static str, title: &'static str, explains: &str, cells: &[Drawn]) -> Map {
    let mut legend: Vec<(&'static str, &'static str)> = Vec::new();
    for cell in cells {
        let entry = (class(cell.kind), cell.kind.name());
        if !legend.contains(&entry) {
            legend.push(entry);
        }
    }
    let squares: Vec<svg::Square> = cells
        .iter()
        .map(|cell| svg::Square {
            class: class(cell.kind),
            strength: cell.filled,
            title: format!(
                "{} at {}: {}, {:.0} % filled",
                human(cell.len_bytes),
                human(cell.start_bytes),
                cell.kind.name(),
                cell.filled * 100.0
            ),
        })
        .collect();
    let each = cells.first().map_or(0, |cell| cell.len_bytes);
    let names: Vec<&str> = legend.iter().map(|(_, name)| *name).collect();
    let label = format!("{title} as squares: {}", names.join(", "));
    Map {
        id,
        title,
        explains: format!("{explains} Each square is {}.", human(each)),
        legend,
        wide: svg::grid(&squares, WIDE, &label),
        narrow: svg::grid(&squares, NARROW, &label),
    }
}

fn guest_map(facts: &Facts) -> Map {
    let cells = draw(
        &facts.guest,
        facts.guest_cell_bytes,
        facts.size_bytes,
        SQUARES,
    );
    let explains = "What the guest sees, from its first byte to its last, by where it comes from.";
    map("disk", "The disk", explains, &cells)
}

fn host_map(qcow2: &Qcow2Facts) -> Map {
    let survey = &qcow2.survey;
    let length = survey.file_length_bytes;
    let cells = draw(&survey.host, survey.host_cell_bytes, length, SQUARES);
    map(
        "file",
        "The file",
        "What lies where in the image file.",
        &cells,
    )
}

/// What the file's space is used for.
fn space(facts: &Facts, qcow2: &Qcow2Facts) -> List {
    let survey = &qcow2.survey;
    let sum = |of: fn(&vellum::qcow2::survey::HostCell) -> u64| survey.host.iter().map(of).sum();
    let parts: [(Kind, u64); 5] = [
        (Kind::Data, sum(|cell| cell.data_bytes)),
        (Kind::Shared, sum(|cell| cell.shared_bytes)),
        (Kind::Snapshot, sum(|cell| cell.snapshot_bytes)),
        (Kind::Compressed, sum(|cell| cell.compressed_bytes)),
        (Kind::Metadata, sum(|cell| cell.metadata_bytes)),
    ];
    let length = survey.file_length_bytes;
    let used: u64 = parts.iter().map(|(_, bytes)| bytes).sum();
    let mut rows: Vec<Row> = parts
        .iter()
        .filter(|(_, bytes)| *bytes > 0)
        .map(|(kind, bytes)| row(vec![kind.name().to_owned()], *bytes, length, class(*kind)))
        .collect();
    let free = length.saturating_sub(used);
    rows.push(row(vec!["free, or lost".to_owned()], free, length, "zero"));
    let on_host = facts.layers.first().and_then(|layer| layer.disk_bytes);
    let on_host = on_host.map_or_else(|| "an unknown part".to_owned(), human);
    List {
        id: "space",
        title: "Where the space goes",
        explains: format!(
            "The file is {} long, of which the host stores {on_host}.",
            human(length)
        ),
        legend: Vec::new(),
        heads: vec!["", "bytes"],
        rows,
    }
}

fn row(mut cells: Vec<String>, bytes: u64, whole: u64, class: &'static str) -> Row {
    cells.push(human(bytes));
    Row {
        cells,
        bar: vec![(class, percent(bytes, whole))],
    }
}

fn layers(facts: &Facts) -> List {
    let rows = facts.layers.iter().enumerate().take(MAX_ROWS);
    let rows = rows.map(|(depth, layer)| {
        let kind = if depth == 0 { "data" } else { "below" };
        let plain = layer.data_bytes - layer.compressed_bytes;
        Row {
            cells: vec![
                layer.name.clone(),
                layer.format.to_owned(),
                human(layer.data_bytes),
                layer.disk_bytes.map_or_else(|| "–".to_owned(), human),
            ],
            bar: vec![
                (kind, percent(plain, facts.size_bytes)),
                (
                    "compressed",
                    percent(layer.compressed_bytes, facts.size_bytes),
                ),
                ("zero", percent(layer.zero_bytes, facts.size_bytes)),
            ],
        }
    });
    List {
        id: "chain",
        title: "The chain",
        explains: "What each image contributes to the disk; the bars are parts of the disk.".into(),
        legend: vec![
            ("data", "data of the image itself"),
            ("below", "data of an image below"),
            ("compressed", "compressed"),
            ("zero", "zeroes"),
        ],
        heads: vec!["image", "format", "data", "on the host"],
        rows: rows.collect(),
    }
}

fn snapshots(qcow2: &Qcow2Facts) -> List {
    let spaces = qcow2.survey.snapshots.iter().zip(&qcow2.info.snapshots);
    let most = qcow2.survey.snapshots.iter();
    let most = most
        .map(|space| space.total_bytes.max(space.own_bytes))
        .max();
    let most = most.unwrap_or(0);
    let rows = spaces.take(MAX_ROWS).map(|(space, snapshot)| {
        let shared = space.total_bytes.saturating_sub(space.own_bytes);
        Row {
            cells: vec![
                snapshot.name.clone(),
                human(space.total_bytes),
                human(space.own_bytes),
            ],
            bar: vec![
                ("snapshot", percent(space.own_bytes, most)),
                ("shared", percent(shared, most)),
            ],
        }
    });
    List {
        id: "snapshots",
        title: "Snapshots",
        explains: "What each refers to, and what it holds alone: deleting it gives that back."
            .into(),
        legend: vec![("snapshot", "alone"), ("shared", "shared")],
        heads: vec!["snapshot", "refers to", "alone"],
        rows: rows.collect(),
    }
}

fn metadata(qcow2: &Qcow2Facts) -> List {
    let metadata = &qcow2.survey.metadata;
    let parts = [
        ("header", metadata.header),
        ("L1 table", metadata.l1),
        ("L2 tables", metadata.l2),
        ("refcount table", metadata.refcount_table),
        ("refcount blocks", metadata.refcount_blocks),
        ("snapshot table", metadata.snapshot_table),
        ("L1 tables of snapshots", metadata.snapshot_l1),
        ("L2 tables of snapshots", metadata.snapshot_l2),
        ("bitmaps", metadata.bitmaps),
        ("encryption header", metadata.encryption),
        ("write log", metadata.write_log),
    ];
    let total = metadata.total();
    let rows = parts.into_iter().filter(|(_, bytes)| *bytes > 0);
    let rows = rows.map(|(name, bytes)| row(vec![name.to_owned()], bytes, total, "metadata"));
    List {
        id: "metadata",
        title: "Metadata",
        explains: format!("{} in whole clusters.", human(total)),
        legend: Vec::new(),
        heads: vec!["", "bytes"],
        rows: rows.collect(),
    }
}

fn caches(qcow2: &Qcow2Facts) -> List {
    let need = &qcow2.survey.cache;
    let sizes = need.by_entry_size.iter();
    let most = sizes.clone().map(|(_, bytes)| *bytes).max().unwrap_or(0);
    let most = most.max(need.whole_disk_bytes).max(need.packed_bytes);
    let packed = row(
        vec!["Vellum, packed".to_owned()],
        need.packed_bytes,
        most,
        "shared",
    );
    let sizes = sizes.map(|(size, bytes)| {
        let name = format!("QEMU, entries of {}", human(*size));
        row(vec![name], *bytes, most, "data")
    });
    let whole = row(
        vec!["the whole disk, whatever is written".to_owned()],
        need.whole_disk_bytes,
        most,
        "zero",
    );
    List {
        id: "cache",
        title: "L2 cache",
        explains: "What a cache takes that covers everything that is mapped now, by the size of \
                   its entries (l2-cache-entry-size)."
            .into(),
        legend: Vec::new(),
        heads: vec!["", "l2-cache-size"],
        rows: std::iter::once(packed)
            .chain(sizes)
            .chain([whole])
            .collect(),
    }
}

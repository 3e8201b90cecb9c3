//! The facts as text (`--output human`), for a terminal of any width or a file.

use std::fmt::Write;

use comfy_table::{CellAlignment, Table, presets};

use super::advice::Advice;
use super::gather::{Facts, Qcow2Facts};
use super::picture::{Drawn, Kind, draw};
use crate::size::human;
use crate::style::{Colour, Style};
use crate::terminal;

const GUEST_ROWS: usize = 6;
const HOST_ROWS: usize = 4;
const MAX_COLUMNS: usize = 160;
const INDENT: &str = "  ";

/// How a kind is drawn: so that it can be told without colours.
fn look(kind: Kind) -> (char, Colour) {
    match kind {
        Kind::Empty => ('·', Colour::Grey),
        Kind::Data => ('█', Colour::Blue),
        Kind::Compressed => ('▓', Colour::Magenta),
        Kind::Below => ('▒', Colour::Cyan),
        Kind::Zero => ('░', Colour::Grey),
        Kind::Shared => ('▒', Colour::Green),
        Kind::Snapshot => ('░', Colour::Yellow),
        Kind::Metadata => ('#', Colour::Red),
    }
}

/// Everything, as text.
pub fn page(facts: &Facts, advice: &[Advice]) -> String {
    let writer = Writer {
        style: Style::for_output(),
        columns: terminal::output_columns().clamp(40, MAX_COLUMNS) - 2 * INDENT.len(),
    };
    let mut text = writer.head(facts);
    text.push_str(&writer.picture(
        "The disk",
        &draw(
            &facts.guest,
            facts.guest_cell_bytes,
            facts.size_bytes,
            GUEST_ROWS * writer.columns,
        ),
    ));
    if let Some(qcow2) = &facts.qcow2 {
        let survey = &qcow2.survey;
        let cells = HOST_ROWS * writer.columns;
        let length = survey.file_length_bytes;
        let host = draw(&survey.host, survey.host_cell_bytes, length, cells);
        text.push_str(&writer.picture("The file", &host));
        text.push_str(&writer.contents(facts, qcow2));
    }
    text.push_str(&writer.layers(facts));
    if let Some(qcow2) = &facts.qcow2 {
        text.push_str(&writer.snapshots(qcow2));
        text.push_str(&writer.cache(qcow2));
    }
    text.push_str(&writer.advice(advice));
    text
}

struct Writer {
    style: Style,
    columns: usize,
}

impl Writer {
    fn section(&self, title: &str, body: &str) -> String {
        match body.is_empty() {
            true => String::new(),
            false => format!("\n{}\n{body}", self.style.heading(title)),
        }
    }

    fn head(&self, facts: &Facts) -> String {
        let mut text = format!("{}\n", self.style.heading(&terminal::harmless(&facts.name)));
        let disk = facts.layers.first().and_then(|layer| layer.disk_bytes);
        let mut parts = vec![
            facts.format.to_owned(),
            format!("a disk of {}", human(facts.size_bytes)),
        ];
        parts.extend(disk.map(|bytes| format!("{} on the host", human(bytes))));
        if let Some(qcow2) = &facts.qcow2 {
            let info = &qcow2.info;
            let cluster = human(info.cluster_size_bytes);
            parts.push(match info.extended_l2 {
                true => format!("clusters of {cluster} in 32 parts"),
                false => format!("clusters of {cluster}"),
            });
            parts.extend(
                info.encryption
                    .map(|method| format!("encrypted ({method})")),
            );
            parts.extend(
                info.external_data
                    .then(|| "data in another file".to_owned()),
            );
        }
        let _ = writeln!(text, "{INDENT}{}", parts.join(", "));
        text
    }

    fn picture(&self, title: &str, cells: &[Drawn]) -> String {
        let mut body = String::new();
        for row in cells.chunks(self.columns) {
            body.push_str(INDENT);
            for run in row.chunk_by(|one, two| one.kind == two.kind) {
                let (glyph, colour) = look(run[0].kind);
                let glyphs: String = run.iter().map(|_| glyph).collect();
                body.push_str(&self.style.colour(colour, &glyphs));
            }
            body.push('\n');
        }
        if let Some(cell) = cells.first() {
            let legend = legend(cells).into_iter().map(|kind| {
                let (glyph, colour) = look(kind);
                format!(
                    "{} {}",
                    self.style.colour(colour, &glyph.to_string()),
                    kind.name()
                )
            });
            let legend: Vec<String> = legend.collect();
            let _ = writeln!(
                body,
                "{INDENT}{}   ({} each)",
                legend.join("  "),
                human(cell.len_bytes)
            );
        }
        self.section(title, &body)
    }

    fn contents(&self, facts: &Facts, qcow2: &Qcow2Facts) -> String {
        let survey = &qcow2.survey;
        let cluster = qcow2.info.cluster_size_bytes;
        let disk = &survey.disk;
        let of_disk = |clusters: u64| {
            let share = clusters as f64 * 100.0 / disk.total_clusters.max(1) as f64;
            format!("{share:.1} % of the disk")
        };
        let mut rows = vec![row(
            "data",
            disk.data_clusters * cluster,
            of_disk(disk.data_clusters),
        )];
        if disk.compressed_clusters > 0 {
            let whole = disk.compressed_clusters * cluster;
            let percent = disk.compressed_bytes as f64 * 100.0 / whole as f64;
            let note = format!("{} at {percent:.0} % of their size", human(whole));
            rows.push(row("compressed", disk.compressed_bytes, note));
        }
        if disk.zero_clusters > 0 {
            let kept = disk.zero_with_place_clusters * cluster;
            let note = format!("{}, {} kept", of_disk(disk.zero_clusters), human(kept));
            rows.push(row("zeroes", disk.zero_clusters * cluster, note));
        }
        if qcow2.info.extended_l2 && disk.data_clusters > 0 {
            let held = disk.allocated_subclusters * cluster / 32;
            let note = format!("{} clusters are filled in part", disk.partial_clusters);
            rows.push(row("in subclusters", held, note));
        }
        if survey.only_in_snapshots_bytes > 0 {
            let note = format!("{} snapshots", survey.snapshots.len());
            rows.push(row("snapshots only", survey.only_in_snapshots_bytes, note));
        }
        let metadata = survey.metadata.total();
        let share = metadata as f64 * 100.0 / survey.counted_bytes.max(1) as f64;
        rows.push(row(
            "metadata",
            metadata,
            format!("{share:.2} % of what is used"),
        ));
        rows.push(row("pieces", disk.extents, pieces(facts, qcow2)));
        if let Some(last) = rows.last_mut() {
            last[1] = disk.extents.to_string();
        }
        for bitmap in &qcow2.info.bitmaps {
            let state = if bitmap.consistent { "sound" } else { "stale" };
            let recording = if bitmap.auto { "recording" } else { "disabled" };
            rows.push([
                format!("bitmap {}", terminal::harmless(&bitmap.name)),
                human(bitmap.granularity_bytes),
                format!("a bit; {state}, {recording}"),
            ]);
        }
        self.section("Contents", &grid(&[], &rows, &[1]))
    }

    fn layers(&self, facts: &Facts) -> String {
        if facts.layers.len() < 2 {
            return String::new();
        }
        let share = |bytes: u64| {
            let percent = bytes as f64 * 100.0 / facts.size_bytes.max(1) as f64;
            format!("{percent:.1} %")
        };
        let rows: Vec<[String; 5]> = facts
            .layers
            .iter()
            .map(|layer| {
                [
                    terminal::harmless(&layer.name),
                    layer.format.to_owned(),
                    human(layer.data_bytes),
                    share(layer.data_bytes),
                    layer.disk_bytes.map_or_else(|| "-".to_owned(), human),
                ]
            })
            .collect();
        let heads = [
            "image",
            "format",
            "data read from it",
            "of the disk",
            "on the host",
        ];
        self.section("Chain", &grid(&heads, &rows, &[2, 3, 4]))
    }

    fn snapshots(&self, qcow2: &Qcow2Facts) -> String {
        let spaces = qcow2.survey.snapshots.iter().zip(&qcow2.info.snapshots);
        let rows: Vec<[String; 4]> = spaces
            .map(|(space, snapshot)| {
                [
                    terminal::harmless(&snapshot.id),
                    terminal::harmless(&snapshot.name),
                    human(space.total_bytes),
                    human(space.own_bytes),
                ]
            })
            .collect();
        let heads = ["id", "snapshot", "refers to", "alone"];
        match rows.is_empty() {
            true => String::new(),
            false => self.section("Snapshots", &grid(&heads, &rows, &[2, 3])),
        }
    }

    fn cache(&self, qcow2: &Qcow2Facts) -> String {
        let need = &qcow2.survey.cache;
        let mut rows: Vec<[String; 2]> = need
            .by_entry_size
            .iter()
            .map(|(size, bytes)| [format!("QEMU, entries of {}", human(*size)), human(*bytes)])
            .collect();
        rows.push(["Vellum, packed".to_owned(), human(need.packed_bytes)]);
        rows.push([
            "the whole disk, whatever is written".to_owned(),
            human(need.whole_disk_bytes),
        ]);
        self.section(
            "L2 cache that covers what is mapped",
            &grid(&[], &rows, &[1]),
        )
    }

    fn advice(&self, advice: &[Advice]) -> String {
        let mut body = String::new();
        for advice in advice {
            let mark = match advice.urgent {
                true => self.style.bold(Colour::Red, "!"),
                false => self.style.bold(Colour::Green, "*"),
            };
            let lines = terminal::wrap(&terminal::harmless(&advice.text), self.columns - 2);
            let _ = writeln!(body, "{INDENT}{mark} {}", lines.join("\n    "));
            if let Some(command) = &advice.command {
                let command = terminal::harmless(command);
                let _ = writeln!(body, "      {}", self.style.colour(Colour::Cyan, &command));
            }
        }
        self.section("Advice", &body)
    }
}

fn row(name: &str, bytes: u64, note: String) -> [String; 3] {
    [name.to_owned(), human(bytes), note]
}

/// How long the pieces are in which data lies.
fn pieces(facts: &Facts, qcow2: &Qcow2Facts) -> String {
    let disk = &qcow2.survey.disk;
    let data = disk.data_clusters * qcow2.info.cluster_size_bytes;
    let data = data.min(facts.size_bytes.max(data));
    match disk.extents {
        0 => "nothing is allocated".to_owned(),
        extents => format!("{} each on average", human(data / extents)),
    }
}

/// The kinds that are drawn, in the order in which they appear.
fn legend(cells: &[Drawn]) -> Vec<Kind> {
    let mut kinds = Vec::new();
    for cell in cells {
        if !kinds.contains(&cell.kind) {
            kinds.push(cell.kind);
        }
    }
    kinds
}

/// Rows below each other; the columns `right` end at one line.
fn grid<const N: usize>(heads: &[&str], rows: &[[String; N]], right: &[usize]) -> String {
    let mut grid = Table::new();
    grid.load_preset(presets::NOTHING);
    if !heads.is_empty() {
        grid.set_header(heads);
    }
    for row in rows {
        grid.add_row(row);
    }
    for column in right {
        if let Some(column) = grid.column_mut(*column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    grid.lines()
        .map(|line| format!(" {}\n", line.trim_end()))
        .collect()
}

//! Advice about an image (what to do, and how much space it gives back), derived from its
//! [`Facts`]. No I/O: the three forms of output show the same advice.

use super::gather::{Facts, Qcow2Facts};
use crate::size::human;
use crate::terminal::quoted;

/// Something that could be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Advice {
    /// A stable name, for programs.
    pub code: &'static str,
    /// It concerns the data's safety, not only cost.
    pub urgent: bool,
    /// Bytes of the host that it gives back, where that was counted.
    pub gives_back_bytes: Option<u64>,
    /// What is, for people.
    pub text: String,
    /// What to do, as a command line.
    pub command: Option<String>,
}

/// QEMU's default for `l2-cache-size` on Linux, and Vellum's limit without a size.
const QEMU_L2_CACHE_BYTES: u64 = 32 << 20;
/// Space below this is not worth a word.
const WORTH_BYTES: u64 = 1 << 20;
/// A chain from this length on is long.
const LONG_CHAIN: usize = 6;
/// Growth from here on is worth a word.
const WORTH_GROWTH: f64 = 1.5;
/// Scattered: so many runs at least, of less than this on average.
const MANY_EXTENTS: u64 = 256;
const SHORT_EXTENT_BYTES: u64 = 512 << 10;

/// Draws the conclusions, what matters most first.
pub fn advise(facts: &Facts) -> Vec<Advice> {
    let mut all = Vec::new();
    if let Some(qcow2) = &facts.qcow2 {
        damage(facts, qcow2, &mut all);
        space(facts, qcow2, &mut all);
        snapshots(facts, qcow2, &mut all);
        growth(qcow2, &mut all);
        cache(facts, qcow2, &mut all);
        names(facts, qcow2, &mut all);
        scatter(facts, qcow2, &mut all);
    }
    chain(facts, &mut all);
    all.sort_by_key(|advice| !advice.urgent);
    all
}

fn advice(code: &'static str, text: String, command: Option<String>) -> Advice {
    Advice {
        code,
        urgent: false,
        gives_back_bytes: None,
        text,
        command,
    }
}

fn back(code: &'static str, bytes: u64, why: &str, command: Option<String>) -> Advice {
    Advice {
        gives_back_bytes: Some(bytes),
        ..advice(
            code,
            format!("{} can be given back: {why}", human(bytes)),
            command,
        )
    }
}

fn damage(facts: &Facts, qcow2: &Qcow2Facts, all: &mut Vec<Advice>) {
    let name = quoted(&facts.name);
    let mut urgent = |code, text: String, command| {
        all.push(Advice {
            urgent: true,
            ..advice(code, text, Some(command))
        });
    };
    if let Some(found) = &qcow2.cut_short {
        let text = format!("Data is lost: {found}");
        let command = format!("vellum convert --accept-missing {name} NEW");
        urgent("cut-short", text, command);
    }
    match &qcow2.check {
        Some(Err(why)) => {
            let text = format!("The metadata cannot be checked: {why}");
            urgent("unchecked", text, format!("vellum check {name}"));
        }
        Some(Ok(report)) if report.corruptions + report.check_errors > 0 => {
            let count = report.corruptions + report.check_errors;
            let text = format!("{count} contradictions in the metadata: data may be lost by use");
            urgent("damaged", text, format!("vellum check -r all {name}"));
        }
        _ => {}
    }
    if qcow2.info.corrupt {
        let text = "The image is marked as damaged and cannot be written".to_owned();
        urgent(
            "marked-corrupt",
            text,
            format!("vellum check -r all {name}"),
        );
    }
}

fn space(facts: &Facts, qcow2: &Qcow2Facts, all: &mut Vec<Advice>) {
    let name = quoted(&facts.name);
    let cluster = qcow2.info.cluster_size_bytes;
    let leaks = match &qcow2.check {
        Some(Ok(report)) => report.leaks * cluster,
        _ => 0,
    };
    if leaks > 0 {
        let command = format!("vellum check -r leaks {name}");
        let why = "clusters that are counted as used, and are not";
        all.push(back("leaks", leaks, why, Some(command)));
    }
    let zeroes = qcow2.survey.disk.zero_with_place_clusters * cluster;
    if zeroes >= WORTH_BYTES {
        let command = format!("vellum convert -O qcow2 {name} NEW");
        let why = "clusters that read as zeroes and keep their place in the file";
        all.push(back("zeroes-with-place", zeroes, why, Some(command)));
    }
    // Blocks of the host cannot be more than what is used, unless free clusters have some.
    let disk = facts.layers.first().and_then(|layer| layer.disk_bytes);
    let unused = disk.unwrap_or(0).saturating_sub(qcow2.survey.counted_bytes);
    if unused >= WORTH_BYTES && !qcow2.info.dirty {
        let command = format!("vellum convert -O qcow2 {name} NEW");
        let why = "free clusters inside of the file still take room on the host";
        all.push(back("free-clusters", unused, why, Some(command)));
    }
}

fn snapshots(facts: &Facts, qcow2: &Qcow2Facts, all: &mut Vec<Advice>) {
    let held = qcow2.survey.held_by_snapshots_bytes();
    if held < WORTH_BYTES {
        return;
    }
    let spaces = qcow2.survey.snapshots.iter().zip(&qcow2.info.snapshots);
    let largest = spaces.max_by_key(|(space, _)| space.own_bytes);
    let Some((space, snapshot)) = largest else {
        return;
    };
    let mut text = format!("{} are held by snapshots only", human(held));
    if space.own_bytes > 0 {
        let own = human(space.own_bytes);
        text.push_str(&format!("; '{}' alone holds {own}", snapshot.name));
    }
    text.push_str(&format!(
        ". Deleting it gives up a point to go back to: what the disk held when '{}' was taken is \
         lost for good",
        snapshot.name
    ));
    let command = format!(
        "vellum snapshot -d {} {}",
        quoted(&snapshot.name),
        quoted(&facts.name)
    );
    all.push(Advice {
        gives_back_bytes: Some(space.own_bytes),
        ..advice("snapshots", text, Some(command))
    });
}

fn growth(qcow2: &Qcow2Facts, all: &mut Vec<Advice>) {
    let Some(growth) = &qcow2.growth else {
        return;
    };
    let size = human(growth.cluster_bytes);
    let Some(factor) = growth.factor() else {
        let text = format!(
            "Nothing in the overlay differs from what lies below, in {} clusters that were \
             compared",
            growth.sampled_clusters
        );
        all.push(advice("overlay-is-same", text, None));
        return;
    };
    if factor < WORTH_GROWTH || qcow2.info.extended_l2 {
        return;
    }
    let with = growth.subcluster_factor().unwrap_or(factor);
    let text = format!(
        "A cluster size of {size} costs {factor:.1}x growth on this overlay: of {} clusters that \
         were compared, {:.0} % differ from what lies below; subclusters would cost {with:.1}x",
        growth.sampled_clusters,
        growth.changed_blocks as f64 * 100.0 / growth.blocks.max(1) as f64,
    );
    let command = "vellum create -f qcow2 -o extended_l2=on -b BASE -F FORMAT NEW".to_owned();
    all.push(advice("growth", text, Some(command)));
}

fn cache(facts: &Facts, qcow2: &Qcow2Facts, all: &mut Vec<Advice>) {
    let need = &qcow2.survey.cache;
    if need.whole_disk_bytes <= QEMU_L2_CACHE_BYTES {
        return;
    }
    let covered = facts.size_bytes / need.whole_disk_bytes.max(1) * QEMU_L2_CACHE_BYTES;
    let text = format!(
        "QEMU's L2 cache covers {} of the {} by default; all of it takes l2-cache-size={}. Vellum \
         takes {} for what is mapped now",
        human(covered),
        human(facts.size_bytes),
        need.whole_disk_bytes,
        human(need.packed_bytes)
    );
    all.push(advice("l2-cache", text, None));
}

fn names(facts: &Facts, qcow2: &Qcow2Facts, all: &mut Vec<Advice>) {
    let name = quoted(&facts.name);
    if let (Some(backing), None) = (&qcow2.info.backing_file, &qcow2.info.backing_format) {
        let format = facts.layers.get(1).map_or("FORMAT", |layer| layer.format);
        all.push(Advice {
            urgent: true,
            ..advice(
                "backing-format",
                "The format of the backing file is not named, so that it is guessed from bytes \
                 that a guest may have written"
                    .to_owned(),
                Some(format!(
                    "vellum rebase -u -b {} -F {format} {name}",
                    quoted(backing)
                )),
            )
        });
    }
    for bitmap in qcow2.info.bitmaps.iter().filter(|b| !b.consistent) {
        let text = format!(
            "The bitmap '{}' was in use when a program ended, and says nothing any more",
            bitmap.name
        );
        let command = format!("vellum bitmap --remove {name} {}", quoted(&bitmap.name));
        all.push(advice("stale-bitmap", text, Some(command)));
    }
    if qcow2.info.version == 2 {
        let text = "The image has version 2 of the format, which cannot tell zeroes from nothing, \
                    and has no subclusters, bitmaps or zstd"
            .to_owned();
        let command = format!("vellum amend -o compat=1.1 {name}");
        all.push(advice("version", text, Some(command)));
    }
}

fn scatter(facts: &Facts, qcow2: &Qcow2Facts, all: &mut Vec<Advice>) {
    let disk = &qcow2.survey.disk;
    if disk.extents < MANY_EXTENTS {
        return;
    }
    let average = disk.data_clusters * qcow2.info.cluster_size_bytes / disk.extents;
    if average >= SHORT_EXTENT_BYTES {
        return;
    }
    let text = format!(
        "The data lies in {} pieces of {} on average: reading it in order jumps as often",
        disk.extents,
        human(average)
    );
    let command = format!("vellum convert -O qcow2 {} NEW", quoted(&facts.name));
    all.push(advice("fragmentation", text, Some(command)));
}

fn chain(facts: &Facts, all: &mut Vec<Advice>) {
    let name = quoted(&facts.name);
    let below = facts.layers.get(1..).unwrap_or_default();
    let from_below: u64 = below.iter().map(|layer| layer.data_bytes).sum();
    if !below.is_empty() && from_below == 0 && facts.layers[0].format == "qcow2" {
        let text = "Nothing is read from the backing file any more".to_owned();
        let command = format!("vellum rebase -b '' {name}");
        all.push(advice("backing-unused", text, Some(command)));
    } else if facts.layers.len() >= LONG_CHAIN {
        let text = format!(
            "A chain of {} images: each has to be opened, kept and never lost",
            facts.layers.len()
        );
        let command = format!("vellum convert -O qcow2 {name} NEW");
        all.push(advice("long-chain", text, Some(command)));
    }
}

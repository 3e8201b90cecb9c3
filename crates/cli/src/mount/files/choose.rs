//! Which partition is shown.

use std::fmt::Write;

use vellum_files::partitions::{self, Partition, Table};
use vellum_files::{Contents, Error, Source, Volume, detect};

use crate::report;
use crate::server::Failure;
use crate::size::human;

/// What to do about file systems that cannot be read here.
pub(super) const OTHER_WAYS: &str = "for the kernel's own reader, show the disk as a file \
     ('vellum mount -r IMAGE FILE') and mount that ('losetup -rPf FILE', 'mount -o ro'); \
     guestmount reads it without root";

/// What is shown.
#[derive(Debug)]
pub(super) struct Chosen {
    pub(super) source: Source,
    pub(super) contents: Contents,
    /// For people: `partition 2`, or `all`.
    pub(super) place: String,
    /// Why it is this one, where others might be meant.
    pub(super) reason: Option<Reason>,
}

/// Why one was chosen that nobody has named.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reason {
    /// Others cannot be read.
    OnlyOne,
    /// It is the whole of an ISO9660, whose partitions are for those who start from it.
    Hybrid,
}

impl Reason {
    /// For people, behind what is shown.
    pub(super) fn text(self) -> &'static str {
        match self {
            Reason::OnlyOne => "all that can be read",
            Reason::Hybrid => "the whole disk; --partition NUMBER shows one of its partitions",
        }
    }
}

/// A partition that holds this belongs to an ISO9660 that was made to be started from a disk.
const ISO_BYTES: u64 = 0x8000;

/// A partition and what is in it.
struct Found {
    partition: Partition,
    source: Source,
    volume: Volume,
}

impl Found {
    /// A line for people.
    fn describe(&self) -> String {
        let partition = &self.partition;
        let mut line = format!(
            "partition {}: {}, {}",
            partition.number,
            human(partition.len_bytes),
            self.volume.contents.name(),
        );
        if let Some(label) = &self.volume.label {
            let _ = write!(line, " '{label}'");
        }
        let _ = write!(line, " ({}", partition.purpose);
        if let Some(name) = &partition.name {
            let _ = write!(line, ", '{name}'");
        }
        line + ")"
    }
}

/// Finds what is meant: all of a disk without partitions; else the one with the number `wanted`
/// (0: all of the disk in any case), or the only one that can be read. Without a number an ISO9660
/// with a table of partitions is shown as a whole.
pub(super) fn choose(disk: &Source, image: &str, wanted: Option<u32>) -> Result<Chosen, Failure> {
    let failed = |error: Error| Failure::message(format!("'{image}': {error}"));
    let table = match wanted {
        Some(0) => None,
        _ => partitions::read(disk).map_err(failed)?,
    };
    let Some(table) = table else {
        if wanted.is_some_and(|number| number > 0) {
            let text = format!("'{image}' has no partitions: leave out --partition");
            return Err(Failure::Message(text));
        }
        let contents = detect(disk).map_err(failed)?.contents;
        return check(
            Chosen {
                source: disk.clone(),
                contents,
                place: "all".to_owned(),
                reason: None,
            },
            image,
        );
    };
    if wanted.is_none() && is_hybrid(disk, &table).map_err(failed)? {
        return Ok(Chosen {
            source: disk.clone(),
            contents: Contents::Iso,
            place: "all".to_owned(),
            reason: Some(Reason::Hybrid),
        });
    }
    for remark in &table.remarks {
        report::warning(format_args!("'{image}': {remark}"));
    }
    let mut found = inspect(disk, &table).map_err(failed)?;
    let at = match wanted {
        Some(number) => found.iter().position(|one| one.partition.number == number),
        None => only_readable(&found),
    };
    let Some(at) = at else {
        return Err(Failure::Message(explain(&found, image, wanted)));
    };
    let one = found.swap_remove(at);
    check(
        Chosen {
            source: one.source,
            contents: one.volume.contents,
            place: format!("partition {}", one.partition.number),
            reason: wanted.is_none().then_some(Reason::OnlyOne),
        },
        image,
    )
}

/// Whether the disk is an ISO9660 of which a partition shows at least a part. One that was there
/// before the partitions were made is in none of them.
fn is_hybrid(disk: &Source, table: &Table) -> Result<bool, Error> {
    let holds = |one: &Partition| {
        let offset = ISO_BYTES.checked_sub(one.start_bytes);
        offset.is_some_and(|offset| offset < one.len_bytes)
    };
    Ok(table.partitions.iter().any(holds) && detect(disk)?.contents == Contents::Iso)
}

fn inspect(disk: &Source, table: &Table) -> Result<Vec<Found>, Error> {
    let found = table.partitions.iter().map(|partition| {
        let source = disk.part(partition.start_bytes, partition.len_bytes);
        Ok(Found {
            partition: partition.clone(),
            volume: detect(&source)?,
            source,
        })
    });
    found.collect()
}

fn only_readable(found: &[Found]) -> Option<usize> {
    let mut readable = found.iter().enumerate();
    let mut readable = readable
        .by_ref()
        .filter(|(_, one)| one.volume.contents.is_readable());
    let (first, _) = readable.next()?;
    readable.next().is_none().then_some(first)
}

/// Refuses what there is no reader for.
fn check(chosen: Chosen, image: &str) -> Result<Chosen, Failure> {
    let (place, contents) = (&chosen.place, chosen.contents);
    if contents.is_readable() {
        return Ok(chosen);
    }
    let text = match contents {
        Contents::Empty => format!("{place} of '{image}' is empty"),
        _ => format!(
            "{place} of '{image}' holds {}, which vellum cannot read; {OTHER_WAYS}",
            contents.name()
        ),
    };
    Err(Failure::Message(text))
}

/// Why none was chosen.
fn explain(found: &[Found], image: &str, wanted: Option<u32>) -> String {
    let readable = found.iter().filter(|one| one.volume.contents.is_readable());
    let mut text = match (wanted, readable.count()) {
        _ if found.is_empty() => return format!("'{image}' has no partition with a byte in it"),
        (Some(number), _) => format!("'{image}' has no partition {number}, but these:"),
        (None, 0) => format!("'{image}' has no partition that vellum can read; {OTHER_WAYS}"),
        (None, _) => format!("'{image}' has several: choose one by --partition NUMBER"),
    };
    for one in found {
        let _ = write!(text, "\n  {}", one.describe());
    }
    text
}

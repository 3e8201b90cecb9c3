//! `repo`: lists, verifies and cleans a repository.

use std::ffi::OsString;
use std::time::Duration;

use comfy_table::{CellAlignment, Table, presets};
use serde_json::json;
use vellum_graph::repository::Named;
use vellum_io::lane;
use vellum_repository::{
    Collected, GcOptions, Keep, Manifest, PruneOptions, TagName, Verified, gc, prune, remove_tag,
    verify,
};

use super::super::command::{Command, Failure, Outcome, Subcommand, fail, not_taken, number};
use super::super::rows::{OBJECT, OUTPUT, PROGRESS, QUIET, REPOSITORY};
use super::{disk_name, failed, manifest_json, named, told};
use crate::output::Output;
use crate::progress::Progress;
use crate::size::human;
use crate::spec::{CommonArgs, Spec};
use crate::{localtime, report};

pub static REPO: Subcommand = Subcommand {
    spec: Spec {
        name: "repo",
        about: "List, verify and clean a repository",
        usage: "\
list|verify|prune|remove|gc [--read-data] [--keep COUNT]
        [--keep-within TIME] [--stale-after TIME] [--dry-run] [--break-lock]
        [-p] [-q] [--output OUTPUT] [--object OBJDEF] REPOSITORY[:TAG]",
        arguments: &[
            QUIET,
            PROGRESS,
            "list  what disks there are",
            "verify  whether all that disks lead to is there; exit code 2 if not",
            "--read-data  verify: read and compare all of it",
            "prune  remove all disks (of TAG) but those that the options keep, and the newest of \
             each tag",
            "--keep COUNT  prune: the newest COUNT of each tag stay",
            "--keep-within TIME  prune: what is younger stays (30d, 12h)",
            "remove  remove TAG with all of its disks",
            "gc  remove objects that no disk leads to any more",
            "--stale-after TIME  gc: pushes without a sign of life for so long are given up (24h)",
            "--dry-run  prune, remove, gc: say what would go",
            "--break-lock  another prune, remove or gc is known to have been killed",
            OUTPUT,
            OBJECT,
            REPOSITORY,
        ],
        examples: "\
vellum repo list s3://backups/site
  what is there
vellum repo verify --read-data s3://backups/site
  whether all of it is there, and what was pushed
vellum repo prune --keep 7 s3://backups/site
  of each tag the newest seven stay
vellum repo gc s3://backups/site
  what no disk needs any more goes
",
        exits: "\
0  done
1  an error, which is told
2  something is missing or damaged (list, verify)
",
        ..Spec::EMPTY
    },
    run,
};

/// What can be done, and the options that belong to it alone.
const ACTIONS: &[(&str, &[&str])] = &[
    ("gc", &["dry-run", "break-lock", "stale-after"]),
    ("list", &[]),
    ("prune", &["keep", "keep-within", "dry-run", "break-lock"]),
    ("remove", &["dry-run", "break-lock"]),
    ("verify", &["read-data"]),
];

#[derive(Debug, Default)]
struct Arguments {
    common: CommonArgs,
    read_data: bool,
    keep: Keep,
    dry_run: bool,
    break_lock: bool,
    stale: Option<Duration>,
}

fn run(command: Command<'_>, args: Vec<OsString>) -> Outcome {
    let mut arguments = Arguments::default();
    let mut special = Vec::new();
    arguments.common = command.parse(args, |name, value| {
        special.push(name);
        match name {
            "read-data" => arguments.read_data = true,
            "keep" => arguments.keep.newest = Some(number("count", &value, 1, 1 << 40)?),
            "keep-within" => arguments.keep.within = Some(duration(&value)?),
            "dry-run" => arguments.dry_run = true,
            "break-lock" => arguments.break_lock = true,
            "stale-after" => arguments.stale = Some(duration(&value)?),
            _ => return not_taken(name),
        }
        Ok(())
    })?;
    let [action, repository] = arguments.common.operands.as_slice() else {
        let message = "Expecting list, verify, prune, remove or gc, and a repository";
        return Err(Failure::Usage(message.into()));
    };
    let Some((_, own)) = ACTIONS.iter().find(|(name, _)| name == action) else {
        return Err(Failure::Usage(format!("A repository has no '{action}'")));
    };
    if special.iter().any(|option| !own.contains(option)) {
        return Err(Failure::Usage(format!(
            "One of the options is not of '{action}'"
        )));
    }
    let has_tag = has_tag(repository);
    let named = named(repository)?;
    named.refuse_number()?;
    let tag = has_tag.then(|| named.disk.tag.clone());
    lane::block_on(async {
        match (action.as_str(), tag) {
            ("list", tag) => list(&named, tag, &arguments).await,
            ("prune", tag) => prune_disks(&named, tag, &arguments).await,
            ("remove", Some(tag)) => remove(&named, &tag, &arguments).await,
            ("remove", None) => fail("Name the tag that is to be removed: REPOSITORY:TAG"),
            (_, Some(_)) => fail(format!("'{action}' is of a whole repository: name no tag")),
            ("gc", None) => collect(&named, &arguments).await,
            (_, None) => verify_all(command, &named, &arguments).await,
        }
    })
}

/// Whether a name says a tag; without, the newest disks of all tags are meant.
fn has_tag(name: &str) -> bool {
    vellum_options::repository_name::options(name).is_ok_and(|options| options.contains("tag"))
}

/// A time as `30d`, `12h`, `15m`, `10s`.
fn duration(text: &str) -> Result<Duration, Failure> {
    let units = [('s', 1), ('m', 60), ('h', 3600), ('d', 24 * 3600)];
    let unit = units.iter().find(|(letter, _)| text.ends_with(*letter));
    let count = text
        .get(..text.len().saturating_sub(1))
        .and_then(|count| count.parse::<u64>().ok());
    match (unit, count) {
        (Some((_, seconds)), Some(count)) if count < 1 << 32 => {
            Ok(Duration::from_secs(count * seconds))
        }
        _ => fail(format!("'{text}' is no time: 30d, 12h, 15m or 10s")),
    }
}

fn print_json(value: &serde_json::Value) {
    report::print(format_args!("{value:#}\n"));
}

async fn list(named: &Named, tag: Option<TagName>, arguments: &Arguments) -> Outcome {
    let repository = named.open().await.map_err(failed)?;
    let (mut disks, problems) = repository.disks().await.map_err(failed)?;
    disks.retain(|disk| tag.as_ref().is_none_or(|tag| disk.tag == *tag));
    match arguments.common.output {
        Output::Json => print_json(&disks.iter().map(manifest_json).collect()),
        Output::Human => print_disks(&disks),
    }
    for problem in &problems {
        report::error(told(problem));
    }
    Ok(if problems.is_empty() { 0 } else { DAMAGED })
}

fn print_disks(disks: &[Manifest]) {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header(["disk", "made", "size", "read", "new", "sent", "host"]);
    for disk in disks {
        let cost = disk.cost;
        let made = i64::try_from(disk.created_seconds).unwrap_or(i64::MAX);
        table.add_row([
            disk_name(disk).to_string(),
            localtime::format(made),
            human(disk.disk_bytes),
            human(cost.read_bytes),
            human(cost.new_bytes),
            human(cost.sent_bytes),
            disk.host.replace(char::is_control, "?"),
        ]);
    }
    for column in table.column_iter_mut().skip(2).take(4) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    for line in table.lines() {
        report::print(format_args!("{}\n", line.trim_end()));
    }
}

fn removal(arguments: &Arguments, tag: Option<TagName>) -> PruneOptions {
    PruneOptions {
        tag,
        break_lock: arguments.break_lock,
        dry_run: arguments.dry_run,
        ..PruneOptions::default()
    }
}

async fn prune_disks(named: &Named, tag: Option<TagName>, arguments: &Arguments) -> Outcome {
    let repository = named.open().await.map_err(failed)?;
    let pruned = prune(&repository, &arguments.keep, &removal(arguments, tag))
        .await
        .map_err(failed)?;
    match arguments.common.output {
        Output::Json => print_json(&pruned.iter().map(manifest_json).collect()),
        Output::Human if arguments.common.quiet => {}
        Output::Human => {
            for disk in &pruned {
                report::print(format_args!("{}\n", disk_name(disk)));
            }
            let done = if arguments.dry_run {
                "would be removed"
            } else {
                "removed"
            };
            report::print(format_args!("{} disks {done}\n", pruned.len()));
        }
    }
    Ok(0)
}

async fn remove(named: &Named, tag: &TagName, arguments: &Arguments) -> Outcome {
    let repository = named.open().await.map_err(failed)?;
    let removed = remove_tag(&repository, tag, &removal(arguments, None))
        .await
        .map_err(failed)?;
    match arguments.common.output {
        Output::Json => print_json(&json!({"removed-disks": removed})),
        Output::Human if arguments.common.quiet => {}
        Output::Human => {
            let done = if arguments.dry_run {
                "would be removed"
            } else {
                "removed"
            };
            report::print(format_args!("{removed} disks {done}\n"));
        }
    }
    Ok(0)
}

async fn collect(named: &Named, arguments: &Arguments) -> Outcome {
    let repository = named.open().await.map_err(failed)?;
    let mut options = GcOptions {
        break_lock: arguments.break_lock,
        dry_run: arguments.dry_run,
        ..GcOptions::default()
    };
    options.stale = arguments.stale.unwrap_or(options.stale);
    let collected = gc(&repository, &options).await.map_err(failed)?;
    let Collected {
        removed,
        removed_bytes,
        waiting,
        given_up,
    } = collected;
    match arguments.common.output {
        Output::Json => print_json(&json!({
            "removed-objects": removed,
            "removed-bytes": removed_bytes,
            "waiting-objects": waiting,
            "given-up-pushes": given_up,
        })),
        Output::Human if arguments.common.quiet => {}
        Output::Human => {
            let done = if arguments.dry_run {
                "would be removed"
            } else {
                "removed"
            };
            let bytes = human(removed_bytes);
            report::print(format_args!("{removed} objects of {bytes} {done}\n"));
            if waiting > 0 {
                report::print(format_args!(
                    "{waiting} objects wait until the pushes have ended that run\n"
                ));
            }
        }
    }
    Ok(0)
}

/// Exit code: something is damaged.
const DAMAGED: i32 = 2;

async fn verify_all(command: Command<'_>, named: &Named, arguments: &Arguments) -> Outcome {
    let repository = named.open().await.map_err(failed)?;
    let quiet = arguments.common.quiet || arguments.common.output == Output::Json;
    let mut progress = Progress::new(command.program, arguments.common.progress, quiet, 1.0);
    let verified = verify(&repository, arguments.read_data, |done, total| {
        progress.show(done, total);
    })
    .await;
    progress.end();
    let verified = verified.map_err(failed)?;
    match arguments.common.output {
        Output::Json => print_json(&json!({
            "disks": verified.disks,
            "segments": verified.segments,
            "segment-bytes": verified.segment_bytes,
            "unused-objects": verified.unused,
            "unused-bytes": verified.unused_bytes,
            "problems": verified.problems,
        })),
        Output::Human => print_verified(&verified, arguments),
    }
    Ok(if verified.problems.is_empty() {
        0
    } else {
        DAMAGED
    })
}

fn print_verified(verified: &Verified, arguments: &Arguments) {
    for problem in &verified.problems {
        report::eprint_line(problem);
    }
    if arguments.common.quiet {
        return;
    }
    let Verified {
        disks,
        segments,
        segment_bytes,
        unused,
        unused_bytes,
        ..
    } = verified;
    let what = if arguments.read_data {
        "read"
    } else {
        "looked at"
    };
    report::print(format_args!(
        "{disks} disks, {segments} segments of {} {what}: {} problems\n",
        human(*segment_bytes),
        verified.problems.len()
    ));
    if *unused > 0 {
        let bytes = human(*unused_bytes);
        report::print(format_args!(
            "{unused} segments of {bytes} are of no disk; 'vellum repo gc' removes them\n"
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        for (text, seconds) in [("10s", 10), ("2m", 120), ("1h", 3600), ("30d", 30 * 86400)] {
            assert_eq!(duration(text).unwrap().as_secs(), seconds);
        }
        for text in ["", "d", "10", "-1d", "1w", "99999999999999d", "ä"] {
            assert!(duration(text).is_err(), "{text}");
        }
    }
}

//! `convert --journal`: a copy that goes on after an interruption.
//!
//! The copy is made in pieces (`vellum_jobs::resume`), and a journal beside the target says
//! how far everything is in its place. Whoever comes with the same sources, the same
//! arguments and the same target later goes on from there.
//!
//! Why that is safe, whatever the interruption is (Ctrl-C, `kill -9`, the power):
//! - The journal is replaced as a whole: written under another name, made durable, renamed.
//!   It says no more than what was durable in the target before, as every piece ends with
//!   a flush. (The cache mode `unsafe`, which has no flushes, is refused.)
//! - What lies behind that place is written once more, whatever is there.
//! - The journal of a new target is begun after the target is durable. It says the size of that, which
//!   some formats round up, and a target of another size is refused.
//! - Whatever of this program opens the target to change it ends the journal first, be it by another name or a data file or
//!   an extent alone: all files of the target are marked (`vellum_storage::copy_journal`), and known by their numbers. Where the file
//!   system has no extended attributes, the target has to be one file, and it is by its name that the journal is found.
//!   A target with several names of its own is refused. Other programs do not know
//!   of that: what was copied is looked at here and there, and a target that is another image by now is refused.
//! - A qcow2 target that was not closed may have clusters that are counted and not used.
//!   They are given back first, and a target with any contradiction is refused.
//! - The journal is locked as long as the copy runs, so that nobody else goes on with it,
//!   and whoever changes the target holds its locks as for any image.
//! - Sources are known by the versions of all files of their chains. What has none (a block device) is refused.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};
use vellum::qcow2::check::{CheckOptions, Fix, repair};
use vellum::qcow2::read_header;
use vellum::{BlockDevice, Error, Storage};
use vellum_format::features::Incompatible;
use vellum_graph::layer_files::layer_files;
use vellum_jobs::copy::{CopyOptions, Observer};
use vellum_jobs::resume::{PieceError, copy_in_pieces, is_in_place};
use vellum_options::CacheMode;
use vellum_options::create_options::CreateSettings;
use vellum_storage::{FileOptions, FileStorage, SourceVersion};

use super::check::{CHECKSUMS_GIVEN_UP, has_checksums};
use super::command::{Command, Failure, Outcome, cache_mode, fail, open_failure};
use super::convert::{copy_failure, copy_options, make_target, open_target, target_settings};
use super::convert_args::Arguments;
use super::convert_onto_source;
use super::note::{Note, claim_journal};
use super::target_files::TargetFiles;
use super::unfinished::Unfinished;
use crate::progress::Progress;
use crate::size::human;
use crate::{hint, report};

/// Bytes of the disk between two entries of the journal; whole clusters of any size.
const PIECE_BYTES: u64 = 256 << 20;
const VERSION: u64 = 3;
const SECTOR_BYTES: u64 = 512;

/// Copies the sources, from where an earlier copy has ended.
pub async fn convert(
    command: Command<'_>,
    arguments: &Arguments,
    format: &str,
    target_name: &str,
    sources: &[Arc<dyn BlockDevice>],
    unfinished: &Unfinished,
) -> Outcome {
    check(arguments)?;
    let cache = match &arguments.target_cache {
        Some(name) => cache_mode("cache", name)?,
        None => CacheMode::default(),
    };
    if cache == CacheMode::UNSAFE {
        return fail("--journal needs a target that can be flushed, not -t unsafe");
    }
    let identity = identity(arguments, format, sources).await?;
    let settings = target_settings(arguments, format, target_name, sources)?;
    if settings.text("backing_file").is_some() {
        return fail("--journal is not possible with a backing file");
    }
    convert_onto_source::refuse_names(sources, [target_name])?;
    let files = TargetFiles::of(target_name, format, &settings)?;
    let mut journal = Journal::claim(target_name, files)?;
    let (start_bytes, size_bytes) = match journal.go_on(&identity, target_name)? {
        Some(entry) => {
            if format == "qcow2" {
                give_back_leaks(&journal.files.main().to_string_lossy()).await?;
            }
            report::info(format_args!("going on at {}", human(entry.done_bytes)));
            (entry.done_bytes, entry.size_bytes)
        }
        None => {
            begin(format, target_name, &settings, &mut journal, &identity).await?;
            (0, None)
        }
    };
    let target = open_target(arguments, format, target_name, cache).await?;
    unfinished.is_gone_on_with();
    journal.check_marks(target_name)?;
    let source_bytes: u64 = sources.iter().map(|source| source.size_bytes()).sum();
    let total_bytes = source_bytes.next_multiple_of(SECTOR_BYTES);
    let target_bytes = target.size_bytes();
    journal.check_size(target_name, target_bytes, size_bytes, total_bytes)?;
    if !is_in_place(sources, &target, start_bytes).await? {
        return fail(format!(
            "'{target_name}' has not what '{}' says was copied: it was written to since; remove that to \
             begin anew",
            journal.path().display()
        ));
    }
    let options = CopyOptions {
        start_bytes,
        len_bytes: Some(total_bytes),
        ..copy_options(arguments, &target, false)
    };
    let mut progress = Progress::new(command.program, arguments.progress, arguments.quiet, 1.0);
    let done = |done_bytes| {
        journal.write(&identity, done_bytes, Some(target_bytes))?;
        progress.show(done_bytes, total_bytes);
        Ok(())
    };
    let mut warnings = Warnings {
        quiet: arguments.quiet,
    };
    let copied = copy_in_pieces(sources, &target, &options, PIECE_BYTES, &mut warnings, done).await;
    progress.end();
    copied.map_err(|error| failure(error, target_name, total_bytes))?;
    target.close().await?;
    journal.remove()?;
    unfinished.is_done();
    Ok(0)
}

fn failure(error: PieceError<Failure>, target_name: &str, total_bytes: u64) -> Failure {
    match error {
        PieceError::Copy(error) => {
            let left_bytes = total_bytes.saturating_sub(error.offset_bytes);
            hint::about_space(target_name, &error.cause, Some(left_bytes));
            copy_failure(error)
        }
        PieceError::Flush(error) => Failure::from(error),
        PieceError::Told(failure) => failure,
    }
}

/// Makes a new target, and a journal that speaks of it; which is removed where that fails.
async fn begin(
    format: &str,
    target_name: &str,
    settings: &CreateSettings,
    journal: &mut Journal,
    identity: &Value,
) -> Result<(), Failure> {
    let made = make_target(target_name, format, settings).await;
    let begun = made.and_then(|()| journal.begin(identity));
    if begun.is_err() {
        // The first error is the one to tell.
        let _ = journal.remove();
    }
    begun
}

fn check(arguments: &Arguments) -> Result<(), Failure> {
    let refusals = [
        (arguments.no_create, "-n"),
        (arguments.target_image_opts, "--target-image-opts"),
        (arguments.out_of_order, "-W"),
        (arguments.bitmaps, "--bitmaps"),
        (arguments.salvage, "--salvage"),
        (arguments.source_image_opts, "--image-opts"),
        (arguments.backing.is_some(), "-B"),
    ];
    match refusals.into_iter().find(|(is_set, _)| *is_set) {
        Some((_, option)) => fail(format!("--journal is not possible with {option}")),
        None => Ok(()),
    }
}

/// Everything that decides what the target becomes.
async fn identity(
    arguments: &Arguments,
    format: &str,
    sources: &[Arc<dyn BlockDevice>],
) -> Result<Value, Failure> {
    let mut files = Vec::new();
    for source in sources {
        let mut next = Some(source.clone());
        while let Some(device) = next {
            let info = device.info();
            let storages = layer_files(&*device);
            let mut versions = Vec::new();
            if storages.is_empty() {
                match SourceVersion::of_path(Path::new(&info.name)).await {
                    SourceVersion::Known(version) => versions.push(json!([info.name, version])),
                    SourceVersion::Unknown => return unknown_source(&info.name),
                }
            }
            for storage in storages {
                match SourceVersion::of_storage(&*storage).await {
                    SourceVersion::Known(version) => {
                        versions.push(json!([storage.name(), version]))
                    }
                    SourceVersion::Unknown => return unknown_source(storage.name()),
                }
            }
            files.push(json!({
                "format": info.format,
                "virtual-size": device.size_bytes(),
                "files": versions,
            }));
            next = device.backing();
        }
    }
    Ok(json!({
        "sources": files,
        "count": sources.len(),
        "snapshot": arguments.source_snapshot,
        "format": format,
        "options": arguments.target_options,
        "compress": arguments.compress,
        "compression": format!("{:?}", arguments.compression),
        "sparse": arguments.sparse_bytes,
    }))
}

fn unknown_source<T>(name: &str) -> Result<T, Failure> {
    fail(format!(
        "--journal needs sources whose changes are noticed, and the version of '{name}' is unknown: it is not a regular \
         file, it was changed a moment ago (the same command works in some seconds), or its time stamp lies in the \
         future ('touch' it)"
    ))
}

/// Refuses a target that has another name: where it cannot be marked, nobody who opens it by that can know of the journal.
fn refuse_other_names(target_name: &str, target: &Path) -> Result<(), Failure> {
    match std::fs::metadata(target) {
        Ok(file) if file.is_file() && file.nlink() > 1 => fail(format!(
            "--journal needs a target with one name, and the file '{target_name}' has {}",
            file.nlink()
        )),
        _ => Ok(()),
    }
}

/// Gives back what an image that was not closed holds without use.
pub(super) async fn give_back_leaks(name: &str) -> Result<(), Failure> {
    // With the locks of a writer: whoever else has the target open is in the way.
    let opened = FileStorage::open_patiently(name, &FileOptions::default()).await;
    let storage: Arc<dyn Storage> = opened.map_err(|error| open_failure(name, &error))?;
    let header = read_header(&storage).await?;
    // Refcounts that may be late are made anew, as by whoever opens such an image.
    let fix = match header.incompatible.contains(Incompatible::DIRTY) {
        true => Fix::All,
        false => Fix::Leaks,
    };
    let had_checksums = has_checksums(&storage).await;
    let report = repair(storage, fix, &CheckOptions::default()).await?;
    if had_checksums {
        report::eprint_line(CHECKSUMS_GIVEN_UP);
    }
    match report.corruptions + report.check_errors {
        0 => Ok(()),
        count => fail(format!(
            "'{name}' has {count} contradictions in its metadata: it was not only interrupted"
        )),
    }
}

/// The file that tells how far a copy is. It is locked by the one who makes the copy.
struct Journal {
    note: Note,
    /// The files that it speaks of.
    files: TargetFiles,
    /// What they are marked with, if they can be.
    mark: Option<String>,
}

/// What it says.
struct Entry {
    identity: Value,
    target: Value,
    mark: Option<String>,
    done_bytes: u64,
    /// Of the target; nobody has looked yet where nothing is said.
    size_bytes: Option<u64>,
}

impl Journal {
    /// Takes the journal of a target, new and empty if there is none.
    fn claim(target_name: &str, files: TargetFiles) -> Result<Journal, Failure> {
        refuse_other_names(target_name, files.main())?;
        let note = claim_journal(target_name, files.main())?;
        Ok(Journal {
            note,
            files,
            mark: None,
        })
    }

    /// What it says, if that is of the same copy and counts still.
    fn go_on(&mut self, identity: &Value, target: &str) -> Result<Option<Entry>, Failure> {
        let Some(entry) = self.read()? else {
            return Ok(None);
        };
        entry.check(identity, target, self)?;
        self.mark.clone_from(&entry.mark);
        // Without its marks it was ended, and nobody who did that knew where it is.
        Ok(self.is_marked().then_some(entry))
    }

    fn is_marked(&self) -> bool {
        let mark = self.mark.as_deref();
        mark.is_none_or(|mark| self.files.are_marked(mark))
    }

    /// Refuses to write where somebody else has been since the journal was looked at, before the target's locks were had.
    fn check_marks(&self, target: &str) -> Result<(), Failure> {
        match self.is_marked() {
            true => Ok(()),
            false => fail(format!(
                "'{target}' was opened by somebody else to be changed; the same command begins anew"
            )),
        }
    }

    fn path(&self) -> &Path {
        self.note.path()
    }

    /// What it says; an empty one, nothing.
    fn read(&self) -> Result<Option<Entry>, Failure> {
        let text = self.note.text()?;
        if text.is_empty() {
            return Ok(None);
        }
        let value: Value = serde_json::from_str(&text).unwrap_or(Value::Null);
        match value["done"].as_u64() {
            Some(done_bytes) if value["version"] == VERSION => Ok(Some(Entry {
                identity: value["copy"].clone(),
                target: value["target"].clone(),
                mark: value["mark"].as_str().map(str::to_owned),
                done_bytes,
                size_bytes: value["size"].as_u64(),
            })),
            _ => fail(format!(
                "'{}' is no journal of a copy; remove it to begin anew",
                self.path().display()
            )),
        }
    }

    /// Speaks of a new target, once that is there durably.
    fn begin(&mut self, identity: &Value) -> Result<(), Failure> {
        self.mark = self.files.mark()?;
        let durable = self.note.sync_folder();
        durable.or_else(|error| self.note.fail("begin", &error))?;
        self.write(identity, 0, None)
    }

    /// Says that everything up to `done_bytes` is in its place, durably, and how large the target is.
    fn write(
        &self,
        identity: &Value,
        done_bytes: u64,
        size_bytes: Option<u64>,
    ) -> Result<(), Failure> {
        let value = json!({
            "version": VERSION,
            "copy": identity,
            "target": self.files.identity(),
            "mark": self.mark,
            "done": done_bytes,
            "size": size_bytes,
        });
        self.note.replace(&value.to_string())
    }

    /// A target of another size than before has lost what the journal says is there.
    fn check_size(
        &self,
        target: &str,
        found_bytes: u64,
        before_bytes: Option<u64>,
        needed_bytes: u64,
    ) -> Result<(), Failure> {
        match before_bytes {
            Some(before_bytes) if found_bytes != before_bytes => fail(format!(
                "'{target}' has not the size that '{}' speaks of; remove that to begin anew",
                self.path().display()
            )),
            _ if found_bytes < needed_bytes => fail("output file is smaller than input file"),
            _ => Ok(()),
        }
    }

    fn remove(&self) -> Result<(), Failure> {
        self.note.remove()?;
        self.files.unmark();
        Ok(())
    }
}

impl Entry {
    /// Refuses to go on with another copy, or in other files.
    fn check(&self, identity: &Value, target: &str, journal: &Journal) -> Result<(), Failure> {
        let path = journal.path().display();
        if self.identity != *identity {
            return fail(format!(
                "The sources or the arguments are not those of the copy that '{path}' speaks of; \
                 remove it to begin anew"
            ));
        }
        match journal.files.identity() {
            Some(found) if found == self.target => Ok(()),
            _ => fail(format!(
                "'{target}' is not the file that '{path}' speaks of; remove that to begin anew"
            )),
        }
    }
}

/// Tells what could not be read.
struct Warnings {
    quiet: bool,
}

impl Observer for Warnings {
    fn unknown(&mut self, source_offset_bytes: u64, error: &Error) {
        if !self.quiet {
            let why = report::error_text(error);
            report::warning(format_args!(
                "error while reading block status at offset {source_offset_bytes}: {why}"
            ));
        }
    }

    fn unreadable(&mut self, offset_bytes: u64, error: &Error) {
        if !self.quiet {
            let why = report::error_text(error);
            report::warning(format_args!(
                "error while reading offset {offset_bytes}: {why}"
            ));
        }
    }
}

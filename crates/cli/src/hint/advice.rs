//! What to do about an error, a line for each kind that is known.

use std::fmt::Display;
use std::io::IsTerminal;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Mutex, MutexGuard};
use vellum::{Error, ErrorKind};
use vellum_graph::probe::{PROBE_BYTES, Probed, probe};
use vellum_options::similar::closest;
use vellum_storage::lock::WaitReason;

use crate::getopt::OptionSpec;
use crate::report;
use crate::size::human;
use crate::style::{Colour, Style};
use crate::terminal::{harmless, quoted};

use super::{locks, words};

fn is_wanted() -> bool {
    report::is_own() && std::io::stderr().is_terminal()
}

/// Gives a hint, where hints are wanted.
pub fn give(text: &str) {
    if is_wanted() {
        let head = Style::for_errors().bold(Colour::Cyan, "hint:");
        report::eprint_line(&format!("{head} {}", harmless(text)));
    }
}

/// Whether the command that runs has an option to read what others write (`-U`).
static HAS_SHARE: AtomicBool = AtomicBool::new(false);

/// Sets the options of the command that runs; some hints depend on them.
pub fn know_options(options: &[OptionSpec]) {
    let has_share = options.iter().any(|option| option.short == Some('U'));
    HAS_SHARE.store(has_share, Ordering::Relaxed);
}

/// Tells of a wait for the locks of a process that was killed.
pub fn about_wait(waiting: WaitReason, name: &str) {
    match waiting {
        WaitReason::Begins if is_wanted() => report::eprint_line(&format!(
            "'{}' is locked, by no process that lives: waiting until what a killed one asked \
             the system for is done",
            harmless(name)
        )),
        WaitReason::Begins => {}
        WaitReason::GivenUp => prepared().push(format!(
            "no living process seems to hold the locks of '{name}': if one was killed, the \
             system is still at work for it; try again later"
        )),
    }
}

/// What will be said after the next error.
static PREPARED: Mutex<Vec<String>> = Mutex::new(Vec::new());

fn prepared() -> MutexGuard<'static, Vec<String>> {
    PREPARED.lock()
}

/// Gives a hint after the next error.
pub fn later(text: impl Into<String>) {
    prepared().push(text.into());
}

/// A raw image that was made under a name of another format, because none was asked for: what
/// QEMU's programs do, and nobody expects.
pub fn about_raw(name: &str, option: &str) {
    let extension = Path::new(name).extension().and_then(|text| text.to_str());
    if matches!(extension, Some("qcow2" | "qcow" | "luks")) {
        let format = extension.unwrap_or_default().replace("qcow2", "qcow");
        let format = format.replace("qcow", "qcow2");
        give(&format!(
            "'{name}' is a raw image: {option} {format} makes one of the format that its name says"
        ));
    }
}

/// Gives what hints there are about an error that was just printed.
pub fn about(message: &str) {
    if is_wanted() {
        let mut given = hints(message);
        given.append(&mut prepared());
        given.iter().for_each(|hint| give(hint));
    }
}

/// Lists the subcommands that there are.
static SUBCOMMANDS: OnceLock<fn() -> Vec<String>> = OnceLock::new();

/// Sets what lists the subcommands; the first call decides. Hints cannot ask the tools
/// themselves, which all use hints.
pub fn set_subcommands(list: fn() -> Vec<String>) {
    let _ = SUBCOMMANDS.set(list);
}

/// A subcommand that does not exist.
pub fn about_subcommand(word: &str) {
    let known = SUBCOMMANDS.get().map_or_else(Vec::new, |list| list());
    about_word(word, known.iter().map(String::as_str).chain(["help"]));
}

/// A word that is none of those there are.
pub fn about_word<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) {
    if let Some(name) = closest(word, known) {
        give(&format!("did you mean '{name}'?"));
    }
}

/// An option that does not exist, by what the option parser says of it.
pub fn about_option(error: impl Display, options: &[OptionSpec]) {
    let error = error.to_string();
    let name = after(&error, "unrecognized option '--").and_then(|word| word.split('=').next());
    let known = options.iter().filter_map(|option| option.long);
    if let Some(name) = name.and_then(|name| closest(name, known)) {
        give(&format!("did you mean '--{name}'?"));
    }
}

/// Prepares a hint for `error`, which is going to be reported, if it says that there is no space
/// for `target`; `missing_bytes` is how much is still to be written, if that is known.
pub fn about_space(target: &str, error: &Error, missing_bytes: Option<u64>) {
    if error.kind() != ErrorKind::NoSpace {
        return;
    }
    prepared().extend(match error.errno() {
        libc::EFBIG => Some(format!(
            "the limit of file sizes is reached: 'ulimit -f' shows that of this process, if the \
             file system of '{target}' allows longer files"
        )),
        _ if has_fixed_length(target) => Some(format!(
            "'{target}' is full: extend it and try again ('vellum measure' reports how long it must be)"
        )),
        _ => no_space(target, missing_bytes),
    });
}

/// Whether `target` is a device or an export, which no room in a file system makes longer.
fn has_fixed_length(target: &str) -> bool {
    let is_device = |kind: std::fs::Metadata| kind.file_type().is_block_device();
    target.starts_with("nbd") || std::fs::metadata(target).is_ok_and(is_device)
}

/// Prepares a hint for `error`, which is going to be reported, if it says that a sealed image is
/// not as it was: QEMU's words for a read that fails say nothing of that.
pub fn about_seal(error: &Error) {
    if error.operation() == "verify" {
        let why = error.message();
        prepared().push(format!("{why} ('vellum verify' names all such places)"));
    }
}

fn no_space(target: &str, missing_bytes: Option<u64>) -> Option<String> {
    let folder = match Path::new(target).parent()? {
        folder if folder.as_os_str().is_empty() => Path::new("."),
        folder => folder,
    };
    let stat = rustix::fs::statvfs(folder).ok()?;
    let free = human(stat.f_bavail.saturating_mul(stat.f_frsize));
    let folder = folder.display();
    Some(match missing_bytes {
        Some(missing) => format!(
            "up to {} more are needed, and the file system of '{folder}' has {free} free",
            human(missing)
        ),
        None => format!("the file system of '{folder}' has {free} free: make room and try again"),
    })
}

/// How an error goes on that is not about the file that was named, but about one below it.
const BELOW: &str = ": Could not open backing file";

/// An image whose chain does not end where it should; `head` is what was said before that.
fn broken_chain(head: &str) -> Option<String> {
    let name = match head.strip_suffix('\'') {
        Some(quoted) => quoted.rsplit_once('\'')?.1,
        None => head.rsplit_once("device ")?.1,
    };
    let name = std::fs::metadata(name).is_ok().then(|| quoted(name))?;
    Some(format!(
        "'vellum info --backing-chain {name}' shows which image names the file that is missing, \
         and how to name another one"
    ))
}

fn missing_folder(path: &Path) -> Option<String> {
    let folder = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty())?;
    let gone = !folder.exists();
    gone.then(|| format!("there is no folder '{}'", folder.display()))
}

/// What can be told from an error's text and from the files that it names.
fn hints(message: &str) -> Vec<String> {
    let mut hints = Vec::new();
    if message.contains("Is another process using the image") {
        // What is made or changed cannot be shared.
        let may_share = HAS_SHARE.load(Ordering::Relaxed) && message.starts_with("Could not open");
        hints.extend(between(message, '[', ']').and_then(|path| lock_holders(path, may_share)));
    }
    if let Some((head, _)) = message.split_once(BELOW) {
        hints.extend(broken_chain(head));
    } else if let Some(name) = after(message, "Could not create '")
        && message.contains("No such file or directory")
    {
        hints.extend(missing_folder(Path::new(name)));
    } else if let Some(name) = after(message, "Could not open '") {
        if message.contains("No such file or directory") {
            hints.extend(similar_file(name));
        } else if message.contains("Image is not in qcow2 format") {
            hints.extend(looks_like(name));
        }
    }
    hints.extend(words::meant(message));
    if message.contains("without backing format")
        || message.contains("requires explicit backing format")
    {
        hints.push(
            "name it with -F: '-F qcow2' or '-F raw'; 'vellum info FILE' tells which it is".into(),
        );
    }
    hints
}

/// What stands between `start` and the next quote.
pub(crate) fn after<'a>(message: &'a str, start: &str) -> Option<&'a str> {
    message.split_once(start)?.1.split('\'').next()
}

fn between(message: &str, open: char, close: char) -> Option<&str> {
    message.split_once(open)?.1.split(close).next()
}

fn lock_holders(path: &str, may_share: bool) -> Option<String> {
    let holders = locks::holders(Path::new(path)).ok()?;
    let shown: Vec<String> = holders
        .iter()
        .map(|holder| format!("{} (process {})", holder.program, holder.process))
        .collect();
    let share = match may_share {
        true => "; to look at it nevertheless, read-only: -U",
        false => "",
    };
    match shown.is_empty() {
        true => None,
        false => Some(format!("'{path}' is locked by {}{share}", shown.join(", "))),
    }
}

fn similar_file(name: &str) -> Option<String> {
    let path = Path::new(name);
    let folder = match path.parent() {
        Some(folder) if folder.as_os_str().is_empty() => Path::new("."),
        Some(folder) => folder,
        None => return None,
    };
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Some(format!("there is no folder '{}'", folder.display()));
    };
    let names: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .take(10_000)
        .collect();
    let wanted = path.file_name()?.to_str()?;
    let found = closest(wanted, names.iter().map(String::as_str))?;
    Some(format!(
        "did you mean '{}'?",
        path.with_file_name(found).display()
    ))
}

fn looks_like(name: &str) -> Option<String> {
    use std::io::Read;
    let kind = std::fs::metadata(name).ok()?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return None;
    }
    let mut start = Vec::new();
    // Without locks: a hint is a guess, and what is read is not used.
    let file = std::fs::File::open(name).ok()?;
    file.take(PROBE_BYTES as u64).read_to_end(&mut start).ok()?;
    let format = match probe(&start) {
        Probed::Qcow2 => return None,
        Probed::Luks => "luks",
        Probed::Foreign(format) => format,
        Probed::Raw => "raw",
    };
    Some(format!("'{name}' looks like {format}: name that with -f"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_hints() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("disk.qcow2"), b"nothing").unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        let cases = [
            (
                format!(
                    "Could not open '{}': No such file or directory",
                    path("disk.qcow")
                ),
                format!("did you mean '{}'?", path("disk.qcow2")),
            ),
            (
                format!(
                    "Could not open '{}': Image is not in qcow2 format",
                    path("disk.qcow2")
                ),
                format!("'{}' looks like raw: name that with -f", path("disk.qcow2")),
            ),
            (
                "x: Invalid parameter 'clustersize'".to_owned(),
                "did you mean 'cluster_size'? '-o help' lists the options".to_owned(),
            ),
        ];
        for (message, hint) in cases {
            assert_eq!(hints(&message), [hint], "{message}");
        }
        assert!(hints("x: Invalid parameter 'frobnicate'").is_empty());
        assert!(hints("").is_empty());
    }
}

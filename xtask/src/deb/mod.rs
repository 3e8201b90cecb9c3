//! `cargo xtask deb`: a Debian package that takes the place of `qemu-utils`.
//!
//! The program is `/usr/bin/vellum`. The names of QEMU's programs are alternatives that
//! lead to it, so that another package may offer them as well; Debian's `qemu-utils`, which
//! has files by these names, cannot be there at the same time, and what depends on it is
//! satisfied. Manuals and completions are those that the program writes itself. The daemon as a service
//! is in `service.rs`.
//!
//! `--check ROOT` installs the package into a Debian system below ROOT (made by
//! `debootstrap --variant=minbase`) and runs scripts of real use in it. A real qemu-utils
//! that is there makes way, as it would elsewhere.

mod service;

use std::collections::BTreeSet;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use lexopt::{Arg, ValueExt};

use crate::process;
use crate::workspace::Workspace;

/// What is done in the system that the package was installed into.
const USE: &str = include_str!("use.sh");
/// What is done if that system has libguestfs's tools.
const USE_GUESTFS: &str = include_str!("use_guestfs.sh");
/// The names that are alternatives.
const NAMES: [&str; 4] = ["qemu-img", "qemu-io", "qemu-nbd", "qemu-storage-daemon"];
/// The version of qemu-utils whose programs these are.
const QEMU_VERSION: &str = "1:10.0.2";

struct Options {
    /// A program to package instead of a release build.
    vellum: Option<PathBuf>,
    /// A system to try the package in.
    check: Option<PathBuf>,
}

/// The task.
pub fn run(mut arguments: lexopt::Parser) -> Result<()> {
    let mut options = Options {
        vellum: None,
        check: None,
    };
    while let Some(argument) = arguments.next()? {
        match argument {
            Arg::Long("vellum") => options.vellum = Some(arguments.value()?.parse()?),
            Arg::Long("check") => options.check = Some(arguments.value()?.parse()?),
            other => return Err(other.unexpected().into()),
        }
    }
    let workspace = Workspace::locate()?;
    let program = match options.vellum {
        Some(program) => program,
        None => workspace.build_vellum()?,
    };
    let package = build(&workspace, &program)?;
    println!("{}", package.display());
    match options.check {
        Some(root) => check(&package, &root),
        None => Ok(()),
    }
}

/// Lays the package out and packs it.
fn build(workspace: &Workspace, program: &Path) -> Result<PathBuf> {
    let root = workspace.fresh_folder("deb")?;
    let tree = root.join("vellum");
    install(&tree.join("usr/bin/vellum"), program)?;
    for name in NAMES {
        let link = tree.join("usr/lib/vellum/bin").join(name);
        make_parent(&link)?;
        symlink("../../../bin/vellum", &link)?;
    }
    manuals(program, &tree)?;
    completions(program, &tree)?;
    documents(workspace, &tree)?;
    service::install(workspace, &tree)?;
    let version = version(workspace)?;
    let architecture = process::output(Command::new("dpkg").arg("--print-architecture"))?;
    let architecture = architecture.trim();
    control(&tree, program, &version, architecture)?;
    let package = root.join(format!("vellum_{version}_{architecture}.deb"));
    process::output(
        process::program("dpkg-deb")?
            .args(["--root-owner-group", "--build", "-Zxz"])
            .arg(&tree)
            .arg(&package),
    )?;
    Ok(package)
}

fn make_parent(path: &Path) -> Result<()> {
    let parent = path.parent().context("a path in a folder")?;
    std::fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))
}

fn install(to: &Path, from: &Path) -> Result<()> {
    make_parent(to)?;
    std::fs::copy(from, to).with_context(|| format!("cannot copy {}", from.display()))?;
    std::fs::set_permissions(to, PermissionsExt::from_mode(0o755))?;
    // The symbols of a debug build are larger than all else.
    process::output(process::program("strip")?.arg(to)).map(drop)
}

fn write(path: &Path, text: &str) -> Result<()> {
    make_parent(path)?;
    std::fs::write(path, text)?;
    Ok(std::fs::set_permissions(
        path,
        PermissionsExt::from_mode(0o644),
    )?)
}

/// The program's own manuals, packed. Those of QEMU's names wait under another one for
/// the alternatives.
fn manuals(program: &Path, tree: &Path) -> Result<()> {
    let pages = tree.join("usr/share/man/man1");
    std::fs::create_dir_all(&pages)?;
    process::output(Command::new(program).arg("man").arg(&pages))?;
    let mut names = Vec::new();
    for entry in std::fs::read_dir(&pages)? {
        names.push(entry?.path());
    }
    for page in names {
        let name = page.file_name().context("a name")?.to_string_lossy();
        let page = match name.starts_with("qemu-") {
            true => {
                let renamed = pages.join(format!("vellum-{name}"));
                std::fs::rename(&page, &renamed)?;
                renamed
            }
            false => page.clone(),
        };
        process::output(Command::new("gzip").args(["-9n"]).arg(&page))?;
    }
    Ok(())
}

fn completions(program: &Path, tree: &Path) -> Result<()> {
    let script = |shell: &str, name: &str| {
        process::output(Command::new(program).args(["completions", shell, name]))
    };
    for name in ["vellum"].iter().chain(&NAMES) {
        let bash = tree
            .join("usr/share/bash-completion/completions")
            .join(name);
        write(&bash, &script("bash", name)?)?;
        let zsh = tree.join("usr/share/zsh/vendor-completions");
        write(&zsh.join(format!("_{name}")), &script("zsh", name)?)?;
        let fish = tree.join("usr/share/fish/vendor_completions.d");
        write(&fish.join(format!("{name}.fish")), &script("fish", name)?)?;
    }
    Ok(())
}

fn documents(workspace: &Workspace, tree: &Path) -> Result<()> {
    let folder = tree.join("usr/share/doc/vellum");
    let read = |name: &str| std::fs::read_to_string(workspace.root.join(name));
    let copyright = format!(
        "Vellum is licensed under the Apache License 2.0 or the MIT license, as you like.\n\n{}\n{}",
        read("LICENSE-MIT")?,
        "On Debian systems the Apache License 2.0 is in /usr/share/common-licenses/Apache-2.0."
    );
    write(&folder.join("copyright"), &copyright)?;
    write(&folder.join("changelog"), &read("CHANGELOG.md")?)?;
    process::output(
        Command::new("gzip")
            .args(["-9n"])
            .arg(folder.join("changelog")),
    )
    .map(drop)
}

/// The version of the workspace.
fn version(workspace: &Workspace) -> Result<String> {
    let manifest = std::fs::read_to_string(workspace.root.join("Cargo.toml"))?;
    let manifest: toml::Table = manifest.parse()?;
    let version = manifest["workspace"]["package"]["version"].as_str();
    Ok(version.context("a version")?.to_owned())
}

/// OpenSSL is only recommended: it is loaded when TLS is asked for.
fn control(tree: &Path, program: &Path, version: &str, architecture: &str) -> Result<()> {
    let folder = tree.join("DEBIAN");
    let depends = depends(program)?.join(", ");
    let text = format!(
        "Package: vellum\nVersion: {version}\nArchitecture: {architecture}\n\
         Maintainer: The Vellum developers <vellum@example.invalid>\nSection: otherosfs\n\
         Priority: optional\nInstalled-Size: {}\nDepends: {depends}\n\
         Recommends: libssl3 | libssl3t64\n\
         Provides: qemu-utils (= {QEMU_VERSION})\nConflicts: qemu-utils\nReplaces: qemu-utils\n\
         Description: disk images: qcow2 and raw, in the place of qemu-utils\n \
         One program that makes, copies, checks, serves and looks into disk images. By the\n \
         names qemu-img, qemu-io, qemu-nbd and qemu-storage-daemon, which are alternatives,\n \
         it takes the arguments of QEMU's programs and prints what they print.\n",
        size_kib(tree)?
    );
    write(&folder.join("control"), &text)?;
    write(&folder.join("conffiles"), service::CONFFILES)?;
    let scripts = [("postinst", after_install()), ("prerm", before_removal())];
    for (name, text) in scripts {
        write(&folder.join(name), &text)?;
        std::fs::set_permissions(folder.join(name), PermissionsExt::from_mode(0o755))?;
    }
    Ok(())
}

fn after_install() -> String {
    let mut text = String::from("#!/bin/sh\nset -e\nif [ \"$1\" = configure ]; then\n");
    for name in NAMES {
        text.push_str(&format!(
            "    update-alternatives --quiet --install /usr/bin/{name} {name} \
             /usr/lib/vellum/bin/{name} 50 --slave /usr/share/man/man1/{name}.1.gz {name}.1.gz \
             /usr/share/man/man1/vellum-{name}.1.gz\n"
        ));
    }
    text + service::AFTER_INSTALL + "fi\n"
}

fn before_removal() -> String {
    let mut text = String::from("#!/bin/sh\nset -e\nif [ \"$1\" = remove ]; then\n");
    for name in NAMES {
        text.push_str(&format!(
            "    update-alternatives --quiet --remove {name} /usr/lib/vellum/bin/{name}\n"
        ));
    }
    text + service::BEFORE_REMOVAL + "fi\n"
}

/// The packages of the libraries that the program is linked with.
fn depends(program: &Path) -> Result<Vec<String>> {
    let linked = process::output(Command::new("ldd").arg(program))?;
    let mut packages = BTreeSet::new();
    for path in linked
        .split_whitespace()
        .filter(|word| word.starts_with('/'))
    {
        // Where /lib is a link, the list of files may have either name.
        let names = [
            path.to_owned(),
            format!("/usr{path}"),
            path.replacen("/usr", "", 1),
        ];
        let owner = names.iter().find_map(|name| {
            let found = process::output(Command::new("dpkg").args(["-S", name])).ok()?;
            Some(found.split(':').next()?.to_owned())
        });
        packages.insert(owner.with_context(|| format!("no package has {path}"))?);
    }
    let bytes = std::fs::read(program)?;
    let with_version = |package: String| match package.as_str() {
        "libc6" => format!("libc6 (>= {})", newest_glibc(&bytes)),
        _ => package,
    };
    Ok(packages.into_iter().map(with_version).collect())
}

/// The newest version of glibc among those that symbols of the program ask for.
fn newest_glibc(program: &[u8]) -> String {
    const MARK: &[u8] = b"GLIBC_2.";
    let minor = |rest: &[u8]| {
        let digits = rest.iter().take_while(|byte| byte.is_ascii_digit());
        let digits: String = digits.map(|byte| char::from(*byte)).collect();
        digits.parse::<u32>().ok()
    };
    let marks = program.windows(MARK.len()).enumerate();
    let versions = marks.filter(|(_, window)| *window == MARK);
    let newest = versions.filter_map(|(at, _)| minor(&program[at + MARK.len()..]));
    format!("2.{}", newest.max().unwrap_or(28))
}

fn size_kib(folder: &Path) -> Result<u64> {
    let mut total = 0;
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        total += match metadata.is_dir() {
            true => size_kib(&entry.path())?,
            false => metadata.len().div_ceil(1024),
        };
    }
    Ok(total)
}

/// Installs the package below `root` and uses it as scripts do.
fn check(package: &Path, root: &Path) -> Result<()> {
    ensure!(
        root.join("usr/bin/dpkg").exists(),
        "{} holds no Debian system; make one with: debootstrap --variant=minbase bookworm {0}",
        root.display()
    );
    let name = package.file_name().context("a name")?;
    std::fs::copy(package, root.join("tmp").join(name))?;
    std::fs::write(root.join("tmp/use.sh"), USE)?;
    let inside = |words: &[&str]| {
        let mut command = Command::new("chroot");
        process::run(as_inside(command.arg(root).args(words)))
    };
    let path = format!("/tmp/{}", name.to_string_lossy());
    inside(&["dpkg", "-i", &path])?;
    inside(&["sh", "-eu", "/tmp/use.sh"])?;
    if root.join("usr/bin/guestfish").exists() {
        check_guestfs(root)?;
    }
    // What depends on qemu-utils is left without it.
    inside(&["dpkg", "-r", "--force-depends", "vellum"])?;
    for name in NAMES {
        let left = root.join("usr/bin").join(name);
        // A file by that name is another package's, and stays.
        ensure!(!left.is_symlink(), "{} is left behind", left.display());
    }
    println!(
        "the package was installed, used and removed below {}",
        root.display()
    );
    Ok(())
}

fn as_inside(command: &mut Command) -> &mut Command {
    command
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .env("LC_ALL", "C")
}

/// Has libguestfs's tools make, change and copy images, some of which come from QEMU's
/// `qemu-img`, and asks that one what it thinks of all of them.
fn check_guestfs(root: &Path) -> Result<()> {
    let folder = root.join("tmp/guestfs");
    if folder.exists() {
        std::fs::remove_dir_all(&folder)?;
    }
    std::fs::create_dir(&folder)?;
    std::fs::write(folder.join("use.sh"), USE_GUESTFS)?;
    let real = |words: &[&str]| {
        let mut command = process::program("qemu-img")?;
        process::output(command.current_dir(&folder).args(words))
    };
    real(&["create", "-q", "-f", "qcow2", "real.qcow2", "128M"])?;
    let overlay = ["-b", "real.qcow2", "-F", "qcow2", "real-top.qcow2"];
    real(&[&["create", "-q", "-f", "qcow2"][..], &overlay].concat())?;
    // The tools need /proc, which goes away with the namespace that it is mounted in.
    let start = "mount -t proc proc \"$1/proc\"; exec chroot \"$1\" \
                 sh -euc 'cd /tmp/guestfs; . ./use.sh'";
    let mut command = process::program("unshare")?;
    command
        .args(["--mount", "sh", "-euc", start, "sh"])
        .arg(root);
    process::run(as_inside(&mut command))?;
    let mut checked = 0;
    for entry in std::fs::read_dir(&folder)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name.ends_with(".qcow2") {
            real(&["check", "-q", "-f", "qcow2", &name])?;
            checked += 1;
        }
    }
    ensure!(checked > 0, "no images are left in {}", folder.display());
    println!("QEMU's qemu-img finds nothing wrong with the {checked} images that they left");
    Ok(std::fs::remove_dir_all(&folder)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_glibc_is_found() {
        let program = b"..GLIBC_2.2.5\0GLIBC_2.34\0GLIBC_2.9\0GLIBC_2.\0";
        assert_eq!(newest_glibc(program), "2.34");
        assert_eq!(newest_glibc(b""), "2.28");
    }

    #[test]
    fn every_name_comes_and_goes() {
        for name in NAMES {
            assert!(after_install().contains(&format!("--install /usr/bin/{name} ")));
            assert!(before_removal().contains(&format!("--remove {name} ")));
        }
    }
}

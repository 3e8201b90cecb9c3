//! The programs and their tools.

use crate::getopt::OptionSpec;
use crate::spec::Spec;
use crate::{audit, bench, ctl, daemon, img, inspect, install, io, mount, nbd, oci, serve};

pub const COMPLETIONS: Spec = Spec {
    name: "completions",
    about: "Print completions for bash, zsh or fish",
    explains: "\
Prints a completion script for PROGRAM (vellum, or one of the programs whose names it
answers to).",
    usage: "bash|zsh|fish [PROGRAM]\n",
    closing: "\nFor example, in ~/.bashrc:  source <(vellum completions bash)\n",
    examples: "\
source <(vellum completions bash)
  in ~/.bashrc
vellum completions zsh > ~/.zfunc/_vellum
  in a folder of $fpath
vellum completions fish > ~/.config/fish/completions/vellum.fish
  once
",
    ..Spec::EMPTY
};

pub const MAN: Spec = Spec {
    name: "man",
    about: "Write manual pages into a folder",
    explains: "Writes manual pages, one for each tool, into a folder.",
    usage: "FOLDER\n",
    examples: "\
vellum man ~/.local/share/man/man1
  then: man vellum-convert
",
    ..Spec::EMPTY
};

/// A program or a tool of one.
#[derive(Debug, Clone)]
pub struct Tool {
    pub name: &'static str,
    pub spec: &'static Spec,
    pub options: Vec<OptionSpec>,
    pub subcommands: Vec<Tool>,
}

impl Tool {
    fn new(name: &'static str, spec: &'static Spec) -> Tool {
        Tool {
            name,
            spec,
            options: spec.options(),
            subcommands: Vec::new(),
        }
    }

    /// The option of a name without dashes.
    pub fn long(&self, name: &str) -> Option<&OptionSpec> {
        self.options.iter().find(|option| option.long == Some(name))
    }
}

/// The tools of `vellum` beside those of the image tool.
pub const OTHERS: &[&Spec] = &[
    &audit::SPEC,
    &bench::SPEC,
    &COMPLETIONS,
    &ctl::SPEC,
    &daemon::SPEC,
    &inspect::SPEC,
    &install::SPEC,
    &io::SPEC,
    &MAN,
    &mount::SPEC,
    &nbd::SPEC,
    &oci::SPEC,
    &serve::SPEC,
];

/// The subcommands of the image tool.
fn image_tools(is_own: bool) -> impl Iterator<Item = &'static Spec> {
    img::subcommands(is_own).map(|subcommand| &subcommand.spec)
}

/// The programs by the names that they answer to.
pub fn programs() -> Vec<Tool> {
    let tool = |spec: &'static Spec| Tool::new(spec.name, spec);
    // The short name is that of our own; QEMU's is `img bench`.
    let own = image_tools(true).filter(|spec| spec.name != "bench");
    let mut vellum = Tool::new("vellum", &img::SPEC);
    vellum.subcommands = own.chain(OTHERS.iter().copied()).map(tool).collect();
    vellum.subcommands.sort_by_key(|tool| tool.name);
    let mut qemu_img = Tool::new("qemu-img", &img::SPEC);
    qemu_img.subcommands = image_tools(false).map(tool).collect();
    vec![
        vellum,
        qemu_img,
        Tool::new("qemu-io", &io::SPEC),
        Tool::new("qemu-nbd", &nbd::SPEC),
        Tool::new("qemu-storage-daemon", &daemon::SPEC),
    ]
}

/// Every word that may follow `vellum`.
pub fn subcommand_names() -> Vec<String> {
    let vellum = programs().into_iter().next();
    let tools = vellum.map_or_else(Vec::new, |tool| tool.subcommands);
    tools.into_iter().map(|tool| tool.name.to_owned()).collect()
}

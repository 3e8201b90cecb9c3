//! The programs and their tools, with what their parsers and helps say.

use crate::getopt::Shape;
use crate::{audit, bench, ctl, daemon, img, inspect, io, mount, nbd, oci, serve};

/// A program or a tool of one.
#[derive(Debug, Clone)]
pub struct Tool {
    pub name: String,
    /// What it does, in a line.
    pub about: String,
    /// The same at length, or nothing.
    pub explains: String,
    pub options: Vec<Shape>,
    /// The help, from which the options are explained.
    pub help: String,
    pub subcommands: Vec<Tool>,
}

impl Tool {
    fn new(name: &str, about: &str, options: Vec<Shape>, help: impl Into<String>) -> Tool {
        Tool {
            name: name.to_owned(),
            about: about.to_owned(),
            explains: String::new(),
            options,
            help: help.into(),
            subcommands: Vec::new(),
        }
    }

    fn explained(self, explains: &str) -> Tool {
        Tool {
            explains: explains.to_owned(),
            ..self
        }
    }

    fn named(self, name: &str) -> Tool {
        Tool {
            name: name.to_owned(),
            ..self
        }
    }
}

/// What `--help` is everywhere, told where a help does not repeat it.
const HELP_OPTION: &str = "  -h, --help                print this help\n";
const AUDIT: &str = "Tell whether an image that nobody vouches for is safe to open";
const BENCH: &str = "Show what the choices of an image cost on this machine";
const CTL: &str = "Show and change what a running daemon serves";
const DAEMON: &str = "Serve the images that options describe (qemu-storage-daemon)";
const INSPECT: &str = "Show what is in an image, and what could be better";
const IO: &str = "Read and write single requests (qemu-io)";
const MOUNT: &str = "Show the disk in an image as a regular file";
const NBD: &str = "Serve an image over NBD (qemu-nbd)";
const OCI: &str = "Put a disk into a registry of containers, or get one from there";
const SERVE: &str = "Serve a disk over NBD, vhost-user and as a file, and print how to use it";
const IMAGES: &str = "Make, change, copy and look at disk images";

fn io_tool() -> Tool {
    Tool::new("io", IO, io::options(), io::USAGE)
}

fn nbd_tool() -> Tool {
    Tool::new("nbd", NBD, nbd::options(), nbd::help("vellum"))
}

fn daemon_tool() -> Tool {
    Tool::new("daemon", DAEMON, daemon::options(), daemon::help("vellum"))
}

/// The subcommands of the image tool.
fn image_tools(is_own: bool) -> Vec<Tool> {
    let tools = img::subcommands(is_own).map(|subcommand| {
        let help = format!("{HELP_OPTION}{}", img::help_text(subcommand.name));
        let options = (subcommand.options)();
        Tool::new(subcommand.name, subcommand.about, options, help)
    });
    tools.collect()
}

/// The programs by the names that they answer to.
pub fn programs() -> Vec<Tool> {
    let own = |name, about, options, help: &str| {
        Tool::new(name, about, options, format!("{HELP_OPTION}{help}"))
    };
    let mut tools = image_tools(true);
    // The short name is that of our own; QEMU's is `img bench`.
    tools.retain(|tool| tool.name != "bench");
    tools.extend([
        own("audit", AUDIT, audit::options(), audit::HELP).explained(audit::EXPLAINS),
        Tool::new("bench", BENCH, bench::options(), bench::help("vellum")),
        own("ctl", CTL, ctl::options(), ctl::HELP).explained(ctl::EXPLAINS),
        own("inspect", INSPECT, inspect::options(), inspect::HELP).explained(inspect::EXPLAINS),
        own("oci", OCI, oci::options(), oci::HELP).explained(oci::EXPLAINS),
        io_tool(),
        nbd_tool(),
        Tool::new("mount", MOUNT, mount::options(), mount::help("vellum")),
        Tool::new("serve", SERVE, serve::options(), serve::help("vellum")),
        daemon_tool(),
        Tool::new(
            "completions",
            "Print completions for a shell",
            Vec::new(),
            "",
        ),
        Tool::new(
            "install-links",
            "Make links by the names of QEMU's programs",
            Vec::new(),
            "",
        ),
        Tool::new("man", "Write manual pages into a folder", Vec::new(), ""),
    ]);
    tools.sort_by(|one, two| one.name.cmp(&two.name));
    let vellum = Tool::new("vellum", IMAGES, img::options(), img::OPTIONS_HELP);
    let qemu_img = Tool::new("qemu-img", IMAGES, img::options(), img::OPTIONS_HELP);
    vec![
        Tool {
            subcommands: tools,
            ..vellum
        },
        Tool {
            subcommands: image_tools(false),
            ..qemu_img
        },
        io_tool().named("qemu-io"),
        nbd_tool().named("qemu-nbd"),
        daemon_tool().named("qemu-storage-daemon"),
    ]
}

/// Every word that may follow `vellum`.
pub fn subcommand_names() -> Vec<String> {
    let vellum = programs().into_iter().next();
    let tools = vellum.map_or_else(Vec::new, |tool| tool.subcommands);
    tools.into_iter().map(|tool| tool.name).collect()
}

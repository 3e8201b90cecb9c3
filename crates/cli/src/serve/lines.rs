//! What users type, or write into a configuration, to use a disk that is served.

use serde_json::json;

/// A disk in one of the forms that are served.
#[derive(Debug, Clone, Copy)]
pub(super) enum Place<'a> {
    /// The NBD socket of this path, with the name of the export.
    Nbd { socket: &'a str, export: &'a str },
    /// The vhost-user socket of this path.
    VhostUser { socket: &'a str, queues: u16 },
    /// The regular file of this path.
    File { path: &'a str },
}

/// The lines for a disk, each with who takes it.
pub(super) fn lines(place: Place<'_>, read_only: bool) -> String {
    let (title, lines) = match place {
        Place::Nbd { socket, export } => (format!("NBD: {socket}"), nbd(socket, export, read_only)),
        Place::VhostUser { socket, queues } => (
            format!("vhost-user-blk: {socket} (the guest's memory must be shared)"),
            vhost_user(socket, queues, read_only),
        ),
        Place::File { path } => (format!("file: {path}"), file(path, read_only)),
    };
    let mut text = format!("{title}\n");
    for (client, line) in lines {
        text.push_str(&format!("  {:<17} {line}\n", format!("{client}:")));
    }
    text
}

type Lines = Vec<(&'static str, String)>;

fn nbd(socket: &str, export: &str, read_only: bool) -> Lines {
    let (path, name) = (qemu(socket), qemu(export));
    let on = if read_only { ",read-only=on" } else { "" };
    let named = match export.is_empty() {
        true => String::new(),
        false => format!(",export={name}"),
    };
    let uri = format!("nbd+unix:///{}?socket={}", percent(export), percent(socket));
    let element = match export.is_empty() {
        true => String::new(),
        false => format!(" name='{}'", xml(export)),
    };
    vec![
        ("URI", uri),
        (
            "QEMU",
            shell(&[
                "-blockdev",
                &format!(
                    "driver=nbd,node-name=disk,server.type=unix,server.path={path}{named}{on}"
                ),
                "-device",
                "virtio-blk-pci,drive=disk",
            ]),
        ),
        (
            "libvirt",
            format!(
                "<disk type='network' device='disk'><driver name='qemu' type='raw'/><source \
                 protocol='nbd'{element}><host transport='unix' socket='{}'/></source><target \
                 dev='vda' bus='virtio'/>{}</disk>",
                xml(socket),
                readonly_element(read_only)
            ),
        ),
    ]
}

fn vhost_user(socket: &str, queues: u16, read_only: bool) -> Lines {
    let path = qemu(socket);
    let chardev = format!("socket,id=vellum,path={path},reconnect-ms=200");
    let device = format!("vhost-user-blk-pci,chardev=vellum,num-queues={queues}");
    let memory = "memory-backend-memfd,id=mem,size=4G,share=on";
    let drive = json!({"drive_id": "vellum", "is_root_device": false, "socket": socket});
    let disk = format!("vhost_user=true,socket={socket},num_queues={queues},queue_size=128");
    let on = if read_only { ",readonly=on" } else { "" };
    vec![
        (
            "QEMU",
            shell(&[
                "-m",
                "4G",
                "-object",
                memory,
                "-machine",
                "q35,memory-backend=mem",
                "-chardev",
                &chardev,
                "-device",
                &device,
            ]),
        ),
        (
            "cloud-hypervisor",
            shell(&[
                "--memory",
                "size=4G,shared=on",
                "--disk",
                &format!("{disk}{on}"),
            ]),
        ),
        (
            "Firecracker",
            format!("PUT /drives/vellum {drive} (one queue)"),
        ),
        // Nothing says read-only there, which libvirt refuses: the device says so to the guest.
        (
            "libvirt",
            format!(
                "<memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking> and \
                 <disk type='vhostuser' device='disk'><driver name='qemu' type='raw' \
                 queues='{queues}'/><source type='unix' path='{}'><reconnect enabled='yes' \
                 timeout='1'/></source><target dev='vda' bus='virtio'/></disk>",
                xml(socket)
            ),
        ),
    ]
}

fn file(path: &str, read_only: bool) -> Lines {
    let on = if read_only { ",readonly=on" } else { "" };
    let drive = json!({
        "drive_id": "vellum",
        "is_root_device": false,
        "is_read_only": read_only,
        "path_on_host": path,
    });
    vec![
        (
            "QEMU",
            shell(&[
                "-drive",
                &format!("file={},format=raw,if=virtio{on}", qemu(path)),
            ]),
        ),
        (
            "cloud-hypervisor",
            shell(&["--disk", &format!("path={path},image_type=raw{on}")]),
        ),
        ("Firecracker", format!("PUT /drives/vellum {drive}")),
        (
            "libvirt",
            format!(
                "<disk type='file' device='disk'><driver name='qemu' type='raw'/><source \
                 file='{}'/><target dev='vda' bus='virtio'/>{}</disk>",
                xml(path),
                readonly_element(read_only)
            ),
        ),
    ]
}

fn readonly_element(read_only: bool) -> &'static str {
    if read_only { "<readonly/>" } else { "" }
}

/// A value among QEMU's options: commas are doubled.
fn qemu(text: &str) -> String {
    text.replace(',', ",,")
}

/// A value between single quotes in XML.
fn xml(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    text.replace('\'', "&apos;")
}

/// A part of a URI.
fn percent(text: &str) -> String {
    let byte = |byte: u8| match byte {
        b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => {
            char::from(byte).to_string()
        }
        other => format!("%{other:02X}"),
    };
    text.bytes().map(byte).collect()
}

/// Words as a shell takes them.
fn shell(words: &[&str]) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_=,./:+@%".contains(c);
    let word = |word: &&str| match word.chars().all(is_plain) {
        true => (*word).to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    };
    words.iter().map(word).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_written_as_each_client_reads_them() {
        let socket = "/run/it's a, <disk>";
        let place = Place::Nbd {
            socket,
            export: "a&b",
        };
        let text = lines(place, true);
        for part in [
            "nbd+unix:///a%26b?socket=/run/it%27s%20a%2C%20%3Cdisk%3E\n",
            "'driver=nbd,node-name=disk,server.type=unix,server.path=/run/it'\\''s a,, \
             <disk>,export=a&b,read-only=on'",
            "name='a&amp;b'><host transport='unix' socket='/run/it&apos;s a, &lt;disk>'/>",
            "<readonly/></disk>\n",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }

    #[test]
    fn what_is_writable_says_so() {
        let disk = Place::File { path: "/d" };
        assert!(lines(disk, false).contains("\"is_read_only\":false"));
        assert!(lines(disk, true).contains("readonly=on"));
        let vhost = Place::VhostUser {
            socket: "/s",
            queues: 4,
        };
        let text = lines(vhost, false);
        assert!(text.contains("num-queues=4") && text.contains("num_queues=4"));
        assert!(!text.contains("readonly"), "{text}");
        // libvirt refuses to be told of such a disk.
        let vhost = Place::VhostUser {
            socket: "/s",
            queues: 4,
        };
        let text = lines(vhost, true);
        assert!(!text.contains("<readonly/>"), "{text}");
    }
}

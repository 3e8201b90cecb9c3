//! Images in places of fixed length (a logical volume, an NBD export) that are exactly as long as
//! `measure` says, and under a limit of file sizes. The places are NBD exports of raw files.

use serde_json::Value;
use vellum_testing::{Folder, Running, Said, until};

const VELLUM: &str = env!("CARGO_BIN_EXE_vellum");
const PLACE: &str = "nbd+unix:///?socket=sock";

/// A folder, and a server of its file `place`.
struct Bed {
    folder: Folder,
    server: Option<Running>,
}

impl Bed {
    fn new() -> Bed {
        let folder = Folder::new(VELLUM);
        folder.link("vellum");
        folder.link("qemu-img");
        Bed {
            folder,
            server: None,
        }
    }

    fn run(&self, line: &str) -> Said {
        self.folder.shell(line)
    }

    fn must(&self, line: &str) {
        self.folder.done(line);
    }

    /// The JSON output of a command; its exit status says nothing, since `check` reports leaks by it.
    fn json(&self, line: &str) -> Value {
        self.run(line).json()
    }

    /// A number that `measure` reports.
    fn measured(&self, words: &str, member: &str) -> u64 {
        let found = self.json(&format!("./vellum measure --output=json -O qcow2 {words}"));
        found[member].as_u64().expect("a number")
    }

    /// Serves a new place, instead of the one before.
    fn serve(&mut self, len_bytes: u64) {
        self.end();
        let path = self.folder.path("place");
        drop(std::fs::remove_file(&path));
        let file = std::fs::File::create(&path).expect("a file");
        file.set_len(len_bytes).expect("it is sparse");
        self.start("nbd -f raw -t -e 0 -k \"$PWD/sock\" place", None);
    }

    /// Starts a server at `sock`; `limit`: of its files, in KiB.
    fn start(&mut self, words: &str, limit: Option<u32>) {
        drop(std::fs::remove_file(self.folder.path("sock")));
        let limit = limit.map_or(String::new(), |limit| format!("ulimit -S -f {limit}; "));
        let line = format!("{limit}exec ./vellum {words}");
        self.server = Some(self.folder.start_shell(&line));
        until("the server listens", || self.folder.has("sock"));
    }

    fn end(&mut self) {
        if let Some(mut server) = self.server.take() {
            server.signal("-TERM");
            server.wait();
        }
    }

    fn assert_clean(&self, image: &str) {
        let report = self.json(&format!("qemu-img check --output=json -f qcow2 '{image}'"));
        assert!(report.get("leaks").is_none(), "{report}");
        assert!(report.get("corruptions").is_none(), "{report}");
    }

    fn assert_same(&self, one: &str, other: &str) {
        self.must(&format!(
            "qemu-img compare -f qcow2 -F qcow2 '{one}' '{other}'"
        ));
    }

    /// An image with some data here and there.
    fn scattered(&self, name: &str, create: &str) {
        let mut line = format!("qemu-img create -q -f qcow2 {create} {name} 64M; qemu-io");
        for piece in 0..40u64 {
            let (at, len) = (piece * piece * 37 % 1000 * 65536, 4096 << (piece % 6));
            line += &format!(" -c 'write -q -P {} {at} {len}'", piece + 1);
        }
        self.must(&format!("{line} {name}"));
    }
}

#[test]
fn creating_an_image_that_its_place_cannot_hold_warns() {
    let mut bed = Bed::new();
    let full = bed.measured("--size 64M", "fully-allocated");
    bed.serve(full - 65536);
    let create = format!("create -f qcow2 '{PLACE}' 64M");
    let own = bed.run(&format!("./vellum {create}"));
    assert_eq!(own.code, Some(0), "{own:?}");
    let said = own.err;
    let (has, needs) = (
        format!("has {} bytes", full - 65536),
        format!("needs {full} bytes"),
    );
    assert!(said.starts_with("vellum create: warning: '"), "{said}");
    assert!(said.contains(&has) && said.contains(&needs), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    for silent in [
        format!("./vellum {} -q", create),
        format!("./qemu-img {create}"),
        // A smaller disk.
        format!("./vellum create -f qcow2 '{PLACE}' 63M"),
        // The data lies elsewhere.
        format!("./vellum create -f qcow2 -o data_file=data '{PLACE}' 64M"),
    ] {
        let output = bed.run(&silent).expect(0);
        assert!(output.err.is_empty(), "{silent}: {output:?}");
    }
    bed.serve(full);
    let output = bed.run(&format!("./vellum {create}"));
    assert!(output.err.is_empty(), "{output:?}");
}

#[test]
fn a_copy_fits_into_what_it_requires() {
    let mut bed = Bed::new();
    bed.scattered("source", "");
    let required = bed.measured("source", "required");
    for options in ["", "-m 16", "-c"] {
        for made_before in [false, true] {
            bed.serve(required);
            let convert = match made_before {
                true => format!("./vellum create -q -f qcow2 '{PLACE}' 64M && ./vellum convert -n"),
                false => "./vellum convert".to_owned(),
            };
            bed.must(&format!("{convert} {options} -O qcow2 source '{PLACE}'"));
            bed.assert_same("source", PLACE);
            bed.assert_clean(PLACE);
        }
    }
}

/// Pieces are written in any order, each where its stream of writes goes on: what was set aside
/// for one stream is there for the others when nothing else is left.
#[test]
fn a_copy_out_of_order_fits_into_what_it_requires() {
    let mut bed = Bed::new();
    bed.must(
        "qemu-img create -q -f qcow2 source 256M && qemu-io -c 'write -q -P 1 0 64M' \
         -c 'write -q -P 2 70M 20M' -c 'write -q -P 3 130M 120M' source",
    );
    let required = bed.measured("source", "required");
    for options in ["-W", "-W -m 16"] {
        for _ in 0..5 {
            bed.serve(required);
            bed.must(&format!(
                "./vellum convert {options} -O qcow2 source '{PLACE}'"
            ));
            bed.assert_same("source", PLACE);
            bed.assert_clean(PLACE);
        }
    }
}

/// What the overlay overwrites lies in clusters of the base already; the rest is new. Real `qemu-img`
/// has room for both.
#[test]
fn a_commit_fits_where_the_measured_copy_does() {
    let mut bed = Bed::new();
    for seed in 0..12u64 {
        let mut state = seed * 2 + 1;
        let mut below = |end: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) % end
        };
        let mut writes = |count: u64| {
            (0..count).fold(String::new(), |line, _| {
                let (at, len) = (
                    below(4000) * 4096,
                    [4096, 65536, 307_200][below(3) as usize],
                );
                line + &format!(" -c 'write -q -P {} {at} {len}'", below(255) + 1)
            })
        };
        let (base, top) = (writes(5 + seed), writes(20 + 3 * seed));
        bed.must(&format!(
            "rm -f base top; qemu-img create -q -f qcow2 base 16M && qemu-io {base} base && \
             qemu-img create -q -f qcow2 -F qcow2 -b base top && qemu-io {top} top"
        ));
        let required = bed.measured("top", "required");
        bed.serve(required.max(bed.folder.len_bytes("base")));
        bed.must(&format!(
            "qemu-img convert -q -n -f raw -O raw base '{PLACE}' && \
             qemu-img convert -q -O qcow2 top merged && \
             qemu-img rebase -q -u -f qcow2 -F qcow2 -b '{PLACE}' top && ./vellum commit -q -d -b '{PLACE}' top"
        ));
        bed.assert_same("merged", PLACE);
        bed.assert_clean(PLACE);
    }
}

#[test]
fn a_copy_with_bitmaps_fits_into_what_measure_counts() {
    let mut bed = Bed::new();
    for count in [1, 3] {
        // All of the disk is written, so nothing that is required is left over; and what is dirty
        // is neither nothing nor everything.
        bed.must(
            "qemu-img create -q -f qcow2 source 64M && qemu-io -c 'write -q -P 1 0 64M' source",
        );
        for name in 0..count {
            bed.must(&format!("qemu-img bitmap --add -g 64k source bitmap{name}"));
        }
        bed.must("qemu-io -c 'write -q -P 2 1M 64k' source");
        let required = bed.measured("source", "required");
        let bitmaps = bed.measured("source", "bitmaps");
        for program in ["qemu-img", "./vellum"] {
            bed.serve(required + bitmaps);
            bed.must(&format!(
                "./vellum create -q -f qcow2 '{PLACE}' 64M && \
                 {program} convert -n --bitmaps -O qcow2 source '{PLACE}'"
            ));
            bed.assert_same("source", PLACE);
            bed.assert_clean(PLACE);
            let info = bed.json(&format!("qemu-img info --output=json '{PLACE}'"));
            let bitmaps = &info["format-specific"]["data"]["bitmaps"];
            assert_eq!(bitmaps.as_array().map(Vec::len), Some(count), "{info}");
        }
    }
}

#[test]
fn a_server_outlives_the_limit_of_file_sizes_and_goes_on_when_it_is_raised() {
    let mut bed = Bed::new();
    bed.must("./vellum create -q -f qcow2 disk 64M");
    bed.start("nbd -f qcow2 -t -k \"$PWD/sock\" disk", Some(4096));
    let write = format!("qemu-io -f raw -c 'write -q -P 1 0 16M' -c flush '{PLACE}'");
    let refused = bed.run(&write);
    let said = refused.all();
    assert!(said.contains("No space left on device"), "{said}");
    let server = bed.server.as_ref().expect("it runs").id();
    bed.must(&format!("prlimit --pid {server} --fsize=unlimited:"));
    bed.must(&write);
    bed.must(&format!("qemu-io -f raw -c 'read -P 1 0 16M' '{PLACE}'"));
    bed.end();
    bed.assert_clean("disk");
}

#[test]
fn a_commit_beyond_the_limit_of_file_sizes_leaks_nothing() {
    let bed = Bed::new();
    for (base_size, clusters) in [("64M", ""), ("8M", ""), ("8M", "-o cluster_size=4096")] {
        bed.must(&format!(
            "qemu-img create -q -f qcow2 {clusters} base {base_size}"
        ));
        bed.scattered("top", "-F qcow2 -b base");
        for limit in [200, 1000, 1700] {
            let said = bed.run(&format!(
                "ulimit -f {limit}; ./vellum commit -q -d -b base top"
            ));
            assert_eq!(said.code, Some(1), "{said:?}");
            let text = said.err;
            assert!(text.contains("File too large"), "{text}");
            bed.assert_clean("base");
        }
        bed.must("qemu-img convert -O qcow2 top copy && ./vellum commit -q -d -b base top");
        bed.assert_clean("base");
        bed.assert_same("copy", "base");
    }
}

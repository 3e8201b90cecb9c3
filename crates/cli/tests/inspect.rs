//! `vellum inspect` as a person and a program use it.

use serde_json::Value;
use vellum_testing::Folder;

const VELLUM: &str = env!("CARGO_BIN_EXE_vellum");

fn folder(lines: &[&str]) -> Folder {
    let folder = Folder::new(VELLUM);
    for line in lines {
        match line.split_once(" <<< ") {
            Some((image, commands)) => {
                let image = image.strip_prefix("qemu-io ").expect("an image");
                folder.io(image, &commands.split(';').collect::<Vec<_>>());
            }
            None => drop(folder.img(line.strip_prefix("qemu-img ").expect("a line"))),
        }
    }
    folder
}

fn inspect(folder: &Folder, image: &str) -> Value {
    let line = format!("inspect --output=json {image}");
    folder.run("vellum", &line).expect(0).json()
}

fn advice<'a>(value: &'a Value, code: &str) -> Option<&'a Value> {
    let all = value["advice"].as_array().expect("advice");
    all.iter().find(|advice| advice["code"] == code)
}

#[test]
fn each_layer_contributes_what_is_read_from_it() {
    let folder = folder(&[
        "qemu-img create -q -f qcow2 base 64M",
        "qemu-io base <<< write 0 16M",
        "qemu-img create -q -f qcow2 -b base -F qcow2 mid",
        "qemu-io mid <<< write 4M 4M;write -z 8M 2M",
        "qemu-img create -q -f qcow2 -b mid -F qcow2 top",
        "qemu-io top <<< write -c 6M 4M",
    ]);
    let value = inspect(&folder, "top");
    let of = |layer: usize, what: &str| value["layers"][layer][what].as_u64().unwrap();
    const M: u64 = 1 << 20;
    assert_eq!((of(0, "data"), of(0, "compressed")), (4 * M, 4 * M));
    assert_eq!(
        (of(1, "data"), of(1, "zero")),
        (2 * M, 0),
        "the rest is hidden"
    );
    assert_eq!((of(2, "data"), of(2, "zero")), (10 * M, 0));
    assert_eq!(value["absent"], 48 * M);
    let cells = value["map"].as_array().unwrap();
    let length: u64 = cells
        .iter()
        .map(|cell| cell["length"].as_u64().unwrap())
        .sum();
    assert_eq!(length, 64 * M, "the map covers the disk");
    assert_eq!(cells[0]["kind"], "from below");
}

#[test]
fn leaks_can_be_given_back_and_then_there_are_none() {
    let folder = folder(&[
        "qemu-img create -q -f qcow2 -o lazy_refcounts=off disk 64M",
        "qemu-io disk <<< write 0 8M",
    ]);
    // The mapping of the second half is forgotten; its clusters stay counted.
    let mut bytes = folder.read("disk");
    let be = |bytes: &[u8], at: usize| {
        u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()) & 0x00ff_ffff_ffff_fe00
    };
    let l2 = be(&bytes, be(&bytes, 40) as usize) as usize;
    bytes[l2 + 64 * 8..l2 + 128 * 8].fill(0);
    folder.write("disk", bytes);
    let value = inspect(&folder, "disk");
    let leaks = advice(&value, "leaks").expect("advice");
    assert_eq!(leaks["gives-back"], 4 << 20);
    assert!(
        leaks["text"]
            .as_str()
            .unwrap()
            .starts_with("4 MiB can be given back")
    );
    // The command that is told does what it says.
    let command = leaks["command"].as_str().unwrap();
    folder.must("vellum", command.strip_prefix("vellum ").unwrap());
    let after = inspect(&folder, "disk");
    assert!(advice(&after, "leaks").is_none());
    let counted = |value: &Value| value["qcow2"]["counted"].as_u64().unwrap();
    assert_eq!(counted(&value) - counted(&after), 4 << 20);
}

#[test]
fn what_snapshots_hold_alone_is_what_deleting_them_gives_back() {
    let folder = folder(&[
        "qemu-img create -q -f qcow2 disk 256M",
        "qemu-io disk <<< write 0 20M",
        "qemu-img snapshot -c one disk",
        "qemu-io disk <<< write 1M 3M",
        "qemu-img snapshot -c two disk",
        "qemu-io disk <<< write 2M 10M",
    ]);
    for name in ["one", "two"] {
        let before = inspect(&folder, "disk");
        let snapshot = &before["qcow2"]["snapshots"][0];
        assert_eq!(snapshot["name"], name);
        // Space is not all that a snapshot is: who deletes one hears what it costs.
        let advice = before["advice"].as_array().expect("advice");
        let told = advice.iter().find(|advice| advice["code"] == "snapshots");
        let told = told.expect("advice about snapshots")["text"].to_string();
        assert!(told.contains("gives up a point to go back to"), "{told}");
        folder.img(&format!("snapshot -d {name} disk"));
        let after = inspect(&folder, "disk");
        let counted = |value: &Value| value["qcow2"]["counted"].as_u64().unwrap();
        let freed = counted(&before) - counted(&after);
        assert_eq!(snapshot["own"].as_u64(), Some(freed), "{before:#}");
        assert!(freed > 1 << 20);
    }
    let after = inspect(&folder, "disk");
    assert_eq!(after["qcow2"]["only-in-snapshots"], 0);
}

#[test]
fn growth_of_an_overlay_is_measured() {
    let mut script: Vec<String> = Vec::new();
    for number in 0..60 {
        script.push(format!("write -P 7 {}k 4k", number * 256 + 128));
    }
    let folder = folder(&[
        "qemu-img create -q -f qcow2 base 64M",
        "qemu-io base <<< write -P 1 0 32M",
        "qemu-img create -q -f qcow2 -o cluster_size=128k -b base -F qcow2 overlay",
        &format!("qemu-io overlay <<< {}", script.join(";")),
        "qemu-img create -q -f qcow2 -o cluster_size=128k,extended_l2=on -b base -F qcow2 sub",
        &format!("qemu-io sub <<< {}", script.join(";")),
    ]);
    let value = inspect(&folder, "overlay");
    let growth = &value["qcow2"]["growth"];
    assert_eq!(growth["factor"], 32.0, "{growth}");
    assert_eq!(growth["factor-with-subclusters"], 1.0);
    let text = advice(&value, "growth").expect("advice")["text"]
        .as_str()
        .unwrap();
    assert!(text.contains("128 KiB costs 32.0x growth"), "{text}");
    assert!(text.contains("subclusters would cost 1.0x"), "{text}");
    // The overlay with subclusters shows that this is true, and is told nothing.
    let with = inspect(&folder, "sub");
    assert!(advice(&with, "growth").is_none());
    let held = with["qcow2"]["clusters"]["allocated-subclusters"].as_u64();
    assert_eq!(held, Some(60));
}

#[test]
fn caches_bitmaps_and_names_are_told_of() {
    let folder = folder(&[
        "qemu-img create -q -f qcow2 big 1T",
        "qemu-img bitmap --add big b",
        "qemu-img create -q -f raw raw 1M",
        "qemu-img create -q -f qcow2 empty 1M",
        "qemu-img create -q -f qcow2 -b empty -F qcow2 overlay",
    ]);
    let value = inspect(&folder, "big");
    assert_eq!(value["qcow2"]["l2-cache"]["whole-disk"], 128 << 20);
    let text = advice(&value, "l2-cache").expect("advice")["text"]
        .as_str()
        .unwrap();
    assert!(text.contains("covers 256 GiB of the 1 TiB"), "{text}");
    assert_eq!(value["qcow2"]["bitmaps"][0]["name"], "b");
    let value = inspect(&folder, "overlay");
    assert!(advice(&value, "backing-unused").is_some(), "{value:#}");
    let value = inspect(&folder, "raw");
    assert_eq!(value["format"], "raw");
    assert!(value.get("qcow2").is_none());
}

#[test]
fn text_for_people_is_plain_in_a_pipe() {
    let folder = folder(&[
        "qemu-img create -q -f qcow2 disk 1G",
        "qemu-io disk <<< write 0 100M",
    ]);
    let text = folder.must("vellum", "inspect disk");
    for word in ["The disk", "The file", "Contents", "L2 cache", "█", "·"] {
        assert!(text.contains(word), "{word} is not in:\n{text}");
    }
    assert!(!text.contains('\x1b'));
    let wide = text.lines().map(|line| line.chars().count()).max();
    assert!(wide <= Some(80), "{wide:?}");
}

#[test]
fn the_page_stands_alone() {
    let folder = folder(&[
        "qemu-img create -q -f qcow2 base 64M",
        "qemu-io base <<< write 0 9M",
        "qemu-img create -q -f qcow2 -b base -F qcow2 disk",
        "qemu-io disk <<< write 3M 5M;write -z 20M 1M;write -c 30M 2M",
        "qemu-img snapshot -c one disk",
        "qemu-img bitmap --add disk b",
    ]);
    folder.must("vellum", "inspect --html page.html disk");
    let page = folder.text("page.html");
    let options = roxmltree::ParsingOptions {
        allow_dtd: true,
        ..Default::default()
    };
    let document = roxmltree::Document::parse_with_options(&page, options).expect("sound XML");
    let count = |name: &str| {
        let nodes = document.descendants();
        nodes.filter(|node| node.has_tag_name(name)).count()
    };
    assert_eq!(
        count("table"),
        5,
        "space, chain, snapshots, metadata, cache"
    );
    let pictures = document
        .descendants()
        .filter(|node| node.tag_name().name() == "svg");
    assert_eq!(pictures.count(), 4, "disk and file, each for two widths");
    for word in [
        "http:", "https:", "src=", "url(", "@import", "<script", "<link",
    ] {
        assert!(!page.contains(word), "{word}");
    }
    // A second page replaces the first, and an image is left alone.
    folder.must("vellum", "inspect --html page.html disk");
    let refused = folder.refused("vellum", "inspect --html disk disk");
    assert!(refused.contains("is no HTML page"));
}

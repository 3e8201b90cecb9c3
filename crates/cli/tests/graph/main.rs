//! Graphs of nodes beside the real `qemu-io`: the same options, names and commands in
//! twin folders must print the same and end with the same code.

mod twins;

use std::path::Path;

use twins::{Twins, run};

#[test]
fn wrong_graphs_are_refused_in_the_same_words() {
    let twins = Twins::new();
    for options in [
        "driver=nothing",
        "filename=disk",
        "driver=raw,file.driver=nothing",
        "driver=qcow2",
        "driver=qcow2,file=nobody",
        "driver=qcow2,file.filename=disk,backing.driver=raw",
        "driver=qcow2,file.filename=disk,backing.foo=1",
        "driver=copy-on-read",
        "driver=copy-on-read,file=x",
        "driver=copy-on-read,file.filename=raw,bottom=x",
        "driver=throttle,file.filename=raw",
        "driver=throttle,throttle-group=t,file.filename=raw",
        "driver=blkdebug",
        "driver=blkdebug,image.filename=raw,align=3",
        "driver=blkdebug,image.filename=raw,align=512,max-transfer=7",
        "driver=blkdebug,image.filename=raw,opt-discard=1k,max-discard=1536",
        "driver=blkdebug,image.filename=raw,foo=7",
        "driver=blkdebug,image.filename=raw,inject-error.0.event=foo",
        "driver=blkdebug,image.filename=raw,inject-error.0.errno=foo",
        "driver=blkdebug,image.filename=raw,inject-error.0.state=1",
        "driver=blkdebug,image.filename=raw,inject-error.0.event=none,inject-error.0.bad=1",
        "driver=blkdebug,image.filename=raw,inject-error.0.event=none,inject-error.0.iotype=bad",
        "driver=blkdebug,image.filename=raw,set-state.0.state=bad",
        "driver=blkdebug,image.filename=raw,take-child-perms.0=bad",
        "driver=blkdebug,config=nofile,image.filename=raw",
        "driver=blkdebug,config=raw,image.filename=raw",
        "driver=null-co,bad=1",
        "driver=null-co,latency-ns=-1",
        "driver=blkverify,test.filename=disk,raw.filename=raw",
        "driver=blkverify,raw.filename=raw",
        "driver=preallocate,file.filename=raw,prealloc-align=3",
        "driver=blklogwrites,file.filename=raw",
        "driver=blklogwrites,file.filename=raw,log.filename=nofile",
        "driver=blklogwrites,file.filename=raw,log.filename=log,log-sector-size=3",
        "driver=blklogwrites,file.filename=raw,log.filename=log,log-super-update-interval=0",
        "driver=blklogwrites,file.filename=raw,log.filename=copy,log-append=on",
        "driver=blklogwrites,file.filename=raw,log.filename=log,log-append=on,log-sector-size=512",
        "driver=host_device,filename=raw",
        "driver=raw,file.filename=raw,offset=2M",
        "driver=raw,file.filename=raw,size=2M",
    ] {
        let answer = twins.options(options, &["length"]);
        assert_eq!(answer.code, Some(1), "{options}");
    }
    for name in ["blkdebug:x", "null-co:x", "blkverify:raw", "foo:x"] {
        assert_eq!(twins.same(&[name], &["length"]).code, Some(1), "{name}");
    }
}

#[test]
fn formats_stand_on_any_node() {
    let twins = Twins::new();
    for options in [
        "driver=file,filename=raw",
        "driver=null-co,size=1M,read-zeroes=on",
        "driver=null-aio,size=1M,latency-ns=1000,read-zeroes=on",
        "driver=copy-on-read,file.driver=qcow2,file.file.filename=disk",
        "driver=preallocate,file.filename=raw",
        "driver=raw,offset=512,size=64k,file.driver=raw,file.offset=512,file.file.filename=raw",
        "driver=qcow2,file.driver=blkdebug,file.image.filename=disk,file.align=4k",
        "driver=qcow2,file.driver=raw,file.file.driver=preallocate,file.file.file.filename=disk",
        "driver=qcow2,file.filename=disk,backing.driver=null-co,backing.read-zeroes=on",
        "driver=blkdebug,image.filename=raw,take-child-perms.0=write,max-transfer=4k",
    ] {
        let commands = [
            "length",
            "read -P 0 0 64k",
            "write -P 7 1000 3000",
            "read -P 7 1000 3000",
        ];
        let answer = twins.options(options, &commands);
        let null = options.starts_with("driver=null");
        assert_eq!(answer.code, Some(i32::from(null)), "{options}: {answer:?}");
        std::fs::write(twins.path("ours").join("raw"), vec![0; 1 << 20]).unwrap();
        std::fs::write(twins.path("theirs").join("raw"), vec![0; 1 << 20]).unwrap();
        let zero = ["write -z 0 1M"];
        twins.same(&["disk"], &zero);
    }
    let json = r#"json:{"driver":"raw","file":{"driver":"null-co","size":"65536"}}"#;
    assert_eq!(twins.same(&[json], &["length"]).output, ["64 KiB"]);
}

#[test]
fn an_image_inside_an_image_is_read_by_both() {
    let twins = Twins::new();
    let io = twins.path("qemu-io");
    for (writer, reader, folder) in [
        (io.as_path(), Path::new("qemu-io"), "ours"),
        (Path::new("qemu-io"), io.as_path(), "theirs"),
    ] {
        let folder = twins.path(folder);
        let create = |words: &[&str]| {
            let made = run(Path::new("qemu-img"), &folder, words);
            assert_eq!(made.code, Some(0), "{made:?}");
        };
        create(&["create", "-q", "-f", "qcow2", "inner", "8M"]);
        create(&["convert", "-f", "raw", "-O", "qcow2", "inner", "outer"]);
        create(&["resize", "-q", "outer", "16M"]);
        let nested = "driver=qcow2,file.driver=qcow2,file.file.filename=outer";
        let write = ["-c", "write -P 5 3M 2M", "--image-opts", nested];
        assert_eq!(run(writer, &folder, &write).code, Some(0));
        let read = [
            "-c",
            "read -P 5 3M 2M",
            "-c",
            "read -P 0 5M 1M",
            "--image-opts",
            nested,
        ];
        let answer = run(reader, &folder, &read);
        assert_eq!(answer.code, Some(0), "{answer:?}");
        create(&["check", "-q", "outer"]);
    }
}

#[test]
fn errors_strike_where_they_are_asked_for() {
    let twins = Twins::new();
    let read = ["read 0 64k"];
    for (event, commands) in [
        ("none", &["read 0 512"][..]),
        ("l2_load", &["read 0 512"]),
        ("read_aio", &["read 0 512", "read 64k 512"]),
        ("write_aio", &["write 0 512"]),
        ("flush_to_disk", &["write 128k 512", "flush"]),
        ("flush_to_disk", &["flush", "read 0 512", "flush"]),
    ] {
        twins.same(&["disk"], &["write 0 64k"]);
        for once in ["on", "off"] {
            let rule = format!(
                "driver=qcow2,file.driver=blkdebug,file.image.filename=disk,\
                 file.inject-error.0.event={event},file.inject-error.0.errno=28,\
                 file.inject-error.0.once={once},file.inject-error.0.iotype="
            );
            let kind = if commands[0].starts_with("read") {
                "read"
            } else {
                "write"
            };
            let kind = if event == "flush_to_disk" {
                "flush"
            } else {
                kind
            };
            if event == "none" {
                // The header cannot be read.
                assert_eq!(
                    twins.options(&format!("{rule}{kind}"), commands).code,
                    Some(1)
                );
                continue;
            }
            let output = twins.options_output(&format!("{rule}{kind}"), commands);
            // A failed flush says nothing there.
            let failed = output.iter().any(|line| line.contains("No space left"));
            assert_eq!(failed, kind != "flush", "{event}: {output:?}");
        }
    }
    assert_eq!(twins.same(&["disk"], &read).code, Some(0));
}

#[test]
fn only_the_raw_format_tells_of_what_it_does() {
    let twins = Twins::new();
    for event in ["read_aio", "write_aio"] {
        for above in ["driver=raw,file.", ""] {
            let node = if above.is_empty() { "" } else { "file." };
            let options = format!(
                "{above}driver=blkdebug,{node}image.filename=raw,\
                 {node}inject-error.0.event={event},{node}inject-error.0.once=on"
            );
            let output = twins.options_output(&options, &["write 0 4k", "read 0 4k", "write 0 4k"]);
            let failed = output.iter().any(|line| line.contains("failed"));
            assert_eq!(failed, !above.is_empty(), "{options}: {output:?}");
        }
    }
}

#[test]
fn the_layers_of_an_image_show_through_a_filter() {
    let twins = Twins::new();
    twins.same(&["disk"], &["write 0 320k"]);
    let create = [
        "create", "-q", "-f", "qcow2", "-b", "disk", "-F", "qcow2", "top",
    ];
    assert_eq!(twins.same_img(&create).code, Some(0));
    twins.same(&["top"], &["write 64k 64k"]);
    let filter = "driver=blkdebug,image.driver=qcow2,image.file.filename=top,align=4k";
    let commands = ["alloc 0 1M", "alloc 65000 1000", "alloc 100k 100k", "map"];
    let answer = twins.options(filter, &commands);
    assert_eq!(
        answer.output[0],
        "65536/1048576 bytes allocated at offset 0 bytes"
    );
    for output in ["human", "json"] {
        let output = format!("--output={output}");
        twins.same_img(&["map", &output, "--image-opts", filter]);
    }
}

#[test]
fn states_and_sectors_choose_what_fails() {
    let twins = Twins::new();
    twins.write(
        "conf",
        "[set-state]\nstate = \"1\"\nevent = \"pwritev\"\nnew_state = \"2\"\n\n\
         [inject-error]\nevent = \"pwritev\"\nstate = \"2\"\nerrno = \"5\"\nonce = \"on\"\n",
    );
    let commands = ["write 0 4k", "write 0 4k", "write 0 4k"];
    let answer = twins.same(&["-f", "raw", "blkdebug:conf:raw"], &commands);
    assert_eq!(answer.output[2], "write failed: Input/output error");
    let sector = "driver=blkdebug,image.filename=raw,inject-error.0.event=none,\
                  inject-error.0.sector=9";
    let commands = [
        "read 0 4k",
        "read 4k 4k",
        "write 4096 512",
        "write 5000 1",
        "discard 4k 4k",
    ];
    twins.options(sector, &commands);
    let status = "driver=blkdebug,image.filename=raw,inject-error.0.event=none,\
                  inject-error.0.iotype=write-zeroes";
    twins.options(status, &["write -z 0 4k", "write 0 4k", "map"]);
}

#[test]
fn breakpoints_hold_requests() {
    let twins = Twins::new();
    let commands = [
        "break write_aio A",
        "break foo B",
        "resume A",
        "remove_break Z",
        "aio_write -P 1 0 4k",
        "wait_break A",
        "read -P 0 0 4k",
        "resume A",
        "aio_flush",
        "read -P 1 0 4k",
        "break l2_load C",
        "remove_break C",
    ];
    let answer = twins.same(&["blkdebug::disk"], &commands);
    assert!(
        answer
            .output
            .contains(&"blkdebug: Suspended request 'A'".to_owned())
    );
    twins.same(
        &["disk"],
        &["break write_aio A", "remove_break A", "resume A"],
    );
}

#[test]
fn limits_cut_requests_and_keep_the_data() {
    let twins = Twins::new();
    let limits = "driver=blkdebug,image.filename=raw,align=4k,max-transfer=8k,\
                  opt-write-zero=16k,max-write-zero=32k,opt-discard=16k";
    let commands = [
        "write -P 1 0 100k",
        "write -P 2 3000 70000",
        "write -z 10000 60000",
        "write -z -n 16k 32k",
        "read -P 0 16k 32k",
        "discard 64k 16k",
        "read -P 1 80k 4k",
    ];
    let answer = twins.options(limits, &commands);
    assert_eq!(answer.code, Some(0), "{answer:?}");
    twins.same_bytes("raw");
}

#[test]
fn a_log_of_writes_is_the_same_to_the_byte() {
    let twins = Twins::new();
    let log = "driver=blklogwrites,file.filename=raw,log.filename=log";
    // (A flush that is asked for, or comes with a write, is entered otherwise.)
    let options = |text: &str, commands: &[&str]| {
        let words = ["-t", "writeback", "--image-opts", text];
        twins.same(&words, commands);
    };
    let commands = ["write -P 1 0 4k", "write -P 2 700 100", "write -P 3 4k 512"];
    options(log, &commands);
    let first = twins.same_bytes("log").len();
    options(&format!("{log},log-append=on"), &["write -P 4 0 512"]);
    assert!(twins.same_bytes("log").len() > first);
    twins.same_bytes("raw");
}

#[test]
fn a_verified_image_agrees_and_damage_shows() {
    let twins = Twins::new();
    let verify = "driver=blkverify,test.driver=qcow2,test.file.filename=disk,raw.filename=raw";
    // (QEMU aborts when zeroes are written through it.)
    let commands = ["write -P 1 1000 100k", "read 0 1M", "flush"];
    assert_eq!(twins.options(verify, &commands).code, Some(0));
    twins.same(&["-f", "raw", "raw"], &["write -P 9 5000 1"]);
    let words = ["-c", "read 4k 4k", "--image-opts", verify];
    let ours = run(&twins.path("qemu-io"), &twins.path("ours"), &words);
    let theirs = run(Path::new("qemu-io"), &twins.path("theirs"), &words);
    // QEMU ends the program there; the request fails here.
    assert_eq!((ours.code, theirs.code), (Some(1), Some(1)));
    assert_eq!(ours.errors, theirs.errors);
}

#[test]
fn what_is_read_is_kept_with_copy_on_read() {
    for image in [
        "driver=copy-on-read,file.driver=qcow2,file.file.filename=top",
        "driver=copy-on-read,bottom=mid,file.driver=qcow2,file.file.filename=top,file.backing.node-name=mid",
    ] {
        let twins = Twins::new();
        for folder in ["ours", "theirs"] {
            let folder = twins.path(folder);
            let io = ["-c", "write -P 7 0 512k", "disk"];
            assert_eq!(run(Path::new("qemu-io"), &folder, &io).code, Some(0));
            let create = [
                "create", "-q", "-f", "qcow2", "-b", "disk", "-F", "qcow2", "top",
            ];
            assert_eq!(run(Path::new("qemu-img"), &folder, &create).code, Some(0));
        }
        let commands = [
            "read -P 7 100k 10k",
            "read -P 0 600k 1k",
            "write -P 1 256k 1k",
        ];
        twins.options(image, &commands);
        let kept = twins.same(&["top"], &["map", "read -P 7 64k 64k", "read -P 1 256k 1k"]);
        assert_eq!(kept.code, Some(0));
        twins.same(&["-C", "top"], &["read -P 7 0 300k", "read 300k 100"]);
        twins.same(&["top"], &["map"]);
        twins.same(&["-C", "-r", "top"], &["map"]);
    }
}

#[test]
fn what_is_held_is_not_touched_by_copies_behind_it() {
    let twins = Twins::new();
    for folder in ["ours", "theirs"] {
        let folder = twins.path(folder);
        let create = [
            "create", "-q", "-f", "qcow2", "-b", "disk", "-F", "qcow2", "top",
        ];
        assert_eq!(run(Path::new("qemu-img"), &folder, &create).code, Some(0));
        let write = ["-c", "write -P 5 64k 64k", "top"];
        assert_eq!(run(Path::new("qemu-io"), &folder, &write).code, Some(0));
        // The sector is the first of the cluster that the overlay holds.
        let rules = "[inject-error]\nevent = \"cor_write\"\nsector = \"128\"\n";
        std::fs::write(folder.join("rules"), rules).unwrap();
    }
    let open = "open -C -o driver=blkdebug,config=rules,image.driver=qcow2 top";
    let commands = [open, "read 64k 128k", "read 0 64k", "read 64k 64k"];
    let answer = twins.same(&[], &commands);
    assert_eq!(answer.code, Some(1), "{answer:?}");
    let failed = |line: &&String| line.contains("Input/output error");
    assert_eq!(answer.output.iter().filter(failed).count(), 1, "{answer:?}");
}

#[test]
fn throttled_requests_take_their_time() {
    let twins = Twins::new();
    for object in [
        "throttle-group,id=t,x-iops=1",
        "throttle-group,id=t,x-iops-size=512",
        "throttle-group,id=t,x-iops-total=-1",
        "throttle-group,id=t,x-iops-total=1k",
        "throttle-group,id=t,x-iops-total=10,x-iops-total-max=5",
        "throttle-group,x-iops-total=10",
        "bad,id=t",
    ] {
        let answer = twins.same(&["--object", object, "-f", "raw", "raw"], &["length"]);
        assert_eq!(answer.code, Some(1), "{object}");
    }
    let started = std::time::Instant::now();
    let image = "driver=throttle,throttle-group=t,file.filename=raw";
    let words = [
        "--object",
        "throttle-group,id=t,x-bps-write=1048576",
        "--image-opts",
        image,
    ];
    let answer = twins.same(&words, &["write 0 600k", "write 0 4k", "read 0 1M"]);
    assert_eq!(answer.code, Some(0));
    // Half a second each: what is beyond a tenth of a second's worth has to leak.
    assert!(started.elapsed().as_millis() >= 900);
}

#[test]
fn options_win_over_those_of_a_description() {
    let twins = Twins::new();
    for driver in ["", "\"driver\":\"raw\","] {
        let open = format!("open -o driver=qcow2 json:{{{driver}\"file.filename\":\"disk\"}}");
        let answer = twins.same(&[], &[&open, "info"]);
        assert_eq!(answer.output[0], "format name: qcow2");
    }
}

#[test]
fn a_reopen_changes_what_may_change() {
    let twins = Twins::new();
    let commands = [
        "reopen -o overlap-check=all",
        "reopen -o overlap-check.template=none",
        "reopen -o overlap-check=constant,overlap-check.template=all",
        "reopen -o cache-size=1M",
        "reopen -o l2-cache-size=512k",
        "reopen -o refcount-cache-size=256k",
        "reopen -o cache-size=1M,l2-cache-size=64k,refcount-cache-size=64k",
        "reopen -o lazy-refcounts=42",
        "reopen -o file.filename=raw",
        "reopen -o driver=raw",
        "reopen -o foo=3",
        "write -P 1 0 64k",
        "reopen -r",
        "write 0 512",
        "reopen -w",
        "read -P 1 0 64k",
    ];
    twins.same(&["disk"], &commands);
    let raw = [
        "reopen -o size=512",
        "length",
        "reopen -o cache-size=1",
        "reopen -o offset=1k",
    ];
    twins.same(&["-f", "raw", "raw"], &raw);
}

#[test]
fn graphs_have_the_same_names() {
    let twins = Twins::new();
    let group = ["--object", "throttle-group,id=t", "--image-opts"];
    for options in [
        "driver=qcow2,file.driver=blkdebug,file.image.filename=disk",
        "driver=qcow2,file.driver=preallocate,file.file.filename=disk",
        "driver=throttle,throttle-group=t,file.filename=raw",
        "driver=raw,file.driver=qcow2,file.file.filename=disk",
        "driver=raw,offset=1k,size=1k,file.driver=blkdebug,file.image.filename=raw",
        "driver=blkverify,raw.filename=raw,test.driver=qcow2,test.file.filename=disk",
        "driver=null-co,size=1M",
        "driver=null-co",
    ] {
        let words = [&["info"], &group[..], &[options]].concat();
        let ours = run(&twins.path("qemu-img"), &twins.path("ours"), &words);
        let theirs = run(Path::new("qemu-img"), &twins.path("theirs"), &words);
        assert_eq!(ours.output[..3], theirs.output[..3], "{options}");
    }
}

#[test]
fn image_tools_use_graphs_and_refuse_to_make_them() {
    let twins = Twins::new();
    twins.same(&["disk"], &["write -P 3 0 300k"]);
    twins.same_img(&["compare", "blkdebug::disk", "disk"]);
    twins.same_img(&["convert", "-O", "raw", "blkdebug::disk", "out"]);
    twins.same_bytes("out");
    let target = "driver=raw,file.driver=preallocate,file.file.filename=raw";
    let words = ["convert", "-n", "--target-image-opts", "disk", target];
    assert_eq!(twins.same_img(&words).code, Some(0));
    twins.same_bytes("raw");
    for name in [
        "blkdebug::new",
        "blkverify:a:b",
        "null-co://",
        "null-aio://",
    ] {
        let answer = twins.same_img(&["create", "-f", "qcow2", name, "1M"]);
        assert_eq!(answer.code, Some(1), "{name}");
    }
    let kept = "driver=copy-on-read,file.driver=qcow2,file.file.filename=disk";
    twins.same_img(&["info", "--image-opts", kept]);
}

#[test]
fn a_salvage_tells_what_it_met_in_order() {
    let twins = Twins::new();
    twins.same(&["disk"], &["write -P 3 0 1M"]);
    let mut source = String::from("driver=blkdebug,image.driver=qcow2,image.file.filename=disk");
    for (at, (kind, sector)) in [
        ("block-status", 600),
        ("read", 500),
        ("read", 600),
        ("read", 2047),
    ]
    .iter()
    .enumerate()
    {
        let rule = format!("inject-error.{at}");
        source += &format!(
            ",{rule}.event=none,{rule}.iotype={kind},{rule}.errno=5,{rule}.sector={sector}"
        );
    }
    let plain = ["convert", "-O", "raw", "--image-opts", &source, "out"];
    assert_eq!(twins.same_img(&plain).code, Some(1));
    let salvage = [
        "convert",
        "--salvage",
        "-O",
        "raw",
        "--image-opts",
        &source,
        "out",
    ];
    let answer = twins.same_img(&salvage);
    assert_eq!((answer.code, answer.errors.len()), (Some(0), 5));
    let bytes = twins.same_bytes("out");
    assert_eq!((bytes[500 * 512], bytes[501 * 512]), (0, 3));
}

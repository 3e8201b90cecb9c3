//! Streams, sources and targets that do not fit together, and streams that mean harm.

use crate::place::Place;

/// Whoever has it open would go on in a file without a name.
#[test]
fn a_disk_in_use_is_not_replaced() {
    let place = Place::new();
    crate::source(&place);
    place.done("$VELLUM send -q src > whole && qemu-img create -q -f qcow2 dst 64M");
    let serve = "qemu-nbd --fork --pid-file pid -t -f qcow2 -k $PWD/socket dst";
    place.done(serve);
    let said = place.fails("$VELLUM receive -q --force dst < whole");
    assert!(said.contains("lock"), "{said}");
    place.done("qemu-io -f raw -c 'write -q -P 9 0 64k' -c flush \"nbd+unix:///?socket=$PWD/socket\" > /dev/null");
    place.done("pid=$(cat pid); kill $pid; while kill -0 $pid 2> /dev/null; do sleep 0.05; done");
    place.done("qemu-io -r -c 'read -P 9 0 64k' dst > /dev/null");
    place.done("$VELLUM receive -q --force dst < whole && qemu-img compare -q src dst");
}

#[test]
fn a_stream_does_not_go_into_its_own_source() {
    let place = Place::new();
    crate::source(&place);
    place.done("cp src kept && ln src link");
    for line in ["-U src 1<>src", "src >>link", "-U -o link src"] {
        let said = place.fails(&format!("$VELLUM send -q {line}"));
        assert!(said.contains("is the same file as"), "{line}: {said}");
        place.done("cmp src kept");
    }
}

#[test]
fn changes_of_something_else_are_refused() {
    let place = Place::new();
    crate::source(&place);
    place.done("qemu-img bitmap --add src monday");
    place.done("$VELLUM send -q src | $VELLUM receive -q dst");
    let base = place.done("$VELLUM receive --token dst");
    let other = "0123456789abcdef0123456789abcdef";
    place.done("qemu-io -c 'write -P 7 0 1M' src > /dev/null");
    let refused = |line: &str, words: &str| {
        let said = place.fails(line);
        assert!(said.contains(words), "{line}: {said}");
    };
    let send = |base: &str| format!("$VELLUM send -q src --since monday --base {base} > changes");
    place.done(&send(other));
    let holds = format!("since stream {other}, and 'dst' holds stream {base}");
    refused("$VELLUM receive dst < changes", &holds);
    refused("$VELLUM receive new < changes", "there is no 'new'");
    place.done("qemu-img create -q -f qcow2 plain 64M && qemu-img create -q -f qcow2 short 32M");
    refused(
        "$VELLUM receive plain < changes",
        "nobody has noted what 'plain' holds",
    );
    refused(
        "$VELLUM receive --force short < changes",
        "it can be given that size",
    );
    // Somebody has used the copy.
    place.done(&format!("{} && cp -a dst kept", send(&base)));
    place.done("qemu-io -c 'write -P 7 5M 1M' dst > /dev/null");
    refused(
        "$VELLUM receive dst < changes",
        "'dst' has been changed since",
    );
    // Times that were set back do not make it the same one again.
    place.done("cp -a kept dst");
    refused(
        "$VELLUM receive dst < changes",
        "'dst' has been changed since",
    );
    place.done("$VELLUM receive -q --force dst < changes");
    place.done("qemu-img compare -q src dst");
    assert_eq!(place.files("plain"), ["plain"]);
    assert_eq!(place.files("new"), [""; 0]);
    place.done("mkdir folder && mkfifo fifo");
    refused("$VELLUM receive folder < changes", "no regular file");
    refused("$VELLUM receive -n fifo < changes", "no regular file");
    place.done("$VELLUM receive -q --force kept < changes && qemu-img compare -q src kept");
}

#[test]
fn another_source_is_not_gone_on_with() {
    let place = Place::new();
    crate::source(&place);
    place.done("qemu-img bitmap --add src monday && qemu-io -c 'write 0 1M' src > /dev/null");
    place.done("$VELLUM send -q -o stream src");
    place.fails("head -c 3M stream | $VELLUM receive dst");
    let token = place.done("$VELLUM receive --resume-token dst");
    let refused = |line: &str, words: &str| {
        let said = place.fails(&format!("$VELLUM send {line} | cat"));
        assert!(said.contains(words), "{line}: {said}");
    };
    place.done("qemu-img create -q -f qcow2 short 1M && cp src copy");
    refused(&format!("--resume {token} short"), "of a disk of 64 MiB");
    refused(
        &format!("--resume {token} copy"),
        "not of this disk as it is now",
    );
    refused(&format!("--resume {token}0 src"), "no token to go on with");
    refused("--resume 00 src", "no token to go on with");
    let changed = token.replace(&token[70..78], "00000000");
    refused(&format!("--resume {changed} src"), "no token to go on with");
    refused(
        &format!("--resume {token} --since monday src"),
        "--resume excludes",
    );
    // The backing file has been touched.
    place.done("touch base");
    refused(
        &format!("--resume {token} src"),
        "not of this disk as it is now",
    );
}

#[test]
fn sources_that_cannot_be_sent_are_refused() {
    let place = Place::new();
    crate::source(&place);
    place.done("qemu-img convert -O raw src raw && qemu-img bitmap --add src monday");
    let refused = |line: &str, words: &str| {
        let said = place.fails(line);
        assert!(said.contains(words), "{line}: {said}");
    };
    refused("$VELLUM send --since a -f raw raw | cat", "have no bitmaps");
    refused("$VELLUM send --since a src | cat", "'a' not found");
    refused("$VELLUM send --base 00 src | cat", "no token of a stream");
    let base = "1".repeat(32);
    refused(
        &format!("$VELLUM send --base {base} src | cat"),
        "--base needs --since",
    );
    refused(
        "$VELLUM send -l a --since monday src | cat",
        "-l excludes --since",
    );
    refused("$VELLUM send none | cat", "No such file");
    refused("$VELLUM send -o src src", "is the same file as");
    refused(
        "script -qec '$VELLUM send src' /dev/null >&2; false",
        "a terminal",
    );
    refused(
        "$VELLUM receive -t unsafe dst < src",
        "-t unsafe is not possible",
    );
    refused(
        "$VELLUM receive -o backing_file=src dst < src",
        "no stream of 'vellum send'",
    );
    // A program that was killed has not said what it wrote.
    place.done(
        "coproc qemu-io src; sleep 0.5; kill -9 $COPROC_PID; wait $COPROC_PID 2> /dev/null; true",
    );
    refused("$VELLUM send --since monday src | cat", "inconsistent");
    // And one that is at work is not disturbed.
    refused(
        "coproc qemu-io src; read -r -n 8 -u ${COPROC[0]}; $VELLUM send src | cat; exit $?",
        "lock",
    );
}

/// Every bit of the header, and of the first records.
#[test]
fn a_damaged_stream_is_refused_before_it_is_applied() {
    let place = Place::new();
    crate::source(&place);
    place.done("$VELLUM send -q -o stream src");
    let stream = std::fs::read(place.path("stream")).unwrap();
    let header_bytes = 108;
    let places = (0..header_bytes).step_by(3);
    let places = places.chain((header_bytes..stream.len()).step_by(stream.len() / 20));
    for at in places {
        let mut damaged = stream.clone();
        damaged[at] ^= 1 << (at % 8);
        std::fs::write(place.path("damaged"), damaged).unwrap();
        let said = place.fails("$VELLUM receive dst < damaged");
        let is_known = ["damaged", "no stream", "not supported", "wrong"];
        assert!(
            is_known.iter().any(|word| said.contains(word)),
            "{at}: {said}"
        );
        assert!(!place.path("dst").exists(), "byte {at}");
        if at < header_bytes {
            assert_eq!(place.files("dst"), [""; 0], "byte {at}");
        } else {
            place.done("$VELLUM receive -q dst < stream && qemu-img compare -q src dst");
        }
        place.done("rm -f dst*");
    }
}

/// Headers with checksums that agree.
#[test]
fn sizes_that_nobody_has_are_refused() {
    let place = Place::new();
    crate::source(&place);
    place.done("$VELLUM send -q -o stream src");
    let stream = std::fs::read(place.path("stream")).unwrap();
    for (size_bytes, words) in [
        (1_u64 << 63, "No disk has such a size"),
        ((1 << 63) - 512, ""),
        (1 << 60, ""),
        (513, "No disk has such a size"),
    ] {
        let mut header = stream[..108].to_vec();
        header[24..32].copy_from_slice(&size_bytes.to_be_bytes());
        let sum = crc32c(&header[..104]);
        header[104..].copy_from_slice(&sum.to_be_bytes());
        std::fs::write(place.path("made-up"), &header).unwrap();
        for format in ["qcow2", "raw"] {
            let said = place.fails(&format!("$VELLUM receive -O {format} dst < made-up"));
            assert!(said.contains(words) && !said.contains("panicked"), "{said}");
            place.done("rm -f dst*");
        }
    }
}

fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            crc >> 1 ^ (0x82f6_3b78 & (crc & 1).wrapping_neg())
        })
    })
}

/// Their other files would have their names before the disk is whole, and nobody notes how those are.
#[test]
fn targets_of_several_files_are_refused() {
    let place = Place::new();
    crate::source(&place);
    place.done("$VELLUM send -q src > whole");
    place.done("qemu-img convert -O vmdk -o subformat=monolithicFlat src dst.vmdk");
    place.done("sha256sum dst* > before");
    for subformat in [
        "monolithicFlat",
        "twoGbMaxExtentFlat",
        "twoGbMaxExtentSparse",
    ] {
        let said = place.fails(&format!(
            "$VELLUM receive --force -O vmdk -o subformat={subformat} dst.vmdk < whole"
        ));
        assert!(said.contains("is one file"), "{said}");
    }
    place.done("sha256sum -c --status before");
    assert_eq!(place.files("dst"), ["dst-flat.vmdk", "dst.vmdk"]);
    place.done("$VELLUM receive -q -O vmdk one.vmdk < whole");

    place.done("qemu-img create -q -f qcow2 -o data_file=data,data_file_raw=on dst 64M");
    place.done("$VELLUM receive -q -n dst < whole");
    let base = place.done("$VELLUM receive --token dst");
    place
        .done("qemu-img bitmap --add src monday && qemu-io -c 'write -P 7 1M 64k' src > /dev/null");
    let send = format!("$VELLUM send -q src --since monday --base {base}");
    let said = place.fails(&format!("{send} | $VELLUM receive dst"));
    assert!(
        said.contains("has a data file or extents beside it"),
        "{said}"
    );
    place.done(&format!("{send} | $VELLUM receive -q --force dst"));
    place.done("qemu-img compare -q src dst");
}

#[test]
fn a_source_that_nobody_can_tell_of_is_not_gone_on_with() {
    let place = Place::new();
    crate::source(&place);
    // Of a vmdk all files count.
    place.done("qemu-img convert -O vmdk -o subformat=monolithicFlat src flat.vmdk");
    place.done("$VELLUM send -q -o stream flat.vmdk");
    place.fails("head -c 3M stream | $VELLUM receive dst");
    let token = place.done("$VELLUM receive --resume-token dst");
    place.done(&format!(
        "$VELLUM send -q --resume {token} flat.vmdk > rest"
    ));
    place.done("printf x | dd of=flat-flat.vmdk bs=1 seek=40M conv=notrunc status=none");
    let said = place.fails(&format!("$VELLUM send --resume {token} flat.vmdk | cat"));
    assert!(said.contains("not of this disk as it is now"), "{said}");

    let serve = "qemu-nbd --fork --pid-file pid -r -t -f qcow2 -k $PWD/socket src";
    place.done(serve);
    let served = "\"nbd+unix:///?socket=$PWD/socket\"";
    place.done(&format!("$VELLUM send -q -f raw {served} > stream"));
    place.fails("head -c 3M stream | $VELLUM receive other");
    let token = place.done("$VELLUM receive --resume-token other");
    let said = place.fails(&format!(
        "$VELLUM send -f raw --resume {token} {served} | cat"
    ));
    assert!(
        said.contains("is unknown, so it may have changed"),
        "{said}"
    );
    place.done("kill $(cat pid)");
}

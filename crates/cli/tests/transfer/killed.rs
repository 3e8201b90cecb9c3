//! Receivers that are killed, and streams that are cut off: what is left, and how it goes on.

use std::process::Command;

use crate::place::{Place, VELLUM, until};

/// A disk of 1 GiB, of which 600 MiB hold something.
fn large(place: &Place) {
    let writes: String = (0..30)
        .map(|n| format!(" -c 'write -P {} {}M 20M'", n + 1, n * 34))
        .collect();
    place.done(&format!(
        "qemu-img create -q -f qcow2 src 1G && qemu-io {writes} src > /dev/null"
    ));
}

/// Which stream it is.
fn token(place: &Place) -> String {
    let stream = std::fs::read(place.path("stream")).unwrap();
    stream[40..56]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// Goes on until the disk is whole, killing each receiver after a while; says how often.
fn receive_under_kills(place: &Place, first: &str, options: &str, seed: u64) -> u32 {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut kills = 0;
    let mut send = first.to_owned();
    loop {
        // The stream is a file, so that only the receiver's own speed counts.
        place.done(&format!("rm -f stream && {send} -o stream"));
        let mut receiver = place.start(&format!("receive -q {options} dst"), "stream");
        let wait = std::time::Duration::from_millis(random.u64(20..1500));
        std::thread::sleep(wait);
        receiver.kill().unwrap();
        if receiver.wait().unwrap().success() {
            return kills;
        }
        kills += 1;
        let state = place.done("cat dst.vellum-received 2> /dev/null || true");
        let is_begun = state.contains("\"receiving\":{");
        let is_whole = state.contains(&format!("\"token\":\"{}\"", token(place)));
        if is_begun && state.contains("\"complete\":null") {
            let is_half = place.path("dst.vellum-receiving").exists();
            // Changes begin with the note; the image has its name until that is there.
            let is_old = state.contains("\"new\":false") && state.contains("\"done\":0,");
            let looks_whole = place.path("dst").exists();
            assert!(is_old || is_half && !looks_whole, "{state}");
            send = "$VELLUM send -q src --resume $($VELLUM receive --resume-token dst)".to_owned();
        } else if is_begun || is_whole {
            // It was killed after its last byte: only the name was missing, if anything was.
            place.fails("$VELLUM receive --resume-token dst");
            return kills;
        }
        if kills > 40 {
            // A slow machine: the last one may end.
            place.done(&format!("rm -f stream && {send} -o stream"));
            place.done(&format!("$VELLUM receive -q {options} dst < stream"));
            return kills;
        }
    }
}

#[test]
fn a_killed_receiver_goes_on() {
    let place = Place::new();
    large(&place);
    for (seed, format) in [(1, "qcow2"), (2, "raw"), (3, "qcow2")] {
        let options = format!("-O {format}");
        let kills = receive_under_kills(&place, "$VELLUM send -q src", &options, seed);
        eprintln!("{format}: {kills} kills");
        place.done(&format!("qemu-img compare -q -F {format} src dst"));
        if format == "qcow2" {
            place.done("qemu-img check -q dst");
        }
        assert_eq!(place.files("dst"), ["dst", "dst.vellum-received"]);
        place.done("rm dst*");
    }
}

#[test]
fn a_receiver_of_changes_is_killed_and_goes_on() {
    let place = Place::new();
    large(&place);
    place.done("$VELLUM send -q src | $VELLUM receive -q dst");
    for seed in 4..7 {
        place.done("qemu-img bitmap --add src changed");
        let writes: String = (0..20)
            .map(|n| format!(" -c 'write -P {} {}M 25M'", n + seed * 20, n * 47))
            .collect();
        place.done(&format!(
            "qemu-io {writes} -c 'write -z 400M 70M' src > /dev/null"
        ));
        let send = "$VELLUM send -q src --since changed --base $($VELLUM receive --token dst)";
        let kills = receive_under_kills(&place, send, "", seed);
        eprintln!("{kills} kills");
        place.done("qemu-img compare -q src dst && qemu-img check -q dst");
        assert_eq!(place.files("dst"), ["dst", "dst.vellum-received"]);
        place.done("qemu-img bitmap --remove src changed");
    }
}

#[test]
fn a_stream_that_is_cut_off_says_how_to_go_on() {
    let place = Place::new();
    crate::source(&place);
    place.done("$VELLUM send -q -o stream src");
    let len_bytes = std::fs::metadata(place.path("stream")).unwrap().len();
    for bytes in [200, 500, 3000, 1 << 20, len_bytes - 1] {
        let said = place.fails(&format!("head -c {bytes} stream | $VELLUM receive dst"));
        assert!(
            said.contains("The stream ends before its end"),
            "{bytes}: {said}"
        );
        assert!(said.contains("vellum send DISK --resume"), "{said}");
        assert!(!place.path("dst").exists());
        place.done(
            "$VELLUM send -q src --resume $(sleep 0.1; $VELLUM receive --resume-token dst) | \
             $VELLUM receive -q dst",
        );
        place.done("qemu-img compare -q src dst && qemu-img check -q dst");
        let said = place.fails("$VELLUM receive --resume-token dst");
        assert!(said.contains("Nothing of 'dst' is half received"), "{said}");
        place.done("rm dst*");
    }
    for bytes in [0, 1, 100] {
        place.fails(&format!("head -c {bytes} stream | $VELLUM receive dst"));
        assert_eq!(place.files("dst"), [""; 0]);
    }
}

/// What a receiver leaves that is killed while it gives a disk its name.
#[test]
fn a_disk_that_lacks_only_its_name_gets_it() {
    let place = Place::new();
    crate::source(&place);
    place.done("$VELLUM send -q src | $VELLUM receive -q dst && cp dst.vellum-received whole");
    let token = place.done("$VELLUM receive --token dst");
    place.done("rm dst* && $VELLUM send -q -o stream src");
    place.fails("head -c 2M stream | $VELLUM receive -q dst");
    let half = place.done("cat dst.vellum-received");
    place.done("$VELLUM receive -q dst < stream && cp dst.vellum-received whole");
    let content = place.done("grep -o '\"left\":..[^]]*]' whole | cut -d[ -f3");
    let complete = half.replace("\"complete\":null", &format!("\"complete\":[{content}"));
    // The time of the inode is that of its last name.
    let noted = "sed -E 's/\\],\\[[0-9,]*\\]\\]/]]/'";
    let whole = place.done(&format!("{noted} whole"));
    for name in ["dst", "dst.vellum-receiving"] {
        std::fs::write(place.path("dst.vellum-received"), &complete).unwrap();
        if name != "dst" {
            place.done(&format!("mv dst {name}"));
        }
        assert_ne!(place.done("$VELLUM receive --token dst"), token);
        assert_eq!(place.files("dst"), ["dst", "dst.vellum-received"]);
        assert_eq!(place.done(&format!("{noted} dst.vellum-received")), whole);
        place.done("qemu-img compare -q src dst");
    }
}

#[test]
fn changes_may_be_sent_again_from_their_start() {
    let place = Place::new();
    crate::source(&place);
    place.done("qemu-img bitmap --add src monday");
    place.done("$VELLUM send -q src | $VELLUM receive -q dst");
    place.done(
        "head -c 3M /dev/urandom > noise && qemu-io -c 'write -s noise 1M 3M' src > /dev/null",
    );
    let send = "$VELLUM send -q src --since monday --base $($VELLUM receive --token dst)";
    place.done(&format!(
        "base=$($VELLUM receive --token dst); echo $base > token; {send} > changes"
    ));
    place.fails("head -c 2M changes | $VELLUM receive dst");
    // More has changed meanwhile, so that nothing can be gone on with.
    place.done("qemu-io -c 'write -P 9 2M 4M' src > /dev/null");
    let said = place.fails("$VELLUM send src --resume $($VELLUM receive --resume-token dst) | cat");
    assert!(said.contains("not of this disk as it is now"), "{said}");
    let said = place.fails("$VELLUM send -q src --since monday | $VELLUM receive dst");
    assert!(
        said.contains("half received, from another stream"),
        "{said}"
    );
    place.done("$VELLUM send -q src --since monday --base $(cat token) | $VELLUM receive -q dst");
    place.done("qemu-img compare -q src dst && qemu-img check -q dst");
}

#[test]
fn two_receivers_do_not_meet() {
    let place = Place::new();
    large(&place);
    place.done("$VELLUM send -q -o stream src");
    let fifo = place.path("fifo");
    place.done("mkfifo fifo");
    let mut feeder = Command::new("bash")
        .args(["-c", "exec 3> fifo; head -c 300000 stream >&3; sleep 1000"])
        .current_dir(fifo.parent().unwrap())
        .spawn()
        .unwrap();
    let mut first = place.start("receive -q dst", "fifo");
    until("begun", || place.path("dst.vellum-receiving").exists());
    let said = place.fails("$VELLUM receive dst < stream");
    assert!(said.contains("'dst' is being received"), "{said}");
    let said = place.fails("$VELLUM receive --force dst < stream");
    assert!(said.contains("'dst' is being received"), "{said}");
    // Nor does anybody else write to it.
    let said = place.fails(&format!("{VELLUM} io -c 'write 0 1M' dst.vellum-receiving"));
    assert!(said.contains("lock"), "{said}");
    first.kill().unwrap();
    first.wait().unwrap();
    feeder.kill().unwrap();
    feeder.wait().unwrap();
    let said = place.fails("$VELLUM receive dst < /dev/null");
    assert!(said.contains("standard input is empty"), "{said}");
    // The same stream from its start goes on as well.
    place.done("$VELLUM receive -q dst < stream && qemu-img compare -q src dst");
}

#[test]
fn a_full_disk_is_told_and_gone_on_from() {
    let place = Place::new();
    crate::source(&place);
    place.done("$VELLUM send -q -o stream src");
    for format in ["qcow2", "raw"] {
        let said = place.fails(&format!(
            "ulimit -f 4096; trap '' XFSZ; $VELLUM receive -O {format} dst < stream"
        ));
        assert!(said.contains("too large"), "{said}");
        match format {
            "qcow2" => assert!(said.contains("half received"), "{said}"),
            // It does not even get its length.
            _ => assert_eq!(place.files("dst"), [""; 0]),
        }
        assert!(!place.path("dst").exists());
        place.done(&format!("$VELLUM receive -q -O {format} dst < stream"));
        place.done(&format!(
            "qemu-img compare -q -F {format} src dst && rm dst*"
        ));
    }
}

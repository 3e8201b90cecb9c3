//! `vellum send` and `vellum receive` as people use them.

mod killed;
mod place;
mod refused;

use place::Place;

/// A disk with data, zeroes and a backing file, with clusters in no order.
fn source(place: &Place) {
    place.done("qemu-img create -q -f qcow2 base 64M");
    place.done("qemu-io -c 'write -P 1 0 9M' -c 'write -P 2 60M 1M' base > /dev/null");
    place.done("qemu-img create -q -f qcow2 -b base -F qcow2 src");
    place.done(
        "qemu-io -c 'write -P 3 20M 3M' -c 'write -P 4 8M 100k' -c 'write -z 1M 1M' \
         -c 'write -P 5 512 1k' src > /dev/null",
    );
    place.done(
        "head -c 5M /dev/urandom > noise && qemu-io -c 'write -s noise 30M 5M' src > /dev/null",
    );
}

#[test]
fn a_disk_arrives_in_every_format() {
    let place = Place::new();
    source(&place);
    for (format, options) in [
        ("qcow2", ""),
        ("qcow2", "-o cluster_size=4k,compat=0.10"),
        ("raw", ""),
        ("raw", "-o preallocation=full"),
    ] {
        place.done(&format!(
            "$VELLUM send -f qcow2 src | $VELLUM receive -q -O {format} {options} dst"
        ));
        place.done(&format!("qemu-img compare -q -f qcow2 -F {format} src dst"));
        if format == "qcow2" {
            place.done("qemu-img check -q dst");
        }
        assert_eq!(place.files("dst"), ["dst", "dst.vellum-received"]);
        place.done("rm dst*");
    }
    // What holds nothing costs nothing.
    let noise_bytes = 5 << 20;
    place.done("$VELLUM send -q -o stream src");
    let len_bytes = std::fs::metadata(place.path("stream")).unwrap().len();
    assert!(
        (noise_bytes..noise_bytes + (64 << 10)).contains(&len_bytes),
        "{len_bytes}"
    );
    place.done("$VELLUM receive -q -m 1 dst < stream && qemu-img compare -q src dst");
}

#[test]
fn every_kind_of_source_is_sent() {
    let place = Place::new();
    source(&place);
    place.done("qemu-img convert -O raw src raw");
    place.done(
        "qemu-img convert -O luks --object secret,id=s,data=x -o key-secret=s,iter-time=10 src luks",
    );
    place.done("qemu-img snapshot -c then src && qemu-io -c 'write -P 9 0 20M' src > /dev/null");
    place.done("qemu-img create -q -f qcow2 empty 0");
    for (send, source) in [
        ("-f raw raw", "-f raw raw"),
        ("-l then src", "-f raw raw"),
        ("src", "-f qcow2 src"),
        (
            "--object secret,id=s,data=x --image-opts driver=luks,key-secret=s,file.filename=luks",
            "-f raw raw",
        ),
        ("--level 0 src", "-f qcow2 src"),
        ("--level 19 -m 1 -T none -U src", "-f qcow2 src"),
        ("empty", "-f qcow2 empty"),
    ] {
        place.done(&format!("$VELLUM send -q {send} | $VELLUM receive -q dst"));
        place.done(&format!(
            "qemu-img compare -q {source} -F qcow2 dst && rm dst*"
        ));
    }
    // A server of others.
    place.done(
        "qemu-nbd -r -f raw -k $PWD/socket --pid-file=pid -t --fork raw && \
         $VELLUM send nbd+unix:///?socket=socket | $VELLUM receive -q dst; \
         code=$?; kill $(cat pid); exit $code",
    );
    place.done("qemu-img compare -q -f raw -F qcow2 raw dst");
}

#[test]
fn what_has_changed_is_applied_to_what_was_received() {
    let place = Place::new();
    source(&place);
    place.done("qemu-img bitmap --add -g 4k src monday");
    place.done("$VELLUM send -q src | tee >($VELLUM receive -q -O raw raw) | $VELLUM receive -q dst; sleep 1");
    let first = place.done("$VELLUM receive --token dst");
    assert_eq!(place.done("$VELLUM receive --token raw"), first);
    place.done(
        "qemu-io -c 'write -P 7 21M 1k' -c 'write -z 8M 64k' -c 'discard 60M 1M' src > /dev/null && \
         qemu-img bitmap --add src tuesday",
    );
    let send = format!("$VELLUM send -q src --since monday --base {first}");
    place.done(&format!(
        "{send} > changes && $VELLUM receive -q dst < changes"
    ));
    place.done("$VELLUM receive -q raw < changes");
    let len_bytes = std::fs::metadata(place.path("changes")).unwrap().len();
    assert!(len_bytes < 4096, "{len_bytes}");
    let same = "qemu-img compare -q src dst && qemu-img check -q dst && \
                qemu-img compare -q -F raw src raw";
    place.done(same);
    let second = place.done("$VELLUM receive --token dst");
    assert_ne!(first, second);
    place.done("qemu-io -c 'write -P 8 0 1M' src > /dev/null");
    place.done(&format!(
        "$VELLUM send -q src --bitmap tuesday --base {second} > changes && \
         $VELLUM receive -q dst < changes && $VELLUM receive -q raw < changes"
    ));
    place.done(same);
}

#[test]
fn an_image_that_is_there_is_overwritten_as_a_whole() {
    let place = Place::new();
    source(&place);
    for (format, options) in [("qcow2", ""), ("raw", "-O raw")] {
        place.done(&format!(
            "qemu-img create -q -f {format} dst 64M && \
             qemu-io -f {format} -c 'write -P 77 0 64M' dst > /dev/null"
        ));
        let said = place.fails("$VELLUM send -q src | $VELLUM receive dst");
        assert!(said.contains("'dst' exists: -n receives into it"), "{said}");
        place.done(&format!(
            "$VELLUM send -q src | $VELLUM receive -q -n {options} dst"
        ));
        place.done(&format!("qemu-img compare -q -F {format} src dst"));
    }
    place.done("$VELLUM send -q src | $VELLUM receive -q --force dst");
    place.done("qemu-img compare -q -F qcow2 src dst && qemu-img check -q dst");
}

/// What gives back what the receiver left behind goes past the sums.
#[test]
fn a_receiver_that_goes_on_says_that_the_checksums_are_gone() {
    let place = Place::new();
    source(&place);
    place.done("$VELLUM send -q -o whole src && qemu-img create -q -f qcow2 dst 64M");
    let summed = "driver=qcow2,file.filename=dst,checksums=on";
    place.done(&format!(
        "$VELLUM io --image-opts {summed} -c 'write -q 0 64k'"
    ));
    place.fails("head -c 3M whole | $VELLUM receive -n dst");
    let said = place.done(
        "token=$($VELLUM receive --resume-token dst) && \
         $VELLUM send -q --resume $token src | $VELLUM receive dst 2>&1",
    );
    assert!(
        said.contains("The checksums of the image are given up"),
        "{said}"
    );
    place.done("qemu-img compare -q src dst && qemu-img check -q dst");
}

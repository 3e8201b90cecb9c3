//! `bench` beside the real one: what it says, but for how long it took.

use crate::twins::Twins;

const IMAGES: &[&str] = &[
    "qemu-img create -q -f qcow2 a 10M",
    "qemu-io a: write -P 1 1M 2M",
    "qemu-img create -q -f raw r 10M",
];

#[test]
fn announcements_agree() {
    let twins = Twins::new(IMAGES);
    twins.all_same(&[
        "bench a",
        "bench -c 10 -d 3 -f qcow2 a",
        "bench -c 10 -w -f qcow2 a",
        "bench -w -c 10 --flush-interval 5 -d 4 -f qcow2 a",
        "bench -w -c 12 --flush-interval 5 -d 4 -f qcow2 a",
        "bench -w -c 10 --flush-interval 5 -d 4 --no-drain -f qcow2 a",
        "bench -w -c 4 --flush-interval 0 -f qcow2 a",
        "bench -c 10 --no-drain -f qcow2 a",
        "bench -c 10 --pattern 3 -f qcow2 a",
        "bench -w -c 10 --pattern 255 -f qcow2 a",
        "bench -s 1k -S 3k -c 10 -o 1M a",
        "bench -s 3 -c 5 a",
        "bench -S 0 -c 3 a",
        "bench -o 0xfff -c 2 a",
        "bench -c 2 -o 1 -w a",
        "bench -c 2 -o 9999k a",
        "bench -q -c 5 a",
        "bench -U a -c 3",
        "bench -n -t none a -c 3",
        "bench -i threads -c 3 a",
        "bench -i io_uring -c 3 a",
        "bench --aio native --cache none --count 3 a",
        "bench -t unsafe -w -c 3 a",
        "bench -t writethrough -w -c 3 a",
        "bench -t directsync -w -c 3 a",
        "bench --image-opts driver=qcow2,file.filename=a -c 3",
        "bench --image-opts driver=raw,file.filename=r --count=3 --depth=2 --buffer-size=8k \
         --step-size=16k --offset=32k --write --pattern=1",
        "bench -c 5 r",
        "bench -w -c 5 r",
    ]);
}

#[test]
fn what_was_written_agrees() {
    let twins = Twins::new(IMAGES);
    twins.all_same(&[
        "bench -w --pattern 7 -c 100 -d 8 -S 12k -s 5k -o 512 -f qcow2 a",
        "bench -w --pattern 9 -c 2000 -d 8 --flush-interval 16 -f raw r",
    ]);
    for image in ["a", "r"] {
        let ours = twins.ours(image);
        let theirs = twins.theirs(image);
        let words = [
            "compare",
            ours.to_str().expect("a name"),
            theirs.to_str().expect("a name"),
        ];
        assert_eq!(twins.run_theirs_on_ours(&words).code, Some(0), "{image}");
    }
}

#[test]
fn errors_agree() {
    let twins = Twins::new(IMAGES);
    for line in [
        "bench",
        "bench a b",
        "bench nosuch",
        "bench -x a",
        "bench -T x a",
        "bench -c",
        "bench -q -x a",
        "bench -c 0 -f qcow2 a",
        "bench -c -1 -f qcow2 a",
        "bench -c x -f qcow2 a",
        "bench -c 3000000000 a",
        "bench -d 0 a",
        "bench -d x a",
        "bench -d 3000000000 a",
        "bench -s 0 a",
        "bench -s 3G a",
        "bench -o -1 a",
        "bench -S -1 a",
        "bench -S 3G a -c 3",
        "bench -o 10M -c 2 a",
        "bench -o 20M -c 3 a",
        "bench -s 20M -c 2 a",
        "bench -w -o 20M -c 3 -f raw r",
        "bench -t bad a",
        "bench -i bad a",
        "bench -n a -c 3",
        "bench -i native a -c 3",
        "bench --pattern 256 -w a",
        "bench --pattern x -w a",
        "bench --flush-interval x a",
        "bench --flush-interval -1 -c 3 a",
        "bench --flush-interval 20 -c 10 -d 4 -f qcow2 a",
        "bench -w --flush-interval 2 -c 10 -d 4 -f qcow2 a",
        "bench --image-opts -f raw a",
        "bench -U -w a",
        "bench -f bad a",
        "bench -f qcow2 r",
    ] {
        assert_eq!(twins.same(line).code, Some(1), "{line}");
    }
}

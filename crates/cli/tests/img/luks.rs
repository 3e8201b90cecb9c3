//! Encrypted images beside the real `qemu-img`, in both directions.

use crate::twins::Twins;

const SECRET: &str = "--object secret,id=s,data=abc";

const IMAGES: &[&str] = &[
    "qemu-img create -q --object secret,id=s,data=abc -f qcow2 -o encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10 e 1M",
    "qemu-io --object secret,id=s,data=abc --image-opts driver=qcow2,encrypt.key-secret=s,file.filename=e: write -P 7 1000 300k",
    "qemu-img create -q --object secret,id=s,data=abc -f luks -o key-secret=s,iter-time=10,cipher-mode=cbc,ivgen-alg=essiv,ivgen-hash-alg=sha256 l 1M",
    "qemu-io --object secret,id=s,data=abc --image-opts driver=luks,key-secret=s,file.filename=l: write -z 0 1M; write -P 8 1000 300k",
    "qemu-img create -q --object secret,id=s,data=abc -f qcow2 -o encrypt.format=aes,encrypt.key-secret=s a 1M",
    "qemu-io --object secret,id=s,data=abc --image-opts driver=qcow2,encrypt.key-secret=s,file.filename=a: write -P 9 1000 300k",
    RAW[0],
    RAW[1],
];

const RAW: &[&str] = &[
    "qemu-img create -q -f raw r 1M",
    "qemu-io -f raw r: write -P 6 1000 300k",
];

const E: &str = "driver=qcow2,encrypt.key-secret=s,file.filename=e";
const L: &str = "driver=luks,key-secret=s,file.filename=l";
const A: &str = "driver=qcow2,encrypt.key-secret=s,file.filename=a";

/// Command lines of `amend`, for a volume and an image.
fn amends(volume: &str, image: &str) -> Vec<String> {
    let slots = [
        "new-secret=n",
        "state=foo",
        "state=active",
        "state=active,new-secret=n,keyslot=9,iter-time=10",
        "state=active,new-secret=n,keyslot=0,iter-time=10",
        "state=active,new-secret=none,iter-time=10",
        "state=active,new-secret=n,old-secret=s,iter-time=10",
        "state=active,new-secret=n,iter-time=10",
        "state=inactive",
        "state=inactive,new-secret=n",
        "state=inactive,iter-time=4",
        "state=inactive,keyslot=6",
        "state=inactive,old-secret=n",
        "state=inactive,keyslot=0",
        "cipher-alg=aes-128",
        "foo=1",
    ];
    let line = |slots: &str, prefix: &str, image: &str| {
        let options: Vec<String> = slots
            .split(',')
            .map(|option| format!("{prefix}{option}"))
            .collect();
        let objects = format!("{SECRET} --object secret,id=n,data=new");
        let options = options.join(",");
        format!("amend {objects} --image-opts {image} -o {options}")
    };
    slots
        .iter()
        .flat_map(|slots| [line(slots, "", volume), line(slots, "encrypt.", image)])
        .collect()
}

fn passphrases_are_changed_alike(twins: &Twins) {
    for line in amends(L, E) {
        twins.same(&line);
    }
    twins.same("info l");
    twins.same("info e");
    twins.same("amend -f luks -o help");
    let old = "-o encrypt.state=active,encrypt.new-secret=s";
    twins.same(&format!("amend {SECRET} -f qcow2 {old} a"));
    twins.same(&format!("amend {SECRET} -f raw -o state=active r"));
    for forced in [
        "state=active,new-secret=n,iter-time=10,keyslot=0",
        "state=inactive,keyslot=0",
    ] {
        let objects = "--object secret,id=n,data=new";
        twins.same(&format!(
            "amend --force {SECRET} {objects} --image-opts {E} -o encrypt.{}",
            forced.replace(',', ",encrypt.")
        ));
    }
    let forced = "--force -o state=inactive,keyslot=0";
    twins.same(&format!("amend {SECRET} --image-opts {L} {forced}"));
    twins.same(&format!("map {SECRET} --image-opts {L}"));
}

/// One test of several parts, since QEMU takes seconds to make the images.
#[test]
fn encrypted_images_are_used_alike() {
    let twins = Twins::copied(IMAGES);
    encryption_is_described_alike(&twins);
    what_is_encrypted_is_converted_away(&twins);
    secrets_are_refused_alike(&twins);
    encrypted_sizes_are_foretold_and_changed_alike(&twins);
    passphrases_are_changed_alike(&twins);
}

fn encryption_is_described_alike(twins: &Twins) {
    for image in ["e", "l", "a"] {
        twins.same(&format!("info {image}"));
        twins.same(&format!("info --output=json {image}"));
    }
    twins.same(&format!("info {SECRET} --image-opts {E}"));
    // The secret is not asked for where no data is read.
    twins.same(&format!("info --image-opts {E}"));
    twins.same(&format!("info --image-opts {L}"));
    twins.same("check e");
    for image in [E, L, A] {
        twins.same(&format!("map {SECRET} --output=json --image-opts {image}"));
    }
}

fn what_is_encrypted_is_converted_away(twins: &Twins) {
    for image in [E, L, A] {
        twins.same(&format!("convert {SECRET} --image-opts {image} -O raw out"));
        let same = twins.run_theirs_on_ours(&["compare", "-f", "raw", "out", "../theirs/out"]);
        assert_eq!(same.code, Some(0), "{image}: {same:?}");
    }
}

fn secrets_are_refused_alike(twins: &Twins) {
    twins.same(&format!("map --image-opts {L}"));
    for object in [
        "secret,id=s,data=wrong",
        "secret,id=s,file=none",
        "secret,id=s",
        "secret,data=x",
        "secret,id=1,data=x",
        "secret,id=s,data=@@,format=base64",
        "secret,id=s,data=x,format=hex",
        "secret,id=s,data=x,keyid=none",
        "secret,id=s,data=x,other=1",
    ] {
        twins.same(&format!("map --object {object} --image-opts {L}"));
        twins.same(&format!("map --object {object} --image-opts {E}"));
    }
    twins.all_same(&[
        "map e",
        "map l",
        "map -f luks r",
        "convert -O raw e out",
        "convert -c -O qcow2 --object secret,id=s,data=x -o encrypt.format=luks,encrypt.key-secret=s r out",
        "map --object secret,id=s,data=YWJj,format=base64 --image-opts driver=luks,key-secret=s,file.filename=l",
        "map --image-opts driver=qcow2,encrypt.format=aes,file.filename=e",
        "map --object secret,id=s,data=abc --image-opts driver=qcow2,encrypt.format=aes,encrypt.key-secret=s,file.filename=e",
    ]);
}

fn encrypted_sizes_are_foretold_and_changed_alike(twins: &Twins) {
    twins.all_same(&[
        "measure -O luks --size 1M",
        &format!("measure {SECRET} -O luks -o key-secret=s --size 1M"),
        &format!("measure {SECRET} -O luks -o key-secret=s,cipher-alg=aes-128 --size 1000"),
        &format!("measure {SECRET} -O qcow2 -o encrypt.format=luks,encrypt.key-secret=s --size 1M"),
        &format!("measure {SECRET} -O qcow2 --image-opts {E}"),
        &format!("resize {SECRET} --image-opts {L} 2M"),
        "info l",
        &format!("resize {SECRET} --image-opts {L} --preallocation=full +1M"),
        "info l",
        &format!("resize {SECRET} --image-opts {L} 1M"),
        &format!("resize {SECRET} --image-opts {L} --shrink 1M"),
        "info l",
        "resize -f luks l 3M",
        &format!("resize {SECRET} --image-opts {E} 2M"),
        "info --output=json e",
    ]);
}
#[test]
fn what_is_converted_to_encryption_is_read_by_qemu() {
    let twins = Twins::new(RAW);
    let luks = "-O luks -o key-secret=s,iter-time=10 r out";
    let qcow2 = "-O qcow2 -o encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10 r out";
    for (options, opened) in [
        (luks, "driver=luks,key-secret=s,file.filename=out"),
        (qcow2, "driver=qcow2,encrypt.key-secret=s,file.filename=out"),
    ] {
        twins.same(&format!("convert {SECRET} {options}"));
        let compare = format!("compare {SECRET} --image-opts {opened} driver=raw,file.filename=r");
        twins.same(&compare);
        let words: Vec<&str> = compare.split_whitespace().collect();
        let same = twins.run_theirs_on_ours(&words);
        assert_eq!(same.code, Some(0), "{options}: {same:?}");
        twins.same("info out");
        // A target that is there already.
        twins.same(&format!(
            "convert -n {SECRET} --target-image-opts r {opened}"
        ));
    }
}

/// QEMU's tool knows the option and refuses it; what it opens is what we make.
#[test]
fn a_header_may_stand_apart_from_its_payload() {
    let twins = Twins::new(RAW);
    let ours = |line: &str| twins.run_ours(&line.split_whitespace().collect::<Vec<_>>());
    let made = ours(&format!(
        "create -q {SECRET} -f luks -o key-secret=s,iter-time=10,detached-header=on h"
    ));
    assert_eq!(made.code, Some(0), "{made:?}");
    std::fs::write(twins.ours("p"), vec![0; 1 << 20]).unwrap();
    for name in ["h", "p"] {
        std::fs::copy(twins.ours(name), twins.theirs(name)).unwrap();
    }
    let volume = "driver=luks,key-secret=s,file.filename=p,header.filename=h";
    // Both write, and each reads what the other has written.
    twins.same(&format!(
        "convert -n {SECRET} --target-image-opts r {volume}"
    ));
    let compare = format!("compare {SECRET} --image-opts {volume} driver=raw,file.filename=r");
    twins.same(&compare);
    let compared = twins.run_theirs_on_ours(&compare.split_whitespace().collect::<Vec<_>>());
    assert_eq!(compared.code, Some(0), "{compared:?}");
    std::fs::copy(twins.theirs("p"), twins.ours("p")).unwrap();
    assert_eq!(ours(&compare).code, Some(0));
    let payload = std::fs::read(twins.ours("p")).unwrap();
    assert!(payload != std::fs::read(twins.ours("r")).unwrap());
    twins.same(&format!("info {SECRET} --image-opts {volume}"));
    twins.same(&format!(
        "info {SECRET} --output=json --image-opts {volume}"
    ));
    twins.same(&format!("resize -q {SECRET} --image-opts {volume} 2M"));
    twins.same(&format!("info {SECRET} --image-opts {volume}"));
    let theirs = twins.both(&[
        "create",
        "-f",
        "luks",
        "-o",
        "detached-header=on,key-secret=s",
        "n",
    ]);
    assert_eq!(theirs[1].code, Some(1), "it can by now: compare");
}

#[test]
fn encrypted_images_are_made_alike() {
    let twins = Twins::new(RAW);
    let q = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10";
    for options in [
        "-f luks -o key-secret=s,iter-time=10,cipher-alg=serpent-128,hash-alg=sha512 n 1M",
        "-f luks -o key-secret=s n",
        "-f luks n 1M",
        "-f luks -o key-secret=none n 1M",
        "-f luks -o key-secret=s,cipher-alg=rot13 n 1M",
        "-f luks -o key-secret=s,cipher-alg=des n 1M",
        "-f luks -o key-secret=s,cipher-mode=xts,cipher-alg=cast5-128 n 1M",
        "-f luks -o key-secret=s,ivgen-alg=essiv,ivgen-hash-alg=sha1 n 1M",
        "-f luks -o key-secret=s,hash-alg=foo n 1M",
        "-f luks -o key-secret=s,iter-time=10 -b r -F raw n 1M",
        "-f qcow2 -o encrypt.format=foo,encrypt.key-secret=s n 1M",
        "-f qcow2 -o encrypt.format=luks n 1M",
        "-f qcow2 -o encrypt.key-secret=s n 1M",
        "-f qcow2 -o encryption=on,encrypt.format=luks n 1M",
        "-f qcow2 -o encrypt.format=luks,encrypt.key-secret=s,encrypt.cipher-alg=foo n 1M",
    ] {
        twins.same(&format!("create {SECRET} {options}"));
    }
    for more in [
        "",
        ",preallocation=full",
        ",cluster_size=512",
        ",compat=0.10",
        ",extended_l2=on",
    ] {
        twins.same(&format!("create {SECRET} -f qcow2 -o {q}{more} n 1M"));
        twins.same_but_places("info n");
    }
    twins.same("create -f luks -o help");
}

//! The golden images: each is a name and a shell script that makes NAME.qcow2, and the files that
//! it needs, in the current folder.

/// What every script may use.
pub const PRELUDE: &str = r#"
set -e
# create [OPTION...] FILE [SIZE]
create() { qemu-img create -q -f qcow2 "$@" >/dev/null; }
# io FILE COMMAND...
io() {
    file=$1
    shift
    for command; do set -- "$@" -c "$command"; shift; done
    qemu-io -f qcow2 -d unmap "$@" "$file" >/dev/null
}
# poke FILE OFFSET BYTES-IN-OCTAL: overwrites bytes of a file
poke() { printf "$3" | dd of="$1" bs=1 seek="$2" conv=notrunc status=none; }
# text SIZE: lines that compress, but not to nothing
text() { seq 1 1000000 | head -c "$1"; }
"#;

/// One image to make.
pub struct Kind {
    /// Names the image and its files.
    pub name: String,
    /// Makes it.
    pub script: String,
}

/// Writes that leave holes, partial clusters and a tail, in an image of 1 MiB and a bit.
const SMALL_WRITES: &str = "'write -P 0x11 0 3k' 'write -P 0x22 10000 100' \
    'write -P 0x33 256k 70000' 'write -P 0x44 1048000 1000' 'write -z 300k 20k'";
/// The same for an image of 9 MiB, whose clusters are large.
const LARGE_WRITES: &str = "'write -P 0x55 0 4k' 'write -P 0x66 2097000 1000' \
    'write -P 0x77 5M 3M' 'write -z 6M 512k' 'write -P 0x88 9436000 1000'";

/// All images.
pub fn all() -> Vec<Kind> {
    let mut kinds = Vec::new();
    cluster_sizes(&mut kinds);
    refcount_widths(&mut kinds);
    kinds.extend(FIXED.iter().map(|&(name, script)| Kind {
        name: name.to_owned(),
        script: script.to_owned(),
    }));
    kinds
}

fn cluster_sizes(kinds: &mut Vec<Kind>) {
    for bits in 9..=21 {
        let bytes = 1_u32 << bits;
        let (size, writes) = if bits <= 16 {
            (1_049_088, SMALL_WRITES)
        } else {
            (9_437_696, LARGE_WRITES)
        };
        let mut add = |label: &str, options: &str| {
            let name = format!("{label}-{bytes}");
            let script = format!(
                "create -o cluster_size={bytes}{options} {name}.qcow2 {size}\n\
                 io {name}.qcow2 {writes}"
            );
            kinds.push(Kind { name, script });
        };
        add("cluster", "");
        if bits >= 14 {
            add("extended", ",extended_l2=on");
        }
    }
}

fn refcount_widths(kinds: &mut Vec<Kind>) {
    for order in 0..=6 {
        let bits = 1 << order;
        let name = format!("refcount-{bits}");
        let script = format!(
            "create -o refcount_bits={bits},cluster_size=4k {name}.qcow2 1049088\n\
             io {name}.qcow2 {SMALL_WRITES}"
        );
        kinds.push(Kind { name, script });
    }
}

/// Images that are one of their kind. In those that are poked, 64K clusters lie
/// as qemu-img puts them: header, refcount table, refcount block, L1, L2, data.
const FIXED: &[(&str, &str)] = &[
    ("empty", "create empty.qcow2 0"),
    (
        "version2",
        "create -o compat=0.10 version2.qcow2 1M
         io version2.qcow2 'write -P 1 0 64k' 'write -P 2 200k 1k' 'write -z 64k 64k'",
    ),
    (
        "zeroes",
        "create zeroes.qcow2 2M
         io zeroes.qcow2 'write -P 9 0 1M' 'write -z 64k 64k' 'write -z -u 256k 128k' 'discard 512k 64k' \
             'write -z 1536k 256k'",
    ),
    (
        "preallocated",
        "create -o preallocation=metadata preallocated.qcow2 4M
         io preallocated.qcow2 'write -P 3 1M 100k'",
    ),
    (
        "lazy-refcounts",
        "create -o lazy_refcounts=on lazy-refcounts.qcow2 1M
         io lazy-refcounts.qcow2 'write -P 3 0 100k'",
    ),
    (
        "dirty",
        "create -o lazy_refcounts=on dirty.qcow2 1M
         qemu-io -c 'write -P 3 0 100k' -c flush -c abort dirty.qcow2 >/dev/null 2>&1 || true",
    ),
    (
        "zlib",
        "text 600000 >source
         qemu-img convert -q -c -f raw -O qcow2 source zlib.qcow2",
    ),
    (
        "zlib-then-written",
        "text 400000 >source
         qemu-img convert -q -c -f raw -O qcow2 source zlib-then-written.qcow2
         io zlib-then-written.qcow2 'write -P 7 100000 3000' 'write -z 128k 64k'",
    ),
    (
        "zlib-512",
        "text 60000 >source
         qemu-img convert -q -c -f raw -O qcow2 -o cluster_size=512 source zlib-512.qcow2",
    ),
    (
        "zlib-2097152",
        "text 5000000 >source
         qemu-img convert -q -c -f raw -O qcow2 -o cluster_size=2M source zlib-2097152.qcow2",
    ),
    (
        "zstd",
        "text 600000 >source
         qemu-img convert -q -c -f raw -O qcow2 -o compression_type=zstd source zstd.qcow2",
    ),
    (
        "zstd-extended",
        "text 600000 >source
         qemu-img convert -q -c -f raw -O qcow2 -o compression_type=zstd,extended_l2=on \
             source zstd-extended.qcow2
         io zstd-extended.qcow2 'write -P 5 70000 5000'",
    ),
    (
        "snapshots",
        "create snapshots.qcow2 1M
         io snapshots.qcow2 'write -P 1 0 256k'
         qemu-img snapshot -c first snapshots.qcow2
         io snapshots.qcow2 'write -P 2 64k 64k'
         qemu-img snapshot -c 'second one' snapshots.qcow2
         io snapshots.qcow2 'write -P 3 128k 4k' 'write -z 0 64k'",
    ),
    (
        "bitmaps",
        "create bitmaps.qcow2 1M
         qemu-img bitmap --add -g 64k bitmaps.qcow2 nightly
         qemu-img bitmap --add --disable bitmaps.qcow2 weekly
         io bitmaps.qcow2 'write -P 1 100k 100k'",
    ),
    (
        "data-file",
        "create -o data_file=data-file.raw data-file.qcow2 1M
         io data-file.qcow2 'write -P 1 0 64k' 'write -P 2 300k 10k' 'write -z 512k 64k'",
    ),
    (
        "data-file-raw",
        "create -o data_file=data-file-raw.raw,data_file_raw=on data-file-raw.qcow2 1M
         io data-file-raw.qcow2 'write -P 1 0 64k' 'write -P 2 300k 10k' 'write -z 512k 64k'",
    ),
    (
        "overlay",
        "text 700000 >overlay.raw
         create -b overlay.raw -F raw overlay.qcow2
         io overlay.qcow2 'write -P 1 0 1k' 'write -z 128k 64k' 'write -P 2 650000 10000'",
    ),
    (
        "overlay-extended",
        "text 700000 >overlay-extended.raw
         create -o extended_l2=on,cluster_size=128k -b overlay-extended.raw -F raw overlay-extended.qcow2
         io overlay-extended.qcow2 'write -P 1 5000 1k' 'write -z 128k 8k' 'write -z 260k 70k' \
             'discard 400k 64k' 'write -P 2 650000 10000'",
    ),
    (
        "chain",
        "text 300000 >chain.raw
         create -b chain.raw -F raw chain-middle.qcow2 1M
         io chain-middle.qcow2 'write -P 1 200k 200k' 'write -P 4 700k 100k'
         create -o cluster_size=4k -b chain-middle.qcow2 -F qcow2 chain.qcow2 800k
         io chain.qcow2 'write -P 2 10k 1k' 'write -z 240k 4k'",
    ),
    (
        "longer-than-its-backing-file",
        "text 100001 >longer.raw
         create -b longer.raw -F raw longer-than-its-backing-file.qcow2 1M
         io longer-than-its-backing-file.qcow2 'write -P 1 98304 10' 'write -P 2 600k 1k'",
    ),
    (
        "encrypted",
        "create --object secret,id=key,data=123456 -o encrypt.format=aes,encrypt.key-secret=key \
             encrypted.qcow2 1M",
    ),
    (
        "unknown-compatible-bits",
        "create unknown-compatible-bits.qcow2 1M
         io unknown-compatible-bits.qcow2 'write -P 1 0 64k'
         poke unknown-compatible-bits.qcow2 80 '\\200'
         poke unknown-compatible-bits.qcow2 88 '\\200'",
    ),
    (
        "unknown-incompatible-bit",
        "create unknown-incompatible-bit.qcow2 1M
         poke unknown-incompatible-bit.qcow2 72 '\\200'",
    ),
    (
        "marked-corrupt",
        "create marked-corrupt.qcow2 1M
         io marked-corrupt.qcow2 'write -P 1 0 64k'
         poke marked-corrupt.qcow2 79 '\\002'",
    ),
    (
        "leak",
        "create leak.qcow2 1M
         io leak.qcow2 'write -P 1 0 128k'
         poke leak.qcow2 262144 '\\000\\000\\000\\000\\000\\000\\000\\000'",
    ),
    (
        "refcount-too-low",
        "create refcount-too-low.qcow2 1M
         io refcount-too-low.qcow2 'write -P 1 0 128k'
         poke refcount-too-low.qcow2 131082 '\\000\\000'",
    ),
    (
        "refcount-too-high",
        "create refcount-too-high.qcow2 1M
         io refcount-too-high.qcow2 'write -P 1 0 128k'
         poke refcount-too-high.qcow2 131082 '\\000\\003'",
    ),
    (
        "shared-cluster",
        "create shared-cluster.qcow2 1M
         io shared-cluster.qcow2 'write -P 1 0 128k'
         poke shared-cluster.qcow2 262152 '\\200\\000\\000\\000\\000\\005\\000\\000'",
    ),
    (
        "beyond-the-end",
        "create beyond-the-end.qcow2 1M
         io beyond-the-end.qcow2 'write -P 1 0 128k'
         poke beyond-the-end.qcow2 262152 '\\200\\000\\000\\000\\100\\000\\000\\000'",
    ),
    (
        "unaligned-cluster",
        "create unaligned-cluster.qcow2 1M
         io unaligned-cluster.qcow2 'write -P 1 0 128k'
         poke unaligned-cluster.qcow2 262158 '\\002'",
    ),
    (
        "copied-flag-missing",
        "create copied-flag-missing.qcow2 1M
         io copied-flag-missing.qcow2 'write -P 1 0 128k'
         poke copied-flag-missing.qcow2 262144 '\\000'",
    ),
];

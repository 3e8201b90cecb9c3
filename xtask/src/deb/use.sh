# What scripts do with qemu-utils, in a system that has Vellum's package in its place.
# Run by `cargo xtask deb --check` with `sh -eu` inside the system.

say() { echo "deb: $*"; }
dpkg -s vellum | grep -q '^Provides: qemu-utils'
for name in qemu-img qemu-io qemu-nbd qemu-storage-daemon; do
    test -L "/usr/bin/$name"
    "$name" --version > /dev/null
done
qemu-img --version | grep -q '^qemu-img version 10'
test -e /usr/share/man/man1/qemu-img.1.gz
bash -n /usr/share/bash-completion/completions/vellum
say "names, versions, manuals, completions"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

# A cloud image is grown, gets an overlay for each machine, and one of these is sealed.
head -c 3000000 /dev/urandom > data
qemu-img create -q -f raw disk.raw 64M
dd if=data of=disk.raw conv=notrunc status=none
qemu-img convert -f raw -O qcow2 -c disk.raw base.qcow2
qemu-img resize -q base.qcow2 +64M
for machine in one two; do
    qemu-img create -q -f qcow2 -b base.qcow2 -F qcow2 "$machine.qcow2"
done
qemu-io -c 'write -P 0x11 0 64k' -c 'read -P 0x11 0 64k' one.qcow2 | grep -q 'wrote 65536'
qemu-img snapshot -c fresh one.qcow2
qemu-img snapshot -l one.qcow2 | grep -q fresh
qemu-img commit -q two.qcow2
qemu-img rebase -f qcow2 -b '' one.qcow2
qemu-img check -q one.qcow2
size=$(qemu-img info --output=json one.qcow2 | sed -n 's/.*"virtual-size": \([0-9]*\),/\1/p' | tail -n 1)
test "$size" -eq $((128 * 1024 * 1024))
qemu-img convert -O raw base.qcow2 back.raw
cmp -n 3000000 data back.raw
qemu-img compare -q base.qcow2 back.raw
qemu-img measure -O qcow2 back.raw | grep -q '^required size: '
qemu-img map --output=json base.qcow2 | grep -q '"depth": 0'
if qemu-img info missing.qcow2 2> error; then exit 1; fi
grep -q "^qemu-img: Could not open 'missing.qcow2'" error
say "images are made, grown, sealed, compared"

# A server in the background, as scripts start one, and a client of the same package.
qemu-nbd --fork --pid-file=nbd.pid -t -f qcow2 -k "$work/nbd.sock" base.qcow2
test -S nbd.sock
qemu-nbd --list -k "$work/nbd.sock" | grep -q 'exports available: 1'
kill "$(cat nbd.pid)"
say "a server in the background"

# Scripts of other packages, where these are installed.
if command -v cloud-localds > /dev/null; then
    printf '#cloud-config\n' > user-data
    cloud-localds -d qcow2 seed.img user-data
    qemu-img info seed.img | grep -q 'file format: qcow2'
    say "cloud-localds"
fi
if command -v mke2fs > /dev/null; then
    mkdir tree && cp data tree/
    mke2fs -q -t ext4 -d tree fs.raw 16M
    qemu-img convert -f raw -O qcow2 fs.raw fs.qcow2
    qemu-img convert -f qcow2 -O raw fs.qcow2 fs2.raw
    e2fsck -fn fs2.raw > /dev/null
    say "a file system through qcow2 and back"
fi
say "everything ran"

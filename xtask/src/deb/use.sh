# What scripts do with qemu-utils, in a system that has Vellum's package in its place.
# Run by `cargo xtask deb --check` with `sh -eu` inside the system.

say() { echo "deb: $*"; }
dpkg -s vellum | grep -q '^Provides: qemu-utils'
for name in qemu-img qemu-io qemu-nbd qemu-storage-daemon; do
    # Where Debian's qemu-system-common is there, the daemon is its file, and stays.
    test -L "/usr/bin/$name" ||
        test "$(dpkg -S "/usr/bin/$name")" = 'qemu-system-common: /usr/bin/qemu-storage-daemon'
    "$name" --version > /dev/null
done
qemu-img --version | grep -q '^qemu-img version 10'
test -e /usr/share/man/man1/qemu-img.1.gz
bash -n /usr/share/bash-completion/completions/vellum
say "names, versions, manuals, completions"

# What the service begins with can be served.
vellum daemon --config /etc/vellum/disks.toml --check | grep -q nbd-server-start
test -e /usr/lib/systemd/system/vellum.service
say "the file of disks"

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

# What Proxmox VE does with an image: make it, grow it, snapshot it, roll back, move it.
qemu-img create -q -o preallocation=metadata -f qcow2 vm-100-disk-0.qcow2 1G
qemu-img resize -q -f qcow2 vm-100-disk-0.qcow2 1181116416
qemu-img snapshot -c before vm-100-disk-0.qcow2
qemu-io -c 'write -P 5 0 1M' vm-100-disk-0.qcow2 > /dev/null
qemu-img snapshot -a before vm-100-disk-0.qcow2
qemu-io -r -c 'read -P 0 0 1M' vm-100-disk-0.qcow2 > /dev/null
qemu-img snapshot -d before vm-100-disk-0.qcow2
qemu-img convert -p -n -f raw -O qcow2 disk.raw vm-100-disk-0.qcow2 | grep -q '(100.00/100%)'
qemu-img info -f qcow2 --output=json vm-100-disk-0.qcow2 | grep -q '"virtual-size": 1181116416'
qemu-img check -q -f qcow2 vm-100-disk-0.qcow2
say "a virtual disk from birth to move"

# What Packer and image builders do: convert with a compressed result, then an overlay
# whose backing file moves.
qemu-img convert -c -f qcow2 -O qcow2 -o compression_type=zstd vm-100-disk-0.qcow2 packed.qcow2
qemu-img create -q -f qcow2 -b packed.qcow2 -F qcow2 -o cluster_size=64k,lazy_refcounts=on run.qcow2
mkdir moved && mv packed.qcow2 moved/
qemu-img rebase -u -f qcow2 -F qcow2 -b moved/packed.qcow2 run.qcow2
qemu-img info --backing-chain run.qcow2 | grep -c '^image: ' | grep -qx 2
qemu-img amend -f qcow2 -o lazy_refcounts=off run.qcow2
say "images of a builder"

# An incremental backup over NBD, as virtnbdbackup makes it.
if command -v nbdcopy > /dev/null; then
    qemu-img create -q -f qcow2 live.qcow2 64M
    qemu-io -c 'write -P 1 0 8M' live.qcow2 > /dev/null
    qemu-nbd --fork --pid-file=full.pid -r -t -f qcow2 -x vda -k "$work/full.sock" live.qcow2
    nbdcopy "nbd+unix:///vda?socket=$work/full.sock" full.raw
    kill "$(cat full.pid)"
    qemu-img bitmap --add live.qcow2 since-full
    qemu-io -c 'write -P 2 4M 1M' -c 'write -P 3 40M 64k' live.qcow2 > /dev/null
    qemu-nbd --fork --pid-file=inc.pid -r -t -f qcow2 -B since-full -x vda -k "$work/inc.sock" live.qcow2
    nbdinfo --map=qemu:dirty-bitmap:since-full --json "nbd+unix:///vda?socket=$work/inc.sock" > map
    test "$(grep -c '"description": "dirty"\|"type": 1' map)" -ge 2
    nbdcopy "nbd+unix:///vda?socket=$work/inc.sock" later.raw
    kill "$(cat inc.pid)"
    qemu-img compare -q -f raw -F qcow2 later.raw live.qcow2
    if qemu-img compare -q -f raw -F qcow2 full.raw live.qcow2; then exit 1; fi
    say "a backup over NBD"
fi

# Disks of libvirt's pools, which has qemu-img make, copy and grow them.
if command -v virsh > /dev/null && command -v libvirtd > /dev/null; then
    libvirtd > libvirtd.log 2>&1 &
    daemon=$!
    pool=$(mktemp -d)
    volume() { virsh -q -c storage:///system "$@" > /dev/null; }
    tries=0
    until volume pool-list 2> /dev/null; do
        tries=$((tries + 1))
        test "$tries" -lt 100
        sleep 0.1
    done
    volume pool-create-as vellum dir --target "$pool"
    volume vol-create-as vellum disk.qcow2 1G --format qcow2
    volume vol-create-as vellum full.qcow2 16M --format qcow2 --allocation 16M
    volume vol-create-as vellum top.qcow2 1G --format qcow2 --backing-vol disk.qcow2 --backing-vol-format qcow2
    volume vol-clone --pool vellum disk.qcow2 copy.qcow2
    volume vol-resize --pool vellum copy.qcow2 2G
    qemu-img info "$pool/copy.qcow2" | grep -q 'virtual size: 2 GiB'
    qemu-img info "$pool/top.qcow2" | grep -q "^backing file: $pool/disk.qcow2"
    qemu-img check -q "$pool/copy.qcow2"
    volume pool-destroy vellum
    kill "$daemon"
    rm -rf "$pool"
    say "volumes of libvirt"
fi

say "everything ran"

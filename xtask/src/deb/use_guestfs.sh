# What scripts do with libguestfs and its tools, which make, look into and copy images with
# qemu-img, in a system that has Vellum's package in its place. Run by `cargo xtask deb --check`
# with `sh -eu` inside the system, in a folder that holds images of QEMU's own qemu-img
# (real.qcow2, and real-top.qcow2 on it). What is left there is checked with that afterwards.
# Each tool boots a machine of its own. KVM is not asked for: a /dev/kvm that is there may fail.

say() { echo "guestfs: $*"; }
export LIBGUESTFS_BACKEND=direct
export HOME=/root
export LIBGUESTFS_BACKEND_SETTINGS=force_tcg

# A small tree that is taken for a Debian.
mkdir -p tree/bin tree/dev tree/etc tree/root tree/usr/bin tree/var/log
echo 12.0 > tree/etc/debian_version
printf 'NAME="Debian GNU/Linux"\nID=debian\nVERSION_ID="12"\nPRETTY_NAME="Debian 12"\n' > tree/etc/os-release
echo 'LABEL=root / ext4 defaults 0 1' > tree/etc/fstab
echo fresh > tree/etc/hostname
: > tree/etc/machine-id
head -c 3000000 /dev/urandom > tree/root/data
sum=$(md5sum < tree/root/data | cut -d ' ' -f 1)
tar -C tree -cf tree.tar .

guestfish > facts <<EOF
disk-create full.raw raw 64M preallocation:full
disk-create disk.qcow2 qcow2 128M
disk-create ahead.qcow2 qcow2 128M preallocation:metadata
disk-create small.qcow2 qcow2 128M clustersize:4096 compat:1.1
disk-create old.qcow2 qcow2 128M compat:0.10
disk-create top.qcow2 qcow2 -1 backingfile:disk.qcow2 backingformat:qcow2
disk-format full.raw
disk-format real-top.qcow2
disk-virtual-size top.qcow2
disk-virtual-size real.qcow2
disk-has-backing-file top.qcow2
disk-has-backing-file disk.qcow2
EOF
printf 'raw\nqcow2\n134217728\n134217728\ntrue\nfalse\n' | cmp - facts
qemu-img info old.qcow2 | grep -q 'compat: 0.10'
qemu-img info small.qcow2 | grep -q 'cluster_size: 4096'
say "images of every kind are made, and known"

virt-make-fs --format=qcow2 --type=ext4 --label=root --partition=gpt --size=+60M tree made.qcow2
virt-make-fs --format=qcow2 --type=ext4 tree.tar packed.qcow2
qemu-img info made.qcow2 | grep -q 'file format: qcow2'
say "virt-make-fs"

# Images of all kinds in one machine, with changes in the overlays only.
guestfish > read-back <<EOF
add top.qcow2 format:qcow2
add ahead.qcow2
add small.qcow2
add old.qcow2 format:qcow2 discard:enable
add real-top.qcow2 format:qcow2
run
part-disk /dev/sda gpt
mkfs ext4 /dev/sda1 label:root
mkfs ext4 /dev/sdb
mkfs ext4 /dev/sdc blocksize:1024
mkfs ext4 /dev/sdd
mkfs ext4 /dev/sde
mount /dev/sda1 /
tar-in tree.tar /
write /etc/motd "by guestfish\n"
checksum md5 /root/data
umount /
mount /dev/sdb /
copy-in tree /
checksum md5 /tree/root/data
umount /
mount /dev/sdc /
copy-in tree /
fill 0x55 3M /filled
rm /filled
checksum md5 /tree/root/data
umount /
mount-options discard /dev/sdd /
copy-in tree /
checksum md5 /tree/root/data
rm-rf /tree
fstrim /
umount /
mount /dev/sde /
copy-in tree/root/data /
checksum md5 /data
umount /
zero-device /dev/sdb
EOF
test "$(grep -c "^$sum$" read-back)" -eq 5
for image in top ahead small old real-top; do qemu-img check -q "$image.qcow2"; done
say "guestfish writes to images of either program"

guestfish --ro -a top.qcow2 -a real-top.qcow2 -a packed.qcow2 -a full.raw > read-back <<EOF
run
mount /dev/sda1 /
cat /etc/motd
write /etc/motd "never seen again\n"
checksum md5 /root/data
umount /
mount-ro /dev/sdb /
checksum md5 /data
umount /
mount-ro /dev/sdc /
checksum md5 /root/data
blockdev-getsize64 /dev/sdd
EOF
test "$(grep -c "^$sum$" read-back)" -eq 3
grep -qx 'by guestfish' read-back
grep -qx 67108864 read-back
say "guestfish --ro, in overlays that it throws away"

# Disks behind servers: one is written, the other only seems to be, through an overlay on its export.
qemu-nbd --fork --pid-file=rw.pid -t -f qcow2 -x disk -k "$PWD/rw.sock" top.qcow2
qemu-nbd --fork --pid-file=ro.pid -t -r -f qcow2 -x disk -k "$PWD/ro.sock" made.qcow2
guestfish > read-back <<EOF
add disk format:raw protocol:nbd server:unix:$PWD/rw.sock
add disk format:raw protocol:nbd server:unix:$PWD/ro.sock readonly:true
run
mount /dev/sda1 /
cat /etc/motd
write /etc/issue "through a server\n"
umount /
mount /dev/sdb1 /
write /etc/hostname "never seen again\n"
checksum md5 /root/data
EOF
grep -qx 'by guestfish' read-back
grep -qx "$sum" read-back
for server in rw ro; do
    pid=$(cat "$server.pid")
    kill "$pid"
    while kill -0 "$pid" 2> /dev/null; do sleep 0.1; done
done
say "guestfish on disks behind qemu-nbd"

virt-edit -a top.qcow2 /etc/motd -e 's/guestfish/virt-edit/'
virt-cat -a top.qcow2 /etc/motd /etc/issue > read-back
printf 'by virt-edit\nthrough a server\n' | cmp - read-back
virt-df --csv -a top.qcow2 -a packed.qcow2 | grep -c '^top.qcow2+,/dev/sd' | grep -qx 2
virt-format -a ahead.qcow2 --partition=gpt --filesystem=ext4 --label=formatted
say "virt-edit, -cat, -df, -format"

virt-sparsify -q --compress --convert qcow2 made.qcow2 sparse.qcow2
virt-sparsify -q --in-place made.qcow2
qemu-img create -q -f qcow2 larger.qcow2 400M
virt-resize -q --expand /dev/sda1 made.qcow2 larger.qcow2
say "virt-sparsify, -resize"

# Runs in the guest, on a disk that one server has from another: what was written to it
# before is there (/sum is the md5 sum of that file), and more is written, trimmed and checked.
set -e
disk=/dev/vda
new=/mnt/written-through-two-servers
sum() { md5sum <"$1" | cut -d ' ' -f 1; }

mount -t ext4 -o discard $disk /mnt
[ "$(sum /mnt/written-by-the-guest/random)" = "$(cat /sum)" ]
mkdir $new
dd if=/dev/urandom of=$new/random bs=1M count=24 2>/dev/null
dd if=/dev/zero of=$new/gone bs=1M count=24 2>/dev/null
sync
rm $new/gone
before=$(sum $new/random)
umount /mnt
echo 3 >/proc/sys/vm/drop_caches

mount -t ext4 $disk /mnt
[ "$before" = "$(sum $new/random)" ]
echo "GUEST: md5 $before"
fstrim /mnt
umount /mnt
e2fsck -fn $disk >/tmp/fsck 2>&1 || {
    cat /tmp/fsck
    exit 1
}
echo "GUEST: written, remounted, trimmed, file system clean"

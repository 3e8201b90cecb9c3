# Runs in the guest: a file system that was made outside is read, changed,
# trimmed and checked. /sums lists md5 sums and names of files in it.
set -e
disk=/dev/vda
new=/mnt/written-by-the-guest

mount -t ext4 -o discard $disk /mnt
(cd /mnt && md5sum -c /sums >/tmp/sums) || {
    grep -v ': OK$' /tmp/sums
    exit 1
}
echo "GUEST: $(wc -l </sums) files read back as they were outside"

mkdir $new
dd if=/dev/urandom of=$new/random bs=1M count=48 2>/dev/null
number=0
while read -r sum name; do
    number=$((number + 1))
    if [ $((number % 2)) = 0 ]; then
        rm "/mnt/$name"
    else
        cp "/mnt/$name" $new/$number
        echo "$sum  $new/$number" >>/tmp/copied
    fi
done </sums
sync
before=$(md5sum <$new/random)
umount /mnt
echo 3 >/proc/sys/vm/drop_caches

mount -t ext4 $disk /mnt
[ "$before" = "$(md5sum <$new/random)" ]
md5sum -c /tmp/copied >/tmp/sums
echo "GUEST: md5 ${before%% *}"
fstrim /mnt
umount /mnt
e2fsck -fn $disk >/tmp/fsck 2>&1 || {
    cat /tmp/fsck
    exit 1
}
echo "GUEST: written, remounted, trimmed, file system clean"

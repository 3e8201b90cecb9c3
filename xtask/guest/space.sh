# Runs in the guest: fills ext4, deletes half of the files, trims, and fills it again. /wanted holds
# how often, and how many MiB of files there may be at most at a time.
disk=/dev/vda
read -r rounds most </wanted
fail() {
    echo "GUEST: $1"
    exit 1
}
healthy() {
    sync || fail "sync failed $1"
    grep -q '^[^ ]* /mnt ext4 rw' /proc/mounts || fail "the file system is read-only $1"
    dmesg | grep -E 'I/O error|critical space|EXT4-fs (warning|error)|Aborting journal|blocked for more' >/tmp/complaints
    [ -s /tmp/complaints ] || return 0
    head -n 3 /tmp/complaints
    fail "the kernel complains $1, $(wc -l </tmp/complaints) times"
}
# Adds files until there are as many as may be, or ext4 itself is full.
fill() {
    number=0
    while [ "$(ls /mnt/files | wc -l)" -lt "$most" ]; do
        if ! cp /tmp/block "/mnt/files/$1-$number" 2>/tmp/out; then
            grep -q 'No space left' /tmp/out || fail "cp: $(cat /tmp/out)"
            rm -f "/mnt/files/$1-$number"
            break
        fi
        number=$((number + 1))
    done
    healthy "after fill $1"
    echo "GUEST: fill $1: $number files more, $(ls /mnt/files | wc -l) in all"
}

head -c 1048576 /dev/urandom >/tmp/block
# Keep kernel messages off the console.
dmesg -n 1
mount -t ext4 -o errors=remount-ro $disk /mnt || fail "no file system"
mkdir /mnt/files
fill 0
round=1
while [ $round -le "$rounds" ]; do
    number=0
    for file in /mnt/files/*; do
        [ $((number % 2)) = $((round % 2)) ] || rm "$file"
        number=$((number + 1))
    done
    sync
    fstrim /mnt || fail "fstrim failed"
    healthy "after fstrim $round"
    fill $round
    round=$((round + 1))
done
sync
echo 3 >/proc/sys/vm/drop_caches
for file in /mnt/files/*; do
    cmp -s /tmp/block "$file" || fail "$file holds something else"
done
healthy "at the end"
umount /mnt || fail "cannot unmount"
e2fsck -fn $disk >/tmp/out 2>&1 || {
    cat /tmp/out
    fail "fsck"
}
echo "GUEST: all is well"

# Runs in the guest, on a disk whose server is killed again and again: writes files, makes each
# durable, says so, and reads them all back past its cache, until it is told to stop.
disk=/dev/vda
fail() {
    echo "GUEST: $1"
    [ ! -e /tmp/out ] || grep -v ': OK$' /tmp/out
    exit 1
}
compare() {
    sync
    echo 3 >/proc/sys/vm/drop_caches
    md5sum -c /tmp/sums >/tmp/out 2>&1 || fail "$1"
}
# Beside all else, so that requests of several kinds are in flight.
load() {
    while [ ! -e /tmp/stop ]; do
        dd if=/dev/urandom of=/mnt/big bs=64k count=64 conv=fsync 2>/dev/null || echo "GUEST: load failed"
        rm -f /mnt/big
    done
    touch /tmp/load-ended
}

mount -t ext4 -o errors=panic $disk /mnt || fail "no file system"
(read -r line </dev/ttyS0 && touch /tmp/stop) &
load &
touch /tmp/sums
echo "GUEST: begins"
number=0
while [ ! -e /tmp/stop ]; do
    number=$((number + 1))
    head -c $((RANDOM * 6 + 1)) /dev/urandom >/tmp/file
    sum=$(md5sum </tmp/file)
    dd if=/tmp/file of=/mnt/f$number bs=256k conv=fsync 2>/dev/null || fail "a write failed"
    sync
    echo "${sum%% *}  /mnt/f$number" >>/tmp/sums
    echo "GUEST: durable $number ${sum%% *}"
    if [ $number -gt 40 ]; then
        rm /mnt/f$((number - 40))
        sed -i 1d /tmp/sums
    fi
    [ $((number % 10)) != 0 ] || compare "read back as something else"
    [ $((number % 25)) != 0 ] || fstrim /mnt || fail "cannot trim"
done
while [ ! -e /tmp/load-ended ]; do sleep 0.1; done
compare "something else at the end"
umount /mnt || fail "cannot unmount"
e2fsck -fn $disk >/tmp/out 2>&1 || fail "fsck"
mount -t ext4 $disk /mnt && compare "something else after the end" && umount /mnt || fail "cannot mount"
dmesg | grep -E 'I/O error|EXT4-fs (warning|error)|blocked for more' && fail "the kernel complains"
echo "GUEST: all is well after $number files"

# Runs in the guest: what it sees of a disk whose server says how it is. /wanted holds the number of
# queues, and the sectors that the disk is to have in the end, or that it is only read.
disk=/sys/block/vda
read -r queues wanted </wanted
fail() {
    echo "GUEST: $1"
    exit 1
}
[ "$(cat $disk/queue/logical_block_size)" = 4096 ] || fail "blocks of another size"
[ "$(ls $disk/mq | wc -l)" = "$queues" ] || fail "another number of queues"
[ "$(cat $disk/serial)" = "the demo's" ] || fail "another serial number"
if [ "$wanted" = read-only ]; then
    [ "$(cat $disk/ro)" = 1 ] || fail "not read-only"
    ! dd if=/dev/zero of=/dev/vda bs=4k count=1 2>/dev/null || fail "a write succeeded"
    mount -t ext4 -o ro,noload /dev/vda /mnt && ls /mnt | grep -q ^f && umount /mnt || fail "cannot read"
    exit 0
fi
echo "GUEST: sees $(cat $disk/size)"
tries=0
while [ "$(cat $disk/size)" != "$wanted" ]; do
    tries=$((tries + 1))
    [ $tries -lt 300 ] || fail "still sees $(cat $disk/size)"
    sleep 0.1
done
# The last MiB was not there before.
last=$((wanted / 2048 - 1))
dd if=/dev/urandom of=/tmp/new bs=1M count=1 2>/dev/null
dd if=/tmp/new of=/dev/vda bs=1M seek=$last conv=fsync 2>/dev/null || fail "cannot write at the end"
echo 3 >/proc/sys/vm/drop_caches
dd if=/dev/vda of=/tmp/read bs=1M skip=$last count=1 2>/dev/null
cmp /tmp/new /tmp/read || fail "reads something else"

#!/bin/sh
# The first process of a host, in namespaces of its own; sshd takes its place (and reaps orphans, as a first process must).
# $1 is the host's directory on the machine; NAME, DISK_SIZE and SHARED (folders, separated by colons) come by environment.
set -eu
root=$1/root disk=$1/disk
size=$DISK_SIZE

mount -t tmpfs -o "size=$size,mode=755" disk "$disk"
mkdir "$disk/upper" "$disk/work"
cp -a "$1/seed/." "$disk/upper/"
mount -t overlay -o "lowerdir=/,upperdir=$disk/upper,workdir=$disk/work" overlay "$root"

mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t tmpfs -o mode=755,size=16m dev "$root/dev"
for node in null zero full random urandom tty; do
  : >"$root/dev/$node"
  mount --bind "/dev/$node" "$root/dev/$node"
done
[ ! -e /dev/fuse ] || mknod -m 666 "$root/dev/fuse" c 10 229 # for everybody, as udev makes it
mkdir -m 1777 "$root/dev/shm"
mkdir "$root/dev/pts"
mount -t tmpfs -o mode=1777,size="$size" shm "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
ln -s fd/0 "$root/dev/stdin"
ln -s fd/1 "$root/dev/stdout"
ln -s fd/2 "$root/dev/stderr"

IFS=:
for folder in $SHARED; do
  mkdir -p "$root$folder"
  mount --bind "$folder" "$root$folder"
done
unset IFS

echo "$NAME" >/proc/sys/kernel/hostname
cd "$root"
mkdir .old
pivot_root . .old
umount -l .old
rmdir .old

echo ready
read -r _ # until the fleet has plugged the wire in
ip -batch /etc/testbed-network
exec env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 \
  /usr/sbin/sshd -D -E /var/log/sshd.log </dev/null >/dev/null 2>&1

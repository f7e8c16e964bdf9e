#!/bin/bash
# Makes the root of a pod's file system and runs the command that follows `--` in it, as the image and kubelet would:
# a root that cannot be written, private /tmp, /home and /dev/shm, the mounts that are named, no privileges.
# Runs in namespaces of its own: mount, PID and network.
#   pod.sh ROOT [-b PATH]... [-m SOURCE TARGET]... [-w TARGET]... -- COMMAND...
#     -b PATH           from the host, at the same path, read-only
#     -m SOURCE TARGET  from the host, read-only
#     -w TARGET         an empty folder that can be written
#     -s SOURCE TARGET  from the host, a folder that all can write
#     -h ADDRESS NAME   the address of a name
set -euo pipefail
root=$1
shift
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs "$root"
mkdir -p "$root"/{usr,etc,proc,sys,dev,run,var}
for name in bin sbin lib lib64; do ln -s "usr/$name" "$root/$name"; done
read_only() { mkdir -p "$root$2"; mount --bind "$1" "$root$2"; mount -o remount,bind,ro "$root$2"; }
shared() { mkdir -p "$root$2"; mount --bind "$1" "$root$2"; }
writable() { mkdir -p "$root$1"; mount -t tmpfs -o mode=1777 tmpfs "$root$1"; }
read_only /usr /usr
cp -a /etc/. "$root/etc/"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys" || mount --rbind /sys "$root/sys"
mounts=()
while [ "$1" != -- ]; do
  case $1 in
    -b) mounts+=("read_only $2 $2"); shift 2 ;;
    -m) mounts+=("read_only $2 $3"); shift 3 ;;
    -s) mounts+=("shared $2 $3"); shift 3 ;;
    -w) writable "$2"; shift 2 ;;
    -h) echo "$2 $3" >> "$root/etc/hosts"; shift 3 ;;
  esac
done
shift
for each in "${mounts[@]}"; do $each; done
mount -o remount,ro "$root"
cd "$root"
exec chroot . /usr/bin/setpriv --reuid 1000 --regid 1000 --clear-groups --no-new-privs --bounding-set=-all \
  --inh-caps=-all -- "$@"

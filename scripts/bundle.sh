#!/usr/bin/env bash
# Copies programs and the shared libraries they need into a folder, for machines without Debian's packages. The C and C++ libraries
# are left out: that machine's own serve, if they are not older.
#   scripts/bundle.sh OUT PROGRAM…
#   LD_LIBRARY_PATH=OUT OUT/PROGRAM …
set -euo pipefail

if [ $# -lt 2 ]; then
  echo "bundle.sh: $# arguments were given, needed are a folder and at least one program" >&2
  exit 2
fi
out=$1
shift
mkdir -p "$out"
install -s -m 755 "$@" "$out"
for program in "$@"; do ldd "$program"; done | awk '$2 == "=>" { print $1, $3 }' | sort -u | while read -r name path; do
  case "$name" in
    libc.so.* | libm.so.* | libdl.so.* | librt.so.* | libpthread.so.* | libstdc++.so.* | libgcc_s.so.*) ;;
    *)
      [ -e "$path" ] || { echo "bundle.sh: $name, which the programs need, was not found" >&2; exit 1; }
      install -s -m 644 "$path" "$out/$name"
      ;;
  esac
done
du -sh "$out"

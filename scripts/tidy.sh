#!/usr/bin/env bash
# clang-tidy over the project's own sources, with the compile commands of a build folder.
#   scripts/tidy.sh build/clang [FILE…]     by default every source
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:?usage: scripts/tidy.sh BUILD_FOLDER [FILE…]}
shift
if [ $# -eq 0 ]; then
  mapfile -t files < <(git ls-files 'src/*.cpp' 'tools/*.cpp' 'examples/*.cpp' 'tests/*.cpp')
  set -- "${files[@]}"
fi
printf '%s\n' "$@" | xargs -P "$(nproc)" -n 4 clang-tidy --quiet -p "$build" 2>/dev/null

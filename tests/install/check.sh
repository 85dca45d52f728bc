#!/usr/bin/env bash
# Installs a build into a temporary prefix, then builds and runs the examples against it as projects of their own, once
# through find_package and once through pkg-config: the quickstart as C++, the C engine with a C compiler alone. The
# plug-in is loaded by a program of its own.
#   tests/install/check.sh BUILD_FOLDER
set -euo pipefail
build=$(realpath "${1:?usage: tests/install/check.sh BUILD_FOLDER}")
source=$(realpath "$(dirname "$0")/../..")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cmake --install "$build" --prefix "$work/prefix" >/dev/null
libdir=$(dirname "$(find "$work/prefix" -name 'libfoveal.so' -print -quit)")

for example in quickstart plugin c_engine; do
  cmake -S "$source/examples/$example" -B "$work/$example" -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_CXX_STANDARD=20 -DCMAKE_PREFIX_PATH="$work/prefix" >/dev/null
  cmake --build "$work/$example"
done
"$work/quickstart/foveal_quickstart"
"$work/plugin/foveal_try_plugin" EXAMPLE "$work/plugin/libfoveal_example_plugin.so"
"$work/c_engine/foveal_c_engine"

export PKG_CONFIG_PATH="$libdir/pkgconfig"
# shellcheck disable=SC2046  # the flags are words
g++ -std=c++20 "$source/examples/quickstart/quickstart.cpp" $(pkg-config --cflags --libs foveal) \
  -o "$work/by_pkg_config"
LD_LIBRARY_PATH="$libdir" "$work/by_pkg_config" >/dev/null
# shellcheck disable=SC2046
gcc -std=c11 "$source/examples/c_engine/c_engine.c" $(pkg-config --cflags --libs foveal_c) -lm \
  -o "$work/c_by_pkg_config"
LD_LIBRARY_PATH="$libdir" "$work/c_by_pkg_config" >/dev/null
echo "the installed library serves find_package and pkg-config"

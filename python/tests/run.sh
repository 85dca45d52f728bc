#!/usr/bin/env bash
# Installs the package from the checkout into a virtual environment, then runs its tests.
#   python/tests/run.sh FOLDER [PYTEST ARGUMENTS…]     FOLDER, for the environment and the wheel, is made and may be used again
# With FOVEAL_TEST_FRAMEWORKS=1 PyTorch, transformers and JAX are installed too (some 6 GB), whose tests are skipped without them.
# Ends with 77, which CTest shows as skipped, where there is no venv or the packages of PyPI cannot be had.
set -euo pipefail
folder=${1:?usage: run.sh FOLDER [PYTEST ARGUMENTS…]}
shift
checkout=$(realpath "$(dirname "$0")/../..")

skip() { echo "python/tests/run.sh: skipped: $1"; exit 77; }
if [ ! -x "$folder/venv/bin/pytest" ]; then
  python3 -m venv --clear "$folder/venv" || skip "python3 -m venv does not work (Debian: python3-venv)"
  "$folder/venv/bin/pip" install -q --disable-pip-version-check scikit-build-core nanobind cmake ninja numpy ml_dtypes pytest ||
    skip "the packages from PyPI cannot be installed"
fi
if [ "${FOVEAL_TEST_FRAMEWORKS:-0}" = 1 ]; then
  timeout 600 "$folder/venv/bin/pip" install -q --disable-pip-version-check torch 'transformers>=5' psutil jax ||
    echo "python/tests/run.sh: going on without the frameworks, which cannot be installed"
fi
"$folder/venv/bin/python" -c 'import pathlib, sys, sysconfig
sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())' || skip "Python.h is missing (Debian: python3-dev)"

export PATH="$folder/venv/bin:$PATH"
rm -rf "$folder/wheel"
pip wheel -q --disable-pip-version-check --no-build-isolation --no-deps -w "$folder/wheel" -C build-dir="$folder/build" "$checkout"
size=$(stat -c %s "$folder"/wheel/foveal-*.whl)
echo "$(basename "$folder"/wheel/*.whl): $size bytes"
[ "$size" -lt 5000000 ] || { echo "python/tests/run.sh: the wheel is larger than 5 MB" >&2; exit 1; }
pip install -q --disable-pip-version-check --force-reinstall --no-deps "$folder"/wheel/foveal-*.whl
cd "$folder"  # Away from the checkout, so that the installed package is the one imported.
pytest -q -p no:cacheprovider "$checkout/python/tests" "$@"
if "$folder/venv/bin/python" -c 'import torch' 2>/dev/null; then
  pytest -q -p no:cacheprovider "$checkout/plugins/vllm/tests"
fi

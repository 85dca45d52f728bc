#!/usr/bin/env bash
# Builds the GPU check into a folder (default build/gpu-check), to be run on a machine that has a driver
# and NVRTC but none of the libraries the project builds with:
#   tests/cuda/gpu/build.sh build/gpu-check
#   build/gpu-check/gpu_check && python3 tests/cuda/gpu/gpu_check.py build/gpu-check/libfoveal_gpu_check.so
set -euo pipefail
cd "$(dirname "$0")/../../.."
out=${1:-build/gpu-check}
mkdir -p "$out"

compiler=(${CXX:-g++} -std=c++20 -O2 -fPIC -fvisibility=hidden -Wall -Wextra -Isrc -Iinclude -Itests/cuda/gpu
  -DFMT_HEADER_ONLY -DSPDLOG_FMT_EXTERNAL)
cmake -DROOT="$PWD/src/cuda/kernels" -DOUTPUT="$out/kernel_sources.cpp" -P src/cuda/embed_kernels.cmake
sources=(src/cuda/{cubin_cache,cubin_report,digest,driver,driver_launch,driver_objects,jit,kernel_key,kernel_pack}.cpp
  src/cuda/{kernel_program,nvrtc,sealed_file}.cpp src/core/dtype.cpp "$out/kernel_sources.cpp"
  tests/cuda/gpu/gpu_check_kernels.cpp tests/cuda/gpu/gpu_check.cpp)
objects=()
for source in "${sources[@]}"; do
  object="$out/$(basename "$source" .cpp).o"
  ${CCACHE-$(command -v ccache || true)} "${compiler[@]}" -c "$source" -o "$object"
  objects+=("$object")
done

link=(-static-libstdc++ -static-libgcc -Wl,-Bstatic -lcrypto -Wl,-Bdynamic -ldl -lpthread)
"${compiler[@]}" "${objects[@]}" -o "$out/gpu_check" "${link[@]}"
unset "objects[-1]"  # The program's main, which the library does without.
"${compiler[@]}" -shared "${objects[@]}" -o "$out/libfoveal_gpu_check.so" -Wl,--exclude-libs,ALL "${link[@]}"
rm -f "$out"/*.o

#!/usr/bin/env bash
# Every check that needs an NVIDIA GPU, then the measurements; a short table comes last.
#   tests/cuda/gpu_checks.sh                        builds what it needs, then runs it
#   tests/cuda/gpu_checks.sh --programs FOLDER      runs what scripts/bundle.sh brought, for a machine without Debian's packages:
#     scripts/bundle.sh FOLDER build/release/bin/foveal build/release/tests/cuda/cuda_flash_attn_conformance_test \
#       build/release/tests/serving/engine/serving_engine_tests build/release/tests/bench/bench_test
#   --out FOLDER    logs and figures (default build/gpu-checks)
#   --quick         without the sanitizers and the measurements
# FOVEAL_SHARED_DIR names the folder with cases/ and data/models/ (default: ../shared), which are left out where it is not there.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit

programs=
out=build/gpu-checks
quick=false
while [ $# -gt 0 ]; do
  case "$1" in
    --programs) programs=${2:?--programs needs a folder}; shift 2 ;;
    --out) out=${2:?--out needs a folder}; shift 2 ;;
    --quick) quick=true; shift ;;
    *) echo "gpu_checks.sh: option is '$1', accepted are --programs, --out and --quick" >&2; exit 2 ;;
  esac
done
mkdir -p "$out"
if [ -z "$programs" ]; then
  programs=$out/programs
  cmake --preset release >/dev/null && cmake --build --preset release || exit 1
  scripts/bundle.sh "$programs" build/release/bin/foveal build/release/tests/cuda/cuda_flash_attn_conformance_test \
    build/release/tests/serving/engine/serving_engine_tests build/release/tests/bench/bench_test || exit 1
fi
export LD_LIBRARY_PATH="$programs:${LD_LIBRARY_PATH:-}:/usr/local/cuda/lib64"
export FOVEAL_SHARED_DIR=${FOVEAL_SHARED_DIR:-$PWD/../shared}
suite=$programs/cuda_flash_attn_conformance_test
table=()

# check NAME COMMAND…: its log to a file, its end to the table. A command that finds nothing to work on returns $left_out.
left_out=77
check() {
  local name=$1 begin=$SECONDS result=passed status=0
  shift
  echo "== $name"
  "$@" >"$out/$name.log" 2>&1 || status=$?
  if [ $status -eq $left_out ]; then
    result="left out: $(tail -n 1 "$out/$name.log")"
  elif [ $status -ne 0 ]; then
    result="FAILED, see $out/$name.log"
  fi
  table+=("$(printf '%-36s %4d s  %s' "$name" $((SECONDS - begin)) "$result")")
}

# sharded FILTER: a suite in as many processes as there are processors.
sharded() {
  local count failed=0 pids=()
  count=$(nproc)
  for ((i = 0; i < count; ++i)); do
    GTEST_TOTAL_SHARDS=$count GTEST_SHARD_INDEX=$i "$suite" --gtest_brief=1 --gtest_filter="$1" &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
  return $failed
}

cases() {
  [ -e "$FOVEAL_SHARED_DIR/cases/cases.json" ] || { echo "no cases.json in $FOVEAL_SHARED_DIR/cases"; return $left_out; }
  "$suite" --gtest_filter='*SharedCases*'
}

same_text() {
  local models=$FOVEAL_SHARED_DIR/data/models
  [ -e "$models/stories260K.bin" ] || { echo "no models in $models"; return $left_out; }
  for device in cpu cuda; do
    "$programs/foveal" generate --device "$device" --model "$models/stories260K.bin" --tokenizer "$models/tok512.bin" \
      --steps 200 >"$out/stories.$device" || return 1
  done
  cmp "$out/stories.cpu" "$out/stories.cuda"
}

# sanitizer TOOL FILTER
sanitizer() {
  command -v compute-sanitizer || { echo "compute-sanitizer is not there"; return $left_out; }
  compute-sanitizer --tool "$1" --error-exitcode 1 "$suite" --gtest_brief=1 --gtest_filter="$2"
}

"$programs/foveal" info || exit 1
check graphs-streams-64-bit "$suite" --gtest_brief=1 --gtest_filter='FlashAttnGpu*'
check cases cases
check features sharded '*/Features.*16_*:*Invariance*:-*f32*'
check large sharded '*Large*'
check shapes sharded 'All/Shapes.*/*16_d*:-*d328*:*d512*'
# Queries in fp8 have no version 2.
FOVEAL_TEST_FLASH_ATTN_VERSION=2 check version-2 sharded '*/Features.*16_*:*Invariance*:*Large*:-*f32*:Fp8/*'
FOVEAL_TEST_FLASH_ATTN_VERSION=2 check shapes-version-2 sharded 'All/Shapes.*/*16_d*:-*d328*:*d512*'
check bench-test "$programs/bench_test" --gtest_brief=1
check engine "$programs/serving_engine_tests" --gtest_brief=1 --gtest_filter='*CudaEngine*'
check same-text same_text
if ! $quick; then
  some='*bf16_splits:*bf16_fp8_e4m3_cache:*bf16_cascade:*bf16_sinks:*bf16_plain_keys:*/bf16_d128_g3_b16:*/bf16_d256_g5_b16:*Large*bf16_d128_128_g4_window:*Large*bf16_d256_256_g2_splits'
  fp8='Fp8/*d64_64_g4_plain:Fp8/*d256_256_g2_splits:*Large*bf16_d64_64_g1_fp8_e4m3_cache'
  check memcheck sanitizer memcheck "FlashAttnGpu.Graph*:$some:$fp8"
  # Without fp8: the tool does not see the order between what a warp widens and what another clears, since one lane arrives at
  # the barrier between them for its whole warp.
  check racecheck sanitizer racecheck "$some:-*fp8*"
  # Version 2's prefill of large heads: two warps share rows, and meet at barriers of their own.
  version_2='*/bf16_d128_g3_b16:*/bf16_d256_g5_b16:*Large*bf16_d256_256_g2_plain:*Large*bf16_d256_256_g2_window:*Large*bf16_d192_192_g2_padded'
  FOVEAL_TEST_FLASH_ATTN_VERSION=2 check memcheck-version-2 sanitizer memcheck "$version_2"
  FOVEAL_TEST_FLASH_ATTN_VERSION=2 check racecheck-version-2 sanitizer racecheck "$version_2"
  check initcheck sanitizer initcheck 'FlashAttnGpu.RepeatsBitForBit'
  check synccheck sanitizer synccheck "$some:$fp8"
  check measure "$programs/foveal" bench --device cuda --json "$out/bench.json"
  cat "$out/measure.log"
fi
printf '%s\n' "" "${table[@]}"
[[ "${table[*]}" != *FAILED* ]]

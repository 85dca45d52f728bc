#!/usr/bin/env bash
# Sets everything up and runs the main job: text from a real language model, every attention call through Foveal.
#   scripts/generate.sh                      answers a first question
#   scripts/generate.sh "Your question"      answers yours
#   scripts/generate.sh --prompts FILE …     any options of `foveal generate`
set -euo pipefail
cd "$(dirname "$0")/.."

# stdout carries the text alone.
{
  scripts/install_deps.sh
  scripts/fetch_model.sh
  cmake --preset release -DFOVEAL_BUILD_TESTS=OFF >/dev/null
  cmake --build --preset release --target foveal_cli
} >&2

case "${1:-}" in
  --*) exec build/release/bin/foveal generate "$@" ;;
  *) exec build/release/bin/foveal generate --prompt "${1:-What is attention in a language model? Answer in two sentences.}" ;;
esac

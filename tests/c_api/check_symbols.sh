#!/usr/bin/env bash
# Whether a library exports exactly the functions that the C header declares, each with a version.
#   tests/c_api/check_symbols.sh LIBRARY HEADER
set -euo pipefail
library=${1:?usage: check_symbols.sh LIBRARY HEADER}
header=${2:?usage: check_symbols.sh LIBRARY HEADER}

# Comments out, the text on one line, then the name before each bracket of a FOVEAL_API declaration.
declared=$(tr '\n' ' ' <"$header" | sed -E 's#/\*([^*]|\*+[^*/])*\*+/##g' | grep -oE 'FOVEAL_API [^(;]*\(' |
  grep -oE 'foveal_[a-z0-9_]+ *\($' | tr -d ' (' | sort)
exported=$(nm -D --defined-only "$library" | awk '$2 != "A" { print $3 }' | sort)
unversioned=$(grep -v '@@FOVEAL_C_' <<<"$exported" || true)
names=$(sed 's/@.*//' <<<"$exported")

[ -n "$declared" ] || { echo "no declarations were found in $header" >&2; exit 1; }
[ -z "$unversioned" ] || { echo "exported without a version: $unversioned" >&2; exit 1; }
if ! diff <(echo "$declared") <(echo "$names"); then
  echo "< is declared in $header only, > is exported by $library only" >&2
  exit 1
fi
echo "$(wc -l <<<"$names") functions, all declared and all exported"

#!/bin/sh
# Run each fuzzer for some seconds, beginning with its seeds in tests/corpus/NAME.
# Usage: tools/fuzz.sh SECONDS build/fuzz/fuzz_NAME ...
#
# New inputs go to build/fuzz/corpus, never into the tree: a seed is somebody's decision.  An input
# that fails is kept in build/fuzz/artifacts; copy it to tests/corpus/NAME when it is understood.
set -eu

seconds=$1
shift
if [ $# = 0 ]; then
    echo "fuzz: no tests/fuzz_*.c" >&2
    exit 1
fi
failed=0
for fuzzer in "$@"; do
    name=$(basename "$fuzzer")
    name=${name#fuzz_}
    seeds=tests/corpus/$name
    found=build/fuzz/corpus/$name
    artifacts=build/fuzz/artifacts/$name/
    log=build/fuzz/$name.log
    mkdir -p "$found" "$artifacts"
    [ -d "$seeds" ] || seeds=
    # 2 GiB and 10 s: more than any input within -max_len may cost.
    # shellcheck disable=SC2086  # no seeds, no word
    if "$fuzzer" "$found" $seeds -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 \
        -artifact_prefix="$artifacts" -print_final_stats=1 </dev/null >"$log" 2>&1; then
        inputs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
        echo "fuzz: $name: $inputs inputs in $seconds s, none failed"
    else
        failed=$((failed + 1))
        tail -n 40 "$log"
        echo "fuzz: $name FAILED; the input is in $artifacts, the log in $log"
    fi
done
echo "$(($# - failed)) passed, $failed failed"
[ "$failed" = 0 ]

#!/usr/bin/env bash
# Installs what the tests need and runs them all.
# Usage: bash tools/run_tests.sh [--fast] [pytest arguments]
#   --fast                   only tests/unit
#   AREAL_TEST_DATA=FOLDER   test data (gsm8k/...); tests that need it skip by name without it
set -euo pipefail
cd "$(dirname "$0")/.."

bash tools/install.sh --test

folders=()
for folder in tests/unit tests/mpi tests/stack tests/cluster tests/gpu; do
  [ -d "$folder" ] && folders+=("$folder")
done
if [ "${1:-}" = "--fast" ]; then
  shift
  folders=(tests/unit)
fi
exec .venv/bin/python -m pytest -q -ra --durations=15 "${folders[@]}" "$@"

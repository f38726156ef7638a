#!/usr/bin/env bash
# Makes or reuses the virtual environment .venv of this checkout with the pinned CPU packages.
# Usage: bash tools/install.sh [--test]     (PYTHON=python3.12 chooses the interpreter)
set -euo pipefail
cd "$(dirname "$0")/.."

python="${PYTHON:-python3}"
lists=(tools/requirements-cpu.txt)
[ "${1:-}" = "--test" ] && lists+=(tools/requirements-test.txt)

if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))'; then
  echo "install: $("$python" --version) does not serve; set PYTHON to Python 3.11 or 3.12" >&2
  exit 2
fi

stamp=".venv/.installed-$(cat "${lists[@]}" setup.py | sha256sum | cut -c1-16)"
if [ -e "$stamp" ]; then
  echo "packages: reusing $(pwd)/.venv"
  exit 0
fi

start=$SECONDS
echo "packages: installing the pinned lists into $(pwd)/.venv"
[ -x .venv/bin/python ] || "$python" -m venv .venv
pip() { .venv/bin/python -m pip --quiet --disable-pip-version-check --no-input "$@"; }
wanted=()
for list in "${lists[@]}"; do wanted+=(-r "$list"); done
# Where the configured indexes have no CPU build of torch, PyTorch's own index has it.
if ! pip install --no-deps --no-compile "${wanted[@]}" 2>.venv/install.log; then
  echo "packages: trying again with PyTorch's CPU index"
  pip install --no-deps --no-compile --extra-index-url https://download.pytorch.org/whl/cpu "${wanted[@]}" \
    2>>.venv/install.log || { tail -n 20 .venv/install.log >&2; exit 1; }
fi
pip install --no-deps --no-build-isolation --editable . 2>>.venv/install.log \
  || { tail -n 20 .venv/install.log >&2; exit 1; }
rm -f .venv/.installed-*
touch "$stamp"
[ "${1:-}" = "--test" ] && touch ".venv/.installed-$(cat tools/requirements-cpu.txt setup.py | sha256sum | cut -c1-16)"
echo "packages: installed in $((SECONDS - start)) s"

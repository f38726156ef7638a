#!/usr/bin/env bash
# From a fresh checkout to a trained model: packages, starting model, asynchronous run.
# Usage: bash tools/quickstart.sh [key=value ...]     (overrides of configs/quickstart.yaml)
# A second start reuses the packages and the model and trains in a new run folder.
set -euo pipefail
cd "$(dirname "$0")/.."

bash tools/install.sh

if [ -f models/quickstart/config.json ]; then
  echo "model: reusing models/quickstart"
else
  .venv/bin/areal-hpc sft configs/quickstart_sft.yaml
fi

folder=runs/quickstart
number=2
while [ -e "$folder" ]; do
  folder="runs/quickstart-$number"
  number=$((number + 1))
done
exec .venv/bin/areal-hpc run configs/quickstart.yaml "run.folder=$folder" "$@"

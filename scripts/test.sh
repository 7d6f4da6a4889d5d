#!/usr/bin/env bash
# Lint, types and the test suite, in .venv; arguments go to pytest, but for a first one of --full: then
# also the tests that the marker `full` sets apart, after all others. The package registry is asked for
# what is installed, here and by the tests of the packages; no other test needs a network.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

marked=("not full")
if [ "${1-}" = --full ]; then
  marked+=(full)
  shift
fi

make_venv
# This working tree, so that changes in it count at once. By its path: the finder that setuptools
# installs otherwise loses against the folder above, if that of the clone is called infer.
install_package --config-settings editable_mode=compat --editable '.[test]'
ensure_adapter
.venv/bin/python -m ruff check
.venv/bin/python -m ruff format --check
.venv/bin/python -m mypy
# A file of tests for each process: drivers compile kernels on one core, and keep them. In order of
# their names: by their number of tests the longest would come last.
for marks in "${marked[@]}"; do
  .venv/bin/python -m pytest -n auto --dist loadfile --no-loadscope-reorder \
    -m "$marks and not live and not exhaustive" "$@"
done

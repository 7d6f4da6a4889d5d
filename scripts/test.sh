#!/usr/bin/env bash
# Lint, types and the test suite, in .venv; arguments go to pytest, but for a first one of --full: then
# also the tests that the marker `full` sets apart, after all others. Kernels and engine are tested through
# Dawn too, by a sample, or in a full run by all tests of a device that the default run has. They are skipped
# where Dawn accepts no adapter; INFER_TEST_DAWN_DRIVER names the file of a Vulkan driver for them alone. The
# package registry is asked for what is installed, here and by the tests of the packages; no other test needs
# a network.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

marked=("not full") on_dawn=dawn
if [ "${1-}" = --full ]; then
  marked+=(full) on_dawn="(dawn or device)"
  shift
fi

make_venv
# This working tree, so that changes in it count at once.
install_package --editable '.[test]'
ensure_adapter
# Tests start hundreds of processes, which would all compile the same files.
unset PYTHONDONTWRITEBYTECODE
.venv/bin/python -m ruff check
.venv/bin/python -m ruff format --check
.venv/bin/python -m mypy
# run_tests ARGUMENT...: a run may have none of the tests that were asked for.
run_tests() {
  .venv/bin/python -m pytest -n auto "$@" || [ $? = 5 ]
}
# Reading files that have none of a run's tests takes seconds of each process.
of_demo= others= of_dawn=
if [ $# = 0 ]; then
  of_demo=$(grep -l 'mark\.demo' tests/*/test_*.py)
  others=$(grep -L '^pytestmark = .*mark\.demo' tests/*/test_*.py)
  of_dawn=$others
  [ "$on_dawn" != dawn ] || of_dawn=$(grep -l 'mark\.dawn' tests/*/test_*.py)
fi
for marks in "${marked[@]}"; do
  # The demo's answers run longer than they compile: with the driver's optimisations, which
  # tests/conftest.py switches off for all others.
  GALLIVM_PERF=${GALLIVM_PERF-} run_tests --dist worksteal \
    -m "$marks and demo and not live and not exhaustive" $of_demo "$@"
  # A file of tests for each process: drivers compile kernels on one core, and keep them. In order of
  # their names: by their number of tests the longest would come last.
  run_tests --dist loadfile --no-loadscope-reorder \
    -m "$marks and not demo and not live and not exhaustive" $others "$@"
done
if [ -n "${INFER_TEST_DAWN_DRIVER-}" ]; then
  export VK_DRIVER_FILES=$INFER_TEST_DAWN_DRIVER
fi
INFER_WEBGPU=dawn run_tests -rs --dist loadfile --no-loadscope-reorder \
  -m "$on_dawn and not full and not live and not exhaustive" $of_dawn "$@"

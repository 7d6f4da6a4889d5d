#!/usr/bin/env bash
# From a fresh clone to generated text: makes .venv, installs the package into it, makes sure that
# there is an adapter, and runs the model that is included. Can be run again at any time.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

make_venv
install_package .
ensure_adapter
.venv/bin/infer run demo "Once upon a time"
say "This was .venv/bin/infer run demo \"Once upon a time\"; see .venv/bin/infer --help."

# Sourced by quickstart.sh and test.sh. Goes to the root of the repository and gives them a virtual
# environment and an adapter. Messages, and the output of installers, go to standard error.

CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

say() { printf '%s\n' "$*" >&2; }

fail() {
  say "error: $*"
  exit 1
}

# as_root COMMAND...: needs root, or sudo without a password.
as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

# install_system REASON PACKAGE...: from Debian's or Ubuntu's archive, or how to do it.
install_system() {
  local reason=$1
  shift
  command -v apt-get >/dev/null || fail "$reason Install it with your system's package manager" \
    "(Debian and Ubuntu call it: $*), then run this again."
  as_root true 2>/dev/null || fail "$reason Install it, then run this again:
  sudo apt-get update && sudo apt-get install -y $*"
  say "$reason Installing: $*"
  if ! as_root apt-get update -qq >&2 ||
    ! as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@" >&2; then
    fail "That did not work; apt-get's messages are above."
  fi
}

# The first Python that is new enough; PYTHON names the only one to try.
find_python() {
  local candidate candidates=(python3 python3.14 python3.13 python3.12 python3.11)
  [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
  for candidate in "${candidates[@]}"; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      printf '%s' "$candidate"
      return
    fi
  done
  return 1
}

# .venv, kept if it works: no longer when the Python that it was made with has gone.
make_venv() {
  .venv/bin/python -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && return
  local python version
  if ! find_python >/dev/null && [ -z "${PYTHON:-}" ] && ! command -v python3 >/dev/null; then
    install_system "There is no python3." python3 python3-venv
  fi
  version=$("${PYTHON:-python3}" --version 2>/dev/null) || version="not there"
  python=$(find_python) || fail "infer needs Python 3.11 or newer; ${PYTHON:-python3} is $version." \
    "Install a newer one and name it:
  PYTHON=/path/to/python3.12 $0"
  "$python" -c 'import ensurepip' 2>/dev/null ||
    install_system "$python cannot make virtual environments." "${python##*/}-venv"
  "$python" -m venv --clear .venv || fail "The virtual environment could not be made."
}

# install_package WHAT...: as pip install takes it. Python compiles what it imports when it does.
install_package() {
  .venv/bin/python -m pip install --quiet --no-compile --disable-pip-version-check "$@" >&2 ||
    fail "pip could not install the package; its message is above."
}

# Fails, quietly, where there is none. Another exit status is a fault of the installation.
has_adapter() {
  local status=0
  .venv/bin/python -c 'import infer, sys; sys.exit(0 if infer.is_available() else 3)' || status=$?
  [ "$status" = 0 ] || [ "$status" = 3 ] || fail "The installed package does not start."
  return "$status"
}

ensure_adapter() {
  has_adapter && return
  install_system "There is no GPU driver for Vulkan, and no software driver in its place." \
    libvulkan1 mesa-vulkan-drivers
  has_adapter || fail "There is still no adapter. Install the Vulkan driver of your GPU; if" \
    "VK_DRIVER_FILES or VK_ICD_FILENAMES is set, see that what it names exists."
}

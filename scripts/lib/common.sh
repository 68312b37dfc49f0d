# Sourced first by every script, with its arguments: sets $root and $venv, answers -h, defines `say` and `need`.
script=${BASH_SOURCE[-1]}
say() { echo "$(basename "$script" .sh): $*" >&2; }

# The links of a linked script are followed by whoever sources this; with CDPATH, cd could go, and print, elsewhere.
root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)

if [[ ${1:-} == -h || ${1:-} == --help ]]; then # the comment at the top of the script, and of what it sources beside this
    for file in "$script" "${BASH_SOURCE[@]:1:${#BASH_SOURCE[@]}-2}"; do
        sed -n '1{/^#!/d}; /^#/!q; s/^# \{0,1\}//p' "$file"
    done
    exit 0
fi

# Relative paths are the caller's. Resolved here and once: scripts call each other, after a cd.
for name in QARL_VENV QARL_RUN_DIR QARL_QUICKSTART_DIR QARL_ABLATION_DIR; do
    [[ -z ${!name:-} || ${!name} == /* ]] || export "$name=$PWD/${!name}"
done
for name in QARL_DATA QARL_REWARD QARL_VLLM_CPU; do # also names on a hub, URLs, requirements: those are no file here
    [[ -z ${!name:-} || ${!name} == /* || ! -e ${!name} ]] || export "$name=$PWD/${!name}"
done
venv=${QARL_VENV:-$root/.venv}

# need NAME VALUE PATTERN WHAT: ends the script, before it has done anything, where a variable is not WHAT.
need() {
    if [[ ! $2 =~ ^($3)$ ]]; then
        say "$1=$2: use $4"
        exit 2
    fi
}
count='[1-9][0-9]{0,8}'

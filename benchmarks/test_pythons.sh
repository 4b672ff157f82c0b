#!/usr/bin/env bash
# Run the tests with every supported Python that is installed, and with the oldest versions of all dependencies.
#
#     benchmarks/test_pythons.sh                  # all of them
#     benchmarks/test_pythons.sh 3.13 oldest      # some
#
# Each has an environment of its own in a temporary folder. Pythons are looked for on the PATH and where pyenv keeps them.
set -uo pipefail
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

installed() { # the program of a version such as 3.12
  for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python; do
    if "$candidate" -c "" 2>/dev/null; then echo "$candidate"; return; fi
  done
  return 1
}

tested() { # name, program, and what installs the tests' dependencies
  local name=$1 program=$2 python=$folder/$1/bin/python
  shift 2
  "$program" -m venv "$folder/$name" && "$@" "$python" || return 1
  "$python" -m pip install --quiet --disable-pip-version-check --no-deps dm_control || return 1
  "$python" --version
  "$python" -m pip list --format freeze | grep -E "^(jax|jaxlib|numpy|equinox|optax|gymnasium|mujoco|dm_control)="
  JAX_COMPILATION_CACHE_DIR=$folder/$name/jax "$python" -m pytest -q -n 2 --dist loadgroup --no-loadscope-reorder
}

newest() { "$1" -m pip install --quiet --disable-pip-version-check -e '.[test]'; }
oldest() {
  "$1" -m pip install --quiet --disable-pip-version-check uv &&
    "$1" -m uv pip install --quiet --python "$1" --resolution lowest-direct -e '.[test]'
}

results=()
for version in "${@:-3.11 3.12 3.13 3.14 oldest}"; do
  for name in $version; do
    program=$(installed "${name/oldest/3.11}") || { results+=("$name: not installed"); continue; }
    echo "== $name"
    if [ "$name" = oldest ]; then install=oldest; else install=newest; fi
    if tested "$name" "$program" "$install"; then results+=("$name: passed"); else results+=("$name: FAILED"); fi
  done
done
printf '%s\n' "${results[@]}"
case "${results[*]}" in *FAILED*) exit 1 ;; esac

#!/usr/bin/env bash
# Run the tests of a fresh clone where nothing is as usual: a path with a space, another user than root, a home that
# can't be written, the C locale, a time zone far away, one core.
set -euo pipefail
source=$(cd "$(dirname "$0")/.." && pwd)
folder=$(mktemp -d)/"a folder"
trap 'rm -rf "$(dirname "$folder")"' EXIT
git clone --quiet "$source" "$folder"
python=${PYTHON:-python3}
as_nobody=()
if [ "$(id -u)" = 0 ]; then
  chmod 755 "$(dirname "$folder")"
  chown -R 65534:65534 "$folder"
  as_nobody=(setpriv --reuid 65534 --regid 65534 --clear-groups)
fi
cd "$folder"
mkdir tmp
[ "$(id -u)" != 0 ] || chown 65534:65534 tmp
one_core=()
if command -v taskset >/dev/null; then one_core=(taskset -c 0); fi
"${as_nobody[@]}" "${one_core[@]}" env -u LC_ALL LANG=C TZ=Pacific/Kiritimati HOME=/nonexistent TMPDIR="$folder/tmp" \
  PIP_NO_CACHE_DIR=1 make test PYTHON="$python"

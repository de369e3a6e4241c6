#!/bin/sh
# usage: .ci/with-env.sh COMMAND...    runs COMMAND with the environment that GPU programs want here
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)

# Mesa's EGL complains on stderr, once a process, unless this names a private writable folder.
if [ ! -d "${XDG_RUNTIME_DIR:-}" ] || [ ! -w "${XDG_RUNTIME_DIR:-}" ]; then
    XDG_RUNTIME_DIR=$root/.venv/run
    mkdir -p "$XDG_RUNTIME_DIR"
    chmod 700 "$XDG_RUNTIME_DIR"
    export XDG_RUNTIME_DIR
fi

# The second software driver, where the set-up could get it; a path that is already set wins.
icd=$root/.venv/share/swiftshader/vk_swiftshader_icd.json
if [ -z "${WGPUCONV_SWIFTSHADER_ICD:-}" ] && [ -f "$icd" ]; then
    export WGPUCONV_SWIFTSHADER_ICD="$icd"
fi

exec "$@"

#!/usr/bin/env bash
# Chromium for the browser tests. Installs Debian's where this may be done (root, apt-get); elsewhere it says that the
# browser tests will be skipped, which CREDITSCOPE_BROWSER=required turns into a failure.
set -euo pipefail

works() { command -v "$1" >/dev/null 2>&1 && "$1" --version >/dev/null 2>&1; }

for name in "${CREDITSCOPE_CHROMIUM:-chromium}" chromium google-chrome; do
    if works "$name"; then exit 0; fi
done

log=$(mktemp)
trap 'rm -f "$log"' EXIT
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    why="it may not be installed here: that needs root and apt-get"
else
    echo "installing chromium for the browser tests (once)"
    export DEBIAN_FRONTEND=noninteractive
    install=(apt-get install --quiet --yes --no-install-recommends chromium)
    if { "${install[@]}" || { apt-get update --quiet && "${install[@]}"; }; } >"$log" 2>&1 && works chromium; then
        exit 0
    fi
    why="apt-get could not install it: $(grep -E '^E:' "$log" | tail -n 1 || true)"
fi

echo "!! NO CHROMIUM: $why" >&2
echo "!! Install it, or name one: export CREDITSCOPE_CHROMIUM=/path/to/chromium" >&2
if [ "${CREDITSCOPE_BROWSER:-}" = required ]; then exit 1; fi
echo "!! THE BROWSER TESTS WILL BE SKIPPED" >&2

#!/usr/bin/env bash
# Runs the service's loops together with a Ray node without slots, because a Ray driver connects to
# a cluster through a node on the same machine. When either exits, the other and this script exit
# too, so that the container is restarted. Arguments are passed to `ray start`.
set -uo pipefail
: "${DRAY_RAY_ADDRESS:?set DRAY_RAY_ADDRESS to the Ray head as HOST:PORT}"
: "${DRAY_RAY_TOKEN_FILE:?set DRAY_RAY_TOKEN_FILE to the file with the token of the Ray cluster}"

RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$DRAY_RAY_TOKEN_FILE" \
    ray start --block --address="$DRAY_RAY_ADDRESS" --num-cpus=0 --disable-usage-stats "$@" &
node=$!
python -m service &
service=$!

asked=false
trap 'asked=true; kill -TERM "$service" 2>/dev/null' TERM INT
wait -n "$node" "$service"
code=$?
kill -TERM "$service" 2>/dev/null
wait "$service"
stopped=$?
kill -TERM "$node" 2>/dev/null
wait "$node"
if $asked; then exit "$stopped"; fi
echo "the service or its Ray node exited unexpectedly" >&2
exit $((code == 0 ? 1 : code))

#!/usr/bin/env bash
# Creates the secrets of one deployment: docker/make-secrets.sh FOLDER
# Only the owner can enter the folder. The files in it are readable by the containers' user, because
# Compose mounts them one by one.
set -euo pipefail
folder=${1:?usage: docker/make-secrets.sh FOLDER}
if [ -e "$folder" ]; then
    echo "$folder already exists: move it, or choose another folder" >&2
    exit 1
fi
mkdir -p "$(dirname "$folder")"
mkdir -m 0700 "$folder"
folder=$(cd "$folder" && pwd)

secret() { od -An -tx1 -N32 /dev/urandom | tr -d ' \n'; }

umask 022
password=$(secret)
token=$(secret)
printf '%s' "$password" > "$folder/postgres_password"
printf '[dray]\nhost=postgres\nuser=dray\ndbname=dray\npassword=%s\n' "$password" \
    > "$folder/pg_service.conf"
secret > "$folder/ray_token"
printf 'admin:%s:admin\n' "$(printf '%s' "$token" | sha256sum | cut -d' ' -f1)" > "$folder/dray_tokens"
(umask 077 && printf '%s\n' "$token" > "$folder/admin_token")
cat > "$folder/env" <<END
POSTGRES_PASSWORD_FILE=$folder/postgres_password
PG_SERVICE_FILE=$folder/pg_service.conf
RAY_TOKEN_FILE=$folder/ray_token
DRAY_TOKENS_FILE=$folder/dray_tokens
END
echo "Start it with: docker compose --env-file $folder/env -f docker/compose.yaml up --build"
echo "To use it, set the token: export DRAY_TOKEN=\$(cat $folder/admin_token)"

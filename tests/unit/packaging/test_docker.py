"""Checks of the images and of compose.yaml that need no Docker."""

from __future__ import annotations

import importlib
import re
import subprocess
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest

from docker import check_service
from service.config.settings import Settings
from service.config.tokens_file import load_tokens
from service.db.models import ClusterRow
from service.db.repositories.scheduling import cluster
from service.db.session import Database
from tests.unit.packaging import compose

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILES = sorted(compose.DOCKER.glob("Dockerfile.*"))
SECRETS = {
    "POSTGRES_PASSWORD_FILE": "/s/postgres_password",
    "PG_SERVICE_FILE": "/s/pg_service.conf",
    "RAY_TOKEN_FILE": "/s/ray_token",
    "DRAY_TOKENS_FILE": "/s/dray_tokens",
}
# Read by the programs in the images that are not dray's own.
FOREIGN = {
    "PGSERVICEFILE",  # libpq
    "POSTGRES_USER",
    "POSTGRES_DB",
    "POSTGRES_PASSWORD_FILE",
    "RAY_AUTH_MODE",
    "RAY_AUTH_TOKEN_PATH",
    "RAY_memory_monitor_refresh_ms",
    "NODE_STATS_UPDATE_INTERVAL_SECONDS",
    "RAY_DASHBOARD_STATS_UPDATING_INTERVAL",
}


@pytest.fixture
def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = compose.load(SECRETS)["services"]
    return found


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """(name, arguments) of each instruction, continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", dockerfile.read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split()[0], line.split(None, 1)[1]) for line in lines]


def test_the_deployment_is_postgresql_ray_api_and_service(
    services: dict[str, dict[str, Any]],
) -> None:
    assert set(services) == {"postgres", "ray-head", "ray-worker", "api", "service"}
    assert services["ray-worker"]["deploy"]["replicas"] == 2


@pytest.mark.parametrize("name", sorted(SECRETS))
def test_nothing_starts_while_a_secret_is_unset(name: str) -> None:
    with pytest.raises(compose.Unset, match=f"^set {name} "):
        compose.load({key: value for key, value in SECRETS.items() if key != name})


def test_no_secret_has_a_default() -> None:
    defaults = {name: value for name, value in compose.variables().items() if value is not None}
    assert not [name for name in defaults if re.search("PASSWORD|TOKEN|SECRET|PG_", name)]


def test_secrets_reach_containers_as_files(services: dict[str, dict[str, Any]]) -> None:
    declared = compose.load(SECRETS)["secrets"]
    assert {secret["file"] for secret in declared.values()} == set(SECRETS.values())
    for name, service in services.items():
        given = set(service.get("secrets", []))
        assert given <= set(declared), name
        named = {
            Path(value).name
            for value in service.get("environment", {}).values()
            if value.startswith("/run/secrets/")
        }
        assert named == given, f"{name} names other secrets than it gets"


def test_every_service_has_a_health_check_and_is_started_again(
    services: dict[str, dict[str, Any]],
) -> None:
    for name, service in services.items():
        assert service["healthcheck"]["test"][0] == "CMD", name
        assert service["restart"] == "unless-stopped", name


def test_what_a_service_waits_for_exists(services: dict[str, dict[str, Any]]) -> None:
    for service in services.values():
        for name, condition in service.get("depends_on", {}).items():
            assert condition == {"condition": "service_healthy"}
            assert "healthcheck" in services[name]


def test_environment_names_are_real_settings(services: dict[str, dict[str, Any]]) -> None:
    settings = {f"DRAY_{name.upper()}" for name in Settings.model_fields}
    for name, service in services.items():
        assert set(service.get("environment", {})) <= settings | FOREIGN, name


def test_the_api_listens_to_others_only_with_tokens(services: dict[str, dict[str, Any]]) -> None:
    environment = services["api"]["environment"]
    assert environment["DRAY_HOST"] == "0.0.0.0"
    assert environment["DRAY_TOKENS_FILE"] == "/run/secrets/dray_tokens"


def test_the_loops_know_the_callers_too(services: dict[str, dict[str, Any]]) -> None:
    """Their tokens file closes nodes to `file://` data, and stops the webhooks of removed users."""
    loops = services["service"]["environment"]
    assert loops["DRAY_TOKENS_FILE"] == services["api"]["environment"]["DRAY_TOKENS_FILE"]


def test_the_service_can_write_to_mlflow(services: dict[str, dict[str, Any]]) -> None:
    assert "DRAY_MLFLOW_TRACKING_URI" in services["service"]["environment"]


def test_ports_are_published_on_this_machine_only(services: dict[str, dict[str, Any]]) -> None:
    published = [port for service in services.values() for port in service.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_all_of_dray_sees_the_same_storage(services: dict[str, dict[str, Any]]) -> None:
    ours = [service for service in services.values() if "build" in service]
    for service in ours:
        assert service["volumes"] == ["storage:/srv/dray"]
    urls = {
        service["environment"]["DRAY_STORAGE_URL"]
        for service in ours
        if "DRAY_STORAGE_URL" in service["environment"]
    }
    (url,) = urls
    assert Path(urlsplit(url).path).is_relative_to("/srv/dray")


def test_every_ray_node_asks_for_the_token(services: dict[str, dict[str, Any]]) -> None:
    for name in ("ray-head", "ray-worker"):
        assert services[name]["environment"]["RAY_AUTH_MODE"] == "token"
        assert services[name]["environment"]["RAY_AUTH_TOKEN_PATH"] == "/run/secrets/ray_token"
    assert services["service"]["environment"]["DRAY_RAY_TOKEN_FILE"] == "/run/secrets/ray_token"


def test_every_module_and_file_of_a_command_exists(services: dict[str, dict[str, Any]]) -> None:
    seen = set()
    for service in services.values():
        for words in (compose.command(service), service["healthcheck"]["test"][1:]):
            if words[:2] == ["python", "-m"]:
                importlib.import_module(f"{words[2]}.__main__")
                seen.add(words[2])
            for word in words:
                if word.startswith("docker/"):
                    assert (ROOT / word).is_file()
                    seen.add(word)
    assert seen == {"api", "docker/check_service.py", "docker/run-service.sh"}


def test_images_are_built_from_files_that_exist(services: dict[str, dict[str, Any]]) -> None:
    used = set()
    for service in services.values():
        build = service.get("build")
        if build is None:
            continue
        context = (compose.DOCKER / build["context"]).resolve()
        assert context == ROOT
        used.add(context / build["dockerfile"])
        arguments = {
            text.split("=")[0]
            for name, text in instructions(context / build["dockerfile"])
            if name == "ARG"
        }
        assert set(build["args"]) <= arguments
    assert used == set(DOCKERFILES)


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_what_an_image_copies_exists_and_is_sent_to_the_build(dockerfile: Path) -> None:
    sent = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copies = [text.split() for name, text in instructions(dockerfile) if name == "COPY"]
    for source in [word for words in copies for word in words[:-1]]:
        assert (ROOT / source).exists(), source
        assert source in sent, f"{source} is not in .dockerignore's list"


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_is_pinned_and_runs_without_privileges(dockerfile: Path) -> None:
    steps = instructions(dockerfile)
    (base,) = (text for name, text in steps if name == "FROM")
    assert re.fullmatch(r"python:3\.\d+-slim-bookworm", base)
    installs = [part for name, text in steps if name == "RUN" for part in text.split("&&")]
    for install in (part for part in installs if "pip install" in part):
        assert "--constraint constraints.txt" in install
    assert [text for name, text in steps if name == "USER"] == ["1000:1000"]


def test_the_images_share_the_layers_of_torch() -> None:
    first, second = (instructions(dockerfile) for dockerfile in DOCKERFILES)
    heavy = next(i for i, (_, text) in enumerate(first) if text.endswith(" torch"))
    assert first[: heavy + 1] == second[: heavy + 1]


def test_the_images_install_extras_that_exist_and_contain_every_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    rooms = {"Dockerfile.worker": {"dray", "ray_workers", "examples"}}
    rooms["Dockerfile.service"] = rooms["Dockerfile.worker"] | {"api", "service", "migrations"}
    for dockerfile in DOCKERFILES:
        text = dockerfile.read_text()
        (given,) = re.findall(r"\.\[([\w,]+)\]", text)
        assert set(given.split(",")) <= extras.keys()
        if dockerfile.name == "Dockerfile.service":
            assert "mlflow" in given.split(","), "the service may be told to write to it"
        folders = {
            word
            for name, words in instructions(dockerfile)
            if name == "COPY"
            for word in words.split()[:-1]
            if (ROOT / word).is_dir()
        }
        assert folders == rooms[dockerfile.name]


def test_the_gpu_variant_changes_services_that_exist(services: dict[str, dict[str, Any]]) -> None:
    variant = compose.load({}, "compose.gpu.yaml")["services"]
    assert set(variant) <= set(services)


def make_secrets(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [compose.DOCKER / "make-secrets.sh", folder], capture_output=True, text=True, check=False
    )


def test_made_secrets_are_complete_consistent_and_closed_to_others(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    made = make_secrets(folder)
    assert made.returncode == 0, made.stderr
    assert folder.stat().st_mode & 0o777 == 0o700
    lines = (folder / "env").read_text().splitlines()
    variables = dict(line.split("=", 1) for line in lines)
    compose.load(variables)
    assert all(Path(path).is_file() for path in variables.values())
    password = (folder / "postgres_password").read_text()
    assert f"password={password}\n" in (folder / "pg_service.conf").read_text()
    assert set(load_tokens(folder / "dray_tokens")) == {"admin"}
    texts = [(folder / name).read_text().strip() for name in ("admin_token", "ray_token")]
    assert all(re.fullmatch("[0-9a-f]{64}", text) for text in (*texts, password))
    assert len({*texts, password}) == 3


def test_making_secrets_twice_keeps_the_first(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    make_secrets(folder)
    before = (folder / "ray_token").read_text()
    again = make_secrets(folder)
    assert again.returncode == 1
    assert str(folder) in again.stderr
    assert (folder / "ray_token").read_text() == before


def test_the_database_is_found_by_a_service_file(
    postgres_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    services: dict[str, dict[str, Any]],
) -> None:
    path = tmp_path / "pg_service.conf"
    options = psycopg.conninfo.conninfo_to_dict(postgres_url)
    path.write_text("[dray]\n" + "".join(f"{k}={v}\n" for k, v in options.items() if v))
    monkeypatch.setenv("PGSERVICEFILE", str(path))
    database = Database(services["service"]["environment"]["DRAY_DATABASE_URL"])
    try:
        database.listen()
        assert database.listener is not None
        assert database.listener.listening.wait(60)
        assert database.read_sync(cluster.get) is None
    finally:
        database.close()


def test_the_services_health_is_a_current_picture_of_the_cluster(database: Database) -> None:
    now = datetime.now(UTC)

    def seen(connected: bool, reason: str | None, at: datetime) -> str | None:
        row = ClusterRow(id=cluster.THE_CLUSTER, connected=connected, reason=reason, updated_at=at)
        database.write_sync(lambda session: cluster.put(session, row))
        return check_service.problem(database, now)

    assert "not stored" in (check_service.problem(database, now) or "")
    assert seen(True, None, now) is None
    assert "are the loops running" in (seen(True, None, now - timedelta(minutes=5)) or "")
    assert "Ray is away" in (seen(False, "Ray is away", now) or "")

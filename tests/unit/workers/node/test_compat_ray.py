"""Ray's private names exist, as far as a test without a cluster can check; tests/contract calls
them on a cluster."""

from __future__ import annotations

import importlib
import inspect
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.actor import ActorHandle

from ray_workers.node import compat_ray

CHANGED = f"Ray {ray.__version__} has changed a private name: see compat_ray.py"


def _parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_the_state_of_the_cluster_is_asked_by_the_same_calls() -> None:
    state = importlib.import_module("ray._private.state")
    assert _parameters(state.actors)[0] == "actor_id", CHANGED
    assert _parameters(state.available_resources_per_node) == [], CHANGED
    assert _parameters(type(state.state).get_draining_nodes) == ["self"], CHANGED


def test_an_actors_handle_knows_its_id() -> None:
    assert "_actor_id" in inspect.getsource(ActorHandle.__init__), CHANGED


def test_the_key_value_store_takes_a_value_once() -> None:
    store = importlib.import_module("ray.experimental.internal_kv")
    parameters = inspect.signature(store._internal_kv_put).parameters
    assert list(parameters)[:3] == ["key", "value", "overwrite"], CHANGED
    assert "namespace" in parameters, CHANGED


def test_a_class_is_exported_by_one_process_and_used_by_another() -> None:
    worker = importlib.import_module("ray._private.worker")
    manager = importlib.import_module("ray._private.function_manager")
    creation = inspect.getsource(importlib.import_module("ray.actor").ActorClass._remote)
    assert "meta.last_export_cluster_and_job != worker.current_cluster_and_job" in creation, CHANGED
    assert "meta.method_meta.methods.keys()" in creation, CHANGED
    assert isinstance(worker.Worker.current_cluster_and_job, property), CHANGED
    parameters = _parameters(manager.FunctionActorManager.export_actor_class)[1:]
    descriptor = "actor_creation_function_descriptor"
    assert parameters == ["Class", descriptor, "actor_method_names"], CHANGED
    there = ray.remote(type("There", (), {})).__ray_metadata__
    assert pickle.loads(pickle.dumps(getattr(there, descriptor))) == getattr(there, descriptor)


def test_a_raylet_is_asked_for_workers_by_the_same_message() -> None:
    messages: Any = importlib.import_module("ray.core.generated.node_manager_pb2")
    stubs: Any = importlib.import_module("ray.core.generated.node_manager_pb2_grpc")
    names = set(messages.PrestartWorkersRequest.DESCRIPTOR.fields_by_name)
    assert names >= {"language", "num_workers", "keep_alive_duration_secs"}, CHANGED
    assert "PrestartWorkers" in inspect.getsource(stubs.NodeManagerServiceStub.__init__), CHANGED
    common: Any = importlib.import_module("ray.core.generated.common_pb2")
    assert common.Language.Value("PYTHON") == compat_ray.PRESTARTED_LANGUAGE, CHANGED


def test_a_raylet_that_is_not_there_is_an_error() -> None:
    with pytest.raises(Exception, match=r"connect|UNAVAILABLE"):
        compat_ray.prestart_workers("127.0.0.1:1", 1, 1, (), 2.0)


def test_workers_are_started_by_another_script(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters: Any = importlib.import_module("ray._private.parameter").RayParams
    services: Any = importlib.import_module("ray._private.services")
    assert inspect.getsource(services).count("_site_flags()") == 2, CHANGED
    monkeypatch.setattr(services, "_site_flags", services._site_flags)
    monkeypatch.setattr(parameters, "__init__", parameters.__init__)
    rays = compat_ray.start_workers_by("/dray/entry.py")
    assert rays is not None, CHANGED
    assert "worker.main_loop()" in Path(rays).read_text(), CHANGED
    assert services._site_flags() == ["-I", "-S"]
    chosen = parameters(num_cpus=3)
    chosen.update_if_absent(worker_path=rays)
    assert (chosen.worker_path, chosen.num_cpus) == ("/dray/entry.py", 3), CHANGED


def test_a_worker_knows_its_raylet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_RAYLET_PID", raising=False)
    assert compat_ray.raylet_pid() == os.getppid()
    monkeypatch.setenv("RAY_RAYLET_PID", "17")
    assert compat_ray.raylet_pid() == 17


def test_ray_brings_the_bindings_of_gpus() -> None:
    assert callable(compat_ray.nvml().nvmlInit), CHANGED

"""Ways to keep copies in step that conflict with the rest of a document."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.spec.job_documents import SCRIPT, check_refusal, images


def gossip(num_workers: int, **options: Any) -> dict[str, Any]:
    sync = {"kind": "gossip", **options}
    return images(sync=sync, resources={"num_workers": num_workers})


def served(num_ranks: int, **sync: Any) -> dict[str, Any]:
    """A job with parameter servers among its ranks."""
    sync = {"kind": "parameter_server", **sync}
    return images(resources={"num_workers": num_ranks}, sync=sync)


CUSTOM: dict[str, Any] = {"graph": "custom"}
NO_GOSSIP: list[tuple[dict[str, Any], str, str]] = [
    ({"every": 4}, "/sync/every", "Extra inputs"),
    (CUSTOM, "/sync/edges", "is required with `graph: custom`"),
    ({"edges": [[0, 1]]}, "/sync/edges", "is required with `graph: custom`"),
    (CUSTOM | {"edges": [[0, 1], [2, 3]]}, "/sync/edges", "no path leads from rank 0 to rank 2"),
    (CUSTOM | {"edges": [[0, 1], [1, 4]]}, "/sync/edges/1", "contains rank 4, but the ranks are 0"),
    (CUSTOM | {"edges": [[1, 1]]}, "/sync/edges/0", "connects a rank to itself"),
    (CUSTOM | {"edges": [[0, -1]]}, "/sync/edges/0/1", "greater than or equal to 0"),
    (
        CUSTOM | {"mode": "sgp", "edges": [[0, 1], [1, 2], [2, 3]]},
        "/sync/edges",
        "no path leads from rank 1 to rank 0",
    ),
    (
        CUSTOM | {"mode": "ad_psgd", "edges": [[0, 1], [1, 2], [2, 0], [2, 3]]},
        "/sync/edges",
        "the edge [1, 2] closes an odd cycle",
    ),
    ({"mode": "ad_psgd", "graph": "exponential"}, "/sync/graph", "must not be exponential"),
]


@pytest.mark.parametrize(
    ("document", "pointer", "message"),
    [
        (images(sync={"every": 1, "outer": {}}), "/sync/outer", "requires sync.every above 1"),
        (
            images(sync={"every": 5, "compression": {"name": "fp16"}}),
            "/sync/compression",
            "requires sync.every to be 1",
        ),
        (
            images(sync={"every": 5}, elastic={"min_workers": 1}),
            "/elastic",
            "the ranks' weights differ until they are averaged",
        ),
        (
            images(sync={"every": 5}, train={"ema": {}}),
            "/train/ema",
            "the ranks' weights differ until they are averaged",
        ),
        (
            images(sync={"every": 5}, checkpoint={"every_steps": "auto"}),
            "/checkpoint/every_steps",
            "must be a number",
        ),
        *((gossip(4, **options), pointer, said) for options, pointer, said in NO_GOSSIP),
        (images(sync="gossip"), "/sync", "such as {kind: gossip}"),
        (
            images(sync={"kind": "auto", "compression": {"name": "bf16"}}),
            "/sync/compression",
            "leave it out, or set sync.kind to the kind that has this option",
        ),
        (gossip(1), "/resources/num_workers", "a single rank has no neighbours"),
        (gossip(3, mode="ad_psgd"), "/sync/graph", "an even number of workers. Use random"),
        (gossip(2) | {"elastic": {"min_workers": 1}}, "/elastic", "with sync.kind gossip"),
        (gossip(2) | {"train": {"ema": {}}}, "/train/ema", "with sync.kind gossip"),
        (gossip(2) | {"checkpoint": {"every_steps": "auto"}}, "/checkpoint/every_steps", "gossip"),
        (gossip(2) | {"parallel": {"shard": 2}}, "/sync/kind", "requires parallel.shard to be 1"),
        (gossip(2) | {"parallel": {"balance": "auto"}}, "/parallel/balance", "kinds of sync other"),
        (
            gossip(2, mode="ad_psgd") | {"resources": {"num_workers": 2, "gpus_per_worker": 1}},
            "/resources/gpus_per_worker",
            "must be 0 with ad_psgd",
        ),
        (
            gossip(2, mode="ad_psgd") | {"data": {"source": "file:///images", "loader_workers": 2}},
            "/data/loader_workers",
            "must be 0 with ad_psgd",
        ),
        (
            served(3, servers=2),
            "/resources/num_workers",
            "is 3, including 2 for sync.servers: set it to 4 or more",
        ),
        (
            served(7, servers=4),
            "/sync/servers",
            "is 4, but only 3 of the 7 ranks are workers: use 3 servers or fewer",
        ),
        (served(4, mode="bounded"), "/sync/max_staleness", "is required with `mode: bounded`"),
        (served(4, max_staleness=4), "/sync/max_staleness", "is required with `mode: bounded`"),
        (
            served(4, correction={"name": "staleness_lr"}),
            "/sync/correction",
            "synchronous updates are never stale",
        ),
        (
            served(4, mode="asynchronous", correction={"name": "staleness_lr", "strength": 0.1}),
            "/sync/correction/strength",
            "only applies to delay_compensation",
        ),
        (
            images(sync="auto", init_from={"job": "job-1", "take": "everything"}),
            "/sync",
            "use the same sync as the job that this job continues",
        ),
        (
            images(sync="auto", federated={"clients": 20, "clients_per_round": 5, "rounds": 30}),
            "/sync",
            "must be unset with federated",
        ),
        (
            served(4, shards_kept_by="replica"),
            "/sync/shards_kept_by",
            "must be snapshot if there is only one server, because the replica is kept on the next",
        ),
        (
            served(4) | {"parallel": {"shard": 2}},
            "/parallel",
            "must be unset with sync.kind parameter_server: each worker has the complete model",
        ),
        (
            served(4) | {"elastic": {"min_workers": 3}},
            "/elastic",
            "with sync.kind parameter_server, whose group has a fixed size",
        ),
        (
            served(4) | {"parallel": {"balance": "auto"}},
            "/parallel/balance",
            "with kinds of sync other than all_reduce",
        ),
        (
            served(4) | {"resources": {"num_workers": 4, "gpus_per_worker": 1}},
            "/sync/server_resources",
            "is required with gpus_per_worker, because servers have no GPU",
        ),
        (
            served(4, server_resources={})
            | {"resources": {"num_workers": 4, "gpus_per_worker": 0.5, "share_gpus": True}},
            "/resources/gpus_per_worker",
            "must be 0 or 1 with sync.server_resources",
        ),
        (
            served(4, server_resources={})
            | {"resources": {"num_workers": 4, "required_topology": "rack"}},
            "/resources/required_topology",
            "must be unset with sync.server_resources",
        ),
        (
            served(4, server_resources={"cpus": 0}),
            "/sync/parameter_server/server_resources/cpus",
            "greater than or equal to 1",
        ),
        (
            served(4, server_resources={"gpus": 1}),
            "/sync/parameter_server/server_resources/gpus",
            "Extra inputs are not permitted",
        ),
        (
            served(4) | {"train": {"optimizer": {"name": "lamb"}}},
            "/train/optimizer/name",
            "must be adamw or sgd with sync.kind parameter_server: lamb needs complete layers",
        ),
        (
            served(4) | {"train": {"max_grad_norm": 1.0}},
            "/train/max_grad_norm",
            "or set sync.mode to asynchronous or bounded",
        ),
        (served(4) | {"train": {"precision": "fp16"}}, "/train/precision", "must be fp32 or bf16"),
        (served(4) | {"train": {"ema": {}}}, "/train/ema", "must be unset"),
        (
            served(4) | {"train": {"on_divergence": "skip_step"}},
            "/train/on_divergence",
            "Use rollback",
        ),
        (
            served(4) | {"train": {"optimizer": {"state_dtype": "bf16"}}},
            "/train/optimizer/state_dtype",
            "must be fp32",
        ),
        (
            served(4, mode="asynchronous")
            | {"data": {"source": "sklearn://digits", "loader_workers": 2}},
            "/data/loader_workers",
            "must be 0 with sync.mode asynchronous",
        ),
        (served(4) | {"profile": {}}, "/profile", "workers don't take the same steps"),
        (
            served(6, servers=2) | {"train": {"global_batch_size": 3}},
            "/train/global_batch_size",
            "is 3, which is less than one sample for each of the 4 workers",
        ),
        (
            images(sync={"compression": {"name": "fp16", "ratio": 0.1}}),
            "/sync/compression",
            "ratio is an option of topk",
        ),
        (
            images(
                sync={"compression": {"name": "fp16"}},
                resources={"num_workers": 2},
                elastic={"min_workers": 1, "exact": True},
            ),
            "/sync/compression",
            "can't be combined with elastic.exact",
        ),
        (
            images(
                sync={"compression": {"name": "topk"}},
                train={"optimizer": {"name": "sgd", "momentum": 0.9, "nesterov": True}},
            ),
            "/train/optimizer/nesterov",
            "must be false with topk",
        ),
        (
            images(sync={"compression": {"name": "topk"}}, train={"optimizer": {"name": "lars"}}),
            "/sync/compression/name",
            "must not be topk with lars",
        ),
        (SCRIPT | {"sync": {}}, "/sync", "a script exchanges its own gradients"),
    ],
)
def test_a_way_to_keep_copies_in_step_fits_the_rest_of_the_document(
    document: dict[str, Any], pointer: str, message: str
) -> None:
    check_refusal(document, pointer, message)

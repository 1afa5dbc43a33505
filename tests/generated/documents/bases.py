"""Valid documents, from which others are generated. Together they contain every field."""

from __future__ import annotations

from typing import Any

WEB = "https://example.org"
CLIENTS = {"clients": 8, "clients_per_round": 8, "rounds": 2}
SILOS = [
    {"name": "north", "node_labels": {"site": "a"}, "source": "file:///north.csv"},
    {"name": "south", "node_labels": {"site": "b"}, "max_samples": 50},
]
TABLE = {
    "source": f"{WEB}/table.csv",
    "format": "csv",
    "target": "y",
    "features": ["a", "b"],
    "categorical": ["a"],
    "delimiter": "tab",
    "encoding": "latin-1",
    "decimal": ",",
    "numbers": {"thousands": ".", "units": ["$"]},
    "missing": "mean",
    "missing_columns": {"b": "drop"},
    "size_bytes": "5MB",
    "sha256": "0" * 64,
    "credentials": "lab",
    "loader_workers": 2,
    "validation_fraction": 0.3,
}


def images(workers: int = 1, **fields: Any) -> dict[str, Any]:
    """A job with the first recipe."""
    return {"recipe": "image_classification", "resources": {"num_workers": workers}, **fields}


def script(**fields: Any) -> dict[str, Any]:
    return {"script": {"entrypoint": "a.py", **fields}}


def federated(**fields: Any) -> dict[str, Any]:
    return images(2, federated={**CLIENTS, **fields})


def language(workers: int = 1, **fields: Any) -> dict[str, Any]:
    data = {"data": {"source": f"{WEB}/text.txt"}}
    return {**images(workers), "recipe": "language_model", **data, **fields}


GPT = {"name": "gpt", "num_layers": 4, "num_heads": 4, "width": 64, "context_length": 64}
OF_GPUS = {"num_workers": 4, "gpus_per_worker": 1}
BASES: tuple[dict[str, Any], ...] = (
    images(
        version=1, name="plain", labels={"team": "a"}, priority=70, max_retries=0, queue="default"
    ),
    images(model={"name": "cnn", "width": 8, "dropout": 0.5}, max_runtime_s="2h"),
    images(model={"name": "resnet", "depth": 8, "width": 4}, train={"recompute": "full"}),
    images(model={"name": "mlp", "width": 8, "num_layers": 3, "dropout": 0.1}),
    images(model={"import": "net:Net", "args": {"width": 8}}),
    {
        "recipe": "tabular_regression",
        "data": TABLE,
        "model": {"name": "mlp", "embedding_dim": 4},
        "train": {"early_stopping": {"metric": "val/mae", "patience": 2, "min_delta": 0.1}},
        "checkpoint": {"every_steps": "auto", "keep": 2, "best": "val/mae"},
    },
    {"recipe": "tabular_classification", "data": {"source": f"{WEB}/t.parquet", "target": "y"}},
    {
        "recipe": "image_segmentation",
        "data": {"source": f"{WEB}/s.zip", "classes": ["no", "yes"], "image_size": [64, 64]},
        "model": {"name": "unet", "width": 4, "depth": 2, "dropout": 0.1},
    },
    language(model={**GPT, "dropout": 0.1, "tokenizer": f"{WEB}/t.json"}),
    language(model={"import": "net:Net", "context_length": 32, "tokenizer": f"{WEB}/t.json"}),
    {
        "recipe": "fine_tuning",
        "data": {
            "sources": [
                {"source": f"{WEB}/chats.jsonl", "repeat": 2.5, "examples": "messages"},
                {"source": f"{WEB}/chats", "format": "parquet"},
            ],
            "examples": "sharegpt",
            "validation": f"{WEB}/validation.csv",
        },
        "model": {
            "base": "s3://models/llama",
            "catalogue": "llama",
            "accept_licence": ["Community License", "Gemma Terms of Use"],
            "code": f"code-{'0' * 32}",
            "sha256": "0" * 64,
            "chat_template": "{{ messages }}",
            "credentials": "lab",
            "adapter": {
                "kind": "lora",
                "rank": 4,
                "alpha": 8.0,
                "dropout": 0.1,
                "target_modules": ["q_proj"],
                "rslora": True,
                "merge": False,
            },
        },
        "samples": {
            "prompts": ["A prompt", [{"role": "user", "content": "Hello"}]],
            "max_tokens": 8,
            "temperature": 0.5,
        },
        "method": {
            "name": "sft",
            "loss": "all",
            "max_length": 64,
            "truncation": "drop",
            "packing": True,
            "metrics": {"top_ten": "scores:InTopTen"},
        },
    },
    {
        "recipe": "fine_tuning",
        "data": {"source": f"{WEB}/pairs.jsonl"},
        "model": {
            "base": "s3://models/llama",
            "adapter": {"kind": "dora", "rank": 4, "base_precision": "bf16"},
        },
        "train": {"precision": "bf16"},
        "method": {
            "name": "dpo",
            "loss": "sigmoid",
            "beta": 0.2,
            "label_smoothing": 0.1,
            "max_length": 64,
            "truncation": "error",
        },
        "checkpoint": {"best": "val/rewards/margins"},
    },
    {
        "recipe": "fine_tuning",
        "data": {"source": f"{WEB}/pairs.jsonl"},
        "model": {"base": "s3://models/llama"},
        "method": {"name": "reward", "max_length": 64, "truncation": "drop"},
        "train": {"early_stopping": {"metric": "val/margin", "patience": 2}},
    },
    images(
        train={
            "epochs": 3,
            "max_steps": 50,
            "global_batch_size": 64,
            "micro_batch_size": 8,
            "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True},
            "lr_scaling": {"rule": "linear", "reference_batch_size": 32},
            "schedule": {"name": "cosine", "warmup_steps": 5, "final_ratio": 0.1},
            "compile": True,
            "max_grad_norm": 1.0,
            "label_smoothing": 0.1,
            "ema": {"decay": 0.99},
            "on_divergence": "warn",
            "seed": 7,
            "eval_every_epochs": 2,
        },
        profile={"at_step": 5, "num_steps": 2, "ranks": [0]},
    ),
    images(4, check={"replicas_every": 100}),
    images(
        train={
            "optimizer": {"name": "adamw", "weight_decay": 0.1, "betas": [0.8, 0.9], "eps": 1e-6},
            "schedule": {"name": "step", "every_steps": 5, "factor": 0.5},
            "precision": "bf16",
        }
    ),
    images(train={"optimizer": {"name": "lars", "trust": 0.01}}),
    images(
        train={"optimizer": {"name": "adamw", "offload": True, "state_dtype": "bf16"}},
        resources={"gpus_per_worker": 1},
    ),
    images(
        2,
        elastic={"min_workers": 1, "by_speed": True},
        train={"measure_noise": True, "batch_range": [64, 256], "batch_scaling": "sqrt"},
    ),
    images(2, elastic={"min_workers": 1, "exact": True}),
    images(4, elastic={"min_workers": 2}, parallel={"shard": 2}),
    images(elastic={"min_workers": 1}, resources={"num_workers": 2, "gpus_per_worker": 1}),
    images(3, elastic={"spares": 2, "min_workers": 2}),
    images(2, elastic={"spares": 1}),
    images(4, elastic={"spares": 1, "min_workers": 2}, parallel={"shard": 2}),
    images(2, parallel={"balance": "auto", "data": 2}),
    images(
        2,
        parallel={"shard": 2},
        checkpoint={"in_memory": {"every_steps": 5, "copies": 1}},
    ),
    images(2, sync={"kind": "all_reduce", "compression": {"name": "powersgd", "rank": 4}}),
    images(2, sync={"compression": {"name": "powersgd", "warm_start": False, "start_step": 5}}),
    images(2, sync={"compression": {"name": "topk", "ratio": 0.01, "warmup_steps": 5}}),
    images(2, sync={"every": 4, "outer": {"lr": 0.5, "momentum": 0.8}}),
    images(3, sync={"kind": "gossip", "mode": "sgp", "graph": "ring"}),
    images(3, sync={"kind": "gossip", "graph": "custom", "edges": [[0, 1], [1, 2]]}),
    images(
        4,
        sync={
            "kind": "parameter_server",
            "servers": 2,
            "server_resources": {"cpus": 2, "memory_bytes": "1GiB"},
            "mode": "bounded",
            "max_staleness": 3,
            "correction": {"name": "delay_compensation", "strength": 0.1},
            "push_dtype": "bf16",
            "shards_kept_by": "replica",
        },
    ),
    images(2, sync={"kind": "auto", "bandwidth_bytes_per_s": "100MiB"}),
    language(
        model=GPT,
        resources=OF_GPUS,
        parallel={"shard": 4, "zero": 2, "param_dtype": "bf16", "reduce_dtype": "bf16"},
        train={"precision": "bf16"},
    ),
    language(4, model=GPT, parallel={"tensor": 2, "context": 2}),
    language(
        2,
        model=GPT,
        parallel={"pipeline": 2, "schedule": "interleaved", "stages_per_rank": 2},
        train={"global_batch_size": 16, "micro_batch_size": 4},
    ),
    images(2, parallel={"auto": ["shard"]}),
    federated(
        algorithm="fedprox",
        proximal_mu=0.1,
        local_epochs=2,
        batch_size=8,
        partition={"by": "dirichlet", "alpha": 1.0},
        dropout_rate=0.1,
        stragglers={"rate": 0.2, "updates": "drop"},
        quorum=2,
        max_update_norm=10.0,
        evaluate_every=2,
    ),
    federated(partition={"by": "classes", "classes_per_client": 3}, server={"momentum": 0.9}),
    federated(algorithm="fedadam", server={"lr": 0.1, "betas": [0.8, 0.9], "tau": 0.01}),
    federated(aggregator={"name": "trimmed_mean", "trim": 0.2}, attack={"rate": 0.1}),
    federated(
        aggregator={"name": "krum", "malicious": 1, "keep": 2},
        attack={"rate": 0.1, "kind": "noise", "scale": 2.0},
    ),
    images(
        2,
        federated={
            **CLIENTS,
            "clients": 100,
            "clients_per_round": 40,
            "privacy": {
                "noise_multiplier": 1.0,
                "clip_norm": 0.5,
                "adaptive": {"quantile": 0.4, "lr": 0.1},
                "epsilon": 8.0,
                "delta": 1e-3,
            },
        },
    ),
    federated(secure_aggregation={"threshold": 0.7, "bits": 32}, max_update_norm=10.0),
    {
        "recipe": "tabular_regression",
        "data": {"source": f"{WEB}/t.csv", "target": "y"},
        "federated": {"rounds": 2, "silos": SILOS, "metrics": ["train/loss"], "deadline_s": 60},
    },
    images(federated={**CLIENTS, "http": {"max_samples": 100}}),
    images(sweep={"parameters": {"train.seed": [1, 2]}, "sampler": "grid", "metric": "val/loss"}),
    images(
        sweep={
            "parameters": {
                "train.optimizer.lr": {"min": 0.01, "max": 1.0, "log": True},
                "train.seed": {"min": 0, "max": 8, "step": 2, "type": "int"},
                "train.epochs": {"choices": [2, 3]},
            },
            "metric": "val/loss",
            "mode": "min",
            "sampler": "random",
            "trials": 3,
            "max_running": 2,
            "max_failed": 2,
            "seed": 5,
            "by": "last",
            "early_stopping": {"min_steps": 2, "max_steps": 8, "eta": 2},
        }
    ),
    images(array={"size": 3, "max_running": 2}),
    script(
        args=["--lr", "0.1"],
        parameters={"lr": 0.1, "name": "x"},
        framework="none",
        hang_limit_s="30m",
        guesses=False,
    ),
    {
        "script": {
            "module": "package.main",
            "roles": {"worker": {"num_workers": 2, "args": ["x"]}},
        },
        "metrics": [
            {"name": "loss", "pattern": "loss ([0-9.]+)", "step": "step ([0-9]+)", "rank": "all"}
        ],
    },
    {**script(), "metrics": [{"source": "csv"}]},
    script(
        roles={
            "worker": {"num_workers": 2},
            "ps": {
                "entrypoint": "ps.py",
                "serves": True,
                "restart": "rank",
                "resources": {"cpus": 2, "memory_bytes": "1GiB"},
            },
        }
    ),
    script(code={"git": f"{WEB}/repo.git", "commit": "0" * 40, "credentials": "lab"}),
    script(code={"url": f"{WEB}/code.tar.gz", "sha256": "0" * 64}),
    {
        **script(),
        "resources": {
            "num_workers": 2,
            "gpus_per_worker": 0.5,
            "share_gpus": True,
            "cpus_per_worker": 2,
            "memory_bytes": "1GiB",
            "accelerator": "H100",
            "node_labels": {"site": "a"},
            "required_topology": "node",
        },
        "environment": {
            "python_packages": ["numpy>=1"],
            "index": {"url": f"{WEB}/simple", "secret": "INDEX"},
            "setup": ["true"],
            "env": {"A": "b"},
            "secrets": ["KEY"],
        },
    },
    {**script(), "environment": {"requirements": "numpy\n"}},
    images(origin={"git": {"commit": "1a" * 20, "dirty": True, "branch": "main"}, "job": "job-a1"}),
)
ELSEWHERE = {
    "JobSpec.after": "tests/unit/service/jobs/test_dependencies_by_chance.py",
    "JobSpec.init_from": "tests/unit/service/jobs/test_init_from.py",
    "After.job": "tests/unit/service/jobs/test_dependencies_by_chance.py",
    "After.on": "tests/unit/service/jobs/test_dependencies_by_chance.py",
    "After.each": "tests/unit/service/jobs/test_dependencies_by_chance.py",
    "JobSpec.begin_at": "tests/unit/service/jobs/test_begin_times.py",
    "JobSpec.deadline": "tests/unit/service/jobs/test_deadlines.py",
    "JobSpec.singleton": "tests/unit/service/jobs/test_singletons.py",
    "JobSpec.time_zone": "tests/unit/spec/test_times.py",
    "JobSpec.reservation": "tests/unit/service/queues/test_reservations.py",
    "InitFrom.job": "tests/unit/service/jobs/test_init_from.py",
    "InitFrom.model": "tests/unit/cli/test_registry.py",
    "Pretrained.registered": "tests/unit/cli/test_registry.py",
    "InitFrom.step": "tests/unit/service/jobs/test_init_from.py",
    "InitFrom.take": "tests/unit/service/jobs/test_init_from.py",
    "Script.code": "tests/unit/api/routes/test_code.py",
    "Imported.code": "tests/unit/spec/test_code_of_ones_own.py",
}
"""Fields that need another job, uploaded code or a time, and the tests that cover them."""

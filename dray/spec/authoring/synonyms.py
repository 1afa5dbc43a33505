"""Names that other programs use for the fields of a job document."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final


def _all(**fields: str) -> Mapping[str, str]:
    """Map each listed name to the pointer (RFC 6901) of its field."""
    return {
        name: f"/{pointer.replace('__', '/')}"
        for pointer, names in fields.items()
        for name in names.split()
    }


MEANT: Final = _all(
    name="job_name title experiment run_name",
    labels="tags annotations metadata",
    recipe="task type kind problem",
    script__entrypoint="entry_point command cmd main file_name program run python",
    script__args="arguments argv flags",
    model__name="arch architecture backbone network model_name model_type",
    model__width="hidden_size hidden_dim hidden d_model embed_dim n_embd channels units",
    model__num_layers="layers n_layers n_layer num_hidden_layers",
    model__num_heads="heads n_heads n_head num_attention_heads",
    model__context_length="seq_len seq_length sequence_length block_size max_length max_seq_len",
    model__base="base_model model_name_or_path pretrained_model_name_or_path checkpoint_path",
    model__adapter="peft peft_config lora lora_config adapter_type",
    model__adapter__kind="use_dora peft_use_dora",
    model__adapter__rank="r lora_r lora_rank",
    model__adapter__alpha="lora_alpha",
    model__adapter__dropout="lora_dropout",
    model__adapter__target_modules="lora_target_modules lora_target_linear modules",
    model__adapter__rslora="use_rslora peft_use_rslora",
    method__loss="train_on_inputs completion_only_loss assistant_only_loss",
    method__name="rl",
    method__beta="dpo_beta rl_beta",
    method__max_length="sequence_len max_seq_length",
    method__truncation="truncation_mode excess_length_strategy",
    method__packing="sample_packing",
    data__source="dataset datasets path url uri data_path data_dir train_data input inputs",
    data__format="file_format data_format file_type",
    data__target="label_column target_column target_name y label_col",
    data__features="columns feature_columns feature_names x",
    data__categorical="categorical_columns categorical_features categories",
    data__delimiter="sep separator delim field_separator",
    data__encoding="charset file_encoding",
    data__decimal="decimal_separator decimal_point",
    data__numbers="number_format",
    data__numbers__thousands="grouping_mark thousands_separator",
    data__numbers__units="currency percent unit prefix suffix",
    data__missing="impute imputer imputation fillna na na_values missing_values nan_policy dropna",
    data__classes="class_names num_classes",
    data__image_size="img_size image_shape resolution input_size size",
    data__validation_fraction=(
        "val_split validation_split test_size val_fraction val_size valid_size val_ratio"
    ),
    data__loader_workers="num_loader_workers dataloader_workers dataloader_num_workers",
    train__epochs="num_epochs n_epochs max_epochs num_train_epochs epoch",
    train__max_steps="steps num_steps total_steps max_iters iterations num_iterations",
    train__global_batch_size=(
        "batch_size batchsize batch bs train_batch_size per_device_batch_size total_batch_size"
    ),
    train__micro_batch_size=(
        "gradient_accumulation_steps grad_accum accumulate accumulation_steps per_gpu_batch_size "
        "per_device_train_batch_size accumulate_grad_batches"
    ),
    train__optimizer__name="optim optimizer_name solver",
    train__optimizer__lr="learning_rate base_lr lr_rate max_lr",
    train__optimizer__weight_decay="wd l2 decay_weight",
    train__optimizer__betas="beta1 beta2 beta adam_beta1 adam_beta2",
    train__optimizer__eps="epsilon adam_epsilon",
    train__schedule__name="scheduler lr_scheduler lr_schedule lr_scheduler_type lr_decay",
    train__schedule__warmup_steps="warmup num_warmup_steps lr_warmup warmup_iters",
    train__precision="dtype amp mixed_precision fp16 bf16 torch_dtype half",
    train__recompute="gradient_checkpointing activation_checkpointing checkpointing remat",
    train__compile="torch_compile jit",
    train__max_grad_norm=(
        "gradient_clipping gradient_clip_val grad_clip clip_grad_norm clip_norm clip max_norm"
    ),
    train__seed="random_seed random_state manual_seed",
    train__early_stopping="early_stop",
    train__eval_every_epochs="eval_every eval_interval eval_frequency val_every",
    parallel__data="dp data_parallel ddp dp_size",
    parallel__shard="fsdp fsdp_size sharding",
    parallel__zero="zero_stage stage deepspeed",
    parallel__tensor="tp tensor_parallel tp_size model_parallel tensor_model_parallel_size",
    parallel__pipeline="pp pipeline_parallel pp_size pipeline_model_parallel_size",
    parallel__context="cp sp context_parallel sequence_parallel",
    sync__compression="gradient_compression comm_hook",
    sync__every="local_steps sync_every sync_interval",
    resources__num_workers=(
        "workers n_workers nodes num_nodes replicas world_size nproc nproc_per_node ranks "
        "num_processes processes parallelism"
    ),
    resources__gpus_per_worker="gpus gpu num_gpus n_gpus gpu_count use_gpu cuda device",
    resources__cpus_per_worker="cpus cpu num_cpus n_cpus cores cpu_count",
    resources__memory_bytes="memory mem ram memory_mb memory_gb memory_limit",
    resources__accelerator="gpu_type accelerator_type gpu_model",
    resources__node_labels="node_selector label_selector",
    resources__required_topology="topology same_rack switches network_topology",
    elastic__min_workers="min_nodes min_replicas min_size",
    elastic__spares="hot_spares num_spares spare spare_nodes spare_workers standby standbys",
    checkpoint__every_steps="save_every save_steps checkpoint_interval checkpoint_every interval",
    checkpoint__keep="save_total_limit max_to_keep keep_last num_to_keep",
    checkpoint__best="monitor metric_for_best_model best_metric",
    init_from="resume resume_from from_checkpoint pretrained finetune_from warm_start_from "
    "load_from",
    init_from__job="job_id from_job",
    queue="partition queue_name pool",
    max_retries="retries retry num_retries restarts max_restarts backoff_limit",
    max_runtime_s=(
        "timeout timeout_s max_runtime time_limit max_time max_duration runtime walltime "
        "max_runtime_seconds"
    ),
    begin_at="begin start_time start_at not_before eligible_time",
    deadline="deadline_at end_by",
    time_zone="timezone tz",
)
"""Maps field names in other programs to the pointers of dray's fields."""

MEANT_VALUES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("float32", "fp_32", "full", "32"), "fp32"),
    **dict.fromkeys(("float16", "half", "16"), "fp16"),
    **dict.fromkeys(("bfloat16", "brain"), "bf16"),
    "adam": "adamw",
}
"""Maps values in other programs to dray's values."""


def as_ours(name: str) -> str:
    """Return a name in dray's style: `batchSize` and `batch-size` become `batch_size`."""
    return re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", name).lower().replace("-", "_")

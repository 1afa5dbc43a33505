"""Generate tokens with vLLM. Runs in a process of its own, because vLLM needs other versions of
packages.

python vllm_texts.py asked.json target.json

asked.json: {"model": folder, "adapter": folder or null, "rank": rank of the adapter, "prompts":
token ids of each prompt, "max_tokens": n}. Writes the generated token ids of each prompt.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path


def main() -> None:
    vllm, lora = importlib.import_module("vllm"), importlib.import_module("vllm.lora.request")
    asked = json.loads(Path(sys.argv[1]).read_text())
    adapter = asked["adapter"]
    more = {} if adapter is None else {"enable_lora": True, "max_lora_rank": asked["rank"]}
    model = vllm.LLM(
        model=asked["model"], dtype="float32", max_model_len=64, enforce_eager=True, **more
    )
    found = model.generate(
        [{"prompt_token_ids": ids} for ids in asked["prompts"]],
        vllm.SamplingParams(temperature=0.0, max_tokens=asked["max_tokens"]),
        lora_request=None if adapter is None else lora.LoRARequest("tuned", 1, adapter),
    )
    texts = [list(one.outputs[0].token_ids) for one in found]
    Path(sys.argv[2]).write_text(json.dumps(texts))


if __name__ == "__main__":
    main()

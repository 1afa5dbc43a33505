"""The allow-list of environment variables that reach a rank; without ray or torch.

The forkserver is started with these alone, so that a rank finds no others in itself or in
/proc/PID/environ of its parent. The node's credentials for storage are a list of their own: dray's
own code gets them, also as a rank of a recipe, and a user's script does not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from ray_workers.shared.paths import NODE_TMPDIR

RANK_ENV: Final = "DRAY_RANK_ENV"
"""Names of more variables, separated by commas."""
NODE_ADDRESS: Final = "DRAY_NODE_ADDRESS"
"""Set for an embedded Ray, which is one node: loopback, where Ray takes the machine's address."""
RAY_INSTANCE: Final = "DRAY_RAY_INSTANCE"
"""The mark of an embedded Ray, by which what a crash left behind is found; not a secret."""
RANK_NICENESS: Final = "DRAY_RANK_NICENESS"
"""How far a rank stands back behind others of its machine (nice(1)), if further than Ray's workers
do. Set for an embedded Ray: what looks after ranks must not stand back with them."""

_NAMES: Final = frozenset(
    {
        *("HOME", "USER", "LOGNAME", "SHELL", "HOSTNAME", "PATH", "LANG", "LANGUAGE", "TZ", "TERM"),
        *("TMPDIR", "TEMP", "TMP", "LD_LIBRARY_PATH", "LD_PRELOAD", "DYLD_LIBRARY_PATH"),
        *(
            "VIRTUAL_ENV",
            "CONDA_PREFIX",
            "CONDA_DEFAULT_ENV",
            "MALLOC_CONF",
            "JE_ARROW_MALLOC_CONF",
        ),
        *("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "ALL_PROXY", "NO_PROXY"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
        *("HF_HOME", "TORCH_HOME", "KERAS_HOME", "MPLCONFIGDIR", "NLTK_DATA", "SCIKIT_LEARN_DATA"),
        *(
            "HF_HUB_OFFLINE",
            "HF_DATASETS_OFFLINE",
            "TRANSFORMERS_OFFLINE",
            "TOKENIZERS_PARALLELISM",
        ),
        RAY_INSTANCE,
        RANK_NICENESS,
        NODE_TMPDIR,
    }
)
_PREFIXES: Final = (
    *("CUDA_", "NVIDIA_", "CUDNN_", "CUBLAS_", "ROCR_", "HIP_", "HSA_"),
    *("NCCL_", "RCCL_", "GLOO_", "UCX_", "FI_", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "TRITON_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "MALLOC_", "XLA_", "LC_", "XDG_"),
    "PYTHON",
)
_SUFFIXES: Final = ("_CACHE", "_CACHE_DIR", "_CACHE_HOME", "_CACHE_PATH")
_SECRETS: Final = frozenset(
    {"KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "COOKIE", "CREDENTIALS", "AUTH"}
)
"""Words of names that no prefix lets through, as in NVIDIA_API_KEY."""
_CREDENTIALS: Final = ("AWS_", "GOOGLE_", "AZURE_", "FSSPEC_")
"""What fsspec's object stores read."""


def _passes(name: str, added: Collection[str]) -> bool:
    upper = name.upper()  # proxies are read in lower case too
    return (
        name in added
        or (upper in _NAMES and (name == upper or upper.endswith("_PROXY")))
        or (
            (name.startswith(_PREFIXES) or name.endswith(_SUFFIXES))
            and _SECRETS.isdisjoint(upper.split("_"))
        )
    )


def of_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """What a rank may see of a node's environment."""
    added = {name.strip() for name in environment.get(RANK_ENV, "").split(",")}
    return {name: value for name, value in environment.items() if _passes(name, added)}


def credentials(environment: Mapping[str, str]) -> dict[str, str]:
    """What the node's access to storage is by; for code of dray alone."""
    return {k: value for k, value in environment.items() if k.startswith(_CREDENTIALS)}


def of_node(environment: Mapping[str, str], rank_env: Collection[str]) -> dict[str, str]:
    """What an embedded Ray gets of the service's environment: what its actors and ranks need."""
    found = {**environment, RANK_ENV: ",".join(rank_env)}
    rays = {name: value for name, value in environment.items() if name.startswith("RAY_")}
    return {**of_ranks(found), **credentials(environment), **rays, RANK_ENV: found[RANK_ENV]}

"""The allowlist of environment variables that are passed to a rank. This module needs neither Ray
nor torch.

The forkserver is started with only these variables, so that a rank finds no other variables in its
own environment or in its parent's /proc/PID/environ. The node's storage credentials are on a
separate list: dray's own code, including ranks of recipes, gets them, but a user's script does not.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Final

from ray_workers.shared.paths import NODE_TMPDIR

RANK_ENV: Final = "DRAY_RANK_ENV"
"""Comma-separated names of additional variables."""
NODE_ADDRESS: Final = "DRAY_NODE_ADDRESS"
"""Variable with the address of the node. For an embedded Ray, which has only one node, the variable
is set to the loopback address, because Ray itself would use the machine's address."""
RAY_INSTANCE: Final = "DRAY_RAY_INSTANCE"
"""Variable with the mark of an embedded Ray, which identifies the processes that remain after a
crash. The mark is not a secret."""
RANK_NICENESS: Final = "DRAY_RANK_NICENESS"
"""Variable with the niceness of ranks (nice(1)), if it is higher than the niceness of Ray's
workers. The variable is set for an embedded Ray, in which the processes that manage ranks need a
higher priority than the ranks."""

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
        *("PYTHONASYNCIODEBUG", "PYTHONCOERCECLOCALE", "PYTHONDEVMODE", "PYTHONDONTWRITEBYTECODE"),
        *("PYTHONFAULTHANDLER", "PYTHONHASHSEED", "PYTHONHOME", "PYTHONINTMAXSTRDIGITS"),
        *("PYTHONIOENCODING", "PYTHONMALLOC", "PYTHONNOUSERSITE", "PYTHONOPTIMIZE", "PYTHONPATH"),
        *("PYTHONPERFSUPPORT", "PYTHONPYCACHEPREFIX", "PYTHONSAFEPATH", "PYTHONTRACEMALLOC"),
        *("PYTHONUNBUFFERED", "PYTHONUSERBASE", "PYTHONUTF8", "PYTHONVERBOSE", "PYTHONWARNINGS"),
        *("PYTHON_CPU_COUNT", "PYTHON_GIL"),
        # InfiniBand partition keys, which are not secret.
        *("NCCL_IB_PKEY", "UCX_IB_PKEY"),
        RAY_INSTANCE,
        RANK_NICENESS,
        NODE_TMPDIR,
    }
)
_PREFIXES: Final = (
    *("CUDA_", "NVIDIA_", "CUDNN_", "CUBLAS_", "ROCR_", "HIP_", "HSA_"),
    *("NCCL_", "RCCL_", "GLOO_", "UCX_", "FI_", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "TRITON_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "MALLOC_", "XLA_", "LC_", "XDG_"),
)
_CACHE_SUFFIXES: Final = ("_CACHE", "_CACHE_DIR", "_CACHE_HOME", "_CACHE_PATH")
_SECRET: Final = re.compile(
    r"(KEY|TOKEN|SECRET|CRED|CREDENTIAL|PASS|PASSWD|PASSWORD|PASSPHRASE|PWD|AUTH|COOKIE|\bPAT)"
    r"S?\d*\b"
)
"""Words, or ends of words, in the names of variables that are excluded despite their prefix, such
as NVIDIA_API_KEY."""
_CREDENTIALS: Final = ("AWS_", "GOOGLE_", "AZURE_", "FSSPEC_")
"""Prefixes of variables that fsspec's object stores read."""


def _passes(name: str, value: str, added: Collection[str]) -> bool:
    upper = name.upper()  # proxy variables can also be in lower case
    if name in added or (upper in _NAMES and (name == upper or upper.endswith("_PROXY"))):
        return True
    # Pass only local folders: a cache can also be a server, and its URL may contain a password.
    is_cache_folder = name.endswith(_CACHE_SUFFIXES) and value.startswith(("/", "~"))
    names_secret = _SECRET.search(upper.replace("_", " ")) is not None
    return (name.startswith(_PREFIXES) or is_cache_folder) and not names_secret


def of_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables in a node's environment that are passed to ranks."""
    added = {name.strip() for name in environment.get(RANK_ENV, "").split(",")}
    return {name: value for name, value in environment.items() if _passes(name, value, added)}


def credentials(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the node's own variables for storage access, which are only passed to dray's own
    code."""
    return {k: value for k, value in environment.items() if k.startswith(_CREDENTIALS)}


def of_node(environment: Mapping[str, str], rank_env: Collection[str]) -> dict[str, str]:
    """Return the service's environment variables that are passed to an embedded Ray, for Ray's
    actors and ranks."""
    found = {**environment, RANK_ENV: ",".join(rank_env)}
    rays = {name: value for name, value in environment.items() if name.startswith("RAY_")}
    return {**of_ranks(found), **credentials(environment), **rays, RANK_ENV: found[RANK_ENV]}

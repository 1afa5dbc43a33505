"""A pretended GPU that computes on the CPU, to find code that only works on CPUs.

Its tensors hold CPU tensors. As on a GPU:

- operands on different devices are an error, except for CPU scalars where CUDA accepts them;
- a non-blocking copy to the host is complete only after synchronizing with a later event or the
  device; on a separate stream it reads its source as late as possible;
- after a communicator has failed, the device is stuck: any wait for it never returns;
- after `fail`, all operations raise, as after an error that makes the context unusable.

`install` registers it as torch's device `pretend` in this process, permanently, so call it in a
separate process. See torch.utils.backend_registration for the requirements of a device in Python.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.fakes import pretend_guard

NAME = "pretend"
aten = torch.ops.aten
_COPIES = {aten.copy_.default, aten._foreach_copy_.default, aten._copy_from.default}
_CROSSING = {*_COPIES, aten._to_copy.default}
_TAKING_INDICES = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default}
_UNCHANGED = torch._C._disabled_torch_function_impl
BUS_S = 0.05
"""Duration of a copy on a separate stream, unless the compute stream waits for it."""
_library: list[torch.library.Library] = []


class PretendTensor(torch.Tensor):
    """A tensor on the device, backed by a CPU tensor that holds its values."""

    held: Tensor
    __torch_function__ = _UNCHANGED

    @staticmethod
    def __new__(cls, held: Tensor) -> PretendTensor:
        made: PretendTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=f"{NAME}:0",
        )
        made.held = held.detach()
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{NAME}({self.held!r})"

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def record_stream(self, stream: Any) -> None:  # type: ignore[override]
        """Do nothing: the stream holds whatever is still to be read."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raw = bytearray(self.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return _restored, (raw, self.dtype, tuple(self.shape))

    def __deepcopy__(self, memo: dict[int, Any]) -> PretendTensor:
        copied = PretendTensor(self.held.clone()).requires_grad_(self.requires_grad)
        copied.__dict__.update({k: v for k, v in self.__dict__.items() if k != "held"})
        memo[id(self)] = copied
        return copied

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _COPIES and _is_deferred(func, args, kwargs):
            return args[0] if func is aten.copy_.default else None
        if func.namespace in ("c10d", "_c10d_functional"):
            return collective(func, args, kwargs)
        target = kwargs.get("device")
        leaves = target is not None and torch.device(target).type == "cpu"
        if (
            (leaves and not kwargs.get("non_blocking"))
            or func is aten._local_scalar_dense.default
            or func in _COPIES
        ):
            _here().catch_up()
        return run(func, args, kwargs, leaves=leaves)


def _restored(raw: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> PretendTensor:
    flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return PretendTensor(flat.reshape(shape))


def run(func: Any, args: Any, kwargs: dict[str, Any], *, leaves: bool = False) -> Any:
    """Run an operator on the backing tensors. leaves: whether the result is on the host."""
    check()
    known: dict[int, Tensor] = {}

    def held(tensor: Tensor) -> Tensor:
        if isinstance(tensor, PretendTensor):
            known[id(tensor.held)] = tensor
            return tensor.held
        if not _may_be_elsewhere(func, tensor):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, "
                f"{NAME}:0 and {tensor.device}, in {func}"
            )
        known[id(tensor)] = tensor
        return tensor

    args, kwargs = tree_map_only(Tensor, held, (args, kwargs))
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    kwargs.pop("pin_memory", None)
    late = leaves and kwargs.pop("non_blocking", False)
    made = func(*args, **kwargs)
    if late:
        made, there = torch.zeros_like(made), made
        _here().waiting.append(lambda: made.copy_(there))
    if leaves:
        return made
    return tree_map_only(
        Tensor, lambda t: known.get(id(t)) if id(t) in known else _held_by(t), made
    )


def _held_by(tensor: Tensor) -> Tensor:
    return PretendTensor(tensor)


def _may_be_elsewhere(func: Any, tensor: Tensor) -> bool:
    if func in _CROSSING or func in _TAKING_INDICES:
        return True
    return tensor.ndim == 0 and torch.Tag.pointwise in func.tags and "foreach" not in func.name()


def collective(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a collective operation; see `pretend_nccl`."""
    raise RuntimeError(f"{NAME} has no process group")


# Streams. The compute stream works immediately but delivers its copies to the host late. A copy on
# another stream doesn't even start until something waits for it.


class Stream:
    """Copies that were launched but not yet done."""

    def __init__(self, device: Any = None, *, priority: int = 0) -> None:
        self.waiting: list[Callable[[], None]] = []
        self._lock = threading.RLock()

    def catch_up(self, until: Sequence[Callable[[], None]] | None = None) -> None:
        """Complete the waiting copies, or only the ones in `until`. Never returns if the device is
        stuck."""
        check()
        while stuck.is_set():
            time.sleep(0.01)
        with self._lock:
            for each in list(self.waiting if until is None else until):
                if each in self.waiting:
                    self.waiting.remove(each)
                    each()

    synchronize = catch_up

    def wait_stream(self, other: Stream) -> None:
        other.catch_up()

    def wait_event(self, event: Event) -> None:
        event.stream.catch_up(event.behind)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event


class Event:
    def __init__(self, *, enable_timing: bool = False, blocking: bool = False) -> None:
        self.stream, self.behind, self._at = COMPUTING, list[Callable[[], None]](), 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or _here()
        self.behind, self._at = list(self.stream.waiting), time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        self.synchronize()

    def synchronize(self) -> None:
        if self.stream is not COMPUTING:
            time.sleep(BUS_S)
        self.stream.catch_up(self.behind)

    def query(self) -> bool:
        """Whether nothing before the event is left to do. Copies on the compute stream are
        delivered late, but the compute stream itself does not wait for them."""
        check()
        if stuck.is_set():
            return False
        if self.stream is COMPUTING:
            return True
        return not any(each in self.stream.waiting for each in self.behind)

    def elapsed_time(self, later: Event) -> float:
        """Return the time between the events in milliseconds."""
        return (later._at - self._at) * 1e3


COMPUTING = Stream()
stuck = threading.Event()
"""Whether the device is stuck."""
_failed: list[tuple[int, str]] = []


def fail(code: int, text: str) -> None:
    """Make this operation, and all later ones, raise a `torch.AcceleratorError`."""
    _failed.append((code, text))
    check()


def check() -> None:
    if _failed:
        code, text = _failed[0]
        error = torch.AcceleratorError(f"CUDA error: {text}\nCUDA kernel errors might be late")
        error.error_code = code  # type: ignore[attr-defined]
        raise error


_current = threading.local()


def _here() -> Stream:
    return getattr(_current, "stream", COMPUTING)


def _is_deferred(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a copy was only launched, because it is a non-blocking copy to the host."""
    targets, sources = args[:2]
    at = 2 if len(args) > 2 else None
    if not (args[2] if at else kwargs.get("non_blocking", False)):
        return False
    if func is aten.copy_.default:
        targets, sources = [targets], [sources]
    if any(isinstance(target, PretendTensor) for target in targets):
        return False
    stream = _here()
    for target, source in zip(targets, sources, strict=True):
        held = source.held if stream is not COMPUTING else source.held.clone()
        stream.waiting.append(lambda target=target, held=held: target.copy_(held))
    return True


class _Module:
    """The module `torch.pretend`, the counterpart of `torch.cuda`."""

    Stream, Event = Stream, Event

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        """Do nothing: there is only one."""

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(name=NAME, major=1, minor=0, multi_processor_count=1)

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.default_generator.get_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.default_generator.set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def current_stream(self, device: Any = None) -> Stream:
        return _here()

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, _current.stream = _here(), stream
        try:
            yield
        finally:
            _current.stream = before

    def synchronize(self, device: Any = None) -> None:
        COMPUTING.catch_up()


def install(_: object = None) -> None:
    """Register the device in this process."""
    if _library:
        return
    _setup_privateuseone_for_python_backend(NAME, _Module(), device_guard=pretend_guard.Guard())
    pretend_guard.raise_kept_errors()
    library = torch.library.Library("aten", "IMPL")
    _library.append(library)  # keeps the registrations alive
    for factory in _FACTORIES:
        library.impl(factory, _making(factory), "PrivateUse1")
    library.impl(aten._copy_from.default, _copy_from, "PrivateUse1")
    _install_autocast()
    _install_pinning()
    _keep_storage()


# A wrapper's shape is fixed at creation, and `arange` would resize an empty one.
_FACTORIES = (
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
)


def _making(factory: Any) -> Callable[..., Tensor]:
    def make(*args: Any, **kwargs: Any) -> Tensor:
        kwargs = {k: v for k, v in kwargs.items() if k != "pin_memory"}
        return PretendTensor(factory(*args, **{**kwargs, "device": "cpu"}))

    return make


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    ours, others = (t.held if isinstance(t, PretendTensor) else t for t in (target, source))
    ours.copy_(others)
    return target


_IN_LOWER_PRECISION = (
    "linear matmul mm bmm addmm baddbmm conv2d conv_transpose2d scaled_dot_product_attention"
)
_IN_FP32 = "cross_entropy_loss mse_loss"
"""Operators of our recipes that run in float32 under autocast on both CPU and CUDA."""


def _install_autocast() -> None:
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
    library = torch.library.Library("_", "IMPL")
    _library.append(library)
    library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")

    def casting(op: Any, dtype: torch.dtype | None) -> Callable[..., Any]:
        def cast(*args: Any, **kwargs: Any) -> Any:
            to = dtype or torch.get_autocast_dtype(NAME)
            args, kwargs = tree_map_only(
                Tensor, lambda t: t.to(to) if t.is_floating_point() else t, (args, kwargs)
            )
            with torch._C._ExcludeDispatchKeyGuard(key):
                return op(*args, **kwargs)

        return cast

    for names, dtype in ((_IN_LOWER_PRECISION, None), (_IN_FP32, torch.float32)):
        for packet in (getattr(aten, name) for name in names.split()):
            for op in (getattr(packet, overload) for overload in packet.overloads()):
                if not op._schema.is_mutable:
                    _library[0].impl(op, casting(op, dtype), "AutocastPrivateUse1")


def _keep_storage() -> None:
    """FSDP frees and reallocates the storage of parameters. Here they stay in place."""
    for module in (_fsdp_param, _fsdp_param_group):
        module.alloc_storage = lambda tensor: None  # type: ignore[attr-defined]
    _fsdp_param.free_storage = lambda tensor: None


def _install_pinning() -> None:
    """torch has no pinned memory for a device in Python. Here it is ordinary memory that claims to
    be pinned."""
    empty = torch.empty
    _device_constructors()  # `with torch.device(...)` caches the functions it sees first

    def pinned(tensor: Tensor) -> Tensor:
        tensor.is_pinned = lambda *_: True  # type: ignore[method-assign]
        return tensor

    def new(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        made = empty(*args, **kwargs)
        return pinned(made) if pin_memory else made

    torch.empty = new  # type: ignore[assignment]
    torch.Tensor.pin_memory = lambda self, *_: pinned(self.clone())  # type: ignore[assignment]

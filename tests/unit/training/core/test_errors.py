from __future__ import annotations

import errno
import os

import pytest
import torch.distributed as dist
from torch import multiprocessing

from dray.train import preparing, reports, storage_faults
from ray_workers.shared.contracts import Cause
from ray_workers.training.core.errors import (
    DataError,
    SourceUnavailableError,
    UnreachableCheckpointError,
    cause_of,
)

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] "


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(GLOO + "Connection closed by peer [127.0.0.1]:41234"),
        RuntimeError(GLOO + "Read error [127.0.0.1]:3521: Connection reset by peer"),
        RuntimeError("[unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation"),
        dist.DistBackendError("NCCL communicator was aborted on rank 1."),
        dist.DistNetworkError("The client socket has timed out after 60000ms"),
        dist.DistStoreError("Timed out after 301 seconds waiting for clients. 1/2 clients joined."),
    ],
)
def test_the_failure_that_follows_from_a_dead_peer_is_not_the_users_error(error: Exception) -> None:
    assert cause_of(error) is Cause.WORKER_LOST


@pytest.mark.parametrize(
    "error",
    [
        ValueError("loss is NaN"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ConnectionResetError("Connection reset by peer"),
        OSError(errno.ENOTCONN, "a socket's"),
        TimeoutError(errno.ETIMEDOUT, "a socket's"),
        dist.DistBackendError("NCCL error: invalid usage"),
        KeyboardInterrupt(),
    ],
)
def test_what_the_training_code_raised_is_its_own(error: BaseException) -> None:
    assert cause_of(error) is Cause.USER_ERROR


def _raised_from(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


class SafetensorError(Exception):
    """An error raised by safetensors."""


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        *(
            OSError(number, os.strerror(number))
            for number in (errno.EIO, errno.EROFS, errno.ESTALE)
        ),
        *(OSError(number, os.strerror(number)) for number in (errno.ENXIO, errno.ENODEV)),
        OSError(errno.EREMOTEIO, os.strerror(errno.EREMOTEIO)),
        OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), "/fuse/data.csv"),
        TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), "/nfs/data.csv"),
        storage_faults.StorageError("s3://bucket/model: SlowDown"),
        UnreachableCheckpointError("step-5/manifest.json cannot be read"),
        _raised_from(ValueError("could not save"), OSError(errno.EDQUOT, "Disk quota exceeded")),
        _raised_from(DataError("can't be read"), OSError(errno.EIO, "Input/output error")),
        SafetensorError('I/O error: Os { code: 28, kind: StorageFull, message: "No space" }'),
        SafetensorError("Error while serializing: I/O error: Read-only file system (os error 30)"),
        RuntimeError("[enforce fail] PytorchStreamWriter failed writing file data/0: file write"),
        *(
            RuntimeError(f"[enforce fail] . open file failed with strerror: {os.strerror(number)}")
            for number in (errno.EROFS, errno.ENXIO, errno.ENODEV, errno.ENOTCONN, errno.ETIMEDOUT)
        ),
    ],
)
def test_a_storage_fault_is_the_machines(error: BaseException) -> None:
    assert cause_of(error) is Cause.INFRASTRUCTURE


def test_an_error_that_a_storage_fault_led_to_is_the_machines() -> None:
    error = RuntimeError("my save failed")
    error.__context__ = OSError(errno.ENOSPC, "No space left on device")
    assert cause_of(error) is Cause.INFRASTRUCTURE


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, "no data.csv"),
        PermissionError(errno.EACCES, "no"),
        IsADirectoryError(errno.EISDIR, "no"),
        RuntimeError("[enforce fail] . open file failed with strerror: Permission denied"),
    ],
)
def test_a_file_that_the_script_may_not_have_is_its_own_error(error: Exception) -> None:
    assert cause_of(error) is Cause.USER_ERROR


def _while_handling(error: BaseException, handled: BaseException) -> BaseException:
    error.__context__ = handled
    return error


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'income'"),
        SyntaxError("invalid syntax"),
        ImportError("cannot import name 'Model' from 'models' (models.py)"),
        _raised_from(RuntimeError("install it"), ModuleNotFoundError("No module named 'x'")),
        _while_handling(RuntimeError("install it"), ModuleNotFoundError("No module named 'x'")),
        _while_handling(ModuleNotFoundError("No module named 'x'"), TimeoutError("pip")),
        _raised_from(OSError("install it"), ModuleNotFoundError("No module named 'x'")),
        ExceptionGroup("in a TaskGroup", [ModuleNotFoundError("No module named 'x'")]),
    ],
    ids=repr,
)
def test_an_error_that_comes_again_whenever_the_code_runs_is_not_tried_again(
    error: BaseException,
) -> None:
    assert cause_of(error) is Cause.CANNOT_RUN


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libcudart.so.12: cannot open shared object file: No such file or directory"),
        _raised_from(RuntimeError("no loss"), KeyError("loss")),
        ExceptionGroup("in a TaskGroup", [KeyError("loss"), SyntaxError("not the first")]),
        _while_handling(TimeoutError("pip"), ModuleNotFoundError("No module named 'x'")),
        _raised_from(
            RuntimeError("could not install it"),
            _while_handling(ConnectionError("pip"), ModuleNotFoundError("No module named 'x'")),
        ),
    ],
    ids=repr,
)
def test_an_error_that_may_be_one_nodes_or_one_runs_is_tried_again(error: BaseException) -> None:
    assert cause_of(error) is Cause.USER_ERROR


def _import_nothing(rank: int) -> None:
    import no_such_module  # type: ignore[import-not-found]  # noqa: F401


def _find_nothing(rank: int) -> None:
    raise KeyError(rank)


def test_a_spawned_process_that_lacks_a_module_can_not_run() -> None:
    """The process is forked, because a new process takes seconds; `spawn` raises the same error."""
    with pytest.raises(multiprocessing.ProcessRaisedException) as caught:
        multiprocessing.start_processes(_import_nothing, start_method="fork")
    assert cause_of(caught.value) is Cause.CANNOT_RUN
    with pytest.raises(multiprocessing.ProcessRaisedException) as caught:
        multiprocessing.start_processes(_find_nothing, start_method="fork")
    assert cause_of(caught.value) is Cause.USER_ERROR


def test_a_group_of_errors_has_the_cause_of_the_first() -> None:
    group = ExceptionGroup("in a TaskGroup", [DataError("the archive ends early")])
    assert cause_of(group) is Cause.BAD_DATA


def test_broken_data_is_told_apart_also_when_wrapped() -> None:
    wrapped = RuntimeError("could not begin")
    wrapped.__cause__ = DataError("the archive ends early")
    assert cause_of(DataError("no such data set")) is Cause.BAD_DATA
    assert cause_of(wrapped) is Cause.BAD_DATA


def test_a_source_that_does_not_answer_is_not_the_jobs_fault() -> None:
    gone = SourceUnavailableError(
        "https://data.test/t.csv: the server responded with 503; tried 4 times"
    )
    wrapped = RuntimeError("could not begin")
    wrapped.__cause__ = gone
    assert cause_of(gone) is Cause.DATA_UNREACHABLE
    assert cause_of(wrapped) is Cause.DATA_UNREACHABLE


def test_a_call_that_dray_refuses_is_refused_in_every_attempt() -> None:
    with pytest.raises(RuntimeError) as refused:
        preparing.checkpoint()
    assert cause_of(refused.value) is Cause.CANNOT_RUN
    with pytest.raises(TypeError) as given:
        reports.report({"a": 1}, {"b": 2})  # type: ignore[call-overload]
    assert cause_of(given.value) is Cause.CANNOT_RUN
    with pytest.raises(ValueError, match="own") as own:
        raise ValueError("its own")
    assert cause_of(own.value) is Cause.USER_ERROR

"""Executors by name: processes of this machine, and the engines people have for many machines."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpolicy.errors import KVPolicyError, not_installed

if TYPE_CHECKING:
    from kvpolicy.eval.processes import Processes
    from kvpolicy.eval.sweep import Executor

MINUTES = 240
"""How long a job of submitit may take, where its options do not say; submitit itself would say 5."""
_OF_A_TASK = ("accelerator_type", "memory", "num_cpus", "num_gpus", "resources", "scheduling_strategy")
"""Options of a task of Ray; all others are those of `ray.init`."""


class ExecutorError(KVPolicyError, ValueError):
    """An executor cannot be started."""


class Engine(StrEnum):
    """What cells are measured on."""

    PROCESSES = "processes"
    SUBMITIT = "submitit"
    DASK = "dask"
    RAY = "ray"


@contextmanager
def open_executor(engine: Engine, workers: int, options: Mapping[str, Any], folder: Path) -> Iterator[Executor]:
    """Yield an executor, and end it.

    Args:
        engine: which.
        workers: how many calls it is given at a time; an engine started here gets as many workers.
        options: of the engine: the parameters of submitit's AutoExecutor (`cluster`, `folder`, `timeout_min`,
            `slurm_partition`, ...), of Dask's Client (`address`, ...), of `ray.init` (`address`, ...) and of a task of
            Ray (`num_gpus`, ...).
        folder: for what an engine writes.

    Raises:
        ExecutorError: when its package is not installed, it cannot be started, or has no such option.
    """
    package = {Engine.DASK: "distributed"}.get(engine, str(engine))
    if engine is not Engine.PROCESSES and importlib.util.find_spec(package) is None:
        raise ExecutorError(not_installed(f"--executor {engine}", package, engine))
    opened: Callable[..., Any] = {
        Engine.PROCESSES: _processes,
        Engine.SUBMITIT: _submitit,
        Engine.DASK: _dask,
        Engine.RAY: _ray,
    }[engine]
    with ExitStack() as stack:
        try:
            executor = stack.enter_context(opened(workers, dict(options), folder))
        except ExecutorError:
            raise
        except Exception as error:
            raise ExecutorError(
                f"--executor {engine}: it could not be started, {type(error).__name__}: {error}"
            ) from error
        yield executor


@contextmanager
def _processes(workers: int, options: dict[str, Any], folder: Path) -> Iterator[Processes]:
    from kvpolicy.eval.processes import Processes

    if options:
        raise ExecutorError(f"--executor processes: expected no --executor-option, got {', '.join(options)}")
    executor = Processes(workers)
    try:
        yield executor
    finally:
        executor.close()


@contextmanager
def _submitit(workers: int, options: dict[str, Any], folder: Path) -> Iterator[Executor]:
    import submitit  # type: ignore[import-not-found]

    # By itself it would quietly run on this machine where there is no Slurm.
    cluster, logs = options.pop("cluster", "slurm"), options.pop("folder", folder / "submitit")
    executor = submitit.AutoExecutor(folder=logs, cluster=cluster)
    executor.update_parameters(**({"name": "kvpolicy", "timeout_min": MINUTES} | options))
    yield executor


@contextmanager
def _dask(workers: int, options: dict[str, Any], folder: Path) -> Iterator[Executor]:
    import dask  # type: ignore[import-not-found]
    from distributed import Client  # type: ignore[import-not-found]

    here = {"n_workers": workers, "threads_per_worker": 1, "dashboard_address": None}
    is_elsewhere = options.keys() & {"address", "scheduler_file"}
    # A cell whose worker is lost is the sweep's to give to another. A scheduler elsewhere does so by itself, too.
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),
        Client(**(options if is_elsewhere else here | options)) as client,
    ):
        # Not pure: a call that failed is not answered from what is remembered of it.
        yield client.get_executor(pure=False)


@contextmanager
def _ray(workers: int, options: dict[str, Any], folder: Path) -> Iterator[Executor]:
    import ray  # type: ignore[import-not-found]

    task = {name: options.pop(name) for name in _OF_A_TASK if name in options}
    is_elsewhere = "address" in options or "RAY_ADDRESS" in os.environ
    here = {} if is_elsewhere else {"num_cpus": max(workers, os.cpu_count() or 1), "include_dashboard": False}
    ray.init(**({"log_to_driver": False, "logging_level": "error"} | here | options))
    try:
        yield _Ray(ray, task)
    finally:
        ray.shutdown()


class _Ray:
    """Ray, which has a future for each call, and no executor.

    Args:
        ray: the package, initialized.
        options: of a task; without `num_gpus`, one where there are any, as Ray shows a task none else.
    """

    def __init__(self, ray: Any, options: Mapping[str, Any]) -> None:
        gpus = 1 if ray.cluster_resources().get("GPU") else 0
        # Lost workers are the sweep's to count. A worker that has loaded a model on a GPU is not ended after one call.
        self._remote = ray.remote(**({"num_gpus": gpus, "max_retries": 0, "max_calls": 0} | dict(options)))(_call)

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Any:
        return self._remote.remote(function, *args).future()


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)

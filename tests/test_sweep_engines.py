"""Engines: each gives the same results as this process, and loses nothing when it loses a worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from sweeps import GRID, Deadly

from kvpolicy.eval.cells import Cell, result_path
from kvpolicy.eval.executors import Engine, ExecutorError, open_executor
from kvpolicy.eval.sweep import SweepError, cells_of, sweep
from kvpolicy.eval.worker import BenchSpec

OPTIONS: dict[Engine, dict[str, Any]] = {Engine.SUBMITIT: {"cluster": "local", "timeout_min": 5}}
PACKAGES = {Engine.PROCESSES: "concurrent", Engine.DASK: "distributed"}


def needs(engine: Engine) -> pytest.MarkDecorator:
    lacks = find_spec(PACKAGES.get(engine, engine)) is None
    return pytest.mark.skipif(lacks, reason=f"{engine} is not installed: make test-extras")


pytestmark = pytest.mark.usefixtures("environment")


@dataclass(frozen=True)
class Swept:
    """A sweep in which one cell loses its worker once, one each time, and one fails by itself."""

    cells: dict[str, Cell]
    folder: Path
    tries: Callable[[Cell], int]
    error: str


@pytest.fixture(scope="module", params=[pytest.param(each, marks=needs(each)) for each in Engine])
def swept(request: pytest.FixtureRequest, spec: BenchSpec, tmp_path_factory: pytest.TempPathFactory) -> Swept:
    folder, marks = tmp_path_factory.mktemp("there"), tmp_path_factory.mktemp("marks")
    with open_executor(request.param, 2, OPTIONS.get(request.param, {}), folder) as executor:
        deadly = Deadly(executor, marks, {"snapkv": 1, "random": 9})
        found = {cell.policy["name"]: cell for cell in cells_of(GRID, spec, deadly)}
        found["ecokv"] = replace(found["ecokv"], examples="others")
        with pytest.raises(SweepError) as caught:
            sweep([*found.values()], folder, spec, deadly, workers=2, retries=1)
    return Swept(found, folder, deadly.tries, str(caught.value))


@pytest.mark.slow
def test_an_engine_gives_the_results_of_this_process(swept: Swept, here: Path) -> None:
    for name in ("full", "snapkv"):
        path = result_path(swept.cells[name], swept.folder)
        assert path.read_bytes() == (here / path.name).read_bytes()


@pytest.mark.slow
def test_a_cell_whose_worker_is_lost_is_given_to_another(swept: Swept) -> None:
    assert swept.tries(swept.cells["snapkv"]) == 2


@pytest.mark.slow
def test_one_that_loses_each_is_reported_and_the_others_are_measured(swept: Swept) -> None:
    cell = swept.cells["random"]
    assert swept.tries(cell) == 2
    assert swept.error.startswith(f"2 of 4 cells were not measured; the others are in {swept.folder}.")
    assert f"random (tokens 80), odd-one-out, query-agnostic [{cell.name}]" in swept.error
    assert "its worker was lost 2 times" in swept.error
    assert len(list(swept.folder.glob("*.jsonl"))) == 2


@pytest.mark.slow
def test_a_cell_that_fails_by_itself_is_not_tried_again(swept: Swept) -> None:
    cell = swept.cells["ecokv"]
    assert swept.tries(cell) == 1
    assert f"cell {cell.name}: expected the examples it was made with, got others" in swept.error


@pytest.mark.slow
@needs(Engine.DASK)
def test_a_client_of_dask_is_an_executor(spec: BenchSpec, cells: list[Cell], here: Path, tmp_path: Path) -> None:
    from distributed import Client

    with Client(n_workers=2, threads_per_worker=2, dashboard_address=None) as client:
        assert sweep(cells, tmp_path, spec, client, workers=4) == len(cells)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (here / path.name).read_bytes()


@pytest.mark.parametrize(
    ("engine", "options", "message"),
    [
        pytest.param(Engine.SUBMITIT, {}, "Could not detect", marks=needs(Engine.SUBMITIT)),
        pytest.param(
            Engine.SUBMITIT,
            {"cluster": "local", "slurm_partitoin": "long"},
            "Unknown argument 'partitoin'",
            marks=needs(Engine.SUBMITIT),
        ),
        pytest.param(
            Engine.DASK, {"address": "tcp://localhost:1", "timeout": 1}, "localhost:1", marks=needs(Engine.DASK)
        ),
        pytest.param(Engine.RAY, {"adress": "auto"}, "adress", marks=needs(Engine.RAY)),
    ],
)
def test_an_engine_that_cannot_start_says_why(
    engine: Engine, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    says = f"--executor {engine}: it could not be started, .*{message}"
    with pytest.raises(ExecutorError, match=says), open_executor(engine, 1, options, tmp_path):
        pass


def test_an_engine_that_is_not_installed_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    says = r"--executor dask needs distributed, which is not installed. Install it:  pip install 'kvpolicy\[dask\]'"
    with pytest.raises(ExecutorError, match=says), open_executor(Engine.DASK, 1, {}, tmp_path):
        pass

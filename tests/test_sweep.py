"""Sweeps: results as they come, interrupts, the command `kvpolicy eval` with an executor, launchers."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from sweeps import GRID, Deadly
from typer.testing import CliRunner

from kvpolicy.cli import app
from kvpolicy.errors import PolicyError
from kvpolicy.eval.asked import read_asked
from kvpolicy.eval.cells import Cell, ResultError, result_path
from kvpolicy.eval.grid import SHIPPED, policies, shipped
from kvpolicy.eval.processes import Processes
from kvpolicy.eval.results import read_results
from kvpolicy.eval.sweep import SweepError, cells_of, sweep
from kvpolicy.eval.worker import BenchSpec, device, launched

pytestmark = pytest.mark.usefixtures("environment")


# The sweep


class ByHand:
    """An executor that finishes its calls out of order, the first one last."""

    def __init__(self) -> None:
        self.futures: list[Future[Any]] = []

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.futures.append(future)
        if len(self.futures) > 1:
            future.set_result([{"measured": args[-1].name}])
        if len(self.futures) == 4:
            self.futures[0].set_result([{"measured": "late"}])
        return future


def test_results_are_written_as_they_come(spec: BenchSpec, cells: list[Cell], tmp_path: Path) -> None:
    executor, there = ByHand(), []
    count = sweep(
        cells, tmp_path, spec, executor, workers=2, finished=lambda cell: there.append(len(list(tmp_path.iterdir())))
    )
    assert (count, there) == (4, [1, 2, 3, 4])
    assert json.loads(result_path(cells[0], tmp_path).read_text()) == {"measured": "late"}
    for cell in cells[1:]:
        assert json.loads(result_path(cell, tmp_path).read_text()) == {"measured": cell.name}


def test_what_is_there_is_not_given_to_anybody(spec: BenchSpec, cells: list[Cell], here: Path) -> None:
    executor = ByHand()
    assert sweep(cells, here, spec, executor, workers=2) == 0
    assert executor.futures == []


class OneWorker:
    """An executor of one worker, which a cell of one policy kills, and with it all that wait."""

    def __init__(self, deadly: str) -> None:
        self.deadly = deadly
        self.waiting: list[tuple[Cell, Future[Any]]] = []
        self.most = 0

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Future[Any]:
        future = WhenAsked(self.work)
        self.waiting.append((args[-1], future))
        self.most = max(self.most, len(self.waiting))
        return future

    def work(self) -> None:
        is_lost = any(cell.policy["name"] == self.deadly for cell, _ in self.waiting)
        for cell, future in self.waiting:
            if is_lost:
                future.set_exception(ConnectionError("gone"))
            else:
                future.set_result([{"measured": cell.name}])
        self.waiting.clear()


class WhenAsked(Future[Any]):
    """A future whose executor works when somebody asks whether it is done."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self.work = work

    def done(self) -> bool:
        self.work()
        return super().done()


def test_a_cell_is_not_reported_for_the_deaths_of_another(spec: BenchSpec, cells: list[Cell], tmp_path: Path) -> None:
    says = r"(?s)1 of 4 cells .* random .* lost 3 times, ConnectionError: gone$"
    with pytest.raises(SweepError, match=says):
        sweep(cells, tmp_path, spec, OneWorker("random"), workers=2)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("workers", [1, 3])
def test_no_more_cells_are_given_than_there_are_workers(
    spec: BenchSpec, cells: list[Cell], tmp_path: Path, workers: int
) -> None:
    executor = OneWorker("nobody")
    assert sweep(cells, tmp_path, spec, executor, workers=workers) == 4
    assert executor.most == workers


def test_processes_end_in_the_middle_of_a_call() -> None:
    processes = Processes(1)
    future = processes.submit(time.sleep, 60)
    until(future.running, 30)
    processes.close()
    with pytest.raises(BrokenProcessPool):
        future.result(timeout=30)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ResultError])
def test_an_interrupt_takes_back_what_is_running_and_keeps_the_rest(
    spec: BenchSpec, cells: list[Cell], tmp_path: Path, error: type[BaseException]
) -> None:
    def interrupt(cell: Cell) -> None:
        raise error

    executor = ByHand()
    with pytest.raises(error):
        sweep(cells, tmp_path, spec, executor, workers=2, finished=interrupt)
    assert [future.cancelled() for future in executor.futures] == [True, False]
    assert [path.stem for path in tmp_path.iterdir()] == [cells[1].name]


def test_an_error_that_is_no_users_comes_with_its_traceback(spec: BenchSpec, cells: list[Cell], tmp_path: Path) -> None:
    wrong = replace(cells[0], task={**cells[0].task, "task": None})
    with ThreadPoolExecutor(1) as pool, pytest.raises(SweepError, match=r"(?s)Traceback .*worker.py"):
        sweep([wrong], tmp_path, replace(spec, dtype="float31"), pool, workers=1)


def test_a_model_that_is_not_there_is_said_once(spec: BenchSpec) -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(SweepError, match=r"^cannot load the model '/nowhere'"):
        cells_of(GRID, replace(spec, model="/nowhere"), pool)


def test_an_executor_that_is_broken_is_an_error(spec: BenchSpec, cells: list[Cell], tmp_path: Path) -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        deadly = Deadly(pool, tmp_path, {"full": 1})
        with pytest.raises(SweepError, match="the executor takes no more work, BrokenProcessPool"):
            sweep(cells[:1], tmp_path, spec, deadly, workers=1)


# The command


def evaluate(spec: BenchSpec, out: Path, *more: str) -> list[str]:
    asked = ("--policies", "snapkv", "--budgets", "80", "--tasks", "odd-one-out", "--samples", "2", "--length", "200")
    return ["eval", *asked, "--model", spec.model, "--out", str(out), *more]


def call(*arguments: str) -> tuple[int, str, str]:
    found = CliRunner().invoke(app, arguments, catch_exceptions=False)
    return found.exit_code, found.stdout, found.stderr


@pytest.mark.slow
def test_the_command_measures_in_processes_and_goes_on(spec: BenchSpec, tmp_path: Path) -> None:
    alone, out = tmp_path / "alone", tmp_path / "out"
    assert call(*evaluate(spec, alone))[0] == 0
    assert call(*evaluate(spec, out, "--shard", "1/2"))[0] == 0
    first = len(read_results(out))
    code, text, _ = call(*evaluate(spec, out, "--executor", "processes", "--workers", "2", "--json"))
    found = json.loads(text)
    assert (code, found["measured"], found["there_before"]) == (0, 4 - first, first)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {
        path.name: path.read_bytes() for path in alone.iterdir()
    }


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kvpolicy", *arguments]
    # A shell that runs the tests in the background has them ignore SIGINT, and all that they start.
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_an_ended_command_leaves_results_and_no_process(
    spec: BenchSpec, tmp_path: Path, sent: signal.Signals, code: int
) -> None:
    options = ("--samples", "40", "--budgets", "80,90,100", "--executor", "processes")
    with start(*evaluate(spec, tmp_path, *options)) as process:
        until(lambda: len(list(tmp_path.glob("*.jsonl"))) > 1, 120)
        workers = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(sent)
        out, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert len(workers) >= 2
    until(lambda: not any(worker.is_running() and worker.status() != "zombie" for worker in workers), 30)
    assert 1 <= len(read_results(tmp_path)) < 10 == len(read_asked(tmp_path))
    if sent is signal.SIGINT:
        assert err == f"Interrupted. What was finished is in {tmp_path}; the same command goes on from there.\n"
        assert out == ""


def until(there: Callable[[], Any], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < end, "nothing came of it"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--workers", "2"), "expected --executor with them"),
        (("--executor-option", "a=1"), "expected --executor with them"),
        (("--executor", "processes", "--executor-option", "a"), "--executor-option: expected KEY=VALUE, got 'a'"),
        (
            ("--executor", "processes", "--executor-option", "a=1"),
            "--executor processes: expected no --executor-option",
        ),
    ],
)
def test_wrong_options_are_refused(spec: BenchSpec, tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    code, out, err = call(*evaluate(spec, tmp_path, *options))
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and message in err


def test_shipped_stands_for_every_policy_of_kvpolicy(spec: BenchSpec, tmp_path: Path) -> None:
    assert {"full", "random", "ecokv", "mixkv-ada-kv", "streaming-llm"} <= set(shipped())
    code, text, err = call(*evaluate(spec, tmp_path, "--policies", "shipped,snapkv", "--samples", "1", "--json"))
    assert code == 0
    found = {cell["policy"] for cell in json.loads(text)["cells"]}
    out = {line.split()[0] for line in err.splitlines() if "is left out at 80: it protects more slots" in line}
    assert {name for name in found if "weight" not in name} == set(shipped()) - out
    assert "ecokv, no redundancy weight" in found


def test_a_policy_that_is_asked_for_by_name_is_not_left_out() -> None:
    large = []
    found = {policy.name for policy in policies([SHIPPED], [20], left_out=lambda name, _: large.append(name))}
    assert "snapkv" in large and "snapkv-w8" in found and not found & {*large}
    with pytest.raises(PolicyError, match=r"^--budgets: policy 'snapkv': budget\.tokens: expected at least the 36"):
        policies([SHIPPED, "snapkv"], [20])


# Launchers


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
        ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"],
    ],
    ids=["torchrun", "accelerate"],
)
def test_processes_of_a_launcher_share_the_cells(spec: BenchSpec, tmp_path: Path, launcher: list[str]) -> None:
    command = [sys.executable, "-m", *launcher, "-m", "kvpolicy", *evaluate(spec, tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    for process in (1, 2):
        assert f"process {process} of 2: 2 cells measured, 0 there before, in {tmp_path}" in ended.stdout
    assert len(read_results(tmp_path)) == 4


FAILS_FIRST = """
import os, sys, time
from pathlib import Path
from kvpolicy.errors import KVPolicyError
from kvpolicy.eval.worker import together
failed, done = Path(sys.argv[1], "failed"), Path(sys.argv[1], "done")
try:
    with together():
        if os.environ["RANK"] == "0":
            failed.touch()
            raise KVPolicyError("a cell failed")
        while not failed.exists():
            time.sleep(0.1)
        time.sleep(1)
        done.touch()
except KVPolicyError as error:
    print(error, done.exists())
"""


@pytest.mark.slow
def test_a_process_that_fails_waits_for_the_others_whom_the_launcher_would_end(tmp_path: Path) -> None:
    (tmp_path / "fails_first.py").write_text(FAILS_FIRST)
    launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, "-m", *launcher, str(tmp_path / "fails_first.py"), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "a cell failed True\n"


def test_the_processes_of_a_launcher_share_a_shard(
    spec: BenchSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    for shard in ("1/2", "2/2"):
        for rank in ("0", "1"):
            monkeypatch.setenv("RANK", rank)
            code, text, _ = call(*evaluate(spec, tmp_path, "--shard", shard, "--json"))
            assert code == 0
            found += [cell["file"] for cell in json.loads(text)["cells"]]
    assert len(found) == len(set(found)) == 4

    code, _, err = call(*evaluate(spec, tmp_path, "--executor", "processes"))
    assert (code, err) == (2, "error: --executor: expected one process to start it, got 2 of a launcher\n")


@pytest.mark.parametrize(
    ("gpus", "rank", "expected"), [(0, "1", "cpu"), (4, None, "cuda:0"), (4, "3", "cuda:3"), (1, "3", "cuda:0")]
)
def test_each_process_has_a_gpu_of_its_own(
    monkeypatch: pytest.MonkeyPatch, gpus: int, rank: str | None, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    assert str(device()) == expected


def test_a_process_alone_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launched() == (1, 1)

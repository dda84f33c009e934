"""What the tests share."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from sweeps import GRID, as_workers, saved
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvpolicy import models
from kvpolicy.eval.cells import Cell
from kvpolicy.eval.sweep import sweep_here
from kvpolicy.eval.worker import BenchSpec
from kvpolicy.loading import ALLOW
from kvpolicy.registry import loaded

torch.set_num_threads(2)


@pytest.fixture(scope="session")
def smollm2() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The real model, SmolLM2-135M-Instruct in float32, and its tokenizer. Leave both as they are."""
    return models.load()


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write text or bytes into a file of the test's folder, ``mine.yaml`` unless named, and return its path."""

    def to(text: str | bytes, name: str = "mine.yaml") -> Path:
        path = tmp_path / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return to


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder on the path, for packages; the registry is loaded anew, now and after."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv(ALLOW, raising=False)
    before = set(sys.modules)
    loaded.cache_clear()
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
    importlib.invalidate_caches()
    loaded.cache_clear()


# Of sweeps


@pytest.fixture(scope="module")
def environment() -> Iterator[None]:
    """Compute as workers do."""
    with as_workers():
        yield


@pytest.fixture(scope="module")
def spec(environment: None, tmp_path_factory: pytest.TempPathFactory) -> BenchSpec:
    """Return what workers make a bench from."""
    return saved(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def cells(spec: BenchSpec) -> list[Cell]:
    """Return what is swept."""
    return GRID.cells(spec.bench())


@pytest.fixture(scope="module")
def here(spec: BenchSpec, cells: list[Cell], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the results of this process."""
    folder = tmp_path_factory.mktemp("here")
    sweep_here(cells, folder, spec.bench())
    return folder

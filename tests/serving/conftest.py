"""Fixtures of the serving tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ahead import Ahead
from tests.serving.harness import Served


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """The dense models are tiny; more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def ahead(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ahead]:
    """Has begun what the chosen tests need, and nothing else."""
    wanted: dict[Callable[[Path], Any], str] = {}  # with what its folder is called
    for item in request.session.items:
        names = getattr(item, "fixturenames", ())
        if "ahead" in names and "served" in names:  # a module may have a `served` of its own
            wanted[Served] = "served"
        if "ran_ahead" in names:
            wanted[item.module.run_ahead] = item.path.stem  # type: ignore[attr-defined]
    functions = {
        function: partial(function, tmp_path_factory.mktemp(name))
        for function, name in wanted.items()
    }
    with Ahead(functions) as running:
        yield running


@pytest.fixture(scope="session")
def served(ahead: Ahead) -> Served:
    return ahead(Served)


@pytest.fixture(scope="module")
def ran_ahead(request: pytest.FixtureRequest, ahead: Ahead) -> Any:
    """What `run_ahead` of the test's module returned."""
    return ahead(request.module.run_ahead)

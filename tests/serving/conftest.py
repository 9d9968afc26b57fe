"""Fixtures of the serving tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serving.harness import Ahead, Served


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
    wanted: list[Callable[[Path], Any]] = []
    for item in request.session.items:
        assert isinstance(item, pytest.Function)
        if "served" in item.fixturenames:
            wanted.append(Served)
        if "ahead" in item.fixturenames and hasattr(item.module, "run_ahead"):
            wanted.append(item.module.run_ahead)
    with Ahead(wanted, tmp_path_factory) as running:
        yield running


@pytest.fixture(scope="session")
def served(ahead: Ahead) -> Served:
    return ahead(Served)

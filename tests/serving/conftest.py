"""Fixtures of the serving tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.serving.harness import Served


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """The dense models are tiny; more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("served"))

"""Runs that tests share: each is started once, two at a time, in the order of the modules that need them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.commands import Ended


@pytest.fixture(scope="session")
def started(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, dict[str, Future[Ended]]]]:
    """Module -> name in its RUNS -> what that function returns, given a folder of its own.

    Of all modules with a selected test at once: one module's tests look on while the next one's runs go.
    """
    items = (i for i in request.session.items if isinstance(i, pytest.Function) and "runs" in i.fixturenames)
    modules: dict[Any, None] = dict.fromkeys(item.module for item in items)
    with ThreadPoolExecutor(2) as pool:
        yield {
            m.__name__: {name: pool.submit(make, tmp_path_factory.mktemp(name)) for name, make in m.RUNS.items()}
            for m in modules
        }
        pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, started: dict[str, dict[str, Future[Ended]]]) -> Callable[[str], Ended]:
    """`runs("name")` waits for the run RUNS["name"] of the module, and is what it left."""
    return lambda name: started[request.module.__name__][name].result()

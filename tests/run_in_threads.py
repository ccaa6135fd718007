"""Runs jobs on threads at the same time."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def in_threads(jobs: list[Callable[[], object]]) -> None:
    """Run all jobs at once. The first error of a job is raised here, once all have ended."""
    start = threading.Barrier(len(jobs))
    with ThreadPoolExecutor(len(jobs)) as threads:
        for done in [threads.submit(lambda job=job: (start.wait(), job())) for job in jobs]:
            done.result()

"""Runs jobs side by side: what a thread raises, its starter raises."""

import threading
from collections.abc import Callable


def in_threads(jobs: list[Callable[[], object]]) -> None:
    """Run all jobs at once; whatever one raises is raised here."""
    faults: list[BaseException] = []
    start = threading.Barrier(len(jobs))

    def run(job: Callable[[], object]) -> None:
        try:
            start.wait()
            job()
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]

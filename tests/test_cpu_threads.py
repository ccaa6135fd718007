"""Small models use one CPU thread: more threads would wait for each other longer than they work."""

import pytest
import torch

import specdec.engine
from specdec import SamplingParams
from specdec.models.target import TargetModel
from specdec.runtime import cpu_threads
from specdec.runtime.cpu_threads import CpuThreads

PARAMS = SamplingParams(max_new_tokens=4, ignore_eos=True)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def seen(monkeypatch):
    """Threads of each forward of a target."""
    found, forward = [], TargetModel.forward

    def watched(*args, **options):
        found.append(torch.get_num_threads())
        return forward(*args, **options)

    monkeypatch.setattr(TargetModel, "forward", watched)
    return found


def test_a_small_model_has_one_thread_and_torch_its_own_again(seen, make_target, make_engine, random_prompt):
    """With two a busy machine made 4 tokens a second where one makes 200."""
    engine = make_engine(make_target("llama"), "ngram")
    engine.generate(random_prompt(9), PARAMS)
    assert set(seen) == {1} and torch.get_num_threads() == 2


def test_a_large_model_has_them_all(seen, make_target, make_engine, random_prompt, monkeypatch):
    engine = make_engine(make_target("llama"))
    monkeypatch.setattr(cpu_threads, "BYTES_OF_A_THREAD", 1)
    seen.clear()
    engine.generate(random_prompt(9), SamplingParams(max_new_tokens=2))
    assert set(seen) == {2} and torch.get_num_threads() == 2


def test_a_step_that_fails_gives_the_threads_back(make_target, make_engine, random_prompt, monkeypatch):
    engine = make_engine(make_target("llama"))
    monkeypatch.setattr(type(engine.state), "flush", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.generate(random_prompt(9), PARAMS)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_number_depends_on_sizes_alone(deterministic, monkeypatch):
    model = torch.nn.Linear(1024, 1024, bias=False)  # 4 MiB
    monkeypatch.setattr(cpu_threads, "BYTES_OF_A_THREAD", 8 << 20)
    torch.set_num_threads(4)
    threads = CpuThreads(model, CPU, deterministic=deterministic)
    with threads.limited():
        assert torch.get_num_threads() == 1
        assert [threads.fitting(tokens) for tokens in (1, 64, 256, 9999)] == (
            [1] * 4 if deterministic else [1, 1, 2, 4]
        )
        threads.fit(256)
        assert torch.get_num_threads() == (1 if deterministic else 2)
    assert torch.get_num_threads() == 4
    with CpuThreads(model, torch.device("cuda")).limited():
        assert torch.get_num_threads() == 4


def test_a_load_has_few_threads_too(make_target, make_engine, monkeypatch):
    found = []
    monkeypatch.setattr(specdec.engine, "warn_at_load", lambda *_: found.append(torch.get_num_threads()))
    make_engine(make_target("llama"))
    assert found == [1] and torch.get_num_threads() == 2

"""Memory: what this process may really take (MemAvailable, limits of control groups), by which pools are sized; and
`specdec models --memory`, which says by a config.json alone what an engine allocates for a pair."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from block_heads import written_block
from drafter_folders import PUBLISHED, read_drafter, write_drafter
from mtp_checkpoints import publish
from typer.testing import CliRunner

import specdec.gpu.memory
from specdec import Engine, EngineConfig, SpecConfig
from specdec.cli.app import app
from specdec.draft_models.checkpoints.drafter_formats import layout_of_config
from specdec.errors import CapacityError
from specdec.gpu.memory import all_bytes, free_bytes
from specdec.kvcache.layout import layout_from_config
from specdec.loading.drafter_loading import drafts_by_modules
from specdec.loading.model_loading import Checkpoint
from specdec.measurement.memory_plan import memory_plan
from specdec.models.described_model import GeometryContext, ModelOnMeta, model_on_meta
from specdec.models.target import TargetModel
from specdec.models.weight_storage import stored_weights
from specdec.runtime import sizing

from marks import deep
from tiny_families import TARGETS

CPU = torch.device("cpu")
GIB, MIB = 1 << 30, 1 << 20
pytestmark = pytest.mark.usefixtures("shallow_pair", "bundled_once")


def system(root: Path, groups: str, **files: str) -> None:
    """A /proc and a /sys/fs/cgroup of these files, `_` in a name standing for what Python forbids there."""
    (root / "proc/self").mkdir(parents=True)
    available = "MemTotal: 67108864 kB\nMemFree: 1048576 kB\nMemAvailable: 33554432 kB\n"
    (root / "proc/meminfo").write_text(available)
    (root / "proc/self/cgroup").write_text(groups)


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(specdec.gpu.memory, "ROOT", tmp_path)
    return tmp_path


def test_the_page_cache_counts_as_free(root):
    """MemFree was taken, which is little on a machine that has read files."""
    system(root, "0::/\n")
    assert free_bytes(CPU) == 32 * GIB


def test_the_limit_of_a_container_of_version_2_counts(root):
    """The path is the host's, and what is mounted is the container's own group."""
    system(root, "0::/kubepods/pod1/abc\n")
    group(
        root / "sys/fs/cgroup",
        memory__max=4 * GIB,
        memory__current=3 * GIB,
        memory__stat=f"file 9\ninactive_file {GIB}",
    )
    assert free_bytes(CPU) == 2 * GIB
    assert all_bytes(CPU) == 4 * GIB


def test_the_limit_of_a_group_above_counts(root):
    system(root, "0::/user/slice/one\n")
    base = root / "sys/fs/cgroup"
    group(base / "user/slice/one", memory__max="max", memory__current=MIB)
    group(base / "user/slice", memory__max=6 * GIB, memory__current=5 * GIB)
    group(base / "user", memory__max=20 * GIB, memory__current=5 * GIB)
    assert free_bytes(CPU) == GIB


def test_the_limit_of_version_1_counts(root):
    system(root, "12:cpu,cpuacct:/docker/x\n5:memory:/docker/x\n")
    group(
        root / "sys/fs/cgroup/memory/docker/x",
        memory__limit_in_bytes=2 * GIB,
        memory__usage_in_bytes=GIB,
        memory__stat=f"total_inactive_file {512 * MIB}",
    )
    group(root / "sys/fs/cgroup/memory", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=9 * GIB)
    assert (free_bytes(CPU), all_bytes(CPU)) == (GIB + 512 * MIB, 2 * GIB)


def test_a_full_cgroup_leaves_zero_bytes(root):
    system(root, "0::/\n")
    group(root / "sys/fs/cgroup", memory__max=GIB, memory__current=2 * GIB)
    assert free_bytes(CPU) == 0


def test_without_proc_the_system_is_asked(root):
    assert 0 < free_bytes(CPU) <= all_bytes(CPU)


def test_an_engine_in_a_small_container_makes_small_pools(root, make_target):
    """A quarter of the machine's free memory was taken, and the process killed for it."""
    system(root, "0::/\n")
    group(root / "sys/fs/cgroup", memory__max=12 * MIB, memory__current=8 * MIB)
    engine = Engine.from_pretrained(make_target("llama"), config=EngineConfig(max_batch_size=64))
    assert sum(engine.cache.bytes_by_group().values()) <= MIB * 1.1


@pytest.mark.parametrize(("space", "slots"), [("full", 3), ("full", 5), ("swa", 3)])
def test_pools_that_can_hold_no_request_are_refused(space, slots, make_target):
    """`full_slots=3` was taken, and every request refused later."""
    sizes = {"full_slots": 64, "swa_slots": 64, f"{space}_slots": slots}
    with pytest.raises(CapacityError, match=f"{space}_slots={slots} can hold no request.* takes 6 slots") as error:
        Engine.from_pretrained(make_target("gemma4-e2b"), "ngram", config=EngineConfig(max_model_len=64, **sizes))
    assert "\n" not in str(error.value) and "give 6 or more" in str(error.value)


# plans: by its config.json alone, a pair's K/V are those that an engine allocates for it


TARGET = "tiny-gemma4"
OF_EACH_KIND = ("gemma4-moe", "gpt_oss", "mimo_v2_flash", "step3p7")
OF_EACH_FORMAT = (
    *("z-lab/Qwen3-8B-DFlash-b16", "deepseek-ai/dspark_gemma4_12b_block7", "meta-models/Muse-Glimmer-30B-assistant"),
    "speculators, dspark, sliding",
)


def run(*words):
    return CliRunner().invoke(app, ["models", "--device", "cpu", *words])


def planned(*words):
    result = run("--memory", "--json", "-", *words)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def folder_of(config, path: Path, **changes) -> str:
    """A checkpoint's folder without weights."""
    config.save_pretrained(path)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return str(path)


RECURRENT = {
    "qwen3_5": [{"layers": 3, "fields": {"state": (4, 96), "inputs": (3, 80)}}],
    "nemotron_h": [{"layers": 2, "fields": {"state": (4, 128), "inputs": (3, 96)}}],
    "lfm2": [{"layers": 3, "fields": {"inputs": (2, 32)}}],
}


@pytest.mark.parametrize("family", RECURRENT)
def test_states_of_recurrent_layers_are_counted_apart(family, tmp_path, make_target, make_engine, monkeypatch) -> None:
    """The report, the pools and the statistics of an engine say the same."""
    monkeypatch.setattr(sizing, "free_bytes", lambda device: 10**12)
    model = make_target(family)
    settings = {"spec": SpecConfig(), "drafter_options": {}}
    cpu = EngineConfig(max_batch_size=2, max_model_len=128, device="cpu")
    report = memory_plan(folder_of(model.config, tmp_path), None, config=cpu, **settings)
    engine = make_engine(model, max_batch_size=2, max_model_len=128, prefill_chunk=None)
    groups = {group["name"]: group["batch_bytes"] for group in report["groups"]}
    assert groups == engine.cache.bytes_by_group() and list(groups) == ["full", "records", "states"]
    [use] = engine.stats().devices
    assert use.kv_bytes == sum(groups.values())
    assert report["groups"][2]["kept"] == RECURRENT[family]
    assert [kept["layers"] for kept in report["groups"][0]["kept"]] == [1]  # no layer that keeps nothing
    captured = memory_plan(str(tmp_path), None, config=replace(cpu, device="cuda"), **settings)
    assert captured["groups"][2]["kept"] == report["groups"][2]["kept"]


@pytest.mark.parametrize(
    ("drafter", "page_size"),
    [deep("none", 4), ("tiny-gemma4-mtp", 1), ("tiny-gemma4-eagle3", 4), (TARGET, 1), ("windowed", 1)],
)
def test_groups_are_those_that_an_engine_allocates(drafter, page_size, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sizing, "free_bytes", lambda device: 10**12)
    if windowed := drafter == "windowed":  # of a window that the target has not
        model = Checkpoint.from_name(TARGET).load(torch.float32, torch.device("cpu"))
        written_block(tmp_path, model, windows=(None, 5))
        drafter = str(tmp_path)
    sizes = ("--batch-size", "2", "--max-model-len", "1024", "--page-size", str(page_size))
    report = planned("--drafter", drafter, *sizes)
    config = EngineConfig(max_batch_size=2, max_model_len=1024, page_size=page_size, device="cpu")
    with Engine.from_pretrained(TARGET, drafter, spec=SpecConfig(adaptive=True), config=config) as engine:
        groups = {group["name"]: group["batch_bytes"] for group in report["groups"]}
        assert groups == engine.cache.bytes_by_group() and len(groups) == 2 + windowed
        assert report["weights"]["target"] == stored_weights(engine.target.model).bytes
        assert ("drafter" in report["weights"]) == (drafter != "none")


@pytest.mark.parametrize("pools", [{"full_slots": 100}, {"swa_slots": 90}, {"full_slots": 128, "swa_slots": 99}])
def test_pools_that_the_user_set_are_planned(pools, tmp_path, make_target):
    """The plan was that of a full batch, whatever the config said."""
    model = make_target("gemma4-e2b")
    config = EngineConfig(max_batch_size=2, max_model_len=64, page_size=4, device="cpu", **pools)
    report = memory_plan(folder_of(model.config, tmp_path), None, spec=SpecConfig(), config=config, drafter_options={})
    with Engine.from_pretrained(model, config=config) as engine:
        assert {group["name"]: group["batch_bytes"] for group in report["groups"]} == engine.cache.bytes_by_group()


@pytest.mark.parametrize("adaptive", [True, False])
def test_windows_over_recurrent_layers_are_planned_as_an_engine_has_them(adaptive, tmp_path, make_target, monkeypatch):
    """With fixed drafts the report lacked what a window reaches back over, to the copy of a state."""
    monkeypatch.setattr(sizing, "free_bytes", lambda device: 10**12)
    model, folders = make_target("qwen3_5"), [str(tmp_path / role) for role in ("target", "drafter")]
    model.save_pretrained(folders[0])
    written_block(tmp_path / "drafter", model, windows=(None, 5))
    spec = SpecConfig(2, adaptive=adaptive)
    config = EngineConfig(max_batch_size=2, max_model_len=128, prefill_chunk=16, device="cpu")
    report = memory_plan(*folders, spec=spec, config=config, drafter_options={})
    with Engine.from_pretrained(*folders, spec=spec, config=config) as engine:
        assert {group["name"]: group["batch_bytes"] for group in report["groups"]} == engine.cache.bytes_by_group()


@pytest.mark.parametrize(
    ("name", "drafter"),
    [
        ("glm4_moe-3", "mtp"),
        ("exaone4", "auto"),
        ("exaone4", "mtp,suffix"),
        deep("mimo_v2_flash", "mtp"),
        deep("glm4_moe-shared", "mtp"),
    ],
)
def test_mtp_modules_are_planned_as_an_engine_keeps_them(name, drafter, tmp_path, monkeypatch) -> None:
    """With their files, and by the count in the config where there are none: the same K/V, and weights unknown."""
    monkeypatch.setattr(sizing, "free_bytes", lambda device: 10**12)
    folder = str(publish(name, tmp_path).folder)
    words = ("--target", folder, "--batch-size", "2", "--max-model-len", "64")
    report = planned("--drafter", drafter, *words)
    config = EngineConfig(max_batch_size=2, max_model_len=64, device="cpu")
    with Engine.from_pretrained(folder, "mtp", config=config) as engine:
        assert {group["name"]: group["batch_bytes"] for group in report["groups"]} == engine.cache.bytes_by_group()
        count = len(engine.drafter.modules)
        kept = {p.data_ptr(): p.nbytes for module in engine.drafter.modules for p in module.parameters()}
        for shared in engine.target.model.parameters():
            kept.pop(shared.data_ptr(), None)
    assert sum(kept.values()) <= report["weights"]["drafter"] <= 1.01 * sum(kept.values())  # biases of routers
    (tmp_path / "model.safetensors").unlink()
    file = tmp_path / "config.json"
    counted = {"num_nextn_predict_layers": 0, "num_mtp_layers": 0}
    file.write_text(json.dumps({**json.loads(file.read_text()), **counted}))
    assert run("--memory", "--drafter", "mtp", *words).exit_code == 2
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_nextn_predict_layers": count}))
    unread = planned("--drafter", "mtp", *words)
    assert unread["groups"] == report["groups"] and unread["weights"]["drafter"] is None
    assert planned("--drafter", "auto", *words)["weights"].keys() == {"target"}


def test_auto_plans_no_modules_that_an_engine_cannot_use(tmp_path, monkeypatch) -> None:
    """Their conventions are not known: an engine drafts with "suffix", and the plan was refused."""
    monkeypatch.setattr(sizing, "free_bytes", lambda device: 10**12)
    folder = str(publish("qwen3-tuned", tmp_path).folder)
    report = planned("--drafter", "auto", "--target", folder, "--batch-size", "2", "--max-model-len", "64")
    config = EngineConfig(max_batch_size=2, max_model_len=64, device="cpu")
    with Engine.from_pretrained(folder, "auto", config=config) as engine:
        assert {group["name"]: group["batch_bytes"] for group in report["groups"]} == engine.cache.bytes_by_group()


def test_a_head_next_to_modules_of_the_targets_size_is_planned_as_it_is_loaded(tmp_path) -> None:
    """One rule says for both whether a checkpoint drafts by its MTP modules: a head's config.json says that it does
    not, though its sizes are the target's and its folder has modules."""
    publish("exaone4", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    target = ModelOnMeta("target", model_on_meta(transformers.AutoConfig.from_pretrained(tmp_path), torch.float32))
    assert drafts_by_modules(config, target, lambda: tmp_path)
    head = {**config, "architectures": ["LlamaForCausalLMEagle3", "Exaone4ForCausalLM"]}
    assert not drafts_by_modules(head, target, lambda: pytest.fail("the folder of a head is not looked into"))


@pytest.mark.parametrize(
    "family", [name if name in OF_EACH_KIND else deep(name) for name in TARGETS if name != "two_windows"]
)
def test_layouts_of_a_config_are_those_of_the_served_model(family, make_target) -> None:
    """But for that of `two_windows`, whose layers the test gave other windows than its config has."""
    model = make_target(family)
    described = ModelOnMeta(family, model_on_meta(model.config, torch.float32))
    assert described.unmeasured is None
    assert described.layout == TargetModel(model).layout
    assert all(weight.is_meta for weight in described.model.parameters())


@pytest.mark.parametrize(
    "kind", ["SpecForge", "speculators", *(name if name in OF_EACH_FORMAT else deep(name) for name in PUBLISHED)]
)
def test_heads_keep_by_their_config_what_their_tensors_say(kind, tmp_path) -> None:
    spec = read_drafter(kind, write_drafter(kind, tmp_path))
    assert layout_of_config(json.loads((tmp_path / "config.json").read_text())) == spec.kv_layout


def test_a_narrow_v_takes_its_own_width(tmp_path) -> None:
    """MiMo-V2-Flash at its published size: at most 1.05 of the bytes that unpadded K and V have."""
    config = transformers.MiMoV2FlashConfig()
    assert config.v_head_dim < config.head_dim
    report = planned(
        "--drafter", "none", "--target", folder_of(config, tmp_path), "--dtype", "bf16", "--max-model-len", "4096"
    )
    unpadded = Counter()
    for kind, layer in zip(config.layer_types, model_on_meta(config, torch.bfloat16).model.layers, strict=True):
        unpadded[kind] += 2 * (layer.self_attn.k_proj.out_features + layer.self_attn.v_proj.out_features)
    for group, kind in zip(report["groups"], ("full_attention", "sliding_attention"), strict=True):
        assert unpadded[kind] <= group["token_bytes"] <= 1.05 * unpadded[kind]
    assert report["notes"] == [] and report["weights"]["target"] > 100e9


def test_the_table_has_each_group_and_the_weights() -> None:
    text = run("--memory", "--drafter", "tiny-gemma4-eagle3", "--batch-size", "3").stdout
    for group in planned("--drafter", "tiny-gemma4-eagle3", "--batch-size", "3")["groups"]:
        assert group["name"] in text and f"{group['token_bytes']:,}" in text
        assert f"{group['batch_bytes'] / 1e6:,.2f} MB" in text
        assert all(f"k {each['fields']['k'][0]} x {each['fields']['k'][1]}" in text for each in group["kept"])
    assert "3 requests" in text and "weights: target" in text


def test_a_forward_that_cannot_be_measured_leaves_the_configs_layout(make_target, tmp_path, monkeypatch) -> None:
    def attend(self, call):
        raise RuntimeError("Tensor.item() cannot be called on meta tensors\nand more")

    config = make_target("llama").config
    monkeypatch.setattr(GeometryContext, "attend", attend)
    report = planned("--drafter", "none", "--target", folder_of(config, tmp_path))
    assert report["groups"][0]["kept"][0]["layers"] == len(layout_from_config(config).layers)
    [note] = report["notes"]
    assert "K/V are those that the config names" in note and note.endswith(
        "(Tensor.item() cannot be called on meta tensors)"
    )


def test_weights_that_the_config_does_not_tell_are_those_of_the_files(make_target, tmp_path) -> None:
    quantised = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    target = folder_of(make_target("llama").config, tmp_path, **quantised)
    report = planned("--target", target)
    assert report["weights"] == {"target": None}
    assert "target unknown without its files" in run("--memory", "--target", target).stdout
    (tmp_path / "model.safetensors").write_bytes(bytes(1234))
    assert planned("--target", target)["weights"] == {"target": 1234}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--batch-size", "2"], "add --memory"),
        (["--memory", "--target", "./nowhere"], "'./nowhere' is not a folder"),
        (["--memory", "--drafter", "./nowhere"], "'./nowhere' is not a folder"),
        (["--memory", "--target", "tiny-gemma4-mtp"], "is a drafter"),
        (["--memory", "--max-model-len", "9999999"], "max_model_len=9999999"),
        (["--memory", "--tensor-parallel", "2"], "tensor_parallel=2"),
        (["--memory", "--device", "nonsense"], "a torch device is expected"),
        (["--memory", "--num-draft-tokens", "9"], "num_draft_tokens=9"),
    ],
)
def test_mistakes_are_one_sentence(words, says) -> None:
    result = run(*words)
    assert result.exit_code == 2 and says in result.stderr
    assert result.stderr.count("\n") == 1 and result.stdout == ""


def test_models_that_are_not_served_are_refused(make_target, tmp_path) -> None:
    text = make_target("llama").config
    chunked = run("--memory", "--target", folder_of(text, tmp_path / "a", attention_chunk_size=4))
    assert chunked.exit_code == 2 and "uses chunked attention" in chunked.stderr
    hybrid = folder_of(make_target("lfm2").config, tmp_path / "d", architectures=["Lfm2ForCausalLM"])
    rounded = run("--memory", "--target", hybrid, "--kv-dtype", "fp8")
    assert rounded.exit_code == 2 and "has recurrent layers, whose records are not rounded" in rounded.stderr
    drafting = run("--memory", "--drafter", hybrid)
    assert drafting.exit_code == 2 and "has recurrent layers, and a drafter's states are not kept" in drafting.stderr
    unknown = run("--memory", "--target", folder_of(text, tmp_path / "b", model_type="bert"))
    assert unknown.exit_code == 2 and unknown.stderr.count("\n") == 1
    encoder = folder_of(transformers.BertConfig(), tmp_path / "c", architectures=["BertModel"])
    refused = run("--memory", "--drafter", encoder)
    assert refused.exit_code == 2 and "has model_type 'bert'; supported are " in refused.stderr


def test_the_longest_text_fits_a_pool_of_given_size(make_target, make_engine) -> None:
    engine = make_engine(make_target("llama"), "ngram", spec=SpecConfig(3), max_model_len=None, full_slots=40)
    assert engine.max_model_len == 40 - engine.table.lookahead

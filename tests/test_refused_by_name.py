"""Settings that used to be ignored or had no effect: each is now obeyed, or refused by name."""

import errno
import json
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Regex, pre_tokenizers

from specdec import Engine, EngineConfig, SamplingParams
from specdec.draft_models import gemma4_mtp
from specdec.errors import CheckpointError, ConfigError, UnsupportedModelError, naming_file
from specdec.evaluation.accuracy import open_transcripts
from specdec.loading import model_loading
from specdec.models.published import resolve_name
from specdec.text.record_files import append_record

from tiny_tokenizers import byte_level

SMALL = EngineConfig(max_batch_size=1, max_model_len=64)


def load(target: Any = "tiny-gemma4", drafter: Any = None, config: EngineConfig = SMALL, **options: Any) -> Engine:
    return Engine.from_pretrained(target, drafter, config=config, **options)


@pytest.fixture
def without_tokenizer(tmp_path) -> Path:
    """The bundled target's config and weights alone."""
    for file in Path(resolve_name("tiny-gemma4")).iterdir():
        if "token" not in file.name and "template" not in file.name:
            (tmp_path / file.name).symlink_to(file)
    return tmp_path


# dtypes


@pytest.mark.cpu
@pytest.mark.usefixtures("shallow_pair")
def test_torch_dtype_is_obeyed():
    """It was ignored: float32 on the CPU, where transformers takes it for `dtype`. A drafter's does not fit, then."""
    for options in ({"torch_dtype": "bf16"}, {"torch_dtype": torch.bfloat16, "dtype": "bfloat16"}):
        assert load(**options).target.dtype is torch.bfloat16
    engine = load(config=EngineConfig(dtype="bf16", max_model_len=64), dtype="bfloat16")
    assert engine.target.dtype is torch.bfloat16
    with pytest.raises(UnsupportedModelError, match="bfloat16"):
        load("tiny-gemma4", "tiny-gemma4-mtp", drafter_options={"torch_dtype": "bfloat16"})


@pytest.mark.parametrize("drafter", [None, "none", "suffix", "module"])
def test_loading_arguments_of_a_drafter_that_is_not_loaded_are_refused(drafter, make_target):
    """They were ignored, and what is no mapping raised a TypeError."""
    model = make_target("llama")
    with pytest.raises(ConfigError, match=r"drafter_options=.'revision': 'v2'.: they are for drafters that are loaded"):
        load(model, model if drafter == "module" else drafter, drafter_options={"revision": "v2"})
    with pytest.raises(ConfigError, match="drafter_options is 5; a Mapping is expected"):
        load(model, model if drafter == "module" else drafter, drafter_options=5)


# no tokenizer, no prompt, no such role


def test_a_checkpoint_in_a_subfolder_is_read_and_mismatches_are_always_reported(make_target, tmp_path):
    model = make_target("llama")
    model.save_pretrained(tmp_path / "inner")
    options = {"subfolder": "inner", "ignore_mismatched_sizes": True}
    checkpoint = model_loading.Checkpoint.from_name(tmp_path, options)
    loaded = checkpoint.load(torch.float32, torch.device("cpu"))
    torch.testing.assert_close(loaded.state_dict(), model.state_dict())
    config = tmp_path / "inner" / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 48', '"intermediate_size": 40'))
    with pytest.raises(CheckpointError, match=r"is \[32, 48\], and by the config\.json it would be \[32, 40\]"):
        model_loading.Checkpoint.from_name(tmp_path, options).load(torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        ({"num_hidden_layers": 40}, r"lacks \d+ tensors of LlamaForCausalLM, model\.layers\.10\."),
        ({"hidden_size": 512}, r"tensor lm_head\.weight is \[\d+, 32\], and by the config\.json .* \[\d+, 512\]"),
    ],
    ids=["layers", "width"],
)
def test_a_config_far_larger_than_its_weights_is_refused_before_a_weight_is_made(
    edit, says, make_target, monkeypatch, tmp_path
):
    devices = set()

    def initialise(_, module: torch.nn.Module) -> None:
        devices.update(weight.device.type for weight in module.parameters(recurse=False))

    monkeypatch.setattr(transformers.LlamaPreTrainedModel, "_init_weights", initialise)
    make_target("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "layer_types": None, **edit}))
    with pytest.raises(CheckpointError, match=says):
        model_loading.Checkpoint.from_name(tmp_path).load(torch.float32, torch.device("cpu"))
    assert devices == {"meta"}


def test_a_folder_without_a_tokenizer_says_that_there_is_no_text(without_tokenizer, caplog):
    """The text of its outputs was empty, without a word; token ids work."""
    engine = load(without_tokenizer)
    assert "has no tokenizer" in caplog.text and "outputs have no text" in caplog.text
    [out] = engine.generate([2, 5, 9], SamplingParams(max_new_tokens=4))
    assert len(out.token_ids) == 4
    for ask in (lambda: engine.generate("Hi"), lambda: engine.chat("Hi")):
        with pytest.raises(ConfigError, match="need a tokenizer"):
            ask()


def test_a_tokenizer_that_transformers_makes_up_is_none(make_target, tmp_path):
    """transformers makes it of some model types, from no file, and it has special tokens alone."""
    make_target("gemma2").save_pretrained(tmp_path)
    assert model_loading.load_tokenizer(tmp_path) is None


def test_a_tokenizer_that_cannot_be_loaded_is_named_with_the_reason(without_tokenizer, caplog):
    """A file that was cut off counted as none, and one of a list instead of an object was a traceback."""
    for name, text, why in (("tokenizer.json", '{"a": "1', "Unterminated"), ("tokenizer_config.json", "[]", "list")):
        (without_tokenizer / name).write_text(text)
        assert model_loading.load_tokenizer(without_tokenizer) is None
        assert f"the tokenizer of {str(without_tokenizer)!r} cannot be loaded: {why}" in caplog.text


def test_the_template_of_a_processor_is_the_tokenizers_if_it_has_none(without_tokenizer):
    """Older multimodal checkpoints have theirs in chat_template.json; messages were refused."""
    tokenizer = model_loading.load_tokenizer("tiny-gemma4")
    template, tokenizer.chat_template = tokenizer.chat_template, None
    tokenizer.save_pretrained(without_tokenizer)
    assert model_loading.load_tokenizer(without_tokenizer).chat_template is None
    (without_tokenizer / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert model_loading.load_tokenizer(without_tokenizer).chat_template == template


@pytest.mark.parametrize("named", ["LlamaTokenizerFast", "GPT2Tokenizer", "Qwen2Tokenizer", "PreTrainedTokenizerFast"])
def test_a_tokenizer_of_bytes_is_that_of_its_file_whatever_class_it_names(named, tmp_path):
    """DeepSeek-R1-Distill-Llama and DeepSeek-Coder name Llama's: "hello world" was read as "helloworld"."""
    backend = byte_level([("Ġ", "w"), ("1", "2"), ("2", "3")])
    digits = pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.add_special_tokens(["<eos>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    said = {"tokenizer_class": named, "eos_token": "<eos>", "chat_template": "{{ messages[0].content }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    tokenizer = model_loading.load_tokenizer(tmp_path)
    text = " a world: é 1212312 e\u0301\n"
    assert tokenizer.encode(text, add_special_tokens=False) == backend.encode(text).ids
    assert tokenizer.decode(backend.encode(text).ids) == text
    assert (tokenizer.eos_token_id, tokenizer.chat_template) == (backend.token_to_id("<eos>"), said["chat_template"])


def test_a_tokenizer_that_is_given_needs_no_warning(without_tokenizer, caplog):
    assert load(without_tokenizer, tokenizer="tiny-gemma4").chat("1 + 1", SamplingParams(max_new_tokens=2))[0].text
    assert "has no tokenizer" not in caplog.text


@pytest.fixture(scope="module")
def pair() -> Engine:
    return load()


@pytest.mark.parametrize("role", ["robot", "User", "", "assistent", "mod"])
def test_a_role_that_no_template_knows_is_refused(role, pair):
    """The template wrote it out, and the model answered to something that it never saw."""
    with pytest.raises(ConfigError, match=r"message 1 of the chat has role=.*chat template does not know"):
        pair.chat([{"role": "user", "content": "Hi"}, {"role": role, "content": "Hi"}])


def test_roles_that_a_template_names_are_taken(pair):
    named = "{% for m in messages %}{{ '<robot>' if m.role == \"robot\" else '<user>' }}{{ m.content }}{% endfor %}"
    asked = [{"role": "robot", "content": "Hi"}]
    tokenizer = transformers.AutoTokenizer.from_pretrained(resolve_name("tiny-gemma4"))
    tokenizer.chat_template = named
    engine = Engine(pair.target, tokenizer=tokenizer, config=SMALL)
    assert engine.decode(engine.chat_prompt(asked)) == "<robot>Hi"
    assert pair.chat_prompt(asked, chat_template="{{ messages[0].role }}")  # the caller's own template decides


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_an_empty_prompt_is_refused(prompt, pair):
    for ask in (pair.chat, pair.chat_prompt):
        with pytest.raises(ConfigError, match="give some text"):
            ask(prompt)


# names of checkpoints


@pytest.fixture
def no_network(monkeypatch) -> None:
    """Nothing answers where the hub should be."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(model_loading.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(model_loading, "_is_cached", lambda *_: False)


def test_an_unknown_hub_id_without_network_is_one_sentence_at_once(no_network, monkeypatch):
    """The hub's library tried six times, said so in eleven lines, and took 25 seconds."""
    monkeypatch.setattr(model_loading, "cached_file", lambda *_, **__: pytest.fail("the hub's library tried"))
    with pytest.raises(CheckpointError) as error:
        load("nobody/nothing")
    assert str(error.value).startswith("no checkpoint 'nobody/nothing' here, and 127.0.0.1 cannot be reached")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("variable", ["http_proxy", "all_proxy"])
def test_a_proxy_that_is_away_is_named(variable, no_network, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.example")
    for proxy in ("http://localhost:9", "localhost:9"):
        monkeypatch.setenv(variable, proxy)
        with pytest.raises(CheckpointError, match="localhost cannot be reached"):
            model_loading.require_hub("nobody/nothing", {})


def test_nothing_is_tried_offline_or_for_what_is_in_the_cache(monkeypatch):
    monkeypatch.setattr(model_loading.socket, "create_connection", lambda *_, **__: pytest.fail("tried"))
    monkeypatch.setattr(model_loading.constants, "HF_HUB_OFFLINE", True)
    model_loading.require_hub("nobody/nothing", {})
    monkeypatch.setattr(model_loading.constants, "HF_HUB_OFFLINE", False)
    model_loading.require_hub("nobody/nothing", {"local_files_only": True})
    monkeypatch.setattr(model_loading, "cached_file", lambda *_, **__: "config.json")
    model_loading.require_hub("somebody/something", {})


def test_gguf_files_are_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"gguf_file='model\.gguf': GGUF files are not read"):
        load(tmp_path, gguf_file="model.gguf")
    (tmp_path / "model.gguf").touch()
    for name, said in ((tmp_path / "model.gguf", "model.gguf'"), (tmp_path, "holds no config.json")):
        with pytest.raises(CheckpointError, match=f"{said}: GGUF files are not read; give a checkpoint of safetensors"):
            load(str(name))


# models


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("deepseek_v32", "uses sparse attention"),
        ("glm5_next", "uses sparse attention"),  # by head_dim=0: no part of its heads rotates
        ("zaya", "layer types .'hybrid'. have no paged KV cache"),
        ("blt", "its config is not that of a decoder-only causal language model"),
    ],
)
def test_a_family_that_its_config_refuses_is_refused_before_its_weights_are_read(kind, says, tmp_path):
    """They were downloaded and read first."""
    transformers.AutoConfig.for_model(kind).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=says):
        load(tmp_path)


def test_dynamic_int8_is_refused_as_quantisation(make_target):
    """The message spoke of logits that differ by 9 %."""
    model = make_target("llama", fresh=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is about to give it up
        model.model.layers[1].mlp.down_proj = torch.ao.nn.quantized.dynamic.Linear(48, 32)
    with pytest.raises(UnsupportedModelError, match="quantised dynamically") as error:
        load(model)
    assert "down_proj" in str(error.value) and "\n" not in str(error.value)


def test_settings_that_transformers_asserts_away_are_one_sentence(monkeypatch):
    """An AssertionError of transformers' torchao settings ended the shell's command in a traceback."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("Expected only one key 'default' in quant_type dictionary")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", refuse)
    with pytest.raises(UnsupportedModelError, match="cannot be loaded: Expected only one key 'default'") as error:
        load("tiny-gemma4", quantization_config={"quant_method": "torchao", "quant_type": "int8_weight_only"})
    assert "\n" not in str(error.value)


def test_loading_a_target_leaves_the_config_classes_alone(monkeypatch):
    """They were changed for the whole process while any checkpoint was loaded, in every thread."""
    seen: list[object] = []
    real = vars(gemma4_mtp.Gemma4TextConfig).get("kv_sharing_modes")  # newer transformers have one, and read it

    def modes_of(config: Any) -> Any:
        return ["own"] if real is None or type(config).__name__ == "Shared" else real.fget(config)

    monkeypatch.setattr(gemma4_mtp.Gemma4TextConfig, "kv_sharing_modes", property(modes_of), raising=False)
    stock = vars(gemma4_mtp.Gemma4TextConfig)["kv_sharing_modes"]
    auto = transformers.AutoModelForCausalLM.from_pretrained

    def watching(*args: Any, **kwargs: Any) -> Any:
        config = type("Shared", (), {"num_kv_shared_layers": 2, "num_hidden_layers": 2})()
        modes = vars(gemma4_mtp.Gemma4TextConfig)["kv_sharing_modes"]

        def elsewhere() -> None:
            seen.append((modes is stock, modes.fget(config)))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return auto(*args, **kwargs)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", watching)
    load("tiny-gemma4", "tiny-gemma4-mtp")
    assert seen == [(True, ["own"]), (False, ["own"])]
    assert vars(gemma4_mtp.Gemma4TextConfig)["kv_sharing_modes"] is stock


# files and words


def test_transcripts_on_a_full_disk_name_their_file(tmp_path):
    def full(data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with open_transcripts(tmp_path, {}, 0) as file:
        file.write = full
        with pytest.raises(OSError, match=r"cannot be written: No space left on device: '.*transcripts-0\.jsonl'"):
            append_record(file, {"index": 0})


def test_a_pipe_that_is_closed_is_no_full_disk(tmp_path):
    with pytest.raises(BrokenPipeError) as error, naming_file(tmp_path):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")
    assert error.value.filename is None


def test_an_engine_shows_what_it_is(make_target, make_engine):
    engine = make_engine(make_target("llama"), "ngram", max_batch_size=3)
    assert repr(engine) == ("<Engine LlamaForCausalLM, drafter ngram, float32 on cpu, 3 requests of up to 256 tokens>")
    engine.close()
    assert repr(engine).endswith(", closed>") and "no drafter" in repr(make_engine(make_target("llama"), None))

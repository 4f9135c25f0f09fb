"""No command replaces one tensor with another, or drops anything silently."""

import json

import pytest
import torch

from composer_checkpoint import load_file, save_file
from composer_checkpoint.tensors import open_checkpoint

ONE, TWO = torch.full((2,), 1.0), torch.full((2,), 2.0)
TARGETS = {
    "pt": ["out.pt"],
    "safetensors": ["out.safetensors"],
    "dcp": ["out", "--to", "dcp"],
    "local": ["out_{rank}.pt", "--world-size", "2"],
    "hf": ["out", "--config", "config.json"],
}
CONFIG = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 4, "n_head": 2, "n_layer": 1}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder that is the current one, with a model's configuration."""
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 10, "n_positions": 8}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names_in(folder):
    return {path.name for path in folder.iterdir()} - {"config.json"}


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
@pytest.mark.parametrize("target", TARGETS)
def test_weights_that_would_have_one_name_are_refused(target, more, here, run):
    torch.save({"state": {"model": {"a": {"c": ONE}, "a.c": TWO}}}, "a.pt")
    code, _, errors = run("convert", "a.pt", *TARGETS[target], *more)
    assert code == 1
    assert "['a']['c'] and ['a.c'] would both be called 'a.c'" in errors
    assert names_in(here) == {"a.pt"}


@pytest.mark.parametrize(
    "arguments",
    [("diff", "a.pt", "a.pt"), ("merge", "a.pt", "a.pt", "out.pt"), ("extract", "a.pt", "out.pt")],
    ids=lambda arguments: arguments[0],
)
def test_other_commands_refuse_them_too(arguments, here, run):
    torch.save({"a": {"c": ONE}, "a.c": TWO}, "a.pt")
    code, _, errors = run(*arguments)
    assert code == 1
    assert "['a']['c'] and ['a.c'] would both be called 'a.c'" in errors
    assert names_in(here) == {"a.pt"}


def test_they_are_shown_verified_and_compared_all_the_same(here, run, run_json):
    torch.save({"a": {"c": ONE}, "a.c": TWO}, "a.pt")
    torch.save({"a": {"c": ONE}, "a.c": ONE.clone()}, "b.pt")
    assert [each["name"] for each in run_json("inspect", "a.pt")[1]["tensors"]] == ["a/c", "a.c"]
    assert run("verify", "a.pt")[0] == 0
    assert run("diff", "a.pt", "a.pt", "--all")[0] == 0
    assert run("diff", "a.pt", "b.pt", "--all")[0] == 1


@pytest.mark.parametrize(("target", "separator"), [("dcp", "."), ("local", "/")])
@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_so_is_what_is_beside_the_weights(more, target, separator, here, run):
    moments = {"w": {"exp_avg": ONE}, f"w{separator}exp_avg": TWO}
    save_file({"state": {"model": {"w": ONE}, "optimizers": {"Adam": {"state": moments}}}}, "a.pt")
    code, _, errors = run("convert", "a.pt", *TARGETS[target], "--optimizer", *more)
    assert code == 1
    assert f"['w']['exp_avg'] and ['state']['optimizers']['Adam']['state']['w{separator}exp_avg'] would both" in errors
    assert names_in(here) == {"a.pt"}
    assert run("convert", "a.pt", "all.pt", "--optimizer")[0] == 0
    found = load_file("all.pt")["state"]["optimizers"]["Adam"]["state"]
    assert torch.equal(found[f"w{separator}exp_avg"], TWO)


def test_names_too_long_for_a_folder_are_refused_before_it_is_written(here, run):
    save_file({"state": {"model": {"w" * 1100: ONE}}}, "a.pt")
    code, _, errors = run("convert", "a.pt", *TARGETS["dcp"])
    assert (code, "has a name of 1112 characters and 3 keys" in errors) == (1, True)
    assert names_in(here) == {"a.pt"}


@pytest.mark.parametrize("more", [["--include", "*"], []])
def test_prefixes_that_a_folder_does_not_have_make_no_two_weights_one(more, here, run):
    save_file({"state": {"model": {"model.w": ONE, "w": TWO}}}, "a.pt")
    code, _, errors = run("convert", "a.pt", *TARGETS["hf"], *more)
    assert code == 2
    assert "'model.w' and 'w' would both be called 'w'" in errors or "'model.model.w'" in errors
    assert names_in(here) == {"a.pt"}


@pytest.mark.parametrize("target", ["out.pt", "out"])
def test_an_adapters_weights_stay_apart(target, here, run):
    (here / "adapter").mkdir()
    (here / "adapter" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2}))
    names = [f"base_model.model.a.lora_A{middle}.weight" for middle in ("", ".default")]
    save_file(dict(zip(names, (ONE, TWO), strict=True)), "adapter/adapter_model.safetensors")
    code, _, errors = run("convert", "adapter", target, *(["--config", "."] if target == "out" else []))
    assert (code, "lora_A.weight' and" in errors, "would both be called" in errors) == (2, True, True), errors
    assert names_in(here) == {"adapter"}


def named(source):
    with open_checkpoint(source) as opened:
        return {name: tensor.read() for name, tensor in opened.weights.items()}


@pytest.mark.parametrize(
    ("prefix", "options"),
    [("module.", ["--strip-prefix", "module."]), ("module.", ["--rename", "^module[.]="]), ("_orig_mod.", [])],
    ids=["--strip-prefix", "--rename", "wrapper"],
)
@pytest.mark.parametrize("target", ["pt", "safetensors", "dcp", "local"])
def test_two_names_of_one_tensor_become_one(target, prefix, options, here, run):
    weight = torch.arange(4.0)
    torch.save({"w": weight, f"{prefix}w": weight, f"{prefix}other": weight[1:]}, "a.pt")
    code, _, errors = run("convert", "a.pt", *TARGETS[target], *options)
    assert code == 0, errors
    found = named(TARGETS[target][0])
    assert found.keys() == {"w", "other"}
    assert torch.equal(found["w"], weight)
    assert torch.equal(found["other"], weight[1:])


def test_two_names_of_one_tensor_become_one_in_a_folder_too(here, run):
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config.from_pretrained(here))
    weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save(weights | {f"module.{name}": tensor for name, tensor in weights.items()}, "a.pt")
    code, _, errors = run("convert", "a.pt", *TARGETS["hf"])
    assert code == 0, errors
    assert torch.equal(named("out")["transformer.wte.weight"], model.transformer.wte.weight)


SQUARE = torch.arange(4.0).reshape(2, 2)


@pytest.mark.parametrize(
    "other",
    [SQUARE.clone(), SQUARE.T, SQUARE.reshape(4)],
    ids=["equal", "turned", "of another shape"],
)
def test_tensors_that_are_not_one_and_the_same_keep_their_names(other, here, run):
    torch.save({"w": SQUARE, "module.w": other}, "a.pt")
    code, _, errors = run("convert", "a.pt", "out.pt", "--strip-prefix", "module.")
    assert (code, "'w' and 'module.w' would both be called 'w'" in errors) == (2, True), errors
    assert names_in(here) == {"a.pt"}


def test_a_prefix_on_one_side_alone_hides_no_weight(here, run_json):
    torch.save({"model.x": ONE, "x": TWO, "model.y": ONE}, "a.pt")
    torch.save({"x": TWO, "y": ONE}, "b.pt")
    for pair in (("a.pt", "b.pt"), ("b.pt", "a.pt")):
        code, told = run_json("diff", *pair)
        assert (code, told["equal"]) == (1, False)


@pytest.mark.parametrize(("dtype", "value"), [(torch.int64, 1 << 60), (torch.uint64, (1 << 64) - 2)])
def test_large_whole_numbers_are_compared_to_the_last_digit(dtype, value, here, run_json):
    torch.save({"count": torch.tensor([value], dtype=dtype)}, "a.pt")
    torch.save({"count": torch.tensor([value + 1], dtype=dtype)}, "b.pt")
    assert run_json("diff", "a.pt", "b.pt")[0] == 1
    assert run_json("diff", "a.pt", "b.pt", "--rtol", "1e-9")[0] == 0
    assert run_json("diff", "a.pt", "a.pt")[0] == 0


def test_what_is_left_out_of_a_conversion_is_told(here, run_json):
    model = {"w": ONE, "norm": {"_extra_state": {"scale": 3, "amax": TWO}}, "version": 2}
    torch.save({"model": model, "ema": {"w": TWO}, "epoch": 3}, "a.pt")
    code, told = run_json("convert", "a.pt", "out.pt")
    assert code == 0
    assert told["warnings"] == [
        "left out of the model, since they are not tensors: norm._extra_state.scale, version",
        "left out, since they are not part of the model: ema",
    ]


def test_keys_that_a_folder_turns_into_texts_are_told(here, run_json):
    moments = {0: {"exp_avg": ONE}, 1: {"exp_avg": TWO}}
    save_file({"state": {"model": {"w": ONE}, "optimizers": {"Adam": {"state": moments}}}}, "a.pt")
    warnings = run_json("convert", "a.pt", *TARGETS["dcp"], "--optimizer")[1]["warnings"]
    told = "keys that are not strings become strings: state/optimizers/Adam/state/0, state/optimizers/Adam/state/1"
    assert warnings == [told]
    assert run_json("convert", "a.pt", "out.pt", "--optimizer")[1]["warnings"] == []


def test_empty_dicts_and_tensors_in_tuples_come_back_from_a_folder(here, run):
    state = {"model": {"w": ONE}, "callbacks": {"Quiet": {}, "Seen": (TWO, 3)}, "schedulers": {"Cosine": {}}}
    save_file({"state": state}, "a.pt")
    assert run("convert", "a.pt", *TARGETS["dcp"], "--resumption")[0] == 0
    assert run("reshard", "out", "two", "--world-size", "2")[0] == 0
    assert run("convert", "two", "back.pt", "--resumption")[0] == 0
    found = load_file("back.pt")["state"]
    assert found["schedulers"] == {"Cosine": {}}
    assert found["callbacks"]["Quiet"] == {}
    assert torch.equal(found["callbacks"]["Seen"][0], TWO)
    save_file({"state": {**state, "callbacks": {"Seen": (ONE, 3)}}}, "b.pt")
    assert run("diff", "b.pt", "out", "--all")[0] == 1


def test_a_file_cut_by_size_keeps_its_names(here, run):
    save_file({"state": {"model": {"w": ONE, "v": TWO, "tied": ONE}}}, "a.safetensors")
    assert run("reshard", "a.safetensors", "out", "--max-shard-size", "8B")[0] == 0
    assert load_file("out/model.safetensors.index.json").keys() == {"w", "v", "tied"}
    assert run("diff", "a.safetensors", "out")[0] == 0


def test_a_file_has_each_of_two_tensors_or_none(here, run):
    torch.save({"model": {"beside/w": ONE}, "beside": {"w": TWO}}, "a.pt")
    code, _, errors = run("extract", "a.pt", "out.pt")
    assert (code, "'beside/w' is the name of a weight and the path of another tensor" in errors) == (2, True)
    torch.save({"state": {1: ONE, "1": TWO}}, "b.pt")
    code, _, errors = run("extract", "b.pt", "out.json")
    assert (code, "would both be called '1'" in errors) == (2, True)
    assert names_in(here) == {"a.pt", "b.pt"}


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_of_a_tensor_in_two_files_that_is_taken_which_the_index_names(ending, here, run):
    stem = {"safetensors": "model", "bin": "pytorch_model"}[ending]
    files = [f"{stem}-0000{number}-of-00002.{ending}" for number in (1, 2)]
    (here / "hf").mkdir()
    for file, weights in zip(files, ({"w": ONE}, {"w": TWO, "v": ONE}), strict=True):
        (save_file if ending == "safetensors" else torch.save)(weights, f"hf/{file}")
    index = here / "hf" / f"{stem}.{ending}.index.json"
    for file, expected in zip(files, (ONE, TWO), strict=True):
        listed = {"w": file, "v": files[1]} | ({"u": files[0]} if file == files[1] else {})
        index.write_text(json.dumps({"weight_map": listed}))
        with open_checkpoint(index if ending == "safetensors" else here / "hf") as source:
            assert torch.equal(source.tensors["w"].read(), expected)
    index.write_text(json.dumps({"weight_map": {"u": files[0], "v": files[1]}}))
    code, _, errors = run("convert", "hf", "out.pt", "--no-verify")
    assert code == 1
    assert f"names {files[1]}, which has a tensor 'w' that a file before it has, too" in errors
    assert names_in(here) == {"hf"}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.bfloat16])
def test_the_average_of_one_checkpoint_is_that_checkpoint(dtype, here, run):
    save_file({"w": torch.tensor([0.5, -2.0, 0.0]).to(dtype)}, "a.pt")
    assert run("average", "a.pt", "a.pt", "out.pt")[0] == 0
    assert run("diff", "a.pt", "out.pt")[0] == 0


def test_conjugated_weights_are_converted_as_they_are(here, run):
    tensor = torch.tensor([1 + 2j, 3 - 1j])
    torch.save({"a": tensor, "b": tensor.conj()}, "a.pt")
    for arguments in TARGETS["pt"], TARGETS["safetensors"], TARGETS["dcp"], TARGETS["local"]:
        assert run("convert", "a.pt", *arguments)[0] == 0
        with open_checkpoint(arguments[0]) as source:
            assert torch.equal(source.weights["b"].read(), tensor.conj().resolve_conj())


def with_lora(weights):
    entry = {"file_extension": ".json", "class": "transformers.GPT2LMHeadModel"}
    described = {
        "config": {**entry, "content": CONFIG},
        "peft_config": {**entry, "content": {"peft_type": "LORA", "r": 2}, "class": "peft.LoraConfig"},
    }
    weights = {f"model.base_model.model.{name}": tensor for name, tensor in weights.items()}
    return {"state": {"model": weights, "integrations": {"huggingface": {"model": described, "tokenizer": {}}}}}


@pytest.mark.parametrize(
    ("weights", "told"),
    [
        ({"a.base_layer.weight": ONE, "a.weight": TWO}, "a.weight' would both be called 'model.a.weight'"),
        ({"a.base_layer.weight": ONE, "a.lora_A.other.weight": TWO}, "1 weight of an adapter not called 'default'"),
        ({"a.weight": ONE, "a.modules_to_save.other.weight": TWO}, "1 weight of an adapter not called 'default'"),
    ],
)
def test_merging_an_adapter_takes_all_weights_or_none(weights, told, here, run):
    save_file(with_lora(weights), "a.pt")
    code, _, errors = run("convert", "a.pt", "out", "--peft", "merge")
    assert code in (1, 2)
    assert told in errors
    assert names_in(here) == {"a.pt"}


def test_old_names_of_a_folder_take_no_others_place(here, run):
    transformers = pytest.importorskip("transformers", minversion="5")
    sizes = {"hidden_size": 4, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 4}
    config = transformers.BertConfig(vocab_size=10, max_position_embeddings=8, architectures=["BertModel"], **sizes)
    model = transformers.BertModel(config)
    config.save_pretrained("hf")
    weights = model.state_dict()
    extra = {name.replace("weight", "gamma"): TWO for name in weights if name.endswith("LayerNorm.weight")}
    save_file({**weights, **extra}, "hf/model.safetensors")
    code, _, errors = run("convert", "hf", "out.pt")
    assert code == 1
    assert "LayerNorm.weight' in the BertModel" in errors
    assert names_in(here) == {"hf"}

"""Tensors with which torch does not compute are shown, verified and compared by their bytes, or refused by name."""

import pytest
import torch

from composer_checkpoint import hash_bytes, load_file

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]
BYTES = torch.arange(24, dtype=torch.uint8).reshape(4, 6)
WITHOUT_NUMBERS = ["float4_e2m1fn_x2", "bits8", "bits16"]
SAME_IN_OTHER_FORMATS = [("b.pt",), ("b_{rank}.pt", "--world-size", "2"), ("b", "--to", "dcp")]


def quantized(scale):
    return torch.quantize_per_tensor(torch.arange(6.0), scale, 0, torch.qint8)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def save(name, dtype, changed=0):
    plain = BYTES.clone()
    plain.view(-1)[:changed] += 100
    torch.save({"odd": plain.view(getattr(torch, dtype)), "w": torch.ones(2)}, name)


@pytest.mark.parametrize("dtype", WITHOUT_NUMBERS)
def test_stats_say_that_there_are_none(dtype, here, run, run_json):
    save("a.pt", dtype)
    odd, plain = run_json("inspect", "a.pt", "--stats")[1]["tensors"]
    told = f"torch does not compute with elements of {dtype}"
    assert odd["stats"] == {"min": None, "max": None, "mean": None, "nan": None, "inf": None, "none_since": told}
    assert plain["stats"]["mean"] == 1.0
    assert f"no statistics of odd: {told}" in run("inspect", "a.pt", "--stats")[1]


@pytest.mark.parametrize("dtype", WITHOUT_NUMBERS)
def test_they_are_verified_and_hashed(dtype, here, run_json):
    save("a.pt", dtype)
    code, told = run_json("verify", "a.pt", "--hash")
    assert (code, told["ok"]) == (0, True)
    assert told["hashes"]["odd"] == hash_bytes(BYTES.numpy())


@pytest.mark.parametrize("dtype", WITHOUT_NUMBERS)
def test_they_are_compared_by_their_bytes(dtype, here, run, run_json):
    save("a.pt", dtype)
    save("b.pt", dtype, changed=3)
    assert run("diff", "a.pt", "a.pt")[0] == 0
    code, told = run_json("diff", "a.pt", "b.pt", "--rtol", "1", "--atol", "1000")
    count = -(-3 // getattr(torch, dtype).itemsize)
    assert code == 1
    assert told["value"] == [{"name": "odd", "max_abs": None, "max_rel": None, "cosine": None, "unequal": count}]
    assert f"odd: {count} element" in run("diff", "a.pt", "b.pt")[1]


def test_another_dtype_is_a_difference(here, run_json):
    save("a.pt", "float4_e2m1fn_x2")
    torch.save({"odd": torch.ones(4, 6), "w": torch.ones(2)}, "b.pt")
    for pair in (("a.pt", "b.pt"), ("b.pt", "a.pt")):
        code, told = run_json("diff", *pair)
        assert (code, [each["name"] for each in told["dtype"]], told["value"]) == (1, ["odd"], [])


@pytest.mark.parametrize("target", SAME_IN_OTHER_FORMATS, ids=lambda target: target[0])
def test_they_keep_their_bytes_in_other_formats(target, here, run):
    save("a.pt", "float4_e2m1fn_x2")
    code, _, errors = run("convert", "a.pt", *target)
    assert code == 0, errors
    assert run("verify", target[0])[0] == 0
    assert run("diff", "a.pt", target[0])[0] == 0


def test_what_was_written_of_them_is_loaded(here, run):
    save("a.pt", "float4_e2m1fn_x2")
    assert run("convert", "a.pt", "b.pt")[0] == 0
    assert torch.equal(load_file("b.pt")["state"]["model"]["odd"].view(torch.uint8), BYTES)


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("command", "what"),
    [
        (("merge", "a.pt", "a.pt", "out.pt"), "an average needs numbers"),
        (("convert", "a.pt", "out.pt", "--output-precision", "bf16"), "--output-precision bf16 needs numbers"),
    ],
    ids=["merge", "convert"],
)
def test_what_needs_numbers_refuses_them_by_name(command, what, more, here, run, tmp_path):
    save("a.pt", "float4_e2m1fn_x2")
    code, _, errors = run(*command, *more)
    assert (code, "odd is torch.float4_e2m1fn_x2, with" in errors, what in errors) == (1, True, True), errors
    assert not (tmp_path / "out.pt").exists()
    assert run(*command, "--exclude", "odd")[0] == 0
    assert load_file("out.pt")["state"]["model"].keys() == {"w"}


@pytest.mark.parametrize("dtype", ["float8_e8m0fnu", "float8_e5m2fnuz", "uint16"])
def test_rare_ones_that_are_numbers_are_taken_as_such(dtype, here, run, run_json):
    save("a.pt", dtype)
    assert run_json("inspect", "a.pt", "--stats")[1]["tensors"][0]["stats"]["min"] is not None
    assert run("verify", "a.pt", "--hash")[0] == run("diff", "a.pt", "a.pt")[0] == 0
    assert run("merge", "a.pt", "a.pt", "out.pt")[0] == 0


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    "command",
    [
        ("convert", "a.pt", "out.pt"),
        ("convert", "a.pt", "out.safetensors"),
        ("convert", "a.pt", "out_{rank}.pt", "--world-size", "2"),
        ("convert", "a.pt", "out", "--to", "dcp"),
        ("extract", "a.pt", "out.pt"),
        ("merge", "a.pt", "a.pt", "out.pt"),
    ],
    ids=lambda command: " ".join(command),
)
def test_quantized_ones_are_refused_since_they_would_lose_their_scale(command, more, here, run, tmp_path):
    torch.save({"odd": quantized(0.1)}, "a.pt")
    code, _, errors = run(*command, *more)
    assert code == 1
    assert "odd is quantized, as torch.qint8, and" in errors
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_quantized_ones_of_equal_bytes_are_not_called_equal(here, run, run_json):
    for name, scale in (("a.pt", 1.0), ("b.pt", 2.0)):
        torch.save({"odd": torch._make_per_tensor_quantized_tensor(torch.ones(3, dtype=torch.int8), scale, 0)}, name)
    code, _, errors = run("diff", "a.pt", "b.pt")
    assert (code, "odd is quantized, as torch.qint8, and diff" in errors) == (1, True)
    assert run("inspect", "a.pt", "--stats")[0] == 0
    code, told = run_json("verify", "a.pt", "--hash")
    assert (code, told["hashes"]) == (0, {})
    assert any("not 1 quantized tensor" in check["detail"] for check in told["checks"])

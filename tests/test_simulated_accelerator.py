"""The Trainer on the simulated accelerator: the weights of the CPU, and no step that waits for the device."""

import copy
import gc
import io
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, TensorDataset

from composer import algorithms, callbacks, loggers
from composer.algorithms import GradientClipping
from composer.core import Callback, Evaluator
from composer.models import ComposerClassifier, HuggingFaceModel
from composer_checkpoint import load_file
from composer_dist import DeviceCPU
from composer_dist.testing import SimulatedAccelerator, run_ranks
from composer_optim import DecoupledAdamW, DecoupledSGDW

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch has one accelerator type per process: CUDA")


@pytest.fixture
def cases(root, monkeypatch):
    """Return the modules with networks and batches, methods, and rows of `tools/gpu_check.py`."""
    monkeypatch.syspath_prepend(root / "tools")
    from gpu_cases import methods, subjects, waits

    yield subjects, methods, waits
    for name in [name for name in sys.modules if name.partition(".")[0] == "gpu_cases"]:
        del sys.modules[name]


@pytest.fixture
def accelerator():
    with SimulatedAccelerator(shares_cpu_generator=True) as accelerator:
        yield accelerator


def trained(subjects, device, kind="plain", num_batches=4, optimizer=None, algorithm=None, **settings):
    """Return the state dict of a model after training, on the CPU."""
    torch.manual_seed(7)
    if kind == "plain":
        model, batches = subjects.make_network(dropout=0.1), subjects.make_batches(num_batches)
    elif kind == "images":
        model, batches = subjects.make_convolutional(16), subjects.make_images(num_batches, 16, 16)
    elif kind == "classifier":
        model, batches = (
            ComposerClassifier(subjects.make_network(dropout=0.1), num_classes=10),
            subjects.make_batches(1),
        )
        loaders = [DataLoader(TensorDataset(*subjects.make_batches(1, 32 * num)[0]), 32) for num in (num_batches, 1)]
        evaluator = Evaluator(label="eval", dataloader=loaders[1], device_eval_microbatch_size=32)
        settings |= {"train_dataloader": loaders[0], "eval_dataloader": evaluator, "eval_interval": "1ba"}
    elif kind == "transformers":
        model, batches = make_writer(), subjects.make_sentences(num_batches, 4)
        # Adam would enlarge the rounding of gradients that are zero in exact arithmetic.
        settings["optimizers"] = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        model, batches = subjects.make_gpt(), subjects.make_sentences(num_batches, 4)
    if optimizer is not None:
        settings["optimizers"] = optimizer(model.parameters())
    if algorithm is not None:
        settings["algorithms"] = algorithm()
    # The simulated device has no fused attention, whose rounding differs.
    with sdpa_kernel(SDPBackend.MATH), subjects.make_trainer(model, batches, device, **settings) as trainer:
        trainer.fit()
        return {name: value.cpu() for name, value in trainer.state.model.state_dict().items()}


def make_writer():
    """Return a GPT-2 that generates words w0 to w127."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({f"w{number}": number for number in range(128)}, unk_token="w0")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), eos_token="w1")
    config = transformers.GPT2Config(vocab_size=128, n_embd=32, n_layer=1, n_head=2, n_positions=64, eos_token_id=1)
    return HuggingFaceModel(transformers.GPT2LMHeadModel(config), tokenizer=tokenizer)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=lambda said, name=name: f"{name}: {said}")


OPTIMIZERS = {
    "AdamW": lambda weights: torch.optim.AdamW(weights, lr=1e-2),
    "AdamW, fused": lambda weights: torch.optim.AdamW(weights, lr=1e-2, fused=True),
    "SGD": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "Adagrad": torch.optim.Adagrad,
    "RAdam": torch.optim.RAdam,
    "LBFGS": lambda weights: torch.optim.LBFGS(weights, lr=0.1, max_iter=3),
    "DecoupledAdamW": lambda weights: DecoupledAdamW(weights, lr=1e-2, fused=False),
    "DecoupledAdamW, fused": lambda weights: DecoupledAdamW(weights, lr=1e-2, fused=True),
    "DecoupledSGDW": lambda weights: DecoupledSGDW(weights, lr=0.1, momentum=0.9, fused=False),
    "DecoupledSGDW, fused": lambda weights: DecoupledSGDW(weights, lr=0.1, momentum=0.9, fused=True),
}
SETTINGS = {
    "microbatches": {"device_train_microbatch_size": 8},
    "skip": {"on_divergence": "skip"},
    "rollback": {"on_divergence": "rollback"},
    "unguarded": {"on_divergence": None},
    "progress bar": {"progress_bar": True},
    "GPT": {"kind": "text"},
}
IMAGE_METHODS = [
    "BlurPool",
    "ColOut",
    "CutMix",
    "CutOut",
    "EMA",
    "GhostBatchNorm",
    "GradientClipping",
    "LabelSmoothing",
    "MixUp",
    "ProgressiveResizing",
    "SAM",
    "SelectiveBackprop",
    "SqueezeExcite",
    "WeightStandardization",
]
OTHER_METHODS = {
    "ChannelsLast": ("images", algorithms.ChannelsLast),
    "LayerFreezing": ("images", lambda: algorithms.LayerFreezing(0.0, freeze_level=0.6, interval="1ba")),
    "SWA": ("images", lambda: algorithms.SWA(swa_start="0.2dur", swa_end="0.9dur", update_interval="1ba")),
    "GyroDropout": ("plain", algorithms.GyroDropout),
    "SeqLengthWarmup": ("text", lambda: algorithms.SeqLengthWarmup(max_seq_length=64)),
    "AttentionWindowWarmup": ("text", lambda: algorithms.AttentionWindowWarmup("3ba", 4, 16)),
    "Alibi": ("transformers", lambda: algorithms.Alibi(max_sequence_length=64)),
    "MixUpOrCutMix": ("images", algorithms.MixUpOrCutMix),
    "MuP": ("text", lambda: algorithms.MuP(base_width=16)),
    "FusedCrossEntropy": ("text", algorithms.FusedCrossEntropy),
    "LogitSoftcap": ("text", algorithms.LogitSoftcap),
    "MultiTokenPrediction": ("text", algorithms.MultiTokenPrediction),
    "QKNorm": ("text", algorithms.QKNorm),
    "SquaredReLU": ("text", algorithms.SquaredReLU),
    "DiracInit": ("images", algorithms.DiracInit),
    "UntiedHead": ("text", lambda: algorithms.UntiedHead("1ba")),
    "ValueResidual": ("text", algorithms.ValueResidual),
    "WhiteningInit": ("images", lambda: algorithms.WhiteningInit(torch.rand(8, 3, 16, 16).sin())),
    "ZLoss": ("text", algorithms.ZLoss),
    "ZeroInit": ("text", algorithms.ZeroInit),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_optimizer_ends_with_the_weights_of_the_cpu(cases, accelerator, optimizer):
    subjects, _, _ = cases
    assert_same(trained(subjects, accelerator, optimizer=optimizer), trained(subjects, "cpu", optimizer=optimizer))


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_every_setting_ends_with_the_weights_of_the_cpu(cases, accelerator, settings):
    subjects, _, _ = cases
    assert_same(trained(subjects, accelerator, **settings), trained(subjects, "cpu", **settings))


@pytest.mark.parametrize("method", [*IMAGE_METHODS, *OTHER_METHODS])
def test_every_algorithm_ends_with_the_weights_of_the_cpu(cases, accelerator, method):
    subjects, methods, _ = cases
    kind, make = OTHER_METHODS[method] if method in OTHER_METHODS else ("images", methods.IMAGE_METHODS[method])
    assert_same(trained(subjects, accelerator, kind, algorithm=make), trained(subjects, "cpu", kind, algorithm=make))


def test_every_method_for_images_is_in_the_matrix(cases):
    _, methods, _ = cases
    assert sorted(methods.IMAGE_METHODS) == sorted(IMAGE_METHODS)


@pytest.mark.parametrize("precision", ["amp_bf16", "amp_fp16"])
def test_mixed_precision_trains_close_to_float32(cases, accelerator, precision):
    subjects, _, _ = cases
    expected = trained(subjects, accelerator)
    for name, value in trained(subjects, accelerator, precision=precision).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0.03)


@pytest.mark.parametrize("save_async", [False, True], ids=["blocking", "async"])
@pytest.mark.parametrize("places", [("simulated", "cpu"), ("cpu", "simulated"), ("simulated", "simulated")], ids=str)
def test_a_checkpoint_of_one_device_is_resumed_on_another(cases, accelerator, tmp_path, places, save_async):
    subjects, _, _ = cases
    first, second = (accelerator if place == "simulated" else DeviceCPU() for place in places)
    saving = {"save_folder": str(tmp_path), "save_interval": "1ep", "save_filename": "ep{epoch}.pt"}
    expected = trained(subjects, first, max_duration="2ep", save_async=save_async, **saving)
    assert load_file(tmp_path / "ep1.pt")["state"]["model"]
    resumed = trained(subjects, second, max_duration="2ep", load_path=str(tmp_path / "ep1.pt"))
    assert_same(resumed, expected)


class Mapped(Callback):
    """Note after a batch whether a file is mapped into memory."""

    def __init__(self, path):
        self.path = path

    def batch_end(self, state, logger):
        assert all(entries["step"].device.type == "cpu" for entries in state.optimizers[0].state.values())
        gc.collect()
        self.is_mapped = str(self.path) in Path("/proc/self/maps").read_text()


@pytest.mark.filterwarnings("ignore:Mapped is not in the state_dict:UserWarning")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_a_resumed_optimizer_keeps_nothing_in_the_file(cases, accelerator, tmp_path):
    """Adam's step counts stayed in the file, so that a truncated one ended the process."""
    subjects, _, _ = cases
    saving = {"save_folder": str(tmp_path), "save_interval": "1ep", "save_filename": "ep{epoch}.pt"}
    trained(subjects, accelerator, optimizer=OPTIMIZERS["AdamW"], **saving)
    mapped = Mapped(tmp_path / "ep1.pt")
    resuming = {"load_path": str(mapped.path), "max_duration": "2ep", "callbacks": mapped}
    trained(subjects, accelerator, optimizer=OPTIMIZERS["AdamW"], **resuming)
    assert not mapped.is_mapped


def test_buffers_are_copied_by_lists_of_one_dtype(cases, accelerator, monkeypatch):
    """Lists of float32 and int64, as of BatchNorm, are copied one by one on a GPU."""
    copy_, kinds = torch._foreach_copy_, []

    def copy_and_note(to, source, *args):
        kinds.append({(each.dtype, each.device) for each in (*to, *source)})
        return copy_(to, source, *args)

    monkeypatch.setattr(torch, "_foreach_copy_", copy_and_note)
    subjects, _, _ = cases
    trained(subjects, accelerator, "images", num_batches=2)
    assert kinds
    assert all(len(kind) == 1 for kind in kinds), kinds


CALLBACKS = {
    "ActivationMonitor": lambda folder: callbacks.ActivationMonitor(interval="10ba"),
    "CheckpointSaver": lambda folder: callbacks.CheckpointSaver(str(folder), save_interval="2ba"),
    "EarlyStopper": lambda folder: callbacks.EarlyStopper("MulticlassAccuracy", "train", patience="0ba"),
    "ExportForInferenceCallback": lambda folder: callbacks.ExportForInferenceCallback(
        "export", str(folder / "model.pt2")
    ),
    "FreeOutputs": lambda folder: callbacks.FreeOutputs(),
    "Generate": lambda folder: callbacks.Generate(["w3", "w5"], "2ba", max_new_tokens=4, do_sample=True),
    "ScheduledGarbageCollector": lambda folder: callbacks.ScheduledGarbageCollector(1),
    "GradientNoiseScale": lambda folder: callbacks.GradientNoiseScale(interval=1),
    "HuggingFaceCheckpointer": lambda folder: callbacks.HuggingFaceCheckpointer(str(folder), "2ba"),
    "ImageVisualizer": lambda folder: callbacks.ImageVisualizer(interval="2ba"),
    "LRMonitor": lambda folder: callbacks.LRMonitor(),
    "LoadCheckpoint": lambda folder: callbacks.LoadCheckpoint(str(folder / "first.pt"), load_weights_only=True),
    "MLPerfCallback": lambda folder: callbacks.MLPerfCallback(
        str(folder), 0, target=0.0, exit_at_target=True, cache_clear_cmd="true"
    ),
    "MemoryMonitor": lambda folder: callbacks.MemoryMonitor(),
    "MemorySnapshot": lambda folder: callbacks.MemorySnapshot(folder=str(folder)),
    "NaNMonitor": lambda folder: callbacks.NaNMonitor(),
    "OOMObserver": lambda folder: callbacks.OOMObserver(folder=str(folder)),
    "OptimizerMonitor": lambda folder: callbacks.OptimizerMonitor(),
    "KubeflowProgress": lambda folder: callbacks.KubeflowProgress(),
    "RuntimeEstimator": lambda folder: callbacks.RuntimeEstimator(),
    "SpeedMonitor": lambda folder: callbacks.SpeedMonitor(window_size=2),
    "SyncMonitor": lambda folder: callbacks.SyncMonitor(),
    "SystemMetricsMonitor": lambda folder: callbacks.SystemMetricsMonitor(),
    "ThresholdStopper": lambda folder: callbacks.ThresholdStopper("MulticlassAccuracy", "eval", 0.0),
    "ConsoleLogger": lambda folder: loggers.ConsoleLogger(log_interval="1ba"),
    "FileLogger": lambda folder: loggers.FileLogger(filename=str(folder / "log.txt")),
    "InMemoryLogger": lambda folder: loggers.InMemoryLogger(),
    "MLFlowLogger": lambda folder: loggers.MLFlowLogger(tracking_uri=(folder / "runs").as_uri()),
    "ProgressBarLogger": lambda folder: loggers.ProgressBarLogger(stream=io.StringIO()),
    "RemoteUploaderDownloader": lambda folder: loggers.RemoteUploaderDownloader(folder.as_uri()),
    "TensorboardLogger": lambda folder: loggers.TensorboardLogger(log_dir=str(folder)),
}
KINDS = {
    "Generate": "transformers",
    "HuggingFaceCheckpointer": "transformers",
    "ImageVisualizer": "images",
    **dict.fromkeys(("EarlyStopper", "MLPerfCallback", "ThresholdStopper"), "classifier"),
}
ACTING = ("EarlyStopper", "LoadCheckpoint", "MLPerfCallback", "ThresholdStopper")
# They send what the outbox of MLFlowLogger sends, to services.
ALIKE = ("CometMLLogger", "MosaicMLLogger", "NeptuneLogger", "SlackLogger", "WandBLogger")


def test_every_callback_and_logger_is_in_the_matrix():
    bases = {"Logger", "LoggerDestination"}
    assert {*callbacks.__all__, *loggers.__all__} - bases - {*ALIKE} == {*CALLBACKS}


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # torch.export of torch 2.11
@pytest.mark.filterwarnings("ignore:.* only works on CUDA devices:UserWarning")
@pytest.mark.parametrize("name", CALLBACKS)
def test_a_callback_or_logger_does_on_the_device_what_it_does_on_the_cpu(cases, accelerator, tmp_path, name):
    subjects, _, _ = cases
    results = []
    for device in (accelerator, "cpu"):
        folder = tmp_path / str(len(results))
        if name == "LoadCheckpoint":
            trained(
                subjects, "cpu", num_batches=1, save_folder=str(folder), save_filename="first.pt", save_overwrite=True
            )
        folder.mkdir(exist_ok=True)
        acts = device is accelerator or name in ACTING  # others do not change the weights
        made = [CALLBACKS[name](folder)] if acts else []
        more = {"device_train_microbatch_size": 8} if name == "GradientNoiseScale" else {}
        results.append(trained(subjects, device, KINDS.get(name, "plain"), callbacks=made, **more))
    assert_same(*results)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of peft
@pytest.mark.parametrize("adapts", [False, True], ids=["whole", "LoRA"])
def test_a_model_of_transformers_ends_with_the_weights_of_the_cpu(cases, accelerator, adapts):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    subjects, _, _ = cases
    config = transformers.GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    results = []
    for device in (accelerator, "cpu"):
        torch.manual_seed(7)
        adapter = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], fan_in_fan_out=True)
        model = HuggingFaceModel(transformers.GPT2LMHeadModel(config), peft_config=adapter if adapts else None)
        # Adam would enlarge the rounding of gradients that are zero in exact arithmetic.
        optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
        with (
            sdpa_kernel(SDPBackend.MATH),
            subjects.make_trainer(model, subjects.make_sentences(3), device, optimizers=optimizer) as trainer,
        ):
            trainer.fit()
            results.append({name: value.cpu() for name, value in model.state_dict().items()})
    assert_same(*results)


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # torch.export of torch 2.11
@pytest.mark.parametrize("save_format", ["torchscript", "export", "onnx"])
def test_a_model_is_exported_for_the_cpu(cases, accelerator, tmp_path, save_format):
    subjects, _, _ = cases
    (batch,) = subjects.make_batches(1)
    path = str(tmp_path / "model")
    with subjects.make_trainer(subjects.make_network(), [batch], accelerator) as trainer:
        trainer.fit()
        trainer.export_for_inference(save_format, path, sample_input=batch)
        (expected,) = trainer.predict([batch])
    if save_format == "onnx":
        import onnx.reference

        (found,) = onnx.reference.ReferenceEvaluator(path).run(None, {"input": batch[0].numpy()})
        torch.testing.assert_close(torch.from_numpy(found), expected.cpu())
        return
    exported = torch.jit.load(path) if save_format == "torchscript" else torch.export.load(path).module()
    torch.testing.assert_close(exported(batch), expected.cpu(), rtol=0, atol=0)


def test_evaluation_and_prediction_are_those_of_the_cpu(cases, accelerator):
    subjects, _, waits = cases
    results = []
    for device in (accelerator, "cpu"):
        model = waits._metrics_model()
        evaluator = Evaluator(label="eval", dataloader=subjects.make_batches(2), device_eval_microbatch_size=32)
        with subjects.make_trainer(model, subjects.make_batches(4), device, eval_dataloader=evaluator) as trainer:
            trainer.fit()
            (outputs,) = trainer.predict(subjects.make_batches(1))
            accuracy = trainer.state.eval_metrics["eval"]["MulticlassAccuracy"].compute().item()
            results.append((accuracy, outputs.cpu()))
    (accuracy, outputs), (expected_accuracy, expected_outputs) = results
    assert accuracy == expected_accuracy
    assert outputs.equal(expected_outputs)


@pytest.mark.filterwarnings("ignore:.*'auto' is experimental:UserWarning", "ignore:A batch ran out of memory")
def test_auto_microbatching_finds_a_size_that_fits_the_memory(cases):
    subjects, _, _ = cases
    dataset = TensorDataset(*subjects.make_batches(1, 4096)[0])
    sizes, peaks, weights = [], [], []
    for memory_bytes in (2**30, 3_000_000):
        torch.manual_seed(7)
        with SimulatedAccelerator(memory_bytes=memory_bytes, shares_cpu_generator=True) as accelerator:
            model, batches = subjects.make_network(), subjects.make_batches(1)
            with subjects.make_trainer(
                model,
                batches,
                accelerator,
                train_dataloader=DataLoader(dataset, batch_size=2048),
                device_train_microbatch_size="auto",
            ) as trainer:
                trainer.fit()
            sizes.append(trainer.state.device_train_microbatch_size)
            peaks.append(torch.accelerator.max_memory_allocated())
            weights.append({name: value.cpu() for name, value in model.state_dict().items()})
    assert sizes[1] < sizes[0] == 2048
    assert peaks[1] <= 3_000_000 < peaks[0]
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-4, atol=1e-5)  # sums in another order


class FiniteWeights(Callback):
    """Check the weights before they are evaluated."""

    def eval_start(self, state, logger):
        assert all(parameter.isfinite().all() for parameter in state.model.parameters())


@pytest.mark.parametrize("action", ["raise", "skip", "rollback"])
def test_a_bad_batch_is_found_though_its_result_arrives_late(cases, accelerator, action):
    subjects, _, _ = cases
    batches = subjects.make_batches(8)
    batches[5][0][0, 0] = torch.nan
    results = []
    for device in (accelerator, "cpu"):
        model = subjects.make_network()
        evaluator = Evaluator(label="eval", dataloader=subjects.make_batches(1), device_eval_microbatch_size=32)
        with subjects.make_trainer(
            model,
            copy.deepcopy(batches),
            device,
            on_divergence=action,
            eval_dataloader=evaluator,
            eval_interval="2ba",
            callbacks=FiniteWeights(),
        ) as trainer:
            if action == "raise":
                with pytest.raises(RuntimeError, match="Batch 5 of epoch 0"):
                    trainer.fit()
            else:
                trainer.fit()
            assert [each.batch for each in trainer.divergences] == [5]
            results.append({name: value.cpu() for name, value in model.state_dict().items()})
    if action != "raise":  # the weights of the batch are not kept then
        assert_same(*results)


# Rows of the check for real GPUs in one process; `compiled` has no simulation.
ROWS = [
    *IMAGE_METHODS,
    "AdamW",
    "AdamW, fused",
    "SGD",
    "Adagrad",
    "RAdam",
    "DecoupledAdamW",
    "DecoupledSGDW",
    "Muon",
    "two optimizers",
    "NAdam",
    "RMSprop",
    "Adamax",
    "Adadelta",
    "Rprop",
    "DecoupledAdamW, skip",
    "DecoupledAdamW, amp_fp16",
    "DecoupledSGDW, amp_fp16",
    "AdamW, skip",
    "AdamW fused, skip",
    "AdamW, spike_factor",
    "AdamW, rollback",
    "progress bar",
    "ConsoleLogger, every 2",
    "InMemoryLogger",
    "torchmetrics, progress bar",
    "4 microbatches",
    "amp_bf16",
    "amp_fp16",
    "AdamW, amp_fp16",
    "GPT",
    "bfloat16 weights",
    "clipping by norm",
    "clipping by value",
    "clipping by adaptive",
    "ChannelsLast",
    "LayerFreezing",
    "SWA",
    "Factorize",
    "NoOpModel",
    "GyroDropout",
    "SeqLengthWarmup",
    "LowPrecisionLayerNorm",
    "Alibi",
    "MuP",
    "asynchronous save, every batch",
    "EarlyStopper, every batch",
    "ThresholdStopper, every batch",
    "SpeedMonitor",
    "LRMonitor",
    "MemoryMonitor",
    "NaNMonitor",
    "RuntimeEstimator",
    "OptimizerMonitor",
    "ActivationMonitor",
    "SystemMetricsMonitor",
]


@pytest.fixture
def count(cases, monkeypatch):
    """Return the lines at which the steps of a row wait, and how often they may."""
    _, _, waits = cases
    monkeypatch.setattr(waits, "WARM_UP", 4)
    monkeypatch.setattr(waits, "COUNTED", 2)

    def count(row):
        with SimulatedAccelerator() as accelerator:
            return waits.make_rows()[row](accelerator), 2 * waits.ALLOWED.get(row, 0.0)

    return count


@pytest.mark.filterwarnings("ignore:interval=:UserWarning")
@pytest.mark.parametrize("row", ROWS)
def test_a_step_waits_for_the_device_no_more_than_it_may(count, row):
    lines, allowed = count(row)
    assert sum(lines.values()) == allowed, lines


def test_every_row_without_several_ranks_is_counted(cases):
    _, _, waits = cases
    assert {row for row in waits.make_rows() if "FSDP" not in row and row != "compiled"} == set(ROWS)


FSDP = {"parallelism_config": {"fsdp": {}}}
SPLIT = {"model.blocks.*.mlp.0": ColwiseParallel(), "model.blocks.*.mlp.2": RowwiseParallel()}
ON_RANKS = {
    "DDP": {"device_train_microbatch_size": 4},
    "FSDP": FSDP,
    "FSDP, clipping": {**FSDP, "device_train_microbatch_size": 4, "algorithms": GradientClipping("norm", 0.1)},
    "FSDP, offloaded": {"parallelism_config": {"fsdp": {"cpu_offload": True}}},
    "FSDP, TP": {"parallelism_config": {"fsdp": {}, "tp": {"tensor_parallel_degree": 2, "layer_plan": SPLIT}}},
}
ROWS_ON_RANKS = [
    "AdamW",
    "4 microbatches",
    "amp_fp16",
    "progress bar",
    "GPT, FSDP",
    "GPT, FSDP, amp_bf16",
    "GPT, FSDP, amp_fp16",
    "clipping by norm, FSDP",
]


class LargeScale(Callback):
    """Makes the first steps in float16 overflow."""

    def fit_start(self, state, logger):
        state.scaler.load_state_dict({**state.scaler.state_dict(), "scale": 2.0**40})


def weights_on_a_rank(device, settings):
    """Return the whole weights of a GPT after training on some ranks."""
    from gpu_cases import subjects

    model = subjects.make_gpt(emb_pdrop=0.0)
    # As fused on both devices: otherwise one counts steps on the host, and divides in float64.
    settings = {"optimizers": torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), **copy.deepcopy(settings)}
    with (
        sdpa_kernel(SDPBackend.MATH),
        subjects.make_trainer(model, subjects.make_sentences(3), device, **settings) as trainer,
    ):
        trainer.fit()
        weights = trainer.strategy.model_state_dict(trainer.state.model)
        return {name: value.cpu() for name, value in weights.items()}


def distance(found, expected):
    return max((found[name] - value).abs().max().item() for name, value in expected.items())


def compare_on_a_rank(tools, folder):
    """Return how far the weights of each kind of training are from the CPU's, and where its steps wait."""
    sys.path.insert(0, tools)
    from gpu_cases import waits

    waits.WARM_UP, waits.COUNTED = 4, 2
    distances, lines = {}, {}
    sharded = {"parallelism_config": {"fsdp": {"state_dict_type": "sharded"}}}
    saving = {**sharded, "save_interval": "2ba", "save_async": True}
    resuming = {**sharded, "load_path": f"{folder}/cpu/ep0-ba2"}
    overflowing = {"precision": "amp_fp16", "callbacks": LargeScale()}
    for name, settings in ON_RANKS.items():
        expected = weights_on_a_rank("cpu", settings)
        with SimulatedAccelerator(shares_cpu_generator=True) as accelerator:
            distances[name] = distance(weights_on_a_rank(accelerator, settings), expected)
    expected = weights_on_a_rank("cpu", {**saving, "save_folder": f"{folder}/cpu"})
    with SimulatedAccelerator(shares_cpu_generator=True) as accelerator:
        distances["saved"] = distance(weights_on_a_rank(accelerator, {**saving, "save_folder": folder}), expected)
        distances["resumed from the CPU"] = distance(weights_on_a_rank(accelerator, resuming), expected)
        overflown = weights_on_a_rank(accelerator, {**FSDP, **overflowing})
        offloaded = weights_on_a_rank(accelerator, {**ON_RANKS["FSDP, offloaded"], **overflowing})
        distances["offloaded, with overflows"] = distance(offloaded, overflown)
    resuming["load_path"] = f"{folder}/ep0-ba2"
    distances["resumed on the CPU"] = distance(weights_on_a_rank("cpu", resuming), expected)
    rows = waits.make_rows()
    for row in ROWS_ON_RANKS:
        with SimulatedAccelerator() as accelerator:
            lines[row] = dict(rows[row](accelerator))
    return distances, lines


@pytest.mark.slow
def test_ranks_end_with_the_weights_of_the_cpu_and_their_steps_never_wait(root, tmp_path):
    folders = str(root / "tools"), str(tmp_path / "saved")
    for distances, lines in run_ranks(compare_on_a_rank, *folders, store=tmp_path / "store", timeout_s=480):
        assert distances == dict.fromkeys(distances, 0.0)
        assert not any(lines.values()), lines


class Draws(nn.Module):
    def __init__(self):
        super().__init__()
        self.drawn = []

    def forward(self, inputs):
        self.drawn.append(torch.rand(1, device=inputs.device).item())
        return inputs


def test_both_passes_of_sam_draw_the_same_numbers_on_the_device(cases):
    """Only the generators of the CPU and of CUDA were set back."""
    subjects, _, _ = cases
    draws = Draws()
    with SimulatedAccelerator() as accelerator:
        network, sam = nn.Sequential(draws, subjects.make_network()), algorithms.SAM()
        with subjects.make_trainer(network, subjects.make_batches(2), accelerator, algorithms=sam) as trainer:
            trainer.fit()
    assert draws.drawn[0::2] == draws.drawn[1::2]
    assert len(set(draws.drawn)) == 2


class Reads(Callback):
    def after_loss(self, state, logger):
        state.loss.item()


def test_a_line_that_waits_is_named(cases, accelerator):
    subjects, _, _ = cases
    with accelerator.counting() as counts:
        trained(subjects, accelerator, callbacks=Reads(), num_batches=3)
    (place,) = [place for place in counts.synchronizations if __file__ in place and "after_loss" in place]
    assert counts.synchronizations[place] == 3

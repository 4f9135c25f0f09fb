"""`device_train_microbatch_size='auto'`: what does not fit is cut finer on all ranks, as if from the start.

Memory is that of a device which this file makes up: a CPU that calls itself a GPU, and says that it is out of memory
wherever a microbatch has more samples than fit.
"""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer import Trainer
from composer.core import Callback, DataSpec
from composer.models import ComposerModel
from composer.utils import dist
from composer_algorithms.sam import SAMOptimizer
from composer_dist.devices import DeviceCPU
from composer_dist.testing import run_ranks

PLACES = ("before the forward pass", "forward", "backward", "after the batch", "step", "second step")
FITS = 2  # samples


class SmallDevice(DeviceCPU):
    """Memory for a few samples, on some ranks from some batch on."""

    name = "gpu"

    def __init__(self, place=None, ranks=(0,), from_batch=0):
        super().__init__()
        self.place, self.ranks, self.from_batch = place, ranks, from_batch
        self.batch = 0
        self.samples = 0  # of the latest microbatch

    def use(self, place):
        is_short = self.batch >= self.from_batch and dist.get_global_rank() in self.ranks
        if place == self.place and is_short and self.samples > FITS:
            raise torch.OutOfMemoryError("CUDA out of memory.")


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, device):
        ctx.device = device
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.device.use("backward")
        return gradient, None


class Network(nn.Module):
    """All that an attempt can leave behind: gradients, running statistics and draws of random numbers."""

    def __init__(self, device):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.device = device

    def forward(self, inputs):
        self.device.samples = len(inputs)
        hidden = self.norm(nn.functional.dropout(self.first(inputs), 0.25, self.training))
        if self.training:
            self.device.use("forward")
            hidden = _Backward.apply(hidden, self.device)
        return self.last(hidden.relu())


class HalfAdam(torch.optim.AdamW):
    """Runs out of memory when half of the parameters have moved, and their state is there."""

    def __init__(self, parameters, device):
        super().__init__([{"params": [p]} for p in parameters], lr=0.05)
        self.device = device

    def step(self, closure=None):
        groups = self.param_groups
        self.param_groups = groups[: len(groups) // 2]
        super().step()
        self.param_groups = groups[len(groups) // 2 :]
        try:
            self.device.use("step")
            super().step()
        finally:
            self.param_groups = groups
        self.device.use("second step")


class Uses(Callback):
    """Needs memory on two events, and tells the device which batch it is."""

    def __init__(self, device):
        self.device = device
        self.attempts = []

    def batch_start(self, state, logger):
        self.device.batch = int(state.timestamp.batch)

    def before_train_batch(self, state, logger):
        self.attempts.append(int(state.timestamp.batch))

    def before_forward(self, state, logger):
        self.device.samples = len(state.batch[0])
        self.device.use("before the forward pass")

    def after_train_batch(self, state, logger):
        self.device.use("after the batch")


def make_trainer(device, make_optimizer=HalfAdam, make_network=Network, **settings):
    torch.manual_seed(7)
    network = make_network(device)
    model = ComposerModel.from_module(network, nn.functional.cross_entropy)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(48, 3, generator=generator), torch.randint(2, (48,), generator=generator))
    loader = DataLoader(data, batch_size=8, sampler=dist.get_sampler(data))
    settings = {"train_dataloader": loader, "max_duration": "4ba", "callbacks": Uses(device), **settings}
    return Trainer(
        model=model,
        optimizers=make_optimizer(model.parameters(), device),
        device=device,
        precision="fp32",
        progress_bar=False,
        seed=3,
        **settings,
    )


def train(device, size, *further_sizes, **settings):
    """Train 4 batches with a size, or 2 with each of two sizes, and return what came of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is experimental|.*microbatch size will be decreased")
        with make_trainer(device, device_train_microbatch_size=size, **settings) as trainer:
            trainer.fit(duration="2ba" if further_sizes else None)
            for further in further_sizes:
                trainer.fit(duration="2ba", device_train_microbatch_size=further)
            state = trainer.state
            entries = [entries.values() for entries in state.optimizers[0].state.values()]
            return {
                "weights": [value.clone() for value in state.model.state_dict().values()],
                "optimizer": [
                    value.clone() for values in entries for value in values if isinstance(value, torch.Tensor)
                ],
                "draw": torch.rand(1),
                "size": state.device_train_microbatch_size,
                "attempts": next(one.attempts for one in state.callbacks if isinstance(one, Uses)),
                "losses": {name: value.clone() for name, value in state.total_loss_dict.items()},
            }


def assert_same_training(one, other, **tolerances):
    for name in ("weights", "optimizer", "draw", "losses"):
        tolerances = {"rtol": 0, "atol": 0, **tolerances}
        torch.testing.assert_close(one[name], other[name], **tolerances, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("place", PLACES)
def test_what_does_not_fit_is_trained_on_as_if_it_had_been_cut_from_the_start(place):
    found = train(SmallDevice(place), "auto")

    assert found["size"] == FITS
    assert found["attempts"] == [0, 0, 0, 1, 2, 3]  # with 8, 4 and 2 samples, and then with 2
    assert_same_training(found, train(SmallDevice(), FITS))


@pytest.mark.parametrize("place", PLACES)
def test_memory_that_runs_out_later_changes_the_size_from_that_batch_on(place):
    found = train(SmallDevice(place, from_batch=2), "auto")

    assert found["attempts"] == [0, 1, 2, 2, 2, 3]
    assert_same_training(found, train(SmallDevice(), 8, FITS))


CASES = [*((place, (1,), 0) for place in PLACES), ("step", (0,), 2), ("backward", (0, 1), 0)]
CASES += [("second step", (0, 1), 2), ("forward", (1,), 2), ("after the batch", (0,), 2)]


def train_all_cases(cases, make_optimizer):
    """Return for each case what was found, and the same training with the sizes given."""
    given = {
        from_batch: train(SmallDevice(), *sizes, make_optimizer=make_optimizer)
        for from_batch, sizes in ((0, [FITS]), (2, [8, FITS]))
    }
    found = [train(SmallDevice(*case), "auto", make_optimizer=make_optimizer) for case in cases]
    return [(one, given[from_batch]) for one, (_, _, from_batch) in zip(found, cases, strict=True)]


@pytest.fixture(scope="module")
def trained_on_two_ranks(tmp_path_factory):
    """All cases in one pair of processes, as these take longest to start."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    of_ranks = run_ranks(train_all_cases, CASES, HalfAdam, store=store, timeout_s=120)
    return dict(zip(CASES, zip(*of_ranks, strict=True), strict=True))


@pytest.mark.slow  # the first one trains for all of them
@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_ranks_follow_the_one_that_runs_out_of_memory(trained_on_two_ranks, case):
    for found, given in trained_on_two_ranks[case]:
        assert found["size"] == FITS
        assert len(found["attempts"]) == 6
        assert_same_training(found, given)


class HungrySAM(SAMOptimizer):
    """Needs memory after each of its calls of the closure, and at the end."""

    def __init__(self, parameters, device):
        super().__init__(torch.optim.SGD(parameters, lr=0.05, momentum=0.9), rho=0.1)
        self.device = device

    def _ascend(self):
        super()._ascend()
        self.device.use("step")

    def step(self, closure):
        loss = super().step(closure)
        self.device.use("second step")
        return loss


@pytest.mark.slow
def test_an_optimizer_that_evaluates_the_loss_itself_is_repeated_too(tmp_path):
    cases = [(place, (1,), from_batch) for place in ("backward", "step", "second step") for from_batch in (0, 2)]
    of_ranks = run_ranks(train_all_cases, cases, HungrySAM, store=tmp_path / "store", timeout_s=120)

    for of_rank in of_ranks:
        for found, given in of_rank:
            assert found["size"] == FITS
            assert_same_training(found, given)


class SmallNetwork(Network):
    """Without running statistics, which are each rank's own here."""

    def __init__(self, device):
        super().__init__(device)
        self.norm = nn.Identity()


def train_sharded(places):
    settings = {"make_network": SmallNetwork, "parallelism_config": {"fsdp": {}}}
    given = train(SmallDevice(), FITS, **settings)
    found = [train(SmallDevice(place, (1,)), "auto", **settings) for place in places]
    for one in (given, *found):
        one["weights"] = [weight.full_tensor() for weight in one["weights"]]
        one["optimizer"] = []
    return found, given


@pytest.mark.slow
def test_ranks_with_shards_of_the_model_follow_too(tmp_path):
    places = ("forward", "backward", "step", "second step")

    for found_of_places, given in run_ranks(train_sharded, places, store=tmp_path / "store", timeout_s=120):
        for found in found_of_places:
            assert found["attempts"] == [0, 0, 0, 1, 2, 3]
            assert_same_training(found, given)


def test_the_sizes_are_told_once_each():
    with (
        pytest.warns(UserWarning, match="device_train_microbatch_size='auto' is experimental"),
        make_trainer(SmallDevice("forward"), device_train_microbatch_size="auto") as trainer,
        pytest.warns(RuntimeWarning) as warned,
    ):
        trainer.fit()
    assert [str(one.message) for one in warned] == [
        "A batch ran out of memory. Train microbatch size will be decreased from 8 to 4.",
        "A batch ran out of memory. Train microbatch size will be decreased from 4 to 2.",
    ]


@pytest.mark.filterwarnings("ignore:.*is experimental|.*microbatch size will be decreased")
class TestEnds:
    def test_a_single_sample_that_does_not_fit_is_an_error(self, monkeypatch):
        monkeypatch.setattr(f"{__name__}.FITS", 0)
        with (
            make_trainer(SmallDevice("before the forward pass"), device_train_microbatch_size="auto") as trainer,
            pytest.raises(RuntimeError, match=r"ran out of memory.*single sample.*smaller model"),
        ):
            trainer.fit()

    @pytest.mark.parametrize(
        ("error", "raised"),
        [
            (RuntimeError("CUDA error: out of memory"), None),
            (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if ..."), None),
            (RuntimeError("c10::Error"), "Encountered non-addressable cuda error while using auto"),
            (RuntimeError("sizes differ"), "sizes differ"),
            (ValueError("CUDA out of memory"), "CUDA out of memory"),
        ],
    )
    def test_only_a_lack_of_memory_is_repeated(self, monkeypatch, error, raised):
        device = SmallDevice("forward")

        def use(place):
            if place == "forward" and device.samples > FITS:
                raise error

        device.use = use
        with make_trainer(device, device_train_microbatch_size="auto") as trainer:
            if raised is None:
                trainer.fit()
                assert trainer.state.device_train_microbatch_size == FITS
            else:
                with pytest.raises(type(error), match=raised):
                    trainer.fit()

    def test_the_size_that_was_found_stays_for_the_next_fit_and_not_for_other_data(self):
        device = SmallDevice("forward")
        with make_trainer(device, device_train_microbatch_size="auto", max_duration="1ba") as trainer:
            trainer.fit()
            device.ranks = ()  # now everything fits
            trainer.fit(duration="1ba")
            assert trainer.state.device_train_microbatch_size == FITS
            data = TensorDataset(torch.zeros(12, 3), torch.zeros(12, dtype=torch.long))
            trainer.fit(duration="1ba", train_dataloader=DataLoader(data, batch_size=6))
            assert trainer.state.device_train_microbatch_size == 6

    def test_counters_of_composer_are_there(self):
        with make_trainer(SmallDevice("forward"), device_train_microbatch_size="auto") as trainer:
            trainer.fit()
            assert trainer.num_consecutive_non_OOM_batches == 4
            assert trainer.num_consecutive_thrashes == trainer.cumulative_alloc_retries == 0


def test_out_of_memory_with_a_size_that_was_given_names_the_size():
    with (
        make_trainer(SmallDevice("forward"), device_train_microbatch_size=4) as trainer,
        pytest.raises(torch.OutOfMemoryError) as error,
    ):
        trainer.fit()
    assert any(
        "device_train_microbatch_size=4; give a smaller one, or 'auto'" in note for note in error.value.__notes__
    )


@pytest.mark.filterwarnings("ignore:.*is experimental:UserWarning")
def test_a_profiler_would_record_what_failed():
    with make_trainer(SmallDevice(), device_train_microbatch_size=4) as trainer:
        trainer.state.profiler = object()
        with pytest.raises(ValueError, match="'auto' is not compatible with the profiler"):
            trainer.fit(device_train_microbatch_size="auto")
        trainer.state.profiler = None


def test_a_dataloader_must_say_where_to_begin():
    with (
        pytest.warns(UserWarning, match="is experimental"),
        pytest.raises(AttributeError, match=r"begins with the `batch_size` of train_dataloader.*list"),
    ):
        make_trainer(SmallDevice(), train_dataloader=[], device_train_microbatch_size="auto")


def test_a_sample_that_ranks_share_cannot_be_cut():
    data = TensorDataset(torch.zeros(4, 3), torch.zeros(4, dtype=torch.long))
    spec = DataSpec(DataLoader(data, batch_size=4))
    spec.seq_parallel_world_size = 2
    with (
        pytest.warns(UserWarning, match="is experimental"),
        pytest.raises(ValueError, match=r"'auto' cannot be combined with.*seq_parallel_world_size=2"),
    ):
        make_trainer(SmallDevice(), train_dataloader=spec, device_train_microbatch_size="auto")


@pytest.mark.parametrize("argument", ["device_train_microbatch_size", "grad_accum"])
@pytest.mark.filterwarnings("ignore:grad_accum:DeprecationWarning")
def test_a_cpu_has_no_memory_to_run_out_of(argument):
    with pytest.raises(ValueError, match=f"Can only use adaptive {argument} on GPU.*'cpu'"):
        make_trainer(DeviceCPU(), lambda parameters, device: None, **{argument: "auto"})

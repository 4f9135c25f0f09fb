import pytest
import torch

from composer_dist import dist
from composer_dist.ddp import average_gradients, average_values, broadcast_tensors, sum_counts
from composer_dist.testing import run_ranks

SHAPES = [(), (3, 2), (5,), (4, 1), (2,)]
UNUSED_EVERYWHERE, UNUSED_ON_RANK_1 = 3, 1


def make_parameters():
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    parameters[2].data = parameters[2].data.bfloat16()
    parameters.append(torch.nn.Parameter(torch.zeros(2), requires_grad=False))
    return parameters


def gradients_of(rank):
    """What each rank computed: small integers, which every dtype here holds exactly."""
    gradients = [torch.arange(parameter.numel()).reshape(parameter.shape) + 4 * rank for parameter in make_parameters()]
    return [
        None
        if index in (UNUSED_EVERYWHERE, len(SHAPES)) or (index == UNUSED_ON_RANK_1 and rank == 1)
        else gradient.to(parameter.dtype)
        for index, (gradient, parameter) in enumerate(zip(gradients, make_parameters(), strict=True))
    ]


class CountedReductions:
    def __init__(self):
        self.number = 0
        self._all_reduce = torch.distributed.all_reduce

    def __enter__(self):
        def all_reduce(*args, **kwargs):
            self.number += 1
            return self._all_reduce(*args, **kwargs)

        torch.distributed.all_reduce = all_reduce
        return self

    def __exit__(self, *error):
        torch.distributed.all_reduce = self._all_reduce


def averages():
    rank = dist.get_global_rank()
    by_bucket = {}
    for bucket_bytes in (1, 32, 2**20):
        parameters = make_parameters()
        for parameter, gradient in zip(parameters, gradients_of(rank), strict=True):
            parameter.grad = gradient
        with CountedReductions() as reductions:
            average_gradients(parameters, bucket_bytes=bucket_bytes)
        by_bucket[bucket_bytes] = (reductions.number, [parameter.grad for parameter in parameters])
    values = {"total": torch.tensor(float(rank)), "parts": torch.tensor([1.0, 3.0]).bfloat16() * rank}
    values = values if rank else dict(reversed(values.items()))
    with CountedReductions() as reductions:
        means = average_values(values)
    untouched = values["total"].item() == rank
    return by_bucket, (reductions.number, means, untouched), sum_counts([2**40 + rank, 3]), sum_counts([0.5, rank])


def broadcasts():
    rank = dist.get_global_rank()
    tensors = [
        torch.full((2, 3), float(rank)),
        torch.tensor(7 + rank),
        torch.tensor([rank == 0, True]),
        torch.arange(6.0).reshape(2, 3).t() + rank,  # not contiguous
        torch.empty(0),
    ]
    for bucket_bytes in (1, 2**20):
        copies = [tensor.clone() for tensor in tensors]
        broadcast_tensors(copies, bucket_bytes=bucket_bytes)
        yield copies


def all_broadcasts():
    return list(broadcasts())


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(averages, store=tmp_path_factory.mktemp("averaging") / "store")


@pytest.mark.parametrize("bucket_bytes", [1, 32, 2**20])
def test_gradients_become_their_mean_with_zero_for_those_that_a_rank_lacks(ranks, bucket_bytes):
    mine, theirs = gradients_of(0), gradients_of(1)
    for by_bucket, *_ in ranks:
        _, gradients = by_bucket[bucket_bytes]
        for index, gradient in enumerate(gradients):
            if mine[index] is None and theirs[index] is None:
                assert gradient is None
            else:
                expected = sum(part for part in (mine[index], theirs[index]) if part is not None) / 2
                torch.testing.assert_close(gradient, expected, rtol=0, atol=0)


def test_a_bucket_is_one_collective_for_each_dtype(ranks):
    for by_bucket, *_ in ranks:
        assert by_bucket[1][0] == 5  # one for each trainable parameter
        assert by_bucket[2**20][0] == 2  # float32 and bfloat16


def test_values_become_their_mean_by_way_of_one_collective(ranks):
    for rank, (_, (reductions, means, untouched), *_) in enumerate(ranks):
        assert reductions == 1
        assert untouched
        assert list(means) == (["total", "parts"] if rank else ["parts", "total"])
        assert means["total"].item() == 0.5
        torch.testing.assert_close(means["parts"], torch.tensor([0.5, 1.5]).bfloat16(), rtol=0, atol=0)


def test_counts_are_summed_and_stay_what_they_are(ranks):
    for rank, (*_, integers, mixed) in enumerate(ranks):
        assert integers == [2 * 2**40 + 1, 6]
        assert all(isinstance(number, int) for number in integers)
        assert mixed == [1.0, 1]
        assert [type(number) for number in mixed] == [float, int], rank


def test_no_values_need_no_collective():
    assert average_values({}) == {}


def test_tensors_become_those_of_the_first_rank(tmp_path):
    first, second = run_ranks(all_broadcasts, store=tmp_path / "store")

    for copies in (*first, *second):
        assert [copy.tolist() for copy in copies] == [
            [[0, 0, 0], [0, 0, 0]],
            7,
            [True, True],
            [[0, 3], [1, 4], [2, 5]],
            [],
        ]

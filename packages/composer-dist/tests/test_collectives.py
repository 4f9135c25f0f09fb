import pytest
import torch
import torch.distributed as tdist

from composer_dist import dist
from composer_dist.ddp import average_values, start_gather
from composer_dist.testing import run_ranks

CALLS = {
    "barrier": lambda: dist.barrier(),
    "all_reduce": lambda: dist.all_reduce(torch.ones(2)),
    "broadcast": lambda: dist.broadcast(torch.ones(2), src=0),
    "broadcast_object_list": lambda: dist.broadcast_object_list([1]),
    "all_gather": lambda: dist.all_gather(torch.ones(2)),
    "all_gather_object": lambda: dist.all_gather_object("x"),
    "all_gather_object_list_hpu": lambda: dist.all_gather_object_list_hpu([None], "x"),
}


@pytest.mark.parametrize("call", CALLS)
def test_several_processes_without_a_group_are_an_error(call, environ):
    environ["WORLD_SIZE"] = "2"
    message = "the world size is 2, but the distributed package is not available or has not been initialized"
    with pytest.raises(RuntimeError, match=message):
        CALLS[call]()


@pytest.mark.parametrize("call", CALLS)
def test_functions_ask_torch_anew_at_every_call(call, environ, group_of_one, monkeypatch):
    CALLS[call]()
    environ["WORLD_SIZE"] = "2"
    monkeypatch.setattr("composer_dist.dist.dist.is_initialized", lambda: False)
    with pytest.raises(RuntimeError, match="has not been initialized"):
        CALLS[call]()


@pytest.mark.parametrize("grouped", [False, True])
def test_a_process_that_is_alone_gets_its_own_back(grouped, request):
    if grouped:
        request.getfixturevalue("group_of_one")
    tensor, thing = torch.tensor([1.0, 2.0]), object()
    dist.barrier()
    dist.all_reduce(tensor, "max")
    dist.broadcast(tensor, src=0)
    things = [thing]
    dist.broadcast_object_list(things)
    assert things == [thing]
    assert dist.all_gather(tensor)[0] is tensor
    assert dist.all_gather_object(thing)[0] is thing
    assert tensor.tolist() == [1.0, 2.0]


def test_an_unknown_reduction_is_refused_with_those_that_exist():
    with pytest.raises(ValueError, match=r"reduce_operation='mean' is not a reduction\. Use one of SUM, PROD"):
        dist.all_reduce(torch.ones(1), "mean")


def collectives():
    rank = dist.get_global_rank()
    reduced = {}
    for operation in ("SUM", "product", "Min", "MAX", "BAND", "BOR", "BXOR"):
        tensor = torch.tensor([rank + 2, 7])
        dist.all_reduce(tensor, operation)
        reduced[operation.upper()] = tensor.tolist()
    sent, things = torch.tensor([rank]), [rank, {"rank": rank}]
    dist.broadcast(sent, src=1)
    dist.broadcast_object_list(things, src=1)
    gathered = [tensor.tolist() for tensor in dist.all_gather(torch.arange(4).reshape(2, 2).T + rank)]
    listed = [None, None]
    dist.all_gather_object_list_hpu(listed, rank)
    dist.barrier()
    return reduced, sent.item(), things, gathered, dist.all_gather_object({"rank": rank}), listed


def test_collectives_give_every_rank_the_same(tmp_path):
    first, second = run_ranks(collectives, store=tmp_path / "store")
    assert first == second
    reduced, sent, things, gathered, objects, listed = first
    # Of 2 and 3, and of 7 and 7.
    assert reduced == {
        "SUM": [5, 14],
        "PRODUCT": [6, 49],
        "MIN": [2, 7],
        "MAX": [3, 7],
        "BAND": [2, 7],
        "BOR": [3, 7],
        "BXOR": [1, 0],
    }
    assert (sent, things) == (1, [1, {"rank": 1}])
    assert gathered == [[[0, 2], [1, 3]], [[1, 3], [2, 4]]]
    assert objects == [{"rank": 0}, {"rank": 1}]
    assert listed == [0, 1]


def gather_in_groups():
    rank = dist.get_global_rank()
    outer, middle = tdist.new_group([0, 2]), tdist.new_group([1])
    mine = middle if rank == 1 else outer
    tensors = [tensor.item() for tensor in dist.all_gather(torch.tensor(rank), group=mine)]
    return tensors, dist.all_gather_object(rank, group=mine)


def test_gathering_in_a_group_gives_one_entry_for_each_of_its_ranks(tmp_path):
    outer, middle = ([0, 2], [0, 2]), ([1], [1])
    assert run_ranks(gather_in_groups, store=tmp_path / "store", world_size=3) == [outer, middle, outer]


def objects_through_a_group_for_gpus(store):
    tdist.destroy_process_group()
    rank = dist.get_global_rank()
    tdist.init_process_group("cuda:gloo", store=tdist.FileStore(store, 2), rank=rank, world_size=2)
    things = [rank]
    dist.broadcast_object_list(things, src=1)
    return things, [dist.all_gather_object(rank) for _ in range(2)]


def test_objects_do_not_go_through_the_gpu(tmp_path):
    results = run_ranks(objects_through_a_group_for_gpus, str(tmp_path / "second"), store=tmp_path / "first")
    assert results == [([1], [[0, 1], [0, 1]])] * 2


def send_from_outside_the_group():
    rank = dist.get_global_rank()
    both, last = tdist.new_group([0, 1]), tdist.new_group([2])
    messages = []
    for group, src in ((both, 2), (last, 0), (None, 3)):
        things = [rank]
        try:
            dist.broadcast_object_list(things, src=src, group=group)
            messages.append(things == [rank])
        except ValueError as error:
            messages.append(str(error))
    tdist.barrier()  # nothing else keeps a rank from leaving while another still connects to it
    return messages


def test_every_member_is_told_that_the_sender_is_none_of_them(tmp_path):
    results = run_ranks(send_from_outside_the_group, store=tmp_path / "store", world_size=3)
    of_both, of_last, of_all = (
        f"src={src} is not a rank of the group, which has the global ranks {ranks}. Pass one of them: src counts among "
        "all ranks, not inside the group."
        for src, ranks in ((2, [0, 1]), (0, [2]), (3, [0, 1, 2]))
    )
    assert results == [[of_both, True, of_all], [of_both, True, of_all], [True, of_last, of_all]]


def collectives_in_a_group_for_gpus():
    group = tdist.new_group(backend="cuda:gloo")  # as of a script that calls init_process_group("nccl")
    rank = tdist.get_rank()
    with pytest.raises(RuntimeError, match="cpu"):
        tdist.all_reduce(torch.ones(1), group=group)
    total, sent = torch.tensor([rank + 1.0]), torch.tensor([rank])
    dist.all_reduce(total, group=group)
    dist.broadcast(sent, src=1, group=group)
    rows = start_gather([torch.tensor(rank), torch.full((2,), rank, dtype=torch.bfloat16)], group)()
    mean = average_values({"rank": torch.tensor(float(rank))}, group)
    gathered = torch.cat(list(dist.all_gather(torch.tensor([rank]), group=group)))
    return total.item(), sent.item(), gathered.tolist(), [each.tolist() for each in rows], mean["rank"].item()


def test_a_group_for_gpus_carries_tensors_on_the_cpu_too(tmp_path):
    expected = (3.0, 1, [0, 1], [[0, 1], [[0.0, 0.0], [1.0, 1.0]]], 0.5)
    assert run_ranks(collectives_in_a_group_for_gpus, store=tmp_path / "store") == [expected] * 2


def gather():
    """Gather tensors of several dtypes and shapes, which change after the start."""
    rank = tdist.get_rank()
    tensors = [torch.full(shape, rank + 1, dtype=dtype) for dtype in DTYPES for shape in [(), (3,), (2, 0), (1, 2)]]
    tensors.append(torch.arange(6.0).view(2, 3).t() * (rank + 1))  # not contiguous
    expected = [torch.stack([tensor / (rank + 1) * other for other in (1, 2)]).to(tensor.dtype) for tensor in tensors]
    finish = start_gather(tensors)
    for tensor in tensors:
        tensor.zero_()
    first, again = finish(), finish()
    return all(map(torch.equal, first, expected)) and all(map(torch.equal, again, expected))


DTYPES = [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float32, torch.float64, torch.complex128]


def test_start_gather_returns_each_tensor_of_each_rank(tmp_path):
    assert run_ranks(gather, store=tmp_path / "store") == [True, True]

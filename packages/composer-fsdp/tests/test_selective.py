import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from composer_fsdp.activation import contexts_that_keep_products


class CountProducts(TorchDispatchMode):
    num_products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        self.num_products += func in (aten.mm.default, aten.bmm.default, aten.addmm.default)
        return func(*args, **(kwargs or {}))


def bias_added_in_place(inputs, weight):
    scores = torch.matmul(inputs, weight)
    scores += 1.0
    return torch.matmul(scores.sin(), weight.transpose(1, 2)).exp()


def relu_in_place(inputs, weight):
    return functional.linear(inputs, weight[0].t(), torch.ones(5)).relu_().square()


def half_of_it_doubled(inputs, weight):
    projected = functional.linear(inputs.sin(), weight[0].t())
    projected[:1].mul_(2.0)
    return projected[:1].cos() * projected[1:].sin()


def make_inputs():
    torch.manual_seed(1)
    return [torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 4, 5, requires_grad=True)]


def gradients(function, inputs):
    """The gradients, and how many matrix products the backward pass computed for them."""
    for tensor in inputs:
        tensor.grad = None
    result = function(*inputs).sum()
    with CountProducts() as counted:
        result.backward()
    return [tensor.grad for tensor in inputs], counted.num_products


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
@pytest.mark.parametrize("function", [bias_added_in_place, relu_in_place, half_of_it_doubled])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_results_that_are_changed_in_place_have_the_gradients_of_the_plain_function(function, backend):
    contexts = contexts_that_keep_products()

    def again(*inputs):
        return checkpoint(function, *inputs, use_reentrant=False, context_fn=contexts)

    again = again if backend is None else torch.compile(again, backend=backend)
    expected, _ = gradients(function, make_inputs())
    for _ in range(3):
        found, _ = gradients(again, make_inputs())
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_what_is_not_changed_is_kept_after_the_first_pass():
    contexts = contexts_that_keep_products()

    def again(*inputs):
        return checkpoint(bias_added_in_place, *inputs, use_reentrant=False, context_fn=contexts)

    _, plain = gradients(bias_added_in_place, make_inputs())
    with torch.no_grad():
        again(*make_inputs())  # is no pass that shows anything
    counts = [gradients(again, make_inputs())[1] for _ in range(3)]
    assert counts == [plain + 2, plain + 1, plain + 1]


@pytest.mark.parametrize("bias", [False, True])
def test_a_result_that_is_returned_may_be_changed_by_the_caller(bias):
    contexts = contexts_that_keep_products()
    layer = nn.Linear(4, 5, bias=bias)

    def with_its_sine(inputs):
        projected = layer(inputs)
        return projected, projected.exp().sin()

    def call(run):
        inputs = torch.ones(2, 3, 4, requires_grad=True)
        projected, sine = run(inputs)
        with torch.no_grad():
            projected.mul_(3.0)
        (projected.sum() + sine.sum()).backward()
        return inputs.grad

    expected = call(with_its_sine)
    for _ in range(3):
        found = call(lambda inputs: checkpoint(with_its_sine, inputs, use_reentrant=False, context_fn=contexts))
        assert torch.equal(found, expected)


def test_a_change_that_comes_later_only_is_told():
    contexts = contexts_that_keep_products()

    def run(inputs, weight, in_place):
        scores = torch.matmul(inputs, weight)
        scores = scores.add_(1.0) if in_place else scores + 1.0
        return scores.sin()

    def call(in_place):
        return checkpoint(run, *make_inputs(), in_place, use_reentrant=False, context_fn=contexts).sum()

    call(in_place=False).backward()
    result = call(in_place=True)
    with pytest.raises(RuntimeError, match=r"'selective' kept the result .* use activation_checkpointing=True"):
        result.backward()


def test_what_was_seen_is_copied_and_pickled_with_the_module():
    contexts = contexts_that_keep_products()
    checkpoint(bias_added_in_place, *make_inputs(), use_reentrant=False, context_fn=contexts)
    for other in (copy.deepcopy(contexts), pickle.loads(pickle.dumps(contexts))):
        _, count = gradients(
            lambda *inputs, other=other: checkpoint(
                bias_added_in_place, *inputs, use_reentrant=False, context_fn=other
            ),
            make_inputs(),
        )
        assert count == gradients(bias_added_in_place, make_inputs())[1] + 1


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_operators_of_higher_order_and_sparse_tensors_go_through_the_first_pass():
    def run(inputs, weight):
        attended = flex_attention(*[inputs.detach()[None]] * 3)
        identity = torch.eye(3).to_sparse()
        return torch.matmul(torch.sparse.mm(identity, inputs[0]) + attended[0, 0], weight).exp()

    def gradients_of(function):  # the mode that counts products is in the way of flex_attention
        inputs = make_inputs()
        function(*inputs).sum().backward()
        return [tensor.grad for tensor in inputs]

    contexts = contexts_that_keep_products()
    expected = gradients_of(run)
    for _ in range(2):
        found = gradients_of(lambda *inputs: checkpoint(run, *inputs, use_reentrant=False, context_fn=contexts))
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from composer_fsdp.activation import apply_ac, contexts_that_keep_products


class CountProducts(TorchDispatchMode):
    num_products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        self.num_products += func in (aten.mm.default, aten.bmm.default, aten.addmm.default)
        return func(*args, **(kwargs or {}))


def attend(inputs, weight):
    return torch.matmul(torch.matmul(inputs, weight).sin(), weight.transpose(1, 2)).exp()


def make_inputs():
    torch.manual_seed(1)
    return [torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 4, 5, requires_grad=True)]


def gradients(function, inputs):
    """The gradients, and how many matrix products the backward pass computed for them."""
    result = function(*inputs).sum()
    with CountProducts() as counted:
        result.backward()
    return [tensor.grad for tensor in inputs], counted.num_products


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_gradients_are_those_of_the_plain_function_without_another_product(backend):
    contexts = contexts_that_keep_products()

    def again(*inputs):
        return checkpoint(attend, *inputs, use_reentrant=False, context_fn=contexts)

    again = again if backend is None else torch.compile(again, backend=backend)
    expected, plain = gradients(attend, make_inputs())
    for _ in range(2):
        found, count = gradients(again, make_inputs())
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
        assert count == plain or backend is not None


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_that_is_changed_in_place_is_refused(bias):
    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 5, bias=bias)

        def forward(self, inputs):
            projected = self.layer(inputs)  # without a bias, a view of the product
            projected += 1.0
            return projected.sin()

    model = nn.Sequential(Changing())
    apply_ac(model, "selective", False, lambda module: isinstance(module, Changing))
    result = model(torch.ones(2, 3, 4, requires_grad=True)).sum()
    with pytest.raises(RuntimeError, match="has been mutated"):
        result.backward()
